//! Responses as OpenAI writes them: whole ones and the chunks of a stream.

use std::{collections::BTreeMap, sync::Arc};

use bytes::BufMut;
use serde::{Serialize, Serializer, ser::SerializeMap};

use super::{
    events::{Events, write_json},
    message::{Delta, Message, WholeMessage},
    parse::{SERVICE_TIER, StreamUsage, Wanted},
};
use crate::{
    drafts::{DraftMetrics, DraftReport, DraftStep},
    engine::{GeneratedToken, client_logprob},
    frontend::Told,
    text::{OutputToken, Tokenizer},
};

/// About what a log-probability and its token take in an answer.
const LOGPROB_BYTES: usize = 64;

/// Which API's shapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::http) enum Api {
    Chat,
    Completion,
}

/// Writes the response, or the chunks, of one request.
#[derive(Debug)]
pub(in crate::http) struct Writer {
    pub(in crate::http) api: Api,
    /// With its prefix.
    pub(in crate::http) id: String,
    pub(in crate::http) created: u64,
    pub(in crate::http) model: String,
    pub(in crate::http) system_fingerprint: String,
    /// As in the request.
    pub(in crate::http) logprobs: Option<u32>,
    /// As in the request.
    pub(in crate::http) prompt_logprobs: Option<u32>,
    /// As in the request.
    pub(in crate::http) wanted: Wanted,
    /// What is told of drafts, of which a step has so many at most.
    pub(in crate::http) draft_report: (DraftReport, u32),
    pub(in crate::http) tokenizer: Arc<Tokenizer>,
}

/// Tokens in and out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(in crate::http) struct Usage {
    prompt_tokens: u64,
    completion_tokens: u64,
    total_tokens: u64,
    /// Known at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens_details: Option<PromptTokensDetails>,
}

/// What became of a prompt's tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
struct PromptTokensDetails {
    /// Not computed, since the prefix cache held them.
    cached_tokens: u64,
}

impl Usage {
    pub(in crate::http) fn new(prompt_tokens: u64, cached_tokens: Option<u64>, completion_tokens: u64) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        let prompt_tokens_details = cached_tokens.map(|cached_tokens| PromptTokensDetails { cached_tokens });
        Self { prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }
    }

    /// With so many tokens generated behind it.
    pub(in crate::http) fn and(self, generated: u64) -> Self {
        let completion_tokens = self.completion_tokens + generated;
        Self { completion_tokens, total_tokens: self.prompt_tokens + completion_tokens, ..self }
    }
}

/// About what so many ids of tokens take in an answer.
pub(in crate::http) fn ids_bytes(tokens: usize) -> usize {
    8 * tokens
}

/// The whole output of a choice.
#[derive(Debug, Default)]
pub(in crate::http) struct WholeChoice {
    pub(in crate::http) index: u32,
    pub(in crate::http) message: WholeMessage,
    pub(in crate::http) tokens: Vec<OutputToken>,
    /// All that were generated.
    pub(in crate::http) generated: Vec<u32>,
    /// The prompt's tokens, where ids are told.
    pub(in crate::http) prompt: Vec<u32>,
    /// OpenAI's word for why it ended.
    pub(in crate::http) finish: Option<&'static str>,
    pub(in crate::http) completion_tokens: u32,
    pub(in crate::http) cached_tokens: u32,
    pub(in crate::http) drafts: Vec<DraftStep>,
    /// The prompt's tokens from the second on with their log-probabilities.
    pub(in crate::http) prompt_logprobs: Vec<GeneratedToken>,
}

/// What became of a request, beside its answer; as vLLM has it.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(in crate::http) struct Metrics {
    speculative_decoding: Option<DraftMetrics>,
}

#[derive(Serialize)]
struct Envelope<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    system_fingerprint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    choices: Vec<C>,
    /// Outer `None`: no such field; inner: null.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metrics: Option<Metrics>,
    /// Of a chat, as vLLM has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    /// Of a chat, as vLLM has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<Message<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delta: Option<Delta<'a>>,
    logprobs: Option<ChatLogprobs>,
    finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

#[derive(Serialize)]
struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChatToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: Vec<TopToken>,
}

#[derive(Serialize)]
struct TopToken {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Serialize)]
struct CompletionChoice<'a> {
    text: &'a str,
    index: u32,
    logprobs: Option<CompletionLogprobs>,
    finish_reason: Option<&'static str>,
    /// As vLLM has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<PromptLogprobs>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<&'a [u32]>,
}

/// Of each of a prompt's tokens: it, and the most likely ones in its place, by their ids. Null of the first.
type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

#[derive(Serialize)]
struct PromptLogprob {
    logprob: f32,
    /// From 1 on; null of one that is not among the most likely that were asked for.
    rank: Option<usize>,
    decoded_token: String,
}

#[derive(Serialize)]
struct CompletionLogprobs {
    tokens: Vec<String>,
    /// Null of a prompt's first token.
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Option<Vec<Option<TopMap>>>,
    text_offset: Vec<usize>,
}

/// The most likely tokens as one object, most likely first.
struct TopMap(Vec<(String, f32)>);

impl Serialize for TopMap {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (token, logprob) in &self.0 {
            map.serialize_entry(token, logprob)?;
        }
        map.end()
    }
}

impl<'a> ChatChoice<'a> {
    /// Of a chunk that has nothing else.
    fn new(index: u32, token_ids: Option<&'a [u32]>) -> Self {
        Self { index, message: None, delta: None, logprobs: None, finish_reason: None, token_ids }
    }
}

impl<'a> CompletionChoice<'a> {
    /// Of a chunk that has nothing else.
    fn new(index: u32, token_ids: Option<&'a [u32]>) -> Self {
        let (text, logprobs, finish_reason, prompt_logprobs, prompt_token_ids) = ("", None, None, None, None);
        Self { text, index, logprobs, finish_reason, prompt_logprobs, prompt_token_ids, token_ids }
    }
}

impl Writer {
    /// About what so many tokens take in an answer beside their text.
    pub(in crate::http) fn tokens_bytes(&self, tokens: usize) -> usize {
        tokens * self.logprobs.map_or(0, |top| LOGPROB_BYTES * (1 + top as usize))
    }

    /// About what a prompt's log-probabilities take in an answer.
    pub(in crate::http) fn prompt_bytes(&self, tokens: usize) -> usize {
        tokens * self.prompt_logprobs.map_or(0, |top| LOGPROB_BYTES * (1 + top as usize))
    }

    /// What answers of so many choices tell of their drafts: those of a single one.
    pub(in crate::http) fn metrics(&self, choices: usize, drafts: &[DraftStep]) -> Option<Metrics> {
        let (report, most) = self.draft_report;
        let of_one = || if choices == 1 { DraftMetrics::of(report, drafts, most) } else { None };
        (report != DraftReport::None).then(|| Metrics { speculative_decoding: of_one() })
    }

    /// The response to a request that does not stream.
    pub(in crate::http) fn whole<'a>(
        &self,
        choices: &'a [WholeChoice],
        usage: Usage,
        metrics: Option<Metrics>,
    ) -> String {
        let usage = Some(Some(usage));
        match self.api {
            Api::Chat => {
                let choice = |whole: &'a WholeChoice| ChatChoice {
                    index: whole.index,
                    message: Some(Message::new(&whole.message)),
                    delta: None,
                    logprobs: self.chat_logprobs(&whole.tokens),
                    finish_reason: whole.finish,
                    token_ids: self.ids(&whole.generated),
                };
                let first = choices.first();
                let prompt_logprobs = first.and_then(|whole| self.prompt_logprobs(whole));
                let prompt_token_ids = first.and_then(|whole| self.ids(&whole.prompt));
                let choices = choices.iter().map(choice).collect();
                let envelope = self.envelope("chat.completion", choices, usage, metrics);
                to_json(&Envelope { prompt_logprobs, prompt_token_ids, ..envelope })
            }
            Api::Completion => {
                let choice = |whole: &'a WholeChoice| CompletionChoice {
                    text: &whole.message.content,
                    index: whole.index,
                    logprobs: self.completion_logprobs(&whole.tokens),
                    finish_reason: whole.finish,
                    prompt_logprobs: self.prompt_logprobs(whole),
                    prompt_token_ids: self.ids(&whole.prompt),
                    token_ids: self.ids(&whole.generated),
                };
                to_json(&self.envelope("text_completion", choices.iter().map(choice).collect(), usage, metrics))
            }
        }
    }

    fn chunk_object(&self) -> &'static str {
        match self.api {
            Api::Chat => "chat.completion.chunk",
            Api::Completion => "text_completion",
        }
    }

    fn envelope<C: Serialize>(
        &self,
        object: &'static str,
        choices: Vec<C>,
        usage: Option<Option<Usage>>,
        metrics: Option<Metrics>,
    ) -> Envelope<'_, C> {
        let Self { id, model, system_fingerprint, .. } = self;
        Envelope {
            id,
            object,
            created: self.created,
            model,
            system_fingerprint,
            service_tier: self.wanted.service_tier.then_some(SERVICE_TIER),
            choices,
            usage,
            metrics,
            prompt_logprobs: None,
            prompt_token_ids: None,
        }
    }

    /// Ids of tokens, if they are told.
    fn ids<'a>(&self, ids: &'a [u32]) -> Option<&'a [u32]> {
        self.wanted.token_ids.then_some(ids)
    }

    fn chat_logprobs(&self, tokens: &[OutputToken]) -> Option<ChatLogprobs> {
        self.logprobs?;
        let token = |token: &OutputToken| ChatToken {
            token: self.token_text(token.token.id),
            logprob: sampled_logprob(token),
            bytes: self.tokenizer.token_bytes(token.token.id).to_vec(),
            top_logprobs: token.token.top.iter().map(|(id, logprob)| self.top_token(*id, *logprob)).collect(),
        };
        Some(ChatLogprobs { content: tokens.iter().map(token).collect(), refusal: None })
    }

    fn top_token(&self, id: u32, logprob: f32) -> TopToken {
        let bytes = self.tokenizer.token_bytes(id).to_vec();
        TopToken { token: self.token_text(id), logprob: client_logprob(logprob), bytes }
    }

    fn completion_logprobs(&self, tokens: &[OutputToken]) -> Option<CompletionLogprobs> {
        let count = self.logprobs?;
        let top = |token: &OutputToken| {
            let sampled = (token.token.id, token.token.logprob?);
            let likely = &token.token.top[..token.token.top.len().min(count as usize)];
            // OpenAI's map also has the sampled token where it is none of the most likely ones.
            let missing = likely.iter().all(|(id, _)| *id != sampled.0);
            let named = |(id, logprob): &(u32, f32)| (self.token_text(*id), client_logprob(*logprob));
            Some(TopMap(likely.iter().chain(missing.then_some(&sampled)).map(named).collect()))
        };
        Some(CompletionLogprobs {
            tokens: tokens.iter().map(|token| self.token_text(token.token.id)).collect(),
            token_logprobs: tokens.iter().map(|token| token.token.logprob.map(client_logprob)).collect(),
            top_logprobs: (count > 0).then(|| tokens.iter().map(top).collect()),
            text_offset: tokens.iter().map(|token| token.text_offset).collect(),
        })
    }

    fn prompt_logprobs(&self, choice: &WholeChoice) -> Option<PromptLogprobs> {
        let count = self.prompt_logprobs? as usize;
        let of_token = |token: &GeneratedToken| {
            let likely = token.top.iter().take(count).zip(1..).map(|(&(id, logprob), rank)| (id, logprob, Some(rank)));
            // Those found among the most likely take the place of the token's own entry.
            let own = [(token.id, token.logprob.unwrap_or(f32::NAN), None)];
            let all = own.into_iter().chain(likely).map(|(id, logprob, rank)| {
                let decoded_token = self.token_text(id);
                (id, PromptLogprob { logprob: client_logprob(logprob), rank, decoded_token })
            });
            Some(all.collect())
        };
        Some([None].into_iter().chain(choice.prompt_logprobs.iter().map(of_token)).collect())
    }

    /// A token's text, or its bytes spelled out where they are not whole characters; or its id, as vLLM spells it.
    fn token_text(&self, id: u32) -> String {
        if self.wanted.tokens_as_ids {
            return format!("token_id:{id}");
        }
        let bytes = self.tokenizer.token_bytes(id);
        match str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => format!("bytes:{}", bytes.escape_ascii()),
        }
    }
}

/// Writes the chunks of a stream.
#[derive(Debug)]
pub(in crate::http) struct ChunkWriter {
    writer: Writer,
    /// What all chunks have in common, as JSON: all that stands before their choices.
    head: String,
}

impl ChunkWriter {
    /// About what so many tokens take in a chunk beside their text.
    pub(in crate::http) fn tokens_bytes(&self, tokens: usize) -> usize {
        self.writer.tokens_bytes(tokens)
    }

    pub(in crate::http) fn new(writer: Writer) -> Self {
        let mut head = to_json(&writer.envelope(writer.chunk_object(), Vec::<()>::new(), None, None));
        head.truncate(head.len() - "]}".len());
        Self { writer, head }
    }

    /// Whether tokens are told of where no text comes with them.
    fn tells_tokens(&self) -> bool {
        self.writer.logprobs.is_some() || self.writer.wanted.token_ids
    }

    /// The chunk that opens a choice; completions have one only where it tells the ids of the prompt's tokens.
    pub(in crate::http) fn opening(&self, index: u32, prompt: &[u32], so_far: Usage, events: &mut Events) {
        let prompt = self.writer.ids(prompt);
        match self.writer.api {
            Api::Chat => {
                let choice =
                    ChatChoice { delta: Some(Delta::opening()), ..ChatChoice::new(index, self.writer.ids(&[])) };
                self.chunk(&choice, prompt, so_far, events);
            }
            Api::Completion if prompt.is_some() => {
                let choice = CompletionChoice::new(index, self.writer.ids(&[]));
                self.chunk(&CompletionChoice { prompt_token_ids: prompt, ..choice }, None, so_far, events);
            }
            Api::Completion => {}
        }
    }

    /// Chunks with more output: its tokens, and all that were generated. Where tokens are not told of, one without text
    /// is nothing to tell.
    pub(in crate::http) fn deltas(
        &self,
        index: u32,
        told: Vec<Told>,
        (mut tokens, mut generated): (Vec<OutputToken>, Vec<u32>),
        so_far: Usage,
        events: &mut Events,
    ) {
        if told.is_empty() && self.tells_tokens() {
            self.delta(index, None, (&tokens, &generated), so_far, events);
        }
        for told in told {
            let tokens = (&*std::mem::take(&mut tokens), &*std::mem::take(&mut generated));
            self.delta(index, Some(&told), tokens, so_far, events);
        }
    }

    /// A chunk with more output, or only with the tokens of some that is held back. `tokens`: those of the output, and
    /// all that were generated.
    fn delta(
        &self,
        index: u32,
        told: Option<&Told>,
        (tokens, generated): (&[OutputToken], &[u32]),
        so_far: Usage,
        events: &mut Events,
    ) {
        let token_ids = self.writer.ids(generated);
        match self.writer.api {
            Api::Chat => {
                let logprobs = self.writer.chat_logprobs(tokens).filter(|_| !tokens.is_empty());
                let delta = Some(Delta::new(told));
                let choice = ChatChoice { delta, logprobs, ..ChatChoice::new(index, token_ids) };
                self.chunk(&choice, None, so_far, events);
            }
            Api::Completion => {
                let text = if let Some(Told::Content(text)) = told { text } else { "" };
                let logprobs = self.writer.completion_logprobs(tokens);
                let choice = CompletionChoice { text, logprobs, ..CompletionChoice::new(index, token_ids) };
                self.chunk(&choice, None, so_far, events);
            }
        }
    }

    /// The chunk that ends a choice, with the tokens that no chunk has told.
    pub(in crate::http) fn finish(
        &self,
        index: u32,
        reason: &'static str,
        generated: &[u32],
        so_far: Usage,
        events: &mut Events,
    ) {
        let (finish_reason, token_ids) = (Some(reason), self.writer.ids(generated));
        match self.writer.api {
            Api::Chat => {
                let delta = Some(Delta::default());
                let choice = ChatChoice { delta, finish_reason, ..ChatChoice::new(index, token_ids) };
                self.chunk(&choice, None, so_far, events);
            }
            Api::Completion => {
                let choice = CompletionChoice { finish_reason, ..CompletionChoice::new(index, token_ids) };
                self.chunk(&choice, None, so_far, events);
            }
        }
    }

    /// The end of the stream, and before it the chunk with the usage, if the request asked for it. `choices` and
    /// `drafts` are as in [`Writer::metrics`].
    pub(in crate::http) fn end(&self, usage: Usage, choices: usize, drafts: &[DraftStep], events: &mut Events) {
        if self.writer.wanted.stream_usage.at_end {
            let metrics = self.writer.metrics(choices, drafts);
            let object = self.writer.chunk_object();
            let chunk = to_json(&self.writer.envelope(object, Vec::<()>::new(), Some(Some(usage)), metrics));
            events.data(|out| out.put_slice(chunk.as_bytes()));
        }
        events.data(|out| out.put_slice(b"[DONE]"));
    }

    /// Where only the end tells of usage, chunks before it say null. `prompt`: ids of a chat's.
    fn chunk(&self, choice: &impl Serialize, prompt: Option<&[u32]>, so_far: Usage, events: &mut Events) {
        let StreamUsage { at_end, in_each } = self.writer.wanted.stream_usage;
        events.data(|out| {
            out.put_slice(self.head.as_bytes());
            write_json(out, choice);
            out.put_slice(b"]");
            if let Some(prompt) = prompt {
                out.put_slice(b",\"prompt_token_ids\":");
                write_json(out, &prompt);
            }
            if at_end {
                out.put_slice(b",\"usage\":");
                write_json(out, &in_each.then_some(so_far));
            }
            out.put_slice(b"}");
        });
    }
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings and numbers with string keys are always JSON")
}

/// Of a token without one: none was computed.
fn sampled_logprob(token: &OutputToken) -> f32 {
    client_logprob(token.token.logprob.unwrap_or(f32::NAN))
}
