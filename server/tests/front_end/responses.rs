//! `/v1/responses`: what clients of OpenAI's Responses API get, byte for byte, what is kept, and what is refused.

use looplane_server::engine::{FinishReason, SequenceEvent};
use serde_json::{Value, json};

use crate::{
    Server,
    client::{Response, get, post, request as send},
    engine::{Script, answer, token},
    options, spell,
    tools::{REPLY, text},
};

const RESPONSES: &str = "/v1/responses";

fn request(extra: Value) -> Value {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let mut body = json!({"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": parameters}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

async fn played(server: &Server, script: &mut Script, request: &Value, events: Vec<SequenceEvent>) -> Response {
    let answered = async {
        let response = post(server.address, RESPONSES, request).await;
        assert_eq!(response.status, 200, "{}", response.body);
        response
    };
    tokio::join!(answered, script.play(events)).0
}

/// The stream's events, which are numbered, and each of which has its type in its name and in its data.
fn events(response: &Response) -> Vec<Value> {
    let event = |(index, event): (usize, &str)| {
        let (name, data) = event.split_once("\ndata: ").expect("an event has data");
        let data: Value = serde_json::from_str(data).unwrap();
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str(), "{event}");
        assert_eq!(data["sequence_number"], index, "{event}");
        data
    };
    response.body.split_terminator("\n\n").enumerate().map(event).collect()
}

/// With what differs from run to run replaced: names and the time.
fn normalised(response: &Response) -> String {
    let mut response = response.clone();
    response.body = response.body.replace("\"created_at\":", "\"created\":");
    let body = response.normalised();
    let (mut out, mut rest) = (String::new(), body.as_str());
    while let Some((before, after)) = ["\"item_id\":\"", "\"call_id\":\""]
        .iter()
        .filter_map(|name| Some((rest.find(name)? + name.len(), name)))
        .min()
        .map(|(end, _)| rest.split_at(end))
    {
        out.push_str(before);
        out.push_str("ID");
        rest = &after[after.find('"').expect("the name ends")..];
    }
    out + rest
}

/// The fields that tell of the request.
fn echoed() -> String {
    let tools = &request(json!({}))["tools"];
    format!(
        "\"background\":false,\"instructions\":null,\"max_output_tokens\":null,\"metadata\":{{}},\
         \"parallel_tool_calls\":true,\"previous_response_id\":null,\"reasoning\":{{\"effort\":null,\"summary\":null}},\
         \"store\":true,\"temperature\":null,\"text\":{{\"format\":{{\"type\":\"text\"}}}},\"tool_choice\":\"auto\",\
         \"tools\":{tools},\"top_p\":null,\"truncation\":\"disabled\"}}"
    )
}

const THOUGHT: &str = concat!(
    r#"{"type":"reasoning","id":"ID","status":"completed","summary":[],"#,
    r#""content":[{"type":"reasoning_text","text":"Oh"}]}"#
);
const SAID: &str = concat!(
    r#"{"type":"message","id":"ID","status":"completed","role":"assistant","#,
    r#""content":[{"type":"output_text","text":"I","annotations":[],"logprobs":[]}]}"#
);
const CALLED: &str = concat!(
    r#"{"type":"function_call","id":"ID","status":"completed","call_id":"ID","name":"f","#,
    r#""arguments":"{\"a\":1}"}"#
);

fn body(status: &str, output: &str, usage: &str) -> String {
    format!(
        "{{\"id\":\"ID\",\"object\":\"response\",\"created\":0,\"status\":\"{status}\",\"error\":null,\
         \"incomplete_details\":null,\"model\":\"tiny\",\"output\":[{output}],\"usage\":{usage},{}",
        echoed()
    )
}

fn usage(input: u64) -> String {
    let output = REPLY.len() as u64 + 1;
    // A character is a token here.
    let thinking = "Oh\n</think>\n\n".len();
    format!(
        "{{\"input_tokens\":{input},\"input_tokens_details\":{{\"cached_tokens\":0}},\"output_tokens\":{output},\
         \"output_tokens_details\":{{\"reasoning_tokens\":{thinking}}},\"total_tokens\":{}}}",
        input + output
    )
}

#[tokio::test]
async fn a_response_is_openais_to_the_byte_and_kept() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let response = played(&server, &mut script, &request(json!({})), answer(REPLY)).await;
    let input = response.json()["usage"]["input_tokens"].as_u64().unwrap();
    let output = [THOUGHT, SAID, CALLED].join(",");
    assert_eq!(normalised(&response), body("completed", &output, &usage(input)));
    let path = format!("{RESPONSES}/{}", response.json()["id"].as_str().unwrap());
    assert_eq!(get(server.address, &path).await.body, response.body);
    let cancelled = post(server.address, &format!("{path}/cancel"), json!({})).await;
    assert_eq!(cancelled.status, 400, "{}", cancelled.body);
    let deleted = send(server.address, "DELETE", &path, "application/json", b"").await;
    assert_eq!((deleted.status, &deleted.json()["deleted"]), (200, &json!(true)));
    for (method, path) in [("GET", &path), ("DELETE", &path), ("POST", &format!("{path}/cancel"))] {
        let gone = send(server.address, method, path, "application/json", b"").await;
        assert_eq!((gone.status, &gone.json()["error"]["code"]), (404, &json!("response_not_found")), "{method}");
    }
}

#[tokio::test]
async fn a_stream_is_openais_to_the_byte() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let response = played(&server, &mut script, &request(json!({"stream": true})), answer(REPLY)).await;
    let input = events(&response).last().unwrap()["response"]["usage"]["input_tokens"].as_u64().unwrap();
    let of = |index: u32| format!("\"item_id\":\"ID\",\"output_index\":{index}");
    let at = |index: u32| format!("{},\"content_index\":0", of(index));
    let (thought, text) = (at(0), at(1));
    let begun = |item: &str| item.replace("completed", "in_progress");
    let empty = |item: &str, text: &str| begun(item).replace(text, "");
    let part = r#"{"type":"reasoning_text","text":"Oh"}"#;
    let said = r#"{"type":"output_text","text":"I","annotations":[],"logprobs":[]}"#;
    let item = |index: u32, item: &str| format!("\"output_index\":{index},\"item\":{item}");
    let mut expected = vec![
        ("created", format!("\"response\":{}", body("in_progress", "", "null"))),
        ("in_progress", format!("\"response\":{}", body("in_progress", "", "null"))),
        ("output_item.added", item(0, &empty(THOUGHT, part))),
        ("content_part.added", format!("{thought},\"part\":{}", part.replace("Oh", ""))),
        ("reasoning_text.delta", format!("{thought},\"delta\":\"O\"")),
        ("reasoning_text.delta", format!("{thought},\"delta\":\"h\"")),
        ("reasoning_text.done", format!("{thought},\"text\":\"Oh\"")),
        ("content_part.done", format!("{thought},\"part\":{part}")),
        ("output_item.done", item(0, THOUGHT)),
        ("output_item.added", item(1, &empty(SAID, said))),
        ("content_part.added", format!("{text},\"part\":{}", said.replace('I', ""))),
        ("output_text.delta", format!("{text},\"delta\":\"I\",\"logprobs\":[]")),
        ("output_text.done", format!("{text},\"text\":\"I\",\"logprobs\":[]")),
        ("content_part.done", format!("{text},\"part\":{said}")),
        ("output_item.done", item(1, SAID)),
        ("output_item.added", item(2, &empty(CALLED, r#"{\"a\":1}"#))),
    ];
    for piece in ["{", "\"", "a", "\"", ":", "1", "}"] {
        expected.push(("function_call_arguments.delta", format!("{},\"delta\":{}", of(2), Value::from(piece))));
    }
    let done = format!("{},\"name\":\"f\",\"arguments\":\"{{\\\"a\\\":1}}\"", of(2));
    expected.push(("function_call_arguments.done", done));
    expected.push(("output_item.done", item(2, CALLED)));
    let output = [THOUGHT, SAID, CALLED].join(",");
    expected.push(("completed", format!("\"response\":{}", body("completed", &output, &usage(input)))));
    let event = |(index, (name, fields)): (usize, (&str, String))| {
        let name = format!("response.{name}");
        format!("event: {name}\ndata: {{\"type\":\"{name}\",\"sequence_number\":{index},{fields}}}\n\n")
    };
    let expected: String = expected.into_iter().enumerate().map(event).collect();
    assert_eq!(normalised(&response), expected);
}

#[tokio::test]
async fn a_stream_adds_up_to_the_whole_response() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let cut = &REPLY[..REPLY.find("1}").unwrap()];
    let twice = format!("{REPLY}{}", &REPLY[REPLY.find("<tool_call>").unwrap()..]);
    // So long that other threads write the ends of its parts.
    script.set_context(1 << 14);
    let long = format!(
        "<think>{}</think>{}{}",
        "Oh. ".repeat(1500),
        "I am. ".repeat(1000),
        &twice[twice.find("<tool_call>").unwrap()..]
    );
    for (text, reason, status) in [
        ("", FinishReason::Stop, "completed"),
        ("I am.", FinishReason::Stop, "completed"),
        ("I am", FinishReason::Length, "incomplete"),
        ("<think>So", FinishReason::Length, "incomplete"),
        (REPLY, FinishReason::Stop, "completed"),
        (&twice, FinishReason::Stop, "completed"),
        (&long, FinishReason::Stop, "completed"),
        (&long[..8000], FinishReason::Length, "incomplete"),
        (cut, FinishReason::Length, "incomplete"),
    ] {
        let events_of = || {
            let mut events: Vec<_> = spell(text).into_iter().map(token).collect();
            events.push(SequenceEvent::Finished(reason));
            events
        };
        let whole = played(&server, &mut script, &request(json!({})), events_of()).await;
        let stream = played(&server, &mut script, &request(json!({"stream": true})), events_of()).await;
        let events = events(&stream);
        let last = events.last().unwrap();
        assert_eq!(last["type"], format!("response.{status}"), "{text}");
        // The last event has the response that the whole answer is, and what came before it has its items.
        let mut body = stream.clone();
        body.body = last["response"].to_string();
        assert_eq!(normalised(&body), normalised(&whole), "{text}");
        let done: Vec<_> = events.iter().filter(|event| event["type"] == "response.output_item.done").collect();
        let items: Vec<_> = done.iter().map(|event| event["item"].clone()).collect();
        assert_eq!(last["response"]["output"], json!(items), "{text}");
        for (index, item) in items.iter().enumerate() {
            let of = events.iter().filter(|event| event["output_index"] == index);
            let deltas: String = of.filter_map(|event| event["delta"].as_str()).collect();
            let text = item["arguments"].as_str().or(item["content"][0]["text"].as_str());
            assert_eq!(text, Some(deltas.as_str()), "{item}");
        }
        let path = format!("{RESPONSES}/{}", last["response"]["id"].as_str().unwrap());
        assert_eq!(get(server.address, &path).await.json(), last["response"], "{text}");
    }
}

/// What came before, by its name or as items, against the same chat as OpenAI's other API has it.
#[tokio::test]
async fn a_conversation_goes_on_from_what_was_kept() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let first = played(&server, &mut script, &request(json!({"instructions": "A"})), answer(REPLY)).await.json();
    let call = &first["output"][2]["call_id"];
    let output = json!({"type": "function_call_output", "call_id": call, "output": "2"});
    let by_name = request(json!({"previous_response_id": first["id"], "input": [output], "instructions": "B"}));
    let mut items = vec![json!({"role": "user", "content": [{"type": "input_text", "text": "Hi"}]})];
    items.extend(first["output"].as_array().unwrap().iter().cloned());
    items.push(output.clone());
    let as_items = request(json!({"input": items, "instructions": "B", "store": false}));
    let arguments = json!({"name": "f", "arguments": "{\"a\":1}"});
    let mut tool = request(json!({}))["tools"][0].clone();
    tool.as_object_mut().unwrap().remove("type");
    let chat = json!({
        "messages": [
            {"role": "system", "content": "B"},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "I", "reasoning_content": "Oh",
             "tool_calls": [{"id": call, "type": "function", "function": arguments}]},
            {"role": "tool", "tool_call_id": call, "content": "2"},
        ],
        "tools": [{"type": "function", "function": tool}],
    });
    let mut prompts = Vec::new();
    for (path, body) in [(RESPONSES, &by_name), (RESPONSES, &as_items), ("/v1/chat/completions", &chat)] {
        let answered = async {
            let response = post(server.address, path, body).await;
            assert_eq!(response.status, 200, "{}", response.body);
            response.json()
        };
        let (response, sequence) = tokio::join!(answered, script.play(answer("I")));
        prompts.push(sequence.prompt);
        if body["store"] == false {
            let path = format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
            assert_eq!(get(server.address, &path).await.status, 404);
        }
    }
    assert_eq!(prompts[0], prompts[2]);
    assert_eq!(prompts[1], prompts[2]);
}

/// What vLLM takes here beside OpenAI's, as its bench client sends it.
#[tokio::test]
async fn vllms_ways_to_draw_tokens_reach_the_engine() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let asked = json!({
        "top_k": 40, "min_p": 0.05, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": -0.5, "cache_salt": "mine",
        "repetition_penalty": 1.5, "logit_bias": {"10": -100}, "ignore_eos": true, "stop": ["|"], "stop_token_ids": [9],
    });
    let response = post(server.address, RESPONSES, request(asked));
    let (response, sequence) = tokio::join!(response, script.play(answer("a|b")));
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!(response.json()["output"][0]["content"][0]["text"], "a", "{}", response.body);
    let sampling = sequence.sampling;
    assert_eq!((sampling.top_k, sampling.min_p, sampling.seed), (40, 0.05, 7));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -0.5));
    assert_eq!((sampling.repetition_penalty, sampling.logit_bias), (1.5, vec![(10, -100.0)]));
    assert_eq!((&*sequence.cache_salt, sequence.stop_tokens), ("mine", vec![9]));
}

#[tokio::test]
async fn what_is_refused_is_refused_by_name() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let item = |item: Value| json!({"input": [item]});
    for (fields, param) in [
        (json!({"input": null}), "input"),
        (json!({"input": 1}), "input"),
        (item(json!({"role": "tool", "content": "x"})), "input[0].role"),
        (item(json!({"role": "user", "content": [{"type": "input_image"}]})), "input[0].content[0].type"),
        (item(json!({"type": "item_reference", "id": "x"})), "input[0].type"),
        (item(json!({"type": "function_call_output", "output": "x"})), "input[0].call_id"),
        (item(json!({"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"})), "input[0].arguments"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": "any"}), "tool_choice"),
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"text": {"format": {"type": "xml"}}}), "text.format.type"),
        (json!({"text": {"format": {"type": "json_schema", "name": "x"}}}), "text.format.schema"),
        (json!({"background": true}), "background"),
        (json!({"reasoning": {"effort": "high"}}), "reasoning.effort"),
        (json!({"reasoning": {"summary": "auto"}}), "reasoning.summary"),
        (json!({"text": {"verbosity": "low"}}), "text.verbosity"),
        (json!({"service_tier": "ultra"}), "service_tier"),
        (json!({"max_output_tokens": 0}), "max_output_tokens"),
        (json!({"metadata": 1}), "metadata"),
        (json!({"n": 2}), "n"),
    ] {
        let response = post(server.address, RESPONSES, request(fields.clone())).await;
        let error = &response.json()["error"];
        assert_eq!((response.status, &error["param"]), (400, &json!(param)), "{fields}: {error}");
    }
    let response = post(server.address, RESPONSES, request(json!({"previous_response_id": "resp_1"}))).await;
    let error = &response.json()["error"];
    assert_eq!((response.status, &error["param"]), (404, &json!("previous_response_id")), "{error}");
    script.nothing_more();
}

#[tokio::test]
async fn a_failure_in_a_stream_is_an_event() {
    let (server, mut script) = Server::start_with(options(), text()).await;
    let failed = vec![token(spell("I")[0]), SequenceEvent::Failed("lost".into())];
    let response = played(&server, &mut script, &request(json!({"stream": true})), failed).await;
    let events = events(&response);
    let last = events.last().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.failed"), &json!("failed")), "{last}");
}
