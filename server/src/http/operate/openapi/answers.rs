//! The shapes of answers. Each has the fields that are named and no other.

use serde_json::{Map, Value, json};

mod machine;

/// What a route answers with: its media types.
pub(super) fn of(method: &str, path: &str) -> Value {
    let whole = |name: &str| json!({"application/json": {"schema": to(name)}});
    // The words of OpenAPI 3.1 have none for the events of a stream.
    let or_events = |name: &str, event: &str| {
        let text = json!({"type": "string", "description": "events, each with a JSON object as its data"});
        let events = json!({"schema": text, "x-event-schema": to(event)});
        json!({"application/json": {"schema": to(name)}, "text/event-stream": events})
    };
    match (method, path) {
        (_, "/v1/chat/completions") => or_events("ChatCompletion", "ChatCompletionChunk"),
        (_, "/v1/completions") => or_events("Completion", "CompletionChunk"),
        (_, "/v1/messages") => or_events("Message", "MessageEvent"),
        (_, "/v1/responses") => or_events("Response", "ResponseEvent"),
        ("get", "/v1/responses/{id}") => or_events("Response", "ResponseEvent"),
        ("delete", "/v1/responses/{id}") => whole("DeletedResponse"),
        (_, "/v1/messages/count_tokens") => whole("CountedTokens"),
        (_, "/v1/chat/completions/render") => whole("Rendered"),
        (_, "/v1/completions/render") => {
            json!({"application/json": {"schema": {"type": "array", "items": to("Rendered")}}})
        }
        (_, "/apply-template" | "/detokenize") => whole("Prompt"),
        (_, "/tokenize") => whole("Tokenized"),
        (_, "/v1/models") => whole("Models"),
        (_, "/v1/models/{id}") => whole("Model"),
        (_, "/version") => whole("Version"),
        (_, "/load") => whole("Load"),
        (_, "/replicas") => whole("Replicas"),
        (_, "/replicas/{id}/restart") => whole("Replica"),
        (_, "/machine") => whole("Machine"),
        (_, "/requests/{id}") => whole("Ended"),
        (_, "/server_info") => whole("ServerInfo"),
        (_, "/ping" | "/health" | "/health/live" | "/health/ready") => whole("Health"),
        (_, "/") => json!({"text/plain": {"schema": text()}, "text/html": {"schema": text()}}),
        (_, "/metrics") => {
            json!({"text/plain": {"schema": text()}, "application/openmetrics-text": {"schema": text()}})
        }
        _ => json!({"application/json": {"schema": {"type": "object"}}}),
    }
}

fn to(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn list(of: &Value) -> Value {
    json!({"type": "array", "items": of})
}

fn or_null(of: &Value) -> Value {
    json!({"anyOf": [of, {"type": "null"}]})
}

/// An object of these fields; `?` behind a name: it may be missing.
fn object(fields: &[(&str, &Value)]) -> Value {
    let named = |(name, schema): &(&str, &Value)| (name.trim_end_matches('?').to_owned(), (*schema).clone());
    let properties: Map<String, Value> = fields.iter().map(named).collect();
    let required: Vec<&str> = fields.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('?')).collect();
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn one_of(words: &[&str]) -> Value {
    json!({"enum": words})
}

/// The components that [`of`] names, and the two shapes of errors.
pub(super) fn schemas() -> Value {
    let (text, null, flag) = (&text(), &json!({"type": "null"}), &json!({"type": "boolean"}));
    let (count, number) = (&json!({"type": "integer", "minimum": 0}), &json!({"type": "number"}));
    let (texts, ids, any) = (&list(text), &list(count), &json!({}));
    let (maybe_text, maybe_ids) = (&or_null(text), &or_null(ids));
    let logprob = &json!({"type": "number", "maximum": 0});
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| {
        all.insert(name.to_owned(), schema);
        to(name)
    };

    let error = object(&[("message", text), ("type", text), ("param", maybe_text), ("code", text)]);
    let error = &add("Error", object(&[("error", &error)]));
    let anthropic = object(&[("type", text), ("message", text)]);
    let anthropic = &add("AnthropicError", object(&[("type", &one_of(&["error"])), ("error", &anthropic)]));

    let details = object(&[("cached_tokens", count)]);
    let usage = add(
        "Usage",
        object(&[
            ("prompt_tokens", count),
            ("completion_tokens", count),
            ("total_tokens", count),
            ("prompt_tokens_details?", &details),
        ]),
    );
    let metrics = &object(&[("speculative_decoding", &json!({"type": ["object", "null"]}))]);
    let prompt_token = object(&[("logprob", logprob), ("rank", &or_null(count)), ("decoded_token", text)]);
    let prompt_logprobs = &list(&json!({"type": ["object", "null"], "additionalProperties": prompt_token}));
    let finish = &or_null(&one_of(&["stop", "length", "tool_calls"]));
    let envelope = |object_word: &str, choice: &Value, usage_field: &str, usage: &Value| {
        object(&[
            ("id", text),
            ("object", &one_of(&[object_word])),
            ("created", count),
            ("model", text),
            ("system_fingerprint", text),
            ("service_tier?", text),
            ("choices", &list(choice)),
            (usage_field, usage),
            ("metrics?", metrics),
            ("prompt_logprobs?", prompt_logprobs),
            ("prompt_token_ids?", ids),
        ])
    };

    let top = object(&[("token", text), ("logprob", logprob), ("bytes", ids)]);
    let token = object(&[("token", text), ("logprob", logprob), ("bytes", ids), ("top_logprobs", &list(&top))]);
    let chat_logprobs = &or_null(&object(&[("content", &list(&token)), ("refusal", null)]));
    let function = object(&[("name", text), ("arguments", text)]);
    let call = object(&[("id", text), ("type", &one_of(&["function"])), ("function", &function)]);
    let message = object(&[
        ("role", &one_of(&["assistant"])),
        ("content", maybe_text),
        ("refusal", null),
        ("reasoning_content?", text),
        ("reasoning?", text),
        ("tool_calls?", &list(&call)),
    ]);
    let choice = object(&[
        ("index", count),
        ("message", &message),
        ("logprobs", chat_logprobs),
        ("finish_reason", finish),
        ("token_ids?", ids),
    ]);
    add("ChatCompletion", envelope("chat.completion", &choice, "usage", &usage));
    let function = object(&[("name?", text), ("arguments", text)]);
    let call = object(&[("index", count), ("id?", text), ("type?", &one_of(&["function"])), ("function", &function)]);
    let delta = object(&[
        ("role?", &one_of(&["assistant"])),
        ("content?", text),
        ("reasoning_content?", text),
        ("reasoning?", text),
        ("tool_calls?", &list(&call)),
    ]);
    let choice = object(&[
        ("index", count),
        ("delta", &delta),
        ("logprobs", chat_logprobs),
        ("finish_reason", finish),
        ("token_ids?", ids),
    ]);
    let chunk = envelope("chat.completion.chunk", &choice, "usage?", &or_null(&usage));
    add("ChatCompletionChunk", json!({"anyOf": [chunk, error]}));

    let top = json!({"type": ["object", "null"], "additionalProperties": logprob});
    let logprobs = object(&[
        ("tokens", texts),
        ("token_logprobs", &list(&or_null(logprob))),
        ("top_logprobs", &or_null(&list(&top))),
        ("text_offset", ids),
    ]);
    let choice = object(&[
        ("text", text),
        ("index", count),
        ("logprobs", &or_null(&logprobs)),
        ("finish_reason", finish),
        ("prompt_logprobs?", prompt_logprobs),
        ("prompt_token_ids?", ids),
        ("token_ids?", ids),
    ]);
    add("Completion", envelope("text_completion", &choice, "usage", &usage));
    let chunk = envelope("text_completion", &choice, "usage?", &or_null(&usage));
    add("CompletionChunk", json!({"anyOf": [chunk, error]}));

    add("CountedTokens", object(&[("input_tokens", count)]));
    let (message, event) = messages(text, maybe_text, count, anthropic);
    add("Message", message);
    add("MessageEvent", event);
    let (response, event) = responses(text, maybe_text, count, any, &mut add);
    add("Response", response);
    add("ResponseEvent", event);
    add("DeletedResponse", object(&[("id", text), ("object", &one_of(&["response"])), ("deleted", flag)]));

    add("Prompt", object(&[("prompt", text)]));
    add(
        "Tokenized",
        object(&[("count", count), ("max_model_len", count), ("tokens", ids), ("token_strs", &or_null(texts))]),
    );
    let model = object(&[
        ("id", text),
        ("object", &one_of(&["model"])),
        ("created", count),
        ("owned_by", text),
        ("root", text),
        ("parent", null),
        ("max_model_len", &or_null(count)),
        ("can_chat", flag),
    ]);
    let model = add("Model", model);
    add("Models", object(&[("object", &one_of(&["list"])), ("data", &list(&model))]));
    add("Version", object(&[("version", text)]));
    add("Load", object(&[("server_load", count)]));
    let replica = &[("id", count), ("state", text), ("detail", text), ("running", count), ("waiting", count)];
    let replica = &add("Replica", object(replica));
    add("Replicas", object(&[("replicas", &list(replica))]));
    add("Ended", object(&[("requests", count)]));
    add("Machine", machine::schema());
    add("Health", object(&[("status", text), ("detail?", text)]));
    let state = object(&[("template", flag), ("tools", flag), ("reasoning", flag)]);
    add(
        "ServerInfo",
        object(&[
            ("version", text),
            ("state", text),
            ("started", count),
            ("model_id", text),
            ("model", &json!({"type": ["object", "null"]})),
            ("chat", &state),
            ("settings", &json!({"type": "object"})),
        ]),
    );
    let bias = or_null(&json!({"type": "object", "additionalProperties": number}));
    let sampling = object(&[
        ("n", count),
        ("temperature", number),
        ("top_k", count),
        ("top_p", number),
        ("min_p", number),
        ("seed", &or_null(count)),
        ("presence_penalty", number),
        ("frequency_penalty", number),
        ("repetition_penalty", number),
        ("logit_bias", &bias),
        ("stop", texts),
        ("include_stop_str_in_output", flag),
        ("stop_token_ids", ids),
        ("ignore_eos", flag),
        ("max_tokens", count),
        ("min_tokens", count),
        ("logprobs", &or_null(count)),
        ("prompt_logprobs", &or_null(count)),
        ("skip_special_tokens", flag),
        ("structured_outputs", &or_null(&object(&[("grammar", text)]))),
        ("allowed_token_ids", maybe_ids),
        ("bad_words_token_ids", &or_null(&list(ids))),
    ]);
    let stream_options = or_null(&object(&[("include_usage", flag), ("continuous_usage_stats", flag)]));
    add(
        "Rendered",
        object(&[
            ("request_id", text),
            ("prompt", text),
            ("token_ids", ids),
            ("features", null),
            ("sampling_params", &sampling),
            ("model", text),
            ("stream", flag),
            ("stream_options", &stream_options),
            ("cache_salt", maybe_text),
            ("priority", &json!({"type": "integer"})),
            ("kv_transfer_params", null),
        ]),
    );
    Value::Object(all)
}

/// Anthropic's message, and the events that make one.
fn messages(text: &Value, maybe_text: &Value, count: &Value, error: &Value) -> (Value, Value) {
    let kind = |word: &str| one_of(&[word]);
    let block = json!({"anyOf": [
        object(&[("type", &kind("text")), ("text", text)]),
        object(&[("type", &kind("thinking")), ("thinking", text), ("signature", text)]),
        object(&[("type", &kind("tool_use")), ("id", text), ("name", text), ("input", &json!({"type": "object"}))]),
    ]});
    let delta = json!({"anyOf": [
        object(&[("type", &kind("text_delta")), ("text", text)]),
        object(&[("type", &kind("thinking_delta")), ("thinking", text)]),
        object(&[("type", &kind("input_json_delta")), ("partial_json", text)]),
    ]});
    let usage = object(&[("input_tokens", count), ("cache_read_input_tokens", count), ("output_tokens", count)]);
    let reason = or_null(&one_of(&["end_turn", "max_tokens", "stop_sequence", "tool_use"]));
    let message = object(&[
        ("id", text),
        ("type", &kind("message")),
        ("role", &kind("assistant")),
        ("model", text),
        ("content", &list(&block)),
        ("stop_reason", &reason),
        ("stop_sequence", maybe_text),
        ("usage", &usage),
    ]);
    let ending = object(&[("stop_reason", &reason), ("stop_sequence", maybe_text)]);
    let event = json!({"anyOf": [
        object(&[("type", &kind("message_start")), ("message", &message)]),
        object(&[("type", &kind("content_block_start")), ("index", count), ("content_block", &block)]),
        object(&[("type", &kind("content_block_delta")), ("index", count), ("delta", &delta)]),
        object(&[("type", &kind("content_block_stop")), ("index", count)]),
        object(&[("type", &kind("message_delta")), ("delta", &ending), ("usage", &usage)]),
        object(&[("type", &kind("message_stop"))]),
        object(&[("type", &kind("ping"))]),
        error,
    ]});
    (message, event)
}

/// OpenAI's response, and the events that make one.
fn responses(
    text: &Value,
    maybe_text: &Value,
    count: &Value,
    any: &Value,
    add: &mut impl FnMut(&str, Value) -> Value,
) -> (Value, Value) {
    let kind = |word: &str| one_of(&[word]);
    let none = json!({"type": "array", "maxItems": 0});
    let output = object(&[("type", &kind("output_text")), ("text", text), ("annotations", &none), ("logprobs", &none)]);
    let reasoning = object(&[("type", &kind("reasoning_text")), ("text", text)]);
    let part = &add("ResponsePart", json!({"anyOf": [output, reasoning]}));
    let status = &one_of(&["in_progress", "completed", "incomplete", "failed"]);
    let item = json!({"anyOf": [
        object(&[
            ("type", &kind("message")),
            ("id", text),
            ("status", status),
            ("role", &kind("assistant")),
            ("content", &list(part)),
        ]),
        object(&[
            ("type", &kind("reasoning")),
            ("id", text),
            ("status", status),
            ("summary", &none),
            ("content", &list(part)),
        ]),
        object(&[
            ("type", &kind("function_call")),
            ("id", text),
            ("status", status),
            ("call_id", text),
            ("name", text),
            ("arguments", text),
        ]),
    ]});
    let item = &add("ResponseItem", item);
    let usage = object(&[
        ("input_tokens", count),
        ("input_tokens_details", &object(&[("cached_tokens", count)])),
        ("output_tokens", count),
        ("output_tokens_details", &object(&[("reasoning_tokens", count)])),
        ("total_tokens", count),
    ]);
    // Of the request's fields those that clients look for come back as they came.
    let response = object(&[
        ("id", text),
        ("object", &kind("response")),
        ("created_at", count),
        ("status", status),
        ("error", &or_null(&object(&[("code", text), ("message", text)]))),
        ("incomplete_details", &or_null(&object(&[("reason", text)]))),
        ("model", text),
        ("output", &list(item)),
        ("usage", &or_null(&usage)),
        ("background", any),
        ("instructions", maybe_text),
        ("max_output_tokens", &or_null(count)),
        ("metadata", any),
        ("parallel_tool_calls", any),
        ("previous_response_id", maybe_text),
        ("reasoning", any),
        ("service_tier?", text),
        ("store", any),
        ("temperature", any),
        ("text", any),
        ("tool_choice", any),
        ("tools", any),
        ("top_p", any),
        ("truncation", any),
    ]);
    let event = object(&[
        ("type", &json!({"type": "string", "pattern": "^response\\.[a-z_.]+$"})),
        ("sequence_number", count),
        ("response?", &to("Response")),
        ("item_id?", text),
        ("output_index?", count),
        ("content_index?", count),
        ("item?", item),
        ("part?", part),
        ("delta?", text),
        ("text?", text),
        ("name?", text),
        ("arguments?", text),
        ("logprobs?", &none),
    ]);
    (response, event)
}
