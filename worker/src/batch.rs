//! The sequences of the batch: applies the server's plans at token boundaries and says which rows each step computes.
//!
//! Pure and deterministic: every rank runs the same `Batch` over the same plans and the same sampled tokens, so all
//! ranks admit, cancel and stop at the same token without talking about it. The loop of a decoder:
//!
//! ```text
//! agreed = 0
//! loop match batch.boundary(agreed) {
//!     Apply(v) => batch.apply(&plans.take(v)?)?,
//!     Step     => { compute batch.step(); sample; agreed = minimum over the ranks of plans.newest() as each offered it
//!                   in the sampling exchange of this step; batch.complete(&sampled) }
//!     Idle     => match plans.wait_next()? { Some(v) => agreed = v, None => drained }
//! }
//! ```
//!
//! An idle rank needs no agreement: the next plan is what follows, whenever it comes, on every rank.

mod corpus;
mod draft;
mod draft_rows;
mod pages;
mod plan;
mod slot;

use std::ops::Range;

use crate::plan::PAGE_POSITIONS;
use crate::sampling::{Allowed, RowInput, Sampled};

use corpus::Corpus;
use draft_rows::{Base, DraftRows, Offer};
use pages::Pages;

pub use draft_rows::Drafting;
pub use plan::{Admit, Drafts, PageGrant, Plan, PlanFault, PrefillChunk, StepTime, TokenBounds};
pub use slot::Slot;

/// One row of a step: one token of one sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Slot of the sequence.
    pub slot: u32,
    /// Token to embed.
    pub token: u32,
    /// Its position in the sequence, from 0. The row appends K and V there and attends to positions up to it.
    pub position: u32,
    /// The row's logits are needed: the next token of the sequence is sampled from them.
    pub sample: bool,
}

/// The rows of one sequence in a step: consecutive rows at consecutive positions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Slot of the sequence.
    pub slot: u32,
    /// Its rows within the step.
    pub rows: Range<usize>,
}

/// One step: what is computed between two token boundaries.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Step {
    /// Plan the step belongs to.
    pub version: u64,
    /// Number of the step in its plan, from 0.
    pub number: u32,
    /// Rows, those of a slot next to each other, slots ascending. At least one, at most `max_batch_tokens`.
    pub rows: Vec<Row>,
    /// The same rows by slot.
    pub segments: Vec<Segment>,
    /// Indices of the rows with `sample`, ascending: the order of the samples that [`Batch::complete`] takes.
    pub samples: Vec<usize>,
    /// Positions whose K and V the rows read, those that rows of one sequence share counted once.
    pub positions: usize,
    /// Rows of drafts.
    pub drafted: usize,
}

impl Step {
    fn clear(&mut self) {
        self.rows.clear();
        self.segments.clear();
        self.samples.clear();
        (self.positions, self.drafted) = (0, 0);
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// A stop token was sampled.
    Stop,
    /// `max_tokens` or the end of the context was reached.
    Length,
    /// Its grammar cannot be followed any further; there is no token.
    Nothing,
}

/// What became of a token that a row sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is the sequence's next, and perhaps its last.
    Token(Option<Finish>),
    /// It follows a draft that did not hold.
    Rejected,
    /// Nothing was drawn: the row is computed again.
    Late,
    /// Nothing can be drawn: the sequence has ended.
    Nothing,
    /// It is the next of the prompt, and sampled for its log-probability alone.
    Given,
}

/// Bounds of a batch, fixed at load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Sequences in the batch at one time.
    pub max_slots: usize,
    /// Rows of one step, at least `max_slots`.
    pub max_batch_tokens: usize,
    /// Pages of the KV pool.
    pub kv_pages: usize,
    /// Positions of one sequence, prompt and output together.
    pub max_context: usize,
    /// Token ids are under this.
    pub vocab_size: usize,
    /// What the decoder says of steps with drafts.
    pub drafting: Drafting,
    /// Tokens of finished answers that are kept to draft from.
    pub draft_corpus_tokens: usize,
    /// Positions that a row sees at most, its own included, where the model has such a bound.
    pub window: Option<usize>,
}

/// What follows at a token boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    /// The plan of this version takes over: [`Batch::apply`] it.
    Apply(u64),
    /// [`Batch::step`] has rows to compute.
    Step,
    /// Nothing until the next plan comes.
    Idle,
}

/// All sequences of a worker. Its memory is taken by `new`; steps allocate nothing.
#[derive(Debug, PartialEq)]
pub struct Batch {
    limits: Limits,
    slots: Vec<Slot>,
    /// Slots up to the last one that is busy.
    in_use: usize,
    pages: Pages,
    version: u64,
    steps: u32,
    drafts: Drafts,
    /// Steps of the plan that were computed.
    steps_run: u32,
    /// The step that is next; without rows if the plan has none left.
    step: Step,
    verdicts: Vec<Verdict>,
    offers: Vec<Offer>,
    draft_rows: DraftRows,
    corpus: Corpus,
}

impl Batch {
    /// An empty batch: no plan applied, every slot and page free.
    ///
    /// # Panics
    /// If a limit is 0, or over what its u32 counterpart on the wire can say.
    pub fn new(limits: Limits) -> Self {
        let Limits { max_slots, max_batch_tokens, kv_pages, max_context, vocab_size, .. } = limits;
        let all = [max_slots, max_batch_tokens, kv_pages, max_context, vocab_size];
        assert!(all.iter().all(|n| (1..u32::MAX as usize).contains(n)), "{limits:?}");
        assert!(max_batch_tokens >= max_slots, "{limits:?}");
        // A sequence cannot outgrow the pool; its last token needs no page.
        let longest = max_context.min(kv_pages.saturating_mul(PAGE_POSITIONS) + 1);
        let step = Step {
            rows: Vec::with_capacity(max_batch_tokens),
            segments: Vec::with_capacity(max_slots),
            samples: Vec::with_capacity(max_slots),
            ..Step::default()
        };
        Self {
            limits,
            slots: (0..max_slots).map(|_| Slot::new(max_context, longest)).collect(),
            in_use: 0,
            pages: Pages::new(kv_pages),
            version: 0,
            steps: 0,
            drafts: Drafts::default(),
            steps_run: 0,
            step,
            verdicts: Vec::with_capacity(max_slots),
            offers: Vec::with_capacity(max_slots),
            draft_rows: DraftRows::default(),
            corpus: Corpus::new(limits.draft_corpus_tokens),
        }
    }

    /// Version of the plan applied last; 0: none yet.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The sequence in a slot; meaningful for slots that the current step names.
    ///
    /// # Panics
    /// If `slot` is not under `max_slots`.
    pub fn slot(&self, slot: u32) -> &Slot {
        &self.slots[slot as usize]
    }

    /// The step that is next: rows to compute if [`Batch::boundary`] said so.
    pub fn step(&self) -> &Step {
        &self.step
    }

    /// Steps that are left of the plan, the next one included.
    pub fn steps_left(&self) -> u32 {
        self.steps - self.steps_run
    }

    /// The last position at which the sequence in `slot` can compute a row: then it ends, or has no page.
    pub fn last_position(&self, slot: u32) -> u32 {
        u32::try_from(self.slot(slot).last_position(self.limits.max_context)).unwrap_or(u32::MAX)
    }

    /// Of each row of the step that samples, its sequence and its position.
    pub fn sampled_rows(&self) -> Vec<(u64, u32)> {
        let rows = self.step.samples.iter().map(|&row| self.step.rows[row]);
        rows.map(|row| (self.slot(row.slot).sequence(), row.position)).collect()
    }

    /// The token of its prompt that follows row `row` of the step, which is sampled for the log-probability of that.
    ///
    /// # Panics
    /// If the step has no such row.
    pub fn given(&self, row: usize) -> Option<u32> {
        let Row { slot, position, .. } = self.step.rows[row];
        self.slot(slot).given(position)
    }

    /// What the sampler needs to know of the sequence of row `row` of the step, but for what a grammar allows it.
    ///
    /// # Panics
    /// If the step has no such row.
    pub fn row_input(&self, row: usize) -> RowInput<'_> {
        let Row { slot, position, .. } = self.step.rows[row];
        let slot = self.slot(slot);
        let given = slot.given(position);
        let seen = slot.tokens_to(position);
        let (prompt, generated) = seen.split_at(slot.prompt().len().min(seen.len()));
        RowInput {
            params: slot.sampling(),
            position: position + 1,
            prompt,
            generated,
            suppress: if slot.is_stop_forbidden(generated.len()) { slot.stop_tokens() } else { &[] },
            allowed: given.map_or(Allowed::All, Allowed::Only),
            logprobs: if given.is_some() { slot.prompt_logprobs() } else { slot.logprobs() },
        }
    }

    /// What follows now. `agreed` is the newest plan version that all ranks are known to hold: the minimum of what they
    /// offered in the last exchange. A plan with rows runs at least its first step before the next takes over.
    pub fn boundary(&self, agreed: u64) -> Boundary {
        let has_rows = !self.step.rows.is_empty();
        if has_rows && self.steps_run == 0 {
            Boundary::Step
        } else if agreed > self.version {
            Boundary::Apply(self.version + 1)
        } else if has_rows {
            Boundary::Step
        } else {
            Boundary::Idle
        }
    }

    /// Applies the next plan: `release`, then `admit`, then `grants`, then the rows of its first step.
    ///
    /// # Errors
    /// The plan breaks a rule of worker/v1. The batch is then in an undefined (but memory-safe) state: a fault ends the
    /// worker.
    pub fn apply(&mut self, plan: &Plan) -> Result<(), PlanFault> {
        let version = self.version + 1;
        if plan.version != version {
            return Err(PlanFault::Version { expected: version, got: plan.version });
        }
        self.version = version;
        self.check_bounds(plan)?;
        self.steps = plan.steps;
        self.drafts = plan.drafts.clone();
        self.steps_run = 0;
        for &slot in &plan.release {
            self.release(slot)?;
        }
        for admit in &plan.admit {
            self.admit(admit)?;
        }
        for grant in &plan.grants {
            self.grant(grant)?;
        }
        for slot in &mut self.slots[..self.in_use] {
            slot.clear_work();
            // Drafts of a step that this plan takes the place of.
            slot.take_back();
        }
        for chunk in &plan.prefill {
            self.schedule_chunk(chunk)?;
        }
        for &slot in &plan.decode {
            self.schedule_decode(slot)?;
        }
        for (slot, sequence) in (0..).zip(self.busy()).filter(|(_, sequence)| sequence.scheduled_rows() > 0) {
            let shared = sequence.pages_to_write().iter().find(|&&page| self.pages.is_shared(page));
            if let Some(&page) = shared {
                return Err(PlanFault::PageShared { version, slot, page });
            }
        }
        let rows: u64 = self.busy().iter().map(|s| s.scheduled_rows() as u64).sum();
        if rows > self.limits.max_batch_tokens as u64 {
            return Err(PlanFault::TooManyRows { version, rows, limit: self.limits.max_batch_tokens });
        }
        let sampling = |slot: &Slot| slot.rows(0, true).filter(|row| row.sample).count();
        let (samples, limit) = (self.busy().iter().map(sampling).sum(), self.limits.max_slots);
        if samples > limit {
            return Err(PlanFault::TooManySamples { version, rows: samples, limit });
        }
        self.lay_out_step();
        Ok(())
    }

    /// Takes the sampled token of each of the step's `samples`, in that order, and moves to the next step. Returns, in
    /// the same order, what became of each: a row behind a draft counts only if the draft is what was sampled in front
    /// of it.
    ///
    /// # Panics
    /// If there was no step, or the number of samples or a token id is not what the step asks for: a broken backend.
    pub fn complete(&mut self, sampled: &[Sampled]) -> &[Verdict] {
        assert!(!self.step.rows.is_empty(), "a step was completed that had no rows");
        assert_eq!(sampled.len(), self.step.samples.len(), "samples of step {} of {}", self.step.number, self.version);
        self.verdicts.clear();
        let mut samples = sampled.iter();
        for segment in &self.step.segments {
            let slot = &mut self.slots[segment.slot as usize];
            let rows = &self.step.rows[segment.rows.clone()];
            // Of the rows that sample the last, and those of drafts behind it, draw what comes next.
            let given = rows.iter().filter(|row| row.sample && slot.given(row.position).is_some()).count();
            let drawing = rows.iter().filter(|row| row.sample).count() - given;
            let drafted = slot.take_back();
            samples.by_ref().take(given).for_each(|_| self.verdicts.push(Verdict::Given));
            let (mut held, mut late, mut failed) = (0, false, false);
            for (row, sampled) in rows[rows.len() - drawing..].iter().zip(samples.by_ref().take(drawing)) {
                let (token, number) = (sampled.token, segment.slot);
                // The row's own token is the newest: what it follows was right.
                let counts = !slot.is_finished()
                    && !late
                    && slot.tokens().len() == row.position as usize + 1
                    && slot.tokens().last() == Some(&row.token);
                let verdict = match token {
                    _ if !counts => Verdict::Rejected,
                    Sampled::LATE => Verdict::Late,
                    Sampled::NOTHING => Verdict::Nothing,
                    token => {
                        assert!((token as usize) < self.limits.vocab_size, "slot {number}: sampled token {token}");
                        Verdict::Token(slot.append(token, self.limits.max_context))
                    }
                };
                late |= verdict == Verdict::Late;
                if verdict == Verdict::Nothing {
                    slot.fail();
                    failed = true;
                }
                self.verdicts.push(verdict);
                held += usize::from(matches!(verdict, Verdict::Token(_)));
            }
            // K and V of a row that counts are there, even if it drew nothing.
            slot.advance(rows.len() - drawing + held + usize::from(late || failed), late, &mut self.pages);
            if !late {
                slot.learn(drafted, held.saturating_sub(1));
            }
            if held > 0 && slot.is_finished() {
                slot.add_answer(&mut self.corpus);
            }
        }
        self.corpus.step();
        self.steps_run += 1;
        self.lay_out_step();
        &self.verdicts
    }

    fn check_bounds(&self, plan: &Plan) -> Result<(), PlanFault> {
        if plan.steps == 0 {
            return Err(PlanFault::NoSteps { version: plan.version });
        }
        let slots = plan.release.iter().copied();
        let slots = slots.chain(plan.admit.iter().map(|a| a.slot)).chain(plan.grants.iter().map(|g| g.slot));
        let mut slots = slots.chain(plan.prefill.iter().map(|c| c.slot)).chain(plan.decode.iter().copied());
        match slots.find(|slot| *slot as usize >= self.limits.max_slots) {
            Some(slot) => Err(PlanFault::SlotRange { version: plan.version, slot, limit: self.limits.max_slots }),
            None => Ok(()),
        }
    }

    fn release(&mut self, slot: u32) -> Result<(), PlanFault> {
        let version = self.version;
        let sequence = &mut self.slots[slot as usize];
        if !sequence.is_busy() {
            return Err(PlanFault::SlotFree { version, slot, what: "released" });
        }
        sequence.pages().iter().for_each(|&page| self.pages.let_go(page));
        sequence.clear();
        self.in_use = self.busy().iter().rposition(Slot::is_busy).map_or(0, |last| last + 1);
        Ok(())
    }

    fn admit(&mut self, admit: &Admit) -> Result<(), PlanFault> {
        let (version, slot) = (self.version, admit.slot);
        let invalid = |problem: String| PlanFault::Admit { version, slot, sequence: admit.sequence, problem };
        if self.slots[slot as usize].is_busy() {
            return Err(PlanFault::SlotBusy { version, slot, sequence: self.slots[slot as usize].sequence() });
        }
        admit.check(&self.limits).map_err(invalid)?;
        if let Some(other) = self.busy().iter().position(|s| s.is_busy() && s.sequence() == admit.sequence) {
            return Err(invalid(format!("the sequence is already in slot {other}")));
        }
        self.slots[slot as usize].fill(admit);
        self.in_use = self.in_use.max(slot as usize + 1);
        Ok(())
    }

    fn grant(&mut self, grant: &PageGrant) -> Result<(), PlanFault> {
        let (version, slot) = (self.version, grant.slot);
        let sequence = &mut self.slots[slot as usize];
        if !sequence.is_busy() {
            return Err(PlanFault::SlotFree { version, slot, what: "granted pages" });
        }
        for &page in &grant.pages {
            if !self.pages.hold(page) {
                return Err(PlanFault::PageRange { version, slot, page, limit: self.limits.kv_pages });
            }
        }
        let first = grant.first as usize;
        if first + grant.pages.len() > sequence.max_pages() {
            return Err(PlanFault::TooManyPages { version, slot, context: self.limits.max_context });
        }
        sequence.put_pages(first, &grant.pages, &mut self.pages).map_err(|problem| PlanFault::Grant {
            version,
            slot,
            first: grant.first,
            problem,
        })?;
        Ok(())
    }

    fn schedule_chunk(&mut self, chunk: &PrefillChunk) -> Result<(), PlanFault> {
        let (version, slot) = (self.version, chunk.slot);
        let sequence = &mut self.slots[slot as usize];
        if !sequence.is_busy() {
            return Err(PlanFault::SlotFree { version, slot, what: "prefilled" });
        }
        sequence.schedule_chunk(chunk, &self.pages).map_err(|problem| PlanFault::Chunk {
            version,
            slot,
            start: chunk.start,
            len: chunk.len,
            problem,
        })
    }

    fn schedule_decode(&mut self, slot: u32) -> Result<(), PlanFault> {
        let version = self.version;
        let sequence = &mut self.slots[slot as usize];
        if !sequence.is_busy() {
            return Err(PlanFault::SlotFree { version, slot, what: "decoded" });
        }
        sequence.schedule_decode().map_err(|problem| PlanFault::Decode { version, slot, problem })
    }

    /// Fills `step` with the rows that come next; none if the plan has run its steps.
    fn lay_out_step(&mut self) {
        (self.step.version, self.step.number) = (self.version, self.steps_run);
        if self.steps_run == self.steps {
            self.step.clear();
            return;
        }
        self.lay_out_rows();
        if self.drafts.each == 0 || self.step.samples.is_empty() {
            return;
        }
        let Step { rows, samples, segments, .. } = &self.step;
        let draws = |segment: &&Segment| {
            let next = samples.partition_point(|&row| row < segment.rows.start);
            samples.get(next).is_some_and(|&row| row < segment.rows.end)
        };
        // Every row that samples has room for its logits.
        let room = (self.limits.max_batch_tokens - rows.len()).min(self.limits.max_slots - samples.len());
        let base = Base {
            rows: rows.len(),
            tokens: segments.iter().filter(draws).count(),
            room: room.min(self.drafts.rows as usize),
        };
        self.draft(base);
        if self.busy().iter().any(|slot| slot.drafted() > 0) {
            self.lay_out_rows();
        }
    }

    /// All busy slots, and free ones between them.
    fn busy(&self) -> &[Slot] {
        &self.slots[..self.in_use]
    }

    /// Drafts for the step that comes, which is `base` without them.
    fn draft(&mut self, base: Base) {
        self.offers.clear();
        for (index, slot) in self.slots[..self.in_use].iter_mut().enumerate() {
            slot.draft(&self.corpus, self.drafts.each as usize, self.limits.max_context, self.steps_run == 0);
            self.offers.extend(slot.offer(index));
        }
        if !self.offers.is_empty() {
            let chosen = self.draft_rows.choose(&self.offers, base, &self.drafts.times, self.limits.drafting);
            for (offer, &count) in self.offers.iter().zip(chosen) {
                self.slots[offer.slot].keep_drafts(count);
            }
        }
    }

    /// Sequences of the step that have drafts, and rows of them.
    pub fn drafted(&self) -> Vec<(u64, usize)> {
        if self.step.drafted == 0 {
            return Vec::new();
        }
        let drafted = self.busy().iter().filter(|slot| slot.drafted() > 0);
        drafted.map(|slot| (slot.sequence(), slot.drafted())).collect()
    }

    /// The step that is next is computed without its drafts: a launch that runs on knows nothing of them.
    pub fn leave_out_drafts(&mut self) {
        if self.step.drafted > 0 {
            self.slots[..self.in_use].iter_mut().for_each(|slot| {
                slot.take_back();
            });
            self.lay_out_rows();
        }
    }

    /// Fills `step` with the rows of all slots.
    fn lay_out_rows(&mut self) {
        let (step, first) = (&mut self.step, self.steps_run == 0);
        step.clear();
        let busy = &self.slots[..self.in_use];
        step.drafted = busy.iter().map(Slot::drafted).sum();
        for (index, slot) in busy.iter().enumerate() {
            let start = step.rows.len();
            step.rows.extend(slot.rows(index as u32, first));
            if let (Some(oldest), Some(newest)) = (step.rows.get(start), step.rows.last()) {
                let first_seen =
                    (oldest.position as usize + 1).saturating_sub(self.limits.window.unwrap_or(usize::MAX));
                step.positions += newest.position as usize + 1 - first_seen;
                step.segments.push(Segment { slot: index as u32, rows: start..step.rows.len() });
                let rows = start..step.rows.len();
                step.samples.extend(rows.filter(|&row| step.rows[row].sample));
            }
        }
    }
}

#[cfg(test)]
mod tests;
