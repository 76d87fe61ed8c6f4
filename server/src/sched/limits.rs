//! The bounds of the scheduler, and which of them cannot work.

/// Bounds of the scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Sequences in the batch at one time; 0: as many as the group can take.
    pub max_slots: u32,
    /// Rows (decode tokens and prompt tokens) of one step, at least `max_slots`; 0: as many as the group can take.
    pub max_batch_tokens: u32,
    /// Steps of one plan: the K that bounds a launch of the loop.
    pub steps_per_plan: u32,
    /// Plans sent of which no step was reported; 2 keep the loop fed while an outcome is on its way.
    pub plans_ahead: u32,
    /// Sequences that wait for their first admission.
    pub max_waiting_requests: u64,
    /// Prompt tokens of the sequences that wait for their first admission. (A request of a single one may exceed it:
    /// the context bounds it already.)
    pub max_waiting_tokens: u64,
    /// Losses of the group after which a sequence that was computed each time is a suspect, and computed alone.
    pub suspect_after: u32,
    /// Full KV pages are found again by what they hold.
    pub prefix_cache: bool,
    /// Most tokens that are drafted for a sequence in a step; 0: none.
    pub drafts: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_slots: 64,
            max_batch_tokens: 512,
            steps_per_plan: 16,
            plans_ahead: 2,
            max_waiting_requests: 1024,
            max_waiting_tokens: 1 << 20,
            suspect_after: 2,
            prefix_cache: true,
            drafts: 0,
        }
    }
}

/// A bound that cannot work.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LimitsError {
    /// A bound of zero would stop everything.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// Every slot may decode in one step.
    #[error(
        "max_batch_tokens is {tokens}, but every one of the {slots} slots needs a row: raise it to at least {slots}"
    )]
    BatchTooSmall {
        /// Rows of a step.
        tokens: u32,
        /// Slots.
        slots: u32,
    },
}

impl Limits {
    /// Whether the bounds can work.
    ///
    /// # Errors
    /// Names the bound that is zero or too small.
    pub fn validate(&self) -> Result<(), LimitsError> {
        let bounds = [
            ("steps_per_plan", u64::from(self.steps_per_plan)),
            ("plans_ahead", u64::from(self.plans_ahead)),
            ("max_waiting_requests", self.max_waiting_requests),
            ("max_waiting_tokens", self.max_waiting_tokens),
            ("suspect_after", u64::from(self.suspect_after)),
        ];
        if let Some((name, _)) = bounds.iter().find(|(_, bound)| *bound == 0) {
            return Err(LimitsError::Zero(name));
        }
        if self.max_batch_tokens > 0 && self.max_batch_tokens < self.max_slots {
            return Err(LimitsError::BatchTooSmall { tokens: self.max_batch_tokens, slots: self.max_slots });
        }
        Ok(())
    }
}

/// What a group that is ready can take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupShape {
    /// Pages of its KV cache.
    pub kv_pages: u32,
    /// Positions a page holds, at least 1.
    pub page_positions: u32,
    /// Sequences in the batch at one time, at least 1.
    pub max_slots: u32,
    /// Rows of one step, at least `max_slots`.
    pub max_batch_tokens: u32,
    /// The number of the plan that it takes next.
    pub first_version: u64,
}
