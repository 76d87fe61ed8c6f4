//! What a server says of itself at one moment, read from the text that Prometheus reads.

macro_rules! fields {
    ($($(#[$doc:meta])* $field:ident: $($name:literal)|+,)*) => {
        /// What is read of a server: so far, but for the first three.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Field { $($(#[$doc])* $field),* }

        /// Each with its names behind the prefix, the one that counts first.
        const NAMES: &[(Field, &[&str])] = &[$((Field::$field, &[$($name),+])),*];
    };
}

fields! {
    Running: "num_requests_running",
    Waiting: "num_requests_waiting",
    /// Share of the KV cache in use, 0 to 1.
    KvUsage: "kv_cache_usage_perc" | "gpu_cache_usage_perc",
    Steps: "step_duration_seconds_count" | "iteration_tokens_total_count",
    StepSeconds: "step_duration_seconds_sum",
    /// Of these, waiting for other ranks.
    WaitSeconds: "step_wait_seconds_sum",
    Rows: "step_rows_sum" | "iteration_tokens_total_sum",
    DecodeRows: "decode_rows_total",
    /// Bytes that steps had to read at least, on all ranks.
    ReadBytes: "step_read_bytes_total",
    GenerationTokens: "generation_tokens_total",
    PromptTokens: "prompt_tokens_total",
    /// Tokens of prompts that the prefix cache was asked for, and that it held.
    CacheQueries: "prefix_cache_queries_total" | "gpu_prefix_cache_queries_total",
    CacheHits: "prefix_cache_hits_total" | "gpu_prefix_cache_hits_total",
    FirstTokens: "time_to_first_token_seconds_count",
    FirstTokenSeconds: "time_to_first_token_seconds_sum",
    Gaps: "inter_token_latency_seconds_count" | "time_per_output_token_seconds_count",
    GapSeconds: "inter_token_latency_seconds_sum" | "time_per_output_token_seconds_sum",
    Queued: "request_queue_time_seconds_count",
    QueueSeconds: "request_queue_time_seconds_sum",
    Preemptions: "num_preemptions_total",
    WorkerLosses: "worker_losses_total",
    Recoveries: "worker_recovery_seconds_count",
    RecoverySeconds: "worker_recovery_seconds_sum",
}

/// Looplane has vLLM's names, and others of its own.
const OWN_PREFIX: &str = "looplane_";
const VLLM_PREFIX: &str = "vllm:";

/// Above all that a server can have counted: a count beyond it is none, and sums of such would be without end.
const MOST: f64 = 1e24;

/// What a server said at one moment; none of what it does not say.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    pub dialect: &'static str,
    values: [Option<f64>; NAMES.len()],
}

impl Snapshot {
    /// Reads the answer of `/metrics`; none if it has no name that is known. Series that differ in labels only are
    /// added up, but for the share of the cache, of which the largest counts.
    pub fn read(text: &str) -> Option<Self> {
        // An answer that is too long to be read whole is cut anywhere, and half a number is another one.
        let lines = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n'));
        let is_looplane = lines.clone().any(|line| line.starts_with(OWN_PREFIX));
        let dialect = if is_looplane { "Looplane" } else { "vLLM" };
        let samples: Vec<(&str, f64)> = lines.filter_map(sample).collect();
        let of_name = |field: Field, name: &str| {
            let of_name = samples.iter().filter(|(found, _)| *found == name).map(|(_, value)| *value);
            of_name.reduce(|a, b| if field == Field::KvUsage { a.max(b) } else { a + b })
        };
        let mut values = [None; NAMES.len()];
        for (value, (field, names)) in values.iter_mut().zip(NAMES) {
            *value = names.iter().find_map(|name| of_name(*field, name));
        }
        values.iter().any(Option::is_some).then_some(Self { dialect, values })
    }

    pub fn get(&self, field: Field) -> Option<f64> {
        self.values[field as usize]
    }

    /// How much it grew from `before` to this; none where it fell: the server began to count again.
    pub fn since(&self, before: &Self, field: Field) -> Option<f64> {
        let grown = self.get(field)? - before.get(field)?;
        (grown >= 0.0).then_some(grown)
    }
}

/// Name without its prefix, and value, of a line that has one: `name value` or `name{labels} value`, with whatever
/// behind.
fn sample(line: &str) -> Option<(&str, f64)> {
    let line = line.strip_prefix(OWN_PREFIX).or_else(|| line.strip_prefix(VLLM_PREFIX))?;
    let name_end = line.find(['{', ' '])?;
    let (name, rest) = line.split_at(name_end);
    let values = if rest.starts_with('{') { &rest[labels_end(rest)?..] } else { rest };
    let value = values.split_whitespace().next()?.parse::<f64>().ok()?;
    (0.0..=MOST).contains(&value).then_some((name, value))
}

/// Where the labels end that `text` begins with: behind the brace that is in no quotes.
fn labels_end(text: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = quoted,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(at + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_read_under_its_name() {
        let lines = NAMES.iter().enumerate().map(|(value, (_, names))| format!("looplane_{} {value}\n", names[0]));
        let text: Vec<String> = lines.collect();
        let snapshot = Snapshot::read(&text.concat()).expect("known names");
        assert_eq!(snapshot.dialect, "Looplane");
        for (value, (field, _)) in NAMES.iter().enumerate() {
            assert_eq!(snapshot.get(*field), Some(value as f64), "{field:?}");
        }
    }

    #[test]
    fn series_are_added_up_and_lines_may_have_more_behind_the_value() {
        let both = Snapshot::read("vllm:num_requests_running 3\nlooplane_step_rows_sum 9\n").expect("known names");
        assert_eq!((both.dialect, both.get(Field::Running), both.get(Field::Rows)), ("Looplane", Some(3.0), Some(9.0)));
        let text = "# HELP vllm:num_requests_running some\n# TYPE vllm:num_requests_running gauge\n\
                    vllm:num_requests_running{engine=\"0\",model_name=\"a}\\\" 7{\"} 3.0\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"a\"} 4 1700000000 # {trace=\"x\"} 9\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.25\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.5\n\
                    vllm:time_per_output_token_seconds_sum 1.5e1\nvllm:num_requests_running_other 100\n\
                    vllm:num_requests_waiting{engine=\"0\"} NaN\nvllm:num_preemptions_total{broken 5\n";
        let snapshot = Snapshot::read(text).expect("known names");
        assert_eq!((snapshot.dialect, snapshot.get(Field::Running)), ("vLLM", Some(7.0)));
        assert_eq!((snapshot.get(Field::KvUsage), snapshot.get(Field::GapSeconds)), (Some(0.5), Some(15.0)));
        assert_eq!((snapshot.get(Field::Waiting), snapshot.get(Field::Preemptions)), (None, None));
        assert_eq!(Snapshot::read("tgi_queue_size 3\n{\"some\": \"JSON\"}\n"), None);
    }

    #[test]
    fn half_a_line_and_values_that_are_no_counts_are_not_taken() {
        let read = |text: &str| Snapshot::read(text).expect("known names");
        let cut = read("vllm:num_requests_running 3\nvllm:generation_tokens_total 12");
        assert_eq!((cut.get(Field::Running), cut.get(Field::GenerationTokens)), (Some(3.0), None));
        for value in ["-1", "1e300", "inf", "NaN"] {
            let text = format!("looplane_num_requests_running 3\nlooplane_step_duration_seconds_count {value}\n");
            assert_eq!(read(&text).get(Field::Steps), None, "{value}");
        }
        // A machine that reads 80 TB/s for a month is past 10^20.
        assert_eq!(read("looplane_step_read_bytes_total 2e20\n").get(Field::ReadBytes), Some(2e20));
    }

    #[test]
    fn counts_that_fall_are_no_growth() {
        let of =
            |steps: u32| Snapshot::read(&format!("looplane_step_duration_seconds_count {steps}\n")).expect("known");
        assert_eq!(of(9).since(&of(4), Field::Steps), Some(5.0));
        assert_eq!((of(3).since(&of(4), Field::Steps), of(9).since(&of(4), Field::Rows)), (None, None));
    }
}
