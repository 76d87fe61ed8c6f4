//! Times of single requests, as many as fit: what a comparison of two runs draws its intervals from.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::client::record::RequestRecord;

/// Most requests kept; of a longer run each request is kept with the same chance.
pub const MAX_SAMPLED: usize = 4096;

/// A uniform sample of the requests that succeeded: Vitter's algorithm R, ACM TOMS 11(1), 1985.
#[derive(Debug)]
pub struct Sample {
    requests: Vec<Times>,
    seen: u64,
    rng: StdRng,
}

/// Times of one request in milliseconds; none where its answer held too little text.
#[derive(Debug, Clone, Copy)]
struct Times {
    ttft: Option<f64>,
    ttft_from_intended: Option<f64>,
    tpot: Option<f64>,
    e2el: f64,
    e2el_from_intended: f64,
}

impl Default for Sample {
    fn default() -> Self {
        // Which requests are kept need not differ from run to run.
        Self { requests: Vec::new(), seen: 0, rng: StdRng::seed_from_u64(0) }
    }
}

impl Sample {
    /// Counts `record`, and keeps its times or not as chance has it where the sample is full.
    pub fn add(&mut self, record: &RequestRecord) {
        let since = |start_ns: u64| move |time_ns: u64| time_ns.saturating_sub(start_ns) as f64 / 1e6;
        let (first_ns, ended_ns) = (record.first_token_ns(), record.ended_ns);
        let times = Times {
            ttft: first_ns.map(since(record.sent_ns)),
            ttft_from_intended: first_ns.map(since(record.intended_ns)),
            tpot: record.time_per_output_token_ns().map(since(0)),
            e2el: since(record.sent_ns)(ended_ns),
            e2el_from_intended: since(record.intended_ns)(ended_ns),
        };
        self.seen += 1;
        if self.requests.len() < MAX_SAMPLED {
            self.requests.push(times);
        } else {
            let slot = self.rng.random_range(0..self.seen);
            if let Some(kept) = usize::try_from(slot).ok().and_then(|slot| self.requests.get_mut(slot)) {
                *kept = times;
            }
        }
    }

    /// One list a kind of time, in milliseconds, under the names that the report's figures have.
    pub fn to_json(&self) -> Value {
        let list = |time: fn(&Times) -> Option<f64>| json!(self.requests.iter().filter_map(time).collect::<Vec<_>>());
        json!({
            "ttft_ms": list(|times| times.ttft),
            "ttft_from_intended_ms": list(|times| times.ttft_from_intended),
            "tpot_ms": list(|times| times.tpot),
            "e2el_ms": list(|times| Some(times.e2el)),
            "e2el_from_intended_ms": list(|times| Some(times.e2el_from_intended)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::records::{MS, record};

    fn over(e2el_ms: u64) -> RequestRecord {
        RequestRecord { ended_ns: (1 + e2el_ms) * MS, ..record(0, 1, &[]) }
    }

    #[test]
    fn times_are_of_the_request() {
        let mut sample = Sample::default();
        sample.add(&RequestRecord { ended_ns: 10 * MS, ..record(0, 1, &[3, 5]) });
        sample.add(&over(4));
        let want = json!({
            "ttft_ms": [2.0], "ttft_from_intended_ms": [3.0], "tpot_ms": [2.0], "e2el_ms": [9.0, 4.0],
            "e2el_from_intended_ms": [10.0, 5.0],
        });
        assert_eq!(sample.to_json(), want);
    }

    /// Of 16 times as many requests as fit, the kept ones are spread like all: their mean is that of all within five of
    /// its standard errors, 1 / sqrt(12 * 4096) of the range each.
    #[test]
    fn a_long_run_is_sampled_evenly() {
        let mut sample = Sample::default();
        let total = 16 * MAX_SAMPLED as u64;
        (0..total).for_each(|ms| sample.add(&over(ms)));
        let kept = &sample.requests;
        assert_eq!(kept.len(), MAX_SAMPLED);
        let mean = kept.iter().map(|times| times.e2el / total as f64).sum::<f64>() / kept.len() as f64;
        assert!((mean - 0.5).abs() < 5.0 / (12.0 * MAX_SAMPLED as f64).sqrt(), "{mean}");
    }
}
