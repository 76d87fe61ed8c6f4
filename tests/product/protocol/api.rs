//! What clients of other servers ask of this one: tokens and text, versions, usage in every chunk, fields that change
//! nothing.

use serde_json::{Value, json};

use crate::common::{Server, fixture};

async fn server() -> Server {
    let model = fixture("llama-gqa");
    Server::start(&["--model", model.to_str().expect("the path is UTF-8"), "--tp", "2"]).await
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_become_tokens_and_tokens_texts() {
    let server = server().await;
    let (status, models) = server.get("/v1/models").await;
    assert_eq!(status, 200);
    let longest = models["data"][0]["max_model_len"].as_u64().expect("the model has loaded");
    let text = "Hi, you <|eot_id|> there";
    let with = server.ok("/tokenize", &json!({"prompt": text, "return_token_strs": true})).await;
    let without = server.ok("/tokenize", &json!({"prompt": text, "add_special_tokens": false})).await;
    let tokens = |answer: &Value| answer["tokens"].as_array().unwrap().clone();
    assert_eq!(with["count"], tokens(&with).len());
    assert_eq!(with["max_model_len"], longest);
    assert_eq!(with["token_strs"].as_array().unwrap().len(), tokens(&with).len());
    assert!(tokens(&with).ends_with(&tokens(&without)), "{with} {without}");
    let back = server.ok("/detokenize", &json!({"tokens": tokens(&without)})).await;
    assert_eq!(back, json!({"prompt": text}));
    // What a chat becomes is what a completion of these tokens goes on from.
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let chat = server.ok("/tokenize", &json!({"messages": messages})).await;
    let answer =
        server.ok("/v1/chat/completions", &json!({"messages": messages, "max_tokens": 5, "temperature": 0})).await;
    let of_tokens = json!({"prompt": tokens(&chat), "max_tokens": 5, "temperature": 0});
    let completion = server.ok("/v1/completions", &of_tokens).await;
    assert_eq!(answer["usage"]["prompt_tokens"], chat["count"]);
    assert_eq!(answer["choices"][0]["message"]["content"].as_str(), completion["choices"][0]["text"].as_str());
    let shorter = server.ok("/tokenize", &json!({"messages": messages, "add_generation_prompt": false})).await;
    assert!(tokens(&chat).starts_with(&tokens(&shorter)) && tokens(&shorter).len() < tokens(&chat).len());
    for (path, body, param) in [
        ("/tokenize", json!({"prompt": 7}), "prompt"),
        ("/tokenize", json!({}), "messages"),
        ("/tokenize", json!({"prompt": "a", "what": 1}), "what"),
        ("/tokenize", json!({"messages": messages, "add_special_tokens": true}), "add_special_tokens"),
        ("/detokenize", json!({"tokens": [1, 99_999]}), "tokens"),
        ("/detokenize", json!({"tokens": ["a"]}), "tokens[0]"),
        ("/detokenize", json!({}), "tokens"),
    ] {
        let (status, answer) = server.post(path, &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{path} {body}: {answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_versions_have_the_names_that_tools_ask_for() {
    let server = server().await;
    for path in ["/health", "/ping", "/health/ready", "/health/live"] {
        assert_eq!(server.get(path).await.0, 200, "{path}");
    }
    assert_eq!(server.get("/version").await.1, json!({"version": env!("CARGO_PKG_VERSION")}));
    let (status, answer) = server.post("/v1/embeddings", &json!({"input": "a"})).await;
    assert_eq!(status, 501);
    assert!(answer["error"]["message"].as_str().unwrap().contains("embeddings"), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_chunk_tells_its_usage_where_that_is_asked_for() {
    let server = server().await;
    for (path, input) in [
        ("/v1/completions", json!({"prompt": [9, 10, 11]})),
        ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})),
    ] {
        let mut body = json!({
            "max_tokens": 12, "ignore_eos": true, "temperature": 0,
            "stream_options": {"include_usage": true, "continuous_usage_stats": true},
        });
        body.as_object_mut().unwrap().extend(input.as_object().unwrap().clone());
        let mut stream = server.stream(path, &body).await;
        let mut used = Vec::new();
        while let Some(event) = stream.next().await {
            let of = |name: &str| event["usage"][name].as_u64().unwrap_or_else(|| panic!("no {name} in {event}"));
            assert_eq!(of("total_tokens"), of("prompt_tokens") + of("completion_tokens"));
            used.push(of("completion_tokens"));
        }
        assert!(used.is_sorted() && used.len() > 2, "{used:?}");
        assert_eq!(used.last(), Some(&12));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fields_that_ask_for_nothing_are_taken_and_others_refused_by_name() {
    let server = server().await;
    let neutral = json!({
        "prompt": "Hi", "max_tokens": 2, "n": 2, "best_of": 2, "echo": false, "suffix": "", "guided_json": null,
        "guided_regex": null, "structured_outputs": null, "prompt_logprobs": null, "skip_special_tokens": true,
        "spaces_between_special_tokens": true, "include_stop_str_in_output": false, "use_beam_search": false,
        "length_penalty": 1.0, "truncate_prompt_tokens": null, "return_token_ids": false, "priority": 0,
        "allowed_token_ids": null, "bad_words": [], "stop_token_ids": [], "vllm_xargs": {}, "user": "me",
    });
    assert_eq!(server.ok("/v1/completions", &neutral).await["choices"].as_array().unwrap().len(), 2);
    for (field, value) in [
        ("best_of", json!(3)),
        ("echo", json!(1)),
        ("prompt_logprobs", json!(21)),
        ("priority", json!(101)),
        ("length_penalty", json!(2)),
        ("skip_special_tokens", json!("no")),
    ] {
        let (status, answer) = server.post("/v1/completions", &json!({"prompt": "Hi", field: value})).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_that_does_not_say_how_long_has_sixteen_tokens() {
    let server = server().await;
    let request = json!({"prompt": [9, 10, 11], "ignore_eos": true, "temperature": 0});
    let answer = server.ok("/v1/completions", &request).await;
    assert_eq!(answer["usage"]["completion_tokens"], 16);
    // Always the same token, which ends the answer where it is named.
    let mut stopped = request;
    stopped["logit_bias"] = json!({"300": 100});
    assert_eq!(server.ok("/v1/completions", &stopped).await["choices"][0]["finish_reason"], "length");
    stopped["stop_token_ids"] = json!([299, 300]);
    let answer = server.ok("/v1/completions", &stopped).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
    assert_eq!(answer["usage"]["completion_tokens"], 1);
    assert_eq!(answer["choices"][0]["text"], "");
    stopped["stop_token_ids"] = json!([1_000_000]);
    let (status, answer) = server.post("/v1/completions", &stopped).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("stop_token_ids")), "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_of_stops_prompts_and_tokens_is_done() {
    let server = server().await;
    // Always the same token, whose text ends the answer.
    let request = json!({"prompt": [9, 10, 11, 12], "max_tokens": 8, "temperature": 0, "logit_bias": {"300": 100}});
    let with = |fields: Value| {
        let mut request = request.clone();
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        request
    };
    let whole = server.ok("/v1/completions", &request).await["choices"][0]["text"].as_str().unwrap().to_owned();
    let token = &whole[..whole.len() / 8];
    for (fields, times) in [
        (json!({"stop": token}), 0),
        (json!({"stop": token, "include_stop_str_in_output": true}), 1),
        (json!({"stop": token, "min_tokens": 3}), 3),
        (json!({"stop": token, "min_tokens": 3, "include_stop_str_in_output": true}), 4),
    ] {
        let answer = server.ok("/v1/completions", &with(fields.clone())).await;
        assert_eq!(answer["choices"][0]["text"], token.repeat(times), "{fields}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{fields}");
    }
    let answer = server.ok("/v1/completions", &with(json!({"truncate_prompt_tokens": 3}))).await;
    assert_eq!(answer["usage"]["prompt_tokens"], 3);
    let ids = json!({"logprobs": 1, "return_tokens_as_token_ids": true});
    let answer = server.ok("/v1/completions", &with(ids)).await;
    assert_eq!(answer["choices"][0]["logprobs"]["tokens"][0], "token_id:300", "{answer}");
    for (field, value) in [("truncate_prompt_tokens", json!(0)), ("truncate_prompt_tokens", json!(1_u64 << 40))] {
        let (status, answer) = server.post("/v1/completions", &with(json!({field: value}))).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(field)), "{answer}");
    }
}

/// The model's own template knows nothing of them, but the server passes them on.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_goes_on_from_its_last_message() {
    let server = server().await;
    let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "I said Hi and"}]);
    let count = async |fields: Value| {
        let mut request = json!({"messages": messages, "return_token_strs": true});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let answer = server.ok("/tokenize", &request).await;
        answer["token_strs"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect::<String>()
    };
    let goes_on = count(json!({"continue_final_message": true})).await;
    assert!(goes_on.ends_with("I said Hi and"), "{goes_on}");
    let closed = count(json!({"add_generation_prompt": false})).await;
    assert!(closed.starts_with(&goes_on) && closed.len() > goes_on.len(), "{closed}");
    assert_eq!(count(json!({"chat_template_kwargs": {"enable_thinking": false}})).await, count(json!({})).await);
    let both = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": true});
    let (status, answer) = server.post("/v1/chat/completions", &both).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("continue_final_message")), "{answer}");
}

/// What the model says of a text is what it said of it as its own answer: the log-probabilities have the same bits.
#[tokio::test(flavor = "multi_thread")]
async fn prompts_have_the_log_probabilities_that_they_had_as_answers() {
    let model = fixture("llama-gqa");
    let model = model.to_str().expect("the path is UTF-8");
    let mut of_ranks = None;
    for (ranks, slots) in [("1", "3"), ("2", "64"), ("4", "2")] {
        let server = Server::start(&["--model", model, "--tp", ranks, "--max-slots", slots]).await;
        let beginning = json!([9, 10, 11, 300, 12]);
        let asks = json!({"prompt": beginning, "max_tokens": 40, "logprobs": 3, "temperature": 1, "seed": 3,
            "ignore_eos": true, "return_tokens_as_token_ids": true});
        let said = server.ok("/v1/completions", &asks).await["choices"][0]["logprobs"].clone();
        let id = |token: &Value| token.as_str().unwrap().strip_prefix("token_id:").unwrap().parse::<u32>().unwrap();
        let ids: Vec<u32> = said["tokens"].as_array().unwrap().iter().map(id).collect();
        let prompt: Vec<u32> = [9, 10, 11, 300, 12].into_iter().chain(ids.clone()).collect();
        let mut scoring = json!({"prompt": prompt, "max_tokens": 1, "logprobs": 3, "echo": true, "temperature": 0,
            "return_tokens_as_token_ids": true});
        // Again: what is cached is of no use here. A crowd beside it, which shares the rows of steps.
        for others in [0, 1, 5] {
            let more = (0..others).map(|_| server.ok("/v1/completions", &scoring));
            let (echoed, _) = tokio::join!(server.ok("/v1/completions", &scoring), futures::future::join_all(more));
            let told = &echoed["choices"][0]["logprobs"];
            assert_eq!(told["token_logprobs"][0], Value::Null);
            assert_eq!(told["top_logprobs"][0], Value::Null);
            for field in ["tokens", "token_logprobs", "top_logprobs"] {
                let answers = said[field].as_array().unwrap();
                let told = told[field].as_array().unwrap();
                assert_eq!(told.len(), 46);
                assert_eq!(&told[5..45], &answers[..], "{field}, {ranks} ranks");
            }
            assert_eq!(echoed["usage"]["completion_tokens"], 1);
        }
        scoring["max_tokens"] = json!(0);
        let mut alone = server.ok("/v1/completions", &scoring).await;
        assert_eq!(alone["usage"]["completion_tokens"], 0);
        assert_eq!(alone["choices"][0]["finish_reason"], "length");
        let logprobs = alone["choices"][0]["logprobs"].take();
        assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 45);
        assert_eq!(of_ranks.get_or_insert_with(|| logprobs.clone()), &logprobs, "{ranks} ranks");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_echoed_and_told_of_as_clients_of_other_servers_know_it() {
    let server = server().await;
    let text = "Hi, h\u{e9} there";
    let asks = json!({"prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    let with = |more: Value| {
        let mut asks = asks.clone();
        asks.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        asks
    };
    let plain = server.ok("/v1/completions", &asks).await;
    let echoed = server.ok("/v1/completions", &with(json!({"echo": true, "logprobs": 0, "n": 2}))).await;
    let answer = plain["choices"][0]["text"].as_str().unwrap();
    for choice in echoed["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], format!("{text}{answer}"));
        let offsets: Vec<u64> =
            choice["logprobs"]["text_offset"].as_array().unwrap().iter().map(|at| at.as_u64().unwrap()).collect();
        assert!(offsets.is_sorted() && offsets[offsets.len() - 4] == text.chars().count() as u64, "{offsets:?}");
    }
    let streamed =
        with(json!({"echo": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}));
    let mut stream = server.stream("/v1/completions", &streamed).await;
    let (mut all, mut used) = (String::new(), 0);
    while let Some(event) = stream.next().await {
        all += event["choices"][0]["text"].as_str().unwrap_or_default();
        used = event["usage"]["completion_tokens"].as_u64().unwrap();
    }
    assert_eq!((all, used), (format!("{text}{answer}"), 4));
    let told = server.ok("/v1/completions", &with(json!({"prompt_logprobs": 2}))).await;
    let list = told["choices"][0]["prompt_logprobs"].as_array().unwrap().clone();
    assert_eq!(list.len() as u64, told["usage"]["prompt_tokens"].as_u64().unwrap());
    assert_eq!((list[0].is_null(), told["choices"][0]["text"].as_str()), (true, Some(answer)));
    for of in &list[1..] {
        let of = of.as_object().unwrap();
        assert!((2..=3).contains(&of.len()) && of.values().any(|entry| entry["rank"] == 1), "{of:?}");
        assert!(
            of.values().all(|entry| entry["logprob"].as_f64().unwrap() < 0.0 && entry["decoded_token"].is_string())
        );
    }
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "prompt_logprobs": 0});
    let chat = server.ok("/v1/chat/completions", &messages).await;
    assert_eq!(
        chat["prompt_logprobs"].as_array().unwrap().len() as u64,
        chat["usage"]["prompt_tokens"].as_u64().unwrap()
    );
    for (body, param) in [
        (json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "x", "prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
    ] {
        let (status, answer) = server.post("/v1/completions", &body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{body}: {answer}");
    }
}

/// The demo's template knows none.
#[tokio::test(flavor = "multi_thread")]
async fn tools_are_refused_where_the_model_knows_none_and_taken_where_they_ask_for_nothing() {
    let server = server().await;
    let with = |fields: Value| {
        let mut request = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
        request.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        request
    };
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    for fields in [
        json!({"tools": null, "tool_choice": null, "parallel_tool_calls": null, "include_reasoning": false}),
        json!({"tools": [], "tool_choice": "none", "parallel_tool_calls": true}),
        json!({"tools": tools, "tool_choice": "none"}),
    ] {
        let answer = server.ok("/v1/chat/completions", &with(fields)).await;
        assert!(answer["choices"][0]["message"]["tool_calls"].is_null(), "{answer}");
    }
    for (fields, param) in [
        (json!({"tools": tools}), "tools"),
        (json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name"),
        (json!({"tool_choice": "auto"}), "tool_choice"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"function_call": "auto"}), "function_call"),
    ] {
        let (status, answer) = server.post("/v1/chat/completions", &with(fields.clone())).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{fields}: {answer}");
    }
    // Where a prompt is only cut into tokens, too.
    let request = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": tools});
    let (status, answer) = server.post("/tokenize", &request).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")), "{answer}");
}
