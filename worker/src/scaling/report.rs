//! What the calculation says, as tables.

use std::fmt::{self, Display};

use serde_json::{Value, json};

use super::fit::Measured;
use super::model::{Costs, Cut, Machine};

/// Everything.
#[derive(Debug, Clone)]
pub struct Report {
    /// As fitted.
    pub costs: Costs,
    /// With the mean read limit of the runs that were fitted on.
    pub machine: Machine,
    /// Groups of up to so many GPUs were fitted on.
    pub fitted_gpus: usize,
    /// Positions that sequences of predicted steps see.
    pub context: u32,
    /// Every step that was measured.
    pub compared: Vec<Compared>,
    /// Every step that was asked for.
    pub predicted: Vec<Predicted>,
    /// Groups of which none can be.
    pub refused: Vec<Refused>,
    /// Models that are only calculated.
    pub uncomputed: Vec<Uncomputed>,
}

/// A step that was measured.
#[derive(Debug, Clone)]
pub struct Compared {
    /// Name of the shape, or the model's directory.
    pub model: String,
    /// GPUs.
    pub ranks: usize,
    /// Shards of the model, where the GPUs had only some of them.
    pub shard_of: Option<usize>,
    /// Whether the costs were fitted on it.
    pub fitted: bool,
    /// The measurement.
    pub measured: Measured,
}

/// A step by calculation.
#[derive(Debug, Clone)]
pub struct Predicted {
    /// Name of the shape, or the model's directory.
    pub model: String,
    /// GPUs.
    pub ranks: usize,
    /// Sequences.
    pub batch: u32,
    /// Bytes of weights, K and V that a GPU reads in a step.
    pub bytes: f64,
    /// Time of a step, in ms.
    pub step_ms: f64,
    /// Its bytes at 4653 GB/s, in ms.
    pub floor_ms: f64,
    /// Its time if every block streamed the same bytes in each phase.
    pub even_ms: f64,
    /// If exchanges over the chip took half as long.
    pub half_exchange_ms: f64,
    /// If telling other ranks took no longer than telling other blocks.
    pub free_ranks_ms: f64,
}

/// A group that cannot decode a model.
#[derive(Debug, Clone)]
pub struct Refused {
    /// Name of the shape, or the model's directory.
    pub model: String,
    /// GPUs.
    pub ranks: usize,
    /// Why.
    pub reason: String,
}

/// A model that the GPU backend does not compute: its steps are a calculation alone.
#[derive(Debug, Clone)]
pub struct Uncomputed {
    /// Name of the shape, or the model's directory.
    pub model: String,
    /// What the backend says of it.
    pub reason: String,
}

/// Steps that were measured, by what they say of the calculation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Steps {
    /// The costs were fitted on them.
    Fitted,
    /// Of larger groups, which test the costs.
    Larger,
    /// Of GPUs that had only some shards of a larger group: they test what a block streams, not the links.
    Shards,
}

impl Compared {
    fn is(&self, of: Steps) -> bool {
        of == match (self.fitted, self.shard_of) {
            (true, _) => Steps::Fitted,
            (false, None) => Steps::Larger,
            (false, Some(_)) => Steps::Shards,
        }
    }

    /// The shape, and of what it was a part.
    fn name(&self) -> String {
        self.shard_of.map_or_else(|| self.model.clone(), |shards| format!("{} cut for {shards}", self.model))
    }
}

impl Predicted {
    pub(super) fn new(
        model: String,
        ranks: usize,
        cut: &Cut,
        batch: u32,
        context: f64,
        machine: &Machine,
        costs: &Costs,
    ) -> Self {
        let step = |cut: &Cut, machine: &Machine, costs: &Costs| cut.step_ms(batch, context, machine, costs);
        let half = Costs { exchange_us: costs.exchange_us / 2.0, value_us: costs.value_us / 2.0, ..*costs };
        let free = Machine { link_gb_s: f64::INFINITY, ..*machine };
        Self {
            model,
            ranks,
            batch,
            bytes: cut.bytes(batch, context),
            step_ms: step(cut, machine, costs),
            floor_ms: cut.floor_ms(batch, context, &Machine::H200),
            even_ms: step(&cut.even(), machine, costs),
            half_exchange_ms: step(cut, machine, &half),
            free_ranks_ms: step(cut, &free, &Costs { rank_us: 0.0, ..*costs }),
        }
    }

    /// What would shorten the step most, and by how much of it.
    pub fn remedy(&self) -> (&'static str, f64) {
        let remedies = [
            ("even shares", self.even_ms),
            ("exchanges over the chip", self.half_exchange_ms),
            ("exchanges across GPUs", self.free_ranks_ms),
        ];
        let (name, ms) = remedies.into_iter().min_by(|a, b| a.1.total_cmp(&b.1)).expect("three of them");
        (name, 1.0 - ms / self.step_ms)
    }
}

impl Report {
    /// The largest error over some of the steps that were measured, regardless of sign.
    pub fn worst(&self, of: Steps) -> Option<f64> {
        let errors = self.compared.iter().filter(|step| step.is(of));
        errors.map(|step| step.measured.error(&self.costs).abs()).reduce(f64::max)
    }

    /// The same as one JSON object.
    pub fn to_json(&self) -> Value {
        let Costs { reach, reach_of_8, exchange_us, value_us, rank_us, step_us } = self.costs;
        let compared = self.compared.iter().map(|of| {
            json!({
                "model": of.model,
                "tensor_parallel": of.ranks,
                "shard_of": of.shard_of,
                "batch": of.measured.batch,
                "context": of.measured.context,
                "measured_ms": of.measured.step_ms,
                "calculated_ms": of.measured.calculated_ms(&self.costs),
                "fitted": of.fitted,
            })
        });
        let predicted = self.predicted.iter().map(|of| {
            json!({
                "model": of.model,
                "tensor_parallel": of.ranks,
                "batch": of.batch,
                "context": self.context,
                "bytes": of.bytes,
                "step_ms": of.step_ms,
                "floor_ms": of.floor_ms,
                "even_ms": of.even_ms,
                "half_exchange_ms": of.half_exchange_ms,
                "free_ranks_ms": of.free_ranks_ms,
            })
        });
        let refused =
            self.refused.iter().map(|of| json!({"model": of.model, "tensor_parallel": of.ranks, "reason": of.reason}));
        let uncomputed = self.uncomputed.iter().map(|of| json!({"model": of.model, "reason": of.reason}));
        json!({
            "read_gb_s": self.machine.read_gb_s,
            "costs": {
                "reach": reach,
                "reach_of_8": reach_of_8,
                "exchange_us": exchange_us,
                "value_us": value_us,
                "rank_us": rank_us,
                "step_us": step_us,
            },
            "compared": compared.collect::<Vec<_>>(),
            "predicted": predicted.collect::<Vec<_>>(),
            "refused": refused.collect::<Vec<_>>(),
            "uncomputed": uncomputed.collect::<Vec<_>>(),
        })
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Costs { reach, reach_of_8, exchange_us, value_us, rank_us, step_us } = self.costs;
        let limit = self.machine.read_gb_s;
        writeln!(
            f,
            "Fitted on groups of 1 to {} GPUs: a stream without waits reaches {:.1} % of the read limit ({limit:.0} \
             GB/s), {:.1} % in passes of 8; an exchange over the chip takes {exchange_us:.2} us and {value_us:.3} us \
             for 1000 values, one across GPUs {rank_us:.2} us more and the link's time; a step {step_us:.0} us \
             besides.\n",
            self.fitted_gpus,
            reach * 100.0,
            reach_of_8 * 100.0,
        )?;
        writeln!(
            f,
            "| shape | GPUs | batch | measured, ms | calculated, ms | error | |\n|---|---|---|---|---|---|---|"
        )?;
        for of in &self.compared {
            let calculated = of.measured.calculated_ms(&self.costs);
            let (name, ranks, batch, ms) = (of.name(), of.ranks, of.measured.batch, of.measured.step_ms);
            let error = of.measured.error(&self.costs) * 100.0;
            let role = if of.fitted { "fitted" } else { "predicted" };
            writeln!(f, "| {name} | {ranks} | {batch} | {ms:.3} | {calculated:.3} | {error:+.1} % | {role} |")?;
        }
        for (steps, words) in [
            (Steps::Fitted, "steps that it was fitted on"),
            (Steps::Larger, "larger groups, which it was not fitted on"),
            (Steps::Shards, "shards of larger groups, which it was not fitted on either"),
        ] {
            if let Some(worst) = self.worst(steps) {
                write!(f, "\nlargest error over {words}: {:.1} %", worst * 100.0)?;
            }
        }
        writeln!(
            f,
            "\n\nCalculated at {} positions. With even shares: if every block streamed the same bytes in each phase; \
             half exchanges: if those over the chip took half as long; free ranks: if telling another GPU cost no \
             more than telling another block.\n",
            self.context
        )?;
        writeln!(
            f,
            "| shape | GPUs | batch | floor, ms | ms a step | of the floor's rate | even shares | half exchanges | \
             free ranks | most to gain |"
        )?;
        writeln!(f, "|---|---|---|---|---|---|---|---|---|---|")?;
        for of in &self.predicted {
            let Predicted { ranks, batch, step_ms, floor_ms, even_ms, half_exchange_ms, free_ranks_ms, .. } = of;
            let (remedy, gain) = of.remedy();
            writeln!(
                f,
                "| {} | {ranks} | {batch} | {floor_ms:.2} | **{step_ms:.2}** | {:.0} % | {even_ms:.2} | \
                 {half_exchange_ms:.2} | {free_ranks_ms:.2} | {remedy}: {:.0} % |",
                of.model,
                floor_ms / step_ms * 100.0,
                gain * 100.0,
            )?;
        }
        for Refused { model, ranks, reason } in &self.refused {
            write!(f, "\n{model} on {ranks} GPU{}: {reason}", if *ranks == 1 { "" } else { "s" })?;
        }
        for Uncomputed { model, reason } in &self.uncomputed {
            write!(f, "\n{model} is a calculation alone: {reason}")?;
        }
        Ok(())
    }
}
