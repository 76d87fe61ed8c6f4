//! Messages of a host, as a front end gets them.

use std::task::{Context, Poll, Waker};

use looplane_proto::fleet::v1;
use looplane_server::{
    drafts::{DraftMetrics, DraftReport, MOST_DRAFTS},
    engine::{SamplingParams, SequenceEvent, SequenceRequest, SequenceStream},
    fleet::Played,
};
use prost::Message;

use crate::pick::Pick;

const PROMPT: u32 = 6;
const MOST_TOKENS: u32 = 8;
const VOCAB_SIZE: u32 = 100;
/// Bytes of a message of a few tokens.
const MOST_KEPT: usize = 64 << 10;

/// A hello, and messages, each behind a byte with its length; the hello is one that fits where that is 0. Readers get
/// what was asked for at most, of the vocabulary, and nothing behind an end. A host that says more is lost by a reason.
pub fn fleet(bytes: &[u8]) {
    let mut pick = Pick(bytes);
    let reads_at_once = pick.flag();
    let hello = message(&mut pick);
    let is_usual = hello.is_empty();
    let hello = if is_usual { usual_hello().encode_to_vec() } else { hello.to_vec() };
    let mut played = match Played::join(&hello) {
        Ok(played) => played,
        Err(why) => return assert!(!is_usual && !why.is_empty(), "{why}"),
    };
    let mut readers: Vec<Reader> = [None, Some(0), Some(2)]
        .into_iter()
        .flat_map(|logprobs| played.submit(vec![request(logprobs)]))
        .map(|stream| Reader { stream, tokens: 0, ended: false })
        .collect();
    assert!(!is_usual || readers.len() == 3);
    let vocab_size = played.handle().model().map_or(0, |model| model.vocab_size);
    while !pick.0.is_empty() {
        if let Err(why) = played.say(message(&mut pick)) {
            assert!(why.contains("host played "), "{why}");
            break;
        }
        // What is shown of all hosts together can be shown.
        let load = [played.handle().load(), played.handle().load()].into_iter().sum::<looplane_server::engine::Load>();
        assert!(load.running < u64::MAX);
        if reads_at_once {
            readers.iter_mut().for_each(|reader| reader.read(vocab_size));
        }
    }
    readers.iter_mut().for_each(|reader| reader.read(vocab_size));
}

struct Reader {
    stream: SequenceStream,
    tokens: u32,
    ended: bool,
}

impl Reader {
    /// Takes what is there.
    fn read(&mut self, vocab_size: u32) {
        while let Poll::Ready(Some(event)) = self.stream.poll_next(&mut Context::from_waker(Waker::noop())) {
            assert!(!self.ended);
            match event {
                SequenceEvent::Token(token) => {
                    self.tokens += 1;
                    assert!(
                        token.id < vocab_size
                            && token.top.iter().all(|(id, _)| *id < vocab_size)
                            && token.top.len() <= 2
                    );
                }
                SequenceEvent::Finished(_) | SequenceEvent::Failed(_) | SequenceEvent::Contradiction => {
                    self.ended = true;
                }
                SequenceEvent::Prompt { .. } | SequenceEvent::Drafts(_) => panic!("the stream keeps them"),
            }
        }
        assert!(self.tokens <= MOST_TOKENS && self.stream.cached_tokens() <= PROMPT);
        assert!(self.stream.take_prompt_logprobs().len() < PROMPT as usize);
        let drafts = DraftMetrics::of(DraftReport::Detailed, &self.stream.take_drafts(), MOST_DRAFTS);
        let told = serde_json::to_string(&drafts).expect("it can be told");
        assert!(told.len() < MOST_KEPT, "{told}");
    }
}

/// What stands behind its length.
fn message<'a>(pick: &mut Pick<'a>) -> &'a [u8] {
    let length = usize::from(pick.byte()).min(pick.0.len());
    let (message, rest) = pick.0.split_at(length);
    pick.0 = rest;
    message
}

fn request(logprobs: Option<u32>) -> SequenceRequest {
    SequenceRequest {
        prompt: (0..PROMPT).collect(),
        max_tokens: MOST_TOKENS,
        min_tokens: 0,
        stop_tokens: vec![9],
        sampling: SamplingParams::greedy(),
        logprobs,
        cache_salt: "".into(),
        grammar: None,
        token_bounds: Default::default(),
        prompt_logprobs: logprobs,
    }
}

/// Of a host that fits.
fn usual_hello() -> v1::Hello {
    v1::Hello {
        version: 1,
        model: Some(v1::Model {
            model_digest: "digest".into(),
            architecture: "LlamaForCausalLM".into(),
            vocab_size: VOCAB_SIZE,
            max_context: 64,
            tensor_parallel: 1,
            bit_domain: "bits".into(),
        }),
        vocabulary_digest: String::new(),
        status: Some(v1::Status {
            state: v1::status::State::Ready.into(),
            load: Some(v1::Load::default()),
            ..v1::Status::default()
        }),
    }
}
