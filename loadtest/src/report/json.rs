//! The report as JSON.
//!
//! Fields carry the names that `vllm bench serve` gives them wherever the same thing is meant; what has no counterpart
//! there has a name of its own.

use std::collections::BTreeMap;
use std::time::SystemTime;

use serde_json::{Map, Value, json};

use crate::client::record::RequestRecord;
use crate::figures::spread::Spread;
use crate::figures::tally::{Metric, PERCENTILES};
use crate::report::contents::Report;
use crate::run::calibrate::Calibration;
use crate::text::utc_date;

impl Report {
    /// The whole report as one JSON object; times in milliseconds, null where nothing was counted.
    pub fn to_json(&self) -> Value {
        let Self { setup, tally, .. } = self;
        let mut fields = Map::new();
        let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
        put("date", json!(utc_date(SystemTime::now())));
        put("backend", json!(setup.backend));
        put("model_id", json!(setup.model));
        put("target", json!(setup.target));
        put("num_prompts", json!(tally.completed + tally.failed + tally.interrupted));
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
        let (from_s, to_s) = tally.window_s();
        put("counted_from_s", json!(from_s));
        put("counted_to_s", json!(to_s));
        put("excluded_requests", json!(tally.excluded));
        put("slo", json!(tally.slo.map(|slo| slo.to_string())));
        put("good_requests", json!(tally.good()));
        put("request_goodput", json!(tally.good_requests_per_s()));
        put("duration", json!(tally.duration_s()));
        put("completed", json!(tally.completed));
        put("failed", json!(tally.failed));
        put("interrupted", json!(tally.interrupted));
        put("total_input_tokens", json!(tally.prompt_tokens));
        put("cached_input_share", json!(tally.cached_share()));
        put("total_output_tokens", json!(tally.output_tokens));
        put("request_throughput", json!(tally.requests_per_s()));
        put("output_throughput", json!(tally.output_tokens_per_s()));
        put("total_token_throughput", json!(tally.total_tokens_per_s()));
        put("max_output_tokens_per_s", json!(tally.peak_tokens_per_s()));
        put("max_concurrent_requests", json!(tally.peak_in_flight));
        for Metric { key, times, .. } in tally.metrics() {
            put(&format!("mean_{key}_ms"), json!(times.mean_ms()));
            put(&format!("median_{key}_ms"), json!(times.percentile_ms(50.0)));
            put(&format!("std_{key}_ms"), json!(times.std_ms()));
            for (name, percentile) in PERCENTILES {
                put(&format!("{name}_{key}_ms"), json!(times.percentile_ms(percentile)));
            }
            put(&format!("max_{key}_ms"), json!(times.max_ms()));
        }
        put("client_error", json!(setup.calibration.as_ref().map(Calibration::to_json)));
        put("spread", json!(self.spread.as_ref().map(Spread::to_json)));
        put("server_side", json!(self.server_side.as_ref().map(|side| side.to_json(tally))));
        if let Some(faults) = &self.faults {
            put("faults", faults.json.clone());
        }
        put("finish_reasons", json!(tally.finish_reasons));
        let errors: BTreeMap<_, _> = tally.errors.iter().map(|(kind, (count, _))| (kind, count)).collect();
        put("errors_by_kind", json!(errors));
        let examples: BTreeMap<_, _> = tally.errors.iter().map(|(kind, (_, message))| (kind, message)).collect();
        put("error_examples", json!(examples));
        put("notes", json!(self.notes()));
        put("sampled_requests", tally.sample.to_json());
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
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens(),
        "finish_reason": record.finish_reason,
        "error": record.failure.as_ref().map(|failure| failure.kind()),
        "error_message": record.failure.as_ref().map(|failure| failure.to_string()),
    })
}
