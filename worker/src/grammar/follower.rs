//! Follows one sequence through its grammar. llguidance does the work: an Earley parser over the bytes of the tokens.
//!
//! Its bounds count steps of work, not time, so that a grammar is given up at the same token on every rank.

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};

use super::{Ask, Masks};

/// Where a sequence is in its grammar.
pub(super) enum Follower {
    /// The grammar is yet to be compiled.
    Text(String),
    /// Behind the tokens so far.
    Matcher(Box<Matcher>),
}

impl Follower {
    pub(super) fn new(grammar: &str) -> Self {
        Self::Text(grammar.to_owned())
    }

    /// Goes behind the newest tokens, and says which may be next there and behind each draft. `words`: of a mask.
    pub(super) fn answer(&mut self, ask: &Ask, factory: &Result<ParserFactory, String>, words: usize) -> Masks {
        if let Self::Text(grammar) = self {
            *self = match compiled(grammar, factory) {
                Ok(matcher) => Self::Matcher(Box::new(matcher)),
                Err(problem) => return Masks { position: ask.position, words: Err(problem) },
            };
        }
        let Self::Matcher(matcher) = self else { unreachable!("it was compiled above") };
        let masks = masks(matcher, ask, words).map_err(|error| error.to_string());
        Masks { position: ask.position, words: masks }
    }
}

fn compiled(grammar: &str, factory: &Result<ParserFactory, String>) -> Result<Matcher, String> {
    let factory = factory.as_ref().map_err(Clone::clone)?;
    let grammar: TopLevelGrammar = serde_json::from_str(grammar).map_err(|error| error.to_string())?;
    Ok(Matcher::new(factory.create_parser(grammar)))
}

fn masks(matcher: &mut Matcher, ask: &Ask, words: usize) -> anyhow::Result<Vec<Option<Vec<u32>>>> {
    matcher.consume_tokens(&ask.newest)?;
    let mut masks = Vec::with_capacity(1 + ask.drafts.len());
    masks.push(Some(mask(matcher, &ask.stops, words)?));
    let mut followed = 0;
    for &draft in &ask.drafts {
        let holds = masks.last().and_then(Option::as_ref).is_some_and(|mask| has(mask, draft));
        // A stop token ends the sequence: nothing follows it.
        if !holds || ask.stops.contains(&draft) {
            break;
        }
        matcher.consume_token(draft)?;
        followed += 1;
        masks.push(Some(mask(matcher, &ask.stops, words)?));
    }
    matcher.rollback(followed)?;
    masks.resize(1 + ask.drafts.len(), None);
    Ok(masks)
}

/// The tokens that may be next; at least one.
fn mask(matcher: &mut Matcher, stops: &[u32], words: usize) -> anyhow::Result<Vec<u32>> {
    let mut mask = vec![0; words];
    let ends = matcher.is_stopped() || matcher.is_accepting()?;
    if !matcher.is_stopped() {
        let allowed = matcher.compute_mask()?;
        let allowed = &allowed.as_slice()[..words.min(allowed.as_slice().len())];
        mask[..allowed.len()].copy_from_slice(allowed);
        let end = matcher.tok_env()?.tok_trie().eos_token();
        mask[end as usize / 32] &= !(1 << (end % 32));
    }
    if ends {
        stops.iter().for_each(|stop| mask[*stop as usize / 32] |= 1 << (stop % 32));
    }
    anyhow::ensure!(mask.iter().any(|word| *word != 0), "no token may follow, and none ends the answer");
    Ok(mask)
}

fn has(mask: &[u32], token: u32) -> bool {
    mask.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1)
}
