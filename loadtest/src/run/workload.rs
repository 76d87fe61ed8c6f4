//! What each request of a run asks, and of whom.

use std::time::Duration;

use bytes::Bytes;
use looplane_proto::inference::v1::generate_request::Input;
use looplane_proto::inference::v1::{Chat, ChatMessage, ChatRequest, GenerateRequest, SamplingParams};
use serde_json::json;

use crate::client::grpc::GrpcRequest;
use crate::client::target::{Ready, Target};
use crate::load::prompt::Prompts;
use crate::load::shapes::Shapes;

/// What is asked for: an answer in a chat or text after a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Endpoint {
    /// The answer to a chat (/v1/chat/completions)
    Chat,
    /// The text after a prompt (/v1/completions)
    Completions,
}

#[derive(Debug)]
pub struct Workload {
    pub target: Target,
    pub endpoint: Endpoint,
    pub model: String,
    pub prompts: Prompts,
    pub shapes: Shapes,
    /// Least tokens to generate, for requests that may be so long (an extension of OpenAI's interface).
    pub min_tokens: Option<u32>,
    pub turns: u32,
    /// Go on past the end-of-sequence token (an extension of OpenAI's interface).
    pub ignore_eos: bool,
    /// Time limit of one request, which also limits how long a due request waits to be sent.
    pub timeout: Duration,
}

/// A question and its answer: what the next turn of a chat is sent after.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    pub user: String,
    pub assistant: String,
}

impl Workload {
    /// Chats of one turn, with prompts of a word for each token, that may end where the model ends them.
    pub fn plain(target: Target, model: &str, shapes: Shapes, timeout: Duration) -> Self {
        Self {
            target,
            endpoint: Endpoint::Chat,
            model: model.to_owned(),
            prompts: Prompts::of_words(0),
            shapes,
            min_tokens: None,
            turns: 1,
            ignore_eos: false,
            timeout,
        }
    }

    /// The request for `max_tokens` tokens after `prompt`, in a chat after the turns `before` it. Greedy, so that runs
    /// can be compared.
    pub fn request(&self, before: &[Turn], prompt: &str, max_tokens: u32) -> Ready<'_> {
        match &self.target {
            Target::Http(client) => Ready::Http(client, self.path(), self.body(before, prompt, max_tokens)),
            Target::Grpc(client) => Ready::Grpc(client, Box::new(self.message(before, prompt, max_tokens))),
        }
    }

    pub fn path(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "/v1/chat/completions",
            Endpoint::Completions => "/v1/completions",
        }
    }

    fn body(&self, before: &[Turn], prompt: &str, max_tokens: u32) -> Bytes {
        let mut body = json!({
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": true,
            "stream_options": { "include_usage": true },
        });
        match self.endpoint {
            Endpoint::Chat => {
                let message = |role: &str, content: &str| json!({ "role": role, "content": content });
                let earlier =
                    before.iter().flat_map(|turn| [message("user", &turn.user), message("assistant", &turn.assistant)]);
                body["messages"] = earlier.chain([message("user", prompt)]).collect();
            }
            Endpoint::Completions => body["prompt"] = json!(prompt),
        }
        if let Some(min_tokens) = self.min_tokens {
            body["min_tokens"] = json!(min_tokens.min(max_tokens));
        }
        if self.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        body.to_string().into()
    }

    fn message(&self, before: &[Turn], prompt: &str, max_tokens: u32) -> GrpcRequest {
        let sampling = Some(SamplingParams {
            max_tokens: Some(max_tokens),
            min_tokens: self.min_tokens.map(|min_tokens| min_tokens.min(max_tokens)),
            temperature: Some(0.0),
            ignore_eos: self.ignore_eos,
            ..SamplingParams::default()
        });
        let model = self.model.clone();
        match self.endpoint {
            Endpoint::Chat => {
                let message = |role: &str, content: &str| ChatMessage {
                    role: role.into(),
                    content: content.into(),
                    ..ChatMessage::default()
                };
                let earlier =
                    before.iter().flat_map(|turn| [message("user", &turn.user), message("assistant", &turn.assistant)]);
                let messages = earlier.chain([message("user", prompt)]).collect();
                let chat = Some(Chat { messages, ..Chat::default() });
                GrpcRequest::Chat(ChatRequest { model, chat, sampling, ..ChatRequest::default() })
            }
            Endpoint::Completions => {
                let input = Some(Input::Prompt(prompt.to_owned()));
                GrpcRequest::Generate(GenerateRequest { model, input, sampling, ..GenerateRequest::default() })
            }
        }
    }
}
