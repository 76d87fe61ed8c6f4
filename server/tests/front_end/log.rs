//! What the log says of requests.

use std::{
    io,
    sync::{Mutex, OnceLock},
    time::Duration,
};

use looplane_server::engine::{FinishReason, SequenceEvent, SubmitError};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream, time::sleep};
use tracing_subscriber::filter::LevelFilter;

use crate::{
    SOON, Server,
    client::read,
    engine::{answer, token},
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
        let log = tracing_subscriber::fmt().json().with_max_level(LevelFilter::INFO).with_writer(|| Lines);
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
                .filter(|fields| fields["request_id"] == request_id)
                .collect();
            if !lines.is_empty() {
                return lines;
            }
            sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(SOON, found).await.unwrap_or_else(|_| panic!("no line about {request_id}"))
}

async fn open(server: &Server, request_id: &str, body: Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
         x-request-id: {request_id}\r\ncontent-length: {}\r\n\r\n",
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
        let (response, _) = tokio::join!(read(client), script.play(answer("yes")));
        assert_eq!(response.status, 200);
        let [line] = &lines_of(&id).await[..] else { panic!("one line was expected") };
        assert_eq!((&line["route"], &line["reason"]), (&json!("/v1/completions"), &json!("stop")));
        assert_eq!((&line["prompt_tokens"], &line["completion_tokens"]), (&json!(3), &json!(4)));
        let times = ["queued_ms", "first_token_ms", "total_ms"].map(|name| line[name].as_u64().unwrap());
        assert!(times.is_sorted(), "{times:?}");
    }
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
    let full = SubmitError::QueueFull { waiting: 1, limit: 1, what: "sequences" };
    tokio::join!(read(client), script.refuse(full));
    assert_eq!(lines_of("log-full").await[0]["reason"], "rate_limit_exceeded");
}
