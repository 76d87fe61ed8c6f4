//! Requests with little time: it covers the queue and the generation, and what it cuts off is given up at once.

use std::time::{Duration, Instant};

use looplane_proto::inference::v1::{
    GenerateRequest, TokenIds, generate_request::Input, inference_client::InferenceClient,
};
use looplane_server::{engine::Unwanted, listener::ServeOptions};
use serde_json::{Value, json};
use tonic::{Code, Request, transport::Channel};

use crate::{
    Server,
    client::post,
    engine::{answer, token},
    options, spell,
};

const TIMEOUT_MS: u64 = 150;

/// A body of each route that generates.
fn bodies(stream: bool) -> [(&'static str, Value); 4] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let bodies = [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "Hi"})),
        ("/v1/messages", json!({"model": "tiny", "messages": messages, "max_tokens": 9})),
        ("/v1/responses", json!({"input": "Hi"})),
    ];
    bodies.map(|(route, mut body)| {
        body["timeout_ms"] = TIMEOUT_MS.into();
        body["stream"] = stream.into();
        (route, body)
    })
}

/// With one place, so that a request that kept its own would stop the next.
async fn server() -> (Server, crate::engine::Script) {
    Server::start(ServeOptions { max_concurrent_requests: 1, ..options() }).await
}

#[tokio::test]
async fn a_request_whose_time_is_over_is_given_up() {
    let (server, mut script) = server().await;
    for (route, body) in bodies(false) {
        let begun = Instant::now();
        let (response, sequence) = tokio::join!(post(server.address, route, &body), script.accept());
        assert!(begun.elapsed() >= Duration::from_millis(TIMEOUT_MS), "{route}");
        assert_eq!((response.status, response.header("x-should-retry")), (504, Some("false")), "{route}");
        let error = response.json()["error"].clone();
        assert!(error["message"].as_str().unwrap().contains("150 ms"), "{error}");
        match route {
            "/v1/messages" => assert_eq!(error["type"], "timeout_error"),
            _ => assert_eq!((&error["code"], &error["type"]), (&json!("deadline_exceeded"), &json!("server_error"))),
        }
        assert_eq!(script.unwanted().await, (sequence.id, Unwanted::GivenUp), "{route}");
    }
}

#[tokio::test]
async fn a_stream_whose_time_is_over_ends_with_an_error() {
    let (server, mut script) = server().await;
    for (route, body) in bodies(true) {
        let (response, sequence) = tokio::join!(post(server.address, route, &body), async {
            let sequence = script.accept().await;
            sequence.send(token(spell("x")[0])).await;
            sequence
        });
        assert_eq!(response.status, 200, "{route}");
        assert!(!response.body.contains("[DONE]"), "{}", response.body);
        let last = response.body.trim_end().rsplit("\n\n").next().unwrap();
        assert!(last.contains("150 ms are over"), "{last}");
        assert_eq!(script.unwanted().await, (sequence.id, Unwanted::GivenUp), "{route}");
    }
}

#[tokio::test]
async fn an_answer_that_comes_in_time_is_as_any_other() {
    let (server, mut script) = server().await;
    for (route, mut body) in bodies(false) {
        body["timeout_ms"] = json!(20_000);
        let (response, _) = tokio::join!(post(server.address, route, &body), script.play(answer("ok")));
        assert_eq!(response.status, 200, "{route}: {}", response.body);
    }
    script.nothing_more();
}

#[tokio::test]
async fn a_time_that_is_none_is_refused_by_name() {
    let (server, _script) = server().await;
    for (route, mut body) in bodies(false) {
        for wrong in [json!(0), json!(-1), json!(1.5), json!("1s"), json!(86_400_001), json!(u64::MAX)] {
            body["timeout_ms"] = wrong.clone();
            let response = post(server.address, route, &body).await;
            assert_eq!(response.status, 400, "{route} {wrong}");
            assert!(response.body.contains("timeout_ms"), "{}", response.body);
        }
    }
}

#[tokio::test]
async fn the_deadline_of_a_call_holds() {
    let (server, mut script) = server().await;
    let channel = Channel::from_shared(format!("http://{}", server.address)).unwrap().connect().await.unwrap();
    let mut client = InferenceClient::new(channel);
    let request = |timeout: Option<&'static str>| {
        let input = Some(Input::TokenIds(TokenIds { ids: vec![5] }));
        let mut request = Request::new(GenerateRequest { input, ..GenerateRequest::default() });
        timeout.map(|timeout| request.metadata_mut().insert("grpc-timeout", timeout.parse().unwrap()));
        request
    };
    let (call, sequence) = tokio::join!(client.generate(request(Some("150m"))), script.accept());
    let mut events = call.unwrap().into_inner();
    let begun = events.message().await.unwrap();
    assert!(begun.is_some(), "the stream begins before its sequence");
    let over = events.message().await.unwrap_err();
    assert_eq!(over.code(), Code::DeadlineExceeded, "{over}");
    assert_eq!(script.unwanted().await, (sequence.id, Unwanted::GivenUp));
    let wrong = client.generate(request(Some("soon"))).await.unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidArgument);
    assert!(wrong.message().contains("grpc-timeout"), "{wrong}");
    let (call, _) = tokio::join!(client.generate(request(None)), script.play(answer("ok")));
    call.unwrap();
}
