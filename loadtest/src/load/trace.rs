//! A recorded load: when each request came, and how long its prompt and answer were.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, anyhow, ensure};
use serde::Deserialize;

use crate::load::lengths::{MAX_TOKENS, Shape};
use crate::text::printable;

/// Latest request of a trace, in seconds: a day.
const MAX_TIME_S: f64 = 86_400.0;

/// A line of the file. The second names are those of Mooncake's traces, whose times are milliseconds.
#[derive(Deserialize)]
struct Line {
    time_s: Option<f64>,
    timestamp: Option<f64>,
    #[serde(alias = "input_length")]
    prompt_tokens: u32,
    #[serde(alias = "output_length")]
    output_tokens: u32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    requests: Vec<(Duration, Shape)>,
}

impl Trace {
    /// Reads a file of JSON lines with `time_s` (seconds since the start), `prompt_tokens` and `output_tokens`, or
    /// `timestamp` (milliseconds), `input_length` and `output_length`.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let shown = path.display();
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read the trace {shown}"))?;
        let mut requests = Vec::new();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let is_none = |why| anyhow!("line {} of the trace {shown} is no request: {why}", index + 1);
            requests.push(request(line).map_err(is_none)?);
        }
        ensure!(!requests.is_empty(), "the trace {shown} holds no request");
        requests.sort_by_key(|(due, _)| *due);
        Ok(Self { requests })
    }

    pub fn due_times(&self) -> impl Iterator<Item = Duration> + Send + use<> {
        self.requests.iter().map(|(due, _)| *due).collect::<Vec<_>>().into_iter()
    }

    pub fn count(&self) -> u64 {
        self.requests.len() as u64
    }

    /// Lengths of request `offset`; they repeat after the last one.
    pub fn shape(&self, offset: u64) -> Shape {
        self.requests[(offset % self.count()) as usize].1
    }

    pub fn longest_prompt(&self) -> u32 {
        self.requests.iter().map(|(_, shape)| shape.prompt_tokens).max().unwrap_or(0)
    }
}

fn request(line: &str) -> Result<(Duration, Shape), String> {
    let line: Line = serde_json::from_str(line).map_err(|error| format!("{error} in {}", printable(line, 80)))?;
    let time_s = line.time_s.or(line.timestamp.map(|ms| ms / 1e3)).ok_or("it has no time_s (or timestamp)")?;
    if !(0.0..=MAX_TIME_S).contains(&time_s) {
        return Err(format!("{time_s} s is no time of a run: give 0 to {MAX_TIME_S}"));
    }
    for length in [line.prompt_tokens, line.output_tokens] {
        if !(1..=MAX_TOKENS).contains(&length) {
            return Err(format!("{length} is no length: give 1 to {MAX_TOKENS} tokens"));
        }
    }
    let shape = Shape { prompt_tokens: line.prompt_tokens, max_tokens: line.output_tokens };
    Ok((Duration::from_secs_f64(time_s), shape))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn read(text: &str) -> Result<Trace, String> {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(text.as_bytes()).expect("writable");
        Trace::read(file.path()).map_err(|error| format!("{error:#}"))
    }

    #[test]
    fn requests_are_read_in_both_dialects_and_sorted() {
        let trace = read(
            "{\"timestamp\": 1500, \"input_length\": 7, \"output_length\": 8, \"hash_ids\": [1]}\n\n\
             {\"time_s\": 0.25, \"prompt_tokens\": 3, \"output_tokens\": 4}\n",
        )
        .expect("a trace");
        let due: Vec<_> = trace.due_times().collect();
        assert_eq!(due, [Duration::from_millis(250), Duration::from_millis(1500)]);
        assert_eq!(trace.shape(0), Shape { prompt_tokens: 3, max_tokens: 4 });
        assert_eq!(trace.shape(3), Shape { prompt_tokens: 7, max_tokens: 8 });
        assert_eq!((trace.count(), trace.longest_prompt()), (2, 7));
    }

    #[test]
    fn what_is_no_trace_is_refused_with_its_line() {
        let good = "{\"time_s\": 1, \"prompt_tokens\": 3, \"output_tokens\": 4}\n";
        for (bad, why) in [
            ("x", "line 2"),
            ("{\"prompt_tokens\": 3, \"output_tokens\": 4}", "no time_s"),
            ("{\"time_s\": -1, \"prompt_tokens\": 3, \"output_tokens\": 4}", "-1 s"),
            ("{\"time_s\": 1e9, \"prompt_tokens\": 3, \"output_tokens\": 4}", "no time of a run"),
            ("{\"time_s\": 1, \"prompt_tokens\": 0, \"output_tokens\": 4}", "0 is no length"),
            ("{\"time_s\": 1, \"prompt_tokens\": 3}", "output_tokens"),
        ] {
            let error = read(&format!("{good}{bad}")).expect_err(bad);
            assert!(error.contains(why) && error.contains("line 2"), "{error}");
        }
        assert!(read("\n").expect_err("nothing").contains("holds no request"));
        let missing = Trace::read(Path::new("/no/such/trace")).expect_err("no file").to_string();
        assert!(missing.contains("/no/such/trace"), "{missing}");
    }
}
