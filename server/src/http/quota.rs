//! What is left of a key's limits: on its answers under OpenAI's names, and for all keys in `/metrics`.

use std::{fmt::Error, sync::Arc, time::Duration};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{counter::ConstCounter, gauge::ConstGauge},
};

use crate::{
    keys::{Key, Keys, Totals},
    metrics::names::{self, Name},
    reload::Reloaded,
};

/// Keys that `/metrics` names, the first of the file; all others are one there.
const MOST_NAMED: usize = 256;
/// Their name: no key can have it.
const OTHERS: &str = "";

/// By what is limited: the limit, what is left of it, and when it is whole again.
const NAMES: [(&str, [HeaderName; 3]); 2] = [
    (
        "requests",
        [
            HeaderName::from_static("x-ratelimit-limit-requests"),
            HeaderName::from_static("x-ratelimit-remaining-requests"),
            HeaderName::from_static("x-ratelimit-reset-requests"),
        ],
    ),
    (
        "tokens",
        [
            HeaderName::from_static("x-ratelimit-limit-tokens"),
            HeaderName::from_static("x-ratelimit-remaining-tokens"),
            HeaderName::from_static("x-ratelimit-reset-tokens"),
        ],
    ),
];

/// All of them.
pub(super) fn names() -> impl Iterator<Item = HeaderName> {
    NAMES.into_iter().flat_map(|(_, names)| names)
}

/// Tells what is left of a key's limits over a time, if it has any.
pub(super) fn tell(key: &Key, headers: &mut HeaderMap) {
    for quota in key.quotas() {
        let names = NAMES.into_iter().find(|(what, _)| *what == quota.what);
        let (_, [limit, remaining, reset]) = names.expect("what is limited has its headers");
        headers.insert(limit, quota.limit.into());
        headers.insert(remaining, quota.remaining.into());
        let value = HeaderValue::try_from(in_words(quota.reset)).expect("digits and letters are a header's value");
        headers.insert(reset, value);
    }
}

/// As OpenAI writes it: `6m0s`, `1s`, `12ms`.
fn in_words(time: Duration) -> String {
    if time < Duration::from_secs(1) {
        return format!("{}ms", time.as_micros().div_ceil(1000));
    }
    let seconds = time.as_millis().div_ceil(1000);
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, seconds) => format!("{seconds}s"),
        (0, minutes, seconds) => format!("{minutes}m{seconds}s"),
        (hours, minutes, seconds) => format!("{hours}h{minutes}m{seconds}s"),
    }
}

/// What keys have used since the server began.
#[derive(Debug)]
pub(super) struct Used(pub(super) Arc<Reloaded<Keys>>);

impl Collector for Used {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let keys = self.0.current();
        let mut used: Vec<(&str, Totals)> = keys.iter().map(|key| (&*key.id, key.totals())).collect();
        let others = used.split_off(used.len().min(MOST_NAMED));
        used.extend(others.into_iter().map(|(_, totals)| totals).reduce(sum).map(|totals| (OTHERS, totals)));
        type Figure = (&'static Name, fn(&Totals) -> u64);
        let figures: [Figure; 4] = [
            (names::KEY_REQUESTS, |of| of.requests),
            (names::KEY_REFUSALS, |of| of.refused),
            (names::KEY_PROMPT_TOKENS, |of| of.prompt_tokens),
            (names::KEY_GENERATION_TOKENS, |of| of.completion_tokens),
        ];
        for (name, figure) in figures {
            let mut family = name.begin(&mut encoder)?;
            for (id, totals) in &used {
                ConstCounter::new(figure(totals)).encode(family.encode_family(&[("key", *id)])?)?;
            }
        }
        let mut family = names::KEY_IN_PROGRESS.begin(&mut encoder)?;
        for (id, totals) in &used {
            ConstGauge::new(u64::from(totals.running)).encode(family.encode_family(&[("key", *id)])?)?;
        }
        Ok(())
    }
}

fn sum(one: Totals, other: Totals) -> Totals {
    Totals {
        requests: one.requests + other.requests,
        running: one.running + other.running,
        refused: one.refused + other.refused,
        prompt_tokens: one.prompt_tokens + other.prompt_tokens,
        completion_tokens: one.completion_tokens + other.completion_tokens,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use prometheus_client::{encoding::text::encode, registry::Registry};

    use super::*;
    use crate::keys::{KeyLimits, new_key};

    #[test]
    fn times_are_written_as_openai_does() {
        for (ms, text) in [
            (0, "0ms"),
            (12, "12ms"),
            (999, "999ms"),
            (1000, "1s"),
            (1001, "2s"),
            (59_500, "1m0s"),
            (360_000, "6m0s"),
            (86_400_000, "24h0m0s"),
        ] {
            assert_eq!(in_words(Duration::from_millis(ms)), text);
        }
    }

    #[test]
    fn however_many_keys_there_are_only_some_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let (keys, lines): (Vec<String>, Vec<String>) =
            (0..MOST_NAMED + 44).map(|at| new_key(&format!("key-{at}"), KeyLimits::default()).unwrap()).unzip();
        fs::write(&path, lines.join("\n")).unwrap();
        let all = Keys::load(Some(path), None).unwrap().unwrap();
        for key in &keys {
            let key = all.current().find(key.as_bytes()).unwrap();
            drop(key.begin().unwrap());
            key.spend_prompt(3);
        }
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register_collector(Box::new(Used(all)));
        encode(&mut text, &registry).unwrap();
        let value = |line: &str| text.lines().find_map(|of| of.strip_prefix(line)?.trim().parse::<u64>().ok());
        assert_eq!(value("looplane_key_requests_total{key=\"key-0\"}"), Some(1), "{text}");
        assert_eq!(value("looplane_key_requests_total{key=\"\"}"), Some(44));
        assert_eq!(value("looplane_key_prompt_tokens_total{key=\"\"}"), Some(132));
        assert_eq!(text.matches("looplane_key_requests_total{").count(), MOST_NAMED + 1);
        assert!(keys.iter().all(|key| !text.contains(key.as_str())));
    }
}
