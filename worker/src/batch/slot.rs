//! One slot of the batch: the tokens, pages and progress of the sequence in it.

use std::sync::Arc;

use super::corpus::Corpus;
use super::draft::{Drafter, Trust};
use super::draft_rows::Offer;
use super::pages::Pages;
use super::{Admit, Finish, PrefillChunk, Row, TokenBounds};
use crate::plan::{KvLayout, PAGE_POSITIONS};
use crate::sampling::SamplingParams;

/// A slot. Its buffers are as long as the longest sequence from the start.
#[derive(Debug, PartialEq)]
pub struct Slot {
    busy: bool,
    sequence: u64,
    tokens: Vec<u32>,
    prompt_tokens: usize,
    /// Tokens given at admission: those that chunks compute.
    admitted_tokens: usize,
    /// Positions whose K and V are in the cache.
    computed: usize,
    pages: Vec<u32>,
    max_pages: usize,
    max_tokens: usize,
    min_tokens: usize,
    stop_tokens: Vec<u32>,
    sampling: Option<SamplingParams>,
    logprobs: Option<u32>,
    prompt_logprobs: Option<u32>,
    grammar: Option<Arc<str>>,
    token_bounds: Option<Arc<TokenBounds>>,
    finished: bool,
    /// The newest position is computed again: it drew nothing, since what it may draw was not known.
    repeats: bool,
    /// Drafts are taken from answers of the same salt.
    salt: String,
    drafter: Drafter,
    trust: Trust,
    /// Tokens at the end of `tokens` that are drafts of the next step.
    drafted: usize,
    /// Rows of the chunk in the first step of the plan.
    chunk: usize,
    decodes: bool,
}

impl Slot {
    /// `longest`: tokens that room is made for.
    pub(super) fn new(max_context: usize, longest: usize) -> Self {
        let max_pages = KvLayout::pages_for(max_context);
        Self {
            busy: false,
            sequence: 0,
            tokens: Vec::with_capacity(longest),
            prompt_tokens: 0,
            admitted_tokens: 0,
            computed: 0,
            pages: Vec::with_capacity(max_pages),
            max_pages,
            max_tokens: 0,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: None,
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
            token_bounds: None,
            finished: false,
            repeats: false,
            salt: String::new(),
            drafter: Drafter::default(),
            trust: Trust::default(),
            drafted: 0,
            chunk: 0,
            decodes: false,
        }
    }

    /// A sequence is in the slot.
    pub fn is_busy(&self) -> bool {
        self.busy
    }

    /// The sequence's number.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Prompt, then generated tokens. The token sampled next gets the position `tokens().len()`.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.tokens.len() - self.drafted]
    }

    /// Prompt, generated tokens, and the drafts of the next step up to `position`: what a row there follows.
    pub(super) fn tokens_to(&self, position: u32) -> &[u32] {
        &self.tokens[..=position as usize]
    }

    /// The prompt.
    pub fn prompt(&self) -> &[u32] {
        &self.tokens[..self.prompt_tokens]
    }

    /// Tokens generated so far, those before a preemption included.
    pub fn generated(&self) -> &[u32] {
        &self.tokens()[self.prompt_tokens..]
    }

    /// Page table: page i holds positions `i * PAGE_POSITIONS` and up.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// How tokens are drawn.
    ///
    /// # Panics
    /// If the slot is free.
    pub fn sampling(&self) -> &SamplingParams {
        self.sampling.as_ref().expect("a slot named by a step holds a sequence, and a sequence has parameters")
    }

    /// Tokens that end the sequence.
    pub fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// Tokens to generate before stop tokens may be sampled.
    pub fn min_tokens(&self) -> usize {
        self.min_tokens
    }

    /// Stop tokens must not be sampled behind so many generated tokens.
    pub fn is_stop_forbidden(&self, generated: usize) -> bool {
        generated < self.min_tokens
    }

    /// Log-probabilities are wanted: of the sampled token and of this many most likely ones.
    pub fn logprobs(&self) -> Option<u32> {
        self.logprobs
    }

    /// Log-probabilities of the prompt's tokens are wanted: of each and of this many most likely ones.
    pub fn prompt_logprobs(&self) -> Option<u32> {
        self.prompt_logprobs
    }

    /// The token of the prompt behind `position`, if its log-probability is wanted.
    pub fn given(&self, position: u32) -> Option<u32> {
        let next = self.prompt().get(position as usize + 1).copied();
        next.filter(|_| self.prompt_logprobs.is_some())
    }

    /// The grammar that its output is held to.
    pub fn grammar(&self) -> Option<&Arc<str>> {
        self.grammar.as_ref()
    }

    /// The tokens that it may draw by name.
    pub fn token_bounds(&self) -> Option<&Arc<TokenBounds>> {
        self.token_bounds.as_ref()
    }

    /// It may not draw every token.
    pub fn is_held(&self) -> bool {
        self.grammar.is_some() || self.token_bounds.is_some()
    }

    pub(super) fn clear(&mut self) {
        self.busy = false;
        self.tokens.clear();
        self.pages.clear();
        self.stop_tokens.clear();
        self.sampling = None;
        (self.grammar, self.token_bounds) = (None, None);
        self.repeats = false;
        (self.prompt_tokens, self.admitted_tokens, self.computed) = (0, 0, 0);
        self.finished = false;
        self.drafted = 0;
        self.clear_work();
    }

    pub(super) fn clear_work(&mut self) {
        self.chunk = 0;
        self.decodes = false;
    }

    pub(super) fn fill(&mut self, admit: &Admit) {
        self.clear();
        self.busy = true;
        self.sequence = admit.sequence;
        self.tokens.extend_from_slice(&admit.tokens);
        self.prompt_tokens = admit.prompt_tokens as usize;
        self.admitted_tokens = admit.tokens.len();
        self.max_tokens = admit.max_tokens as usize;
        self.min_tokens = admit.min_tokens as usize;
        self.stop_tokens.extend_from_slice(&admit.stop_tokens);
        self.logprobs = admit.logprobs;
        self.prompt_logprobs = admit.prompt_logprobs;
        self.grammar.clone_from(&admit.grammar);
        self.token_bounds.clone_from(&admit.token_bounds);
        self.sampling = Some(admit.sampling.clone());
        self.salt.clone_from(&admit.cache_salt);
        self.trust = Trust::default();
        self.drafter.begin((self.prompt_tokens + self.max_tokens).min(self.max_pages * PAGE_POSITIONS + 1));
    }

    /// Drafts at most `most` tokens for the next step, each of which has a page and is not the last that the sequence
    /// may have. `first` in the first step of a plan.
    pub(super) fn draft(&mut self, corpus: &Corpus, most: usize, max_context: usize, first: bool) {
        debug_assert_eq!(self.drafted, 0, "drafts are taken back before the next");
        let known = self.tokens.len();
        let has_chunk = first && self.chunk > 0;
        if !self.decodes || self.finished || has_chunk || self.next_position() + 1 != known || self.repeats {
            return;
        }
        // The row of a draft at position p samples the token after it.
        let room = (self.last_position(max_context) + 1).saturating_sub(known);
        let most = most.min(room);
        self.drafter.extend(&self.tokens);
        let own = self.drafter.find(&self.tokens);
        let answered = corpus.find(&self.salt, &self.tokens);
        // Of equals the sequence's own: what it says now it says again sooner than others do.
        match (own, answered.filter(|answered| own.is_none_or(|(matched, _)| answered.matched > matched))) {
            (_, Some(answered)) => {
                self.tokens.extend(corpus.tokens_from(answered).take(most.min(answered.matched)));
            }
            (Some(own), None) => Drafter::draft(&mut self.tokens, own, most),
            (None, None) => {}
        }
        self.drafted = self.tokens.len() - known;
        if self.drafted == 0 {
            self.trust.pass();
        }
    }

    /// What it has drafted, if it has.
    pub(super) fn offer(&self, slot: usize) -> Option<Offer> {
        let offer = Offer { slot, tokens: self.drafted, chance: self.trust.chance(), tries: self.trust.tries() };
        (self.drafted > 0).then_some(offer)
    }

    /// Of what it has drafted, the step computes the first `count` tokens.
    pub(super) fn keep_drafts(&mut self, count: usize) {
        self.tokens.truncate(self.tokens.len() - self.drafted + count);
        self.drafted = count;
        if count == 0 {
            self.trust.pass();
        }
    }

    /// Tokens that are drafts of the next step.
    pub(super) fn drafted(&self) -> usize {
        self.drafted
    }

    /// Takes back the drafts of the step that was computed.
    pub(super) fn take_back(&mut self) -> usize {
        self.tokens.truncate(self.tokens.len() - self.drafted);
        std::mem::take(&mut self.drafted)
    }

    /// So many of the tokens that were drafted were those that were sampled.
    pub(super) fn learn(&mut self, drafted: usize, held: usize) {
        if drafted > 0 {
            self.trust.learn(drafted, held);
        }
    }

    /// The sequence ended: what it said may be said again.
    pub(super) fn add_answer(&self, corpus: &mut Corpus) {
        corpus.add(&self.salt, self.tokens(), self.prompt_tokens);
    }

    /// Pages that the longest sequence needs.
    pub(super) fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// Takes pages, which are held already, from number `first` of its table on, and lets go of what was there.
    pub(super) fn put_pages(&mut self, first: usize, granted: &[u32], pages: &mut Pages) -> Result<(), String> {
        if first > self.pages.len() {
            return Err(format!("it has {}", self.pages.len()));
        }
        let (computed, replaced) = (self.computed / PAGE_POSITIONS, (self.pages.len() - first).min(granted.len()));
        for (index, (before, &page)) in (first..).zip(self.pages[first..].iter_mut().zip(granted)) {
            if *before != page && (index >= computed || !pages.is_full(page)) {
                return Err(format!("page {page} is not one as full as page {before}"));
            }
            pages.let_go(std::mem::replace(before, page));
        }
        self.pages.extend_from_slice(&granted[replaced..]);
        Ok(())
    }

    /// The slot's next positions, which pages hold already, are skipped up to the chunk's first.
    pub(super) fn schedule_chunk(&mut self, chunk: &PrefillChunk, pages: &Pages) -> Result<(), String> {
        let (start, len) = (chunk.start as usize, chunk.len as usize);
        let end = start + len;
        if self.chunk > 0 {
            return Err("the slot has a chunk in this plan already".into());
        }
        if len == 0 {
            return Err("it is empty".into());
        }
        if start != self.computed && (start < self.computed || !self.computed.is_multiple_of(PAGE_POSITIONS)) {
            return Err(format!("{} positions have been computed", self.computed));
        }
        if end > self.admitted_tokens {
            return Err(format!("{} tokens were given at admission", self.admitted_tokens));
        }
        if KvLayout::pages_for(end) > self.pages.len() {
            return Err(format!("the slot has {} pages of {PAGE_POSITIONS} positions", self.pages.len()));
        }
        for begin in (self.computed..start).step_by(PAGE_POSITIONS) {
            let (page, needed) = (self.pages[begin / PAGE_POSITIONS], (start - begin).min(PAGE_POSITIONS));
            let filled = pages.filled(page);
            if filled < needed {
                return Err(format!("it skips {needed} positions of page {page}, of which {filled} were filled"));
            }
        }
        self.computed = start;
        self.chunk = len;
        Ok(())
    }

    pub(super) fn schedule_decode(&mut self) -> Result<(), String> {
        if self.decodes {
            return Err("it is named twice".into());
        }
        if self.computed + self.chunk < self.admitted_tokens {
            let (computed, all) = (self.computed + self.chunk, self.admitted_tokens);
            return Err(format!("only {computed} of its {all} tokens have been computed"));
        }
        self.decodes = true;
        Ok(())
    }

    /// Rows of the plan's first step, as far as the plan can say.
    pub(super) fn scheduled_rows(&self) -> usize {
        if self.chunk > 0 { self.chunk } else { usize::from(self.decodes) }
    }

    /// The first position that is computed next.
    fn next_position(&self) -> usize {
        self.computed - usize::from(self.repeats)
    }

    /// The rows that come next; `first` in the first step of a plan.
    pub(super) fn rows(&self, slot: u32, first: bool) -> impl Iterator<Item = Row> {
        let chunk = first && self.chunk > 0;
        let start = self.next_position();
        let has_page = start < self.pages.len() * PAGE_POSITIONS;
        let decodes = self.decodes && !self.finished && has_page;
        let len = if chunk { self.chunk } else { usize::from(decodes) + self.drafted };
        let (all, known) = (self.tokens.len(), self.tokens().len());
        self.tokens[start.min(all)..(start + len).min(all)].iter().enumerate().map(move |(i, &token)| Row {
            slot,
            token,
            position: (start + i) as u32,
            sample: start + i + 1 >= known || self.given((start + i) as u32).is_some(),
        })
    }

    /// The last position that can be computed: the token sampled there is the last of the output or of the context, or
    /// the next position has no page.
    pub(super) fn last_position(&self, max_context: usize) -> usize {
        // The token sampled at position p is the sequence's (p + 2)th.
        let longest = (self.prompt_tokens + self.max_tokens).min(max_context);
        longest.saturating_sub(2).min((self.pages.len() * PAGE_POSITIONS).saturating_sub(1))
    }

    /// Pages that the positions computed next lie in.
    pub(super) fn pages_to_write(&self) -> &[u32] {
        &self.pages[(self.computed / PAGE_POSITIONS).min(self.pages.len())..]
    }

    /// `rows` more positions have been computed, and their pages written. `repeats`: the last of them drew nothing, and
    /// is computed again, to the same K and V.
    pub(super) fn advance(&mut self, rows: usize, repeats: bool, pages: &mut Pages) {
        let next = self.next_position();
        let first = next / PAGE_POSITIONS;
        self.computed = next + rows;
        self.repeats = repeats;
        for index in first..KvLayout::pages_for(self.computed) {
            pages.fill(self.pages[index], (self.computed - index * PAGE_POSITIONS).min(PAGE_POSITIONS));
        }
    }

    /// It has ended.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// It ends without another token: none may follow.
    pub(super) fn fail(&mut self) {
        self.finished = true;
    }

    /// Takes a sampled token and says whether the sequence ends with it.
    pub(super) fn append(&mut self, token: u32, max_context: usize) -> Option<Finish> {
        let stop_obeyed = !self.is_stop_forbidden(self.generated().len());
        self.tokens.push(token);
        let finish = if stop_obeyed && self.stop_tokens.contains(&token) {
            Some(Finish::Stop)
        } else if self.generated().len() >= self.max_tokens || self.tokens.len() >= max_context {
            Some(Finish::Length)
        } else {
            None
        };
        self.finished = finish.is_some();
        finish
    }
}
