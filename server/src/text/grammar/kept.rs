//! Forms that were compiled last: what a hundred requests are held to is compiled once. Workers keep their own.

use std::{
    num::NonZeroUsize,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use lru::LruCache;

/// Forms that are kept, as many as workers keep.
const MOST: NonZeroUsize = NonZeroUsize::new(32).expect("it is more than 0");
/// Bytes of them and of their grammars.
const MOST_BYTES: usize = 4 << 20;

/// A grammar as workers read it, or what is wrong with it; empty while a thread compiles it.
type Compiled = OnceLock<Result<Arc<str>, String>>;

/// The forms by their texts.
#[derive(Debug)]
pub(super) struct Kept(Mutex<LruCache<String, Arc<Compiled>>>);

impl Default for Kept {
    fn default() -> Self {
        Self(Mutex::new(LruCache::new(MOST)))
    }
}

impl Kept {
    /// The grammar of a form, compiled if it is not kept. Who asks for one that another thread compiles waits for that.
    pub(super) fn get(
        &self,
        form: String,
        compile: impl FnOnce() -> Result<Arc<str>, String>,
    ) -> Result<Arc<str>, String> {
        let compiled = {
            let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            kept.get_or_insert(form, Arc::default).clone()
        };
        let mut is_new = false;
        let result = compiled.get_or_init(|| {
            is_new = true;
            compile()
        });
        if is_new {
            self.trim();
        }
        result.clone()
    }

    /// Forgets the oldest until the rest is within its bytes.
    fn trim(&self) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |compiled: &Arc<Compiled>| match compiled.get() {
            Some(Ok(grammar)) => grammar.len(),
            Some(Err(problem)) => problem.len(),
            None => 0,
        };
        let mut bytes: usize = kept.iter().map(|(form, compiled)| form.len() + of(compiled)).sum();
        while bytes > MOST_BYTES {
            let Some((form, compiled)) = kept.pop_lru() else { return };
            bytes -= form.len() + of(&compiled);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[test]
    fn a_form_is_compiled_once_whoever_asks_at_the_same_time() {
        let (kept, compiled) = (Kept::default(), AtomicUsize::new(0));
        let ask = |form: &str| {
            kept.get(form.to_owned(), || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                match compiled.fetch_add(1, SeqCst) {
                    0 => Ok("grammar".into()),
                    _ => Err("wrong".to_owned()),
                }
            })
        };
        std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| ask("a"))).collect();
            let all: Vec<Arc<str>> = all.into_iter().map(|asked| asked.join().unwrap().unwrap()).collect();
            assert!(all.iter().all(|grammar| Arc::ptr_eq(grammar, &all[0])), "they share one text");
        });
        // What is wrong is kept, too.
        assert!(ask("b").is_err() && ask("b").is_err() && ask("a").is_ok());
        assert_eq!(compiled.load(SeqCst), 2);
    }

    #[test]
    fn what_is_kept_has_bounds() {
        let kept = Kept::default();
        let held = || kept.0.lock().unwrap().len();
        (0..100).for_each(|form| drop(kept.get(form.to_string(), || Ok("x".into()))));
        assert_eq!(held(), MOST.get());
        let large: Arc<str> = "x".repeat(MOST_BYTES / 4).into();
        (0..8).for_each(|form| drop(kept.get(format!("large {form}"), || Ok(large.clone()))));
        assert_eq!(held(), 3);
        let huge = kept.get("huge".into(), || Ok("x".repeat(MOST_BYTES).into()));
        assert!(huge.is_ok() && held() == 0, "what is larger than all the room is not kept");
    }
}
