//! What the log says of requests.

use std::{
    io,
    sync::{Mutex, OnceLock},
    time::Duration,
};

use looplane_proto::inference::v1::{GenerateRequest, generate_request::Input, inference_client::InferenceClient};
use looplane_server::{
    drafts::DraftStep,
    engine::{FinishReason, SequenceEvent, SubmitError},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream, time::sleep};

use crate::{
    SOON, Server,
    client::{post, read},
    engine::{answer, prompt, token},
    options, spell,
};

static LINES: Mutex<Vec<u8>> = Mutex::new(Vec::new());

struct Lines;

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        LINES.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// All tests of this process log to the same place; each looks for its own requests.
fn start_log() {
    static STARTED: OnceLock<()> = OnceLock::new();
    STARTED.get_or_init(|| {
        let log = tracing_subscriber::fmt().json().with_env_filter("looplane_server=trace").with_writer(|| Lines);
        log.init();
    });
}

/// The lines about a request, once there is one.
async fn lines_of(request_id: &str) -> Vec<Value> {
    let found = async {
        loop {
            let lines: Vec<Value> = String::from_utf8_lossy(&LINES.lock().unwrap())
                .lines()
                .filter_map(|line| serde_json::from_str(line).ok())
                .map(|line: Value| line["fields"].clone())
                .filter(|fields| fields["request_id"] == request_id && fields["message"] == "request ended")
                .collect();
            if !lines.is_empty() {
                return lines;
            }
            sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(SOON, found).await.unwrap_or_else(|_| panic!("no line about {request_id}"))
}

/// A header of W3C Trace Context.
const TRACED: &str = "traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n";

async fn open(server: &Server, request_id: &str, body: Value) -> TcpStream {
    open_with(server, request_id, "", body).await
}

async fn open_with(server: &Server, request_id: &str, headers: &str, body: Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
         x-request-id: {request_id}\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn every_request_has_one_line_at_its_end() {
    start_log();
    let (server, mut script) = Server::start(options()).await;
    for stream in [true, false] {
        let id = format!("log-whole-{stream}");
        let client = open(&server, &id, json!({"prompt": [5, 6, 7], "stream": stream})).await;
        let drafts = SequenceEvent::Drafts(DraftStep { drafted: 3, accepted: 2 });
        let events = [vec![prompt(2, Vec::new()), drafts], answer("yes")].concat();
        let (response, _) = tokio::join!(read(client), script.play_late(events));
        assert_eq!(response.status, 200);
        let [line] = &lines_of(&id).await[..] else { panic!("one line was expected") };
        assert_eq!((&line["route"], &line["reason"]), (&json!("/v1/completions"), &json!("stop")));
        for (name, value) in [
            ("status", json!(200)),
            ("prompt_tokens", json!(3)),
            ("cached_tokens", json!(2)),
            ("completion_tokens", json!(4)),
            ("drafted_tokens", json!(3)),
            ("accepted_tokens", json!(2)),
        ] {
            assert_eq!(line[name], value, "{name}");
        }
        let time = |name: &str| line[name].as_f64().unwrap_or_else(|| panic!("no {name} in {line}"));
        assert!(time("prepare_ms") <= time("first_token_ms") && time("first_token_ms") <= time("total_ms"), "{line}");
        // As the engine that is played says.
        let phases = ["queue_ms", "prefill_ms", "decode_ms"].map(time);
        assert!((29.9..30.1).contains(&phases[0]) && (19.9..20.1).contains(&phases[1]), "{line}");
        assert!(phases.iter().sum::<f64>() <= time("total_ms") + 0.1, "{line}");
        assert!(line.get("trace_id").is_none(), "{line}");
    }
    let client = open_with(&server, "log-trace", TRACED, json!({"prompt": [5]})).await;
    tokio::join!(read(client), script.play(answer("x")));
    assert_eq!(lines_of("log-trace").await[0]["trace_id"], "4bf92f3577b34da6a3ce929d0e0e4736", "without an exporter");
}

#[tokio::test]
async fn the_line_says_why_a_request_ended() {
    start_log();
    let (server, mut script) = Server::start(options()).await;
    let x = || token(spell("x")[0]);
    for (id, events, reason) in [
        ("log-length", vec![x(), SequenceEvent::Finished(FinishReason::Length)], "length"),
        ("log-failed", vec![x(), SequenceEvent::Failed("no luck".into())], "generation_failed"),
    ] {
        let client = open(&server, id, json!({"prompt": [5]})).await;
        tokio::join!(read(client), script.play(events));
        let lines = lines_of(id).await;
        assert_eq!((lines.len(), &lines[0]["reason"], &lines[0]["completion_tokens"]), (1, &json!(reason), &json!(1)));
    }
    let client = open(&server, "log-gone", json!({"prompt": [5], "stream": true})).await;
    let sequence = script.accept().await;
    drop(client);
    assert_eq!(script.cancelled().await, sequence.id);
    assert_eq!(lines_of("log-gone").await[0]["reason"], "client_gone");
    let client = open(&server, "log-refused", json!({"prompt": []})).await;
    read(client).await;
    assert_eq!(lines_of("log-refused").await[0]["reason"], "invalid_value");
    let client = open(&server, "log-full", json!({"prompt": [5]})).await;
    let full = SubmitError::QueueFull { waiting: 1, limit: 1, what: "sequences".into() };
    tokio::join!(read(client), script.refuse(full));
    assert_eq!(lines_of("log-full").await[0]["reason"], "rate_limit_exceeded");
}

#[tokio::test]
async fn no_line_has_what_was_asked_or_answered() {
    start_log();
    let (server, mut script) = Server::start(options()).await;
    let [asked, answered] = ["Xylophone-7713", "quokka4491"];
    let message = json!([{"role": "user", "content": asked}]);
    for (path, body, generates) in [
        ("/v1/chat/completions", json!({"messages": message, "user": asked, "stop": [asked]}), true),
        ("/v1/chat/completions", json!({"messages": message, "stream": true}), true),
        ("/v1/completions", json!({"prompt": asked, "echo": true}), true),
        ("/v1/messages", json!({"messages": message, "system": asked, "max_tokens": 99, "model": "tiny"}), true),
        ("/v1/messages/count_tokens", json!({"messages": message}), false),
        ("/v1/responses", json!({"input": asked, "instructions": asked}), true),
        ("/tokenize", json!({"prompt": asked}), false),
        ("/apply-template", json!({"messages": message}), false),
        ("/v1/chat/completions/render", json!({"messages": message}), false),
        ("/v1/completions/render", json!({"prompt": asked}), false),
        // What is wrong is told to the client alone.
        ("/v1/chat/completions", json!({"messages": [{"role": asked, "content": asked}]}), false),
        ("/v1/completions", json!({"prompt": asked, asked: 1}), false),
        ("/v1/completions", json!({"prompt": asked, "guided_regex": format!("[{asked}")}), false),
    ] {
        let asking = post(server.address, path, body);
        if generates {
            let (response, _) = tokio::join!(asking, script.play(answer(answered)));
            assert_eq!(response.status, 200, "{path}: {}", response.body);
        } else {
            asking.await;
        }
    }
    let mut client = InferenceClient::connect(format!("http://{}", server.address)).await.unwrap();
    let request = GenerateRequest { input: Some(Input::Prompt(asked.into())), ..GenerateRequest::default() };
    let read = async { client.generate(request).await.unwrap().into_inner().message().await.unwrap() };
    tokio::join!(read, script.play(answer(answered)));
    let client = open(&server, "log-last", json!({"prompt": [5]})).await;
    tokio::join!(crate::client::read(client), script.play(answer("x")));
    lines_of("log-last").await;
    let lines = String::from_utf8_lossy(&LINES.lock().unwrap()).into_owned();
    assert!(lines.contains("/v1/messages/count_tokens") && lines.contains("Inference/Generate"), "{lines}");
    for line in lines.lines() {
        assert!(!line.contains(asked) && !line.contains(answered), "{line}");
    }
}
