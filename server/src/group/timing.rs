//! Times steps of many sizes on a group that is up, before it serves anybody.
//!
//! By plans of its own in the ordinary stream: that sees the whole path of a step, on every backend, with all ranks
//! together. A worker by itself could time nothing, as the ranks of a group wait for each other in every step.

use std::time::Duration;

use looplane_proto::worker::v1::{Admit, Outcome, PageGrant, Plan, PrefillChunk, Sampling};
use tokio::time::{Instant, timeout};

use super::fault::StartError;
use super::start::{Link, RankEvent};
use super::step_times::{StepTime, StepTimes};
use crate::sched::GroupShape;

/// Steps of which the median counts, where all rows decode.
const DECODE_STEPS: u32 = 3;
/// Times that a step with rows of prompts is run: the first may load what was never used.
const PROMPT_RUNS: u32 = 2;
/// Numbers of the sequences; those of requests begin at 1 and do not come near.
const FIRST_SEQUENCE: u64 = 1 << 63;

/// What is timed, in this order, as far as the time for it goes.
const PROBES: [Probe; 18] = [
    Probe::Decode(1),
    Probe::Prompt(64),
    Probe::Decode(8),
    Probe::Decode(32),
    Probe::Prompt(128),
    Probe::Decode(64),
    Probe::Prompt(256),
    Probe::Decode(128),
    Probe::Prompt(512),
    Probe::Decode(256),
    Probe::Prompt(1024),
    Probe::Decode(512),
    Probe::Prompt(2048),
    Probe::Prompt(4096),
    Probe::Prompt(384),
    Probe::Prompt(768),
    Probe::Prompt(1536),
    Probe::Prompt(3072),
];

/// Steps of so many rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Probe {
    /// Each row decodes a sequence of its own.
    Decode(u32),
    /// All rows are of prompts, of one if it can be as long.
    Prompt(u32),
}

/// Times steps for about `limit`, none of which may take longer than `step_limit`. The group's next plan follows in
/// `link.facts.shape`.
///
/// # Errors
/// A rank is lost, or breaks the protocol.
pub(super) async fn time_steps(
    link: &mut Link,
    limit: Duration,
    step_limit: Duration,
) -> Result<Vec<StepTime>, StartError> {
    let begun = Instant::now();
    let (mut known, mut timed) = (StepTimes::new(false, None), Vec::new());
    let mut held = 0;
    for probe in PROBES {
        let (Probe::Decode(rows) | Probe::Prompt(rows)) = probe;
        let runs = if matches!(probe, Probe::Prompt(_)) { PROMPT_RUNS } else { 1 };
        let mut fastest: Option<StepTime> = None;
        for _ in 0..runs {
            let Some(plan) = probe.plan(&link.facts.shape, link.facts.model.max_context, held) else { break };
            let cost = known.expected(rows).map_or(Duration::ZERO, |step| step * plan.steps);
            if begun.elapsed() + cost > limit {
                break;
            }
            held = plan.admit.len() as u32;
            let outcomes = run(link, plan, step_limit).await?;
            let time = probe.time(&outcomes);
            fastest = Some(fastest.map_or(time, |fastest| if time.time < fastest.time { time } else { fastest }));
        }
        if let Some(time) = fastest {
            known.observe(&time);
            timed.push(time);
        }
    }
    let version = link.facts.shape.first_version;
    run(link, Plan { version, steps: 1, release: (0..held).collect(), ..Plan::default() }, step_limit).await?;
    Ok(timed)
}

impl Probe {
    /// A plan that runs the steps once, in place of the first `held` slots' sequences; `None` if they do not fit.
    fn plan(self, shape: &GroupShape, max_context: u32, held: u32) -> Option<Plan> {
        // A token of the context is for the answer.
        let longest = max_context.checked_sub(1).filter(|longest| *longest > 0)?;
        let (lengths, max_tokens) = match self {
            Self::Decode(_) if longest < DECODE_STEPS + 1 => return None,
            Self::Decode(rows) => (vec![1; rows as usize], DECODE_STEPS + 1),
            Self::Prompt(rows) => {
                let whole = std::iter::repeat_n(longest, (rows / longest) as usize);
                (whole.chain(Some(rows % longest).filter(|rest| *rest > 0)).collect(), 1)
            }
        };
        let (slots, rows) = (lengths.len() as u32, lengths.iter().sum::<u32>());
        let pages = |length: &u32| (length + max_tokens - 1).div_ceil(shape.page_positions);
        let needed: u64 = lengths.iter().map(|length| u64::from(pages(length))).sum();
        if slots > shape.max_slots || rows > shape.max_batch_tokens || needed > u64::from(shape.kv_pages) {
            return None;
        }
        let mut free = 0..shape.kv_pages;
        let mut plan = Plan {
            version: shape.first_version,
            steps: max_tokens,
            release: (0..held).collect(),
            decode: if max_tokens > 1 { (0..slots).collect() } else { Vec::new() },
            ..Plan::default()
        };
        for (slot, length) in (0..).zip(lengths) {
            plan.admit.push(admit(slot, shape.first_version, length, max_tokens));
            plan.grants.push(PageGrant {
                slot,
                first: 0,
                pages: free.by_ref().take(pages(&length) as usize).collect(),
            });
            plan.prefill.push(PrefillChunk { slot, start: 0, len: length });
        }
        Some(plan)
    }

    /// What its step took.
    fn time(self, outcomes: &[Outcome]) -> StepTime {
        let nanoseconds = |outcomes: &[Outcome]| {
            let mut times: Vec<u64> = outcomes.iter().map(|outcome| outcome.step_ns).collect();
            times.sort_unstable();
            Duration::from_nanos(times[times.len() / 2])
        };
        match self {
            // The first step computed the prompts.
            Self::Decode(rows) => StepTime { decode_rows: rows, prompt_rows: 0, time: nanoseconds(&outcomes[1..]) },
            Self::Prompt(rows) => StepTime { decode_rows: 0, prompt_rows: rows, time: nanoseconds(outcomes) },
        }
    }
}

/// A sequence of `length` tokens, whichever; it takes the largest logit.
fn admit(slot: u32, version: u64, length: u32, max_tokens: u32) -> Admit {
    let sampling = Sampling { top_p: 1.0, repetition_penalty: 1.0, ..Sampling::default() };
    Admit {
        slot,
        sequence: FIRST_SEQUENCE + (version << 32) + u64::from(slot),
        tokens: vec![0; length as usize],
        prompt_tokens: length,
        max_tokens,
        sampling: Some(sampling),
        ..Admit::default()
    }
}

/// Runs a plan to its end on all ranks, and returns the outcomes of rank 0.
async fn run(link: &mut Link, plan: Plan, step_limit: Duration) -> Result<Vec<Outcome>, StartError> {
    let (version, steps) = (plan.version, plan.steps as usize);
    let rows = plan.prefill.len() as u32;
    for (rank, plans) in link.plans.iter().enumerate() {
        let refused = |_| StartError::fault(format!("rank {rank} does not take its plans"));
        plans.try_send(plan.clone()).map_err(refused)?;
    }
    link.facts.shape.first_version += 1;
    let mut outcomes: Vec<Vec<Outcome>> = vec![Vec::new(); link.plans.len()];
    while outcomes.iter().any(|outcomes| outcomes.len() < steps) {
        let event = timeout(step_limit, link.events.recv()).await;
        let event = event.map_err(|_| StartError::fault(format!("no step was reported within {step_limit:?}")))?;
        match event {
            Some(RankEvent::Outcome { rank, outcome }) => {
                let expected = (version, outcomes[rank].len() as u32, rows > 0);
                if (outcome.version, outcome.step, outcome.ran_step) != expected {
                    let words = format!("rank {rank} reported {outcome:?} where {expected:?} was to come");
                    return Err(StartError::fault(words));
                }
                outcomes[rank].push(outcome);
            }
            Some(RankEvent::Ended { rank, words }) => return Err(StartError::broken_stream(rank, &words)),
            None => return Err(StartError::fault("all ranks ended their outcomes".into())),
        }
    }
    Ok(outcomes.swap_remove(0))
}

/// The times in one line, for the log.
pub(super) fn in_words(timed: &[StepTime]) -> String {
    let of_kind = |is_kind: fn(&StepTime) -> bool, rows: fn(&StepTime) -> u32| {
        let steps = timed.iter().filter(|step| is_kind(step));
        let words = steps.map(|step| format!("{}: {:.2}", rows(step), step.time.as_secs_f64() * 1e3));
        words.collect::<Vec<_>>().join(", ")
    };
    format!(
        "ms a step by rows, decoding: {}; of prompts: {}",
        of_kind(|step| step.prompt_rows == 0, |step| step.decode_rows),
        of_kind(|step| step.prompt_rows > 0, |step| step.prompt_rows)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::fake_worker::{FakeWorker, Shape};

    fn shape(max_slots: u32, max_batch_tokens: u32, kv_pages: u32) -> GroupShape {
        GroupShape { kv_pages, page_positions: 16, max_slots, max_batch_tokens, first_version: 1 }
    }

    /// Runs what fits, one after the other, and returns what was run.
    fn run_all(mut shape: GroupShape, max_context: u32) -> Vec<Probe> {
        let GroupShape { max_slots, max_batch_tokens, kv_pages, page_positions, .. } = shape;
        let mut worker = FakeWorker::new(Shape { max_slots, max_batch_tokens, kv_pages, page_positions });
        let mut held = 0;
        let fits = PROBES.into_iter().filter(|probe| {
            let Some(plan) = probe.plan(&shape, max_context, held) else { return false };
            shape.first_version += 1;
            held = plan.admit.len() as u32;
            let steps = plan.steps;
            worker.receive(plan);
            let rows: Vec<u32> = (0..steps).map(|_| worker.run(u64::MAX).expect("a step").rows).collect();
            let (Probe::Decode(wanted) | Probe::Prompt(wanted)) = *probe;
            assert_eq!(rows, vec![wanted; steps as usize], "{probe:?}");
            assert!(worker.rests(), "{probe:?}");
            true
        });
        fits.collect()
    }

    #[test]
    fn plans_keep_the_protocol_and_have_the_rows_they_say() {
        assert_eq!(run_all(shape(512, 4096, 4096), 5000), PROBES);
        // Prompts of several sequences, where one would be too long.
        assert_eq!(run_all(shape(512, 4096, 4096), 300), PROBES);
        let fewer = |probe: &Probe| !matches!(probe, Probe::Prompt(rows) if *rows > 2048);
        assert_eq!(run_all(shape(512, 2048, 4096), 4096), PROBES.into_iter().filter(fewer).collect::<Vec<_>>());
        let small = run_all(shape(40, 300, 35), 1000);
        let fits = [Probe::Decode(1), Probe::Prompt(64), Probe::Decode(8), Probe::Decode(32)];
        assert_eq!(small, [&fits[..], &[Probe::Prompt(128), Probe::Prompt(256)]].concat());
        assert_eq!(run_all(shape(1, 8, 1), 3), [], "not even a sequence of a prompt token and four more");
    }
}
