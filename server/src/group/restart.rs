//! When a lost group is started again, and when no more. Pure: it is told what happened and when.

use std::collections::VecDeque;
use std::time::Duration;

use super::config::Timeouts;

/// How a group was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// It did not come up, or was lost early and without having computed a step, or could not prove itself.
    FailedStart,
    /// It had computed steps, or had been up for long.
    Running,
    /// It is put down to a request, which has failed; so are the losses before it that the request was computed in.
    Attributed {
        /// All of them.
        losses: u32,
    },
}

/// What follows a loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The next start.
    Restart {
        /// The pause before it.
        after: Duration,
    },
    /// No further start.
    GiveUp {
        /// Failed starts in a row.
        failed_starts: u32,
    },
}

/// Counts losses. Times are since any fixed moment.
///
/// The first loss within the window costs no pause: a single worker that dies should cost streams as little as can be.
/// Each further one doubles the pause, whatever the group computed in between, so a worker that dies again and again
/// cannot keep the machine busy with starts. Losses that are put down to a request do not count: who sends it again
/// must not bring the server down.
#[derive(Debug)]
pub(super) struct RestartPolicy {
    backoff: Duration,
    backoff_limit: Duration,
    window: Duration,
    max_failed_starts: u32,
    /// When the losses within the window were.
    losses: VecDeque<Duration>,
    failed_starts: u32,
}

impl RestartPolicy {
    /// Nothing was lost yet.
    pub(super) fn new(timeouts: &Timeouts, max_failed_starts: u32) -> Self {
        Self {
            backoff: timeouts.backoff,
            backoff_limit: timeouts.backoff_limit,
            window: timeouts.loss_window,
            max_failed_starts,
            losses: VecDeque::new(),
            failed_starts: 0,
        }
    }

    /// What to do after a loss at `now`.
    pub(super) fn lost(&mut self, loss: Loss, now: Duration) -> Verdict {
        match loss {
            Loss::Attributed { losses } => {
                let others = self.losses.len().saturating_sub(losses.saturating_sub(1) as usize);
                self.losses.truncate(others);
                self.failed_starts = 0;
                return Verdict::Restart { after: Duration::ZERO };
            }
            Loss::Running => self.failed_starts = 0,
            Loss::FailedStart => self.failed_starts += 1,
        }
        if self.failed_starts >= self.max_failed_starts {
            return Verdict::GiveUp { failed_starts: self.failed_starts };
        }
        while self.losses.pop_front_if(|then| now.saturating_sub(*then) >= self.window).is_some() {}
        let after = match self.losses.len() {
            0 => Duration::ZERO,
            before => self.backoff.saturating_mul(1 << (before - 1).min(16)).min(self.backoff_limit),
        };
        self.losses.push_back(now);
        Verdict::Restart { after }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn policy() -> RestartPolicy {
        let timeouts =
            Timeouts { backoff: MS(100), backoff_limit: MS(5000), loss_window: MS(60_000), ..Timeouts::default() };
        RestartPolicy::new(&timeouts, 5)
    }

    fn pause(verdict: Verdict) -> u64 {
        match verdict {
            Verdict::Restart { after } => after.as_millis() as u64,
            Verdict::GiveUp { .. } => panic!("given up"),
        }
    }

    #[test]
    fn a_worker_that_dies_every_few_steps_is_started_ever_more_seldom() {
        let mut policy = policy();
        let (mut now, mut starts) = (0, 0);
        let mut pauses = Vec::new();
        while now < 3000 {
            // A life of 100 ms, in which it computes 20 steps.
            now += 100;
            let pause = pause(policy.lost(Loss::Running, MS(now)));
            pauses.push(pause);
            now += pause;
            starts += 1;
        }
        assert_eq!(pauses, [0, 100, 200, 400, 800, 1600]);
        assert_eq!(starts, 6, "where it was 30 before");
        for _ in 0..50 {
            now += 100 + pause(policy.lost(Loss::Running, MS(now)));
        }
        assert_eq!(pause(policy.lost(Loss::Running, MS(now))), 5000, "the limit, and never given up while it computes");
    }

    #[test]
    fn losses_that_are_far_apart_cost_no_pause() {
        let mut policy = policy();
        for hour in 0..10 {
            assert_eq!(pause(policy.lost(Loss::Running, MS(hour * 3_600_000))), 0);
        }
    }

    #[test]
    fn failed_starts_in_a_row_are_given_up() {
        let mut policy = policy();
        for _ in 0..4 {
            pause(policy.lost(Loss::FailedStart, MS(0)));
        }
        pause(policy.lost(Loss::Running, MS(1)));
        for _ in 0..4 {
            pause(policy.lost(Loss::FailedStart, MS(2)));
        }
        assert_eq!(policy.lost(Loss::FailedStart, MS(3)), Verdict::GiveUp { failed_starts: 5 });
    }

    #[test]
    fn losses_that_are_attributed_do_not_count() {
        let mut policy = policy();
        for round in 0..100 {
            // In its first step each time, as far as the policy knows until the third.
            assert_eq!(pause(policy.lost(Loss::FailedStart, MS(round))), 0);
            assert_eq!(pause(policy.lost(Loss::FailedStart, MS(round))), 100);
            assert_eq!(pause(policy.lost(Loss::Attributed { losses: 3 }, MS(round))), 0);
        }
        // What was lost before and beside them does.
        pause(policy.lost(Loss::Running, MS(100)));
        pause(policy.lost(Loss::FailedStart, MS(100)));
        pause(policy.lost(Loss::FailedStart, MS(100)));
        pause(policy.lost(Loss::Attributed { losses: 3 }, MS(100)));
        assert_eq!(pause(policy.lost(Loss::Running, MS(101))), 100);
    }
}
