//! The KV pages of a batch: how many slots hold each, and how far it is filled.

use crate::plan::PAGE_POSITIONS;

/// All pages of the pool.
#[derive(Debug, PartialEq)]
pub(super) struct Pages {
    /// Slots that hold a page.
    holders: Vec<u32>,
    /// Its positions, from the first on, that who writes it has filled. A page that is let go keeps them: another slot
    /// may begin with the same tokens.
    filled: Vec<u32>,
}

impl Pages {
    pub(super) fn new(count: usize) -> Self {
        Self { holders: vec![0; count], filled: vec![0; count] }
    }

    /// One more slot holds a page; false if there is no such page.
    pub(super) fn hold(&mut self, page: u32) -> bool {
        let holders = self.holders.get_mut(page as usize);
        holders.map(|holders| *holders += 1).is_some()
    }

    pub(super) fn let_go(&mut self, page: u32) {
        self.holders[page as usize] -= 1;
    }

    pub(super) fn is_shared(&self, page: u32) -> bool {
        self.holders[page as usize] > 1
    }

    /// Positions of a page that were written, from its first on.
    pub(super) fn filled(&self, page: u32) -> usize {
        self.filled[page as usize] as usize
    }

    pub(super) fn is_full(&self, page: u32) -> bool {
        self.filled(page) == PAGE_POSITIONS
    }

    /// A page was written up to `end` positions.
    pub(super) fn fill(&mut self, page: u32, end: usize) {
        self.filled[page as usize] = end as u32;
    }
}
