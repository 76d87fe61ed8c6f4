//! Every way to be refused: status, code and field.

use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    Server,
    client::{Response, get, post, read, request},
    options,
};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

#[track_caller]
fn assert_refused(response: &Response, status: u16, code: &str, param: Value, what: &str) {
    assert_eq!(response.status, status, "{what}: {}", response.body);
    assert_eq!(response.header("content-type"), Some("application/json"), "{what}");
    let json = response.json();
    let error = json["error"].as_object().unwrap_or_else(|| panic!("{what}: {}", response.body));
    assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"], "{what}");
    assert_eq!((error["code"].as_str().unwrap(), &error["param"]), (code, &param), "{what}: {}", error["message"]);
    let message = error["message"].as_str().unwrap();
    assert!(!message.is_empty(), "{what}");
    if let Some(param) = param.as_str().filter(|_| code != "model_not_found") {
        assert!(message.contains(param), "{what}: {message}");
    }
}

#[tokio::test]
async fn fields_of_a_chat() {
    let (server, mut script) = Server::start(options()).await;
    let message = |message: Value| json!({"messages": [message]});
    let table = [
        (json!({"temperature": -0.1}), "invalid_value", "temperature"),
        (json!({"temperature": 2.5}), "invalid_value", "temperature"),
        (json!({"temperature": "hot"}), "invalid_type", "temperature"),
        (json!({"temperature": true}), "invalid_type", "temperature"),
        (json!({"top_p": 0}), "invalid_value", "top_p"),
        (json!({"top_p": 1.1}), "invalid_value", "top_p"),
        (json!({"top_k": -2}), "invalid_value", "top_k"),
        (json!({"top_k": 1.5}), "invalid_type", "top_k"),
        (json!({"top_k": 18446744073709551615u64}), "invalid_value", "top_k"),
        (json!({"min_p": 2}), "invalid_value", "min_p"),
        (json!({"seed": 1.5}), "invalid_type", "seed"),
        (json!({"seed": "7"}), "invalid_type", "seed"),
        (json!({"n": 0}), "invalid_value", "n"),
        (json!({"n": 17}), "invalid_value", "n"),
        (json!({"n": 9223372036854775808u64}), "invalid_value", "n"),
        (json!({"max_tokens": 0}), "invalid_value", "max_tokens"),
        (json!({"max_tokens": -1}), "invalid_value", "max_tokens"),
        (json!({"max_tokens": 4294967296u64}), "invalid_value", "max_tokens"),
        (json!({"max_completion_tokens": 0}), "invalid_value", "max_completion_tokens"),
        (json!({"max_completion_tokens": 1, "max_tokens": 2}), "invalid_value", "max_tokens"),
        (json!({"max_tokens": 5, "min_tokens": 6}), "invalid_value", "min_tokens"),
        (json!({"presence_penalty": 2.1}), "invalid_value", "presence_penalty"),
        (json!({"frequency_penalty": -2.1}), "invalid_value", "frequency_penalty"),
        (json!({"repetition_penalty": 0}), "invalid_value", "repetition_penalty"),
        (json!({"repetition_penalty": 11}), "invalid_value", "repetition_penalty"),
        (json!({"logit_bias": []}), "invalid_type", "logit_bias"),
        (json!({"logit_bias": {"x": 1}}), "invalid_value", "logit_bias"),
        (json!({"logit_bias": {"+5": 1}}), "invalid_value", "logit_bias"),
        (json!({"logit_bias": {"768": 1}}), "invalid_value", "logit_bias"),
        (json!({"logit_bias": {"05": 1, "5": 1}}), "invalid_value", "logit_bias"),
        (json!({"logit_bias": {"5": "1"}}), "invalid_type", "logit_bias.5"),
        (json!({"logit_bias": {"5": 100.5}}), "invalid_value", "logit_bias.5"),
        (json!({"logprobs": 1}), "invalid_type", "logprobs"),
        (json!({"top_logprobs": 2}), "invalid_value", "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "invalid_value", "top_logprobs"),
        (json!({"stop": ""}), "invalid_value", "stop"),
        (json!({"stop": ["a", 1]}), "invalid_type", "stop"),
        (json!({"stop": {}}), "invalid_type", "stop"),
        (json!({"stop": vec!["x"; 17]}), "invalid_value", "stop"),
        (json!({"stop": "x".repeat(1025)}), "invalid_value", "stop"),
        (json!({"stream": "yes"}), "invalid_type", "stream"),
        (json!({"stream_options": {"include_usage": true}}), "invalid_value", "stream_options"),
        (json!({"stream": true, "stream_options": {"x": 1}}), "unknown_parameter", "stream_options.x"),
        (json!({"stream": true, "stream_options": 1}), "invalid_type", "stream_options"),
        (json!({"ignore_eos": 1}), "invalid_type", "ignore_eos"),
        (json!({"model": 7}), "invalid_type", "model"),
        (json!({"model": ""}), "invalid_value", "model"),
        (json!({"user": 7}), "invalid_type", "user"),
        (json!({"metadata": 7}), "invalid_type", "metadata"),
        (json!({"tools": [{"type": "function", "function": {"name": "f"}}]}), "unsupported_parameter", "tools"),
        (json!({"tool_choice": "auto"}), "invalid_value", "tool_choice"),
        (json!({"functions": [{}]}), "unsupported_parameter", "functions"),
        (json!({"response_format": {"type": "xml"}}), "unsupported_parameter", "response_format.type"),
        (json!({"audio": {}}), "unsupported_parameter", "audio"),
        (json!({"modalities": ["text", "audio"]}), "unsupported_parameter", "modalities"),
        (json!({"prediction": {}}), "unsupported_parameter", "prediction"),
        (json!({"store": true}), "unsupported_parameter", "store"),
        (json!({"reasoning_effort": "high"}), "unsupported_parameter", "reasoning_effort"),
        (json!({"reasoning_effort": "much"}), "invalid_value", "reasoning_effort"),
        (json!({"reasoning_effort": 2}), "invalid_type", "reasoning_effort"),
        (json!({"verbosity": "high"}), "unsupported_parameter", "verbosity"),
        (json!({"documents": [{"title": "A"}]}), "unsupported_parameter", "documents"),
        (json!({"documents": ["A"]}), "invalid_type", "documents[0]"),
        (json!({"add_special_tokens": true}), "unsupported_parameter", "add_special_tokens"),
        (json!({"detokenize": false}), "unsupported_parameter", "detokenize"),
        (json!({"service_tier": "ultra"}), "invalid_value", "service_tier"),
        (json!({"web_search_options": {}}), "unsupported_parameter", "web_search_options"),
        (json!({"temprature": 1}), "unknown_parameter", "temprature"),
        (json!({"prompt": "x"}), "unknown_parameter", "prompt"),
        (json!({"messages": null}), "missing_required_parameter", "messages"),
        (json!({"messages": []}), "invalid_value", "messages"),
        (json!({"messages": "hi"}), "invalid_type", "messages"),
        (json!({"messages": ["hi"]}), "invalid_type", "messages[0]"),
        (message(json!({"content": "x"})), "missing_required_parameter", "messages[0].role"),
        (message(json!({"role": "king", "content": "x"})), "invalid_value", "messages[0].role"),
        (message(json!({"role": "function", "content": "x"})), "unsupported_parameter", "messages[0].role"),
        (message(json!({"role": 1, "content": "x"})), "invalid_type", "messages[0].role"),
        (message(json!({"role": "user"})), "missing_required_parameter", "messages[0].content"),
        (message(json!({"role": "user", "content": 1})), "invalid_type", "messages[0].content"),
        (message(json!({"role": "user", "content": []})), "invalid_type", "messages[0].content"),
        (message(json!({"role": "user", "content": "x", "mood": 1})), "unknown_parameter", "messages[0].mood"),
        (
            message(json!({"role": "user", "content": "\u{fdd0}Hi<|eot_id|>"})),
            "special_token_in_content",
            "messages[0].content",
        ),
        (
            message(json!({"role": "user", "content": "x", "tool_calls": [{}]})),
            "unsupported_parameter",
            "messages[0].tool_calls",
        ),
        (
            message(json!({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})),
            "unsupported_parameter",
            "messages[0].content[0].type",
        ),
        (
            message(json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": 1}]})),
            "invalid_type",
            "messages[0].content[1].text",
        ),
    ];
    for (fields, code, param) in table {
        let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let response = post(server.address, CHAT, &body).await;
        assert_refused(&response, 400, code, json!(param), &fields.to_string());
        assert_eq!(response.json()["error"]["type"], "invalid_request_error");
    }
    script.nothing_more();
}

#[tokio::test]
async fn fields_of_a_completion() {
    let (server, mut script) = Server::start(options()).await;
    let table = [
        (json!({"prompt": null}), "missing_required_parameter", "prompt"),
        (json!({"prompt": ""}), "invalid_value", "prompt"),
        (json!({"prompt": []}), "invalid_value", "prompt"),
        (json!({"prompt": {}}), "invalid_type", "prompt"),
        (json!({"prompt": [true]}), "invalid_type", "prompt"),
        (json!({"prompt": ["a", 1]}), "invalid_type", "prompt[1]"),
        (json!({"prompt": [1, "a"]}), "invalid_type", "prompt[1]"),
        (json!({"prompt": [1, -1]}), "invalid_type", "prompt[1]"),
        (json!({"prompt": [1, 768]}), "invalid_value", "prompt"),
        (json!({"prompt": [[1], []]}), "invalid_value", "prompt[1]"),
        (json!({"prompt": [[1], 2]}), "invalid_type", "prompt[1]"),
        (json!({"prompt": vec![vec![1]; 65]}), "invalid_value", "prompt"),
        (json!({"prompt": vec![vec![1]; 9], "n": 16}), "invalid_value", "n"),
        (json!({"logprobs": true}), "invalid_type", "logprobs"),
        (json!({"logprobs": 21}), "invalid_value", "logprobs"),
        (json!({"best_of": 2}), "unsupported_parameter", "best_of"),
        (json!({"suffix": "x"}), "unsupported_parameter", "suffix"),
        (json!({"messages": []}), "unknown_parameter", "messages"),
        (json!({"prompt": vec![1; 512]}), "context_length_exceeded", "prompt"),
        (json!({"prompt": [[1], vec![1; 9000]]}), "context_length_exceeded", "prompt[1]"),
        (json!({"prompt": [1, 2], "max_tokens": 511}), "context_length_exceeded", "prompt"),
        (json!({"prompt": "wordy ".repeat(600)}), "context_length_exceeded", "prompt"),
        (json!({"prompt": "word ".repeat(200000)}), "context_length_exceeded", "prompt"),
    ];
    for (fields, code, param) in table {
        let mut body = json!({"model": "tiny", "prompt": "Hi"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let response = post(server.address, COMPLETION, &body).await;
        assert_refused(&response, 400, code, json!(param), &fields.to_string().chars().take(80).collect::<String>());
    }
    let response = post(server.address, COMPLETION, &json!({"prompt": [1, 2], "max_tokens": 511})).await;
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(["512", "2", "511"].iter().all(|number| message.contains(number)), "{message}");
    // What can only be too long is not even tokenised.
    let response = post(server.address, COMPLETION, &json!({"prompt": "word ".repeat(200000)})).await;
    assert!(response.body.contains("1000000 bytes"), "{}", response.body);
    script.nothing_more();
}

#[tokio::test]
async fn bodies_that_are_not_requests() {
    let (server, _script) = Server::start(options()).await;
    let json_type = "application/json";
    let huge = vec![b' '; (1 << 20) + 1];
    let deep = "[".repeat(100_000);
    let table: [(&str, &[u8], u16, &str, Value); 10] = [
        (json_type, b"{", 400, "invalid_json", Value::Null),
        (json_type, b"", 400, "invalid_json", Value::Null),
        (json_type, b"{\"prompt\": \"\xff\xfe\"}", 400, "invalid_json", Value::Null),
        (json_type, b"{\"prompt\": \"x\", \"temperature\": NaN}", 400, "invalid_json", Value::Null),
        (json_type, b"{\"prompt\": \"x\", \"temperature\": 1e999}", 400, "invalid_json", Value::Null),
        (json_type, deep.as_bytes(), 400, "invalid_json", Value::Null),
        (json_type, b"{\"prompt\": \"x\", \"n\": 1, \"n\": 1}", 400, "duplicate_key", json!("n")),
        (json_type, b"[1]", 400, "invalid_type", json!("body")),
        (json_type, &huge, 413, "body_too_large", Value::Null),
        ("text/plain", b"{}", 415, "unsupported_media_type", Value::Null),
    ];
    for (content_type, body, status, code, param) in table {
        let response = request(server.address, "POST", COMPLETION, content_type, body).await;
        assert_refused(&response, status, code, param, &String::from_utf8_lossy(&body[..body.len().min(40)]));
    }
}

#[tokio::test]
async fn paths_methods_and_models_that_do_not_exist() {
    let (server, mut script) = Server::start(options()).await;
    let response = get(server.address, "/v1/nothing").await;
    assert_refused(&response, 404, "not_found", Value::Null, "path");
    let response = get(server.address, CHAT).await;
    assert_refused(&response, 405, "method_not_allowed", Value::Null, "method");
    assert_eq!(response.header("allow"), Some("POST"));
    let response = get(server.address, "/v1/models/gpt-5").await;
    assert_refused(&response, 404, "model_not_found", json!("model"), "model page");
    let response = post(server.address, COMPLETION, &json!({"model": "gpt-5", "prompt": "x"})).await;
    assert_refused(&response, 404, "model_not_found", json!("model"), "model");
    assert!(response.body.contains("tiny"), "the name that works is said");
    script.nothing_more();
}

#[tokio::test]
async fn models_are_listed_and_found() {
    let (server, _script) = Server::start(options()).await;
    let list = get(server.address, "/v1/models").await.json();
    assert_eq!((&list["object"], list["data"].as_array().unwrap().len()), (&json!("list"), 1));
    assert_eq!(list["data"][0]["id"], "tiny");
    assert_eq!(get(server.address, "/v1/models/tiny").await.json(), list["data"][0]);
    let page = get(server.address, "/").await;
    assert!(page.body.contains("curl http://127.0.0.1:") && page.body.contains("\"tiny\""), "{}", page.body);
    // A browser says what it would like to see.
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let request = "GET / HTTP/1.1\r\nhost: test\r\naccept: text/html,*/*;q=0.8\r\nconnection: close\r\n\r\n";
    stream.write_all(request.as_bytes()).await.unwrap();
    let page = read(stream).await;
    assert!(page.body.starts_with("<!doctype html>"), "{}", page.body);
    assert!(page.header("content-security-policy").is_some_and(|policy| policy.contains("default-src 'none'")));
}
