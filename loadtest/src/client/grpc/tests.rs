use super::*;
use crate::testing::runs::run_line;
use futures::{Stream, StreamExt, stream};
use looplane_proto::inference::v1::generate_request::Input;
use looplane_proto::inference::v1::inference_server::{Inference, InferenceServer};
use looplane_proto::inference::v1::{
    AbortRequest, AbortResponse, Chat, ChatMessage, Delta, DetokenizeRequest, DetokenizeResponse, Finished,
    GenerateResponse, GetLoadRequest, GetLoadResponse, GetModelResponse, SamplingParams, Started, TokenizeRequest,
    TokenizeResponse,
};
use std::pin::Pin;
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::{Code, Response};

/// What the mock does instead of answering well.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// Refuses with this code.
    Refuse(Code),
    /// Ends with this code, or in order for OK, after two tokens.
    EndEarly(Code),
    /// Sends a message without event.
    NoEvent,
}

/// Answers with `max_tokens` tokens at a fixed pace, and remembers what it was asked.
#[derive(Debug, Clone)]
struct Mock {
    ttft: Duration,
    itl: Duration,
    fault: Fault,
    requests: Arc<Mutex<Vec<(GrpcRequest, String)>>>,
}

type Responses = Pin<Box<dyn Stream<Item = Result<GenerateResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Inference for Mock {
    type GenerateStream = Responses;

    type ChatStream = Responses;

    async fn generate(&self, request: Request<GenerateRequest>) -> Result<Response<Responses>, Status> {
        let key = key_of(&request);
        let request = request.into_inner();
        let Some(Input::Prompt(prompt)) = request.input.clone() else {
            return Err(Status::invalid_argument("no prompt"));
        };
        let max_tokens = request.sampling.as_ref().and_then(|sampling| sampling.max_tokens);
        self.answer(GrpcRequest::Generate(request), key, &prompt, max_tokens.unwrap_or(0))
    }

    async fn chat(&self, request: Request<ChatRequest>) -> Result<Response<Responses>, Status> {
        let key = key_of(&request);
        let request = request.into_inner();
        let prompt: String = messages(&request).map(|message| message.content.as_str()).collect();
        let max_tokens = request.sampling.as_ref().and_then(|sampling| sampling.max_tokens);
        self.answer(GrpcRequest::Chat(request), key, &prompt, max_tokens.unwrap_or(0))
    }

    async fn get_model(&self, _: Request<GetModelRequest>) -> Result<Response<GetModelResponse>, Status> {
        Ok(Response::new(GetModelResponse { id: "mock".into(), ..GetModelResponse::default() }))
    }

    async fn tokenize(&self, _: Request<TokenizeRequest>) -> Result<Response<TokenizeResponse>, Status> {
        Err(Status::unimplemented("of no use to the client"))
    }

    async fn detokenize(&self, _: Request<DetokenizeRequest>) -> Result<Response<DetokenizeResponse>, Status> {
        Err(Status::unimplemented("of no use to the client"))
    }

    async fn abort(&self, _: Request<AbortRequest>) -> Result<Response<AbortResponse>, Status> {
        Err(Status::unimplemented("of no use to the client"))
    }

    async fn get_load(&self, _: Request<GetLoadRequest>) -> Result<Response<GetLoadResponse>, Status> {
        Err(Status::unimplemented("of no use to the client"))
    }
}

fn key_of<T>(request: &Request<T>) -> String {
    request.metadata().get("authorization").and_then(|key| key.to_str().ok()).unwrap_or("").to_owned()
}

fn messages(request: &ChatRequest) -> impl Iterator<Item = &ChatMessage> {
    request.chat.iter().flat_map(|Chat { messages, .. }| messages)
}

impl Mock {
    fn answer(
        &self,
        request: GrpcRequest,
        key: String,
        prompt: &str,
        tokens: u32,
    ) -> Result<Response<Responses>, Status> {
        self.requests.lock().expect("no holder panics").push((request, key));
        if let Fault::Refuse(code) = self.fault {
            return Err(Status::new(code, "queue\u{1b} full"));
        }
        let prompt_tokens = 3 + 2 * prompt.split_whitespace().count() as u32;
        let event = |event| Ok(GenerateResponse { event: Some(event) });
        let started = event(Event::Started(Started { prompt_tokens, ..Started::default() }));
        let mut steps = vec![(Duration::ZERO, started), (Duration::ZERO, event(Event::Delta(Delta::default())))];
        let sent = if self.fault == Fault::None { tokens } else { 2 };
        let delta = event(Event::Delta(Delta { text: "word ".into(), ..Delta::default() }));
        steps.extend((0..sent).map(|index| (self.ttft + self.itl * index, delta.clone())));
        let end = self.ttft + self.itl * sent.saturating_sub(1);
        match self.fault {
            Fault::EndEarly(Code::Ok) => {}
            Fault::EndEarly(code) => steps.push((end, Err(Status::new(code, "rank 1 is gone")))),
            Fault::NoEvent => steps.push((end, Ok(GenerateResponse { event: None }))),
            Fault::None | Fault::Refuse(_) => {
                let finished = Finished {
                    reason: FinishReason::Length.into(),
                    prompt_tokens,
                    completion_tokens: tokens,
                    ..Finished::default()
                };
                steps.push((end, event(Event::Finished(finished))));
            }
        }
        let begun = tokio::time::Instant::now();
        Ok(Response::new(Box::pin(stream::iter(steps).then(move |(after, step)| async move {
            tokio::time::sleep_until(begun + after).await;
            step
        }))))
    }

    fn new(fault: Fault) -> Self {
        let (ttft, itl) = (Duration::from_millis(30), Duration::from_millis(10));
        Self { ttft, itl, fault, requests: Arc::default() }
    }

    /// Serves on a free port until the runtime ends; returns `HOST:PORT`.
    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let authority = listener.local_addr().expect("bound").to_string();
        let serving = tonic::transport::Server::builder()
            .max_concurrent_streams(STREAMS_A_CONNECTION as u32)
            .add_service(InferenceServer::new(self.clone()))
            .serve_with_incoming(TcpIncoming::from(listener).with_nodelay(Some(true)));
        tokio::spawn(serving);
        authority
    }
}

async fn ask(authority: &str, max_tokens: u32, timeout: Duration) -> RequestRecord {
    let client = GrpcClient::new(authority, Some("sesame"), timeout).expect("the mock's address is valid");
    let clock = Clock::start();
    let mut record = RequestRecord::new(0, 0, clock.now_ns());
    client.stream(prompt("a b c", max_tokens), clock, &mut record).await;
    record
}

fn prompt(text: &str, max_tokens: u32) -> GrpcRequest {
    let sampling = Some(SamplingParams { max_tokens: Some(max_tokens), ..SamplingParams::default() });
    let input = Some(Input::Prompt(text.into()));
    GrpcRequest::Generate(GenerateRequest { input, sampling, ..GenerateRequest::default() })
}

#[tokio::test]
async fn a_stream_becomes_a_record() {
    let mock = Mock::new(Fault::None);
    let record = ask(&mock.serve().await, 5, Duration::from_secs(20)).await;
    assert_eq!(record.failure, None);
    assert_eq!(record.chunks_ns.len(), 5, "a message without text is no chunk");
    assert_eq!((record.prompt_tokens, record.completion_tokens), (Some(9), Some(5)));
    assert_eq!(record.finish_reason.as_deref(), Some("length"));
    let since_sent = |time_ns: u64| time_ns - record.sent_ns;
    assert!(since_sent(record.chunks_ns[0]) >= 30_000_000 && since_sent(record.chunks_ns[4]) >= 70_000_000);
    assert!(record.ended_ns >= record.finished_ns.expect("the last message was seen"));
    assert_eq!(mock.requests.lock().expect("no holder panics")[0].1, "Bearer sesame");
}

#[tokio::test]
async fn every_fault_has_its_name() {
    for (fault, kind, chunks) in [
        (Fault::Refuse(Code::ResourceExhausted), "grpc_resource_exhausted", 0),
        (Fault::Refuse(Code::NotFound), "grpc_not_found", 0),
        (Fault::EndEarly(Code::Internal), "grpc_internal", 2),
        (Fault::EndEarly(Code::Ok), "truncated", 2),
        (Fault::NoEvent, "bad_message", 2),
    ] {
        let record = ask(&Mock::new(fault).serve().await, 9, Duration::from_secs(20)).await;
        let failure = record.failure.unwrap_or_else(|| panic!("{fault:?} was not noticed"));
        assert_eq!((failure.kind().as_str(), record.chunks_ns.len()), (kind, chunks), "{failure}");
        assert!(!failure.to_string().contains('\u{1b}'));
    }
    let slow = Mock { ttft: Duration::from_secs(60), ..Mock::new(Fault::None) };
    let record = ask(&slow.serve().await, 1, Duration::from_millis(200)).await;
    assert_eq!(record.failure, Some(Failure::Timeout));
    let nobody = ask("127.0.0.1:1", 1, Duration::from_secs(20)).await;
    assert!(matches!(nobody.failure, Some(Failure::Connect(_))), "{:?}", nobody.failure);
}

/// A server that goes away in the middle takes its connections with it: its runtime ends.
#[test]
fn a_broken_connection_is_told_from_a_refusal() {
    let (server, client) = (runtime(), runtime());
    let slow = Mock { itl: Duration::from_millis(200), ..Mock::new(Fault::None) };
    let authority = server.block_on(slow.serve());
    let asking = client.spawn(async move { ask(&authority, 1000, Duration::from_secs(20)).await });
    std::thread::sleep(Duration::from_millis(500));
    server.shutdown_background();
    let record = client.block_on(asking).expect("asking does not panic");
    assert!(matches!(record.failure, Some(Failure::ConnectionLost(_))), "{:?}", record.failure);
    assert!(!record.chunks_ns.is_empty(), "what arrived before is kept");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// The mock allows as many streams a connection as the client uses: none of 150 waits for another to end.
#[tokio::test]
async fn more_streams_than_a_connection_carries_open_another() {
    let mock = Mock { ttft: Duration::from_millis(700), ..Mock::new(Fault::None) };
    let client = GrpcClient::new(&mock.serve().await, None, Duration::from_secs(20)).expect("valid");
    let clock = Clock::start();
    let records = futures::future::join_all((0..150).map(|index| {
        let client = &client;
        async move {
            let mut record = RequestRecord::new(index, 0, clock.now_ns());
            client.stream(prompt("a", 1), clock, &mut record).await;
            record
        }
    }))
    .await;
    assert!(records.iter().all(|record| record.failure.is_none() && record.ended_ns < 1_400_000_000));
    let connections = client.connections.lock().expect("no holder panics");
    assert_eq!(connections.len(), 2);
    assert!(connections.iter().all(|connection| connection.streams.load(Ordering::Relaxed) == 0));
}

#[tokio::test]
async fn a_whole_run_has_the_same_report_as_over_http() {
    let mock = Mock::new(Fault::None);
    let authority = mock.serve().await;
    let directory = tempfile::tempdir().expect("a temporary directory");
    let file = directory.path().join("report.json");
    let line = format!(
        "--target grpc://{authority}/ --json {} --turns 2 --requests 12 --concurrency 3 --prompt-tokens 51 \
         --max-tokens 4 --min-tokens 9 --ignore-eos --warmup 3",
        file.display()
    );
    run_line(&line).await.expect("all requests succeed");
    let text = std::fs::read_to_string(&file).expect("the report was written");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["target"], format!("grpc://{authority}"));
    assert_eq!((&report["backend"], &report["model_id"]), (&"looplane-grpc-chat".into(), &"mock".into()));
    assert_eq!((&report["completed"], &report["total_output_tokens"]), (&12.into(), &48.into()));
    assert!(report["median_ttft_ms"].as_f64() >= Some(29.9) && report["mean_itl_ms"].as_f64() > Some(0.0));
    let requests = mock.requests.lock().expect("no holder panics");
    assert_eq!(requests.len(), 2 + 3 + 12, "two to size the prompts, three to warm up");
    let (GrpcRequest::Chat(asked), key) = &requests[5] else { panic!("a chat was expected") };
    let sampling = asked.sampling.clone().expect("a request has limits");
    assert_eq!((sampling.max_tokens, sampling.min_tokens, sampling.temperature), (Some(4), Some(4), Some(0.0)));
    assert!(asked.model == "mock" && sampling.ignore_eos && key.is_empty());
    let chats = requests[5..].iter().map(|(request, _)| match request {
        GrpcRequest::Chat(chat) => messages(chat).map(|message| message.role.as_str()).collect::<Vec<_>>(),
        GrpcRequest::Generate(other) => panic!("{other:?} is no chat"),
    });
    let (second, first): (Vec<_>, Vec<_>) = chats.partition(|chat| chat.len() > 1);
    assert_eq!((first.len(), second.len()), (6, 6));
    assert!(second.iter().all(|roles| roles[..] == ["user", "assistant", "user"]));
}

#[test]
fn bad_addresses_are_refused() {
    for authority in ["", "no port or path/here", "user@host:1", "host:1/v1"] {
        let refused = GrpcClient::new(authority, None, Duration::from_secs(1)).expect_err(authority);
        assert!(matches!(refused, TargetError::Form(_)), "{refused}");
    }
    let key = GrpcClient::new("host:1", Some("a\nb"), Duration::from_secs(1)).expect_err("a line break");
    assert!(matches!(key, TargetError::ApiKey));
}
