//! Signs of life, and what becomes of a host without them, or of its sequences without a host.

use std::time::Duration;

use looplane_proto::fleet::v1::{Beat, front_message};
use tokio::time::Instant;

use super::super::{BEAT, MOST_SILENT};
use super::Place;
use crate::engine::{EngineState, Load, SequenceEvent, SubmitError};

/// Sequences of a lost host that nobody goes on with wait so long for a host.
const AWAITED: Duration = Duration::from_secs(60);
/// A sequence that was on so many hosts as they were lost, without getting on in between, fails: it may be why.
const MOST_LOSSES: u32 = 3;

impl Place {
    pub(super) fn beat(&mut self) {
        if self.session.is_none() {
            if self.lost_at.is_some_and(|at| at.elapsed() >= AWAITED) {
                self.fail_all(&format!(
                    "the workers that computed it were lost, and no host has joined for {AWAITED:?}"
                ));
            }
            return;
        }
        self.silent += 1;
        if self.silent > MOST_SILENT {
            return self.lost(&format!("it said nothing for {:?}", BEAT * MOST_SILENT));
        }
        self.send(front_message::Message::Beat(Beat {}));
    }

    /// The host is given up. What it had goes on elsewhere, or waits.
    pub(super) fn lost(&mut self, reason: &str) {
        let Some(session) = self.session.take() else { return };
        let (number, host, is_leaving) = (self.number, &session.host, session.is_leaving());
        let count = goes_on(self.sequences.len());
        session.end(format!("given up by the front end: {reason}"));
        if is_leaving {
            tracing::info!("host {host} has left as replica {number}, with {count}");
        } else {
            tracing::warn!("host {host} is lost as replica {number}: {reason}; it had {count}");
            self.metrics.losses.inc();
        }
        let words = match is_leaving {
            true => format!("host {host} has left; waiting for a host to join"),
            false => format!("host {host} was lost ({reason}); waiting for a host to join"),
        };
        drop(session);
        for (_, (_, submission)) in std::mem::take(&mut self.submissions) {
            submission.refuse(SubmitError::Unavailable(format!("without the host that was asked: {words}")));
        }
        for (number, mut moved) in std::mem::take(&mut self.sequences) {
            // The word of its end was on its way.
            if let Some(reason) = moved.sequence.ended() {
                self.behind.remove(&number);
                moved.sender.send(SequenceEvent::Finished(reason));
                moved.life.end(reason.into(), Instant::now(), &self.metrics);
                continue;
            }
            if !is_leaving {
                moved.sequence.lost();
            }
            if moved.sequence.losses > MOST_LOSSES {
                self.behind.remove(&number);
                let losses = moved.sequence.losses;
                self.fail(moved, &format!("hosts were lost {losses} times in a row while they had this request"));
            } else {
                self.sequences.insert(number, moved);
            }
        }
        self.lost_at = Some(Instant::now());
        let preemptions = self.metrics.load().preemptions;
        self.metrics.set_load(Load { preemptions, ..Load::default() });
        // The router sees it, and has this place hand over.
        self.show(EngineState::Loading(words));
    }
}

/// A number of sequences in words.
pub(super) fn goes_on(sequences: usize) -> String {
    match sequences {
        0 => "no sequence".into(),
        1 => "1 sequence that goes on".into(),
        count => format!("{count} sequences that go on"),
    }
}
