//! The names of everything that `/metrics` says, and what they mean.
//!
//! What vLLM has as well has vLLM's name (`vllm:`), so that dashboards, alerts and endpoint pickers made for it work as
//! they are; all else is `looplane_`. docs/metrics.md has the same table for readers: a test holds both together.

use std::fmt::Error;

use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Metric, Registry, Unit};

/// A family of series. Counters get `_total` behind their name, those with a unit get that.
#[derive(Debug)]
pub struct Name {
    name: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    help: &'static str,
}

impl Name {
    const fn new(kind: MetricType, name: &'static str, help: &'static str) -> Self {
        Self { name, unit: None, kind, help }
    }

    /// Begins the family in a scrape.
    ///
    /// # Errors
    /// Those of the encoder.
    pub fn begin<'a>(&'static self, encoder: &'a mut DescriptorEncoder<'_>) -> Result<MetricEncoder<'a>, Error> {
        // As a registry ends what it is told.
        encoder.encode_descriptor(self.name, &format!("{}.", self.help), self.unit.as_ref(), self.kind)
    }

    /// Gives a metric this name.
    pub fn register(&self, registry: &mut Registry, metric: impl Metric) {
        registry.register(self.name, self.help, metric);
    }
}

const fn gauge(name: &'static str, help: &'static str) -> Name {
    Name::new(MetricType::Gauge, name, help)
}

const fn counter(name: &'static str, help: &'static str) -> Name {
    Name::new(MetricType::Counter, name, help)
}

const fn counts(name: &'static str, help: &'static str) -> Name {
    Name::new(MetricType::Histogram, name, help)
}

const fn times(name: &'static str, help: &'static str) -> Name {
    Name { name, unit: Some(Unit::Seconds), kind: MetricType::Histogram, help }
}

/// Defines constants, each with its maker, name and meaning.
macro_rules! names {
    ($($constant:ident: $make:ident $name:literal, $help:literal;)*) => {
        $(#[doc = $help] pub const $constant: &Name = &$make($name, $help);)*
    };
}

// Of sequences.
names! {
    RUNNING: gauge "vllm:num_requests_running", "Sequences in slots of the batch";
    WAITING: gauge "vllm:num_requests_waiting", "Sequences that wait for a slot";
    SUCCESS: counter "vllm:request_success", "Sequences that ended, by reason";
    PREEMPTIONS: counter "vllm:num_preemptions", "Times a sequence gave up its slot, to come back later";
    FIRST_TOKEN: times "vllm:time_to_first_token", "From submission to the first token";
    INTER_TOKEN: times "vllm:inter_token_latency", "Between two tokens of a sequence; 0 if a step brings both";
    TIME_PER_TOKEN: times "vllm:request_time_per_output_token", "Mean time between tokens of a sequence";
    END_TO_END: times "vllm:e2e_request_latency", "From submission to the end";
    QUEUE_TIME: times "vllm:request_queue_time", "From submission to the first slot";
    PREFILL_TIME: times "vllm:request_prefill_time", "From admission to the first token";
    DECODE_TIME: times "vllm:request_decode_time", "From the first token to the last";
    INFERENCE_TIME: times "vllm:request_inference_time", "From admission to the last token";
}

// Of tokens.
names! {
    PROMPT_TOKENS: counter "vllm:prompt_tokens", "Tokens of prompts, those that were cached included";
    GENERATION_TOKENS: counter "vllm:generation_tokens", "Tokens generated, as clients are told in usage";
    REQUEST_PROMPT_TOKENS: counts "vllm:request_prompt_tokens", "Tokens of a prompt";
    REQUEST_GENERATION_TOKENS: counts "vllm:request_generation_tokens", "Tokens generated for a sequence";
    CACHE_QUERIES: counter "vllm:prefix_cache_queries", "Tokens of prompts that the prefix cache was asked for";
    CACHE_HITS: counter "vllm:prefix_cache_hits", "Tokens of prompts that the prefix cache held";
    DRAFTS: counter "vllm:spec_decode_num_drafts", "Steps of sequences that had drafts";
    DRAFT_TOKENS: counter "vllm:spec_decode_num_draft_tokens", "Tokens that were drafted";
    ACCEPTED_TOKENS: counter "vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were accepted";
    ACCEPTED_BY_POSITION: counter "vllm:spec_decode_num_accepted_tokens_per_pos", "Those, by place in the draft";
}

// Of the KV cache.
names! {
    KV_USAGE: gauge "vllm:kv_cache_usage_perc", "Share of the KV pages that sequences hold, 0 to 1";
    CACHE_CONFIG: gauge "vllm:cache_config_info", "Tokens that a KV page holds, and KV pages";
    KV_PAGES: gauge "looplane_kv_cache_pages", "KV pages of the group";
    KV_PAGES_USED: gauge "looplane_kv_cache_pages_used", "KV pages that sequences hold";
    KV_PAGES_CACHED: gauge "looplane_kv_cache_pages_cached", "KV pages that nobody holds, kept for prompts to come";
    KV_BYTES: gauge "looplane_kv_cache_size_bytes", "KV cache of all ranks";
}

// Of steps.
names! {
    PLANS: counter "looplane_plans", "Plans sent to the workers";
    STEP_TIME: times "looplane_step_duration", "A step on rank 0: a token of each sequence, parts of prompts";
    STEP_WAIT: times "looplane_step_wait", "Of a step on rank 0, waiting for others; a GPU does not tell";
    STEP_ROWS: counts "looplane_step_rows", "Rows (tokens) of a step, of prompts and decoding";
    DECODE_ROWS: counter "looplane_decode_rows", "Rows computed to decode";
    PROMPT_ROWS: counter "looplane_prompt_rows", "Rows computed of prompts, and again after preemption or a loss";
    READ_BYTES: counter "looplane_step_read_bytes", "Bytes that steps had to read at least, on all ranks";
    STREAM_BYTES: gauge "looplane_weight_stream_bytes", "Weights that a pass streams, of all ranks";
    RANK_STEP: counter "looplane_rank_step_seconds", "Time of a rank in steps";
    RANK_WAIT: counter "looplane_rank_wait_seconds", "Of that, waiting for other ranks; a GPU does not tell";
    RANK_READ: counter "looplane_rank_read_bytes", "Bytes that steps of a rank had to read at least";
    RANK_READ_LIMIT: gauge "looplane_rank_read_limit_bytes_per_second", "Bytes a second that a rank's socket can read";
    LOSSES: counter "looplane_worker_losses", "Groups of workers lost, also where none was started again";
    RECOVERY: times "looplane_worker_recovery", "From the loss of a group until the next takes work";
}

// Of the front end.
names! {
    BUILD: gauge "looplane_build_info", "Which Looplane this is";
    MODEL: gauge "looplane_model_info", "What is served";
    STATE: gauge "looplane_engine_state", "1 for the state that the replica is in";
    ANSWERS: counter "looplane_http_requests", "Answers by route and HTTP status (gRPC: always 200)";
    ERRORS: counter "looplane_request_errors", "Requests refused or given up, by the code that clients are told";
    CONNECTIONS: gauge "looplane_connections", "Connections that are open now";
    IN_PROGRESS: gauge "looplane_requests_in_progress", "Requests that have a place now";
    UPLOAD_BYTES: gauge "looplane_upload_bytes", "Bytes that bodies of requests hold now, beyond 64 KiB of each";
    SPANS: counter "looplane_trace_spans", "Spans of traces, by what became of them";
    KEY_REQUESTS: counter "looplane_key_requests", "Requests that were taken, by API key";
    KEY_REFUSALS: counter "looplane_key_refusals", "Requests that a limit of their API key refused";
    KEY_PROMPT_TOKENS: counter "looplane_key_prompt_tokens", "Tokens of prompts that were taken, by API key";
    KEY_GENERATION_TOKENS: counter "looplane_key_generation_tokens", "Tokens of answers, by API key";
    KEY_IN_PROGRESS: gauge "looplane_key_requests_in_progress", "Requests that run now, by API key";
}
