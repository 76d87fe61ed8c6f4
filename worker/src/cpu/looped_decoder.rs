//! The loop: plans in, tokens out. One rank's decoder walks all layers, the LM head and the sampler for every step,
//! together with the other ranks, and returns to the host only through queues.

use std::time::Instant;

use super::fabric::{Fabric, Place};
use super::phases::{Activations, Pass, Shard};
use super::team::Team;
use crate::batch::{Batch, Boundary};
use crate::decoder::{Fault, Outcome, OutcomeSink, PlanSource};
use crate::grammar::{Grammars, LATE_MASKS};
use crate::sampling::{Exchange, ParallelFor, RowInput, Sampler};

/// Words that go in front of the sampler's in every exchange: the newest plan a rank holds.
pub const AGREEMENT_WORDS: usize = 2;

/// A loaded rank, ready to run.
pub struct LoopedDecoder {
    pub(super) shard: Shard,
    pub(super) team: Team,
    pub(super) fabric: Fabric,
    pub(super) x: Activations,
    pub(super) batch: Batch,
    pub(super) sampler: Sampler,
    pub(super) grammars: Grammars,
    /// Steps in the life of the worker.
    pub(super) steps: u64,
    pub(super) message: Vec<u32>,
    /// Shows tests the logits of each step.
    #[cfg(test)]
    pub(super) tap: Option<super::tests::Tap>,
}

impl LoopedDecoder {
    /// Runs plans until their stream has ended and nothing is left to compute.
    ///
    /// # Errors
    /// A plan breaks a rule, another rank does not arrive, or the server is gone.
    pub fn run(mut self, mut plans: PlanSource, outcomes: &OutcomeSink) -> Result<(), Fault> {
        let leading = self.team.lead();
        let mut agreed = 0;
        loop {
            match self.batch.boundary(agreed) {
                Boundary::Apply(version) => {
                    let plan = plans.take(version)?;
                    self.batch.apply(&plan)?;
                    plan.admit.iter().for_each(|admit| self.grammars.admit(admit.slot, self.batch.slot(admit.slot)));
                    if self.batch.step().rows.is_empty() {
                        outcomes.send(Outcome { version, ..Outcome::default() })?;
                    }
                }
                Boundary::Step => {
                    let begun = Instant::now();
                    self.grammars.ask(&self.batch);
                    self.forward()?;
                    self.grammars.await_masks(&self.batch, LATE_MASKS);
                    let mut outcome = self.sample(plans.newest(), &mut agreed)?;
                    (outcome.step_time, outcome.wait_time) = (begun.elapsed(), Some(self.fabric.take_waited()));
                    outcomes.send(outcome)?;
                }
                Boundary::Idle => match plans.wait_next()? {
                    Some(version) => agreed = version,
                    None => break,
                },
            }
        }
        drop(leading);
        Ok(())
    }

    /// Computes the logits of the step's sampled rows, and K and V of all its rows.
    fn forward(&mut self) -> Result<(), Fault> {
        self.steps += 1;
        let layers = self.shard.plan.config.num_layers;
        let mut pass = Pass {
            shard: &self.shard,
            team: &self.team,
            fabric: &mut self.fabric,
            x: &mut self.x,
            batch: &self.batch,
            step: self.steps,
            only_samples: false,
        };
        pass.embed()?;
        for layer in 0..layers {
            pass.normalise_for_attention(layer);
            pass.query_key_value(layer);
            if layer + 1 == layers {
                pass.keep_samples();
            }
            if pass.rows() == 0 {
                break;
            }
            pass.attend(layer);
            pass.add_attention(layer)?;
            pass.normalise_for_mlp(layer);
            pass.gate_up(layer);
            pass.add_mlp(layer)?;
        }
        pass.logits();
        Ok(())
    }

    /// Draws the step's tokens, agrees with the other ranks on the newest plan that all hold, and moves the batch on.
    fn sample(&mut self, newest: u64, agreed: &mut u64) -> Result<Outcome, Fault> {
        let step = self.batch.step();
        let samples = step.samples.len();
        let mut outcome = Outcome {
            version: step.version,
            step: step.number,
            ran_step: true,
            rows: step.rows.len(),
            positions: step.positions,
            drafted: self.batch.drafted(),
            ..Outcome::default()
        };
        let logits = self.x.logits(samples, self.shard.rank.vocab.len());
        #[cfg(test)]
        if let Some(tap) = &self.tap {
            tap(step, logits);
        }
        let input =
            |&row: &usize| RowInput { allowed: self.grammars.allowed(&self.batch, row), ..self.batch.row_input(row) };
        let inputs: Vec<_> = step.samples.iter().map(input).collect();
        let mut exchange = Agreement {
            fabric: &mut self.fabric,
            place: Place { step: self.steps, layer: None, what: "sampling" },
            newest,
            agreed: u64::MAX,
            message: &mut self.message,
            words: Vec::new(),
        };
        let sampled = match samples {
            // Prompt chunks that sample nothing still agree on the plan.
            0 => exchange.all_gather(&[]).map(|_| &[][..])?,
            _ => self.sampler.sample(&inputs, logits, &mut exchange, &OnTeam(&self.team))?,
        };
        *agreed = exchange.agreed;
        let rows = self.batch.sampled_rows();
        let verdicts = self.batch.complete(sampled);
        if self.shard.rank.rank == 0 {
            outcome.take_samples(&rows, sampled.to_vec(), verdicts);
        }
        Ok(outcome)
    }
}

/// The sampler's exchange, which also carries the newest plan version that each rank holds. All ranks see the same
/// offers and so act on the same minimum.
struct Agreement<'a> {
    fabric: &'a mut Fabric,
    place: Place,
    newest: u64,
    /// Minimum over the ranks, as of the last exchange.
    agreed: u64,
    message: &'a mut Vec<u32>,
    words: Vec<u32>,
}

impl Exchange for Agreement<'_> {
    type Error = Fault;

    fn all_gather(&mut self, mine: &[u32]) -> Result<&[u32], Fault> {
        self.message.clear();
        self.message.extend([self.newest as u32, (self.newest >> 32) as u32]);
        self.message.extend_from_slice(mine);
        let gathered = self.fabric.all_gather(self.message, self.place)?;
        self.words.clear();
        self.agreed = u64::MAX;
        for of_rank in gathered.chunks_exact(self.message.len()) {
            let (offer, words) = of_rank.split_at(AGREEMENT_WORDS);
            self.agreed = self.agreed.min(u64::from(offer[0]) | u64::from(offer[1]) << 32);
            self.words.extend_from_slice(words);
        }
        Ok(&self.words)
    }
}

/// The team as the sampler sees it.
struct OnTeam<'a>(&'a Team);

impl ParallelFor for OnTeam<'_> {
    fn for_each(&self, units: usize, work: &(dyn Fn(usize) + Sync)) {
        self.0.for_each(units, work);
    }
}
