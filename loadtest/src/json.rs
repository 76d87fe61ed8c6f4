//! The report as JSON.
//!
//! Fields carry the names that `vllm bench serve` gives them wherever the same thing is meant; what has no counterpart
//! there has a name of its own.

use std::collections::BTreeMap;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use crate::calibrate::Calibration;
use crate::record::RequestRecord;
use crate::report::{Metric, PERCENTILES, Setup, Tally};
use crate::spread::Spread;

impl Tally {
    /// The whole report as one JSON object; times in milliseconds, null where nothing was counted.
    pub fn to_json(&self, setup: &Setup) -> Value {
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        put("date", json!(utc_date(SystemTime::now())));
        put("backend", json!(setup.backend));
        put("model_id", json!(setup.model));
        put("target", json!(setup.target));
        put("num_prompts", json!(self.completed() + self.failed() + self.interrupted()));
        put("request_rate", setup.rate.map_or_else(|| json!("inf"), |rate| json!(rate.mean_per_s())));
        if let Some(ramp) = setup.rate.filter(|rate| rate.is_ramp()) {
            put("ramp_up_strategy", json!("linear"));
            put("ramp_up_start_rps", json!(ramp.from_per_s));
            put("ramp_up_end_rps", json!(ramp.to_per_s));
        }
        put("burstiness", json!(setup.burstiness));
        put("max_concurrency", json!(setup.max_concurrency));
        put("arrivals", json!(setup.pacing));
        put("seed", json!(setup.seed));
        let (prompt_lengths, output_lengths) = setup.shapes.to_json();
        put("prompt_tokens_asked", prompt_lengths);
        put("max_tokens", output_lengths);
        put("min_tokens", json!(setup.min_tokens));
        put("shared_prefix", json!(setup.shared_prefix));
        put("ignore_eos", json!(setup.ignore_eos));
        put("warmup_requests", json!(setup.warmup));
        let (from_s, to_s) = self.window_s();
        put("counted_from_s", json!(from_s));
        put("counted_to_s", json!(to_s));
        put("excluded_requests", json!(self.excluded().0));
        put("slo", json!(self.slo().map(|slo| slo.to_string())));
        put("good_requests", json!(self.good()));
        put("request_goodput", json!(self.good_requests_per_s()));
        put("duration", json!(self.duration_s()));
        put("completed", json!(self.completed()));
        put("failed", json!(self.failed()));
        put("interrupted", json!(self.interrupted()));
        put("total_input_tokens", json!(self.prompt_tokens()));
        put("total_output_tokens", json!(self.output_tokens()));
        put("request_throughput", json!(self.requests_per_s()));
        put("output_throughput", json!(self.output_tokens_per_s()));
        put("total_token_throughput", json!(self.total_tokens_per_s()));
        put("max_output_tokens_per_s", json!(self.peak_tokens_per_s()));
        put("max_concurrent_requests", json!(self.peak_in_flight()));
        for Metric { key, times, .. } in self.metrics() {
            put(&format!("mean_{key}_ms"), json!(times.mean_ms()));
            put(&format!("median_{key}_ms"), json!(times.percentile_ms(50.0)));
            put(&format!("std_{key}_ms"), json!(times.std_ms()));
            for (name, percentile) in PERCENTILES {
                put(&format!("{name}_{key}_ms"), json!(times.percentile_ms(percentile)));
            }
            put(&format!("max_{key}_ms"), json!(times.max_ms()));
        }
        put("client_error", json!(setup.calibration.as_ref().map(Calibration::to_json)));
        put("spread", json!(self.spread().map(Spread::to_json)));
        put("server_side", json!(self.server_side().map(|side| side.to_json(self))));
        if let Some(faults) = self.faults() {
            put("faults", faults.to_json());
        }
        put("finish_reasons", json!(self.finish_reasons()));
        let errors: BTreeMap<_, _> = self.errors().iter().map(|(kind, (count, _))| (kind, count)).collect();
        put("errors_by_kind", json!(errors));
        let examples: BTreeMap<_, _> = self.errors().iter().map(|(kind, (_, message))| (kind, message)).collect();
        put("error_examples", json!(examples));
        put("notes", json!(self.notes(setup)));
        put("sampled_requests", self.sampled_requests());
        Value::Object(fields)
    }
}

/// One request as a line of `--requests-file`; times in milliseconds, `due_ms` of the run and the others after it was
/// sent, null where there is none.
pub fn request_line(run: u32, record: &RequestRecord) -> Value {
    let ms = |ns: u64| ns as f64 / 1e6;
    let since_sent = |time_ns: u64| ms(time_ns.saturating_sub(record.sent_ns));
    let gaps: Vec<f64> = record.chunks_ns.windows(2).map(|pair| ms(pair[1].saturating_sub(pair[0]))).collect();
    json!({
        "run": run,
        "index": record.index,
        "turn": record.turn,
        "fault": record.conduct.name(),
        "due_ms": ms(record.intended_ns),
        "client_delay_ms": ms(record.sent_ns.saturating_sub(record.intended_ns)),
        "ttft_ms": record.first_token_ns().map(since_sent),
        "tpot_ms": record.time_per_output_token_ns().map(ms),
        "e2el_ms": since_sent(record.ended_ns),
        "itl_ms": gaps,
        "prompt_tokens": record.prompt_tokens,
        "output_tokens": record.output_tokens(),
        "finish_reason": record.finish_reason,
        "error": record.failure.as_ref().map(|failure| failure.kind()),
        "error_message": record.failure.as_ref().map(|failure| failure.to_string()),
    })
}

/// `time` as `YYYYMMDD-HHMMSS` in UTC. Civil date from days after Howard Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`.
pub fn utc_date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn dates_are_civil() {
        let date = |seconds| utc_date(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(date(0), "19700101-000000");
        assert_eq!(date(951_782_400), "20000229-000000");
        assert_eq!(date(1_709_251_199), "20240229-235959");
        assert_eq!(date(1_767_225_599), "20251231-235959");
    }
}
