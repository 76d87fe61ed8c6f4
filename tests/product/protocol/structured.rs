//! Answers that are held to a form: valid whatever the model wants to say, the same bits whatever the group, the crowd
//! and the faults, and errors that name what is wrong.

use futures::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::common::{Server, fixture, signal};

async fn server(ranks: &str) -> Server {
    let model = fixture("llama-gqa");
    Server::start(&["--model", model.to_str().expect("the path is UTF-8"), "--tp", ranks]).await
}

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "kind": {"enum": ["cat", "dog"]},
            "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        },
        "required": ["name", "kind", "ages"],
        "additionalProperties": false,
        "x-guidance": {"whitespace_flexible": false},
    })
}

fn schema_request(seed: u64) -> Value {
    json!({
        "messages": [{"role": "user", "content": "Hi"}], "seed": seed, "temperature": 1.3, "logprobs": true,
        "top_logprobs": 2, "max_tokens": 200,
        "response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": schema(), "strict": true}},
    })
}

fn content(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("a text")
}

fn check_pet(text: &str) {
    let pet: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let ages = pet["ages"].as_array().expect("a list");
    assert!(pet["name"].as_str().expect("a text").chars().count() <= 5 && ages.len() <= 3, "{text}");
    assert!(pet["kind"] == "cat" || pet["kind"] == "dog", "{text}");
    assert!(ages.iter().all(|age| age.as_u64().is_some_and(|age| age < 100)), "{text}");
    assert_eq!(pet.as_object().unwrap().len(), 3, "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_keep_to_schemas_with_the_same_bits_on_every_group_and_after_a_death() {
    let mut first: Option<Vec<Value>> = None;
    for ranks in ["1", "2", "4"] {
        let server = server(ranks).await;
        let others = (0..4u64).map(|seed| {
            json!({"messages": [{"role": "user", "content": "Hi"}], "seed": seed, "max_tokens": 60, "logprobs": true})
        });
        let requests: Vec<Value> = (0..6).map(schema_request).chain(others).collect();
        let asked = requests.iter().map(|request| server.ok("/v1/chat/completions", request));
        let killed = async {
            if ranks == "2" {
                tokio::time::sleep(std::time::Duration::from_millis(30)).await;
                signal(server.workers()[1], Signal::KILL);
            }
        };
        let (answers, ()) = tokio::join!(join_all(asked), killed);
        for answer in &answers[..6] {
            assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
            check_pet(content(answer));
        }
        let choices: Vec<Value> = answers.into_iter().map(|mut answer| answer["choices"].take()).collect();
        assert_eq!(first.get_or_insert_with(|| choices.clone()), &choices, "{ranks} ranks");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_to_ask_for_a_form_holds_the_answer_to_it() {
    let server = server("2").await;
    let any = |text: &str| serde_json::from_str::<Value>(text).is_ok_and(|value| value.is_object());
    let digits = |text: &str| text.len() == 7 && text.bytes().all(|byte| byte.is_ascii_digit());
    let chosen = |text: &str| ["red", "dark \"blue\""].contains(&text);
    let nested = |text: &str| {
        let pairs = text.strip_suffix(';').unwrap_or_else(|| panic!("{text}"));
        !pairs.is_empty() && pairs.replace("(())", "").replace("()", "").is_empty()
    };
    let pet = |text: &str| {
        check_pet(text);
        true
    };
    let choices = json!(["red", "dark \"blue\""]);
    let lark = "start: pair{1,9} \";\"\npair: \"()\" | \"(())\"";
    let object = json!({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"],
        "additionalProperties": false});
    for (field, value, holds) in [
        ("response_format", json!({"type": "json_object", "schema": object}), &any as &dyn Fn(&str) -> bool),
        ("response_format", json!({"type": "json_schema", "json_schema": {"name": "pet", "schema": schema()}}), &pet),
        ("structured_outputs", json!({"json": schema()}), &pet),
        ("structured_outputs", json!({"json": schema().to_string()}), &pet),
        ("structured_outputs", json!({"regex": "[0-9]{7}"}), &digits),
        ("structured_outputs", json!({"choice": choices}), &chosen),
        ("structured_outputs", json!({"grammar": lark}), &nested),
        ("guided_json", schema(), &pet),
        ("guided_regex", json!("[0-9]{7}"), &digits),
        ("guided_choice", choices, &chosen),
        ("guided_grammar", json!(lark), &nested),
        ("grammar", json!("root ::= pair{1,9} \";\"\npair ::= \"()\" | \"(\" \"()\" \")\""), &nested),
    ] {
        for temperature in [0, 2] {
            let mut request = json!({"prompt": "x", "temperature": temperature, "seed": 1, "max_tokens": 300});
            request[field] = value.clone();
            let answer = server.ok("/v1/completions", &request).await;
            let text = answer["choices"][0]["text"].as_str().unwrap();
            assert!(holds(text) && answer["choices"][0]["finish_reason"] == "stop", "{field} {value}: {answer}");
        }
    }
    let plain = json!({"prompt": "x", "max_tokens": 3, "response_format": {"type": "text"}});
    assert_eq!(server.ok("/v1/completions", &plain).await["usage"]["completion_tokens"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_held_to_a_form_as_a_whole_answer_is() {
    let server = server("2").await;
    let whole = server.ok("/v1/chat/completions", &schema_request(3)).await;
    let mut stream = server.stream("/v1/chat/completions", &schema_request(3)).await;
    let mut text = String::new();
    while let Some(event) = stream.next().await {
        text += event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
    }
    assert_eq!(text, content(&whole));
}

/// Digits by the form, letters by the tokens: only the worker, who compiles the form, finds out.
#[tokio::test(flavor = "multi_thread")]
async fn a_form_that_contradicts_the_allowed_tokens_is_the_requests_fault() {
    let server = server("1").await;
    let letters = json!({"prompt": "abcdef", "add_special_tokens": false});
    let mut tokens = server.ok("/tokenize", &letters).await["tokens"].clone();
    // Those that end an answer have to be among them.
    tokens.as_array_mut().unwrap().extend([json!(1), json!(4)]);
    let mut request = json!({"prompt": "x", "max_tokens": 9, "guided_regex": "[0-9]{7}", "allowed_token_ids": tokens});
    let (status, answer) = server.post("/v1/completions", &request).await;
    let error = &answer["error"];
    assert_eq!((status, &error["code"]), (400, &json!("no_token_may_follow")), "{answer}");
    assert_eq!(error["type"], "invalid_request_error", "{answer}");
    // What comes after is served.
    request["allowed_token_ids"] = json!(null);
    server.ok("/v1/completions", &request).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn forms_that_cannot_be_are_refused_by_name() {
    let server = server("1").await;
    let of_format = |schema: Value| json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema}});
    for (body, param) in [
        (json!({"response_format": {"type": "yaml"}}), "response_format.type"),
        (json!({"response_format": {}}), "response_format.type"),
        (json!({"response_format": {"type": "json_schema"}}), "response_format.json_schema"),
        (json!({"response_format": of_format(json!({"type": "nonsense"}))}), "response_format.json_schema.schema"),
        (json!({"response_format": of_format(json!(7))}), "response_format.json_schema.schema"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"guided_regex": "a", "guided_json": {}}), "guided_regex"),
        (json!({"guided_choice": []}), "guided_choice"),
        (json!({"structured_outputs": {"choice": ["a", ""]}}), "structured_outputs.choice"),
        (json!({"structured_outputs": {"grammar": "root ::= \"a"}}), "structured_outputs.grammar"),
        (json!({"structured_outputs": {"grammar": "start: undefined"}}), "structured_outputs.grammar"),
        (json!({"structured_outputs": {"what": 1}}), "structured_outputs.what"),
        (json!({"structured_outputs": {"json": "{"}}), "structured_outputs.json"),
        (json!({"guided_regex": "a+", "min_tokens": 3}), "min_tokens"),
        (json!({"guided_regex": "a+", "ignore_eos": true}), "ignore_eos"),
    ] {
        let mut request = body.clone();
        request["prompt"] = json!("x");
        let (status, answer) = server.post("/v1/completions", &request).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{body}: {answer}");
    }
}
