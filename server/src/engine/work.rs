//! How much a replica has yet to do, for whoever compares it with others.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A share of the work that a replica has yet to do. It is taken off as it is dropped.
#[derive(Debug, Default)]
pub struct Work(Option<(Arc<AtomicU64>, u64)>);

impl Work {
    /// Adds `amount` to `all`.
    pub fn add(all: &Arc<AtomicU64>, amount: u64) -> Self {
        // Relaxed: a figure to compare replicas by.
        all.fetch_add(amount, Ordering::Relaxed);
        Self(Some((all.clone(), amount)))
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some((all, amount)) = self.0.take() {
            all.fetch_sub(amount, Ordering::Relaxed);
        }
    }
}
