//! How a request's drafts fared, as clients may ask to be told: vLLM's `metrics.speculative_decoding`.

use std::collections::BTreeMap;

use serde::Serialize;

/// The most that may be drafted for a sequence in a step.
pub const MOST_DRAFTS: u32 = 32;

/// What of it answers tell.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum DraftReport {
    /// Nothing.
    #[default]
    None,
    /// Counts, and a histogram.
    Summary,
    /// Each step, too.
    Detailed,
}

/// A step of a sequence that had drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DraftStep {
    /// Tokens that were drafted, at least one.
    pub drafted: u32,
    /// The first of them, those that were what the model said.
    pub accepted: u32,
}

/// What an answer tells of its drafts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DraftMetrics {
    /// Tokens of a step with drafts, in the mean; 1 where there was none.
    mean_acceptance_length: f64,
    /// Share of the drafted tokens that were accepted; 0 where there was none.
    draft_acceptance_rate: f64,
    /// By accepted tokens: steps.
    acceptance_histogram: Vec<u32>,
    /// The same of steps with so many drafts.
    acceptance_histogram_by_draft_length: BTreeMap<u32, Vec<u32>>,
    num_spec_steps: usize,
    num_accepted_draft_tokens: u64,
    num_draft_tokens: u64,
    /// Most for a step.
    num_spec_tokens: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_step_accepted: Option<Vec<u32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_step_drafted: Option<Vec<u32>>,
}

impl DraftMetrics {
    /// Of a sequence's steps with drafts, of which there may be `most` in each; `None` where none may be, or nobody
    /// asks.
    pub fn of(report: DraftReport, steps: &[DraftStep], most: u32) -> Option<Self> {
        if report == DraftReport::None || most == 0 {
            return None;
        }
        let mut by_accepted = vec![0; most as usize + 1];
        let mut by_length: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for step in steps {
            by_accepted[step.accepted.min(most) as usize] += 1;
            let of_length = by_length.entry(step.drafted).or_insert_with(|| vec![0; step.drafted as usize + 1]);
            of_length[step.accepted.min(step.drafted) as usize] += 1;
        }
        let sum = |of: fn(&DraftStep) -> u32| steps.iter().map(|step| u64::from(of(step))).sum::<u64>();
        let (drafted, accepted) = (sum(|step| step.drafted), sum(|step| step.accepted));
        let each = |of: fn(&DraftStep) -> u32| {
            (report == DraftReport::Detailed).then(|| steps.iter().map(of).collect::<Vec<u32>>())
        };
        Some(Self {
            mean_acceptance_length: 1.0 + accepted as f64 / steps.len().max(1) as f64,
            draft_acceptance_rate: accepted as f64 / drafted.max(1) as f64,
            acceptance_histogram: by_accepted,
            acceptance_histogram_by_draft_length: by_length,
            num_spec_steps: steps.len(),
            num_accepted_draft_tokens: accepted,
            num_draft_tokens: drafted,
            num_spec_tokens: most,
            per_step_accepted: each(|step| step.accepted),
            per_step_drafted: each(|step| step.drafted),
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn told(report: DraftReport, steps: &[(u32, u32)], most: u32) -> Value {
        let steps: Vec<_> = steps.iter().map(|&(drafted, accepted)| DraftStep { drafted, accepted }).collect();
        serde_json::to_value(DraftMetrics::of(report, &steps, most)).unwrap()
    }

    #[test]
    fn steps_are_counted_by_how_many_were_drafted_and_held() {
        let summary = told(DraftReport::Summary, &[(3, 0), (3, 3), (1, 1), (3, 0)], 3);
        let expected = json!({
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.4,
            "acceptance_histogram": [2, 1, 0, 1],
            "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [2, 0, 0, 1]},
            "num_spec_steps": 4,
            "num_accepted_draft_tokens": 4,
            "num_draft_tokens": 10,
            "num_spec_tokens": 3,
        });
        assert_eq!(summary, expected);
        let detailed = told(DraftReport::Detailed, &[(3, 0), (2, 1)], 3);
        assert_eq!((&detailed["per_step_drafted"], &detailed["per_step_accepted"]), (&json!([3, 2]), &json!([0, 1])));
    }

    #[test]
    fn nothing_drafted_is_told_and_nothing_asked_is_not() {
        let none = told(DraftReport::Summary, &[], 2);
        assert_eq!((&none["mean_acceptance_length"], &none["acceptance_histogram"]), (&json!(1.0), &json!([0, 0, 0])));
        assert_eq!(told(DraftReport::None, &[(1, 1)], 2), Value::Null);
        assert_eq!(told(DraftReport::Detailed, &[], 0), Value::Null, "drafts are off");
    }
}
