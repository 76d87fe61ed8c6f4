//! Which sequence loses the group: suspects are computed one at a time, and alone.
//!
//! A sequence that was being computed in [`Limits::suspect_after`] losses becomes a suspect. While there are suspects,
//! the scheduler is in *trial*: a new group first proves itself on a few tokens of the scheduler's own, then each
//! suspect runs alone until it is cleared by [`CLEARED_AFTER`] tokens or by its end, and then makes room for the next.
//! A loss during that time has one possible cause, which fails; everybody else waits and loses nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::request::{SamplingParams, SequenceRequest};
use super::sequence::Sequence;
use super::{Action, Blame, Scheduler};

/// Tokens without a loss that clear a sequence: the first comes from its prompt, the others from the decode loop.
pub(super) const CLEARED_AFTER: u32 = 4;

/// Who is under suspicion.
#[derive(Debug, Default)]
pub(super) struct Trials {
    suspects: BTreeSet<u64>,
    /// In a slot, alone.
    on_trial: Option<u64>,
    /// The sequence with which the group is to prove itself, until it has ended.
    pub(super) self_test: Option<u64>,
}

impl Trials {
    /// Suspects are left, or the group is yet to prove itself: no other sequence is admitted.
    pub(super) fn is_on(&self) -> bool {
        self.self_test.is_some() || !self.suspects.is_empty()
    }

    /// It may have lost the group.
    pub(super) fn is_suspect(&self, sequence: u64) -> bool {
        self.suspects.contains(&sequence)
    }

    /// Who is computed alone now.
    pub(super) fn on_trial(&self) -> Option<u64> {
        self.on_trial
    }

    /// Who is computed alone next.
    pub(super) fn next(&self) -> Option<u64> {
        // The culprit is more often among those that came last: the others ran for a while.
        self.self_test.or_else(|| self.suspects.last().copied())
    }

    /// The sequence enters a slot, alone.
    pub(super) fn begin(&mut self, sequence: u64) {
        self.on_trial = Some(sequence);
    }

    /// The group is gone before anything was found out.
    pub(super) fn interrupt(&mut self) {
        self.on_trial = None;
    }

    /// The sequence has ended, or is cleared.
    pub(super) fn end(&mut self, sequence: u64) {
        self.suspects.remove(&sequence);
        self.on_trial.take_if(|on_trial| *on_trial == sequence);
        self.self_test.take_if(|self_test| *self_test == sequence);
    }

    /// Whether every suspect is one of `sequences`, and who is on trial is a suspect; for the check of the invariants.
    pub(super) fn are_known(&self, known: impl Fn(u64) -> bool) -> bool {
        let on_trial = self.on_trial.is_none_or(|id| self.self_test == Some(id) || self.suspects.contains(&id));
        on_trial && self.suspects.iter().chain(&self.self_test).all(|&id| known(id))
    }
}

/// A sequence with so many losses, and tokens since the last, got a token. Says whether it is cleared with it: earlier
/// losses do not count against it any more.
pub(super) fn clear(losses: &mut u32, tokens_since_loss: &mut u32) -> bool {
    *tokens_since_loss += 1;
    let is_due = *losses > 0 && *tokens_since_loss >= CLEARED_AFTER;
    if is_due {
        *losses = 0;
    }
    is_due
}

impl Sequence {
    /// As [`clear`].
    pub(super) fn is_cleared(&mut self) -> bool {
        clear(&mut self.losses, &mut self.tokens_since_loss)
    }
}

impl Scheduler {
    /// The group is gone. Everything that ran waits again, to be computed from its first position with the tokens that
    /// came back. What the loss can be put down to fails, and is returned.
    pub fn group_lost(&mut self, actions: &mut Vec<Action>) -> Blame {
        let mut computed = self.pipeline.computed();
        computed.retain(|id| self.sequences.contains_key(id));
        self.forget_group();
        let blame = match self.trials.on_trial.take() {
            Some(id) if computed.contains(&id) => self.convict(id, actions),
            _ => {
                computed.into_iter().for_each(|id| self.charge(id));
                Blame::Nobody
            }
        };
        self.end_self_test();
        self.debug_check();
        blame
    }

    /// The next group begins one of its own.
    pub(super) fn end_self_test(&mut self) {
        if let Some(id) = self.trials.self_test {
            self.remove(id);
        }
    }

    fn convict(&mut self, id: u64, actions: &mut Vec<Action>) -> Blame {
        let is_self_test = self.trials.self_test == Some(id);
        let sequence = self.remove(id).expect("who is on trial has not ended");
        if is_self_test {
            return Blame::Group;
        }
        let losses = sequence.losses + 1;
        let reason = format!(
            "the workers were lost {losses} times while they computed this request, the last time while they computed \
             nothing else: it is given up so that other requests can go on"
        );
        actions.push(Action::Failed { sequence: id, reason });
        let fingerprint = sequence.request.fingerprint();
        // Nobody needs to lose the group again to find out about its copies.
        let same = |(_, other): &(&u64, &Sequence)| other.request.fingerprint() == fingerprint;
        let copies: Vec<u64> = self.sequences.iter().filter(same).map(|(&id, _)| id).collect();
        for sequence in copies {
            self.remove(sequence);
            let reason = "the workers were lost while they computed the same request, and nothing else".to_owned();
            actions.push(Action::Failed { sequence, reason });
        }
        Blame::Sequence { sequence: id, fingerprint, losses }
    }

    /// Counts a loss against a sequence that was being computed.
    fn charge(&mut self, id: u64) {
        let sequence = self.sequences.get_mut(&id).expect("only known sequences are charged");
        sequence.losses += 1;
        sequence.tokens_since_loss = 0;
        if sequence.losses >= self.limits.suspect_after {
            self.trials.suspects.insert(id);
        }
    }

    /// A group that is about to compute suspects first proves itself on a short sequence of the scheduler's own: if it
    /// is lost under that, no request is to blame.
    pub(super) fn queue_self_test(&mut self) {
        let Some(pages) = &self.pages else { return };
        if self.trials.suspects.is_empty() || pages.total() == 0 {
            return;
        }
        // One token more than a suspect needs, as far as the smallest of caches holds them.
        let max_tokens = (CLEARED_AFTER + 1).min(pages.positions().min(u64::from(u32::MAX)) as u32);
        let sampling = SamplingParams::greedy();
        let (prompt, stop_tokens) = (vec![0], Vec::new());
        let (min_tokens, logprobs, cache_salt) = (0, None, Arc::default());
        let request = SequenceRequest {
            prompt,
            max_tokens,
            min_tokens,
            stop_tokens,
            sampling,
            logprobs,
            cache_salt,
            grammar: None,
            token_bounds: Arc::default(),
            prompt_logprobs: None,
        };
        let id = self.next_sequence;
        self.next_sequence += 1;
        let sequence = Sequence::new(request, None, self.limits.prefix_cache);
        self.queue.insert(sequence.turn(id));
        self.sequences.insert(id, sequence);
        self.trials.self_test = Some(id);
    }
}
