//! What several sequences begin with is computed once. Full pages of prompts and answers can be found by what they hold
//! for as long as nobody else needs the memory; a sequence takes over those that hold the beginning of its own tokens.
//! So can the tail of a sequence that left, the page that it did not fill: who goes on with all of its tokens, as the
//! next turn of a conversation does, fills the rest of it.
//!
//! A page can be found once the plan that fills it is built: plans are applied in order, so whoever finds it reads it
//! later. Sequences that come together wait for each other's pages rather than compute them twice.
//! K and V of a position have the same bits whoever computed them, beside whatever else: a hit changes no token.

use std::collections::HashSet;

use super::Scheduler;
use super::pages::{Content, PagePool};
use super::sequence::{Running, Sequence, Turn};

/// How many of those that wait are asked whether they are cached.
const LOOK_AHEAD: usize = 16;
/// How often a sequence that waits is overtaken by one that is cached.
pub(super) const MOST_OVERTAKEN: u32 = 8;

impl Running {
    /// Takes over the cached pages that hold what comes next. At least one token is left to compute: its row samples.
    pub(super) fn reuse(&mut self, sequence: &Sequence, pool: &mut PagePool) {
        while self.is_at_border(pool)
            && let Some(page) = find(sequence, &self.pages[..self.cached], self.prefill_end, pool)
        {
            pool.hold(page);
            self.put_cached(page, pool);
            self.prefilled += pool.page_positions();
            self.reused += pool.page_positions();
        }
    }

    /// Goes on in the tail of a sequence that left: of several that hold its next tokens, the longest. For a sequence
    /// that enters its slot and has taken over the full pages.
    pub(super) fn take_tail(&mut self, sequence: &Sequence, pool: &mut PagePool) {
        debug_assert!(self.pages.len() == self.cached && self.is_at_border(pool), "what comes next has no page yet");
        if self.cached == 0 {
            return;
        }
        let most = (self.prefill_end - 1 - self.prefilled).min(pool.page_positions() - 1);
        let keys = sequence.tail_keys(self.cached, most as usize, pool.page_positions()).into_iter().enumerate();
        for (index, key) in keys.rev() {
            if pool.may_hold(key)
                && let Some(page) = pool.take_tail(&self.tail(sequence, index + 1, key, pool))
            {
                self.pages.push(page);
                self.prefilled += index as u32 + 1;
                self.reused += index as u32 + 1;
                return;
            }
        }
    }

    /// Lets others find what it has computed in its last page, which it is about to let go. Of a sequence that has
    /// filled no page that is not worth one: short prompts would drive out what is cached of long ones.
    pub(super) fn keep_tail(&self, sequence: &Sequence, pool: &mut PagePool) {
        if self.cached == 0 {
            return;
        }
        let len = (self.computed() - self.cached as u64 * u64::from(pool.page_positions())) as usize;
        #[cfg(test)]
        let known = sequence.len() as usize - self.cached * pool.page_positions() as usize;
        #[cfg(test)]
        let len = (len + usize::from(len > 0 && SABOTAGE.get() == Sabotage::LongTail)).min(known);
        if (1..pool.page_positions() as usize).contains(&len)
            && let Some(&key) = sequence.tail_keys(self.cached, len, pool.page_positions()).last()
        {
            pool.keep_tail(self.pages[self.cached], self.tail(sequence, len, key, pool));
        }
    }

    /// What its first page that others cannot find holds of the sequence once it is filled with `len` tokens.
    fn tail<'a>(&self, sequence: &'a Sequence, len: usize, key: u64, pool: &PagePool) -> Content<'a> {
        let before = self.cached.checked_sub(1).map(|last| self.pages[last]);
        let tokens = sequence.tokens(self.cached * pool.page_positions() as usize, len);
        Content { key, before, salt: &sequence.request.cache_salt, tokens }
    }

    /// Lets others find the pages that are full before any plan that is yet to be built. Where another sequence was
    /// first to compute the same, its page takes the place of this one's with the next plan.
    pub(super) fn publish(&mut self, sequence: &Sequence, pool: &mut PagePool) {
        while self.has_unpublished(pool)
            && let before = self.cached.checked_sub(1).map(|last| self.pages[last])
            && let Some(content) = sequence.content(self.cached, before, pool.page_positions())
            && let Some(cached) = pool.publish(self.pages[self.cached], content)
        {
            self.put_cached(cached, pool);
        }
    }

    /// A page is full that others cannot find yet.
    fn has_unpublished(&self, pool: &PagePool) -> bool {
        let computed = self.computed();
        #[cfg(test)]
        let computed = computed + u64::from(SABOTAGE.get() == Sabotage::PublishEarly);
        computed >= (self.cached as u64 + 1) * u64::from(pool.page_positions())
    }

    /// A page that it holds and others find comes next.
    fn put_cached(&mut self, page: u32, pool: &mut PagePool) {
        match self.pages.get_mut(self.cached) {
            None => self.pages.push(page),
            Some(own) if *own == page => {}
            Some(own) => {
                pool.let_go(std::mem::replace(own, page));
                self.granted = self.granted.min(self.cached);
            }
        }
        self.cached += 1;
    }

    /// All its positions lie in full pages that can be found.
    fn is_at_border(&self, pool: &PagePool) -> bool {
        u64::from(self.prefilled) == self.cached as u64 * u64::from(pool.page_positions())
    }
}

/// The cached page that comes next in a sequence of whose tokens the pages `cached` hold the first, and `end` are to be
/// computed; none if it would hold the last of them.
fn find(sequence: &Sequence, cached: &[u32], end: u32, pool: &PagePool) -> Option<u32> {
    let after = (cached.len() as u64 + 1) * u64::from(pool.page_positions());
    let content = sequence.content(cached.len(), cached.last().copied(), pool.page_positions())?;
    pool.find(&content).filter(|_| after < u64::from(end))
}

impl Scheduler {
    /// Who is admitted before the first of the queue if it may enter: one of the next few of which more is cached,
    /// before others need the memory. Only those of the same owner and priority that were never admitted are overtaken,
    /// and each of them [`MOST_OVERTAKEN`] times at most.
    pub(super) fn most_cached(&self, pool: &PagePool) -> Option<Turn> {
        let is_fresh = self.queue.first()?.is_fresh();
        if !self.limits.prefix_cache || !self.leaving.is_empty() || !is_fresh {
            return None;
        }
        let (mut best, mut most_cached) = (None, 0);
        for id in self.shares.first_and_its_like().take(LOOK_AHEAD) {
            let sequence = &self.sequences[&id];
            // The last token is computed; and where a page is cached, so are all before it.
            let full = ((sequence.len() - 1) / u64::from(pool.page_positions())) as usize;
            let keys = &sequence.keys[..full.min(sequence.keys.len())];
            let cached = keys.partition_point(|&key| pool.may_hold(key));
            if cached > most_cached && 2 * cached >= keys.len() {
                (best, most_cached) = (Some(Turn::fresh(id)), cached);
            }
            if sequence.overtaken >= MOST_OVERTAKEN {
                break;
            }
        }
        best
    }

    /// A sequence is admitted before those of its owner that wait in front of it.
    pub(super) fn overtake(&mut self, turn: Turn) {
        let claim = self.sequences[&turn.id].claim.as_ref().filter(|_| turn.is_fresh());
        let earlier: Vec<u64> = claim.map_or(Vec::new(), |claim| self.shares.before(turn.id, claim).collect());
        for id in earlier {
            self.sequences.get_mut(&id).expect("the queue names known sequences").overtaken += 1;
        }
    }

    /// Of the pages that hold the beginning of a sequence that waits, those that others hold: they take no room.
    pub(super) fn shared_pages(&self, turn: Turn, pool: &PagePool) -> u64 {
        let sequence = &self.sequences[&turn.id];
        let mut pages = Vec::new();
        while let Some(page) = find(sequence, &pages, sequence.len() as u32, pool) {
            pages.push(page);
        }
        pages.into_iter().take_while(|&page| pool.is_held(page)).count() as u64
    }

    /// The prompts that rows of the plan's first step may go to, first come first: number, slot and rows at most. Each
    /// has taken over what plans before this one fill; one whose page a sequence before it is about to fill has rows up
    /// to the border from which it takes over what is filled, and none at the border.
    pub(super) fn prompts_to_compute(&mut self) -> Vec<(u64, u32, u32)> {
        let pool = self.pages.as_mut().expect("a sequence runs on pages of the pool");
        let (mut prompts, mut being_filled) = (Vec::with_capacity(self.prompts), HashSet::new());
        for (turn, &slot) in &self.running {
            let running = self.slots[slot as usize].as_mut().expect("running names slots in use");
            if running.decodes() && !running.has_unpublished(pool) {
                continue;
            }
            let sequence = self.sequences.get_mut(&turn.id).expect("running names known sequences");
            running.publish(sequence, pool);
            if running.decodes() {
                continue;
            }
            running.reuse(sequence, pool);
            if sequence.generated.is_empty() {
                sequence.cached_tokens = running.reused;
            }
            let next = (running.prefilled / pool.page_positions()) as usize;
            let is_first = sequence.keys.get(next).is_none_or(|key| being_filled.insert(*key));
            let can_reuse = pool.pages_for(running.prefill_end.into()) > next as u64 + 1;
            let rows = match is_first || !can_reuse {
                true => running.prompt_left(),
                // Up to the border from which it may take over what the other fills.
                false => running.prefilled.next_multiple_of(pool.page_positions()) - running.prefilled,
            };
            if rows > 0 {
                prompts.push((turn.id, slot, rows));
            }
        }
        prompts
    }
}

/// What tests have to notice.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sabotage {
    None,
    /// Pages are told apart by all tokens but their last.
    ForgetToken,
    /// Pages are found a position before they are full.
    PublishEarly,
    /// Tails are said to hold a position more than they do.
    LongTail,
}

#[cfg(test)]
thread_local! {
    pub(super) static SABOTAGE: std::cell::Cell<Sabotage> = const { std::cell::Cell::new(Sabotage::None) };
}
