//! `/v1/messages`: what clients of Anthropic's API get, byte for byte, and what is refused.

use looplane_server::engine::{FinishReason, SequenceEvent};
use serde_json::{Value, json};

use crate::{
    Server,
    client::{Response, post},
    engine::{answer, token},
    options, spell,
    tools::{REPLY, text},
};

const MESSAGES: &str = "/v1/messages";

fn request(extra: Value) -> Value {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({
        "model": "tiny", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "f", "description": "F.", "input_schema": schema}],
    });
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn played(request: &Value, events: Vec<SequenceEvent>) -> Response {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let answered = async {
        let response = post(server.address, MESSAGES, request).await;
        assert_eq!(response.status, 200, "{}", response.body);
        response
    };
    tokio::join!(answered, script.play(events)).0
}

/// The stream's events, each of which has its type in its name and in its data.
fn events(response: &Response) -> Vec<Value> {
    let event = |event: &str| {
        let (name, data) = event.split_once("\ndata: ").expect("an event has data");
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event}");
        data
    };
    response.body.split_terminator("\n\n").map(event).collect()
}

/// What a client puts together of a stream.
fn together(events: &[Value]) -> Value {
    let mut message = Value::Null;
    let mut json = String::new();
    for event in events {
        let index = event["index"].as_u64().unwrap_or_default() as usize;
        match event["type"].as_str().unwrap() {
            "message_start" => message = event["message"].clone(),
            "content_block_start" => {
                assert_eq!(message["content"].as_array().unwrap().len(), index);
                message["content"].as_array_mut().unwrap().push(event["content_block"].clone());
                json.clear();
            }
            "content_block_delta" => {
                let (block, delta) = (&mut message["content"][index], &event["delta"]);
                let mut add = |name: &str| {
                    let text = block[name].as_str().unwrap().to_owned() + delta[name].as_str().unwrap();
                    block[name] = text.into();
                };
                match delta["type"].as_str().unwrap() {
                    "text_delta" => add("text"),
                    "thinking_delta" => add("thinking"),
                    "input_json_delta" => json.push_str(delta["partial_json"].as_str().unwrap()),
                    other => panic!("{other}"),
                }
            }
            "content_block_stop" if !json.is_empty() => {
                message["content"][index]["input"] = serde_json::from_str(&json).unwrap_or(json!({}));
            }
            "message_delta" => {
                message["usage"] = event["usage"].clone();
                for (name, value) in event["delta"].as_object().unwrap() {
                    message[name] = value.clone();
                }
            }
            _ => {}
        }
    }
    message
}

/// Without the names, which are random.
fn nameless(mut message: Value) -> Value {
    message["id"] = Value::Null;
    message["content"].as_array_mut().unwrap().iter_mut().filter(|block| block["type"] == "tool_use").for_each(
        |block| {
            assert!(block["id"].as_str().unwrap().starts_with("call_"), "{block}");
            block["id"] = Value::Null;
        },
    );
    message
}

#[tokio::test]
async fn a_stream_is_anthropics_to_the_byte() {
    let response = played(&request(json!({"stream": true})), answer(REPLY)).await;
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    let input = events(&response)[0]["message"]["usage"]["input_tokens"].as_u64().unwrap();
    let event = |name: &str, rest: &str| format!("event: {name}\ndata: {{\"type\":\"{name}\"{rest}}}\n\n");
    let start = |index: u32, block: &str| {
        event("content_block_start", &format!(",\"index\":{index},\"content_block\":{{\"type\":{block}}}"))
    };
    let delta = |index: u32, kind: &str, field: &str, text: &str| {
        let text = Value::from(text);
        let delta = format!("{{\"type\":\"{kind}_delta\",\"{field}\":{text}}}");
        event("content_block_delta", &format!(",\"index\":{index},\"delta\":{delta}"))
    };
    let stop = |index: u32| event("content_block_stop", &format!(",\"index\":{index}"));
    let message = format!(
        ",\"message\":{{\"id\":\"ID\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"tiny\",\"content\":[],\
         \"stop_reason\":null,\"stop_sequence\":null,\"usage\":{{\"input_tokens\":{input},\
         \"cache_read_input_tokens\":0,\"output_tokens\":0}}}}"
    );
    let output = REPLY.len() + 1;
    let end = format!(
        ",\"delta\":{{\"stop_reason\":\"tool_use\",\"stop_sequence\":null}},\"usage\":{{\"input_tokens\":{input},\
         \"cache_read_input_tokens\":0,\"output_tokens\":{output}}}"
    );
    // A character is a token here.
    let arguments = ["{", "\"", "a", "\"", ":", "1", "}"].map(|text| delta(2, "input_json", "partial_json", text));
    let expected = [
        event("message_start", &message),
        start(0, r#""thinking","thinking":"","signature":"""#),
        delta(0, "thinking", "thinking", "O"),
        delta(0, "thinking", "thinking", "h"),
        stop(0),
        start(1, r#""text","text":"""#),
        delta(1, "text", "text", "I"),
        stop(1),
        start(2, r#""tool_use","id":"ID","name":"f","input":{}"#),
        arguments.concat(),
        stop(2),
        event("message_delta", &end),
        event("message_stop", ""),
    ];
    assert_eq!(response.normalised(), expected.concat());
    assert!(response.body.contains(r#""id":"msg_"#), "{}", response.body);
}

#[tokio::test]
async fn a_whole_message_is_anthropics_to_the_byte() {
    let response = played(&request(json!({})), answer(REPLY)).await;
    let input = response.json()["usage"]["input_tokens"].as_u64().unwrap();
    let expected = format!(
        "{{\"id\":\"ID\",\"type\":\"message\",\"role\":\"assistant\",\"model\":\"tiny\",\"content\":[\
         {{\"type\":\"thinking\",\"thinking\":\"Oh\",\"signature\":\"\"}},{{\"type\":\"text\",\"text\":\"I\"}},\
         {{\"type\":\"tool_use\",\"id\":\"ID\",\"name\":\"f\",\"input\":{{\"a\":1}}}}],\"stop_reason\":\"tool_use\",\
         \"stop_sequence\":null,\"usage\":{{\"input_tokens\":{input},\"cache_read_input_tokens\":0,\
         \"output_tokens\":{}}}}}",
        REPLY.len() + 1
    );
    assert_eq!(response.normalised(), expected);
}

#[tokio::test]
async fn a_stream_adds_up_to_the_whole_message() {
    let cut = &REPLY[..REPLY.find("1}").unwrap()];
    let twice = format!("{REPLY}{}", &REPLY[REPLY.find("<tool_call>").unwrap()..]);
    for (text, reason, expected) in [
        ("", FinishReason::Stop, "end_turn"),
        ("I am.", FinishReason::Stop, "end_turn"),
        ("I am ENDless", FinishReason::Stop, "stop_sequence"),
        ("I am", FinishReason::Length, "max_tokens"),
        ("<think>So", FinishReason::Length, "max_tokens"),
        (REPLY, FinishReason::Stop, "tool_use"),
        (&twice, FinishReason::Stop, "tool_use"),
        (cut, FinishReason::Length, "max_tokens"),
    ] {
        let script = || {
            let mut events: Vec<_> = spell(text).into_iter().map(token).collect();
            events.push(SequenceEvent::Finished(reason));
            events
        };
        let stops = json!({"stop_sequences": ["never", "END"]});
        let whole = played(&request(stops.clone()), script()).await.json();
        let stream = request(json!({"stream": true, "stop_sequences": ["never", "END"]}));
        let streamed = together(&events(&played(&stream, script()).await));
        assert_eq!(nameless(streamed), nameless(whole.clone()), "{text}");
        assert_eq!(whole["stop_reason"], expected, "{text}");
        assert_eq!(whole["stop_sequence"] == "END", expected == "stop_sequence", "{text}");
    }
}

/// Every kind of block that a client sends back, against the same chat as OpenAI's API has it.
#[tokio::test]
async fn a_conversation_is_the_same_chat_as_in_the_other_api() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let cached = json!({"type": "ephemeral"});
    let schema = json!({"type": "object"});
    let ours = json!({
        "model": "tiny", "max_tokens": 8, "thinking": {"type": "disabled"}, "metadata": {"user_id": "u"},
        "system": [{"type": "text", "text": "Be ", "cache_control": cached}, {"type": "text", "text": "brief."}],
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "So", "signature": ""},
                {"type": "text", "text": "I call", "citations": null},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}, "cache_control": cached},
            ]},
            {"role": "user", "content": [
                {
                    "type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "2"}],
                    "is_error": false,
                },
                {"type": "text", "text": "Go "},
                {"type": "text", "text": "on"},
            ]},
        ],
        "tools": [{"name": "f", "description": "F.", "input_schema": schema, "cache_control": cached}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": true},
    });
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let openais = json!({
        "max_tokens": 8, "chat_template_kwargs": {"enable_thinking": false}, "parallel_tool_calls": false,
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "I call", "reasoning_content": "So", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
            {"role": "user", "content": "Go on"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": schema}}],
    });
    let mut prompts = Vec::new();
    for (path, body) in [(MESSAGES, &ours), ("/v1/chat/completions", &openais)] {
        let answered = async {
            let response = post(server.address, path, body).await;
            assert_eq!(response.status, 200, "{}", response.body);
        };
        let ((), sequence) = tokio::join!(answered, script.play(answer("I")));
        prompts.push(sequence.prompt);
    }
    assert_eq!(prompts[0], prompts[1]);
    let mut counted = ours;
    counted.as_object_mut().unwrap().retain(|name, _| name != "max_tokens" && name != "metadata");
    let counted = post(server.address, "/v1/messages/count_tokens", counted).await;
    assert_eq!(counted.body, format!("{{\"input_tokens\":{}}}", prompts[0].len()));
    // An assistant's last message goes on.
    let begun = request(json!({"messages": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I am"}
    ]}));
    let (response, sequence) = tokio::join!(post(server.address, MESSAGES, begun), script.play(answer("!")));
    assert_eq!(response.status, 200, "{}", response.body);
    let prompt = text().tokenizer.decode(&sequence.prompt, true).unwrap();
    assert!(prompt.ends_with("I am"), "{prompt}");
}

#[tokio::test]
async fn what_is_refused_is_refused_in_anthropics_shape_and_by_name() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let content = |block: Value| json!({"messages": [{"role": "user", "content": [block]}]});
    for (fields, field) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"model": null}), "model"),
        (json!({"messages": "Hi"}), "messages"),
        (json!({"messages": [{"role": "system", "content": "Hi"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user", "content": []}]}), "messages[0].content"),
        (content(json!({"type": "image", "source": {}})), "messages[0].content[0].type"),
        (content(json!({"type": "tool_use", "id": "1", "name": "f", "input": {}})), "messages[0].content[0].type"),
        (content(json!({"type": "text", "text": "Hi", "what": 1})), "messages[0].content[0].what"),
        (content(json!({"type": "text", "text": "Hi", "cache_control": 1})), "messages[0].content[0].cache_control"),
        (content(json!({"type": "tool_result", "content": "2"})), "messages[0].content[0].tool_use_id"),
        (json!({"system": 1}), "system"),
        (json!({"stop_sequences": "x"}), "stop_sequences"),
        (json!({"tools": [{"name": "f"}]}), "tools[0].input_schema"),
        (json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": "auto"}), "tool_choice"),
        (json!({"tool_choice": {"type": "some"}}), "tool_choice.type"),
        (json!({"tool_choice": {"type": "tool"}}), "tool_choice.name"),
        (json!({"tools": [], "tool_choice": {"type": "any"}}), "tool_choice"),
        (json!({"thinking": {"type": "on"}}), "thinking.type"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"n": 2}), "n"),
    ] {
        let response = post(server.address, MESSAGES, request(fields.clone())).await;
        let body = response.json();
        assert_eq!((response.status, &body["type"]), (400, &json!("error")), "{fields}");
        assert_eq!(body["error"]["type"], "invalid_request_error", "{fields}");
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.starts_with(&format!("{field}: ")), "{fields}: {message}");
    }
    let other = post(server.address, MESSAGES, request(json!({"model": "claude"}))).await;
    assert_eq!((other.status, &other.json()["error"]["type"]), (404, &json!("not_found_error")));
    script.nothing_more();
}

#[tokio::test]
async fn an_error_in_a_stream_is_an_event() {
    let failed = vec![token(spell("I")[0]), SequenceEvent::Failed("lost".into())];
    let events = events(&played(&request(json!({"stream": true})), failed).await);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["error"]["type"]), (&json!("error"), &json!("api_error")), "{last}");
    assert!(events.iter().all(|event| event["type"] != "message_stop"), "nobody takes it for whole");
}
