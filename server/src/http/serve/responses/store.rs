//! Responses that clients may ask for again or go on from: the last so many, in memory.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::text::ChatMessage;

/// Bytes of all that is kept.
const MAX_BYTES: usize = 64 << 20;

/// The last responses. Older ones make room for new ones.
#[derive(Debug)]
pub struct ResponseStore {
    max_responses: usize,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    by_id: HashMap<String, Arc<Stored>>,
    /// Oldest first.
    ids: VecDeque<String>,
    bytes: usize,
}

/// A response with what was said up to its end.
#[derive(Debug)]
pub(super) struct Stored {
    /// As the client had it.
    pub(super) body: String,
    /// Without instructions, which are each request's own.
    pub(super) messages: Vec<ChatMessage>,
    bytes: usize,
}

impl Stored {
    pub(super) fn new(body: String, messages: Vec<ChatMessage>) -> Self {
        let said = serde_json::to_string(&messages).expect("texts, numbers and lists of them are always JSON");
        Self { bytes: body.len() + said.len(), body, messages }
    }
}

impl ResponseStore {
    /// Keeps at most so many responses; 0: none.
    pub fn new(max_responses: usize) -> Self {
        Self { max_responses, kept: Mutex::default() }
    }

    pub(super) fn put(&self, id: &str, stored: Stored) {
        if self.max_responses == 0 || stored.bytes > MAX_BYTES {
            return;
        }
        let mut kept = self.kept();
        while kept.ids.len() >= self.max_responses || kept.bytes + stored.bytes > MAX_BYTES {
            let oldest = kept.ids.front().cloned().expect("what has bytes has a name");
            kept.remove(&oldest);
        }
        kept.bytes += stored.bytes;
        kept.ids.push_back(id.to_owned());
        kept.by_id.insert(id.to_owned(), Arc::new(stored));
    }

    pub(super) fn get(&self, id: &str) -> Option<Arc<Stored>> {
        self.kept().by_id.get(id).cloned()
    }

    /// Whether it was there.
    pub(super) fn delete(&self, id: &str) -> bool {
        self.kept().remove(id)
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn remove(&mut self, id: &str) -> bool {
        let Some(stored) = self.by_id.remove(id) else { return false };
        self.ids.retain(|kept| kept != id);
        self.bytes -= stored.bytes;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(bytes: usize) -> Stored {
        Stored::new("x".repeat(bytes), Vec::new())
    }

    #[test]
    fn the_oldest_make_room() {
        let store = ResponseStore::new(2);
        for id in ["a", "b", "c"] {
            store.put(id, stored(1));
        }
        assert!(store.get("a").is_none() && store.get("b").is_some() && store.get("c").is_some());
        assert!(store.delete("b") && !store.delete("b"));
        store.put("d", stored(1));
        assert!(store.get("c").is_some(), "what was deleted takes no room");
        store.put("large", stored(MAX_BYTES - 10));
        assert!(store.get("c").is_none() && store.get("large").is_some());
        store.put("too large", stored(MAX_BYTES));
        assert!(store.get("too large").is_none() && store.get("large").is_some());
        let bytes = ["d", "large"].map(|id| store.get(id).expect("it is kept").bytes).iter().sum::<usize>();
        assert_eq!(store.kept().bytes, bytes);
        let none = ResponseStore::new(0);
        none.put("a", stored(1));
        assert!(none.get("a").is_none());
    }
}
