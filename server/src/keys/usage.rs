//! What a key uses: requests at one time, and tokens a minute.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
};

use tokio::time::Instant;

use super::Key;

/// What a key may use; `None`: as much as there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Requests at one time.
    pub concurrent: Option<u32>,
    /// Tokens of prompts and answers. A key that has not been used for a minute has all of them at once.
    pub tokens_per_minute: Option<u32>,
}

/// As they stand in a line of the file, each after a space.
impl fmt::Display for KeyLimits {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limits = [("concurrent", self.concurrent), ("tokens_per_minute", self.tokens_per_minute)];
        for (name, limit) in limits {
            if let Some(limit) = limit {
                write!(formatter, " {name}={limit}")?;
            }
        }
        Ok(())
    }
}

/// A limit of a key that is reached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KeyLimitError {
    /// Too many requests at one time.
    #[error("the API key {id} has {limit} requests running, which is its limit")]
    Concurrent {
        /// The key's name.
        id: Arc<str>,
        /// The bound.
        limit: u32,
    },
    /// Too many tokens.
    #[error("the API key {id} has used the {limit} tokens a minute that it has; there are more in {retry_after_s} s")]
    Tokens {
        /// The key's name.
        id: Arc<str>,
        /// The bound.
        limit: u32,
        /// Seconds until a request is taken again.
        retry_after_s: u32,
    },
}

/// What a key is using.
#[derive(Debug, Default)]
pub(super) struct Usage {
    running: AtomicU32,
    /// Tokens that `bucket` does not know of yet.
    spent: AtomicU64,
    bucket: Mutex<Bucket>,
}

/// Runs empty in a minute from the limit on.
#[derive(Debug)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { tokens: 0.0, at: Instant::now() }
    }
}

/// A request of a key, from its arrival to its end.
#[derive(Debug)]
pub struct Running(Arc<Usage>);

impl Key {
    /// A request begins, if the limits allow one more.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn begin(&self) -> Result<Running, KeyLimitError> {
        if let Some(limit) = self.limits.tokens_per_minute {
            let per_second = f64::from(limit) / 60.0;
            let beyond = self.usage.tokens(per_second) - f64::from(limit);
            if beyond >= 0.0 {
                // At the very second it would still be full.
                let retry_after_s = (beyond / per_second) as u32 + 1;
                return Err(KeyLimitError::Tokens { id: self.id.clone(), limit, retry_after_s });
            }
        }
        let limit = self.limits.concurrent.unwrap_or(u32::MAX);
        let one_more = |running: u32| (running < limit).then_some(running + 1);
        match self.usage.running.fetch_update(Relaxed, Relaxed, one_more) {
            Ok(_) => Ok(Running(self.usage.clone())),
            Err(_) => Err(KeyLimitError::Concurrent { id: self.id.clone(), limit }),
        }
    }

    /// Tokens of a prompt that was taken, or of an answer as they come.
    pub fn spend(&self, tokens: u64) {
        self.usage.spent.fetch_add(tokens, Relaxed);
    }
}

impl Usage {
    /// Tokens in the bucket now.
    fn tokens(&self, per_second: f64) -> f64 {
        let mut bucket = self.bucket.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let drained = per_second * (now - bucket.at).as_secs_f64();
        let tokens = (bucket.tokens - drained).max(0.0) + self.spent.swap(0, Relaxed) as f64;
        *bucket = Bucket { tokens, at: now };
        tokens
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::advance;

    use super::*;

    fn key(concurrent: Option<u32>, tokens_per_minute: Option<u32>) -> Key {
        Key { id: "alice".into(), limits: KeyLimits { concurrent, tokens_per_minute }, usage: Arc::default() }
    }

    #[test]
    fn requests_at_one_time_are_bounded() {
        let key = key(Some(2), None);
        let (first, _second) = (key.begin().unwrap(), key.begin().unwrap());
        let refused = key.begin().unwrap_err();
        assert_eq!(refused.to_string(), "the API key alice has 2 requests running, which is its limit");
        drop(first);
        key.begin().unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_come_back_within_a_minute() {
        let key = key(None, Some(60));
        key.begin().unwrap();
        key.spend(59);
        key.begin().unwrap();
        // Nobody knows before how many tokens an answer has.
        key.spend(11);
        let Err(KeyLimitError::Tokens { retry_after_s, .. }) = key.begin() else { panic!("70 tokens are over") };
        assert_eq!(retry_after_s, 11);
        advance(Duration::from_secs(10)).await;
        assert!(key.begin().is_err());
        advance(Duration::from_secs(1)).await;
        key.begin().unwrap();
        // Idle time is not saved up beyond the limit.
        advance(Duration::from_secs(3600)).await;
        key.spend(60);
        assert!(key.begin().is_err());
    }
}
