//! Grammars compiled for the vocabulary. Those that came last are kept: what a hundred sequences are held to is
//! compiled once.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};

use super::Vocabulary;

/// Grammars that are kept.
const MOST_KEPT: usize = 32;
/// Ways in which a text may go on, of the parser; each choice of a list is one. (By the library's 2000 a list of 2000
/// choices compiles, and then ends its answer.)
const MOST_ITEMS: usize = 10_000;

/// A grammar at its beginning, or what is wrong with it; empty while a thread compiles it.
type Compiled = OnceLock<Result<Mutex<Matcher>, String>>;

/// What the threads of a worker share.
pub(super) struct Library {
    pub(super) vocab_size: usize,
    vocabulary: Option<Arc<Vocabulary>>,
    /// Made when the first grammar comes.
    factory: OnceLock<Result<ParserFactory, String>>,
    /// By their texts, the one that was asked for last in front.
    kept: Mutex<Vec<(Arc<str>, Arc<Compiled>)>>,
}

impl Library {
    pub(super) fn new(vocabulary: Option<Arc<Vocabulary>>, vocab_size: usize) -> Self {
        Self { vocab_size, vocabulary, factory: OnceLock::new(), kept: Mutex::default() }
    }

    /// What follows a sequence from the beginning of the grammar. A copy of one that is kept is in every respect what
    /// compiling yields, so that ranks need not keep the same ones.
    pub(super) fn matcher(&self, grammar: &Arc<str>) -> Result<Matcher, String> {
        let compiled = self.kept(grammar);
        // Who asks for one that another thread compiles waits for that: it would take as long itself.
        let matcher = compiled.get_or_init(|| self.compile(grammar).map(Mutex::new)).as_ref().map_err(Clone::clone)?;
        // Nothing changes it, so a poisoned one is whole.
        Ok(matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone())
    }

    fn kept(&self, grammar: &Arc<str>) -> Arc<Compiled> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let found = match kept.iter().position(|(text, _)| text == grammar) {
            Some(index) => kept.remove(index),
            None => (grammar.clone(), Arc::default()),
        };
        let compiled = found.1.clone();
        kept.insert(0, found);
        kept.truncate(MOST_KEPT);
        compiled
    }

    #[cfg(test)]
    pub(super) fn kept_count(&self) -> usize {
        self.kept.lock().unwrap().len()
    }

    fn compile(&self, grammar: &str) -> Result<Matcher, String> {
        let factory = self.factory.get_or_init(|| self.factory()).as_ref().map_err(Clone::clone)?;
        let grammar: TopLevelGrammar = serde_json::from_str(grammar).map_err(|error| error.to_string())?;
        Ok(Matcher::new(factory.create_parser(grammar)))
    }

    /// What makes parsers for the vocabulary: a tree of its words.
    fn factory(&self) -> Result<ParserFactory, String> {
        let vocabulary = self.vocabulary.as_deref().ok_or("the server has sent no vocabulary")?;
        let vocab_size = self.vocab_size;
        if vocabulary.end as usize >= vocab_size {
            return Err(format!("token {} ends answers, of {vocab_size} that the model has", vocabulary.end));
        }
        let mut words = vocabulary.words.clone();
        words.resize(vocab_size, Vec::new());
        let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, vocabulary.end), &words);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
        let limits = factory.quiet().limits_mut();
        // Errors are for the log; grammar and text of a client are not.
        limits.verbose_errors = false;
        limits.max_items_in_row = MOST_ITEMS;
        Ok(factory)
    }
}
