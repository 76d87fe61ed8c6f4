//! A group that is ended on purpose, to be replaced: it finishes what it has begun, and begins nothing more. What it
//! has not finished when it ends waits for another, as after a loss, and nobody is to blame.

use super::Scheduler;
use super::sequence::Turn;

impl Scheduler {
    /// The group is to end soon: who is in a slot, or was, goes on; nobody else begins.
    pub fn group_ending(&mut self) {
        self.is_ending = self.group_up;
    }

    /// The group goes on after all.
    pub fn group_stays(&mut self) {
        self.is_ending = false;
    }

    /// The group has ended. Everything that ran waits again, to be computed from its first position with the tokens
    /// that came back; who was on trial begins it anew.
    pub fn group_ended(&mut self) {
        self.forget_group();
        self.trials.interrupt();
        self.end_self_test();
        self.debug_check();
    }

    /// No sequence is in a slot, nor may a step be under way that computes one.
    pub fn is_at_rest(&self) -> bool {
        self.running.is_empty() && self.leaving.is_empty() && !self.is_outstanding()
    }

    /// Whether the group takes the sequence, if there is room.
    pub(super) fn may_begin(&self, turn: &Turn) -> bool {
        !(self.is_ending && turn.is_fresh())
    }
}
