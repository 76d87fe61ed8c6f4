//! Sizes that were not measured, and the model's error on those that were.
//!
//! The scaling model calculates steps. What clients see of a token is longer by what serving adds: prompts that are
//! computed between steps, which the workers share like the rest of the work, and a front end that stays the same
//! whatever the size. Both are told apart by what was measured on one and two workers, the sizes that the model is
//! fitted on as well; every larger size that was measured tests the whole.

use serde::Deserialize;

use crate::sweep::figures::{Device, Prediction, Row, Size, Sweep};
use crate::sweep::layout::Layout;

/// Sizes that predictions are fitted on; the scaling model's, too.
pub const FITTED: [u32; 2] = [1, 2];
/// Most sequences of a step that the scaling model calculates.
pub const MOST_STREAMS: u32 = 8;

/// What `looplane scaling --json` wrote, as far as it is looked at.
#[derive(Debug, Deserialize)]
pub struct Scaling {
    read_gb_s: f64,
    compared: Vec<Compared>,
    predicted: Vec<Step>,
    refused: Vec<Refused>,
}

#[derive(Debug, Deserialize)]
struct Compared {
    measured_ms: f64,
    calculated_ms: f64,
    fitted: bool,
}

#[derive(Debug, Deserialize)]
struct Step {
    tensor_parallel: u32,
    batch: u32,
    bytes: f64,
    step_ms: f64,
}

#[derive(Debug, Deserialize)]
struct Refused {
    tensor_parallel: u32,
    reason: String,
}

/// What serving adds to a step on a group of n workers: `fixed_ms + shared_ms / n`.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Added {
    fixed_ms: f64,
    shared_ms: f64,
}

impl Added {
    /// Through what was added on one and on two workers, as near as it can be with neither part below zero: a negative
    /// one is the scaling model's error, and would make large groups faster than their steps.
    fn fit([on_one_ms, on_two_ms]: [f64; 2]) -> Self {
        let (fixed_ms, shared_ms) = (2.0 * on_two_ms - on_one_ms, 2.0 * (on_one_ms - on_two_ms));
        match (fixed_ms < 0.0, shared_ms < 0.0) {
            (false, false) => Self { fixed_ms, shared_ms },
            // Least squares with one part alone.
            (_, true) => Self { fixed_ms: ((on_one_ms + on_two_ms) / 2.0).max(0.0), shared_ms: 0.0 },
            (true, false) => Self { fixed_ms: 0.0, shared_ms: ((on_one_ms + on_two_ms / 2.0) / 1.25).max(0.0) },
        }
    }

    fn on_ms(self, tp: u32) -> f64 {
        self.fixed_ms + self.shared_ms / f64::from(tp)
    }
}

/// Predicts every size under every load that can be, and notes what cannot.
pub fn predict(sweep: &mut Sweep, scaling: &Scaling) {
    for load in 0..sweep.loads.len() {
        let Some(streams) = sweep.loads[load].streams.filter(|streams| *streams <= MOST_STREAMS) else {
            let name = &sweep.loads[load].name;
            sweep.notes.push(format!(
                "{name}: not predicted, as the scaling model calculates steps of up to {MOST_STREAMS} sequences, in a \
                 closed loop"
            ));
            continue;
        };
        let step = |tp| scaling.predicted.iter().find(|step| (step.tensor_parallel, step.batch) == (tp, streams));
        let added = added(&sweep.sizes, load, f64::from(streams), |tp| step(tp).map(|step| step.step_ms));
        let (to_token, to_gap) = match added {
            Ok(added) => added,
            Err(why) => {
                let name = &sweep.loads[load].name;
                sweep.notes.push(format!("{name}: not predicted, as {why}"));
                continue;
            }
        };
        for size in sweep.sizes.iter_mut().filter(|size| size.layout.replicas == 1) {
            let tp = size.layout.tp;
            let Some(step) = step(tp) else { continue };
            let mean_tpot_ms = step.step_ms + to_gap.on_ms(tp);
            size.predicted.push(Prediction {
                load,
                step_ms: Some(step.step_ms),
                output_throughput: f64::from(streams) * 1e3 / (step.step_ms + to_token.on_ms(tp)),
                mean_tpot_ms,
                read_share: Some(step.bytes / (mean_tpot_ms * 1e6) / scaling.read_gb_s),
                fitted: FITTED.contains(&tp),
            });
        }
    }
    let errors =
        scaling.compared.iter().filter(|of| !of.fitted).map(|of| (of.calculated_ms / of.measured_ms - 1.0).abs());
    if let Some(worst) = errors.reduce(f64::max) {
        let percent = 100.0 * worst;
        sweep.notes.push(format!(
            "the model's largest error on steps alone, as the bench measured them on sizes that it was not fitted on, is \
             {percent:.1} %"
        ));
    }
    for refused in &scaling.refused {
        let unmeasured = sweep
            .sizes
            .iter()
            .any(|size| size.layout == Layout::group(refused.tensor_parallel) && size.measured.is_empty());
        if unmeasured {
            sweep.notes.push(format!("TP {}: not predicted: {}", refused.tensor_parallel, refused.reason));
        }
    }
}

/// Calculates replicas from one of them under its share of the streams, which has to be a load of the sweep: replicas
/// wait for nobody, and a front end for all of them is taken to be fast enough. What was measured tests that. On CPUs
/// all layouts are measured, and the memory that replicas read is one.
pub fn predict_replicas(sweep: &mut Sweep) {
    let is_of_replicas = |size: &Size| size.layout.replicas > 1;
    if sweep.device == Device::Cpu || !sweep.sizes.iter().any(is_of_replicas) {
        return;
    }
    let rows: Vec<Vec<Row>> = (0..sweep.loads.len()).map(|load| sweep.rows(load)).collect();
    let (loads, mut lacking) = (&sweep.loads, Vec::new());
    for size in sweep.sizes.iter_mut().filter(|size| is_of_replicas(size)) {
        let Layout { replicas, tp } = size.layout;
        for (load, streams) in loads.iter().enumerate().filter_map(|(load, point)| Some((load, point.streams?))) {
            let share = streams.is_multiple_of(replicas).then_some(streams / replicas);
            let of_one = share.and_then(|share| loads.iter().position(|point| point.streams == Some(share)));
            let one = of_one.and_then(|of_one| rows[of_one].iter().find(|row| row.layout == Layout::group(tp)));
            match one.and_then(|one| Some((one, one.tpot_ms?))) {
                Some((one, mean_tpot_ms)) => size.predicted.push(Prediction {
                    load,
                    step_ms: None,
                    output_throughput: f64::from(replicas) * one.tokens_per_s,
                    mean_tpot_ms,
                    read_share: one.read_share,
                    fitted: false,
                }),
                None if size.level(load).is_none() => lacking.push(format!("{}, {}", size.layout, loads[load].name)),
                None => {}
            }
        }
    }
    if !lacking.is_empty() {
        sweep.notes.push(format!(
            "not calculated, as that takes one replica under its share of the streams: {}",
            lacking.join("; ")
        ));
    }
}

/// What serving adds to the time of a token of `streams` users, and to that between two tokens of one; or what that
/// lacks.
fn added(
    sizes: &[Size],
    load: usize,
    streams: f64,
    step_ms: impl Fn(u32) -> Option<f64>,
) -> Result<(Added, Added), &'static str> {
    let mut on_token = [0.0; FITTED.len()];
    let mut on_gap = on_token;
    for (place, tp) in FITTED.into_iter().enumerate() {
        let level = sizes.iter().find(|size| size.layout == Layout::group(tp)).and_then(|size| size.level(load));
        let (level, step_ms) = level.zip(step_ms(tp)).ok_or("that takes measured sizes 1 and 2")?;
        let tpot_ms = level.mean_tpot_ms.ok_or("answers of one token have no time between tokens")?;
        on_token[place] = streams * 1e3 / level.output_throughput - step_ms;
        on_gap[place] = tpot_ms - step_ms;
    }
    Ok((Added::fit(on_token), Added::fit(on_gap)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_serving_adds_is_told_apart_and_never_negative() {
        let near = |measured: [f64; 2], fixed_ms: f64, shared_ms: f64| {
            let added = Added::fit(measured);
            assert!(
                (added.fixed_ms - fixed_ms).abs() < 1e-12 && (added.shared_ms - shared_ms).abs() < 1e-12,
                "{added:?}"
            );
        };
        near([0.5, 0.3], 0.1, 0.4);
        near([0.2, 0.4], 0.3, 0.0);
        near([0.5, 0.2], 0.0, 0.48);
        for measured in [[-0.1, -0.2], [-0.2, -0.1], [-0.3, -0.3]] {
            assert_eq!(Added::fit(measured), Added { fixed_ms: 0.0, shared_ms: 0.0 }, "{measured:?}");
        }
        assert!((Added::fit([0.5, 0.3]).on_ms(4) - 0.2).abs() < 1e-12);
    }
}
