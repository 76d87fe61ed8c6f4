//! When a lost group is started again, and when no more. Pure: it is told what happened and when.

use std::collections::VecDeque;
use std::time::Duration;

use super::config::Timeouts;

/// How a group was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    /// It did not come up, or was lost early and without having been given work, or could not prove itself.
    FailedStart,
    /// It had been given work, or had been up for long.
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
/// cannot keep the machine busy with starts. Losses that are put down to a request are forgiven, once within the window:
/// one bad request must not slow the server down. Where there are more of them, the requests may be innocent and the
/// machine sick; nobody brings the server down by them, but the pauses grow.
#[derive(Debug)]
pub(super) struct RestartPolicy {
    backoff: Duration,
    backoff_limit: Duration,
    window: Duration,
    max_failed_starts: u32,
    /// The losses within the window.
    losses: VecDeque<(Duration, Loss)>,
    /// When a loss was last put down to a request.
    attributed: Option<Duration>,
    /// In a row, and when the first of them was.
    failed_starts: u32,
    failing_since: Duration,
    /// A group was up: the model can be served.
    has_served: bool,
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
            attributed: None,
            failed_starts: 0,
            failing_since: Duration::ZERO,
            has_served: false,
        }
    }

    /// A group is up. From now on failed starts have to go on for the window before they are given up: what has served
    /// may well serve again.
    pub(super) fn group_ready(&mut self) {
        self.has_served = true;
    }

    /// What to do after a loss at `now`.
    pub(super) fn lost(&mut self, loss: Loss, now: Duration) -> Verdict {
        let is_recent = |then: Duration| now.saturating_sub(then) < self.window;
        match loss {
            Loss::Attributed { losses } => {
                let is_first = !self.attributed.replace(now).is_some_and(is_recent);
                if is_first {
                    self.forgive(losses.saturating_sub(1));
                    return Verdict::Restart { after: Duration::ZERO };
                }
            }
            Loss::Running => self.failed_starts = 0,
            Loss::FailedStart => {
                self.failed_starts += 1;
                if self.failed_starts == 1 {
                    self.failing_since = now;
                }
            }
        }
        if self.failed_starts >= self.max_failed_starts && !(self.has_served && is_recent(self.failing_since)) {
            return Verdict::GiveUp { failed_starts: self.failed_starts };
        }
        while self.losses.pop_front_if(|(then, _)| now.saturating_sub(*then) >= self.window).is_some() {}
        let after = match self.losses.len() {
            0 => Duration::ZERO,
            before => self.backoff.saturating_mul(1 << (before - 1).min(16)).min(self.backoff_limit),
        };
        self.losses.push_back((now, loss));
        Verdict::Restart { after }
    }

    /// Takes back the newest `losses` of groups that had worked.
    fn forgive(&mut self, losses: u32) {
        for _ in 0..losses {
            let Some(newest) = self.losses.iter().rposition(|(_, loss)| *loss == Loss::Running) else { return };
            self.losses.remove(newest);
        }
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
    fn what_has_served_is_given_the_window_to_serve_again() {
        let mut policy = policy();
        policy.group_ready();
        let mut now = 0;
        while now < 60_000 {
            now += 1 + pause(policy.lost(Loss::FailedStart, MS(now)));
        }
        assert!(matches!(policy.lost(Loss::FailedStart, MS(now)), Verdict::GiveUp { failed_starts: 6.. }));
    }

    #[test]
    fn a_loss_that_is_attributed_costs_no_pause_and_many_of_them_do() {
        let mut policy = policy();
        pause(policy.lost(Loss::FailedStart, MS(0)));
        assert_eq!(pause(policy.lost(Loss::Running, MS(0))), 100);
        assert_eq!(pause(policy.lost(Loss::Running, MS(0))), 200);
        assert_eq!(pause(policy.lost(Loss::Attributed { losses: 3 }, MS(0))), 0);
        assert_eq!(pause(policy.lost(Loss::Running, MS(1))), 100, "what was lost before does count");
        // One poison after the other, or a machine on which whoever is computed dies.
        let mut now = 2;
        for _ in 0..50 {
            for loss in [Loss::Running, Loss::Running, Loss::Attributed { losses: 3 }] {
                now += pause(policy.lost(loss, MS(now)));
            }
        }
        assert_eq!(pause(policy.lost(Loss::Attributed { losses: 3 }, MS(now))), 5000, "and the server is not given up");
        assert_eq!(pause(policy.lost(Loss::Running, MS(now + 60_000))), 0, "a window later all is forgotten");
    }
}
