//! The loop on the host's side: plans become launches, the tokens of launches become outcomes.
//!
//! A step of sequences that only decode runs as one launch of as many steps as the plan has left: the host follows its
//! tokens, and asks it to stop when a newer plan is there, nobody is left, or tokens were drafted that are worth their
//! rows. Steps with drafts are a launch of many steps, too, where they have few rows and the decoder draws: it waits
//! between two steps until the host gives it the next one's rows (*fed*). Any other step is a launch for each of its
//! passes ([`super::passes`]), a later launch seeing K and V of the earlier ones; so are those soon after one with
//! drafts, for which a launch would have to be stopped; and those with rows that grammars hold, whose masks the host
//! hands to the sampler while the decoder computes. Where all rows want the largest logit and nothing more the decoder
//! draws, else the sampler does.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::passes::Passes;
use crate::batch::{self, Batch, Boundary, Plan, Slot, Verdict};
use crate::cuda::kernels::launch::{NO_TOKEN, ROW_SAMPLE, ROW_SEVERAL, Row};
use crate::decoder::{Fault, Outcome, OutcomeSink, PlanSource};
use crate::grammar::{Grammars, LATE_MASKS};
use crate::sampling::{Allowed, MIN_TEMPERATURE, Sampled};

/// Steps without drafts, behind one with, that have launches of their own: drafts of the next step come in time. A
/// launch of many steps ends up to two steps after it was asked to.
const SOON_AFTER_DRAFTS: u32 = 16;

/// Masks are in time for this share of a step, in percent: the sampler is in the stream before the decoder ends.
const MASKS_IN_TIME_PERCENT: u32 = 70;
/// But no longer than this: a step may be much shorter than the one before.
const MOST_WAIT_FOR_MASKS: Duration = Duration::from_millis(5);

/// Rows whose masks ranks agree on at a time: a bit each that it is known, and one that there is one.
const ROWS_AGREED: usize = 32;

/// Who draws the tokens of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draws {
    /// The decoder: the largest logit of each row.
    Decoder,
    /// The sampler.
    Sampler,
    /// The sampler, once [`Launcher::draw`] has said what rows may draw: of a launch of one step.
    Masked,
}

impl Draws {
    /// The sampler, or else the decoder.
    pub fn sampler_if(sampled: bool) -> Self {
        if sampled { Self::Sampler } else { Self::Decoder }
    }
}

/// A sampled row of a step.
struct Drawn {
    launch: usize,
    /// Its number in the launch.
    row: usize,
    /// Log-probabilities that are wanted of it.
    logprobs: Option<u32>,
    /// In place of a token.
    instead: Option<u32>,
}

/// A pass of a step.
struct Prepared {
    rows: Vec<Row>,
    /// Its first row in the step.
    first: usize,
    /// Rows of the step that it samples.
    samples: Vec<usize>,
    draws: Draws,
}

/// Runs launches of the kernel one after the other. Launches are numbered from 0 after each `finish`.
pub trait Launcher: Send {
    /// How the rows of a step become launches.
    fn passes(&self) -> &Passes;

    /// Steps of a launch at most.
    fn most_steps(&self) -> u32;

    /// Sets entries of a slot's page table from `first` on, for launches after this. No launch is under way.
    fn write_pages(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), Fault>;

    /// The newest plan that all ranks have, of which this one has `newest`. Every rank calls it at the same boundaries,
    /// and goes on when all have. No launch is under way.
    fn agree(&mut self, newest: u64) -> Result<u64, Fault>;

    /// The bits of `known` that are set on all ranks. Every rank calls it at the same launches.
    fn all_know(&mut self, known: u64) -> Result<u64, Fault>;

    /// Rows of the slot are sampled as its new sequence asks, in launches after this. No launch is under way.
    fn admit(&mut self, slot: u32, sequence: &Slot) -> Result<(), Fault>;

    /// Tokens of a sequence with penalties held, of which it had several rows in a launch. No launch is under way.
    fn held(&mut self, slot: u32, tokens: &[u32]) -> Result<(), Fault>;

    /// Puts a launch behind those under way and returns its number. More than one step only if every row decodes and
    /// none is under way.
    fn launch(&mut self, rows: &[Row], steps: u32, draws: Draws) -> Result<usize, Fault>;

    /// Whether no other rank has to agree on what this one's host decides.
    fn is_alone(&self) -> bool;

    /// Whether the rows, all of which sample, are a step of a fed launch.
    fn feeds(&self, rows: &[Row]) -> bool;

    /// Puts a launch of at most so many steps, which the decoder draws: `rows` are those of the first, and each other
    /// begins when it is fed its own. None is under way.
    fn launch_fed(&mut self, rows: &[Row], steps: u32) -> Result<usize, Fault>;

    /// Gives a fed launch the rows of a step, once the step before has its tokens. Without any it ends.
    fn feed(&mut self, launch: usize, step: u32, rows: &[Row]);

    /// Puts two launches of a step each, which [`Passes::pair`] and neither of which is masked, and returns the number
    /// of the second.
    fn launch_pair(&mut self, pair: [(&[Row], Draws); 2]) -> Result<usize, Fault>;

    /// The sampler draws for the launch put last, which was put as [`Draws::Masked`]: some rows among the tokens that
    /// they are allowed.
    fn draw(&mut self, allowed: &[(usize, Allowed<'_>)]) -> Result<(), Fault>;

    /// Waits for the tokens of a step of launch `launch`, the last one under way; false if it ended before. May ask it
    /// to end soon once `superseded` is true.
    fn wait_step(&mut self, launch: usize, step: u32, superseded: &dyn Fn() -> bool) -> Result<bool, Fault>;

    /// Asks the launch under way to end soon.
    fn stop(&mut self);

    /// Waits until no launch is under way. Tokens stay until the next launch.
    fn finish(&mut self) -> Result<(), Fault>;

    /// What was drawn for a row of a launch, with its log-probability and those of so many most likely tokens, if they
    /// are wanted: the launch was sampled for them.
    fn sampled(&self, launch: usize, step: u32, row: usize, logprobs: Option<u32>) -> Sampled;
}

/// A loaded rank, ready to run.
pub struct LoopedDecoder<L> {
    /// The GPU.
    pub launcher: L,
    /// The sequences.
    pub batch: Batch,
    /// What they may draw.
    pub grammars: Grammars,
    /// This rank.
    pub rank: usize,
    /// Steps since the last one in which a draft held.
    pub since_drafts: u32,
    /// What the last step with masks took.
    pub masked_step: Duration,
}

impl<L: Launcher> LoopedDecoder<L> {
    /// Runs plans until their stream has ended and nothing is left to compute. Between plans that have work no kernel
    /// runs.
    ///
    /// # Errors
    /// A plan breaks a rule, the GPU fails, or the server is gone.
    pub fn run(mut self, mut plans: PlanSource, outcomes: &OutcomeSink) -> Result<(), Fault> {
        let result = self.follow(&mut plans, outcomes);
        if result.is_err() {
            // Giving memory back waits for the kernel, which may never end. The process does, and takes it along.
            std::mem::forget(self);
        }
        result
    }

    fn follow(&mut self, plans: &mut PlanSource, outcomes: &OutcomeSink) -> Result<(), Fault> {
        let mut agreed = 0;
        loop {
            match self.batch.boundary(agreed) {
                Boundary::Apply(version) => {
                    self.apply(&plans.take(version)?)?;
                    if self.batch.step().rows.is_empty() {
                        outcomes.send(Outcome { version, ..Outcome::default() })?;
                    }
                }
                Boundary::Step => {
                    // Ranks begin a launch together: in it their waits for each other are short.
                    self.launcher.agree(plans.newest())?;
                    if self.loops() {
                        self.many_steps(plans, outcomes)?;
                    } else if let Some(rows) = self.fed_rows() {
                        self.fed_steps(rows, plans, outcomes)?;
                    } else {
                        self.one_step(outcomes)?;
                    }
                    agreed = self.launcher.agree(plans.newest())?;
                }
                Boundary::Idle => match plans.wait_next()? {
                    Some(version) => agreed = version,
                    None => return Ok(()),
                },
            }
        }
    }

    fn apply(&mut self, plan: &Plan) -> Result<(), Fault> {
        self.batch.apply(plan)?;
        for admit in &plan.admit {
            self.launcher.admit(admit.slot, self.batch.slot(admit.slot))?;
            self.grammars.admit(admit.slot, self.batch.slot(admit.slot));
        }
        for grant in &plan.grants {
            self.launcher.write_pages(grant.slot, grant.first as usize, &grant.pages)?;
        }
        Ok(())
    }

    /// Whether the step, and those after it, can run as one launch.
    fn loops(&self) -> bool {
        let step = self.batch.step();
        if step.drafted > 0 || self.since_drafts < SOON_AFTER_DRAFTS || self.is_held() {
            return false;
        }
        step.samples.len() == step.rows.len() && self.launcher.passes().hold(&step.rows)
    }

    /// Whether a grammar holds a row of the step.
    fn is_held(&self) -> bool {
        self.batch.step().samples.iter().any(|row| self.grammars.holds(&self.batch, *row))
    }

    /// The rows of the step, if it is one of a fed launch. All ranks find the same.
    fn fed_rows(&self) -> Option<Vec<Row>> {
        let step = self.batch.step();
        let all_sample = !step.rows.is_empty() && step.samples.len() == step.rows.len();
        if !all_sample || self.sampled(0..step.rows.len()) || self.is_held() {
            return None;
        }
        let rows = device_rows(&step.rows, |_| false);
        self.launcher.feeds(&rows).then_some(rows)
    }

    /// Whether the sampler has to draw for some of the rows.
    fn sampled(&self, mut rows: impl Iterator<Item = usize>) -> bool {
        rows.any(|row| !drawn_by_decoder(self.batch.slot(self.batch.step().rows[row].slot)))
    }

    fn many_steps(&mut self, plans: &PlanSource, outcomes: &OutcomeSink) -> Result<(), Fault> {
        let mut since = Instant::now();
        let mut rows = device_rows(&self.batch.step().rows, |_| false);
        rows.iter_mut().for_each(|row| row.last_position = self.batch.last_position(row.slot));
        let longest = rows.iter().map(|row| row.last_position - row.position + 1).max().unwrap_or(1);
        let steps = self.batch.steps_left().min(self.launcher.most_steps()).min(longest);
        let launch = self.launcher.launch(&rows, steps, Draws::sampler_if(self.sampled(0..rows.len())))?;
        // Slots ascend.
        let row_of = |slot| rows.binary_search_by_key(&slot, |row| row.slot).expect("a decoding row, since none joins");
        let version = self.batch.version();
        let superseded = || plans.newest() > version;
        let mut stopped = false;
        for step in 0..steps {
            // Rows end, and none comes back: the tokens of steps that only the kernel runs are of no use.
            if self.batch.step().rows.is_empty() || !self.launcher.wait_step(launch, step, &superseded)? {
                break;
            }
            self.batch.leave_out_drafts();
            let batch_step = self.batch.step();
            let slots = batch_step.samples.iter().map(|row| batch_step.rows[*row].slot);
            let sampled =
                slots.map(|slot| self.launcher.sampled(launch, step, row_of(slot), self.batch.slot(slot).logprobs()));
            let sampled: Vec<Sampled> = sampled.collect();
            let now = Instant::now();
            outcomes.send(self.complete(sampled, now - std::mem::replace(&mut since, now))?)?;
            if !stopped && (superseded() || self.batch.step().drafted > 0) {
                // Steps that run before the kernel sees it still count.
                self.launcher.stop();
                stopped = true;
            }
        }
        self.launcher.stop();
        self.launcher.finish()
    }

    /// Steps with drafts, the first of these rows.
    fn fed_steps(&mut self, rows: Vec<Row>, plans: &PlanSource, outcomes: &OutcomeSink) -> Result<(), Fault> {
        let mut since = Instant::now();
        let steps = self.batch.steps_left().min(self.launcher.most_steps());
        let launch = self.launcher.launch_fed(&rows, steps)?;
        let version = self.batch.version();
        let superseded = || plans.newest() > version;
        let mut rows = Some(rows);
        for step in 0..steps {
            let Some(of_step) = rows else { break };
            if !self.launcher.wait_step(launch, step, &superseded)? {
                break;
            }
            let sampled = (0..of_step.len()).map(|row| self.launcher.sampled(launch, step, row, None)).collect();
            let now = Instant::now();
            let outcome = self.complete(sampled, now - std::mem::replace(&mut since, now))?;
            // Other ranks may not have the newer plan yet: a group agrees on its end in the kernel, a step later.
            let ends = self.loops() || superseded() && self.launcher.is_alone();
            rows = if ends { None } else { self.fed_rows() };
            // The GPU waits for it; the server does not.
            if step + 1 < steps {
                self.launcher.feed(launch, step + 1, rows.as_deref().unwrap_or(&[]));
            }
            outcomes.send(outcome)?;
        }
        self.launcher.finish()
    }

    fn one_step(&mut self, outcomes: &OutcomeSink) -> Result<(), Fault> {
        let begun = Instant::now();
        self.grammars.ask(&self.batch);
        let mut draws: Vec<Drawn> = Vec::with_capacity(self.batch.step().samples.len());
        let (mut last, mut masked) = (0, false);
        let passes = self.launcher.passes().of(&self.batch.step().rows);
        let mut passes = passes.into_iter().map(|pass| self.prepared(pass)).collect::<Vec<_>>().into_iter().peekable();
        while let Some(pass) = passes.next() {
            if let Some(second) = passes.next_if(|next| self.is_pair(&pass, next)) {
                last = self.launcher.launch_pair([&pass, &second].map(|pass| (&pass.rows[..], pass.draws)))?;
                draws.extend(self.drawn(&pass, last - 1));
                draws.extend(self.drawn(&second, last));
                continue;
            }
            last = self.launcher.launch(&pass.rows, 1, pass.draws)?;
            let first = draws.len();
            draws.extend(self.drawn(&pass, last));
            if pass.draws == Draws::Masked {
                masked = true;
                self.draw_masked(&pass.samples, &mut draws[first..])?;
            }
        }
        if self.batch.step().samples.len() == self.batch.step().rows.len() {
            // Tokens are there before the driver says that the launch has ended; when, the step before says, as it does
            // not of steps with prompts.
            self.launcher.wait_step(last, 0, &|| false)?;
        }
        self.launcher.finish()?;
        let sampled = draws.into_iter().map(|Drawn { launch, row, logprobs, instead }| match instead {
            Some(instead) => Sampled::none(instead),
            None => self.launcher.sampled(launch, 0, row, logprobs),
        });
        let sampled: Vec<Sampled> = sampled.collect();
        let took = begun.elapsed();
        if masked {
            self.masked_step = took;
        }
        outcomes.send(self.complete(sampled, took)?)
    }

    /// A pass of the step as it is launched.
    fn prepared(&self, pass: Range<usize>) -> Prepared {
        let step = self.batch.step();
        let samples: Vec<usize> = pass.clone().filter(|row| step.rows[*row].sample).collect();
        let held = samples.iter().any(|row| self.grammars.holds(&self.batch, *row));
        let draws = if held { Draws::Masked } else { Draws::sampler_if(self.sampled(samples.iter().copied())) };
        let given = |row: &batch::Row| self.batch.slot(row.slot).given(row.position).is_some();
        Prepared { rows: device_rows(&step.rows[pass.clone()], given), first: pass.start, samples, draws }
    }

    /// Whether two passes are computed together. Masks of a pass are handed over before the next one is put.
    fn is_pair(&self, first: &Prepared, second: &Prepared) -> bool {
        [first, second].iter().all(|pass| pass.draws != Draws::Masked)
            && self.launcher.passes().pair(first.rows.len(), second.rows.len())
    }

    /// The rows that a pass samples, of launch `launch`, in the order of the step.
    fn drawn(&self, pass: &Prepared, launch: usize) -> impl Iterator<Item = Drawn> {
        pass.samples.iter().map(move |&row| Drawn {
            launch,
            row: row - pass.first,
            logprobs: self.batch.row_input(row).logprobs,
            instead: None,
        })
    }

    /// Hands the masks of a pass to the sampler, while the decoder computes: those that all ranks know by now.
    /// `samples`: the rows of the step that the pass samples.
    fn draw_masked(&mut self, samples: &[usize], drawn: &mut [Drawn]) -> Result<(), Fault> {
        let in_time = self.masked_step / 100 * MASKS_IN_TIME_PERCENT;
        self.grammars.await_masks(&self.batch, in_time.clamp(LATE_MASKS, MOST_WAIT_FOR_MASKS));
        for (rows, drawn) in samples.chunks(ROWS_AGREED).zip(drawn.chunks_mut(ROWS_AGREED)) {
            let mut known = 0u64;
            for (bit, &row) in rows.iter().enumerate() {
                let (is_known, exists) = match self.grammars.allowed(&self.batch, row) {
                    Allowed::All | Allowed::These(_) | Allowed::Only(_) => (1, 1),
                    Allowed::Late => (0, 1),
                    Allowed::Nothing => (1, 0),
                };
                known |= is_known << bit | exists << (bit + ROWS_AGREED);
            }
            let known = self.launcher.all_know(known)?;
            for (bit, drawn) in drawn.iter_mut().enumerate() {
                drawn.instead = match (known >> bit & 1, known >> (bit + ROWS_AGREED) & 1) {
                    (0, _) => Some(Sampled::LATE),
                    (_, 0) => Some(Sampled::NOTHING),
                    _ => None,
                };
            }
        }
        let allowed = samples.iter().map(|&row| self.grammars.allowed(&self.batch, row));
        let of_rows = drawn.iter().map(|drawn| drawn.row).zip(allowed);
        let bounded = of_rows.filter(|(_, allowed)| matches!(allowed, Allowed::These(_) | Allowed::Only(_)));
        let bounded: Vec<(usize, Allowed<'_>)> = bounded.collect();
        self.launcher.draw(&bounded)
    }

    /// Of sequences with penalties that had several rows in a step, whose samples were of `slots`.
    fn count_held(&mut self, slots: &[u32], outcome: &Outcome) -> Result<(), Fault> {
        for of_slot in slots.chunk_by(|slot, next| slot == next).filter(|rows| rows.len() > 1) {
            let slot = self.batch.slot(of_slot[0]);
            let held = outcome.tokens.iter().filter(|token| token.sequence == slot.sequence());
            let held: Vec<u32> = held.map(|token| token.sampled.token).collect();
            if slot.sampling().has_penalties() && !slot.is_finished() && !held.is_empty() {
                self.launcher.held(of_slot[0], &held)?;
            }
        }
        Ok(())
    }

    /// Of sequences with penalties that sat the step out: the sampler has counted what it drew for them all the same.
    fn count_again(&mut self, slots: &[u32], late: &[u64]) -> Result<(), Fault> {
        for &slot in slots {
            let sequence = self.batch.slot(slot);
            if sequence.sampling().has_penalties() && late.contains(&sequence.sequence()) {
                self.launcher.admit(slot, sequence)?;
            }
        }
        Ok(())
    }

    /// Moves the batch on by a step, and says what came of it.
    fn complete(&mut self, sampled: Vec<Sampled>, step_time: Duration) -> Result<Outcome, Fault> {
        if let Some(token) = sampled.iter().map(|of| of.token).find(|token| *token == NO_TOKEN) {
            let problem = format!("the kernel drew {token} for a row that it was to compute");
            return Err(Fault::Broken { rank: self.rank, problem });
        }
        let step = self.batch.step();
        let mut outcome = Outcome {
            version: step.version,
            step: step.number,
            ran_step: true,
            rows: step.rows.len(),
            positions: step.positions,
            drafted: self.batch.drafted(),
            step_time,
            ..Outcome::default()
        };
        let drawing = step.samples.iter().filter(|row| self.batch.given(**row).is_none());
        let slots: Vec<u32> = drawing.map(|row| step.rows[*row].slot).collect();
        let rows = self.batch.sampled_rows();
        let verdicts = self.batch.complete(&sampled);
        let late = rows.iter().zip(verdicts).filter(|(_, verdict)| **verdict == Verdict::Late);
        let late: Vec<u64> = late.map(|((sequence, _), _)| *sequence).collect();
        outcome.take_samples(&rows, sampled, verdicts);
        self.count_held(&slots, &outcome)?;
        self.count_again(&slots, &late)?;
        // Of a sequence that drafts there is a token more for each that held.
        let held =
            !outcome.drafted.is_empty() && outcome.tokens.windows(2).any(|pair| pair[0].sequence == pair[1].sequence);
        self.since_drafts = if held { 0 } else { self.since_drafts.saturating_add(1) };
        Ok(outcome)
    }
}

/// Whether the decoder draws the token itself: the largest logit, with nothing that changes or reports logits.
fn drawn_by_decoder(slot: &Slot) -> bool {
    let params = slot.sampling();
    params.temperature < MIN_TEMPERATURE
        && !params.has_penalties()
        && params.logit_bias.is_empty()
        && slot.logprobs().is_none()
        && (slot.stop_tokens().is_empty() || !slot.is_stop_forbidden(slot.generated().len()))
}

/// Rows of a pass as a launch of one step takes them. `given`: a row is sampled for the log-probability of what follows
/// it in its prompt, which is not to be counted as generated.
fn device_rows(pass: &[batch::Row], given: impl Fn(&batch::Row) -> bool) -> Vec<Row> {
    let mut rows: Vec<Row> = Vec::with_capacity(pass.len());
    for (index, row) in pass.iter().enumerate() {
        let (first_row, first_position) = match rows.last() {
            Some(before) if before.slot == row.slot => (before.first_row, before.first_position),
            _ => (index as u32, row.position),
        };
        rows.push(Row {
            token: row.token,
            position: row.position,
            slot: row.slot,
            first_row,
            first_position,
            flags: if row.sample { ROW_SAMPLE } else { 0 },
            last_position: row.position,
            reserved: 0,
        });
    }
    // The host counts what holds of drafts. Rows of a prompt are none: what stands in front of the one that draws is
    // counted already.
    let drafts = |of: &(&mut Row, &batch::Row)| of.1.sample && !given(of.1);
    for sequence in rows.iter_mut().zip(pass).collect::<Vec<_>>().chunk_by_mut(|row, next| row.1.slot == next.1.slot) {
        let several = sequence.iter().filter(|of| drafts(of)).count() > 1;
        for (row, of) in sequence.iter_mut().filter(|(_, of)| several || given(of)) {
            debug_assert!(of.sample || !several, "drafts have no prompt in front of them");
            row.flags |= ROW_SEVERAL;
        }
    }
    rows
}
