//! Chats with tools and thinking: what clients get, byte for byte, and what is refused.

use std::sync::Arc;

use looplane_server::{
    engine::{FinishReason, SequenceEvent, Unwanted},
    reply::{Parsers, ReasoningParser},
    text::{ChatTemplate, GenerationDefaults, Text, Tokenizer},
};
use serde_json::{Value, json};

use crate::{
    Server,
    client::{Response, post},
    engine::{answer, token},
    fixture, options, spell,
};

const CHAT: &str = "/v1/chat/completions";
/// Qwen2.5-Coder's own.
const TEMPLATE: &str = include_str!("../fixtures/templates/qwen2.5-coder.jinja");

/// The model with a template that knows tools; its thinking is told apart.
pub fn text() -> Arc<Text> {
    let template = ChatTemplate::new(TEMPLATE, "", "<|eot_id|>").expect("it parses");
    let text = Text { template: Some(template), takes_tools: true, ..Text::load(&fixture()).expect("it loads") };
    Arc::new(text.with_parsers(Parsers { reasoning: ReasoningParser::Think, ..Parsers::default() }))
}

fn chat(extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": true}}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn said(request: &Value, text: &str) -> Response {
    let (server, mut script) = Server::start_with(options(), self::text()).await;
    let (response, _) = tokio::join!(post(server.address, CHAT, request), script.play(answer(text)));
    assert_eq!(response.status, 200, "{}", response.body);
    response
}

/// The `choices[0]` of every chunk.
fn chunks(response: &Response) -> Vec<Value> {
    let payloads = response.body.split_terminator("\n\n").map(|event| &event["data: ".len()..]);
    let json = payloads.filter(|payload| *payload != "[DONE]").map(|payload| serde_json::from_str(payload).unwrap());
    json.map(|chunk: Value| chunk["choices"][0].clone()).collect()
}

pub const REPLY: &str =
    "<think>\nOh\n</think>\n\nI\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":1}}\n</tool_call>\n";

#[tokio::test]
async fn a_streamed_call_is_openais_to_the_byte() {
    let response = said(&chat(json!({"stream": true})), REPLY).await;
    let start = concat!(
        r#"data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","#,
        r#""system_fingerprint":"cpu-test","choices":[{"index":0,"delta":"#
    );
    let chunk =
        |delta: &str, finish: &str| format!("{start}{delta},\"logprobs\":null,\"finish_reason\":{finish}}}]}}\n\n");
    let delta = |delta: &str| chunk(delta, "null");
    // A character is a token here.
    let arguments = |text: &str| {
        let text = Value::from(text);
        delta(&format!("{{\"tool_calls\":[{{\"index\":0,\"function\":{{\"arguments\":{text}}}}}]}}"))
    };
    let first = r#"{"tool_calls":[{"index":0,"id":"ID","type":"function","function":{"name":"f","arguments":""}}]}"#;
    let expected = [
        delta(r#"{"role":"assistant","content":""}"#),
        delta(r#"{"reasoning_content":"O","reasoning":"O"}"#),
        delta(r#"{"reasoning_content":"h","reasoning":"h"}"#),
        delta(r#"{"content":"I"}"#),
        delta(first),
        ["{", "\"", "a", "\"", ":", "1", "}"].map(arguments).concat(),
        chunk("{}", "\"tool_calls\""),
        "data: [DONE]\n\n".into(),
    ];
    assert_eq!(response.normalised(), expected.concat());
    assert!(response.body.contains(r#""id":"call_"#), "{}", response.body);
}

#[tokio::test]
async fn a_whole_call_is_openais_to_the_byte() {
    let message = async |request: Value, text: &str| {
        let normalised = said(&request, text).await.normalised();
        let (_, rest) = normalised.split_once("\"message\":").unwrap();
        rest.split_once(",\"usage\"").unwrap().0.to_owned()
    };
    let call = r#"{"id":"ID","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}"#;
    let expected = format!(
        "{{\"role\":\"assistant\",\"content\":\"I\",\"refusal\":null,\"reasoning_content\":\"Oh\",\"reasoning\":\"Oh\",\
         \"tool_calls\":[{call}]}},\"logprobs\":null,\"finish_reason\":\"tool_calls\"}}]"
    );
    assert_eq!(message(chat(json!({})), REPLY).await, expected);
    let alone = &REPLY[REPLY.find("\n<tool_call>").unwrap()..];
    let expected = format!(
        "{{\"role\":\"assistant\",\"content\":null,\"refusal\":null,\"tool_calls\":[{call}]}},\"logprobs\":null,\
         \"finish_reason\":\"tool_calls\"}}]"
    );
    assert_eq!(message(chat(json!({})), alone).await, expected);
    // Nothing is looked for that was not asked for, but the thinking.
    let expected = "{\"role\":\"assistant\",\"content\":\"I\\n<tool_call>\",\"refusal\":null},\"logprobs\":null,\
                    \"finish_reason\":\"stop\"}]";
    let none = chat(json!({"tool_choice": "none", "include_reasoning": false}));
    assert_eq!(message(none, "<think>Oh</think>I\n<tool_call>").await, expected);
    // It only thought.
    let expected = "{\"role\":\"assistant\",\"content\":null,\"refusal\":null,\"reasoning_content\":\"Oh\",\
                    \"reasoning\":\"Oh\"},\"logprobs\":null,\"finish_reason\":\"stop\"}]";
    assert_eq!(message(chat(json!({})), "<think>Oh").await, expected);
}

/// A grammar goes with the sequence where a tool is strict, by any API; what the model writes is read as ever.
#[tokio::test]
async fn a_strict_tool_s_calls_are_held_to_its_schema_where_the_model_decides() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let schema = |extra: Value| {
        let mut schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
        schema.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        schema
    };
    let openai = |strict: bool, extra: Value| {
        let function = json!({"name": "f", "parameters": schema(json!({})), "strict": strict});
        let mut body = json!({"messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": function}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        (CHAT, body)
    };
    let anthropic = |strict: bool| {
        let tool = json!({"name": "f", "input_schema": schema(json!({})), "strict": strict});
        let messages = json!([{"role": "user", "content": "Hi"}]);
        ("/v1/messages", json!({"model": "tiny", "max_tokens": 99, "messages": messages, "tools": [tool]}))
    };
    let responses = |strict: bool| {
        let tool = json!({"type": "function", "name": "f", "parameters": schema(json!({})), "strict": strict});
        ("/v1/responses", json!({"input": "Hi", "tools": [tool]}))
    };
    for ((path, body), is_held) in [
        (openai(true, json!({})), true),
        (openai(false, json!({})), false),
        (openai(true, json!({"tool_choice": "none"})), false),
        // Free text goes on for as long as it is asked to.
        (openai(true, json!({"min_tokens": 3, "max_tokens": 9})), true),
        (openai(true, json!({"ignore_eos": true, "max_tokens": 9})), true),
        (anthropic(true), true),
        (anthropic(false), false),
        (responses(true), true),
        (responses(false), false),
    ] {
        let (response, request) = tokio::join!(post(server.address, path, &body), script.play(answer("Hi")));
        assert_eq!((response.status, request.grammar.is_some()), (200, is_held), "{path} {body}: {}", response.body);
    }
    // What cannot be kept to is refused, not passed over.
    let (_, mut body) = openai(true, json!({}));
    body["tools"][0]["function"]["parameters"] = schema(json!({"not": {}}));
    let response = post(server.address, CHAT, &body).await;
    let error = &response.json()["error"];
    assert_eq!((response.status, &error["param"]), (400, &json!("tools")), "{error}");
    assert!(error["message"].as_str().unwrap().contains("not"), "{error}");
}

/// Before it generates anything, whichever API it came by.
#[tokio::test]
async fn a_tool_that_no_arguments_keep_to_is_refused_by_name_where_calls_are_held_to_it() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let endless = json!({"$ref": "#"});
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat = |strict: bool, choice: Value| {
        let function = json!({"name": "f", "parameters": endless, "strict": strict});
        let tools = json!([{"type": "function", "function": function}]);
        (CHAT, json!({"messages": messages, "tools": tools, "tool_choice": choice}))
    };
    let anthropic = |choice: Value| {
        let tools = json!([{"name": "f", "input_schema": endless}]);
        let body = json!({"model": "tiny", "max_tokens": 9, "messages": messages, "tools": tools});
        let body = body.as_object().unwrap().clone().into_iter().chain([("tool_choice".to_owned(), choice)]);
        ("/v1/messages", body.collect::<Value>())
    };
    let responses = |choice: Value| {
        let tools = json!([{"type": "function", "name": "f", "parameters": endless}]);
        ("/v1/responses", json!({"input": "Hi", "tools": tools, "tool_choice": choice}))
    };
    for (path, body) in [
        chat(false, json!("required")),
        chat(false, json!({"type": "function", "function": {"name": "f"}})),
        chat(true, json!("auto")),
        anthropic(json!({"type": "any"})),
        anthropic(json!({"type": "tool", "name": "f"})),
        responses(json!("required")),
        responses(json!({"type": "function", "name": "f"})),
    ] {
        let response = post(server.address, path, &body).await;
        let error = &response.json()["error"];
        let message = error["message"].as_str().unwrap_or_default();
        assert_eq!(response.status, 400, "{path} {body}: {error}");
        assert!(message.contains("the parameters of f: no text keeps to this"), "{path} {body}: {error}");
        assert!(error["param"] == "tools" || message.starts_with("tools: "), "{path} {body}: {error}");
    }
    // The model may write what it likes.
    let (path, body) = chat(false, json!("auto"));
    let (response, _) = tokio::join!(post(server.address, path, &body), script.play(answer("Hi")));
    assert_eq!(response.status, 200, "{}", response.body);
    script.nothing_more();
}

#[tokio::test]
async fn the_reply_ends_with_the_first_call_where_only_one_is_wanted() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let request = chat(json!({"parallel_tool_calls": false}));
    let playing = async {
        let sequence = script.accept().await;
        for id in spell(&REPLY[..=REPLY.rfind('}').unwrap()]) {
            sequence.send(token(id)).await;
        }
        assert_eq!(script.unwanted().await, (sequence.id, Unwanted::Complete), "nobody wants the rest");
    };
    let (response, ()) = tokio::join!(post(server.address, CHAT, &request), playing);
    let choice = &response.json()["choices"][0];
    assert_eq!(choice["message"]["tool_calls"].as_array().unwrap().len(), 1, "{choice}");
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn every_token_has_its_log_probability_in_some_chunk() {
    let response = said(&chat(json!({"stream": true, "logprobs": true})), REPLY).await;
    let tokens: String = chunks(&response)
        .iter()
        .filter_map(|choice| choice["logprobs"]["content"].as_array())
        .flatten()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert_eq!(tokens, REPLY);
}

#[tokio::test]
async fn a_limit_that_cuts_a_call_off_is_told_as_a_limit() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let cut = &REPLY[..REPLY.find("1}").unwrap()];
    let mut events: Vec<_> = spell(cut).into_iter().map(token).collect();
    events.push(SequenceEvent::Finished(FinishReason::Length));
    let (response, _) = tokio::join!(post(server.address, CHAT, chat(json!({}))), script.play(events));
    let choice = &response.json()["choices"][0];
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"a\":", "{choice}");
}

/// Llama's tag is one, as Mistral's is: without tools it is no text.
#[tokio::test]
async fn a_marker_that_is_a_control_token_is_found() {
    let template = include_str!("../fixtures/templates/llama-style.jinja");
    let template = ChatTemplate::new(template, "", "<|eot_id|>").expect("it parses");
    let json = std::fs::read_to_string(fixture().join("tokenizer.json")).unwrap();
    let renamed = json.replace("<|end_of_text|>", "<|python_tag|>");
    let tokenizer = Arc::new(Tokenizer::from_json(renamed.as_bytes(), 768).unwrap());
    let tag = tokenizer.id("<|python_tag|>").unwrap();
    assert!(tokenizer.is_special(tag));
    let text = Text { template: Some(template), tokenizer, takes_tools: true, ..Text::load(&fixture()).unwrap() };
    let text = Text { defaults: GenerationDefaults { eos_tokens: vec![4], ..text.defaults.clone() }, ..text };
    let (server, mut script) = Server::start_with(options(), Arc::new(text.with_parsers(Parsers::default()))).await;
    let call = "{\"name\": \"other\", \"parameters\": {}}";
    for (tools, content) in [(true, Value::Null), (false, call.into())] {
        let mut events: Vec<_> = [tag].into_iter().chain(spell(call)).map(token).collect();
        events.push(SequenceEvent::Finished(FinishReason::Stop));
        let request = if tools { chat(json!({})) } else { chat(json!({"tools": []})) };
        let (response, _) = tokio::join!(post(server.address, CHAT, request), script.play(events));
        let message = &response.json()["choices"][0]["message"];
        assert_eq!(message["content"], content, "{message}");
        assert_eq!(message["tool_calls"][0]["function"]["name"] == "other", tools, "{message}");
    }
}

#[tokio::test]
async fn what_is_said_of_tools_is_checked_by_name() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let tools = |tool: Value| json!({"tools": [tool]});
    let named = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
    let called = |call: Value| {
        let message = json!({"role": "assistant", "tool_calls": [call]});
        json!({"messages": [message, {"role": "user", "content": "Hi"}]})
    };
    let function = |arguments: Value| {
        called(json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}))
    };
    let message = |message: Value| json!({"messages": [message]});
    for (fields, code, param) in [
        (json!({"tools": {}}), "invalid_type", "tools"),
        (tools(json!("f")), "invalid_type", "tools[0]"),
        (tools(json!({"function": {"name": "f"}})), "missing_required_parameter", "tools[0].type"),
        (tools(json!({"type": "web_search"})), "unsupported_parameter", "tools[0].type"),
        (tools(json!({"type": "function"})), "missing_required_parameter", "tools[0].function"),
        (named(json!({})), "missing_required_parameter", "tools[0].function.name"),
        (named(json!({"name": "a b"})), "invalid_value", "tools[0].function.name"),
        (named(json!({"name": "f", "parameters": []})), "invalid_type", "tools[0].function.parameters"),
        (named(json!({"name": "f", "strict": 1})), "invalid_type", "tools[0].function.strict"),
        (named(json!({"name": "f", "what": 1})), "unknown_parameter", "tools[0].function.what"),
        (json!({"tool_choice": "any"}), "invalid_value", "tool_choice"),
        (json!({"tool_choice": 1}), "invalid_type", "tool_choice"),
        (
            json!({"tool_choice": {"type": "function", "function": {"name": "g"}}}),
            "invalid_value",
            "tool_choice.function.name",
        ),
        (json!({"tools": [], "tool_choice": "auto"}), "invalid_value", "tool_choice"),
        (json!({"parallel_tool_calls": 1}), "invalid_type", "parallel_tool_calls"),
        (called(json!({"type": "function"})), "missing_required_parameter", "messages[0].tool_calls[0].id"),
        (function(json!({})), "invalid_type", "messages[0].tool_calls[0].function.arguments"),
        (function(json!("{")), "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        (function(json!("[1]")), "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        (message(json!({"role": "tool", "content": "x"})), "missing_required_parameter", "messages[0].tool_call_id"),
        (
            message(json!({"role": "user", "content": "x", "tool_call_id": "1"})),
            "unsupported_parameter",
            "messages[0].tool_call_id",
        ),
        (
            message(json!({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"})),
            "invalid_value",
            "messages[0].reasoning",
        ),
        (message(json!({"role": "assistant"})), "missing_required_parameter", "messages[0].content"),
    ] {
        let response = post(server.address, CHAT, chat(fields.clone())).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["code"], &error["param"]), (400, &json!(code), &json!(param)), "{fields}");
    }
    script.nothing_more();
}
