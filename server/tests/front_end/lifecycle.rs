//! Clients that go away, bounds that are reached, states of the engine, and the end.

use std::time::Duration;

use looplane_server::{
    engine::{EngineState, FinishReason, SequenceEvent, SubmitError, Unwanted},
    listener::{ServeError, ServeOptions},
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream, time::sleep};

use crate::{
    Server,
    client::{get, head, open, post, read, read_until},
    engine::{answer, token},
    options, spell,
};

const COMPLETION: &str = "/v1/completions";

fn body(stream: bool) -> String {
    json!({"prompt": [5], "stream": stream, "max_tokens": 100}).to_string()
}

#[tokio::test]
async fn a_client_that_goes_away_cancels() {
    let (server, mut script) = Server::start(options()).await;
    // While it streams.
    let mut client = open(server.address, COMPLETION, &body(true)).await;
    let sequence = script.accept().await;
    sequence.send(token(spell("x")[0])).await;
    read_until(&mut client, "\"text\":\"x\"").await;
    drop(client);
    assert_eq!(script.unwanted().await, (sequence.id, Unwanted::Abandoned));
    // Before the first token of a stream.
    let mut client = open(server.address, COMPLETION, &body(true)).await;
    let sequence = script.accept().await;
    read_until(&mut client, "text/event-stream").await;
    drop(client);
    assert_eq!(script.cancelled().await, sequence.id);
    // While it waits for a whole response.
    let client = open(server.address, COMPLETION, &body(false)).await;
    let sequence = script.accept().await;
    sequence.send(token(spell("x")[0])).await;
    drop(client);
    assert_eq!(script.cancelled().await, sequence.id);
    // All of several choices.
    let client = open(server.address, COMPLETION, &json!({"prompt": [5], "n": 2}).to_string()).await;
    let (first, second) = (script.accept().await, script.accept().await);
    drop(client);
    let mut cancelled = [script.cancelled().await, script.cancelled().await];
    cancelled.sort_unstable();
    assert_eq!(cancelled, [first.id, second.id]);
}

#[tokio::test]
async fn a_finished_sequence_is_not_cancelled() {
    let (server, mut script) = Server::start(options()).await;
    let request = json!({"prompt": [5]});
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(response.status, 200);
    sleep(Duration::from_millis(50)).await;
    script.nothing_more();
}

#[tokio::test]
async fn choices_are_handed_over_together() {
    let (server, mut script) = Server::start(options()).await;
    let client = tokio::spawn(async move { post(server.address, COMPLETION, &json!({"prompt": [5], "n": 2})).await });
    let submission = script.submission().await;
    assert_eq!(submission.requests.len(), 2);
    let full = SubmitError::QueueFull { waiting: 8, limit: 8, what: "sequences".into() };
    submission.reply.send(Err(full)).unwrap();
    let response = client.await.unwrap();
    assert_eq!((response.status, response.header("retry-after")), (429, Some("1")));
    script.nothing_more();
}

/// The first choice would go on for ever: the end of the second must not wait for it.
#[tokio::test]
async fn a_choice_that_fails_ends_its_request_at_once() {
    let (server, mut script) = Server::start(options()).await;
    for (stream, status) in [(true, 200), (false, 500)] {
        let request = json!({"prompt": [5], "n": 2, "stream": stream});
        let client = open(server.address, COMPLETION, &request.to_string()).await;
        let (first, second) = (script.accept().await, script.accept().await);
        first.send(token(spell("x")[0])).await;
        second.send(SequenceEvent::Failed("no luck".into())).await;
        assert_eq!(script.unwanted().await, (first.id, Unwanted::GivenUp), "its client is there");
        let response = read(client).await;
        assert_eq!(response.status, status);
        assert!(response.body.contains("no luck"), "{}", response.body);
    }
}

#[tokio::test]
async fn what_the_queue_never_takes_is_refused_for_good() {
    let (server, mut script) = Server::start(options()).await;
    let option = "--max-queued-requests";
    let never = SubmitError::NeverFits { asked: 4, limit: 3, what: "sequences".into(), option: option.into() };
    let full = SubmitError::QueueFull { waiting: 3, limit: 3, what: "sequences".into() };
    let quarantined = SubmitError::Quarantined { seconds_left: 5 };
    for (error, status, code) in [
        (never, 400, "request_too_large"),
        (full, 429, "rate_limit_exceeded"),
        (quarantined, 422, "request_quarantined"),
    ] {
        let request = json!({"prompt": [5], "n": 3});
        let address = server.address;
        let client = tokio::spawn(async move { post(address, COMPLETION, &request).await });
        script.refuse(error.clone()).await;
        let response = client.await.unwrap();
        let body = response.json()["error"].clone();
        assert_eq!((response.status, &body["code"]), (status, &json!(code)), "{body}");
        assert_eq!(body["message"], json!(error.to_string()));
    }
}

#[tokio::test]
async fn a_client_that_half_closes_counts_as_gone() {
    let (server, mut script) = Server::start(options()).await;
    for stream in [true, false] {
        let mut client = open(server.address, COMPLETION, &body(stream)).await;
        let sequence = script.accept().await;
        client.shutdown().await.unwrap();
        assert_eq!(script.cancelled().await, sequence.id);
    }
}

#[tokio::test]
async fn what_the_engine_refuses_has_its_status() {
    let (server, mut script) = Server::start(options()).await;
    for (error, status, code, kind) in [
        (
            SubmitError::QueueFull { waiting: 9, limit: 9, what: "prompt tokens".into() },
            429,
            "rate_limit_exceeded",
            "rate_limit_error",
        ),
        (SubmitError::TooLarge { needed: 9, available: 8 }, 400, "request_too_large", "invalid_request_error"),
        (SubmitError::Unavailable("draining".into()), 503, "not_ready", "service_unavailable_error"),
    ] {
        for stream in [true, false] {
            let request = json!({"prompt": [5], "stream": stream});
            let (response, ()) = tokio::join!(post(server.address, COMPLETION, &request), script.refuse(error.clone()));
            assert_eq!(response.status, status);
            let body = response.json();
            assert_eq!((&body["error"]["code"], &body["error"]["type"]), (&json!(code), &json!(kind)));
            assert_eq!(response.header("retry-after").is_some(), status != 400);
        }
    }
}

#[tokio::test]
async fn more_requests_than_allowed_are_told_to_come_back() {
    let (server, mut script) = Server::start(ServeOptions { max_concurrent_requests: 1, ..options() }).await;
    let mut first = open(server.address, COMPLETION, &body(true)).await;
    let sequence = script.accept().await;
    let refused = post(server.address, COMPLETION, &json!({"prompt": [5]})).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    let large = json!({"prompt": "x".repeat(900_000)}).to_string();
    let refused = read(open(server.address, COMPLETION, &large).await).await;
    assert_eq!(refused.status, 429, "it is told though it does not read before it has sent everything");
    assert_eq!(get(server.address, "/health/ready").await.status, 200, "health has a place of its own");
    sequence.send(token(spell("x")[0])).await;
    sequence.send(SequenceEvent::Finished(FinishReason::Length)).await;
    read_until(&mut first, "[DONE]").await;
    drop(first);
    // The place is free once the response has ended.
    let request = json!({"prompt": [5]});
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(response.status, 200);
}

#[tokio::test]
async fn health_says_how_the_engine_is() {
    let (server, script) = Server::start(options()).await;
    for (state, status, word) in [
        (EngineState::Loading("rank 1: packing weights 40 %".into()), 503, "loading"),
        (EngineState::Recovering("rank 0 was killed".into()), 503, "recovering"),
        (EngineState::Draining, 503, "draining"),
        (EngineState::Ready, 200, "ready"),
    ] {
        script.state.send_replace(state.clone());
        let response = get(server.address, "/health/ready").await;
        let json = response.json();
        assert_eq!((response.status, json["status"].as_str().unwrap()), (status, word));
        if let EngineState::Loading(what) | EngineState::Recovering(what) = state {
            assert!(json["detail"].as_str().unwrap().contains(&what), "{json}");
        }
        assert_eq!(get(server.address, "/health/live").await.status, 200);
    }
    script.state.send_replace(EngineState::Loading("rank 0: reading config".into()));
    script.model.send_replace(None);
    let response = post(server.address, COMPLETION, &json!({"prompt": [5]})).await;
    assert_eq!((response.status, response.header("retry-after")), (503, Some("5")));
    assert!(response.body.contains("reading config"));
}

#[tokio::test]
async fn every_response_has_a_request_id_and_a_client_may_choose_it() {
    let (server, _script) = Server::start(options()).await;
    let first = get(server.address, "/v1/nothing").await;
    assert_eq!(first.header("x-request-id").unwrap().len(), 36);
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream
        .write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    assert_eq!(read(stream).await.header("x-request-id"), Some("mine"));
}

#[tokio::test]
async fn draining_ends_what_runs_and_takes_nothing_new() {
    let (server, mut script) = Server::start(options()).await;
    let client = open(server.address, COMPLETION, &body(true)).await;
    let sequence = script.accept().await;
    server.stop.drain.cancel();
    sleep(Duration::from_millis(20)).await;
    let ready = get(server.address, "/health/ready").await;
    assert_eq!((ready.status, ready.json()["status"].clone()), (503, json!("draining")));
    assert_eq!(get(server.address, "/health/live").await.status, 200);
    let refused = post(server.address, COMPLETION, &json!({"prompt": [5]})).await;
    assert_eq!((refused.status, refused.json()["error"]["code"].clone()), (503, json!("shutting_down")));
    sequence.send(token(spell("x")[0])).await;
    sequence.send(SequenceEvent::Finished(FinishReason::Length)).await;
    assert!(read(client).await.body.ends_with("data: [DONE]\n\n"));
    server.ended().await.unwrap();
    script.nothing_more();
}

#[tokio::test]
async fn the_end_of_draining_is_an_error_event_and_a_cancel() {
    for second_signal in [false, true] {
        let drain = if second_signal { Duration::from_secs(600) } else { Duration::from_millis(50) };
        let (server, mut script) = Server::start(ServeOptions { drain, ..options() }).await;
        let streaming = open(server.address, COMPLETION, &body(true)).await;
        let first = script.accept().await;
        let waiting = open(server.address, COMPLETION, &body(false)).await;
        let second = script.accept().await;
        server.stop.drain.cancel();
        if second_signal {
            server.stop.now.cancel();
        }
        let streamed = read(streaming).await;
        let last: Value = serde_json::from_str(streamed.body.trim_end().rsplit("data: ").next().unwrap()).unwrap();
        assert_eq!(last["error"]["code"], "shutting_down");
        assert_eq!(read(waiting).await.status, 503);
        let mut cancelled = [script.unwanted().await, script.unwanted().await];
        cancelled.sort_unstable_by_key(|(id, _)| *id);
        assert_eq!(cancelled, [(first.id, Unwanted::GivenUp), (second.id, Unwanted::GivenUp)]);
        server.ended().await.unwrap();
    }
}

#[tokio::test]
async fn an_idle_connection_does_not_hold_up_the_end() {
    let (server, _script) = Server::start(options()).await;
    let mut idle = TcpStream::connect(server.address).await.unwrap();
    idle.write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut idle, "live\"}").await;
    let silent = TcpStream::connect(server.address).await.unwrap();
    server.stop.drain.cancel();
    server.ended().await.unwrap();
    drop((idle, silent));
}

#[tokio::test]
async fn an_engine_that_fails_ends_the_service_with_its_reason() {
    let (server, script) = Server::start(options()).await;
    script.state.send_replace(EngineState::Failed("rank 0: tensor lm_head.weight is missing".into()));
    match server.ended().await {
        Err(ServeError::Engine(why)) => assert!(why.contains("lm_head.weight")),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_body_announced_too_large_is_refused_before_it_comes() {
    let (server, _script) = Server::start(options()).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(head("POST", COMPLETION, "application/json", 99_999_999_999).as_bytes()).await.unwrap();
    read_until(&mut stream, "413 Payload Too Large").await;
}

#[tokio::test]
async fn who_sends_the_whole_of_a_body_too_large_reads_why_it_is_refused() {
    let (server, _script) = Server::start(options()).await;
    let body = vec![b' '; 20 << 20];
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(head("POST", COMPLETION, "application/json", body.len()).as_bytes()).await.unwrap();
    stream.write_all(&body).await.unwrap();
    assert_eq!(read(stream).await.status, 413);
}

#[tokio::test]
async fn half_a_body_holds_nobody_else_up() {
    let (server, mut script) = Server::start(options()).await;
    let mut half = TcpStream::connect(server.address).await.unwrap();
    half.write_all(head("POST", COMPLETION, "application/json", 100).as_bytes()).await.unwrap();
    half.write_all(b"{\"prompt\":").await.unwrap();
    let request = json!({"prompt": [5]});
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(response.status, 200);
    drop(half);
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(response.status, 200);
}
