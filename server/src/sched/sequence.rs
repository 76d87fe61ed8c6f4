//! One sequence in the scheduler's hands: what was asked, what came out so far, and where it is.

use looplane_proto::worker::v1::{Admit, LogitBias, Sampling};

use super::request::SequenceRequest;

/// A sequence from its submission to its end.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) request: SequenceRequest,
    /// Tokens that came back, in order; they outlive preemption and the loss of the group.
    pub(super) generated: Vec<u32>,
    pub(super) phase: Phase,
    /// Times the group was lost while it computed this sequence, since the sequence was last cleared of it.
    pub(super) losses: u32,
    /// Tokens since the group was last lost.
    pub(super) tokens_since_loss: u32,
    /// Its reader has many tokens yet to take: others go first.
    pub(super) reader_behind: bool,
}

/// Where a sequence is.
#[derive(Debug)]
pub(super) enum Phase {
    /// In the queue: new, preempted, or its group was lost.
    Waiting,
    /// In a slot.
    Running(Running),
    /// Preempted by the plan of this version. Steps that ran before that plan may still bring tokens; the sequence
    /// waits again once an outcome of the version says that none is left on the way.
    Leaving { version: u64 },
}

/// A sequence in a slot.
#[derive(Debug)]
pub(super) struct Running {
    pub(super) slot: u32,
    /// Page i holds positions i * page_positions and up.
    pub(super) pages: Vec<u32>,
    /// Tokens given at admission: positions that are computed as a prompt.
    pub(super) prefill_end: u32,
    /// Positions of them that plans were sent for.
    pub(super) prefilled: u32,
}

impl Running {
    /// Plans for the whole prompt were sent: the sequence decodes.
    pub(super) fn decodes(&self) -> bool {
        self.prefilled == self.prefill_end
    }

    /// Positions of the prompt that plans are yet to be sent for.
    pub(super) fn prompt_left(&self) -> u32 {
        self.prefill_end - self.prefilled
    }
}

impl Sequence {
    /// The request is valid, as the seam promises: a prompt, and at least one token to generate.
    pub(super) fn new(request: SequenceRequest) -> Self {
        assert!(!request.prompt.is_empty() && request.max_tokens > 0, "the front end lets only valid requests pass");
        Self {
            request,
            generated: Vec::new(),
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

    /// The running part, if it is in a slot.
    pub(super) fn running(&self) -> Option<&Running> {
        match &self.phase {
            Phase::Running(running) => Some(running),
            Phase::Waiting | Phase::Leaving { .. } => None,
        }
    }

    /// The running part, if it is in a slot.
    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        match &mut self.phase {
            Phase::Running(running) => Some(running),
            Phase::Waiting | Phase::Leaving { .. } => None,
        }
    }

    /// The message that brings the sequence into `slot`, to be computed from its first position.
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
        }
    }
}
