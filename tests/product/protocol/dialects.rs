//! Other APIs than OpenAI's chats say the same of the same request.

use serde_json::json;

use crate::common::{Server, fixture};

#[tokio::test(flavor = "multi_thread")]
async fn messages_and_responses_are_what_chats_are() {
    let model = fixture("llama-gqa");
    let server = Server::start(&["--model", model.to_str().expect("the path is UTF-8"), "--tp", "2"]).await;
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]);
    let chat =
        server.ok("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 6, "temperature": 0})).await;
    let model = chat["model"].as_str().expect("an answer names its model");
    let mut request = json!({"model": model, "system": "Be brief.", "messages": [{"role": "user", "content": "Hi"}]});
    let counted = server.ok("/v1/messages/count_tokens", &request).await;
    assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);
    request["max_tokens"] = 6.into();
    request["temperature"] = 0.into();
    let message = server.ok("/v1/messages", &request).await;
    assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(message["usage"]["output_tokens"], chat["usage"]["completion_tokens"]);
    let limited = chat["choices"][0]["finish_reason"] == "length";
    assert_eq!(message["stop_reason"], if limited { "max_tokens" } else { "end_turn" });
    let mut response = json!({
        "instructions": "Be brief.", "input": "Hi", "max_output_tokens": 6, "temperature": 0, "metadata": {"a": "b"},
    });
    let first = server.ok("/v1/responses", &response).await;
    assert_eq!(first["output"][0]["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    assert_eq!(first["usage"]["total_tokens"], chat["usage"]["total_tokens"]);
    assert_eq!(first["metadata"], response["metadata"]);
    let id = first["id"].as_str().expect("a response has an id");
    assert_eq!(server.get(&format!("/v1/responses/{id}")).await, (200, first.clone()));
    response["previous_response_id"] = id.into();
    let second = server.ok("/v1/responses", &response).await;
    assert!(second["usage"]["input_tokens"].as_u64() > first["usage"]["total_tokens"].as_u64(), "{second}");
    let text = message["content"][0]["text"].as_str().expect("the answer has text");
    let stop = text.chars().next().expect("it is not empty").to_string();
    request["stop_sequences"] = json!([stop]);
    let stopped = server.ok("/v1/messages", &request).await;
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
}
