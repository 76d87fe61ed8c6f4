//! The plans on their way: which were sent, which one runs, and how many steps they may still bring.
//!
//! A plan is *unstarted* until an outcome carries its version. Only the front of the queue can have started: the
//! outcome of a plan says that all earlier ones are over.

use std::collections::{BTreeSet, VecDeque};

use looplane_proto::worker::v1::{Outcome, Plan};

/// A plan that was sent and is not known to be over.
#[derive(Debug)]
pub(super) struct SentPlan {
    pub(super) version: u64,
    /// Bound on its steps.
    pub(super) steps: u32,
    /// Steps that were reported.
    pub(super) reported: u32,
    /// It reported that it ran no step.
    pub(super) idle: bool,
    /// Sequences that get a token in each step.
    pub(super) decode: Vec<u64>,
    /// Sequences of whose prompts its first step computes a chunk.
    prefill: Vec<u64>,
    /// Prompt tokens that its first step computes.
    pub(super) prompt_rows: u32,
    /// Tokens that may be drafted in a step.
    draft_rows: u32,
}

/// The plans of the current group, oldest first.
#[derive(Debug)]
pub(super) struct Pipeline {
    plans: VecDeque<SentPlan>,
    next_version: u64,
}

impl Pipeline {
    /// Nothing sent; versions start at `first_version`.
    pub(super) fn new(first_version: u64) -> Self {
        Self { plans: VecDeque::new(), next_version: first_version }
    }

    /// Version of the plan that is built next.
    pub(super) fn next_version(&self) -> u64 {
        self.next_version
    }

    /// Takes note of a plan that is sent; `prefill` and `decode` name its sequences.
    pub(super) fn push(&mut self, plan: &Plan, prefill: Vec<u64>, decode: Vec<u64>) {
        debug_assert_eq!(plan.version, self.next_version);
        self.next_version += 1;
        self.plans.push_back(SentPlan {
            version: plan.version,
            steps: plan.steps,
            reported: 0,
            idle: false,
            decode,
            prefill,
            draft_rows: plan.drafts.as_ref().map_or(0, |of| of.rows.min(of.each * plan.decode.len() as u32)),
            prompt_rows: plan.prefill.iter().map(|chunk| chunk.len).sum(),
        });
    }

    /// Takes note of an outcome. Says what is wrong with one that the protocol does not allow.
    pub(super) fn report(&mut self, outcome: &Outcome) -> Result<(), String> {
        let started = self.started().map(|plan| (plan.version, plan.reported, plan.idle));
        let expected = match started {
            Some((version, reported, idle)) if version == outcome.version => {
                if idle || !outcome.ran_step {
                    return Err(format!("two outcomes of plan {version}, one of which says that it ran no step"));
                }
                reported
            }
            _ => {
                let next = self.plans.get(usize::from(started.is_some())).map(|plan| plan.version);
                if next != Some(outcome.version) {
                    return Err(format!(
                        "an outcome of plan {}, where plan {:?} or {next:?} was expected",
                        outcome.version,
                        started.map(|s| s.0)
                    ));
                }
                if started.is_some() {
                    self.plans.pop_front();
                }
                0
            }
        };
        let plan = self.plans.front_mut().expect("the plan of the outcome was found above");
        if outcome.step != expected || outcome.step >= plan.steps {
            return Err(format!(
                "step {} of plan {}, where step {expected} of {} was expected",
                outcome.step, plan.version, plan.steps
            ));
        }
        plan.reported = expected + 1;
        plan.idle = !outcome.ran_step;
        Ok(())
    }

    /// The plan that runs, as far as is known.
    pub(super) fn started(&self) -> Option<&SentPlan> {
        self.plans.front().filter(|plan| plan.reported > 0)
    }

    /// Plans of which no step was reported.
    pub(super) fn unstarted(&self) -> impl Iterator<Item = &SentPlan> {
        self.plans.iter().filter(|plan| plan.reported == 0)
    }

    /// Sequences that a step computes which may be running or is yet to run.
    pub(super) fn computed(&self) -> BTreeSet<u64> {
        let in_first_step = self.unstarted().flat_map(|plan| &plan.prefill);
        let go_on = self.plans.iter().filter(|plan| !plan.idle && plan.reported < plan.steps);
        in_first_step.chain(go_on.flat_map(|plan| &plan.decode)).copied().collect()
    }

    /// Rows of the largest step that may be running or is yet to run.
    pub(super) fn rows_ahead(&self) -> u32 {
        let decoding = |plan: &SentPlan| plan.decode.len() as u32 + plan.draft_rows;
        let rows = |plan: &SentPlan| decoding(plan) + if plan.reported == 0 { plan.prompt_rows } else { 0 };
        self.plans.iter().map(rows).max().unwrap_or(0)
    }

    /// Tokens that a sequence which decodes from plan `version` on gets at least before a plan sent now takes over: one
    /// of each unstarted plan.
    pub(super) fn plans_since(&self, version: u64) -> u64 {
        let oldest = self.unstarted().next().map_or(self.next_version, |plan| plan.version);
        self.next_version - oldest.max(version)
    }

    /// Steps that may run at most before a plan sent now takes over.
    pub(super) fn steps_ahead(&self) -> u64 {
        self.plans.iter().filter(|plan| !plan.idle).map(|plan| u64::from(plan.steps - plan.reported)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sent(steps: &[u32]) -> Pipeline {
        let mut pipeline = Pipeline::new(1);
        for &steps in steps {
            let plan = Plan { version: pipeline.next_version(), steps, ..Plan::default() };
            pipeline.push(&plan, vec![], vec![7]);
        }
        pipeline
    }

    fn step(version: u64, step: u32) -> Outcome {
        Outcome { version, step, ran_step: true, ..Outcome::default() }
    }

    #[test]
    fn a_plan_is_over_when_the_next_reports() {
        let mut pipeline = sent(&[4, 4, 4]);
        assert_eq!((pipeline.plans_since(1), pipeline.plans_since(3), pipeline.steps_ahead()), (3, 1, 12));
        pipeline.report(&step(1, 0)).unwrap();
        pipeline.report(&step(1, 1)).unwrap();
        assert_eq!((pipeline.unstarted().count(), pipeline.steps_ahead()), (2, 10));
        pipeline.report(&step(2, 0)).unwrap();
        assert_eq!((pipeline.started().unwrap().version, pipeline.steps_ahead()), (2, 7));
        assert_eq!((pipeline.plans_since(1), pipeline.plans_since(4)), (1, 0));
    }

    #[test]
    fn outcomes_out_of_order_are_refused() {
        for bad in [step(0, 0), step(2, 0), step(1, 1)] {
            assert!(sent(&[4, 4]).report(&bad).is_err(), "{bad:?}");
        }
        let mut pipeline = sent(&[2, 4]);
        pipeline.report(&step(1, 0)).unwrap();
        for bad in [step(1, 0), step(1, 2), step(2, 1), step(3, 0)] {
            assert!(sent(&[2, 4]).report(&step(1, 0)).is_ok());
            assert!(pipeline.report(&bad).is_err(), "{bad:?}");
            pipeline = sent(&[2, 4]);
            pipeline.report(&step(1, 0)).unwrap();
        }
        pipeline.report(&step(1, 1)).unwrap();
        assert!(pipeline.report(&step(1, 2)).is_err(), "past the bound of the plan");
        let mut pipeline = sent(&[2]);
        pipeline.report(&Outcome { version: 1, ..Outcome::default() }).unwrap();
        assert!(pipeline.report(&step(1, 1)).is_err(), "a step after 'ran no step'");
    }
}
