//! A worker that computes nothing: applies plans exactly as worker.proto says and draws each token from a hash of the
//! tokens that the KV pages hold for its sequence. A page that is written by two, granted too late or not recomputed
//! therefore shows in the tokens. Panics where a plan breaks the protocol.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use looplane_proto::worker::v1::{Admit, Finish, Outcome, Plan, SampledToken};

use super::{Event, GroupShape};
use crate::engine::{SamplingParams, SequenceRequest};

/// Tokens of the fake vocabulary.
pub(crate) const VOCAB: u64 = 1000;

/// A request as tests make them; the seed makes prompts of one length differ.
pub(crate) fn request(seed: u64, prompt: u32, max_tokens: u32, stop_tokens: Vec<u32>) -> SequenceRequest {
    let sampling = SamplingParams { seed, ..SamplingParams::greedy() };
    let prompt = (0..prompt).map(|i| (mix(seed ^ u64::from(i) << 40) % VOCAB) as u32).collect();
    SequenceRequest {
        prompt,
        max_tokens,
        min_tokens: 2,
        stop_tokens,
        sampling,
        logprobs: None,
        cache_salt: Arc::default(),
        grammar: None,
        token_bounds: Arc::default(),
        prompt_logprobs: None,
    }
}

/// The tokens that a request has to get, by definition.
pub(crate) fn expected(request: &SequenceRequest) -> (Vec<u32>, Finish) {
    let mut tokens = request.prompt.clone();
    loop {
        let token = next_token(&tokens);
        tokens.push(token);
        let generated = (tokens.len() - request.prompt.len()) as u32;
        let finish = finish(token, generated, request.max_tokens, request.min_tokens, &request.stop_tokens);
        if finish != Finish::None {
            return (tokens.split_off(request.prompt.len()), finish);
        }
    }
}

/// A step of splitmix64: the tests' source of chance.
pub(crate) fn mix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Random numbers that a seed repeats.
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % bound.max(1)
    }

    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }
}

fn next_token(tokens: &[u32]) -> u32 {
    (tokens.iter().fold(0, |hash, &token| mix(hash ^ u64::from(token))) % VOCAB) as u32
}

fn finish(token: u32, generated: u32, max_tokens: u32, min_tokens: u32, stop_tokens: &[u32]) -> Finish {
    if generated > min_tokens && stop_tokens.contains(&token) {
        Finish::Stop
    } else if generated == max_tokens {
        Finish::Length
    } else {
        Finish::None
    }
}

struct Slot {
    admit: Admit,
    tokens: Vec<u32>,
    /// Positions whose token is in the pages.
    computed: u32,
    pages: Vec<u32>,
    finished: bool,
}

/// Bounds that the worker was loaded with.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) max_slots: u32,
    pub(crate) max_batch_tokens: u32,
    pub(crate) kv_pages: u32,
    pub(crate) page_positions: u32,
}

impl Shape {
    /// A group of this shape is ready for its first plan.
    pub(crate) fn ready(&self) -> Event {
        let Self { max_slots, max_batch_tokens, kv_pages, page_positions } = *self;
        Event::GroupReady(GroupShape { kv_pages, page_positions, max_slots, max_batch_tokens, first_version: 1 })
    }
}

/// One group, seen as one.
pub(crate) struct FakeWorker {
    shape: Shape,
    slots: BTreeMap<u32, Slot>,
    /// [kv_pages * page_positions]: the token at a position.
    kv: Vec<Option<u32>>,
    /// Slots that hold each page.
    holders: Vec<u32>,
    plan: Option<Plan>,
    /// Steps of `plan` that were run; `None` once it is over.
    step: Option<u32>,
    held: VecDeque<Plan>,
    last_version: u64,
}

impl FakeWorker {
    pub(crate) fn new(shape: Shape) -> Self {
        let kv = vec![None; (shape.kv_pages * shape.page_positions) as usize];
        let holders = vec![0; shape.kv_pages as usize];
        let (slots, held) = (BTreeMap::new(), VecDeque::new());
        Self { shape, slots, kv, holders, plan: None, step: None, held, last_version: 0 }
    }

    /// A plan arrived.
    pub(crate) fn receive(&mut self, plan: Plan) {
        assert_eq!(plan.version, self.last_version + 1, "plans are numbered without a gap");
        self.last_version = plan.version;
        self.held.push_back(plan);
    }

    /// What the worker holds: slots in use.
    pub(crate) fn slots_in_use(&self) -> usize {
        self.slots.len()
    }

    /// Newest plan that arrived.
    pub(crate) fn last_version(&self) -> u64 {
        self.last_version
    }

    /// Nothing to do until another plan arrives.
    pub(crate) fn rests(&self) -> bool {
        self.step.is_none() && self.held.is_empty()
    }

    /// Goes on to the next token boundary and runs a step; `None` if there is nothing to do. Plans up to `all_hold` may
    /// take over: other ranks may not have later ones yet.
    pub(crate) fn run(&mut self, all_hold: u64) -> Option<Outcome> {
        if self.step != Some(0)
            && let Some(plan) = self.held.pop_front_if(|plan| plan.version <= all_hold)
        {
            self.take_over(plan);
        }
        let step = self.step?;
        let plan = self.plan.clone().expect("a step belongs to a plan");
        let mut outcome = Outcome { version: plan.version, step, ran_step: true, ..Outcome::default() };
        if step == 0 {
            for chunk in &plan.prefill {
                outcome.rows += chunk.len;
                outcome.positions += u64::from(chunk.start + chunk.len);
                outcome.tokens.extend(self.prefill(chunk.slot, chunk.start, chunk.len));
            }
        }
        for &slot in &plan.decode {
            if step == 0 && plan.prefill.iter().any(|chunk| chunk.slot == slot) {
                continue;
            }
            // Of some sequences drafts hold: a step brings several tokens.
            let drafts = plan.drafts.as_ref().map_or(0, |drafts| u64::from(drafts.each));
            let chance = mix(plan.version << 32 ^ u64::from(slot) << 16 ^ u64::from(step));
            for _ in 0..=(chance % (drafts + 1)).min(chance >> 60) {
                let Some(token) = self.decode(slot) else { break };
                outcome.rows += u32::from(outcome.tokens.last().is_none_or(|last| last.sequence != token.sequence));
                outcome.positions += u64::from(self.slots[&slot].computed);
                outcome.tokens.push(token);
            }
        }
        assert!(outcome.rows <= self.shape.max_batch_tokens, "{} rows in a step", outcome.rows);
        (outcome.step_ns, outcome.wait_ns) = (1000, Some(250));
        self.step = Some(step + 1).filter(|&next| next < plan.steps && outcome.rows > 0);
        if outcome.rows == 0 {
            outcome.ran_step = false;
            // A plan that comes to rest after its first step says nothing more.
            return if step == 0 { Some(outcome) } else { self.run(all_hold) };
        }
        Some(outcome)
    }

    fn take_over(&mut self, plan: Plan) {
        assert!(plan.steps > 0);
        for slot in &plan.release {
            let slot = self.slots.remove(slot).expect("a released slot is in use");
            slot.pages.iter().for_each(|&page| self.let_go(page));
        }
        for admit in &plan.admit {
            assert!(admit.slot < self.shape.max_slots && !admit.tokens.is_empty());
            let (tokens, pages) = (admit.tokens.clone(), Vec::new());
            let slot = Slot { admit: admit.clone(), tokens, computed: 0, pages, finished: false };
            assert!(self.slots.insert(admit.slot, slot).is_none(), "slot {} has two owners", admit.slot);
        }
        for grant in &plan.grants {
            assert!(!grant.pages.is_empty() && grant.pages.iter().all(|&page| page < self.shape.kv_pages));
            grant.pages.iter().for_each(|&page| self.holders[page as usize] += 1);
            let slot = self.slots.get_mut(&grant.slot).expect("pages go to a slot in use");
            let (first, end) = (grant.first as usize, grant.first as usize + grant.pages.len());
            assert!(first <= slot.pages.len(), "pages follow each other");
            let replaced: Vec<u32> =
                slot.pages.splice(first..end.min(slot.pages.len()), grant.pages.iter().copied()).collect();
            replaced.into_iter().for_each(|page| self.let_go(page));
        }
        for &slot in &plan.decode {
            let completes = plan.prefill.iter().any(|c| c.slot == slot && c.start + c.len == self.prompt(slot));
            assert!(completes || self.slots[&slot].computed >= self.prompt(slot), "slot {slot} decodes too early");
        }
        self.plan = Some(plan);
        self.step = Some(0);
    }

    fn prompt(&self, slot: u32) -> u32 {
        self.slots[&slot].admit.tokens.len() as u32
    }

    fn prefill(&mut self, slot: u32, start: u32, len: u32) -> Option<SampledToken> {
        self.skip(slot, start);
        assert!(len > 0 && start + len <= self.prompt(slot), "a chunk ends with the prompt");
        for _ in 0..len {
            assert!(self.has_page(slot), "position {} of slot {slot} has no page", self.slots[&slot].computed);
            self.write(slot);
        }
        (start + len == self.prompt(slot)).then(|| self.sample(slot))
    }

    /// What lies before `start` was computed for the slot, or is in its pages already.
    fn skip(&mut self, number: u32, start: u32) {
        let (slot, positions) = (&self.slots[&number], self.shape.page_positions);
        if start > slot.computed {
            assert!(slot.computed.is_multiple_of(positions), "pages are skipped from their first position on");
            assert!(start.div_ceil(positions) as usize <= slot.pages.len(), "skipped pages are granted");
        }
        assert!(slot.computed <= start, "chunks follow each other");
        if start > slot.computed && !start.is_multiple_of(positions) {
            // What lies behind it in a page that it goes on in is not its own.
            let page = slot.pages[(start / positions) as usize];
            self.kv(page)[(start % positions) as usize..].fill(None);
        }
        self.slots.get_mut(&number).expect("the slot was read above").computed = start;
    }

    /// What lies in it stays: another slot may be granted the page for that.
    fn let_go(&mut self, page: u32) {
        self.holders[page as usize] -= 1;
    }

    fn poison(&mut self, page: u32) {
        self.kv(page).fill(None);
    }

    fn kv(&mut self, page: u32) -> &mut [Option<u32>] {
        let positions = self.shape.page_positions as usize;
        &mut self.kv[page as usize * positions..][..positions]
    }

    fn decode(&mut self, slot: u32) -> Option<SampledToken> {
        (!self.slots[&slot].finished && self.has_page(slot)).then(|| {
            self.write(slot);
            self.sample(slot)
        })
    }

    fn has_page(&self, slot: u32) -> bool {
        let slot = &self.slots[&slot];
        ((slot.computed / self.shape.page_positions) as usize) < slot.pages.len()
    }

    fn at(&self, slot: &Slot, position: u32) -> usize {
        let page = slot.pages[(position / self.shape.page_positions) as usize];
        (page * self.shape.page_positions + position % self.shape.page_positions) as usize
    }

    fn write(&mut self, slot: u32) {
        let slot = &self.slots[&slot];
        let (number, token) = (slot.admit.slot, slot.tokens[slot.computed as usize]);
        let page = slot.pages[(slot.computed / self.shape.page_positions) as usize];
        assert_eq!(self.holders[page as usize], 1, "page {page} is written by slot {number}, and held by others");
        let at = self.at(slot, slot.computed);
        if slot.computed.is_multiple_of(self.shape.page_positions) {
            self.poison(page);
        }
        self.kv[at] = Some(token);
        self.slots.get_mut(&number).expect("the slot was read above").computed += 1;
    }

    fn sample(&mut self, slot: u32) -> SampledToken {
        let state = &self.slots[&slot];
        let context: Vec<u32> = (0..state.computed)
            .map(|position| self.kv[self.at(state, position)].expect("every earlier position was computed"))
            .collect();
        let token = next_token(&context);
        let state = self.slots.get_mut(&slot).expect("the slot was read above");
        let admit = &state.admit;
        let generated = state.tokens.len() as u32 + 1 - admit.prompt_tokens;
        // It knows one token that can follow.
        let finish = match admit.allowed_tokens.is_empty() || admit.allowed_tokens.contains(&token) {
            true => finish(token, generated, admit.max_tokens, admit.min_tokens, &admit.stop_tokens),
            false => Finish::Nothing,
        };
        if finish != Finish::Nothing {
            state.tokens.push(token);
        }
        state.finished = finish != Finish::None;
        SampledToken { sequence: admit.sequence, token, finish: finish.into(), logprob: None, top: Vec::new() }
    }
}
