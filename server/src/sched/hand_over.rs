//! Sequences that another scheduler goes on with: their group is gone or about to end, and the other's is there.
//!
//! What is handed over is what a loss leaves in any case: the request and the tokens that came back. By the contract of
//! same bits the other group continues with the token that would have come here.

use super::pages::PagePool;
use super::request::{GeneratedToken, SequenceRequest};
use super::sequence::{Phase, Sequence};
use super::shares::Standing;
use super::trial::clear;
use super::{FinishReason, Scheduler};

/// A sequence between two schedulers.
#[derive(Debug, Clone, PartialEq)]
pub struct Handed {
    /// What is asked for.
    pub request: SequenceRequest,
    /// Whose it is, and how urgent.
    pub standing: Standing,
    /// Tokens that came back before.
    pub generated: Vec<u32>,
    /// Of the prompt's tokens from the second on, as far as they are known and nobody has been told.
    pub prompt_logprobs: Vec<GeneratedToken>,
    /// Tokens of the prompt that were not computed, since cached pages held them.
    pub cached_tokens: u32,
    /// It was in a slot once: it goes before those that never were.
    pub was_admitted: bool,
    /// Losses while it was computed, since it was cleared last.
    pub losses: u32,
    /// Tokens since the last of them.
    pub tokens_since_loss: u32,
}

impl Handed {
    /// A sequence that nobody has begun.
    pub fn new(request: SequenceRequest, standing: Standing) -> Self {
        Self {
            request,
            standing,
            generated: Vec::new(),
            prompt_logprobs: Vec::new(),
            cached_tokens: 0,
            was_admitted: false,
            losses: 0,
            tokens_since_loss: 0,
        }
    }

    /// It got a token. A few of them clear it of earlier losses.
    pub fn token(&mut self, id: u32) {
        self.generated.push(id);
        clear(&mut self.losses, &mut self.tokens_since_loss);
    }

    /// How it ended, if its last token was its end, of which only the word is missing. As workers see it.
    pub fn ended(&self) -> Option<FinishReason> {
        let is_stop = |token: &u32| self.request.stop_tokens.contains(token);
        if self.generated.len() > self.request.min_tokens as usize && self.generated.last().is_some_and(is_stop) {
            return Some(FinishReason::Stop);
        }
        (self.generated.len() >= self.request.max_tokens as usize).then_some(FinishReason::Length)
    }

    /// Who computed it is lost.
    pub fn lost(&mut self) {
        self.losses += 1;
        self.tokens_since_loss = 0;
    }
}

impl Scheduler {
    /// Lets all sequences go that another group may compute, with their numbers, the first to be served first; none
    /// while there is a group of its own, and of one that is about to end those that it does not begin. Suspects stay:
    /// who may have lost this group is not to lose another.
    pub fn hand_over(&mut self) -> Vec<(u64, Handed)> {
        if self.group_up && !self.is_ending {
            return Vec::new();
        }
        let stays = |id: &u64| self.trials.is_suspect(*id) || self.trials.self_test == Some(*id);
        let fresh = self.shares.in_order();
        let admitted = self.queue.iter().filter(|turn| !self.group_up && !turn.is_fresh()).map(|turn| turn.id);
        let order: Vec<u64> = admitted.chain(fresh).filter(|id| !stays(id)).collect();
        let handed = order.into_iter().map(|id| (id, self.let_go(id))).collect();
        self.debug_check();
        handed
    }

    fn let_go(&mut self, id: u64) -> Handed {
        let was_admitted = !self.sequences[&id].turn(id).is_fresh();
        let sequence = self.remove(id).expect("the queue names known sequences");
        let claim = sequence.claim.expect("a request has a claim");
        Handed {
            request: sequence.request,
            standing: claim.into_standing(),
            generated: sequence.generated,
            prompt_logprobs: sequence.prompt_logprobs,
            cached_tokens: sequence.cached_tokens,
            was_admitted,
            losses: sequence.losses,
            tokens_since_loss: sequence.tokens_since_loss,
        }
    }

    /// Takes over a sequence and returns its number. The bounds of the queue do not count: it was taken before.
    ///
    /// # Errors
    /// The KV cache of this group is too small for it.
    pub fn adopt(&mut self, handed: Handed) -> Result<u64, String> {
        let Handed { request, standing, generated, prompt_logprobs, cached_tokens, .. } = handed;
        if let Some(reason) = self.pages.as_ref().and_then(|pages| too_large(&request, pages)) {
            return Err(reason);
        }
        let id = self.next_sequence;
        self.next_sequence += 1;
        let mut claim = self.shares.queued(id, &standing, request.prompt.len() as u64, request.max_tokens.into());
        if handed.was_admitted {
            self.shares.admitted(id, &mut claim);
        }
        let new = Sequence::new(request, Some(claim), self.limits.prefix_cache);
        let mut sequence = Sequence { generated, prompt_logprobs, cached_tokens, ..new };
        (sequence.losses, sequence.tokens_since_loss) = (handed.losses, handed.tokens_since_loss);
        if handed.was_admitted {
            sequence.ticket = self.next_ticket;
            self.next_ticket += 1;
        }
        debug_assert!(matches!(sequence.phase, Phase::Waiting), "a new sequence waits");
        self.extend_keys(&mut sequence);
        self.queue.insert(sequence.turn(id));
        self.sequences.insert(id, sequence);
        self.debug_check();
        Ok(id)
    }
}

/// Why a cache can never hold the sequence of a request, if so.
pub(super) fn too_large(request: &SequenceRequest, pages: &PagePool) -> Option<String> {
    let (needed, total) = (pages.pages_for(request.positions()), pages.total());
    (needed > total).then(|| format!("the request needs {needed} KV pages, but the cache has only {total} now"))
}
