//! Traces of requests, as a collector gets them, and collectors that do not take them.

use std::time::Duration;

use looplane_proto::inference::v1::{
    GenerateRequest, TokenIds, generate_request::Input, inference_client::InferenceClient,
};
use looplane_server::{engine::SequenceEvent, listener::ServeOptions, trace::Otlp};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{AnyValue, KeyValue, any_value::Value},
    trace::v1::{ResourceSpans, Span},
};
use serde_json::json;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{Instant, sleep, timeout},
};
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport};

use crate::{
    SOON, Server,
    client::{self, get, post, read},
    engine::{answer, prompt},
    options,
    scrape::Scrape,
};

const CHAT: &str = "/v1/chat/completions";
const TRACE: u128 = 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736;
const PARENT: u64 = 0x00f0_67aa_0ba9_02b7;

/// Takes what it gets.
struct Collector(mpsc::UnboundedSender<ResourceSpans>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        request.into_inner().resource_spans.into_iter().for_each(|spans| self.0.send(spans).unwrap());
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

/// A collector, and what it gets.
struct Collected {
    endpoint: String,
    received: mpsc::UnboundedReceiver<ResourceSpans>,
}

impl Collected {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (sender, received) = mpsc::unbounded_channel();
        let service = TraceServiceServer::new(Collector(sender));
        let serving = transport::Server::builder().add_service(service);
        tokio::spawn(serving.serve_with_incoming(TcpListenerStream::new(listener)));
        Self { endpoint, received }
    }

    /// So many spans of one batch or several; the request's own is the first of each request.
    async fn spans(&mut self, count: usize) -> Vec<Span> {
        let mut spans = Vec::new();
        while spans.len() < count {
            let batch = timeout(SOON, self.received.recv()).await.expect("spans arrive").expect("the collector lives");
            let resource = batch.resource.expect("who sends them");
            assert_eq!(text(&resource.attributes, "service.name"), "under-test");
            spans.extend(batch.scope_spans.into_iter().flat_map(|scope| scope.spans));
        }
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans
    }
}

fn exporting(endpoint: &str) -> ServeOptions {
    ServeOptions { otlp: Some(Otlp::new(endpoint, "under-test".into()).unwrap()), ..options() }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    let found = attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.as_ref()?.value.as_ref()
}

fn text<'a>(attributes: &'a [KeyValue], key: &str) -> &'a str {
    match value(attributes, key) {
        Some(Value::StringValue(text)) => text,
        other => panic!("{key} is {other:?} in {attributes:#?}"),
    }
}

fn integer(span: &Span, key: &str) -> i64 {
    match value(&span.attributes, key) {
        Some(Value::IntValue(value)) => *value,
        other => panic!("{key} is {other:?} in {span:#?}"),
    }
}

async fn send(server: &Server, headers: &str, body: serde_json::Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n{headers}\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

fn parent(sampled: bool) -> String {
    format!("traceparent: 00-{TRACE:032x}-{PARENT:016x}-0{}\r\ntracestate: a=1\r\n", u8::from(sampled))
}

#[tokio::test]
async fn a_streamed_chat_leaves_its_spans_in_its_clients_trace() {
    let mut collected = Collected::start().await;
    let (server, mut script) = Server::start(exporting(&collected.endpoint)).await;
    let asked = "Xylophone-7713";
    let body = json!({"messages": [{"role": "user", "content": asked}], "stream": true});
    let client = send(&server, &format!("x-request-id: traced-1\r\n{}", parent(true)), body).await;
    let events = [vec![prompt(2, Vec::new())], answer("yes")].concat();
    let (response, request) = tokio::join!(read(client), script.play_late(events));
    assert_eq!(response.status, 200);
    let spans = collected.spans(5).await;
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    assert_eq!(names, ["POST /v1/chat/completions", "prepare", "queue", "prefill", "decode"]);
    let [whole, phases @ ..] = &spans[..] else { unreachable!("there are five") };
    assert_eq!((&whole.parent_span_id[..], whole.kind), (&PARENT.to_be_bytes()[..], 2), "a server's, of the client's");
    let span_id = u64::from_be_bytes(whole.span_id[..].try_into().unwrap());
    let told = format!("00-{TRACE:032x}-{span_id:016x}-01");
    assert_eq!(response.header("traceresponse"), Some(told.as_str()));
    let mut ids: Vec<&[u8]> = spans.iter().map(|span| &span.span_id[..]).collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 5, "each span has an id of its own");
    for span in &spans {
        assert_eq!((&span.trace_id[..], span.trace_state.as_str()), (&TRACE.to_be_bytes()[..], "a=1"));
        assert!(whole.start_time_unix_nano <= span.start_time_unix_nano, "{span:#?}");
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:#?}");
        assert!(span.end_time_unix_nano <= whole.end_time_unix_nano, "{span:#?}");
    }
    for pair in phases.windows(2) {
        assert_eq!(pair[0].parent_span_id, whole.span_id);
        assert_eq!(pair[0].end_time_unix_nano, pair[1].start_time_unix_nano, "one phase follows another");
    }
    let taken = |span: &Span| (span.end_time_unix_nano - span.start_time_unix_nano) / 1_000_000;
    assert_eq!((taken(&phases[1]), taken(&phases[2])), (30, 20), "as the engine that is played says");
    let prompt_tokens = request.prompt.len() as i64;
    for (key, value) in [
        ("http.response.status_code", 200),
        ("gen_ai.usage.input_tokens", prompt_tokens),
        ("gen_ai.usage.cache_read.input_tokens", 2),
        ("gen_ai.usage.output_tokens", 4),
    ] {
        assert_eq!(integer(whole, key), value, "{key}");
    }
    for (key, value) in [
        ("gen_ai.request.id", "traced-1"),
        ("gen_ai.request.model", "tiny"),
        ("gen_ai.operation.name", "chat"),
        ("http.route", CHAT),
    ] {
        assert_eq!(text(&whole.attributes, key), value);
    }
    let Some(Value::ArrayValue(reasons)) = value(&whole.attributes, "gen_ai.response.finish_reasons") else {
        panic!("no reasons in {whole:#?}")
    };
    assert_eq!(reasons.values, [AnyValue { value: Some(Value::StringValue("stop".into())) }]);
    assert!(!format!("{spans:?}").contains(asked));
    let scrape = Scrape::parse(&get(server.address, "/metrics").await.body);
    let count = |became| scrape.value("trace_spans_total", &[("became", became)]);
    assert_eq!((count("exported"), count("dropped")), (5.0, 0.0));
}

#[tokio::test]
async fn a_trace_begins_here_where_the_client_has_none_and_only_sampled_ones_are_exported() {
    let mut collected = Collected::start().await;
    let (server, mut script) = Server::start(exporting(&collected.endpoint)).await;
    let body = json!({"messages": [{"role": "user", "content": "hi"}]});
    let unsampled = send(&server, &parent(false), body.clone()).await;
    let (response, _) = tokio::join!(read(unsampled), script.play(answer("x")));
    assert_eq!((response.status, response.header("traceresponse")), (200, None));
    let begun = send(&server, "", body).await;
    let (response, _) = tokio::join!(read(begun), script.play(answer("x")));
    // The engine said nothing of its phases.
    let spans = collected.spans(2).await;
    let whole = &spans[0];
    assert!(whole.parent_span_id.is_empty() && whole.trace_id != TRACE.to_be_bytes());
    let told = response.header("traceresponse").expect("the trace that began here");
    let trace = u128::from_be_bytes(whole.trace_id[..].try_into().unwrap());
    assert!(told.starts_with(&format!("00-{trace:032x}-")), "{told}");
    // A refused request has a trace, and an error that is its client's.
    let refused = post(server.address, CHAT, json!({"messages": [], "colour": "red"})).await;
    let spans = collected.spans(1).await;
    assert_eq!(integer(&spans[0], "http.response.status_code"), i64::from(refused.status));
    assert_eq!((text(&spans[0].attributes, "error.type"), &spans[0].status), ("unknown_parameter", &None));
    // One that the engine gives up has an error of the server's.
    let failing = send(&server, "", json!({"messages": [{"role": "user", "content": "hi"}], "stream": true})).await;
    tokio::join!(read(failing), script.play(vec![SequenceEvent::Failed("no luck".into())]));
    let spans = collected.spans(2).await;
    assert_eq!(text(&spans[0].attributes, "error.type"), "generation_failed");
    assert_eq!(spans[0].status.as_ref().map(|status| status.code), Some(2), "{:#?}", spans[0]);
    // What asks for no place has no trace.
    get(server.address, "/v1/models").await;
    server.stop.drain.cancel();
    server.ended().await.unwrap();
    assert!(collected.received.try_recv().is_err());
}

#[tokio::test]
async fn a_call_over_grpc_is_traced_by_its_metadata() {
    let mut collected = Collected::start().await;
    let (server, mut script) = Server::start(exporting(&collected.endpoint)).await;
    let mut client = InferenceClient::connect(format!("http://{}", server.address)).await.unwrap();
    let input = Some(Input::TokenIds(TokenIds { ids: vec![5] }));
    let mut request = Request::new(GenerateRequest { input, ..GenerateRequest::default() });
    let value = format!("00-{TRACE:032x}-{PARENT:016x}-01").parse().unwrap();
    request.metadata_mut().insert("traceparent", value);
    let call = async {
        let answer = client.generate(request).await.unwrap();
        let told = answer.metadata().get("traceresponse").expect("the initial metadata tell").clone();
        let mut events = answer.into_inner();
        while events.message().await.unwrap().is_some() {}
        told
    };
    let events = [vec![prompt(0, Vec::new())], answer("x")].concat();
    let (told, _) = tokio::join!(call, script.play(events));
    assert!(told.to_str().unwrap().starts_with(&format!("00-{TRACE:032x}-")));
    let spans = collected.spans(5).await;
    assert_eq!(spans[0].name, "looplane.inference.v1.Inference/Generate");
    assert_eq!(text(&spans[0].attributes, "rpc.system"), "grpc");
    assert_eq!(spans[0].parent_span_id, PARENT.to_be_bytes());
}

#[tokio::test]
async fn collectors_that_are_away_or_hang_harm_nobody() {
    // Nobody listens where one just did; who listens never answers.
    let away = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let hanging = TcpListener::bind("127.0.0.1:0").await.unwrap();
    for (address, tells) in [(away, true), (hanging.local_addr().unwrap(), false)] {
        let (server, mut script) = Server::start(exporting(&format!("http://{address}"))).await;
        let body = json!({"messages": [{"role": "user", "content": "hi"}]});
        for _ in 0..3 {
            let client = send(&server, "", body.clone()).await;
            let (response, _): (client::Response, _) = tokio::join!(read(client), script.play(answer("x")));
            assert_eq!(response.status, 200);
        }
        let dropped = async || {
            let scrape = Scrape::parse(&get(server.address, "/metrics").await.body);
            scrape.value("trace_spans_total", &[("became", "dropped")])
        };
        if tells {
            let counted = async {
                while dropped().await < 6.0 {
                    sleep(Duration::from_millis(20)).await;
                }
            };
            timeout(SOON, counted).await.expect("what is lost is counted");
        }
        let begun = Instant::now();
        server.stop.drain.cancel();
        server.ended().await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10), "the server ended after {:?}", begun.elapsed());
    }
}
