//! What the events of a streamed answer mean: chunks of text, the finish reason, usage, errors, the final marker.

use serde::Deserialize;
use serde_json::Value;

use crate::client::record::{Failure, RequestRecord};
use crate::text::printable;

/// Reads the events of one answer into its record.
pub struct Answer<'a> {
    record: &'a mut RequestRecord,
    done: bool,
}

/// The fields of a chunk that are looked at, of chat and text completions alike.
#[derive(Deserialize)]
struct Chunk {
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
    error: Option<Value>,
    object: Option<String>,
}

#[derive(Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning_content: Option<String>,
    reasoning: Option<String>,
    tool_calls: Option<Vec<Value>>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<u64>,
}

impl<'a> Answer<'a> {
    pub fn new(record: &'a mut RequestRecord) -> Self {
        Self { record, done: false }
    }

    /// Takes the data of one event that arrived at `now_ns`.
    pub fn take_event(&mut self, event: &[u8], now_ns: u64) -> Result<(), Failure> {
        if self.done {
            return Ok(());
        }
        if event.trim_ascii() == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_slice(event).map_err(|error| {
            Failure::BadJson(format!("{error} in {}", printable(&String::from_utf8_lossy(event), 80)))
        })?;
        if chunk.error.is_some() || chunk.object.as_deref() == Some("error") {
            return Err(stream_error(event, chunk.error));
        }
        for choice in chunk.choices.unwrap_or_default() {
            if choice.carries_text() {
                self.record.add_chunk(now_ns)?;
            }
            if let Some(content) = choice.content() {
                self.record.keep_text(content)?;
            }
            if let Some(reason) = choice.finish_reason {
                self.record.finish_reason = Some(printable(&reason, 40));
                self.record.finished_ns = Some(now_ns);
            }
        }
        if let Some(usage) = chunk.usage {
            self.record.prompt_tokens = usage.prompt_tokens.or(self.record.prompt_tokens);
            self.record.completion_tokens = usage.completion_tokens.or(self.record.completion_tokens);
            let cached = usage.prompt_tokens_details.and_then(|details| details.cached_tokens);
            self.record.cached_tokens = cached.or(self.record.cached_tokens);
        }
        Ok(())
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    pub fn has_finish_reason(&self) -> bool {
        self.record.finished_ns.is_some()
    }
}

impl Choice {
    /// What the answer says, and a chat goes on with: not the reasoning before it.
    fn content(&self) -> Option<&str> {
        self.text.as_deref().or_else(|| self.delta.as_ref()?.content.as_deref())
    }

    /// Whether the chunk shows that the model made something. The opening role delta and the finish chunk do not.
    fn carries_text(&self) -> bool {
        let shows = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        shows(&self.text)
            || self.delta.as_ref().is_some_and(|delta| {
                shows(&delta.content)
                    || shows(&delta.reasoning_content)
                    || shows(&delta.reasoning)
                    || delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
            })
    }
}

fn stream_error(event: &[u8], error: Option<Value>) -> Failure {
    // Some servers put the fields of the error at the top of the event.
    let error = error.or_else(|| serde_json::from_slice(event).ok()).unwrap_or_default();
    let (code, message) = error_code_and_message(&error);
    Failure::StreamError { code, message }
}

/// Code (or type) and message of an error object, made safe to print and to count by. A number is no code: servers put
/// the HTTP status there.
pub fn error_code_and_message(error: &Value) -> (Option<String>, String) {
    let field = |name: &str| error.get(name).and_then(Value::as_str);
    let code = field("code").or(field("type")).map(|code| {
        code.chars().filter(|c| c.is_ascii_alphanumeric() || "_-.".contains(*c)).take(64).collect::<String>()
    });
    let message = field("message").or(error.as_str()).map_or_else(|| error.to_string(), str::to_owned);
    (code.filter(|code| !code.is_empty()), printable(&message, 200))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::MAX_TEXT_BYTES;

    fn read(events: &[&str]) -> Result<(RequestRecord, bool), Failure> {
        let mut record = RequestRecord::new(0, 0, 0);
        let mut answer = Answer::new(&mut record);
        for (now_ns, event) in events.iter().enumerate() {
            answer.take_event(event.as_bytes(), now_ns as u64)?;
        }
        let done = answer.is_done();
        Ok((record, done))
    }

    #[test]
    fn counts_chunks_with_text_only() {
        let (record, done) = read(&[
            r#"{"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}],"usage":null}"#,
            r#"{"choices":[{"delta":{"content":"a"}}]}"#,
            r#"{"choices":[{"delta":{"reasoning_content":"b"}}]}"#,
            r#"{"choices":[{"delta":{"tool_calls":[]}}]}"#,
            r#"{"choices":[{"text":"c"}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            r#"{"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":9,"total_tokens":13,
                "prompt_tokens_details":{"cached_tokens":2,"audio_tokens":null}}}"#,
            "[DONE]",
            "whatever comes after",
        ])
        .expect("well-formed");
        assert_eq!(record.chunks_ns, [1, 2, 4]);
        assert_eq!((record.finished_ns, record.finish_reason.as_deref()), (Some(5), Some("stop")));
        assert_eq!((record.prompt_tokens, record.completion_tokens, record.cached_tokens), (Some(4), Some(9), Some(2)));
        assert!(done);
    }

    #[test]
    fn text_is_kept_where_it_is_wanted_and_has_a_limit() {
        let event = r#"{"choices":[{"delta":{"content":"a b","reasoning_content":"hm"}}]}"#;
        assert_eq!(read(&[event]).expect("well-formed").0.text, None);
        let mut record = RequestRecord::new(0, 0, 0);
        record.text = Some(String::new());
        let mut answer = Answer::new(&mut record);
        answer.take_event(event.as_bytes(), 1).expect("well-formed");
        answer.take_event(event.as_bytes(), 2).expect("well-formed");
        assert_eq!(record.text.as_deref(), Some("a ba b"));
        record.text = Some("x".repeat(MAX_TEXT_BYTES - 2));
        let refused = Answer::new(&mut record).take_event(event.as_bytes(), 3);
        assert_eq!(refused, Err(Failure::TextTooLong));
    }

    #[test]
    fn errors_in_the_stream_are_found_in_both_shapes() {
        for event in [
            r#"{"error":{"message":"gone","type":"server_error","code":500}}"#,
            r#"{"object":"error","message":"gone","type":"server_error","code":500}"#,
        ] {
            let failure = read(&[event]).expect_err("an error event");
            assert_eq!(failure, Failure::StreamError { code: Some("server_error".into()), message: "gone".into() });
        }
        let bare = read(&[r#"{"error":"gone"}"#]).expect_err("an error event");
        assert_eq!(bare, Failure::StreamError { code: None, message: "gone".into() });
    }
}
