//! What a key uses: requests at one time, requests a minute, and tokens a minute and a day.

use std::{
    cmp::Reverse,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::Instant;

use super::Key;

const MINUTE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What a key may use; `None`: as much as there is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Requests at one time.
    pub concurrent: Option<u32>,
    /// Requests that are taken. A key that has not been used for a minute has all of them at once.
    pub requests_per_minute: Option<u32>,
    /// Tokens of prompts and answers, likewise.
    pub tokens_per_minute: Option<u32>,
    /// The same within a day.
    pub tokens_per_day: Option<u32>,
    /// Its share where keys want more than there is, by those of others; 1.
    pub weight: Option<u32>,
    /// The first priority that its requests may ask for; 0.
    pub priority: Option<i32>,
    /// It may change how the server runs: restart replicas.
    pub admin: bool,
}

/// As they stand in a line of the file, each after a space.
impl fmt::Display for KeyLimits {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = [
            ("concurrent", self.concurrent),
            ("requests_per_minute", self.requests_per_minute),
            ("tokens_per_minute", self.tokens_per_minute),
            ("tokens_per_day", self.tokens_per_day),
            ("weight", self.weight),
        ];
        let numbers = numbers.map(|(name, number)| (name, number.map(i64::from)));
        for (name, number) in numbers.into_iter().chain([("priority", self.priority.map(i64::from))]) {
            if let Some(number) = number {
                write!(formatter, " {name}={number}")?;
            }
        }
        if self.admin {
            formatter.write_str(" admin")?;
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
    /// As many requests at one time as leave enough to other keys.
    #[error(
        "the API key {id} has {running} requests running, and the rest of the {limit} places are kept for other keys \
         (--max-concurrent-requests)"
    )]
    Share {
        /// The key's name.
        id: Arc<str>,
        /// Its requests.
        running: u32,
        /// Those of all keys at most.
        limit: usize,
    },
    /// Too many within a time.
    #[error("the API key {id} has used the {limit} {what} a {period} that it has; there are more in {retry_after_s} s")]
    Quota {
        /// The key's name.
        id: Arc<str>,
        /// The bound.
        limit: u32,
        /// "requests" or "tokens".
        what: &'static str,
        /// "minute" or "day".
        period: &'static str,
        /// Seconds until a request is taken again.
        retry_after_s: u32,
    },
}

impl KeyLimitError {
    /// Seconds after which trying again may help.
    pub fn retry_after_s(&self) -> u32 {
        match self {
            Self::Concurrent { .. } | Self::Share { .. } => 1,
            Self::Quota { retry_after_s, .. } => *retry_after_s,
        }
    }
}

/// What is left of a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quota {
    /// "requests" or "tokens".
    pub what: &'static str,
    /// The bound.
    pub limit: u32,
    /// What may be used at once.
    pub remaining: u32,
    /// Until all of it may be, if nothing is used meanwhile.
    pub reset: Duration,
}

/// What a key has used since the server began.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Requests that were taken.
    pub requests: u64,
    /// Of these, those that run now.
    pub running: u32,
    /// Those that a limit of the key refused.
    pub refused: u64,
    /// Tokens of prompts that were taken.
    pub prompt_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
}

/// What a key is using.
#[derive(Debug, Default)]
pub(super) struct Usage {
    running: AtomicU32,
    requests: AtomicU64,
    refused: AtomicU64,
    prompt_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    buckets: Mutex<Buckets>,
}

#[derive(Debug, Default)]
struct Buckets {
    requests: Bucket,
    minute: Bucket,
    day: Bucket,
}

/// Is filled by what is used, and runs empty within its period from the limit on.
#[derive(Debug)]
struct Bucket {
    level: f64,
    at: Instant,
    /// What was used in all when it was looked at.
    used: u64,
}

impl Default for Bucket {
    fn default() -> Self {
        Self { level: 0.0, at: Instant::now(), used: 0 }
    }
}

impl Bucket {
    /// What is in it, once it is known that so much was used in all. What is new counts as used now.
    fn level(&mut self, per_second: f64, used: u64) -> f64 {
        let now = Instant::now();
        let drained = per_second * (now - self.at).as_secs_f64();
        let level = (self.level - drained).max(0.0) + (used - self.used) as f64;
        *self = Self { level, at: now, used };
        level
    }
}

/// A limit over a time, and what of it is used.
struct Meter {
    what: &'static str,
    period: &'static str,
    limit: u32,
    per_second: f64,
    level: f64,
}

impl Meter {
    fn remaining(&self) -> u32 {
        (f64::from(self.limit) - self.level).max(0.0) as u32
    }

    /// Until there is something left again.
    fn wait(&self) -> Option<f64> {
        // Of tokens nobody knows before how many a request takes; one is enough, as it is of requests.
        let beyond = self.level + if self.what == "requests" { 1.0 } else { 0.0 } - f64::from(self.limit);
        let is_over = if self.what == "requests" { beyond > 0.0 } else { beyond >= 0.0 };
        is_over.then(|| beyond / self.per_second)
    }

    fn quota(&self) -> Quota {
        let reset = Duration::from_secs_f64(self.level / self.per_second);
        Quota { what: self.what, limit: self.limit, remaining: self.remaining(), reset }
    }
}

/// A request of a key, from its arrival to its end.
#[derive(Debug)]
pub struct Running(Arc<Usage>);

impl Running {
    /// Requests of the key at this time, this one included.
    pub fn of_its_key(&self) -> u32 {
        self.0.running.load(Relaxed)
    }
}

impl Key {
    /// A request begins, if the limits allow one more.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn begin(&self) -> Result<Running, KeyLimitError> {
        self.take().inspect_err(|_| self.refused())
    }

    /// A request of the key was refused for what others are to have.
    pub fn refused(&self) {
        self.usage.refused.fetch_add(1, Relaxed);
    }

    fn take(&self) -> Result<Running, KeyLimitError> {
        let id = || self.id.clone();
        let limit = self.limits.concurrent.unwrap_or(u32::MAX);
        let one_more = |running: u32| (running < limit).then_some(running + 1);
        let began = self.usage.running.fetch_update(Relaxed, Relaxed, one_more);
        began.map_err(|_| KeyLimitError::Concurrent { id: id(), limit })?;
        let running = Running(self.usage.clone());
        let mut buckets = self.usage.buckets();
        for meter in self.meters(&mut buckets) {
            if let Some(wait) = meter.wait() {
                let Meter { what, period, limit, .. } = meter;
                // At the very second it would still be full.
                return Err(KeyLimitError::Quota { id: id(), limit, what, period, retry_after_s: wait as u32 + 1 });
            }
        }
        self.usage.requests.fetch_add(1, Relaxed);
        Ok(running)
    }

    /// Tokens of a prompt that was taken.
    pub fn spend_prompt(&self, tokens: u64) {
        self.usage.prompt_tokens.fetch_add(tokens, Relaxed);
    }

    /// Tokens of an answer, as they come.
    pub fn spend_completion(&self, tokens: u64) {
        self.usage.completion_tokens.fetch_add(tokens, Relaxed);
    }

    /// What is left of requests and of tokens, where they are limited; of two limits the one of which less is left.
    pub fn quotas(&self) -> impl Iterator<Item = Quota> {
        let meters = self.meters(&mut self.usage.buckets());
        let of = |what| {
            meters
                .iter()
                .filter(|meter| meter.what == what)
                .map(Meter::quota)
                .min_by_key(|of| (of.remaining, Reverse(of.reset)))
        };
        [of("requests"), of("tokens")].into_iter().flatten()
    }

    /// What it has used.
    pub fn totals(&self) -> Totals {
        let usage = &self.usage;
        Totals {
            requests: usage.requests.load(Relaxed),
            running: usage.running.load(Relaxed),
            refused: usage.refused.load(Relaxed),
            prompt_tokens: usage.prompt_tokens.load(Relaxed),
            completion_tokens: usage.completion_tokens.load(Relaxed),
        }
    }

    /// Its limits over a time.
    fn meters(&self, buckets: &mut Buckets) -> Vec<Meter> {
        let Totals { requests, prompt_tokens, completion_tokens, .. } = self.totals();
        let (limits, tokens) = (self.limits, prompt_tokens + completion_tokens);
        let meters = [
            ("requests", "minute", limits.requests_per_minute, MINUTE, &mut buckets.requests, requests),
            ("tokens", "minute", limits.tokens_per_minute, MINUTE, &mut buckets.minute, tokens),
            ("tokens", "day", limits.tokens_per_day, DAY, &mut buckets.day, tokens),
        ];
        let meter = |(what, period, limit, length, bucket, used): (_, _, Option<u32>, Duration, &mut Bucket, u64)| {
            let per_second = f64::from(limit?) / length.as_secs_f64();
            Some(Meter { what, period, limit: limit?, per_second, level: bucket.level(per_second, used) })
        };
        meters.into_iter().filter_map(meter).collect()
    }
}

impl Usage {
    fn buckets(&self) -> std::sync::MutexGuard<'_, Buckets> {
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    fn key(limits: KeyLimits) -> Key {
        Key { id: "alice".into(), owner: None, limits, usage: Arc::default() }
    }

    fn retry_after_s(key: &Key) -> Option<u32> {
        key.begin().err().map(|error| error.retry_after_s())
    }

    #[test]
    fn requests_at_one_time_are_bounded() {
        let key = key(KeyLimits { concurrent: Some(2), ..KeyLimits::default() });
        let (first, second) = (key.begin().unwrap(), key.begin().unwrap());
        assert_eq!(second.of_its_key(), 2);
        let refused = key.begin().unwrap_err();
        assert_eq!(refused.to_string(), "the API key alice has 2 requests running, which is its limit");
        drop(first);
        key.begin().unwrap();
        assert_eq!((key.totals().requests, key.totals().refused), (3, 1));
    }

    #[tokio::test(start_paused = true)]
    async fn tokens_come_back_within_a_minute() {
        let key = key(KeyLimits { tokens_per_minute: Some(60), ..KeyLimits::default() });
        key.begin().unwrap();
        key.spend_prompt(50);
        key.spend_completion(9);
        key.begin().unwrap();
        // Nobody knows before how many tokens an answer has.
        key.spend_completion(11);
        assert_eq!(retry_after_s(&key), Some(11));
        advance(Duration::from_secs(10)).await;
        assert!(key.begin().is_err());
        advance(Duration::from_secs(1)).await;
        key.begin().unwrap();
        // Idle time is not saved up beyond the limit.
        advance(Duration::from_secs(3600)).await;
        key.spend_prompt(60);
        assert!(key.begin().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn requests_come_back_within_a_minute_and_those_refused_count_for_nothing() {
        let key = key(KeyLimits { requests_per_minute: Some(3), concurrent: Some(1), ..KeyLimits::default() });
        for _ in 0..3 {
            let _running = key.begin().unwrap();
            assert!(matches!(key.begin(), Err(KeyLimitError::Concurrent { .. })));
        }
        let refused = key.begin().unwrap_err().to_string();
        assert_eq!(refused, "the API key alice has used the 3 requests a minute that it has; there are more in 21 s");
        assert_eq!(key.quotas().map(|quota| (quota.limit, quota.remaining)).collect::<Vec<_>>(), [(3, 0)]);
        for _ in 0..5 {
            assert_eq!(retry_after_s(&key), Some(21), "to ask costs nothing, and holds no place");
        }
        advance(Duration::from_secs(21)).await;
        key.begin().unwrap();
        assert!(key.begin().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn the_tighter_of_two_limits_of_tokens_is_told() {
        let limits = KeyLimits { tokens_per_minute: Some(100), tokens_per_day: Some(1000), ..KeyLimits::default() };
        let key = key(limits);
        let told = |key: &Key| key.quotas().map(|of| (of.what, of.limit, of.remaining)).collect::<Vec<_>>();
        assert_eq!(told(&key), [("tokens", 100, 100)]);
        for _ in 0..9 {
            key.begin().unwrap();
            key.spend_prompt(100);
            assert_eq!(told(&key), [("tokens", 100, 0)]);
            assert_eq!(retry_after_s(&key), Some(1), "of a minute's");
            advance(Duration::from_secs(60)).await;
        }
        // 900 less 9 minutes of 1000 a day.
        assert_eq!(told(&key), [("tokens", 100, 100)]);
        key.spend_prompt(120);
        assert_eq!(told(&key), [("tokens", 1000, 0)]);
        advance(Duration::from_secs(120)).await;
        let Err(KeyLimitError::Quota { period: "day", retry_after_s, .. }) = key.begin() else { panic!("over a day") };
        assert!((1000..1300).contains(&retry_after_s), "{retry_after_s}");
        let quota = key.quotas().next().unwrap();
        assert_eq!((quota.limit, quota.remaining), (1000, 0));
        assert!(quota.reset > Duration::from_secs(86_400), "{quota:?}");
    }
}
