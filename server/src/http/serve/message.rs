//! What an answer to a chat says, as OpenAI's messages and deltas have it.

use serde::Serialize;

use crate::frontend::Told;

/// The message of a whole answer.
#[derive(Debug, Default)]
pub(in crate::http) struct WholeMessage {
    pub(in crate::http) content: String,
    pub(in crate::http) reasoning: String,
    pub(in crate::http) calls: Vec<WholeCall>,
}

/// A call in the message of a whole answer.
#[derive(Debug, Serialize)]
pub(in crate::http) struct WholeCall {
    id: String,
    r#type: &'static str,
    function: WholeFunction,
}

#[derive(Debug, Serialize)]
struct WholeFunction {
    name: String,
    arguments: String,
}

impl WholeMessage {
    pub(in crate::http) fn add(&mut self, told: Told) {
        match told {
            Told::Content(text) => self.content.push_str(&text),
            Told::Reasoning(text) => self.reasoning.push_str(&text),
            Told::Call { id, name, .. } => {
                let function = WholeFunction { name, arguments: String::new() };
                self.calls.push(WholeCall { id, r#type: "function", function });
            }
            Told::Arguments { text, .. } => {
                let call = self.calls.last_mut().expect("a call begins before its arguments");
                call.function.arguments.push_str(&text);
            }
        }
    }

    /// Bytes of text.
    pub(in crate::http) fn len(&self) -> usize {
        let calls = self.calls.iter().map(|call| call.function.name.len() + call.function.arguments.len());
        self.content.len() + self.reasoning.len() + calls.sum::<usize>()
    }
}

/// The message of a whole answer, as it is written.
#[derive(Serialize)]
pub(in crate::http) struct Message<'a> {
    role: &'static str,
    /// Null beside calls and thinking that nothing follows.
    content: Option<&'a str>,
    refusal: Option<()>,
    #[serde(flatten)]
    reasoning: Option<Reasoning<'a>>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    tool_calls: &'a [WholeCall],
}

impl<'a> Message<'a> {
    pub(in crate::http) fn new(WholeMessage { content, reasoning, calls }: &'a WholeMessage) -> Self {
        let has_more = !reasoning.is_empty() || !calls.is_empty();
        Self {
            role: "assistant",
            content: Some(content.as_str()).filter(|content| !content.is_empty() || !has_more),
            refusal: None,
            reasoning: (!reasoning.is_empty()).then(|| Reasoning::new(reasoning)),
            tool_calls: calls,
        }
    }
}

/// By both names that clients know: DeepSeek's, which vLLM had first, and the one that vLLM has now.
#[derive(Serialize)]
struct Reasoning<'a> {
    reasoning_content: &'a str,
    reasoning: &'a str,
}

impl<'a> Reasoning<'a> {
    fn new(text: &'a str) -> Self {
        Self { reasoning_content: text, reasoning: text }
    }
}

/// What a chunk adds to the message.
#[derive(Serialize, Default)]
pub(in crate::http) struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
    #[serde(flatten)]
    reasoning: Option<Reasoning<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tool_calls: Option<[CallDelta<'a>; 1]>,
}

impl<'a> Delta<'a> {
    /// The first of a choice.
    pub(in crate::http) fn opening() -> Self {
        Self { role: Some("assistant"), ..Self::new(None) }
    }

    /// Nothing new to read: text all the same, as clients expect of every chunk between the first and the last.
    pub(in crate::http) fn new(told: Option<&'a Told>) -> Self {
        let call = |index: &u32, start, name, arguments| {
            Some([CallDelta { index: *index, start, function: FunctionDelta { name, arguments } }])
        };
        let nothing = Self::default();
        match told {
            None => Self { content: Some(""), ..nothing },
            Some(Told::Content(text)) => Self { content: Some(text), ..nothing },
            Some(Told::Reasoning(text)) => Self { reasoning: Some(Reasoning::new(text)), ..nothing },
            Some(Told::Call { index, id, name }) => {
                let start = CallStart { id, r#type: "function" };
                Self { tool_calls: call(index, Some(start), Some(name), ""), ..nothing }
            }
            Some(Told::Arguments { index, text }) => Self { tool_calls: call(index, None, None, text), ..nothing },
        }
    }
}

/// The first of a call has all that names it, later ones more of its arguments.
#[derive(Serialize)]
struct CallDelta<'a> {
    index: u32,
    #[serde(flatten)]
    start: Option<CallStart<'a>>,
    function: FunctionDelta<'a>,
}

#[derive(Serialize)]
struct CallStart<'a> {
    id: &'a str,
    r#type: &'static str,
}

#[derive(Serialize)]
struct FunctionDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}
