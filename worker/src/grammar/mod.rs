//! Grammars: which tokens a sequence may draw next, where its request holds it to a grammar or to tokens by name.
//!
//! Threads beside the loop follow the tokens and compute masks while the step runs, so that the sampler finds them
//! when the logits are there. Nobody waits for a mask that is late: its row sits the step out and is computed again.
//! Every rank follows every grammar; whether a mask has come in time is the one thing that ranks have to agree on.
//!
//! ```text
//! decoder's thread             threads of this room
//! admit(slot)        --job-->  compile the grammar, follow what was generated before, mask of the next token
//! ask(batch)         --job-->  follow the newest tokens; masks of the next token and behind each draft
//! (step runs)
//! await_masks(..)    <-answer-
//! allowed(row)
//! ```
//!
//! What has been followed so far goes along with the job and comes back with the answer: nothing is locked.

mod compiled;
mod follower;
mod threads;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::batch::{self, Batch, Slot};
use crate::sampling::Allowed;

use compiled::Library;
use follower::Follower;
use threads::Threads;

/// Threads of a worker at least: one may compile a large grammar while the other goes on.
const LEAST_THREADS: usize = 2;
/// And at most.
const MOST_THREADS: usize = 8;

/// How long a step waits for masks that are not there when its logits are: what is computed again costs more.
pub const LATE_MASKS: Duration = Duration::from_micros(500);

/// The texts of the tokens, as the server's tokenizer has them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vocabulary {
    /// By token id: its bytes; those of a control token behind a byte 0xff; none for a token that has no text.
    pub words: Vec<Vec<u8>>,
    /// The token that ends an answer.
    pub end: u32,
}

/// What a sequence's masks are asked for.
#[derive(Debug)]
struct Ask {
    /// Tokens generated since the last time.
    newest: Vec<u32>,
    /// Drafts behind them.
    drafts: Vec<u32>,
    /// Position of the token that the first mask is for.
    position: usize,
    /// Tokens that end the sequence: allowed where the grammar may end, from position `stops_from` on.
    stops: Vec<u32>,
    stops_from: usize,
}

/// Work for a thread.
struct Job {
    slot: u32,
    sequence: u64,
    follower: Follower,
    ask: Ask,
}

/// Work done.
struct Answer {
    slot: u32,
    sequence: u64,
    follower: Follower,
    masks: Masks,
}

/// Masks of consecutive tokens of a sequence.
struct Masks {
    position: usize,
    /// `[1 + drafts]`; `None` behind a draft that the grammar does not allow.
    words: Result<Vec<Option<Vec<u32>>>, String>,
}

/// A sequence that may not draw every token.
struct Held {
    sequence: u64,
    /// `None` while a thread has it.
    follower: Option<Follower>,
    /// Generated tokens that it has been handed.
    followed: usize,
    masks: Option<Masks>,
}

/// The grammars of a worker's sequences.
pub struct Grammars {
    threads: Threads,
    /// `[slot]`
    held: Vec<Option<Held>>,
    /// Masks asked for that have not come.
    pending: usize,
}

impl Grammars {
    /// No grammar yet. Threads begin when the first comes: at most half of the machine's, shared by `ranks` workers.
    pub fn new(vocabulary: Option<Arc<Vocabulary>>, vocab_size: usize, slots: usize, ranks: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            threads: Threads::new(
                Library::new(vocabulary, vocab_size),
                (cores / ranks / 2).clamp(LEAST_THREADS, MOST_THREADS),
            ),
            held: (0..slots).map(|_| None).collect(),
            pending: 0,
        }
    }

    /// A sequence has entered a slot: its first mask is asked for at once.
    pub fn admit(&mut self, slot: u32, sequence: &Slot) {
        if !sequence.is_held() {
            self.held[slot as usize] = None;
            return;
        }
        let follower = Some(Follower::new(sequence));
        let held = Held { sequence: sequence.sequence(), follower, followed: 0, masks: None };
        self.held[slot as usize] = Some(held);
        self.ask_for(slot, sequence, sequence.tokens().len(), &[]);
    }

    /// Asks for the masks of the rows of the next step that sample.
    pub fn ask(&mut self, batch: &Batch) {
        let step = batch.step();
        for segment in &step.segments {
            let slot = batch.slot(segment.slot);
            if !slot.is_held() {
                continue;
            }
            let rows = &step.rows[segment.rows.clone()];
            // Tokens of the prompt need no mask.
            let draws = |row: &batch::Row| row.sample && slot.given(row.position).is_none();
            if let Some(first) = rows.iter().position(draws) {
                let drafts: Vec<u32> = rows[first + 1..].iter().map(|row| row.token).collect();
                self.ask_for(segment.slot, slot, rows[first].position as usize + 1, &drafts);
            }
        }
    }

    fn ask_for(&mut self, slot: u32, sequence: &Slot, position: usize, drafts: &[u32]) {
        let held = self.held[slot as usize].as_mut().expect("a sequence that is held was admitted as such");
        if held.masks.as_ref().is_some_and(|masks| masks.position == position) {
            return;
        }
        // What a thread still has is asked for this position already: a sequence does not go on without its mask.
        let Some(follower) = held.follower.take() else { return };
        let generated = sequence.generated();
        let newest = generated[held.followed..].to_vec();
        held.followed = generated.len();
        held.masks = None;
        self.pending += 1;
        let (drafts, stops) = (drafts.to_vec(), sequence.stop_tokens().to_vec());
        let ask = Ask { newest, drafts, position, stops, stops_from: sequence.prompt().len() + sequence.min_tokens() };
        self.threads.put(Job { slot, sequence: held.sequence, follower, ask });
    }

    /// Takes the answers that come until the step has all that its rows need, or the limit is over.
    pub fn await_masks(&mut self, batch: &Batch, limit: Duration) {
        let deadline = Instant::now() + limit;
        while self.pending > 0 {
            // What has come is taken in any case.
            let until = if self.knows_all(batch) { Instant::now() } else { deadline };
            let Some(answer) = self.threads.next(until) else { return };
            self.pending -= 1;
            // The slot may have another sequence by now.
            let held = self.held[answer.slot as usize].as_mut().filter(|held| held.sequence == answer.sequence);
            if let Some(held) = held {
                if let Err(problem) = &answer.masks.words {
                    tracing::warn!(sequence = answer.sequence, "what it is held to cannot be followed: {problem}");
                }
                held.follower = Some(answer.follower);
                held.masks = Some(answer.masks);
            }
        }
    }

    /// Whether no row of the step would be late now.
    fn knows_all(&self, batch: &Batch) -> bool {
        batch.step().samples.iter().all(|row| self.allowed(batch, *row) != Allowed::Late)
    }

    /// Whether a row of the step, by its number, may not draw any token.
    pub fn holds(&self, batch: &Batch, row: usize) -> bool {
        batch.given(row).is_some() || batch.slot(batch.step().rows[row].slot).is_held()
    }

    /// What a row of the step may draw, as far as it is known by now.
    pub fn allowed(&self, batch: &Batch, row: usize) -> Allowed<'_> {
        if let Some(token) = batch.given(row) {
            return Allowed::Only(token);
        }
        if !self.holds(batch, row) {
            return Allowed::All;
        }
        let row = &batch.step().rows[row];
        let held = self.held[row.slot as usize].as_ref().expect("a sequence that is held was admitted as such");
        let Some(masks) = &held.masks else { return Allowed::Late };
        let Ok(words) = &masks.words else { return Allowed::Nothing };
        match (row.position as usize + 1).checked_sub(masks.position).and_then(|behind| words.get(behind)) {
            Some(Some(words)) => Allowed::These(words),
            // Behind a draft that cannot hold: whatever is drawn there is of no use.
            Some(None) => words[0].as_deref().map_or(Allowed::Late, Allowed::These),
            None => Allowed::Late,
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
