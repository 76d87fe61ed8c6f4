//! The front end without its sockets, over an engine that plays: a request in, its answer out.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    path::Path,
    sync::{Arc, LazyLock},
    time::Duration,
};

use axum::{Router, body::Body, http::HeaderMap, http::Request};
use http_body_util::BodyExt;
use looplane_server::{
    drafts::DraftReport,
    engine::{
        Command, EngineHandle, EngineState, FinishReason, GeneratedToken, ModelInfo, SequenceEvent, SequenceRequest,
        SequenceStream, Submission, Times,
    },
    frontend::{Frontend, LargeWork},
    grpc,
    http::{self, Access, App, ResponseStore, Settings},
    reply::{Parsers, ReasoningParser},
    text::{ChatTemplate, Text},
    upload::Uploads,
};
use serde_json::Value;
use tokio::{
    runtime::{Builder, Runtime},
    sync::{mpsc, watch},
    time::{Instant, timeout},
};
use tower::ServiceExt;

/// Of a template that knows tools: Qwen2.5-Coder's.
pub const TEMPLATE: &str = include_str!("../../server/tests/fixtures/templates/qwen2.5-coder.jinja");
/// Longest wait for an answer.
const SOON: Duration = Duration::from_secs(15);
const MAX_BODY_BYTES: usize = 1 << 20;
const MAX_CONTEXT: u32 = 512;
/// Tokens of an answer.
const MOST_TOKENS: u32 = 48;
/// What the model says, now and then cut off, and now and then with other tokens in between.
const SAID: [&str; 4] = [
    "<think>\nOh\n</think>\n\nI\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>\n",
    "{\"name\": \"f\", \"arguments\": {}}",
    "{\"a\": [1, \"\u{e9}\u{1f980}\"]}",
    "plain END text",
];

static FRONT_END: LazyLock<(Runtime, Router)> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let router = runtime.block_on(async { router() });
    (runtime, router)
});

/// An answer, to its end.
#[derive(Debug)]
pub struct Response {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: String,
    pub trailers: HeaderMap,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.body))
    }
}

/// Asks, and reads the answer to its end.
pub fn post(path: &str, content_type: &str, body: Vec<u8>) -> Response {
    let (runtime, router) = &*FRONT_END;
    let request = Request::post(path).header("content-type", content_type).header("te", "trailers");
    let request = request.body(Body::from(body)).expect("a valid request");
    let answered = async {
        let Ok(response) = router.clone().oneshot(request).await;
        let (head, body) = response.into_parts();
        let body = body.collect().await.expect("the body has an end");
        let trailers = body.trailers().cloned().unwrap_or_default();
        let body = String::from_utf8_lossy(&body.to_bytes()).into_owned();
        Response { status: head.status.as_u16(), headers: head.headers, body, trailers }
    };
    runtime
        .block_on(async { timeout(SOON, answered).await })
        .unwrap_or_else(|_| panic!("{path}: no answer in {SOON:?}"))
}

/// The model's texts: a small tokenizer, a template with tools, thinking told apart.
pub fn text() -> Text {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("worker/tests/fixtures/llama-gqa");
    let template = ChatTemplate::new(TEMPLATE, "", "<|eot_id|>").expect("it parses");
    let text = Text::load(&fixture).expect("the fixture is a whole model directory");
    let text = Text { template: Some(template), takes_tools: true, ..text };
    text.with_parsers(Parsers { reasoning: ReasoningParser::Think, ..Parsers::default() })
}

fn router() -> Router {
    let text = Arc::new(text());
    let (commands, received) = mpsc::unbounded_channel();
    // Both sides are kept by the task that plays.
    let (state, state_receiver) = watch::channel(EngineState::Ready);
    let (model, model_receiver) = watch::channel(Some(Arc::new(ModelInfo {
        model_digest: String::new(),
        architecture: "LlamaForCausalLM".into(),
        vocab_size: text.tokenizer.tokens(),
        max_context: MAX_CONTEXT,
        tensor_parallel: 2,
        bit_domain: "cpu-test".into(),
    })));
    let engine = EngineHandle::new(commands.clone(), state_receiver, model_receiver, Arc::default());
    let played = text.clone();
    tokio::spawn(async move {
        let _kept = (state, model);
        play(received, commands, &played).await;
    });
    let uploads = Uploads::new(MAX_BODY_BYTES, SOON);
    let frontend = Frontend::new(engine, text, "tiny".into(), (DraftReport::None, 0), 8, uploads, LargeWork::Shares);
    let frontend = Arc::new(frontend);
    let settings = Settings {
        max_connections: 8,
        max_concurrent_requests: 8,
        max_body_bytes: MAX_BODY_BYTES,
        response_store: 8,
        drain_seconds: 1,
        tls: false,
        api_keys: false,
    };
    let grpc = grpc::router(frontend.clone());
    http::router(
        App::new(frontend, "http://localhost".into(), true, Access::default(), ResponseStore::new(8), settings),
        grpc,
    )
}

async fn play(mut received: mpsc::UnboundedReceiver<Command>, commands: mpsc::UnboundedSender<Command>, text: &Text) {
    let mut next_id = 1;
    while let Some(command) = received.recv().await {
        let Command::Submit(Submission { requests, reply, .. }) = command else { continue };
        let mut streams = Vec::new();
        for request in requests {
            let (events, receiver) = mpsc::channel(MOST_TOKENS as usize + 2);
            for event in generated(&request, text) {
                events.try_send(event).expect("it has room for all");
            }
            streams.push(SequenceStream::new(next_id, receiver, commands.clone()));
            next_id += 1;
        }
        // Whoever asked may be gone.
        let _ = reply.send(Ok(streams));
    }
}

/// What the model says to a request: the same each time.
fn generated(request: &SequenceRequest, text: &Text) -> Vec<SequenceEvent> {
    let mut hasher = DefaultHasher::new();
    (&request.prompt, request.max_tokens).hash(&mut hasher);
    let mut drawn = hasher.finish();
    let mut draw = |below: u32| {
        drawn = drawn.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (drawn >> 33) as u32 % below
    };
    let vocabulary = text.tokenizer.tokens();
    let token = |id: u32, top: Option<u32>| {
        let likely = (0..top.unwrap_or(0)).map(|rank| ((id + rank) % vocabulary, -1.0 - rank as f32)).collect();
        GeneratedToken { id, logprob: top.map(|_| -1.0), top: likely }
    };
    let logprobs = request.prompt[1..].iter().map(|id| token(*id, request.prompt_logprobs));
    let logprobs = logprobs.filter(|_| request.prompt_logprobs.is_some()).collect();
    let now = Instant::now();
    let times = Times { submitted: now, admitted: now, computed: now };
    let mut events = vec![SequenceEvent::Prompt { cached_tokens: 0, times: Box::new(times), logprobs }];
    let said = SAID[draw(SAID.len() as u32) as usize];
    let strange = draw(4) == 0;
    let most = request.max_tokens.min(MOST_TOKENS - 1);
    for id in text.tokenizer.encode(said, false, "").expect("it can be cut").into_iter().take(most as usize) {
        let id = if strange && draw(4) == 0 { draw(vocabulary) } else { id };
        let id = if request.stop_tokens.contains(&id) { 0 } else { id };
        events.push(SequenceEvent::Token(token(id, request.logprobs)));
    }
    let reason = match request.stop_tokens.first() {
        Some(stop) if events.len() as u32 <= most => {
            events.push(SequenceEvent::Token(token(*stop, request.logprobs)));
            FinishReason::Stop
        }
        _ => FinishReason::Length,
    };
    events.push(SequenceEvent::Finished(reason));
    events
}
