//! Tools and their calls, in the shape that chat templates expect: Hugging Face's, which is OpenAI's but for the
//! arguments of a call.

use serde::Serialize;
use serde_json::{Map, Value};

/// What a model may call. Its keys stand in the order of what models are trained with, whatever the client's was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "function", rename_all = "lowercase")]
pub enum Tool {
    /// A function of the client's.
    Function(Function),
}

impl Tool {
    /// What calls name it by.
    pub fn name(&self) -> &str {
        match self {
            Self::Function(function) => &function.name,
        }
    }
}

/// A function that a model may call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Function {
    /// Letters, digits, `_` and `-`.
    pub name: String,
    /// What it does and when to call it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// JSON schema of its arguments.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Map<String, Value>>,
}

/// A call in an assistant's message.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// The tool's answer names it.
    pub id: String,
    /// What is called.
    #[serde(flatten)]
    pub call: Call,
}

/// What is called, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", content = "function", rename_all = "lowercase")]
pub enum Call {
    /// A function of the client's.
    Function {
        /// Its name.
        name: String,
        /// An object: clients send its JSON as a text, but templates write it as JSON (`tojson`), or go through it key
        /// by key. A text would come out as a text with escapes, as no model has seen it. transformers asks for an
        /// object, and vLLM makes it one.
        arguments: Map<String, Value>,
    },
}
