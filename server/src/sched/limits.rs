//! The bounds of the scheduler, and which of them cannot work.

/// A step takes one of so many shares of the prompts that are not computed to their end, of all their tokens: a prompt
/// that is alone takes as many steps at most, none of which is larger for that than it has to be.
const SHARES: u64 = 12;

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

/// How many rows a step with prompts should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepRows {
    /// In all, where sequences decode beside: the sizes that are worth their time, ascending.
    pub sizes: Vec<u32>,
    /// Where none decodes.
    pub alone: u32,
    /// Of prompts at least, however many sequences decode: prompts go on, too. At least 1.
    pub least: u32,
}

impl StepRows {
    /// Rows of prompts beside `decoding` rows, where prompts of `waiting` tokens in all are not computed to their end.
    ///
    /// Those who decode wait less in short steps, and those whose prompts wait in long ones, which compute more rows a
    /// second: a step takes its share of the prompts, and half of its rows at least are theirs.
    pub(super) fn of_prompts(&self, decoding: u32, waiting: u64) -> u32 {
        let rows = match (decoding, self.sizes.last()) {
            (0, _) => self.alone,
            (_, None) => 0,
            (_, Some(&most)) => {
                let wanted = u64::from(decoding) + waiting / SHARES;
                let with_room = self.sizes.partition_point(|&rows| rows / 2 < decoding);
                let of_share = self.sizes.partition_point(|&rows| u64::from(rows) <= wanted).saturating_sub(1);
                self.sizes.get(with_room.max(of_share)).unwrap_or(&most).saturating_sub(decoding)
            }
        };
        rows.max(self.least)
    }
}

impl Default for StepRows {
    /// No bound but that of any step.
    fn default() -> Self {
        Self { sizes: vec![u32::MAX], alone: u32::MAX, least: 1 }
    }
}
