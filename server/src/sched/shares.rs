//! Whose turn it is among sequences that were never in a slot: the first of the owner that has had least, by weight.
//!
//! Each owner has an account of tokens, divided by its weight. It is charged when a sequence enters a slot for the
//! first time: for the prompt, and for an answer as long as the owner's latest are in the mean. When the sequence
//! ends, that is set right to what was computed. Who comes back begins no lower than the last one who was served
//! stood: who rests saves nothing up. A sequence has no place before it is its turn, so nothing has to be foreseen of
//! those that wait.
//!
//! **Bound.** Two owners wait from a time on at which their accounts were equal, with sequences of equal priority.
//! Count the tokens of each one's sequences that have entered since, by its weight. The first is ahead of the second
//! by at most `e * L / w + e' * L / w'`: `L` is the most that a sequence may take, prompt and answer; `w`, `w'` are
//! the weights; `e`, `e'` are how many sequences of each had entered and not ended when the first's last entered, that
//! one included. For its account was not above the other's then, but for that sequence; accounts and tokens differ by
//! the sequences that have not ended, each by `L / w` at most; and since then only the second has entered. Random runs
//! are held to it in `tests/fairness.rs`.
//!
//! **Priority.** A step of priority is worth [`PRIORITY_TOKENS`]: between owners their accounts are compared as though
//! they had had so much less, and of one owner a sequence goes before those that came up to so many of its tokens
//! earlier. So who waits gains urgency, and is overtaken by those `d` steps better until their owner has had `d *
//! PRIORITY_TOKENS * w` tokens more. A sequence takes one at least: nobody waits for ever.

use std::collections::BTreeMap;
use std::sync::Arc;

/// Tokens, of an owner of weight 1, that a step of priority is worth.
pub const PRIORITY_TOKENS: u64 = 65_536;
/// Priorities that a request may have; the lowest is first.
pub const PRIORITIES: std::ops::RangeInclusive<i32> = -100..=100;
/// Largest weight of an owner.
pub const MAX_WEIGHT: u32 = 1000;
/// An owner may take so many times as many places as are free.
const TIMES_FREE: u64 = 3;
/// A step of priority, as accounts count.
const STEP: i64 = PRIORITY_TOKENS as i64 * MAX_WEIGHT as i64;

/// Whose sequences are, and how urgent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standing {
    /// In [`PRIORITIES`]; the lowest is first.
    pub priority: i32,
    /// Among whom the server is shared. All without one are one, and may fill the queue.
    pub owner: Option<Arc<str>>,
    /// The owner's, in [1, [`MAX_WEIGHT`]].
    pub weight: u32,
}

impl Default for Standing {
    fn default() -> Self {
        Self { priority: 0, owner: None, weight: 1 }
    }
}

/// Whether an owner who has taken `own` places may take `more` of those that are free: no more than three times as many
/// as are left to others. One owner alone takes three quarters, and the next finds a quarter, of which it takes three
/// quarters.
pub fn leaves_room(own: u64, more: u64, free: u64) -> bool {
    more <= free && own + more <= most_of(free)
}

/// Places that an owner may have while so many are free.
pub(super) fn most_of(free: u64) -> u64 {
    TIMES_FREE * free
}

/// A sequence's claim to its share.
#[derive(Debug)]
pub(super) struct Claim {
    standing: Standing,
    prompt_tokens: u64,
    max_tokens: u64,
    /// Its place among those of its owner that wait.
    rank: i64,
    /// What its owner was charged for it; none before its first admission.
    charged: Option<i64>,
}

impl Claim {
    /// Whose claim it was.
    pub(super) fn into_standing(self) -> Standing {
        self.standing
    }
}

/// Sequences that were never in a slot, and what the owners of all that have not ended have had. Accounts are in tokens
/// of weight [`MAX_WEIGHT`], to be whole numbers.
#[derive(Debug, Default)]
pub(super) struct Shares {
    owners: BTreeMap<Option<Arc<str>>, Owner>,
    /// Those who wait, by account and priority, then by the first of their sequences.
    turns: BTreeMap<(i64, u64), Option<Arc<str>>>,
    /// The highest account at which one was served.
    now: i64,
    /// Sequences that were never in a slot, and their prompt tokens.
    waiting: u64,
    waiting_tokens: u64,
    /// Sequences that have not ended.
    unfinished: u64,
}

#[derive(Debug, Default)]
struct Owner {
    account: i64,
    /// The highest that it was when a sequence came: what those that wait age by.
    clock: i64,
    /// By rank and number, with its priority.
    waiting: BTreeMap<(i64, u64), i32>,
    /// How many wait of each priority.
    priorities: BTreeMap<i32, u64>,
    waiting_tokens: u64,
    unfinished: u64,
    /// Tokens of an answer, in the mean.
    answer: u64,
    /// Its key in `turns`.
    turn: Option<(i64, u64)>,
}

impl Shares {
    /// A sequence comes.
    pub(super) fn queued(&mut self, id: u64, standing: &Standing, prompt_tokens: u64, max_tokens: u64) -> Claim {
        let now = self.now;
        let owner = self.owners.entry(standing.owner.clone()).or_default();
        if owner.waiting.is_empty() {
            owner.account = owner.account.max(now);
        }
        owner.clock = owner.clock.max(owner.account);
        let rank = owner.clock + i64::from(standing.priority) * STEP;
        owner.waiting.insert((rank, id), standing.priority);
        *owner.priorities.entry(standing.priority).or_default() += 1;
        owner.waiting_tokens += prompt_tokens;
        owner.unfinished += 1;
        self.waiting += 1;
        self.waiting_tokens += prompt_tokens;
        self.unfinished += 1;
        self.set_turn(&standing.owner);
        Claim { standing: standing.clone(), prompt_tokens, max_tokens, rank, charged: None }
    }

    /// A sequence enters a slot for the first time.
    pub(super) fn admitted(&mut self, id: u64, claim: &mut Claim) {
        self.leave(id, claim);
        let owner = self.owners.get_mut(&claim.standing.owner).expect("an owner is known while it has sequences");
        self.now = self.now.max(owner.account);
        let charge = cost(claim.prompt_tokens + owner.answer.clamp(1, claim.max_tokens), claim.standing.weight);
        owner.account += charge;
        claim.charged = Some(charge);
        self.set_turn(&claim.standing.owner);
    }

    /// A sequence ends, wherever it is, after so many tokens of its answer; `cached` of its prompt's were not computed.
    pub(super) fn ended(&mut self, id: u64, claim: &Claim, cached: u64, answer: u64) {
        if claim.charged.is_none() {
            self.leave(id, claim);
        }
        let owner = self.owners.get_mut(&claim.standing.owner).expect("an owner is known while it has sequences");
        if let Some(charged) = claim.charged {
            owner.account += cost(claim.prompt_tokens - cached + answer, claim.standing.weight) - charged;
            owner.answer = (7 * owner.answer + answer) / 8;
        }
        owner.unfinished -= 1;
        self.unfinished -= 1;
        // It would begin where the server stands in any case.
        let is_forgotten = owner.unfinished == 0 && owner.account <= self.now;
        self.set_turn(&claim.standing.owner);
        if is_forgotten {
            self.owners.remove(&claim.standing.owner);
        }
        if self.unfinished == 0 {
            *self = Self::default();
        }
    }

    /// Whose turn it is.
    pub(super) fn first(&self) -> Option<u64> {
        self.turns.first_key_value().map(|(&(_, id), _)| id)
    }

    /// The first, and those of its owner that follow it without another priority between them.
    pub(super) fn first_and_its_like(&self) -> impl Iterator<Item = u64> {
        let owner = self.turns.values().next().map(|owner| &self.owners[owner]);
        let waiting = owner.into_iter().flat_map(|owner| &owner.waiting);
        let mut first = None;
        waiting.take_while(move |(_, priority)| *first.get_or_insert(**priority) == **priority).map(|(&(_, id), _)| id)
    }

    /// All of them, owner by owner, of each in the order of their turns.
    pub(super) fn in_order(&self) -> impl Iterator<Item = u64> {
        let owners = self.turns.values().map(|owner| &self.owners[owner]);
        owners.flat_map(|owner| owner.waiting.keys().map(|&(_, id)| id))
    }

    /// Those of its owner that wait in front of a sequence.
    pub(super) fn before(&self, id: u64, claim: &Claim) -> impl Iterator<Item = u64> {
        self.owners[&claim.standing.owner].waiting.range(..(claim.rank, id)).map(|(&(_, id), _)| id)
    }

    /// Sequences that were never in a slot, and their prompt tokens.
    pub(super) fn waiting(&self) -> (u64, u64) {
        (self.waiting, self.waiting_tokens)
    }

    /// The same, of one owner.
    pub(super) fn waiting_of(&self, owner: &Option<Arc<str>>) -> (u64, u64) {
        self.owners.get(owner).map_or((0, 0), |owner| (owner.waiting.len() as u64, owner.waiting_tokens))
    }

    /// Whether they are the sequences that wait, those of all that have not ended are counted, and every owner that
    /// waits has one turn; for the check of the invariants.
    pub(super) fn check(&self, waits: impl Fn(u64) -> bool, unfinished: u64) -> bool {
        let turn = |owner: &Owner| owner.turn.is_none_or(|turn| self.turns.contains_key(&turn));
        let owners = || self.owners.values();
        let waiting = owners().flat_map(|owner| owner.waiting.keys());
        let tokens: u64 = owners().map(|owner| owner.waiting_tokens).sum();
        let counted = owners().all(|owner| owner.priorities.values().sum::<u64>() == owner.waiting.len() as u64);
        let (mut count, mut known) = (0, true);
        waiting.for_each(|(_, id)| (count, known) = (count + 1, known && waits(*id)));
        (count, tokens) == self.waiting()
            && known
            && counted
            && owners().all(|owner| owner.turn == owner.next_turn() && turn(owner))
            && owners().filter(|owner| owner.turn.is_some()).count() == self.turns.len()
            && owners().map(|owner| owner.unfinished).sum::<u64>() == self.unfinished
            && self.unfinished == unfinished
    }

    /// A sequence does not wait for its first admission any more.
    fn leave(&mut self, id: u64, claim: &Claim) {
        let owner = self.owners.get_mut(&claim.standing.owner).expect("an owner is known while it has sequences");
        let priority = owner.waiting.remove(&(claim.rank, id)).expect("a sequence waits where it was put");
        let count = owner.priorities.get_mut(&priority).expect("all that wait are counted");
        *count -= 1;
        if *count == 0 {
            owner.priorities.remove(&priority);
        }
        owner.waiting_tokens -= claim.prompt_tokens;
        self.waiting -= 1;
        self.waiting_tokens -= claim.prompt_tokens;
    }

    fn set_turn(&mut self, name: &Option<Arc<str>>) {
        let owner = self.owners.get_mut(name).expect("an owner is known while it has sequences");
        let next = owner.next_turn();
        if next == owner.turn {
            return;
        }
        if let Some(before) = std::mem::replace(&mut owner.turn, next) {
            self.turns.remove(&before);
        }
        if let Some(next) = next {
            self.turns.insert(next, name.clone());
        }
    }
}

impl Owner {
    /// The best priority that waits counts: what was overtaken by others of its owner is not to hold it back.
    fn next_turn(&self) -> Option<(i64, u64)> {
        let (&(_, id), &priority) = (self.waiting.keys().next()?, self.priorities.keys().next()?);
        Some((self.account + i64::from(priority) * STEP, id))
    }
}

/// What so many tokens cost an owner.
fn cost(tokens: u64, weight: u32) -> i64 {
    (tokens * u64::from(MAX_WEIGHT) / u64::from(weight.clamp(1, MAX_WEIGHT))) as i64
}
