//! One sequence in the scheduler's hands: what was asked, what came out so far, and where it is.

use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};

use looplane_proto::worker::v1::{Admit, LogitBias, PromptToken, Sampling, TokenSequence};

use super::pages::{Content, PagePool};
#[cfg(test)]
use super::prefix::{SABOTAGE, Sabotage};
use super::request::{GeneratedToken, SequenceRequest};
use super::shares::Claim;

/// A sequence from its submission to its end.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: SequenceRequest,
    /// To its owner's share; none of the scheduler's own.
    pub(super) claim: Option<Claim>,
    /// Ascends with first admissions; [`FRESH`] before.
    pub(super) ticket: u64,
    /// Tokens that came back, in order; they outlive preemption and the loss of the group.
    pub(super) generated: Vec<u32>,
    /// The prompt's tokens from the second on with their log-probabilities, as far as they are wanted and known.
    pub(super) prompt_logprobs: Vec<GeneratedToken>,
    /// Others may have what its pages hold, and it what theirs do: there is a prefix cache, and no row of the prompt
    /// has to be computed for its log-probability.
    pub(super) is_shareable: bool,
    /// Of each page that its tokens fill, as [`Content::key`]; none if it is not shareable.
    pub(super) keys: Vec<u64>,
    /// Tokens of the prompt that were not computed before the first token came: cached pages held them.
    pub(super) cached_tokens: u32,
    /// Times that a later sequence was admitted before it, as more of that was cached.
    pub(super) overtaken: u32,
    pub(super) phase: Phase,
    /// Times the group was lost while it computed this sequence, since the sequence was last cleared of it.
    pub(super) losses: u32,
    /// Tokens since the group was last lost.
    pub(super) tokens_since_loss: u32,
    /// Its reader has many tokens yet to take: others go first.
    pub(super) reader_behind: bool,
}

/// The ticket of a sequence that was never admitted.
const FRESH: u64 = u64::MAX;

/// A sequence's place in the order that decides everything: those whose readers keep up, then by first admission. Those
/// that were never admitted come last, and `shares` knows which of them is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Turn {
    pub(super) behind: bool,
    pub(super) ticket: u64,
    pub(super) id: u64,
}

impl Turn {
    /// Of a sequence that was never admitted.
    pub(super) fn fresh(id: u64) -> Self {
        Self { behind: false, ticket: FRESH, id }
    }

    /// The sequence was never admitted.
    pub(super) fn is_fresh(&self) -> bool {
        self.ticket == FRESH
    }

    /// The first whose reader is behind would follow.
    pub(super) fn first_behind() -> Self {
        Self { behind: true, ticket: 0, id: 0 }
    }
}

/// Where a sequence is.
#[derive(Debug, Clone, Copy)]
pub(super) enum Phase {
    /// In the queue: new, preempted, or its group was lost.
    Waiting,
    /// In a slot.
    Running { slot: u32 },
    /// Preempted by the plan of this version. Steps that ran before that plan may still bring tokens; the sequence
    /// waits again once an outcome of the version says that none is left on the way.
    Leaving { version: u64 },
}

/// What a slot holds of its sequence: all that plans need.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) slot: u32,
    /// Page i holds positions i * page_positions and up.
    pub(super) pages: Vec<u32>,
    /// How many of them, from the first on, others find by what they hold.
    pub(super) cached: usize,
    /// How many of them, from the first on, plans granted.
    pub(super) granted: usize,
    /// Tokens given at admission: positions that are computed as a prompt.
    pub(super) prefill_end: u32,
    /// Positions of them that plans were sent for, or that cached pages hold.
    pub(super) prefilled: u32,
    /// Those of them that cached pages held.
    pub(super) reused: u32,
    /// The first plan in which the sequence decodes; it does in all that follow. 0 while prompt is left.
    pub(super) decodes_from: u64,
    /// As [`Sequence::len`].
    pub(super) tokens: u64,
    /// As [`Sequence::positions`].
    pub(super) positions: u64,
}

impl Running {
    /// A sequence enters `slot`.
    pub(super) fn new(slot: u32, sequence: &Sequence) -> Self {
        let (tokens, positions) = (sequence.len(), sequence.positions());
        Self {
            slot,
            pages: Vec::new(),
            cached: 0,
            granted: 0,
            prefill_end: tokens as u32,
            prefilled: 0,
            reused: 0,
            decodes_from: 0,
            tokens,
            positions,
        }
    }

    /// Plans for the whole prompt were sent: the sequence decodes.
    pub(super) fn decodes(&self) -> bool {
        self.prefilled == self.prefill_end
    }

    /// Positions of the prompt that plans are yet to be sent for.
    pub(super) fn prompt_left(&self) -> u32 {
        self.prefill_end - self.prefilled
    }

    /// Positions that are computed before any plan that is sent from now on.
    pub(super) fn computed(&self) -> u64 {
        // The newest token is yet to be computed.
        if self.decodes() { (self.tokens - 1).max(self.prefill_end.into()) } else { self.prefilled.into() }
    }

    /// The position that is computed `ahead` tokens after the next, or the sequence's last.
    fn position(&self, ahead: u64) -> u64 {
        (self.tokens - 1 + ahead).min(self.positions - 1)
    }

    /// Whether that position has a page.
    pub(super) fn is_covered(&self, ahead: u64, pool: &PagePool) -> bool {
        pool.covers(self.pages.len(), self.position(ahead))
    }

    /// Takes pages up to that position; false if the pool ran out before.
    pub(super) fn grow(&mut self, ahead: u64, pool: &mut PagePool) -> bool {
        while !self.is_covered(ahead, pool) {
            let Some(page) = pool.take() else { return false };
            self.pages.push(page);
        }
        true
    }
}

impl Sequence {
    /// The request is valid, as the seam promises: a prompt, and at least one token to generate.
    pub(super) fn new(request: SequenceRequest, claim: Option<Claim>, prefix_cache: bool) -> Self {
        assert!(!request.prompt.is_empty() && request.max_tokens > 0, "the front end lets only valid requests pass");
        Self {
            is_shareable: prefix_cache && request.prompt_logprobs.is_none(),
            request,
            ticket: if claim.is_some() { FRESH } else { 0 },
            claim,
            generated: Vec::new(),
            prompt_logprobs: Vec::new(),
            keys: Vec::new(),
            cached_tokens: 0,
            overtaken: 0,
            phase: Phase::Waiting,
            losses: 0,
            tokens_since_loss: 0,
            reader_behind: false,
        }
    }

    /// Tokens known: prompt and what came back.
    pub(super) fn len(&self) -> u64 {
        (self.request.prompt.len() + self.generated.len()) as u64
    }

    /// As [`SequenceRequest::positions`].
    pub(super) fn positions(&self) -> u64 {
        self.request.positions()
    }

    /// Takes a token of its prompt with its log-probability; one that came before, ahead of a preemption, is left out.
    pub(super) fn take_prompt_token(&mut self, of: PromptToken) {
        let next = self.prompt_logprobs.len() + 1;
        if let Some(&id) = self.request.prompt.get(next).filter(|_| of.position as usize == next) {
            let top = of.top.iter().map(|entry| (entry.token, entry.logprob)).collect();
            self.prompt_logprobs.push(GeneratedToken { id, logprob: Some(of.logprob), top });
        }
    }

    /// Its place in the order; `id` is its number.
    pub(super) fn turn(&self, id: u64) -> Turn {
        Turn { behind: self.reader_behind, ticket: self.ticket, id }
    }

    /// Keys of the pages that its tokens fill by now.
    pub(super) fn extend_keys(&mut self, page_positions: u32) {
        while self.is_shareable && (self.keys.len() as u64 + 1) * u64::from(page_positions) <= self.len() {
            let mut hasher = self.hasher(self.keys.len());
            self.page_tokens(self.keys.len(), page_positions).hash(&mut hasher);
            self.keys.push(hasher.finish());
        }
    }

    /// Of the salt and of all tokens before its page number `index`.
    fn hasher(&self, index: usize) -> DefaultHasher {
        let mut hasher = DefaultHasher::new();
        match index.checked_sub(1) {
            Some(before) => self.keys[before].hash(&mut hasher),
            None => self.request.cache_salt.hash(&mut hasher),
        }
        hasher
    }

    /// Keys of its page number `index` filled with one token, two, and so on up to `most`, which are known; none if it
    /// is not shareable.
    pub(super) fn tail_keys(&self, index: usize, most: usize, page_positions: u32) -> Vec<u64> {
        if !self.is_shareable {
            return Vec::new();
        }
        let mut hasher = self.hasher(index);
        let next = |token: &u32| {
            token.hash(&mut hasher);
            hasher.finish()
        };
        self.tokens(index * page_positions as usize, most).iter().map(next).collect()
    }

    /// What its page number `index` holds once it is full, behind the cached page `before`; `None` if its tokens do not
    /// fill it yet.
    pub(super) fn content(&self, index: usize, before: Option<u32>, page_positions: u32) -> Option<Content<'_>> {
        let (key, tokens) = (*self.keys.get(index)?, self.page_tokens(index, page_positions));
        Some(Content { key, before, salt: &self.request.cache_salt, tokens })
    }

    fn page_tokens(&self, index: usize, page_positions: u32) -> Cow<'_, [u32]> {
        let (begin, len) = (index * page_positions as usize, page_positions as usize);
        #[cfg(test)]
        if SABOTAGE.get() == Sabotage::ForgetToken {
            return self.tokens(begin, len - 1).iter().copied().chain([0]).collect();
        }
        self.tokens(begin, len)
    }

    /// `len` of its tokens from number `begin` on, which are known.
    pub(super) fn tokens(&self, begin: usize, len: usize) -> Cow<'_, [u32]> {
        let (end, prompt) = (begin + len, &self.request.prompt);
        if end <= prompt.len() {
            prompt[begin..end].into()
        } else if begin >= prompt.len() {
            self.generated[begin - prompt.len()..end - prompt.len()].into()
        } else {
            [&prompt[begin..], &self.generated[..end - prompt.len()]].concat().into()
        }
    }

    /// The message that brings the sequence into `slot`, to be computed from its first position that no cached page
    /// holds.
    pub(super) fn admit(&self, id: u64, slot: u32) -> Admit {
        let request = &self.request;
        let sampling = &request.sampling;
        Admit {
            slot,
            sequence: id,
            tokens: [request.prompt.as_slice(), &self.generated].concat(),
            prompt_tokens: request.prompt.len() as u32,
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            stop_tokens: request.stop_tokens.clone(),
            sampling: Some(Sampling {
                temperature: sampling.temperature,
                top_k: sampling.top_k,
                top_p: sampling.top_p,
                min_p: sampling.min_p,
                seed: sampling.seed,
                presence_penalty: sampling.presence_penalty,
                frequency_penalty: sampling.frequency_penalty,
                repetition_penalty: sampling.repetition_penalty,
                logit_bias: sampling.logit_bias.iter().map(|&(token, bias)| LogitBias { token, bias }).collect(),
            }),
            logprobs: request.logprobs.is_some(),
            top_logprobs: request.logprobs.unwrap_or(0),
            cache_salt: request.cache_salt.to_string(),
            grammar: request.grammar.as_deref().unwrap_or_default().to_owned(),
            prompt_logprobs: request.prompt_logprobs,
            allowed_tokens: request.token_bounds.allowed.clone(),
            forbidden: request.token_bounds.forbidden.iter().cloned().map(|tokens| TokenSequence { tokens }).collect(),
        }
    }
}
