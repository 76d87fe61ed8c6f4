//! Follows one sequence through what it is held to. Of a grammar llguidance does the work: an Earley parser over the
//! bytes of the tokens.
//!
//! Its bounds count steps of work, not time, so that a grammar is given up at the same token on every rank.

use std::sync::Arc;

use llguidance::Matcher;

use super::compiled::Library;
use super::{Ask, Masks};
use crate::batch::{Slot, TokenBounds};

/// Where a sequence is in what it is held to.
pub(super) struct Follower {
    grammar: Option<Grammar>,
    bounds: Option<Bounds>,
}

enum Grammar {
    /// Yet to be compiled.
    Text(Arc<str>),
    /// Behind the tokens so far.
    Matcher(Box<Matcher>),
}

/// Where a sequence is in the tokens that it may draw by name.
struct Bounds {
    of: Arc<TokenBounds>,
    /// The newest tokens, behind which one more may be forbidden.
    newest: Vec<u32>,
}

impl Follower {
    /// At the beginning of the sequence's output.
    pub(super) fn new(sequence: &Slot) -> Self {
        Self::of(sequence.grammar().cloned(), sequence.token_bounds().cloned())
    }

    pub(super) fn of(grammar: Option<Arc<str>>, bounds: Option<Arc<TokenBounds>>) -> Self {
        let bounds = bounds.map(|of| Bounds { of, newest: Vec::new() });
        Self { grammar: grammar.map(Grammar::Text), bounds }
    }

    /// Goes behind the newest tokens, and says which may be next there and behind each draft.
    pub(super) fn answer(&mut self, ask: &Ask, library: &Library) -> Masks {
        if let Some(Grammar::Text(grammar)) = &self.grammar {
            match library.matcher(grammar) {
                Ok(matcher) => self.grammar = Some(Grammar::Matcher(Box::new(matcher))),
                Err(problem) => return Masks { position: ask.position, words: Err(problem) },
            }
        }
        let masks = self.masks(ask, library.vocab_size).map_err(|error| error.to_string());
        Masks { position: ask.position, words: masks }
    }

    fn masks(&mut self, ask: &Ask, vocab_size: usize) -> anyhow::Result<Vec<Option<Vec<u32>>>> {
        self.consume(&ask.newest)?;
        let mut masks = Vec::with_capacity(1 + ask.drafts.len());
        masks.push(Some(self.mask(ask, 0, vocab_size)?));
        let mut followed = 0;
        for &draft in &ask.drafts {
            let holds = masks.last().and_then(Option::as_ref).is_some_and(|mask| has(mask, draft));
            // A stop token ends the sequence: nothing follows it.
            if !holds || ask.stops.contains(&draft) {
                break;
            }
            self.consume(&[draft])?;
            followed += 1;
            masks.push(Some(self.mask(ask, followed, vocab_size)?));
        }
        self.take_back(followed)?;
        masks.resize(1 + ask.drafts.len(), None);
        Ok(masks)
    }

    fn consume(&mut self, tokens: &[u32]) -> anyhow::Result<()> {
        if let Some(Grammar::Matcher(matcher)) = &mut self.grammar {
            matcher.consume_tokens(tokens)?;
        }
        if let Some(bounds) = &mut self.bounds {
            bounds.newest.extend_from_slice(tokens);
        }
        Ok(())
    }

    /// Goes back over the newest tokens. What came before them is not gone back over any more.
    fn take_back(&mut self, tokens: usize) -> anyhow::Result<()> {
        if let Some(Grammar::Matcher(matcher)) = &mut self.grammar {
            matcher.rollback(tokens)?;
        }
        if let Some(Bounds { of, newest }) = &mut self.bounds {
            newest.truncate(newest.len() - tokens);
            newest.drain(..newest.len().saturating_sub(of.longest_prefix()));
        }
        Ok(())
    }

    /// The tokens that may be next, `ahead` drafts behind what was asked for; at least one.
    fn mask(&mut self, ask: &Ask, ahead: usize, vocab_size: usize) -> anyhow::Result<Vec<u32>> {
        let words = vocab_size.div_ceil(32);
        let mut mask = match &mut self.grammar {
            Some(Grammar::Matcher(matcher)) => grammar_mask(matcher, &ask.stops, words)?,
            Some(Grammar::Text(_)) => unreachable!("it is compiled before the first mask"),
            None => vec![u32::MAX; words],
        };
        if !vocab_size.is_multiple_of(32) {
            mask[words - 1] &= (1 << (vocab_size % 32)) - 1;
        }
        if let Some(bounds) = &self.bounds {
            bounds.bound(&mut mask);
        }
        if ask.position + ahead < ask.stops_from {
            ask.stops.iter().for_each(|stop| clear(&mut mask, *stop));
        }
        anyhow::ensure!(mask.iter().any(|word| *word != 0), "no token may follow, and none ends the answer");
        Ok(mask)
    }
}

impl Bounds {
    fn bound(&self, mask: &mut [u32]) {
        let TokenBounds { allowed, forbidden } = &*self.of;
        if !allowed.is_empty() {
            let mut only = vec![0; mask.len()];
            allowed.iter().for_each(|token| set(&mut only, *token));
            mask.iter_mut().zip(only).for_each(|(word, only)| *word &= only);
        }
        for tokens in forbidden {
            if let Some((last, prefix)) = tokens.split_last()
                && self.newest.ends_with(prefix)
            {
                clear(mask, *last);
            }
        }
    }
}

/// The tokens that may be next by a grammar; stop tokens are among them where it may end.
fn grammar_mask(matcher: &mut Matcher, stops: &[u32], words: usize) -> anyhow::Result<Vec<u32>> {
    let mut mask = vec![0; words];
    let ends = matcher.is_stopped() || matcher.is_accepting()?;
    if !matcher.is_stopped() {
        let allowed = matcher.compute_mask()?;
        let allowed = &allowed.as_slice()[..words.min(allowed.as_slice().len())];
        mask[..allowed.len()].copy_from_slice(allowed);
        clear(&mut mask, matcher.tok_env()?.tok_trie().eos_token());
    }
    if ends {
        stops.iter().for_each(|stop| set(&mut mask, *stop));
    }
    Ok(mask)
}

fn has(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}

/// A token that the vocabulary does not have cannot be drawn in any case.
fn set(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word |= 1 << (token % 32);
    }
}

fn clear(mask: &mut [u32], token: u32) {
    if let Some(word) = mask.get_mut(token as usize / 32) {
        *word &= !(1 << (token % 32));
    }
}
