//! The pool of KV pages: who may write where. A page is free or belongs to exactly one running sequence.

/// Free pages of the group's KV cache and the size of one.
#[derive(Debug)]
pub(super) struct PagePool {
    /// Free page numbers; the last is granted next.
    free: Vec<u32>,
    total: u32,
    page_positions: u32,
}

impl PagePool {
    /// All `total` pages are free; each holds `page_positions` positions (at least 1).
    pub(super) fn new(total: u32, page_positions: u32) -> Self {
        assert!(page_positions > 0, "a page holds at least one position");
        Self { free: (0..total).rev().collect(), total, page_positions }
    }

    /// The same pool with every page free.
    pub(super) fn emptied(&self) -> Self {
        Self::new(self.total, self.page_positions)
    }

    /// Pages that `positions` positions need.
    pub(super) fn pages_for(&self, positions: u64) -> u64 {
        positions.div_ceil(u64::from(self.page_positions))
    }

    /// Whether `pages` pages hold position `position`.
    pub(super) fn covers(&self, pages: usize, position: u64) -> bool {
        position / u64::from(self.page_positions) < pages as u64
    }

    /// Free pages.
    pub(super) fn available(&self) -> u64 {
        self.free.len() as u64
    }

    /// Positions that all pages together hold.
    pub(super) fn positions(&self) -> u64 {
        self.total() * u64::from(self.page_positions)
    }

    /// Pages in all.
    pub(super) fn total(&self) -> u64 {
        u64::from(self.total)
    }

    /// Takes a page, if one is free.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Takes back the pages of a sequence that gave up its slot.
    pub(super) fn give_back(&mut self, pages: Vec<u32>) {
        // Reversed, so that the next sequence gets them in the same order: no bearing on results, readable plans.
        self.free.extend(pages.into_iter().rev());
    }

    /// The free pages, for the check of the invariants.
    pub(super) fn free_pages(&self) -> &[u32] {
        &self.free
    }
}

#[cfg(test)]
mod tests {
    use super::PagePool;

    #[test]
    fn counts_pages_at_their_borders() {
        let mut pool = PagePool::new(3, 4);
        assert_eq!([0, 1, 4, 5, 12].map(|n| pool.pages_for(n)), [0, 1, 1, 2, 3]);
        assert!(pool.covers(1, 3) && !pool.covers(1, 4) && pool.covers(2, 4) && !pool.covers(0, 0));
        let taken: Vec<u32> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!((taken.as_slice(), pool.available(), pool.total()), (&[0, 1, 2][..], 0, 3));
        pool.give_back(taken);
        assert_eq!(pool.take(), Some(0));
    }
}
