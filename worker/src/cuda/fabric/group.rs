//! Who a rank is among how many.

/// Most ranks of a group: the places for peers that a launch has.
pub const MAX_RANKS: usize = 16;

/// A rank's place in its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// This rank.
    pub rank: usize,
    /// Of how many, at most [`MAX_RANKS`].
    pub ranks: usize,
    /// All that has to be the same on every rank, in words of the caller's: model, bit domain, layout of the inbox.
    pub plan: String,
}
