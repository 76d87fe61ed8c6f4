//! What clients get for good requests, byte for byte.

use std::sync::Arc;

use looplane_server::{
    engine::{FinishReason, GeneratedToken, SequenceEvent, Unwanted},
    text::{ChatTemplate, Text},
};
use serde_json::{Value, json};

use crate::{
    Server,
    client::{post, read},
    engine::{answer, prompt, token},
    fixture, options, spell,
};

const CHAT: &str = "/v1/chat/completions";
const COMPLETION: &str = "/v1/completions";

fn chat(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn completion(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "prompt": "Hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// The `data:` payloads of a stream, the last of which must be [DONE].
fn events(body: &str) -> Vec<Value> {
    let mut payloads: Vec<&str> = body.split_terminator("\n\n").map(|event| &event["data: ".len()..]).collect();
    assert_eq!(payloads.pop(), Some("[DONE]"), "{body}");
    payloads.into_iter().map(|payload| serde_json::from_str(payload).unwrap()).collect()
}

#[tokio::test]
async fn a_streamed_chat_is_openais_to_the_byte() {
    let (server, mut script) = Server::start(options()).await;
    let request = chat(json!({"stream": true, "stream_options": {"include_usage": true}, "seed": 7}));
    let events = [vec![prompt(4, Vec::new())], answer("Hé!")].concat();
    let (response, sequence) = tokio::join!(post(server.address, CHAT, &request), script.play(events));
    assert_eq!(response.status, 200);
    assert_eq!(response.header("content-type"), Some("text/event-stream"));
    assert_eq!(response.header("cache-control"), Some("no-cache"));
    assert_eq!(response.header("x-accel-buffering"), Some("no"));
    assert_eq!(response.header("x-looplane-seed"), Some("7"));
    assert_eq!(sequence.sampling.seed, 7);
    let start = concat!(
        r#"data: {"id":"ID","object":"chat.completion.chunk","created":0,"model":"tiny","#,
        r#""system_fingerprint":"cpu-test","choices":["#
    );
    let delta = |delta: &str| {
        format!(
            "{start}{{\"index\":0,\"delta\":{delta},\"logprobs\":null,\"finish_reason\":null}}],\"usage\":null}}\n\n"
        )
    };
    let prompt_tokens = sequence.prompt.len();
    let expected = [
        delta(r#"{"role":"assistant","content":""}"#),
        delta(r#"{"content":"H"}"#),
        delta(r#"{"content":"é"}"#),
        delta(r#"{"content":"!"}"#),
        format!(
            "{start}{{\"index\":0,\"delta\":{{}},\"logprobs\":null,\"finish_reason\":\"stop\"}}],\"usage\":null}}\n\n"
        ),
        format!(
            "{start}],\"usage\":{{\"prompt_tokens\":{prompt_tokens},\"completion_tokens\":5,\
             \"total_tokens\":{},\"prompt_tokens_details\":{{\"cached_tokens\":4}}}}}}\n\n",
            prompt_tokens + 5
        ),
        "data: [DONE]\n\n".into(),
    ];
    assert_eq!(response.normalised(), expected.concat());
}

#[tokio::test]
async fn without_usage_a_stream_has_no_usage_field() {
    let (server, mut script) = Server::start(options()).await;
    let request = completion(json!({"stream": true}));
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("ok")));
    let start = concat!(
        r#"data: {"id":"ID","object":"text_completion","created":0,"model":"tiny","#,
        r#""system_fingerprint":"cpu-test","choices":["#
    );
    let expected = format!(
        "{start}{{\"text\":\"o\",\"index\":0,\"logprobs\":null,\"finish_reason\":null}}]}}\n\n\
         {start}{{\"text\":\"k\",\"index\":0,\"logprobs\":null,\"finish_reason\":null}}]}}\n\n\
         {start}{{\"text\":\"\",\"index\":0,\"logprobs\":null,\"finish_reason\":\"stop\"}}]}}\n\n\
         data: [DONE]\n\n"
    );
    assert_eq!(response.normalised(), expected);
    assert!(response.body.contains(r#""id":"cmpl-"#));
}

#[tokio::test]
async fn whole_responses_are_openais_to_the_byte() {
    let (server, mut script) = Server::start(options()).await;
    let (response, sequence) =
        tokio::join!(post(server.address, CHAT, chat(json!({"max_completion_tokens": 2}))), async {
            let mut events: Vec<_> = spell("no").into_iter().map(token).collect();
            events.push(SequenceEvent::Finished(FinishReason::Length));
            script.play(events).await
        });
    assert_eq!((response.status, sequence.max_tokens), (200, 2));
    let prompt = sequence.prompt.len();
    let expected = format!(
        "{{\"id\":\"ID\",\"object\":\"chat.completion\",\"created\":0,\"model\":\"tiny\",\
         \"system_fingerprint\":\"cpu-test\",\"choices\":[{{\"index\":0,\"message\":{{\"role\":\"assistant\",\
         \"content\":\"no\",\"refusal\":null}},\"logprobs\":null,\"finish_reason\":\"length\"}}],\
         \"usage\":{{\"prompt_tokens\":{prompt},\"completion_tokens\":2,\"total_tokens\":{},\
         \"prompt_tokens_details\":{{\"cached_tokens\":0}}}}}}",
        prompt + 2
    );
    assert_eq!(response.normalised(), expected);
    assert_eq!(response.header("content-length"), Some(response.body.len().to_string().as_str()));
    assert!(response.body.contains(r#""id":"chatcmpl-"#));

    let (response, sequence) = tokio::join!(
        post(server.address, COMPLETION, completion(json!({"prompt": [5, 6, 7]}))),
        script.play(answer("yes"))
    );
    assert_eq!(sequence.prompt, [5, 6, 7]);
    let expected = "{\"id\":\"ID\",\"object\":\"text_completion\",\"created\":0,\"model\":\"tiny\",\
        \"system_fingerprint\":\"cpu-test\",\"choices\":[{\"text\":\"yes\",\"index\":0,\"logprobs\":null,\
        \"finish_reason\":\"stop\"}],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":4,\"total_tokens\":7,\
        \"prompt_tokens_details\":{\"cached_tokens\":0}}}";
    assert_eq!(response.normalised(), expected);
}

#[tokio::test]
async fn every_parameter_reaches_the_engine() {
    let (server, mut script) = Server::start(options()).await;
    let request = chat(json!({
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_k": 40, "top_p": 0.9, "min_p": 0.05, "seed": -1,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.5,
        "logit_bias": {"20": 5, "10": -100}, "logprobs": true, "top_logprobs": 3, "ignore_eos": true, "user": "u",
        "metadata": {"a": "b"}, "tools": [], "response_format": {"type": "text"}, "n": 1, "stop": null, "store": false,
    }));
    let (response, sequence) = tokio::join!(post(server.address, CHAT, &request), script.play(answer("x")));
    assert_eq!(response.status, 200, "{}", response.body);
    assert_eq!((sequence.max_tokens, sequence.min_tokens, sequence.logprobs), (9, 2, Some(3)));
    assert!(sequence.stop_tokens.is_empty());
    let sampling = sequence.sampling;
    assert_eq!((sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p), (0.5, 40, 0.9, 0.05));
    assert_eq!(sampling.seed, u64::MAX);
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (0.5, -0.5));
    assert_eq!((sampling.repetition_penalty, sampling.logit_bias), (1.5, vec![(10, -100.0), (20, 5.0)]));
}

#[tokio::test]
async fn text_parts_are_one_text_and_a_chat_has_one_begin_token() {
    let (server, mut script) = Server::start(options()).await;
    let parts = json!([{"role": "developer", "content": "a"}, {"role": "user", "content": [
        {"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]);
    let plain = json!([{"role": "system", "content": "a"}, {"role": "user", "content": "Hi"}]);
    let mut prompts = Vec::new();
    for messages in [parts, plain] {
        let request = chat(json!({"messages": messages}));
        let (response, sequence) = tokio::join!(post(server.address, CHAT, &request), script.play(answer("x")));
        assert_eq!(response.status, 200, "{}", response.body);
        prompts.push(sequence.prompt);
    }
    assert_eq!(prompts[0], prompts[1]);
    assert_eq!(prompts[0].iter().filter(|id| **id == 0).count(), 1);
}

#[tokio::test]
async fn levels_and_documents_reach_a_template_that_knows_them() {
    let source = "{{ reasoning_effort }} {{ verbosity or '-' }}{% for d in documents or [] %} [{{ d.title }}]\
                  {% endfor %}{% for m in messages %} {{ m.content }}{% endfor %}";
    let template = Some(ChatTemplate::new(source, "", "").unwrap());
    let loaded = Text { template, ..Text::load(&fixture()).unwrap() };
    let tokenizer = loaded.tokenizer.clone();
    let (server, mut script) = Server::start_with(options(), Arc::new(loaded)).await;
    for (path, body, prompt) in [
        (CHAT, chat(json!({"reasoning_effort": "high", "documents": [{"title": "A"}]})), "high - [A] Hi"),
        (CHAT, chat(json!({"reasoning_effort": "none", "verbosity": "low"})), "none low Hi"),
        (CHAT, chat(json!({"chat_template_kwargs": {"reasoning_effort": "high"}, "documents": []})), "high - Hi"),
        (
            "/v1/responses",
            json!({"input": "Hi", "reasoning": {"effort": "low"}, "text": {"verbosity": "high"}}),
            "low high Hi",
        ),
    ] {
        let (response, sequence) = tokio::join!(post(server.address, path, &body), script.play(answer("x")));
        assert_eq!(response.status, 200, "{}", response.body);
        assert_eq!(tokenizer.decode(&sequence.prompt, true).unwrap(), prompt, "{body}");
    }
    let both = chat(json!({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}));
    let response = post(server.address, CHAT, both).await;
    assert_eq!((response.status, &response.json()["error"]["param"]), (400, &json!("reasoning_effort")));
}

#[tokio::test]
async fn ids_of_long_prompts_are_told_as_those_of_short_ones() {
    let (server, mut script) = Server::start(options()).await;
    script.set_context(1 << 14);
    let prompt: Vec<u32> = (0..5000).map(|index| 5 + index % 7).collect();
    for stream in [true, false] {
        let request = json!({"prompt": prompt, "n": 2, "return_token_ids": true, "stream": stream, "max_tokens": 2});
        let play = async { (script.play(answer("x")).await, script.play(answer("y")).await) };
        let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), play);
        assert_eq!(response.status, 200, "{}", response.body);
        let tells = |choice: &Value| choice["prompt_token_ids"].is_array();
        let choices: Vec<Value> = match stream {
            true => events(&response.body).iter().map(|event| event["choices"][0].clone()).filter(tells).collect(),
            false => response.json()["choices"].as_array().unwrap().clone(),
        };
        assert_eq!(choices.len(), 2);
        assert!(choices.iter().all(|choice| choice["prompt_token_ids"] == json!(prompt)));
    }
}

#[tokio::test]
async fn answers_name_the_tier_that_they_were_served_at_where_one_is_asked_for() {
    let (server, mut script) = Server::start(options()).await;
    let responses = "/v1/responses";
    for (path, body) in
        [(CHAT, chat(json!({}))), (COMPLETION, completion(json!({}))), (responses, json!({"input": "Hi"}))]
    {
        for (tier, told) in [("auto", "default"), ("flex", "default"), ("priority", "default")] {
            for stream in [false, true] {
                let mut body = body.clone();
                (body["service_tier"], body["stream"]) = (json!(tier), json!(stream));
                let (response, _) = tokio::join!(post(server.address, path, &body), script.play(answer("x")));
                assert_eq!(response.status, 200, "{}", response.body);
                match (stream, path) {
                    (false, _) => assert_eq!(response.json()["service_tier"], told),
                    (true, "/v1/responses") => assert!(response.body.contains("\"service_tier\":\"default\"")),
                    (true, _) => assert!(events(&response.body).iter().all(|event| event["service_tier"] == told)),
                }
            }
        }
        let (response, _) = tokio::join!(post(server.address, path, &body), script.play(answer("x")));
        assert!(!response.body.contains("service_tier"), "{}", response.body);
    }
}

#[tokio::test]
async fn a_text_begins_with_its_begin_token_unless_the_client_says_no() {
    let (server, mut script) = Server::start(options()).await;
    let mut prompts = Vec::new();
    for extra in [json!({}), json!({"add_special_tokens": true}), json!({"add_special_tokens": false})] {
        let request = completion(extra);
        let (response, sequence) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
        assert_eq!(response.status, 200, "{}", response.body);
        prompts.push(sequence.prompt);
    }
    assert_eq!((prompts[0][0], &prompts[0]), (0, &prompts[1]));
    assert_eq!(prompts[0][1..], prompts[2]);
    let asks = chat(json!({"add_special_tokens": false, "spaces_between_special_tokens": false}));
    let (response, _) = tokio::join!(post(server.address, CHAT, asks), script.play(answer("x")));
    assert_eq!(response.status, 200, "{}", response.body);
}

#[tokio::test]
async fn characters_split_over_tokens_arrive_whole() {
    let (server, mut script) = Server::start(options()).await;
    let said = "👩‍🚀 naïve 日本";
    let (response, _) =
        tokio::join!(post(server.address, CHAT, chat(json!({"stream": true}))), script.play(answer(said)));
    let pieces: Vec<String> = events(&response.body)
        .iter()
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(pieces.concat(), said);
    assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')), "{pieces:?}");
}

#[tokio::test]
async fn a_stop_text_across_tokens_ends_the_output_and_the_sequence() {
    let (server, mut script) = Server::start(options()).await;
    for stream in [true, false] {
        let request = chat(json!({"stream": stream, "stop": ["<END>", "never"]}));
        let client = tokio::spawn(async move { post(server.address, CHAT, &request).await });
        let sequence = script.accept().await;
        for id in spell("one <E<END> two") {
            sequence.send(token(id)).await;
        }
        let response = client.await.unwrap();
        let (text, finish) = if stream {
            let events = events(&response.body);
            let text: String = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
            (text, events.last().unwrap()["choices"][0]["finish_reason"].clone())
        } else {
            let json = response.json();
            assert_eq!(json["usage"]["completion_tokens"], 11, "up to the end of the stop text");
            let choice = &json["choices"][0];
            (choice["message"]["content"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
        };
        assert_eq!((text.as_str(), finish), ("one <E", json!("stop")));
        assert_eq!(script.unwanted().await, (sequence.id, Unwanted::Complete), "nobody wants the rest");
    }
}

#[tokio::test]
async fn a_stop_text_ends_its_choice_while_those_before_it_go_on() {
    let (server, mut script) = Server::start(options()).await;
    for stream in [true, false] {
        let request = completion(json!({"stream": stream, "n": 2, "stop": "<END>"}));
        let client = tokio::spawn(async move { post(server.address, COMPLETION, &request).await });
        let (first, second) = (script.accept().await, script.accept().await);
        first.send(token(spell("a")[0])).await;
        for id in spell("b<END>") {
            second.send(token(id)).await;
        }
        assert_eq!(script.unwanted().await, (second.id, Unwanted::Complete), "though the first has not ended");
        for event in answer("c") {
            first.send(event).await;
        }
        let response = client.await.unwrap();
        if !stream {
            let json = response.json();
            let choices = [0, 1].map(|index| (&json["choices"][index]["index"], &json["choices"][index]["text"]));
            assert_eq!(choices, [(&json!(0), &json!("ac")), (&json!(1), &json!("b"))]);
            assert_eq!(json["usage"]["completion_tokens"], 3 + 6);
        }
    }
}

#[tokio::test]
async fn choices_stream_side_by_side_with_their_index_and_seed() {
    let (server, mut script) = Server::start(options()).await;
    let request = chat(json!({"stream": true, "n": 2, "seed": 5}));
    let client = tokio::spawn(async move { post(server.address, CHAT, &request).await });
    let (first, second) = (script.accept().await, script.accept().await);
    assert_eq!(first.request.sampling.seed, 5);
    assert_ne!(second.request.sampling.seed, 5);
    for event in answer("bb") {
        second.send(event).await;
    }
    for event in answer("a") {
        first.send(event).await;
    }
    let events = events(&client.await.unwrap().body);
    let of = |index: u64| -> Vec<&Value> {
        events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index).collect()
    };
    for (index, text) in [(0, "a"), (1, "bb")] {
        let chunks = of(index);
        assert_eq!(chunks[0]["delta"], json!({"role": "assistant", "content": ""}));
        let content: String = chunks.iter().filter_map(|chunk| chunk["delta"]["content"].as_str()).collect();
        assert_eq!(content, text);
        assert_eq!(chunks.last().unwrap()["finish_reason"], "stop");
        assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk.get("finish_reason") == Some(&Value::Null)));
    }
}

#[tokio::test]
async fn a_list_of_prompts_has_a_choice_for_each() {
    let (server, mut script) = Server::start(options()).await;
    let request = completion(json!({"prompt": ["one", "two"], "n": 2, "seed": 3}));
    let client = tokio::spawn(async move { post(server.address, COMPLETION, &request).await });
    let mut seeds = Vec::new();
    for text in ["a", "b", "c", "d"] {
        seeds.push(script.play(answer(text)).await.sampling.seed);
    }
    assert_eq!((seeds[0], seeds[1]), (seeds[2], seeds[3]), "a prompt gives the same alone or in a list");
    let json = client.await.unwrap().json();
    let texts: Vec<&Value> = json["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["a", "b", "c", "d"]);
    assert_eq!(json["choices"][3]["index"], 3);
    assert_eq!(json["usage"]["completion_tokens"], 8);
}

/// The ids in the choice of each event or response.
fn ids(choice: &Value) -> Vec<u64> {
    choice["token_ids"].as_array().expect("ids are told").iter().map(|id| id.as_u64().unwrap()).collect()
}

#[tokio::test]
async fn ids_are_told_of_every_token_whatever_becomes_of_its_text() {
    let (server, mut script) = Server::start(options()).await;
    let (held, crab) = (spell("x<EN"), spell("🦀"));
    let cut = [held.clone(), spell("D>")].concat();
    for (path, tokens, reason) in [
        (CHAT, [held.clone(), crab.clone(), vec![4]].concat(), FinishReason::Stop),
        (CHAT, cut.clone(), FinishReason::Length),
        (COMPLETION, cut.clone(), FinishReason::Length),
        (COMPLETION, [held, crab[..2].to_vec()].concat(), FinishReason::Length),
    ] {
        for stream in [false, true] {
            let extra = json!({"return_token_ids": true, "stream": stream, "stop": "<END>"});
            let mut request = if path == CHAT { chat(extra) } else { completion(extra) };
            if stream {
                request["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
            }
            let mut played: Vec<_> = tokens.iter().copied().map(token).collect();
            played.push(SequenceEvent::Finished(reason));
            let (response, sequence) = tokio::join!(post(server.address, path, &request), script.play(played));
            if tokens == cut {
                script.unwanted().await;
            }
            let expected: Vec<u64> = tokens.iter().map(|id| u64::from(*id)).collect();
            if !stream {
                let json = response.json();
                assert_eq!(ids(&json["choices"][0]), expected);
                assert_eq!(json["usage"]["completion_tokens"], expected.len());
                let told = if path == CHAT { &json } else { &json["choices"][0] };
                assert_eq!(told["prompt_token_ids"], json!(sequence.prompt));
                continue;
            }
            let mut events = events(&response.body);
            assert_eq!(events.pop().unwrap()["usage"]["completion_tokens"], expected.len());
            let first = if path == CHAT { &events[0] } else { &events[0]["choices"][0] };
            assert_eq!(first["prompt_token_ids"], json!(sequence.prompt));
            let mut told = Vec::new();
            for event in &events {
                told.extend(ids(&event["choices"][0]));
                assert_eq!(event["usage"]["completion_tokens"], told.len(), "what was told so far is what was used");
            }
            assert_eq!(told, expected);
            assert_eq!(response.body.matches("prompt_token_ids").count(), 1);
        }
    }
}

#[tokio::test]
async fn choices_tell_of_the_ids_of_their_own_prompts() {
    let (server, mut script) = Server::start(options()).await;
    for stream in [false, true] {
        let mut request = completion(json!({"prompt": [[5, 6], [7]], "n": 2, "return_token_ids": true}));
        if stream {
            request["stream"] = json!(true);
            request["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
        }
        let client = tokio::spawn(async move { post(server.address, COMPLETION, &request).await });
        for text in ["a", "b", "c", "d"] {
            script.play(answer(text)).await;
        }
        let response = client.await.unwrap();
        let of = |index: u64| match stream {
            true => {
                let of_choice = |event: &&Value| event["choices"][0]["index"] == index;
                let event = events(&response.body).iter().find(of_choice).unwrap().clone();
                assert_eq!(event["usage"]["prompt_tokens"], 2 - index / 2, "those of the choice's own prompt");
                event["choices"][0].clone()
            }
            false => response.json()["choices"][index as usize].clone(),
        };
        for (index, prompt) in [(0, json!([5, 6])), (1, json!([5, 6])), (2, json!([7])), (3, json!([7]))] {
            assert_eq!(of(index)["prompt_token_ids"], prompt);
        }
    }
}

#[tokio::test]
async fn ids_are_not_told_unasked_and_have_no_part_in_an_echo() {
    let (server, mut script) = Server::start(options()).await;
    let (response, _) = tokio::join!(post(server.address, COMPLETION, completion(json!({}))), script.play(answer("a")));
    assert!(!response.body.contains("token_ids"), "{}", response.body);
    let request = completion(json!({"echo": true, "return_token_ids": true, "prompt": [5, 6]}));
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("a")));
    assert_eq!(ids(&response.json()["choices"][0]), [u64::from(spell("a")[0]), 4]);
}

fn with_logprobs(text: &str) -> Vec<SequenceEvent> {
    let ids = spell(text);
    let other = spell("z")[0];
    let mut events: Vec<_> = ids
        .into_iter()
        .enumerate()
        .map(|(index, id)| {
            let logprob = -0.5 - index as f32;
            let top = vec![(id, logprob), (other, f32::NEG_INFINITY)];
            SequenceEvent::Token(GeneratedToken { id, logprob: Some(logprob), top })
        })
        .collect();
    events.push(SequenceEvent::Finished(FinishReason::Length));
    events
}

#[tokio::test]
async fn chat_logprobs_have_openais_shape_and_stay_with_their_text() {
    let (server, mut script) = Server::start(options()).await;
    let wanted = json!({"logprobs": true, "top_logprobs": 2});
    let (response, _) = tokio::join!(post(server.address, CHAT, chat(wanted)), script.play(with_logprobs("aé")));
    let z = json!({"token": "z", "logprob": -9999.0, "bytes": [122]});
    let entry = |token: &str, logprob: f64, bytes: Value| {
        json!({"token": token, "logprob": logprob, "bytes": bytes, "top_logprobs": [
            {"token": token, "logprob": logprob, "bytes": bytes}, z]})
    };
    let expected = json!([
        entry("a", -0.5, json!([97])),
        entry("bytes:\\xc3", -1.5, json!([0xc3])),
        entry("bytes:\\xa9", -2.5, json!([0xa9])),
    ]);
    assert_eq!(response.json()["choices"][0]["logprobs"], json!({"content": expected, "refusal": null}));

    let wanted = json!({"logprobs": true, "top_logprobs": 2, "stream": true});
    let (response, _) = tokio::join!(post(server.address, CHAT, chat(wanted)), script.play(with_logprobs("aé")));
    let chunks: Vec<(Value, usize)> = events(&response.body)
        .iter()
        .map(|event| &event["choices"][0])
        .filter(|choice| !choice["logprobs"].is_null())
        .map(|choice| (choice["delta"]["content"].clone(), choice["logprobs"]["content"].as_array().unwrap().len()))
        .collect();
    assert_eq!(chunks, [(json!("a"), 1), (json!("é"), 2)]);
}

#[tokio::test]
async fn completion_logprobs_have_openais_shape() {
    let (server, mut script) = Server::start(options()).await;
    let request = completion(json!({"logprobs": 2}));
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(with_logprobs("éa")));
    let expected = json!({
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "a"],
        "token_logprobs": [-0.5, -1.5, -2.5],
        "top_logprobs": [
            {"bytes:\\xc3": -0.5, "z": -9999.0}, {"bytes:\\xa9": -1.5, "z": -9999.0}, {"a": -2.5, "z": -9999.0}],
        "text_offset": [0, 0, 1],
    });
    assert_eq!(response.json()["choices"][0]["logprobs"], expected);
    let request = completion(json!({"logprobs": 0}));
    let (response, sequence) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(sequence.logprobs, Some(0));
    assert_eq!(response.json()["choices"][0]["logprobs"]["top_logprobs"], Value::Null);
}

#[tokio::test]
async fn a_logprob_is_a_number_whatever_the_logits_were() {
    let (server, mut script) = Server::start(options()).await;
    for logprob in [f32::NEG_INFINITY, f32::INFINITY, f32::NAN] {
        let id = spell("x")[0];
        let played = || {
            let token = GeneratedToken { id, logprob: Some(logprob), top: vec![(id, logprob)] };
            vec![SequenceEvent::Token(token), SequenceEvent::Finished(FinishReason::Length)]
        };
        let request = completion(json!({"logprobs": 1}));
        let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(played()));
        let logprobs = &response.json()["choices"][0]["logprobs"];
        assert_eq!(logprobs["token_logprobs"], json!([-9999.0]));
        assert_eq!(logprobs["top_logprobs"], json!([{"x": -9999.0}]));
        let request = chat(json!({"logprobs": true, "top_logprobs": 1}));
        let (response, _) = tokio::join!(post(server.address, CHAT, request), script.play(played()));
        let token = &response.json()["choices"][0]["logprobs"]["content"][0];
        assert_eq!((&token["logprob"], &token["top_logprobs"][0]["logprob"]), (&json!(-9999.0), &json!(-9999.0)));
    }
}

#[tokio::test]
async fn an_error_in_the_middle_is_an_event_and_no_done_follows() {
    let (server, mut script) = Server::start(options()).await;
    let failing = || vec![token(spell("x")[0]), SequenceEvent::Failed("rank 1 was lost three times".into())];
    let (response, _) = tokio::join!(post(server.address, CHAT, chat(json!({"stream": true}))), script.play(failing()));
    assert_eq!(response.status, 200);
    assert!(!response.body.contains("[DONE]"));
    let last = response.body.trim_end().rsplit("data: ").next().unwrap();
    let error: Value = serde_json::from_str(last).unwrap();
    assert_eq!(error["error"]["code"], "generation_failed");
    assert!(error["error"]["message"].as_str().unwrap().contains("rank 1 was lost"));

    let (response, _) = tokio::join!(post(server.address, CHAT, chat(json!({}))), script.play(failing()));
    assert_eq!((response.status, response.json()["error"]["type"].clone()), (500, json!("server_error")));
}

#[tokio::test]
async fn many_streams_at_once_keep_their_own_text() {
    let (server, mut script) = Server::start(options()).await;
    let clients: Vec<_> = (0..24)
        .map(|number| {
            let body = completion(json!({"prompt": [5 + number], "stream": true})).to_string();
            tokio::spawn(async move { read(crate::client::open(server.address, COMPLETION, &body).await).await })
        })
        .collect();
    let mut sequences = Vec::new();
    for _ in 0..24 {
        sequences.push(script.accept().await);
    }
    for position in 0..4 {
        for sequence in &sequences {
            let text = format!("{:03}.", sequence.request.prompt[0]);
            sequence.send(token(spell(&text)[position])).await;
        }
    }
    for sequence in &sequences {
        sequence.send(SequenceEvent::Finished(FinishReason::Length)).await;
    }
    for (number, client) in clients.into_iter().enumerate() {
        let body = client.await.unwrap().body;
        let text: String = events(&body).iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, format!("{:03}.", number + 5));
    }
}
