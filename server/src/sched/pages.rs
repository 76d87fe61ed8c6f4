//! The pool of KV pages: who holds which, what the cached ones hold, and which are given up first.
//!
//! A page is *free*, *held* by sequences in slots, or *idle*: cached, and held by nobody. Nothing is set aside for the
//! cache: idle pages are taken as free ones are, once there are none, those that were let go longest ago first.
//!
//! Cached pages form a tree: each knows the page before it. Who holds a page holds all before it, too, and lets go of
//! the last first; so a page is always given up before those that it follows.
//!
//! Full pages are shared. One that is not full is the *tail* of a sequence that left: nobody holds it, no page
//! follows it, and who goes on with its tokens takes it for itself.

use std::collections::{BTreeMap, HashMap};

/// Pages of the group's KV cache.
#[derive(Debug)]
pub(super) struct PagePool {
    pages: Vec<Page>,
    /// Free page numbers; the last is taken next.
    free: Vec<u32>,
    /// Cached pages that nobody holds, by when they were let go.
    idle: BTreeMap<u64, u32>,
    /// Cached pages by the key of what they hold.
    cached: HashMap<u64, u32>,
    /// Counts the times that a page became idle.
    clock: u64,
    page_positions: u32,
}

/// A page, by its number.
#[derive(Debug, Default)]
struct Page {
    /// How often sequences in slots hold it.
    holders: u32,
    /// When it became idle.
    idle_since: u64,
    cached: Option<Cached>,
}

/// What a cached page holds.
#[derive(Debug)]
struct Cached {
    key: u64,
    before: Option<u32>,
    /// Of a page that is the first.
    salt: Box<str>,
    /// As many as the page has positions, fewer in a tail.
    tokens: Box<[u32]>,
}

/// What a page holds: K and V of its tokens behind all tokens before them.
#[derive(Debug, Clone)]
pub(super) struct Content<'a> {
    /// Of salt and tokens up to the page's last. Two contents of one key may differ.
    pub(super) key: u64,
    /// The cached page of the tokens before its own; `None`: it is the first.
    pub(super) before: Option<u32>,
    /// Pages of different salts are not shared.
    pub(super) salt: &'a str,
    /// As many as the page has positions; fewer in a tail.
    pub(super) tokens: std::borrow::Cow<'a, [u32]>,
}

impl Cached {
    /// Keys only find: what is held decides.
    fn holds(&self, content: &Content<'_>) -> bool {
        let salts = content.before.is_some() || *self.salt == *content.salt;
        self.before == content.before && salts && *self.tokens == *content.tokens
    }
}

impl PagePool {
    /// All `total` pages are free; each holds `page_positions` positions (at least 1).
    pub(super) fn new(total: u32, page_positions: u32) -> Self {
        assert!(page_positions > 0, "a page holds at least one position");
        Self {
            pages: (0..total).map(|_| Page::default()).collect(),
            free: (0..total).rev().collect(),
            idle: BTreeMap::new(),
            cached: HashMap::new(),
            clock: 0,
            page_positions,
        }
    }

    /// The same pool with every page free.
    pub(super) fn emptied(&self) -> Self {
        Self::new(self.pages.len() as u32, self.page_positions)
    }

    /// Positions that a page holds.
    pub(super) fn page_positions(&self) -> u32 {
        self.page_positions
    }

    /// Pages that `positions` positions need.
    pub(super) fn pages_for(&self, positions: u64) -> u64 {
        positions.div_ceil(u64::from(self.page_positions))
    }

    /// Whether `pages` pages hold position `position`.
    pub(super) fn covers(&self, pages: usize, position: u64) -> bool {
        position / u64::from(self.page_positions) < pages as u64
    }

    /// Pages that can be taken: free and idle ones.
    pub(super) fn available(&self) -> u64 {
        (self.free.len() + self.idle.len()) as u64
    }

    /// Cached pages that nobody holds.
    pub(super) fn idle(&self) -> u64 {
        self.idle.len() as u64
    }

    /// Positions that all pages together hold.
    pub(super) fn positions(&self) -> u64 {
        self.total() * u64::from(self.page_positions)
    }

    /// Pages in all.
    pub(super) fn total(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Whether a page has several holders.
    pub(super) fn is_shared(&self, page: u32) -> bool {
        self.pages[page as usize].holders > 1
    }

    /// Whether anybody holds a page.
    pub(super) fn is_held(&self, page: u32) -> bool {
        self.pages[page as usize].holders > 0
    }

    /// Takes a page for a holder of its own, if one is available. What was cached in it is forgotten.
    pub(super) fn take(&mut self) -> Option<u32> {
        let page = self.free.pop().or_else(|| {
            let (_, page) = self.idle.pop_first()?;
            self.forget(page);
            Some(page)
        })?;
        self.pages[page as usize].holders = 1;
        Some(page)
    }

    /// Takes the tail that holds `content`, for a holder of its own, who goes on behind it.
    pub(super) fn take_tail(&mut self, content: &Content<'_>) -> Option<u32> {
        debug_assert!(content.tokens.len() < self.page_positions as usize, "full pages are shared");
        let page = self.find(content)?;
        self.hold(page);
        self.forget(page);
        Some(page)
    }

    fn forget(&mut self, page: u32) {
        let cached = self.pages[page as usize].cached.take().expect("only what is cached is forgotten");
        self.cached.remove(&cached.key);
    }

    /// One more holds a page that [`PagePool::find`] found.
    pub(super) fn hold(&mut self, page: u32) {
        let state = &mut self.pages[page as usize];
        if state.holders == 0 {
            self.idle.remove(&state.idle_since);
        }
        state.holders += 1;
    }

    /// One holder less. A sequence lets go of its last page first.
    pub(super) fn let_go(&mut self, page: u32) {
        let state = &mut self.pages[page as usize];
        state.holders = state.holders.checked_sub(1).expect("a page is let go by who holds it");
        match (state.holders, &state.cached) {
            (0, Some(_)) => {
                self.clock += 1;
                state.idle_since = self.clock;
                self.idle.insert(self.clock, page);
            }
            (0, None) => self.free.push(page),
            _ => {}
        }
    }

    /// Whether the content of a key is cached, or other content of the same key.
    pub(super) fn may_hold(&self, key: u64) -> bool {
        self.cached.contains_key(&key)
    }

    /// The cached page that holds `content`.
    pub(super) fn find(&self, content: &Content<'_>) -> Option<u32> {
        let page = *self.cached.get(&content.key)?;
        let cached = self.pages[page as usize].cached.as_ref().expect("the index names cached pages");
        cached.holds(content).then_some(page)
    }

    /// Lets others find a page that is full, or soon is: before any plan that is sent from now on. If its content was
    /// cached before, returns the page that has it, which the caller holds from now on. `None`: it cannot be cached,
    /// for its key stands for other content.
    pub(super) fn publish(&mut self, page: u32, content: Content<'_>) -> Option<u32> {
        if let Some(before) = self.find(&content) {
            self.hold(before);
            return Some(before);
        }
        debug_assert_eq!(content.tokens.len(), self.page_positions as usize, "only full pages are shared");
        self.remember(page, content).then_some(page)
    }

    /// Keeps the last page of a sequence that leaves, which is not full, and which it is about to let go.
    pub(super) fn keep_tail(&mut self, page: u32, content: Content<'_>) {
        debug_assert!(content.tokens.len() < self.page_positions as usize, "full pages are shared");
        self.remember(page, content);
    }

    /// False: its key stands for what another page holds.
    fn remember(&mut self, page: u32, content: Content<'_>) -> bool {
        let Content { key, before, salt, tokens } = content;
        if self.cached.contains_key(&key) {
            return false;
        }
        let salt = if before.is_none() { salt.into() } else { Box::default() };
        self.pages[page as usize].cached = Some(Cached { key, before, salt, tokens: tokens.into() });
        self.cached.insert(key, page);
        true
    }

    /// Whether every page is free, idle or held as often as `held` says, page by page, and the tree is whole.
    ///
    /// # Errors
    /// Names the invariant that is broken.
    pub(super) fn check(&self, held: &[u32]) -> Result<(), &'static str> {
        let hold = |condition: bool, invariant| if condition { Ok(()) } else { Err(invariant) };
        hold(self.pages.iter().map(|page| page.holders).eq(held.iter().copied()), "a page counts its holders")?;
        let mut seen = vec![false; self.pages.len()];
        for &page in self.free.iter().chain(self.idle.values()) {
            hold(!std::mem::replace(&mut seen[page as usize], true), "a page is in one place")?;
        }
        for &page in &self.free {
            let Page { holders, cached, .. } = &self.pages[page as usize];
            hold(*holders == 0 && cached.is_none(), "a free page holds nothing, for nobody")?;
        }
        for (&since, &page) in &self.idle {
            let Page { holders, cached, idle_since } = &self.pages[page as usize];
            hold(*holders == 0 && cached.is_some() && *idle_since == since, "an idle page is cached, for nobody")?;
        }
        let is_somewhere = |(page, seen): (&Page, bool)| seen == (page.holders == 0);
        hold(self.pages.iter().zip(seen).all(is_somewhere), "no page is lost")?;
        let is_full = |cached: &Cached| cached.tokens.len() == self.page_positions as usize;
        let cached = self.pages.iter().filter(|page| page.cached.is_some()).count();
        hold(cached == self.cached.len(), "the index names all that is cached")?;
        for (number, page) in self.pages.iter().enumerate() {
            let Some(cached) = &page.cached else { continue };
            hold(self.cached.get(&cached.key) == Some(&(number as u32)), "a cached page is found by its key")?;
            hold(is_full(cached) || page.holders == 0, "nobody holds a tail")?;
            let Some(before) = cached.before.map(|before| &self.pages[before as usize]) else { continue };
            hold(before.cached.as_ref().is_some_and(is_full), "a cached page follows a full one that is cached")?;
            hold(before.holders >= page.holders, "who holds a page holds those before it")?;
            let later = before.holders > 0 || before.idle_since > page.idle_since;
            hold(later, "a page is given up before those that it follows")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(key: u64, before: Option<u32>, tokens: &[u32]) -> Content<'_> {
        Content { key, before, salt: "", tokens: tokens.into() }
    }

    #[test]
    fn counts_pages_at_their_borders() {
        let mut pool = PagePool::new(3, 4);
        assert_eq!([0, 1, 4, 5, 12].map(|n| pool.pages_for(n)), [0, 1, 1, 2, 3]);
        assert!(pool.covers(1, 3) && !pool.covers(1, 4) && pool.covers(2, 4) && !pool.covers(0, 0));
        let taken: Vec<u32> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!((taken.as_slice(), pool.available(), pool.total()), (&[0, 1, 2][..], 0, 3));
        taken.into_iter().rev().for_each(|page| pool.let_go(page));
        assert_eq!(pool.take(), Some(0));
    }

    /// Two sequences that share their first page: what is let go is found again until it is needed, the end of a
    /// sequence before its beginning.
    #[test]
    fn what_was_let_go_longest_ago_is_given_up_first_and_ends_before_beginnings() {
        let mut pool = PagePool::new(4, 2);
        let (a, b, c) = (pool.take().unwrap(), pool.take().unwrap(), pool.take().unwrap());
        assert_eq!(pool.publish(a, content(1, None, &[5, 6])), Some(a));
        assert_eq!(pool.publish(b, content(2, Some(a), &[7, 8])), Some(b));
        pool.hold(a);
        assert_eq!(pool.publish(c, content(3, Some(a), &[9, 9])), Some(c));
        assert_eq!(pool.check(&[2, 1, 1, 0]), Ok(()));
        [b, a, c, a].into_iter().for_each(|page| pool.let_go(page));
        assert_eq!((pool.check(&[0; 4]), pool.available(), pool.idle()), (Ok(()), 4, 3));
        assert_eq!(pool.find(&content(2, Some(a), &[7, 8])), Some(b));
        let taken: Vec<u32> = (0..3).map(|_| pool.take().unwrap()).collect();
        assert_eq!(taken, [3, b, c], "the free one, then the ends");
        assert_eq!(pool.find(&content(1, None, &[5, 6])), Some(a));
        assert_eq!(pool.find(&content(3, Some(a), &[9, 9])), None);
        assert_eq!((pool.take(), pool.take()), (Some(a), None));
        assert_eq!(pool.check(&[1; 4]), Ok(()));
    }

    #[test]
    fn only_equal_content_is_shared() {
        let mut pool = PagePool::new(4, 2);
        let pages: Vec<u32> = std::iter::from_fn(|| pool.take()).collect();
        let salted = |salt| Content { salt, ..content(1, None, &[5, 6]) };
        assert_eq!(pool.publish(pages[0], salted("a")), Some(pages[0]));
        for other in [salted("b"), salted(""), content(1, None, &[5, 7]), content(1, Some(pages[0]), &[5, 6])] {
            assert_eq!((pool.find(&other), pool.publish(pages[1], other.clone())), (None, None), "{other:?}");
        }
        // Computed twice at the same time: there is one page for both.
        assert_eq!(pool.publish(pages[2], salted("a")), Some(pages[0]));
        assert_eq!(pool.check(&[2, 1, 1, 1]), Ok(()));
        pool.let_go(pages[2]);
        assert_eq!(pool.check(&[2, 1, 0, 1]), Ok(()));
    }
}
