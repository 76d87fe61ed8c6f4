//! A plan as the batch takes it, and the ways in which one can be wrong. The rules are those of worker/v1 `Plan`.

use std::sync::Arc;

use super::Limits;
use crate::sampling::SamplingParams;

/// One version of the schedule; meanings as in worker/v1 `Plan`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// From 1, without a gap.
    pub version: u64,
    /// Bound on the steps of this plan, at least 1.
    pub steps: u32,
    /// Slots given up, with their pages.
    pub release: Vec<u32>,
    /// Sequences that enter free slots.
    pub admit: Vec<Admit>,
    /// Pages for sequences.
    pub grants: Vec<PageGrant>,
    /// Prompt chunks of the first step, at most one a slot.
    pub prefill: Vec<PrefillChunk>,
    /// Slots that decode, none twice.
    pub decode: Vec<u32>,
    /// What is drafted in its steps.
    pub drafts: Drafts,
}

/// Bounds on drafts: tokens that may follow the newest of a sequence, computed as further rows of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Drafts {
    /// Most for a sequence in a step; 0: none.
    pub each: u32,
    /// Most in a step, of all sequences.
    pub rows: u32,
    /// What steps take, by rows ascending. No step of more rows than the last has drafts.
    pub times: Vec<StepTime>,
}

/// A step of so many rows takes so many microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTime {
    /// Rows.
    pub rows: u32,
    /// Microseconds.
    pub us: u32,
}

/// A sequence enters a free slot.
#[derive(Debug, Clone, PartialEq)]
pub struct Admit {
    /// The slot.
    pub slot: u32,
    /// Unique in the life of the server.
    pub sequence: u64,
    /// Prompt, then tokens generated earlier.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are prompt, at least 1.
    pub prompt_tokens: u32,
    /// Bound on generated tokens, those in `tokens` included.
    pub max_tokens: u32,
    /// Generated tokens before which stop tokens are neither sampled nor obeyed.
    pub min_tokens: u32,
    /// Token ids that end the sequence.
    pub stop_tokens: Vec<u32>,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Log-probabilities are wanted: of the sampled token and of this many most likely ones.
    pub logprobs: Option<u32>,
    /// Drafts are taken from answers to requests of the same salt.
    pub cache_salt: String,
    /// Its output is held to this grammar, as [`crate::grammar`] reads it.
    pub grammar: Option<Arc<str>>,
    /// The tokens that it may draw by name; `None`: all.
    pub token_bounds: Option<Arc<TokenBounds>>,
    /// Log-probabilities of the prompt's tokens are wanted, and of this many most likely ones in their places.
    pub prompt_logprobs: Option<u32>,
}

/// Tokens that an output may have, by name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenBounds {
    /// No others; empty: any.
    pub allowed: Vec<u32>,
    /// Tokens that do not follow each other in it, each of at least one.
    pub forbidden: Vec<Vec<u32>>,
}

impl TokenBounds {
    /// Tokens behind which the last of any that are forbidden comes.
    pub fn longest_prefix(&self) -> usize {
        self.forbidden.iter().map(Vec::len).max().unwrap_or(1) - 1
    }
}

/// Gives the sequence in `slot` pages, perhaps for others that hold the same. Several may hold a page that none of them
/// writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageGrant {
    /// The slot.
    pub slot: u32,
    /// Index of the first of `pages` in the page table, at most its length.
    pub first: u32,
    /// Pages of the pool.
    pub pages: Vec<u32>,
}

/// Computes positions `[start, start + len)` of the tokens given at admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefillChunk {
    /// The slot.
    pub slot: u32,
    /// First position: where the chunk before ended, or, if that is at the border of a page, any behind it. What lies
    /// between is in its pages already, of the same tokens.
    pub start: u32,
    /// Positions, at least 1.
    pub len: u32,
}

/// A plan that breaks a rule: the server's mistake, and the end of the worker.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanFault {
    /// Plans come numbered without a gap.
    #[error("plan {got} came where plan {expected} follows")]
    Version {
        /// What follows.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// `steps` is at least 1.
    #[error("plan {version}: steps is 0")]
    NoSteps {
        /// The plan.
        version: u64,
    },
    /// A field of the plan is out of its range.
    #[error("plan {version}: {problem}")]
    Field {
        /// The plan.
        version: u64,
        /// Which field, its value and its range.
        problem: String,
    },
    /// A slot that the batch does not have.
    #[error("plan {version}: slot {slot} of {limit}")]
    SlotRange {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// Slots of the batch.
        limit: usize,
    },
    /// Something was asked of a slot without a sequence.
    #[error("plan {version}: slot {slot} is {what}, but it is free")]
    SlotFree {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// What was asked.
        what: &'static str,
    },
    /// A sequence was to enter a slot that has one.
    #[error("plan {version}: a sequence enters slot {slot}, which sequence {sequence} holds")]
    SlotBusy {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// Who holds it.
        sequence: u64,
    },
    /// A sequence was admitted with impossible values.
    #[error("plan {version}: slot {slot}, sequence {sequence}: {problem}")]
    Admit {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// The sequence.
        sequence: u64,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// A page that the pool does not have.
    #[error("plan {version}: slot {slot} is granted page {page} of {limit}")]
    PageRange {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// The page.
        page: u32,
        /// Pages of the pool.
        limit: usize,
    },
    /// A page that several slots hold, and one of them is to write.
    #[error("plan {version}: slot {slot} writes page {page}, which other slots hold, too")]
    PageShared {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// The page.
        page: u32,
    },
    /// Pages that do not follow those that the slot has, or take the place of one that holds something else.
    #[error("plan {version}: slot {slot} is granted pages from number {first} on: {problem}")]
    Grant {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// Index of the first page.
        first: u32,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// More pages than the longest sequence needs.
    #[error("plan {version}: slot {slot} is granted more pages than a context of {context} positions needs")]
    TooManyPages {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// Positions of the longest sequence.
        context: usize,
    },
    /// A chunk that does not follow what was computed before.
    #[error("plan {version}: slot {slot}, chunk of {len} from position {start}: {problem}")]
    Chunk {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// First position.
        start: u32,
        /// Positions.
        len: u32,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// A slot cannot decode.
    #[error("plan {version}: slot {slot} decodes: {problem}")]
    Decode {
        /// The plan.
        version: u64,
        /// The slot.
        slot: u32,
        /// What is wrong, with numbers.
        problem: String,
    },
    /// The first step has more rows that sample than the worker has room for.
    #[error("plan {version}: {rows} rows of its first step sample, more than {limit}")]
    TooManySamples {
        /// The plan.
        version: u64,
        /// Rows.
        rows: usize,
        /// `max_slots`.
        limit: usize,
    },
    /// The first step has more rows than the worker has room for.
    #[error("plan {version}: its first step has {rows} rows, more than {limit}")]
    TooManyRows {
        /// The plan.
        version: u64,
        /// Rows.
        rows: u64,
        /// `max_batch_tokens`.
        limit: usize,
    },
}

impl Admit {
    /// Checks the values against each other and the limits of the batch.
    pub(super) fn check(&self, limits: &Limits) -> Result<(), String> {
        let (tokens, prompt) = (self.tokens.len(), self.prompt_tokens as usize);
        if prompt == 0 || prompt > tokens {
            return Err(format!("prompt_tokens is {prompt}, of {tokens} tokens"));
        }
        if tokens >= limits.max_context {
            return Err(format!("{tokens} tokens leave no room in a context of {}", limits.max_context));
        }
        if tokens - prompt >= self.max_tokens as usize {
            return Err(format!("{} of at most {} tokens were generated before", tokens - prompt, self.max_tokens));
        }
        let ids = self.tokens.iter().chain(&self.stop_tokens).copied();
        let mut ids = ids.chain(self.sampling.logit_bias.iter().map(|(token, _)| *token));
        match ids.find(|id| *id as usize >= limits.vocab_size) {
            Some(id) => Err(format!("token {id} is not in a vocabulary of {}", limits.vocab_size)),
            None => Ok(()),
        }
    }
}
