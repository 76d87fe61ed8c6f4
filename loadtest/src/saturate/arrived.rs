//! What arrived in a step of a search, also of requests that were cut off with it.
//!
//! A step in which the server falls behind is ended with many requests unanswered. Figures of those that were answered
//! in time would be the figures of the lucky ones, and look the better the more the server is overloaded.

use crate::client::record::{Failure, RequestRecord};
use crate::stats::distribution::Distribution;

/// Times and tokens of a step, of requests that succeeded or were cut off.
#[derive(Debug, Default)]
pub struct Arrived {
    /// A request that was cut off without a token counts with the time that it had waited.
    ttft: Distribution,
    ttft_from_intended: Distribution,
    itl: Distribution,
    tpot: Distribution,
    chunks: u64,
    /// Of the answers that are complete: how many tokens a chunk stands for.
    complete_chunks: u64,
    complete_tokens: u64,
    ended_ns: u64,
}

impl Arrived {
    /// Counts what `record` got.
    pub fn add(&mut self, record: &RequestRecord) {
        let is_cut_off = match record.failure {
            None => false,
            Some(Failure::Interrupted) => true,
            Some(_) => return,
        };
        self.ended_ns = self.ended_ns.max(record.ended_ns);
        if let Some(first_ns) = record.first_token_ns().or(is_cut_off.then_some(record.ended_ns)) {
            self.ttft.record_ns(first_ns.saturating_sub(record.sent_ns));
            self.ttft_from_intended.record_ns(first_ns.saturating_sub(record.intended_ns));
        }
        for pair in record.chunks_ns.windows(2) {
            self.itl.record_ns(pair[1].saturating_sub(pair[0]));
        }
        if let Some(tpot_ns) = record.time_per_output_token_ns() {
            self.tpot.record_ns(tpot_ns);
        }
        let chunks = record.chunks_ns.len() as u64;
        self.chunks += chunks;
        if !is_cut_off {
            self.complete_chunks += chunks;
            self.complete_tokens += record.output_tokens();
        }
    }

    /// The times that the report calls `key`; none for those that only a complete answer has.
    pub fn times(&self, key: &str) -> Option<&Distribution> {
        match key {
            "ttft" => Some(&self.ttft),
            "ttft_from_intended" => Some(&self.ttft_from_intended),
            "itl" => Some(&self.itl),
            "tpot" => Some(&self.tpot),
            _ => None,
        }
    }

    /// Output tokens a second from the start of the step to the end of its last request; 0 for a step without any.
    pub fn output_tokens_per_s(&self) -> f64 {
        let tokens_a_chunk = match self.complete_chunks {
            0 => 1.0,
            chunks => self.complete_tokens as f64 / chunks as f64,
        };
        match self.ended_ns {
            0 => 0.0,
            ended_ns => self.chunks as f64 * tokens_a_chunk / (ended_ns as f64 / 1e9),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::records::{self, MS};

    /// Two tokens a chunk, where they were counted.
    fn record(due_ms: u64, chunks_ms: &[u64], ended_ms: u64, failure: Option<Failure>) -> RequestRecord {
        let completion_tokens = failure.is_none().then_some(2 * chunks_ms.len() as u64);
        let record = records::record(due_ms, due_ms, chunks_ms);
        RequestRecord { completion_tokens, ended_ns: ended_ms * MS, failure, ..record }
    }

    #[test]
    fn what_was_cut_off_counts_as_far_as_it_came() {
        let mut arrived = Arrived::default();
        assert_eq!(arrived.output_tokens_per_s(), 0.0);
        arrived.add(&record(0, &[100, 110], 110, None));
        arrived.add(&record(0, &[100, 150], 2000, Some(Failure::Interrupted)));
        arrived.add(&record(1000, &[], 2000, Some(Failure::Interrupted)));
        // One that failed says nothing of the others' times.
        arrived.add(&record(0, &[1], 9000, Some(Failure::Truncated)));
        let near = |key: &str, percentile: f64, want: f64| {
            let ms = arrived.times(key).and_then(|times| times.percentile_ms(percentile)).expect(key);
            assert!((ms / want - 1.0).abs() < 2e-3, "{key}: {ms} for {want}");
        };
        near("ttft_from_intended", 50.0, 100.0);
        near("ttft_from_intended", 99.0, 1000.0);
        near("itl", 99.0, 50.0);
        near("tpot", 99.0, 50.0);
        assert_eq!(arrived.times("ttft").map(Distribution::count), Some(3));
        assert!(arrived.times("e2el").is_none());
        assert!((arrived.output_tokens_per_s() - 4.0 * 2.0 / 2.0).abs() < 1e-9, "four chunks of two tokens in 2 s");
    }
}
