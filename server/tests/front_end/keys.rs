//! API keys: what a request without one does not get, and what the limits of one leave to others.

use looplane_proto::inference::v1::{GetModelRequest, inference_client::InferenceClient};
use looplane_server::{
    http::Access,
    keys::{KeyLimits, Keys, new_key},
    listener::ServeOptions,
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tonic::{Code, Request, metadata::MetadataMap, transport::Channel};

use crate::{
    Server,
    client::{Response, read, read_until},
    engine::{Script, answer},
    options,
};

/// A server with a key for each of these limits.
pub async fn server(limits: &[KeyLimits], options: ServeOptions) -> (Server, Script, Vec<String>) {
    let drawn = limits.iter().zip(0..).map(|(limits, at)| new_key(&format!("key-{at}"), *limits).unwrap());
    let (keys, lines): (Vec<String>, Vec<String>) = drawn.unzip();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("keys");
    std::fs::write(&path, lines.join("\n")).unwrap();
    let access = Access { keys: Keys::load(Some(path), None).unwrap(), ..Access::default() };
    let (server, script) = Server::start(ServeOptions { access, ..options }).await;
    (server, script, keys)
}

pub async fn send(server: &Server, key: &str, body: &Value) -> TcpStream {
    send_to(server, "/v1/completions", key, body).await
}

pub async fn send_to(server: &Server, path: &str, key: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
         authorization: Bearer {key}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
    stream
}

pub fn limits(concurrent: Option<u32>, tokens_per_minute: Option<u32>) -> KeyLimits {
    KeyLimits { concurrent, tokens_per_minute, ..KeyLimits::default() }
}

pub fn refused(response: &Response, status: u16, code: &str) {
    assert_eq!((response.status, &response.json()["error"]["code"]), (status, &json!(code)), "{}", response.body);
}

#[tokio::test]
async fn a_request_without_a_key_takes_no_place_and_its_body_is_not_waited_for() {
    let (server, mut script, keys) =
        server(&[limits(None, None)], ServeOptions { max_concurrent_requests: 1, ..options() }).await;
    let running = send(&server, &keys[0], &json!({"prompt": [5]})).await;
    let sequence = script.accept().await;
    // All places are taken, which only those learn who have a key.
    refused(&read(send(&server, "other", &json!({"prompt": [5]})).await).await, 401, "invalid_api_key");
    refused(&read(send(&server, &keys[0], &json!({"prompt": [5]})).await).await, 429, "rate_limit_exceeded");
    let mut without_body = TcpStream::connect(server.address).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\n";
    without_body.write_all(head.as_bytes()).await.unwrap();
    let response = read(without_body).await;
    assert_eq!(response.header("www-authenticate"), Some("Bearer"));
    refused(&response, 401, "invalid_api_key");
    for event in answer("x") {
        sequence.send(event).await;
    }
    assert_eq!(read(running).await.status, 200);
}

#[tokio::test]
async fn a_key_at_its_limit_leaves_the_other_places_to_others() {
    let (server, mut script, keys) = server(&[limits(Some(1), None), limits(None, None)], options()).await;
    let body = json!({"prompt": [5], "stream": true});
    let running = send(&server, &keys[0], &body).await;
    let sequence = script.accept().await;
    let response = read(send(&server, &keys[0], &body).await).await;
    assert_eq!(
        (response.header("retry-after"), &response.json()["error"]["type"]),
        (Some("1"), &json!("rate_limit_error"))
    );
    refused(&response, 429, "rate_limit_exceeded");
    let (other, _) = tokio::join!(async { read(send(&server, &keys[1], &body).await).await }, script.play(answer("x")));
    assert_eq!(other.status, 200);
    // The place among those of the key is free with its request's end.
    for event in answer("x") {
        sequence.send(event).await;
    }
    let mut running = running;
    read_until(&mut running, "[DONE]").await;
    drop(running);
    let (again, _) = tokio::join!(
        async {
            loop {
                let response = read(send(&server, &keys[0], &body).await).await;
                if response.status == 200 {
                    return response;
                }
            }
        },
        script.play(answer("x"))
    );
    assert_eq!(again.status, 200);
}

#[tokio::test]
async fn tokens_of_prompt_and_answer_count() {
    let (server, mut script, keys) = server(&[limits(None, Some(5))], options()).await;
    let body = json!({"prompt": [5, 6, 7]});
    let (response, _) =
        tokio::join!(async { read(send(&server, &keys[0], &body).await).await }, script.play(answer("yes")));
    assert_eq!(response.status, 200);
    let response = read(send(&server, &keys[0], &body).await).await;
    refused(&response, 429, "rate_limit_exceeded");
    // 3 and 4 tokens, of which 5 are left after 24 s at 5 a minute.
    let retry: u32 = response.header("retry-after").unwrap().parse().unwrap();
    assert!((20..=25).contains(&retry), "{retry}");
}

fn name(metadata: &MetadataMap) -> &str {
    metadata.get("x-request-id").and_then(|name| name.to_str().ok()).expect("every answer has one")
}

#[tokio::test]
async fn grpc_has_the_key_and_the_requests_name_in_its_metadata() {
    let (server, _script, keys) = server(&[limits(None, None)], options()).await;
    let channel = Channel::from_shared(format!("http://{}", server.address)).unwrap().connect().await.unwrap();
    let mut client = InferenceClient::new(channel);
    let request = |key: &str| {
        let mut request = Request::new(GetModelRequest::default());
        request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        request.metadata_mut().insert("x-request-id", "mine".parse().unwrap());
        request
    };
    let refused = client.get_model(request("other")).await.unwrap_err();
    assert_eq!((refused.code(), name(refused.metadata())), (Code::Unauthenticated, "mine"));
    let model = client.get_model(request(&keys[0])).await.unwrap();
    assert_eq!(name(model.metadata()), "mine");
    // A name that could break a line of the log is replaced.
    let mut odd = request(&keys[0]);
    odd.metadata_mut().insert("x-request-id", "my own".parse().unwrap());
    assert_eq!(name(client.get_model(odd).await.unwrap().metadata()).len(), 36);
}
