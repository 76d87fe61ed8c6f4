//! What a user is promised: limits that a request meets or misses as a whole.

use std::fmt::{self, Display};
use std::str::FromStr;
use std::time::Duration;

use crate::client::record::RequestRecord;
use crate::text::parse_duration;

/// Limits of one request, written `ttft=200ms,itl=50ms,tpot=40ms,e2e=10s`; what is not named has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slo {
    /// From when the request was due to its first token.
    pub ttft: Option<Duration>,
    pub itl: Option<Duration>,
    /// Mean time of a token after the first.
    pub tpot: Option<Duration>,
    /// From when the request was due to its end.
    pub e2e: Option<Duration>,
}

impl Slo {
    /// Whether `record` succeeded within every limit. An answer of one token has no gap that could be too long; one
    /// without text has no first token and misses the limit of that.
    pub fn is_met(&self, record: &RequestRecord) -> bool {
        let within = |limit: Option<Duration>, time_ns: Option<u64>| match (limit, time_ns) {
            (Some(limit), Some(time_ns)) => u128::from(time_ns) <= limit.as_nanos(),
            (Some(_), None) => false,
            (None, _) => true,
        };
        let since_due = |time_ns: u64| time_ns.saturating_sub(record.intended_ns);
        let longest_gap_ns = record.chunks_ns.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).max();
        record.failure.is_none()
            && within(self.ttft, record.first_token_ns().map(since_due))
            && within(self.itl, longest_gap_ns.or(Some(0)))
            && within(self.tpot, record.time_per_output_token_ns().or(Some(0)))
            && within(self.e2e, Some(since_due(record.ended_ns)))
    }

    fn limits(&self) -> [(&'static str, Option<Duration>); 4] {
        [("ttft", self.ttft), ("itl", self.itl), ("tpot", self.tpot), ("e2e", self.e2e)]
    }
}

impl FromStr for Slo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut slo = Self::default();
        for part in text.split(',') {
            let (name, limit) =
                part.split_once('=').ok_or_else(|| format!("'{part}' is not of the form ttft=200ms"))?;
            let slot = match name.trim() {
                "ttft" => &mut slo.ttft,
                "itl" => &mut slo.itl,
                "tpot" => &mut slo.tpot,
                "e2e" => &mut slo.e2e,
                other => return Err(format!("'{other}' has no limit: name ttft, itl, tpot or e2e")),
            };
            if slot.replace(parse_duration(limit.trim())?).is_some() {
                return Err(format!("{name} is given twice"));
            }
        }
        Ok(slo)
    }
}

impl Display for Slo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let given = self.limits().into_iter().filter_map(|(name, limit)| Some(format!("{name} {:?}", limit?)));
        f.write_str(&given.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::Failure;
    use crate::testing::records::{self, MS};

    /// Due at 0, sent at 100 ms, tokens at 200, 220 and 280 ms, over at 300 ms.
    fn record() -> RequestRecord {
        RequestRecord { ended_ns: 300 * MS, ..records::record(0, 100, &[200, 220, 280]) }
    }

    fn slo(text: &str) -> Slo {
        text.parse().expect(text)
    }

    #[test]
    fn each_limit_is_of_its_own_time() {
        for (met, missed) in [
            ("ttft=200ms", "ttft=199ms"),
            ("itl=60ms", "itl=59ms"),
            ("tpot=40ms", "tpot=39ms"),
            ("e2e=0.3", "e2e=0.299"),
        ] {
            assert!(slo(met).is_met(&record()), "{met}");
            assert!(!slo(missed).is_met(&record()), "{missed}");
        }
        assert!(slo("ttft=200ms,itl=60ms,tpot=40ms,e2e=300ms").is_met(&record()));
        assert!(!slo("ttft=200ms,itl=60ms,tpot=39ms,e2e=300ms").is_met(&record()));
    }

    #[test]
    fn a_failure_is_never_good_and_one_token_has_no_gap() {
        let mut failed = record();
        failed.failure = Some(Failure::Timeout);
        assert!(!slo("ttft=1h").is_met(&failed));
        let mut one = record();
        one.chunks_ns.truncate(1);
        assert!(slo("itl=1ms,tpot=1ms").is_met(&one));
        one.chunks_ns.clear();
        assert!(!slo("ttft=1h").is_met(&one));
    }

    #[test]
    fn limits_are_read_as_they_are_written() {
        assert_eq!(slo("ttft=200ms, e2e=2m").to_string(), "ttft 200ms, e2e 120s");
        for text in ["", "ttft", "ttft=", "ttft=0", "latency=3s", "ttft=1s,ttft=2s"] {
            assert!(text.parse::<Slo>().is_err(), "{text}");
        }
    }
}
