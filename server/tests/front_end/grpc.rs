//! The gRPC interface, on the same port as HTTP.

use std::{collections::HashMap, sync::Arc, time::Duration};

use looplane_proto::inference::v1::{
    AbortRequest, Alternatives, Chat, ChatMessage, ChatRequest, Delta, DetokenizeRequest, FinishReason as Reason,
    Finished, GenerateRequest, GenerateResponse, GetLoadRequest, GetModelRequest, SamplingParams, TokenIds,
    TokenizeRequest, Tool, ToolChoice,
    generate_request::Input,
    generate_response::Event,
    inference_client::InferenceClient,
    sampling_params::Form,
    tokenize_request,
    tool_choice::{Choice, Mode},
};
use looplane_server::{
    engine::{EngineState, FinishReason, GeneratedToken, SequenceEvent, SubmitError, Unwanted},
    listener::{ClientLimits, ServeOptions},
    text::{ChatTemplate, Text},
};
use serde_json::json;
use tokio::{io::AsyncWriteExt, net::TcpStream};
use tokio_stream::StreamExt;
use tonic::{Code, Request, Status, Streaming, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tonic_types::StatusExt;

use crate::{
    Server,
    client::{get, post, read},
    engine::{Script, answer, token},
    fixture,
    http2::{Connection, grpc_status},
    options,
    scrape::Scrape,
    spell, tools,
};

async fn channel(server: &Server) -> Channel {
    Channel::from_shared(format!("http://{}", server.address)).unwrap().connect().await.unwrap()
}

fn tokens(ids: &[u32]) -> GenerateRequest {
    GenerateRequest { input: Some(Input::TokenIds(TokenIds { ids: ids.to_vec() })), ..GenerateRequest::default() }
}

fn sampled(sampling: SamplingParams) -> GenerateRequest {
    GenerateRequest { sampling: Some(sampling), ..tokens(&[5]) }
}

fn user(content: &str) -> ChatMessage {
    ChatMessage { role: "user".into(), content: content.into(), ..ChatMessage::default() }
}

fn chat(messages: Vec<ChatMessage>) -> ChatRequest {
    ChatRequest { chat: Some(Chat { messages, ..Chat::default() }), ..ChatRequest::default() }
}

async fn events(stream: Streaming<GenerateResponse>) -> Result<Vec<Event>, Status> {
    let responses: Vec<Result<GenerateResponse, Status>> = stream.collect().await;
    responses.into_iter().map(|response| Ok(response?.event.expect("every response is an event"))).collect()
}

async fn collect(channel: Channel, request: GenerateRequest) -> Result<Vec<Event>, Status> {
    events(InferenceClient::new(channel).generate(request).await?.into_inner()).await
}

async fn collect_chat(channel: Channel, request: ChatRequest) -> Result<Vec<Event>, Status> {
    events(InferenceClient::new(channel).chat(request).await?.into_inner()).await
}

/// What the deltas of a choice add up to, and its end.
fn added_up(events: &[Event], choice: u32) -> (Delta, Finished) {
    let (mut all, mut end) = (Delta::default(), None);
    for event in events {
        match event {
            Event::Delta(delta) if delta.index == choice => {
                assert!(end.is_none(), "nothing follows the end of a choice");
                all.text.push_str(&delta.text);
                all.reasoning.push_str(&delta.reasoning);
                all.tokens.extend(delta.tokens.clone());
                all.generated.extend(&delta.generated);
                for call in &delta.tool_calls {
                    match all.tool_calls.iter_mut().find(|known| known.index == call.index) {
                        Some(known) => known.arguments.push_str(&call.arguments),
                        None => all.tool_calls.push(call.clone()),
                    }
                }
            }
            Event::Finished(finished) if finished.index == choice => end = Some(finished.clone()),
            _ => {}
        }
    }
    (all, end.expect("every choice has an end"))
}

#[tokio::test]
async fn generate_streams_started_deltas_and_the_end() {
    let (server, mut script) = Server::start(options()).await;
    let request = GenerateRequest {
        model: "tiny".into(),
        sampling: Some(SamplingParams {
            seed: Some(u64::MAX),
            logprobs: Some(1),
            prompt_logprobs: Some(0),
            max_tokens: Some(9),
            temperature: Some(0.25),
            logit_bias: HashMap::from([(7, 1.5)]),
            stop_token_ids: vec![9],
            ..SamplingParams::default()
        }),
        ..tokens(&[5, 6])
    };
    let id = spell("a")[0];
    let prompt = vec![GeneratedToken { id: 6, logprob: Some(-2.0), top: Vec::new() }];
    let events = vec![
        crate::engine::prompt(1, prompt),
        SequenceEvent::Token(GeneratedToken { id, logprob: Some(-0.5), top: vec![(id, -0.5), (5, f32::NEG_INFINITY)] }),
        SequenceEvent::Finished(FinishReason::Length),
    ];
    let (received, sequence) = tokio::join!(collect(channel(&server).await, request), script.play(events));
    let [Event::Started(started), Event::Delta(delta), Event::Finished(finished)] = &received.unwrap()[..] else {
        panic!("three events were expected")
    };
    assert_eq!((started.model.as_str(), started.prompt_tokens, started.seed), ("tiny", 2, u64::MAX));
    assert_eq!(started.bit_domain, "cpu-test");
    assert_eq!((delta.text.as_str(), delta.tokens.len()), ("a", 1));
    assert_eq!((delta.tokens[0].logprob, delta.tokens[0].top[0].id), (Some(-0.5), id));
    assert_eq!(delta.tokens[0].top[1].logprob, -9999.0);
    assert_eq!((finished.reason, finished.prompt_tokens, finished.completion_tokens), (2, 2, 1));
    assert_eq!((finished.cached_tokens, finished.prompt.len(), finished.prompt[0].logprob), (1, 1, Some(-2.0)));
    assert_eq!((sequence.sampling.temperature, sequence.max_tokens, sequence.logprobs), (0.25, 9, Some(1)));
    assert_eq!((sequence.sampling.repetition_penalty, sequence.sampling.logit_bias), (1.0, vec![(7, 1.5)]));
    assert!(sequence.stop_tokens.contains(&9) && sequence.prompt_logprobs == Some(0));
}

#[tokio::test]
async fn a_call_has_the_priority_that_it_asks_for() {
    let (server, mut script) = Server::start(options()).await;
    let channel = channel(&server).await;
    let text = GenerateRequest { priority: -3, ..tokens(&[5]) };
    let (_, priority) =
        tokio::join!(collect(channel.clone(), text), async { script.submission().await.standing.priority });
    assert_eq!(priority, -3);
    let chat = ChatRequest { priority: 4, ..chat(vec![user("Hi")]) };
    let (_, priority) =
        tokio::join!(collect_chat(channel, chat), async { script.submission().await.standing.priority });
    assert_eq!(priority, 4);
}

#[tokio::test]
async fn several_choices_come_as_they_are_made_and_each_has_its_end() {
    let (server, mut script) = Server::start(options()).await;
    let request = sampled(SamplingParams { n: Some(3), stop: vec!["!".into()], ..SamplingParams::default() });
    let (received, ()) = tokio::join!(collect(channel(&server).await, request), async {
        let [first, second, third] = [script.accept().await, script.accept().await, script.accept().await];
        let seeds = [&first, &second, &third].map(|sequence| sequence.request.sampling.seed);
        assert!(seeds[0] != seeds[1] && seeds[1] != seeds[2], "{seeds:?}");
        for (sequence, text) in [(&third, "three"), (&first, "one"), (&second, "two!")] {
            for event in answer(text) {
                sequence.send(event).await;
            }
        }
    });
    let events = received.unwrap();
    for (choice, text, stop_text) in [(0, "one", None), (1, "two", Some("!")), (2, "three", None)] {
        let (all, end) = added_up(&events, choice);
        assert_eq!((all.text.as_str(), end.stop_text.as_deref()), (text, stop_text));
        let generated = all.generated.len() + end.generated.len();
        assert_eq!((generated, end.completion_tokens as usize), (4 + 2 * (choice as usize / 2), generated));
        assert_eq!(end.reason(), Reason::Stop);
    }
    assert_eq!(script.unwanted().await.1, Unwanted::Complete, "the one that its stop text ended");
    script.nothing_more();
}

const SCHEMA: &str = r#"{"type": "object", "properties": {"city": {"type": "string"}}}"#;

fn function() -> Tool {
    Tool { name: "f".into(), description: "Tells.".into(), parameters: SCHEMA.into(), strict: false }
}

#[tokio::test]
async fn a_chats_answer_comes_in_its_parts() {
    let (server, mut script) = Server::start_with(options(), tools::text()).await;
    let channel = channel(&server).await;
    let chat = Chat { tools: vec![function()], ..chat(vec![user("Hi")]).chat.unwrap() };
    let request = ChatRequest { chat: Some(chat), ..ChatRequest::default() };
    let (received, _) = tokio::join!(collect_chat(channel.clone(), request.clone()), script.play(answer(tools::REPLY)));
    let (all, end) = added_up(&received.unwrap(), 0);
    assert_eq!((all.reasoning.as_str(), all.text.as_str(), all.tool_calls.len()), ("Oh", "I", 1));
    let call = &all.tool_calls[0];
    assert_eq!((call.index, call.name.as_str(), call.arguments.as_str()), (0, "f", "{\"a\":1}"));
    assert!(call.id.starts_with("call_"), "{call:?}");
    assert_eq!(end.reason(), Reason::ToolCalls);
    let quiet = ChatRequest { include_reasoning: Some(false), ..request };
    let (received, _) = tokio::join!(collect_chat(channel, quiet), script.play(answer(tools::REPLY)));
    let (all, _) = added_up(&received.unwrap(), 0);
    assert_eq!((all.reasoning.as_str(), all.text.as_str()), ("", "I"));
}

/// The engine's side of a call, which ends at once.
async fn prompt_of(channel: &Channel, script: &mut Script, request: ChatRequest) -> (Vec<u32>, bool) {
    let (received, sequence) = tokio::join!(collect_chat(channel.clone(), request), script.play(answer("x")));
    received.unwrap();
    (sequence.prompt, sequence.grammar.is_some())
}

#[tokio::test]
async fn a_chat_has_the_prompt_and_the_form_that_it_has_over_http() {
    let (server, mut script) = Server::start_with(options(), tools::text()).await;
    let channel = channel(&server).await;
    let call = looplane_proto::inference::v1::ToolCall {
        id: "call_1".into(),
        name: "f".into(),
        arguments: r#"{"city": "Rome"}"#.into(),
    };
    let called = ChatMessage { role: "assistant".into(), tool_calls: vec![call], ..ChatMessage::default() };
    let told = ChatMessage { role: "tool".into(), tool_call_id: "call_1".into(), ..user("rain") };
    let chat = Chat { tools: vec![function()], ..chat(vec![user("Hi"), called, told]).chat.unwrap() };
    let over_http = |choice: serde_json::Value| {
        let call = json!({"name": "f", "arguments": r#"{"city": "Rome"}"#});
        let parameters: serde_json::Value = serde_json::from_str(SCHEMA).unwrap();
        json!({
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "tools": [{
                "type": "function",
                "function": {"name": "f", "description": "Tells.", "parameters": parameters},
            }],
            "tool_choice": choice,
        })
    };
    for (choice, same) in [
        (None, json!("auto")),
        (Some(Choice::Mode(Mode::None.into())), json!("none")),
        (Some(Choice::Mode(Mode::Required.into())), json!("required")),
        (Some(Choice::Function("f".into())), json!({"type": "function", "function": {"name": "f"}})),
    ] {
        let tool_choice = choice.map(|choice| ToolChoice { choice: Some(choice) });
        let request = ChatRequest { chat: Some(chat.clone()), tool_choice, ..ChatRequest::default() };
        let here = prompt_of(&channel, &mut script, request).await;
        let body = over_http(same.clone());
        let (response, there) =
            tokio::join!(post(server.address, "/v1/chat/completions", &body), script.play(answer("x")));
        assert_eq!(response.status, 200, "{}", response.body);
        assert_eq!(here, (there.prompt, there.grammar.is_some()), "{same}");
    }
}

#[tokio::test]
async fn an_answer_is_held_to_a_form() {
    let (server, mut script) = Server::start_with(options(), tools::text()).await;
    let channel = channel(&server).await;
    let forms = [
        Form::JsonObject(true),
        Form::JsonSchema(SCHEMA.into()),
        Form::Regex("[a-z]+".into()),
        Form::Grammar("start: \"x\"".into()),
        Form::Choice(Alternatives { texts: vec!["yes".into(), "no".into()] }),
    ];
    for form in forms {
        let request = sampled(SamplingParams { form: Some(form.clone()), ..SamplingParams::default() });
        let (received, sequence) = tokio::join!(collect(channel.clone(), request), script.play(answer("x")));
        received.unwrap();
        assert!(sequence.grammar.is_some(), "{form:?}");
    }
    for (form, field) in [
        (Form::JsonSchema("{".into()), "sampling.json_schema"),
        (Form::JsonSchema("[]".into()), "sampling.json_schema"),
        (Form::JsonSchema(r#"{"type": "nothing"}"#.into()), "sampling.json_schema"),
        (Form::Regex("(".into()), "sampling.regex"),
        (Form::Regex(String::new()), "sampling.regex"),
        (Form::Grammar("start: missing".into()), "sampling.grammar"),
        (Form::Choice(Alternatives { texts: vec![] }), "sampling.choice.texts"),
    ] {
        let request = sampled(SamplingParams { form: Some(form), ..SamplingParams::default() });
        wrong_field(&collect(channel.clone(), request).await.unwrap_err(), field);
    }
    script.nothing_more();
}

/// Says that this field, and no other, is wrong.
fn wrong_field(status: &Status, field: &str) {
    assert_eq!(status.code(), Code::InvalidArgument, "{status}");
    let violations = status.get_details_bad_request().expect("a field is wrong").field_violations;
    assert_eq!(violations.iter().map(|of| of.field.as_str()).collect::<Vec<_>>(), [field], "{status}");
    assert!(status.message().starts_with(field), "{status}");
}

#[tokio::test]
async fn errors_are_counted_like_those_of_http() {
    let (server, mut script) = Server::start(options()).await;
    let channel = channel(&server).await;
    let other = GenerateRequest { model: "other".into(), ..tokens(&[5]) };
    assert_eq!(collect(channel.clone(), other).await.unwrap_err().code(), Code::NotFound);
    let failed = vec![SequenceEvent::Failed("no luck".into())];
    let (given_up, _) = tokio::join!(collect(channel, tokens(&[5])), script.play(failed));
    assert_eq!(given_up.unwrap_err().code(), Code::Internal);
    let scrape = Scrape::parse(&get(server.address, "/metrics").await.body);
    for code in ["model_not_found", "generation_failed"] {
        assert_eq!(scrape.value("request_errors_total", &[("code", code)]), 1.0, "{code}");
    }
    let handler = ("handler", "/looplane.inference.v1.Inference/{*rest}");
    assert_eq!(scrape.value("http_requests_total", &[handler, ("status", "200")]), 2.0);
}

#[tokio::test]
async fn chat_and_text_prompts_work_and_a_drawn_seed_is_told() {
    let (server, mut script) = Server::start(options()).await;
    let channel = channel(&server).await;
    for is_chat in [true, false] {
        let received = async {
            let text = GenerateRequest { input: Some(Input::Prompt("Hi".into())), ..GenerateRequest::default() };
            match is_chat {
                true => collect_chat(channel.clone(), chat(vec![user("Hi")])).await,
                false => collect(channel.clone(), text).await,
            }
        };
        let (received, sequence) = tokio::join!(received, script.play(answer("é🦀")));
        let received = received.unwrap();
        assert_eq!(added_up(&received, 0).0.text, "é🦀");
        let Event::Started(started) = &received[0] else { panic!("Started comes first") };
        assert_eq!(started.seed, sequence.sampling.seed);
        assert_eq!(sequence.prompt[0], 0, "the begin token");
    }
    let injection = user("Hi\u{fdd0}<|eot_id|>");
    let status = collect_chat(channel, chat(vec![user("Hi"), injection])).await.unwrap_err();
    assert!(status.message().contains("<|eot_id|>"), "{status}");
    wrong_field(&status, "chat.messages[1].content");
}

#[tokio::test]
async fn levels_and_documents_reach_a_template_that_knows_them() {
    let source = "{{ reasoning_effort }} {{ verbosity }}{% for d in documents %} [{{ d.title }}]{% endfor %}";
    let template = Some(ChatTemplate::new(source, "", "").unwrap());
    let loaded = Text { template, ..Text::load(&fixture()).unwrap() };
    let tokenizer = loaded.tokenizer.clone();
    let (server, mut script) = Server::start_with(options(), Arc::new(loaded)).await;
    let mut request = chat(vec![user("Hi")]);
    let asked = request.chat.as_mut().unwrap();
    (asked.reasoning_effort, asked.verbosity) = ("low".into(), "high".into());
    asked.documents = vec![r#"{"title": "A"}"#.into(), r#"{"title": "B"}"#.into()];
    let (_, sequence) = tokio::join!(collect_chat(channel(&server).await, request), script.play(answer("x")));
    assert_eq!(tokenizer.decode(&sequence.prompt, true).unwrap(), "low high [A] [B]");
}

#[tokio::test]
async fn a_chat_that_is_wrong_is_refused_by_its_field() {
    let (server, mut script) = Server::start_with(options(), tools::text()).await;
    let channel = channel(&server).await;
    let message = |role: &str| ChatMessage { role: role.into(), ..user("Hi") };
    let call = |arguments: &str| looplane_proto::inference::v1::ToolCall {
        id: "1".into(),
        name: "f".into(),
        arguments: arguments.into(),
    };
    let with_tools = |tools: Vec<Tool>| {
        let chat = Chat { tools, ..chat(vec![user("Hi")]).chat.unwrap() };
        ChatRequest { chat: Some(chat), ..ChatRequest::default() }
    };
    let kwargs = |text: &str| {
        let chat = Chat { chat_template_kwargs: text.into(), ..chat(vec![user("Hi")]).chat.unwrap() };
        ChatRequest { chat: Some(chat), ..ChatRequest::default() }
    };
    let with = |change: fn(&mut Chat)| {
        let mut request = chat(vec![user("Hi")]);
        change(request.chat.as_mut().unwrap());
        request
    };
    let choice = |choice: Choice, request: ChatRequest| ChatRequest {
        tool_choice: Some(ToolChoice { choice: Some(choice) }),
        ..request
    };
    let parameters = |text: &str| Tool { parameters: text.into(), ..function() };
    for (request, field) in [
        (ChatRequest::default(), "chat"),
        (chat(vec![]), "chat.messages"),
        (chat(vec![message("king")]), "chat.messages[0].role"),
        (chat(vec![user("Hi"), message("tool")]), "chat.messages[1].tool_call_id"),
        (chat(vec![ChatMessage { tool_call_id: "1".into(), ..user("") }]), "chat.messages[0].tool_call_id"),
        (chat(vec![ChatMessage { tool_calls: vec![call("{}")], ..user("") }]), "chat.messages[0].tool_calls"),
        (chat(vec![ChatMessage { reasoning: "Oh".into(), ..user("") }]), "chat.messages[0].reasoning"),
        (
            chat(vec![ChatMessage { tool_calls: vec![call("[]")], ..message("assistant") }]),
            "chat.messages[0].tool_calls[0].arguments",
        ),
        (kwargs("[1]"), "chat.chat_template_kwargs"),
        (kwargs(r#"{"messages": 1}"#), "chat.chat_template_kwargs.messages"),
        (with(|chat| chat.reasoning_effort = "much".into()), "chat.reasoning_effort"),
        (with(|chat| chat.verbosity = "high".into()), "chat.verbosity"),
        (with(|chat| chat.documents = vec!["{}".into()]), "chat.documents"),
        (with(|chat| chat.documents = vec!["{}".into(), "[]".into()]), "chat.documents[1]"),
        (with_tools(vec![parameters("{")]), "chat.tools[0].parameters"),
        (with_tools(vec![function(), function()]), "chat.tools[1].name"),
        (with_tools(vec![Tool { name: "a b".into(), ..function() }]), "chat.tools[0].name"),
        (choice(Choice::Mode(Mode::Required.into()), chat(vec![user("Hi")])), "tool_choice"),
        (choice(Choice::Mode(9), with_tools(vec![function()])), "tool_choice"),
        (choice(Choice::Function("g".into()), with_tools(vec![function()])), "tool_choice.function"),
        (choice(Choice::Mode(Mode::Required.into()), with_tools(vec![parameters(r##"{"$ref": "#"}"##)])), "chat.tools"),
    ] {
        wrong_field(&collect_chat(channel.clone(), request).await.unwrap_err(), field);
    }
    script.nothing_more();
}

#[tokio::test]
async fn refusals_have_codes_and_name_the_field() {
    let (server, mut script) = Server::start(options()).await;
    let channel = channel(&server).await;
    let of = SamplingParams::default;
    for (request, field) in [
        (GenerateRequest::default(), "input"),
        (tokens(&[]), "token_ids"),
        (tokens(&[768]), "token_ids"),
        (tokens(&[5; 512]), "token_ids"),
        (GenerateRequest { truncate_prompt_tokens: Some(0), ..tokens(&[5]) }, "truncate_prompt_tokens"),
        (GenerateRequest { priority: 101, ..tokens(&[5]) }, "priority"),
        (GenerateRequest { cache_salt: "x".repeat(1025), ..tokens(&[5]) }, "cache_salt"),
        (sampled(SamplingParams { temperature: Some(f32::NAN), ..of() }), "sampling.temperature"),
        (sampled(SamplingParams { top_p: Some(0.0), ..of() }), "sampling.top_p"),
        (sampled(SamplingParams { repetition_penalty: Some(0.0), ..of() }), "sampling.repetition_penalty"),
        (sampled(SamplingParams { presence_penalty: Some(f32::INFINITY), ..of() }), "sampling.presence_penalty"),
        (sampled(SamplingParams { logprobs: Some(21), ..of() }), "sampling.logprobs"),
        (sampled(SamplingParams { prompt_logprobs: Some(21), ..of() }), "sampling.prompt_logprobs"),
        (sampled(SamplingParams { stop: vec![String::new()], ..of() }), "sampling.stop"),
        (sampled(SamplingParams { stop_token_ids: vec![768], ..of() }), "sampling.stop_token_ids"),
        (sampled(SamplingParams { min_tokens: Some(2), max_tokens: Some(1), ..of() }), "sampling.min_tokens"),
        (sampled(SamplingParams { max_tokens: Some(0), ..of() }), "sampling.max_tokens"),
        (sampled(SamplingParams { n: Some(17), ..of() }), "sampling.n"),
        (sampled(SamplingParams { allowed_token_ids: vec![768], ..of() }), "sampling.allowed_token_ids"),
        (sampled(SamplingParams { bad_words: vec!["a".into(), "".into()], ..of() }), "sampling.bad_words[1]"),
        (sampled(SamplingParams { logit_bias: HashMap::from([(768, 1.0)]), ..of() }), "sampling.logit_bias"),
        (sampled(SamplingParams { logit_bias: HashMap::from([(7, 101.0)]), ..of() }), "sampling.logit_bias.7"),
    ] {
        wrong_field(&collect(channel.clone(), request).await.unwrap_err(), field);
    }
    let other = GenerateRequest { model: "gpt-5".into(), ..tokens(&[5]) };
    let status = collect(channel.clone(), other).await.unwrap_err();
    assert!(status.code() == Code::NotFound && status.message().contains("tiny"), "{status}");
    script.nothing_more();
    let full = SubmitError::QueueFull { waiting: 1, limit: 1, what: "sequences".into() };
    for (error, code, reason, retry_s) in [
        (full, Code::ResourceExhausted, "rate_limit_exceeded", Some(1)),
        (SubmitError::Unavailable("loading".into()), Code::Unavailable, "not_ready", Some(5)),
        (SubmitError::TooLarge { needed: 2, available: 1 }, Code::InvalidArgument, "request_too_large", None),
    ] {
        let (received, ()) = tokio::join!(collect(channel.clone(), tokens(&[5])), script.refuse(error));
        let status = received.unwrap_err();
        assert_eq!(status.code(), code);
        let info = status.get_details_error_info().expect("every error has its stable code");
        assert_eq!((info.domain.as_str(), info.reason.as_str()), ("looplane", reason));
        let retry = status.get_details_retry_info().and_then(|of| of.retry_delay);
        assert_eq!(retry, retry_s.map(Duration::from_secs), "{status}");
        assert!(status.get_details_bad_request().is_none());
    }
    let failing = vec![token(spell("x")[0]), SequenceEvent::Failed("lost".into())];
    let (received, _) = tokio::join!(collect(channel, tokens(&[5])), script.play(failing));
    assert_eq!(received.unwrap_err().code(), Code::Internal);
}

#[tokio::test]
async fn dropping_the_call_cancels() {
    let (server, mut script) = Server::start(options()).await;
    let mut client = InferenceClient::new(channel(&server).await);
    let call = tokio::spawn(async move {
        let mut stream = client.generate(tokens(&[5])).await.unwrap().into_inner();
        stream.next().await
    });
    let sequence = script.accept().await;
    assert!(matches!(call.await.unwrap(), Some(Ok(GenerateResponse { event: Some(Event::Started(_)) }))));
    assert_eq!(script.cancelled().await, sequence.id);
}

#[tokio::test]
async fn a_request_is_ended_by_its_id() {
    let (server, mut script) = Server::start(ServeOptions { max_concurrent_requests: 1, ..options() }).await;
    let channel = channel(&server).await;
    let mut client = InferenceClient::new(channel.clone());
    let named = |id: &str| AbortRequest { request_id: id.into() };
    let mut request = Request::new(sampled(SamplingParams { n: Some(2), ..SamplingParams::default() }));
    request.metadata_mut().insert("x-request-id", "mine".parse().unwrap());
    let (stream, (first, second)) =
        tokio::join!(client.generate(request), async { (script.accept().await, script.accept().await) });
    let mut stream = stream.unwrap().into_inner();
    assert!(matches!(stream.next().await, Some(Ok(GenerateResponse { event: Some(Event::Started(_)) }))));
    assert_eq!(client.abort(named("other")).await.unwrap_err().code(), Code::NotFound);
    assert_eq!(client.abort(named("mine")).await.unwrap().into_inner().requests, 1);
    let status = stream.next().await.unwrap().unwrap_err();
    assert_eq!(status.code(), Code::Cancelled, "{status}");
    assert_eq!(status.get_details_error_info().unwrap().reason, "request_aborted");
    drop(stream);
    let ended = [script.unwanted().await, script.unwanted().await];
    assert!([first.id, second.id].iter().all(|id| ended.contains(&(*id, Unwanted::Abandoned))), "{ended:?}");
    // Its place is free, and its id forgotten.
    let (received, _) = tokio::join!(collect(channel, tokens(&[5])), script.play(answer("x")));
    received.unwrap();
    assert_eq!(client.abort(named("mine")).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn a_request_over_http_is_ended_by_its_id_too() {
    let (server, mut script) = Server::start(options()).await;
    let mut client = InferenceClient::new(channel(&server).await);
    let body = r#"{"prompt": [5]}"#;
    let length = body.len();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\nx-request-id: mine\r\n\
         connection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    );
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let (response, ()) = tokio::join!(read(stream), async {
        let sequence = script.accept().await;
        sequence.send(token(spell("x")[0])).await;
        let load = client.get_load(GetLoadRequest {}).await.unwrap().into_inner();
        assert_eq!(load.requests, 1);
        let named = AbortRequest { request_id: "mine".into() };
        assert_eq!(client.abort(named).await.unwrap().into_inner().requests, 1);
        assert_eq!(script.unwanted().await, (sequence.id, Unwanted::Abandoned));
    });
    assert_eq!((response.status, &response.json()["error"]["code"]), (499, &json!("request_aborted")));
}

#[tokio::test]
async fn texts_become_tokens_and_tokens_texts() {
    let (server, _script) = Server::start(options()).await;
    let mut client = InferenceClient::new(channel(&server).await);
    let prompt = |text: &str, add_special_tokens| TokenizeRequest {
        input: Some(tokenize_request::Input::Prompt(text.into())),
        add_special_tokens,
        ..TokenizeRequest::default()
    };
    let plain = client.tokenize(prompt("Hi", Some(false))).await.unwrap().into_inner();
    assert_eq!((plain.ids.clone(), plain.max_context), (spell("Hi"), 512));
    let with_begin = client.tokenize(prompt("Hi", None)).await.unwrap().into_inner();
    assert_eq!((with_begin.ids[0], &with_begin.ids[1..]), (0, &plain.ids[..]));
    let of = |ids: Vec<u32>| DetokenizeRequest { ids, ..DetokenizeRequest::default() };
    assert_eq!(client.detokenize(of(plain.ids)).await.unwrap().into_inner().text, "Hi");
    let chat = tokenize_request::Input::Chat(chat(vec![user("Hi")]).chat.unwrap());
    let request = TokenizeRequest { input: Some(chat), ..TokenizeRequest::default() };
    let over_http = json!({"messages": [{"role": "user", "content": "Hi"}]});
    let over_http = post(server.address, "/tokenize", &over_http).await.json();
    assert_eq!(json!(client.tokenize(request.clone()).await.unwrap().into_inner().ids), over_http["tokens"]);
    let twice = TokenizeRequest { add_special_tokens: Some(true), ..request };
    for (wrong, field) in [(twice, "add_special_tokens"), (TokenizeRequest::default(), "input")] {
        wrong_field(&client.tokenize(wrong).await.unwrap_err(), field);
    }
    wrong_field(&client.detokenize(of(vec![768])).await.unwrap_err(), "ids");
    let other = DetokenizeRequest { model: "other".into(), ..DetokenizeRequest::default() };
    assert_eq!(client.detokenize(other).await.unwrap_err().code(), Code::NotFound);
}

#[tokio::test]
async fn the_load_is_told_also_where_all_places_are_taken() {
    let (server, mut script) = Server::start(ServeOptions { max_concurrent_requests: 1, ..options() }).await;
    let mut client = InferenceClient::new(channel(&server).await);
    let mut other = client.clone();
    let (stream, sequence) = tokio::join!(other.generate(tokens(&[5])), script.accept());
    let load = client.get_load(GetLoadRequest {}).await.unwrap().into_inner();
    assert_eq!((load.ready, load.state.as_str(), load.requests, load.max_requests), (true, "ready", 1, 1));
    script.state.send_replace(EngineState::Recovering("rank 1".into()));
    let load = client.get_load(GetLoadRequest {}).await.unwrap().into_inner();
    assert!(!load.ready && load.state.contains("rank 1"), "{load:?}");
    drop((stream, sequence));
}

#[tokio::test]
async fn the_model_is_described() {
    let (server, _script) = Server::start(options()).await;
    let mut client = InferenceClient::new(channel(&server).await);
    let model = client.get_model(GetModelRequest { model: String::new() }).await.unwrap().into_inner();
    assert_eq!((model.id.as_str(), model.vocab_size, model.max_context), ("tiny", 768, 512));
    assert_eq!((model.tensor_parallel, model.bit_domain.as_str()), (2, "cpu-test"));
    let status = client.get_model(GetModelRequest { model: "other".into() }).await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
}

#[tokio::test]
async fn health_follows_the_engine() {
    let (server, script) = Server::start(options()).await;
    let mut client = HealthClient::new(channel(&server).await);
    let service = "looplane.inference.v1.Inference".to_owned();
    let mut watch = client.watch(HealthCheckRequest { service }).await.unwrap().into_inner();
    let mut status = async || watch.next().await.unwrap().unwrap().status();
    while status().await != ServingStatus::Serving {}
    script.state.send_replace(EngineState::Recovering("rank 1".into()));
    assert_eq!(status().await, ServingStatus::NotServing);
    script.state.send_replace(EngineState::Ready);
    assert_eq!(status().await, ServingStatus::Serving);
    server.stop.drain.cancel();
    assert_eq!(status().await, ServingStatus::NotServing);
}

#[tokio::test]
async fn reflection_speaks_both_versions_and_knows_the_details_of_errors() {
    let (server, _script) = Server::start(options()).await;
    let channel = channel(&server).await;
    macro_rules! reflected {
        ($version:ident) => {{
            use tonic_reflection::pb::$version::{
                ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
                server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
            };
            let asks = async |message| {
                let request = ServerReflectionRequest { host: String::new(), message_request: Some(message) };
                let mut client = ServerReflectionClient::new(channel.clone());
                let stream = client.server_reflection_info(tokio_stream::once(request)).await.unwrap();
                stream.into_inner().next().await.unwrap().unwrap().message_response.unwrap()
            };
            for kind in ["Status", "ErrorInfo", "BadRequest", "RetryInfo"] {
                let symbol = MessageRequest::FileContainingSymbol(format!("google.rpc.{kind}"));
                let answer = asks(symbol).await;
                assert!(matches!(answer, MessageResponse::FileDescriptorResponse(_)), "{kind}: {answer:?}");
            }
            for file in ["google/protobuf/any.proto", "google/protobuf/duration.proto"] {
                let answer = asks(MessageRequest::FileByFilename(file.into())).await;
                assert!(matches!(answer, MessageResponse::FileDescriptorResponse(_)), "{file}: {answer:?}");
            }
            match asks(MessageRequest::ListServices(String::new())).await {
                MessageResponse::ListServicesResponse(list) => {
                    list.service.into_iter().map(|service| service.name).collect::<Vec<_>>()
                }
                other => panic!("{other:?}"),
            }
        }};
    }
    for names in [reflected!(v1), reflected!(v1alpha)] {
        assert!(names.contains(&"looplane.inference.v1.Inference".to_owned()), "{names:?}");
        assert!(!names.iter().any(|name| name.contains("worker")), "{names:?}");
    }
}

/// As Google's clients ask by reflection: the next question follows the answer to the one before.
#[tokio::test]
async fn questions_of_one_stream_are_answered_one_after_the_other() {
    use tonic_reflection::pb::v1alpha::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let (server, _script) = Server::start(options()).await;
    let (questions, receiver) = tokio::sync::mpsc::channel(1);
    let mut client = ServerReflectionClient::new(channel(&server).await);
    let receiver = tokio_stream::wrappers::ReceiverStream::new(receiver);
    let mut answers = client.server_reflection_info(receiver).await.unwrap().into_inner();
    for kind in ["Status", "ErrorInfo", "BadRequest"] {
        let symbol = MessageRequest::FileContainingSymbol(format!("google.rpc.{kind}"));
        questions.send(ServerReflectionRequest { host: String::new(), message_request: Some(symbol) }).await.unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(20), answers.next()).await.expect("it is answered");
        let answer = answer.unwrap().unwrap().message_response.unwrap();
        assert!(matches!(answer, MessageResponse::FileDescriptorResponse(_)), "{kind}: {answer:?}");
    }
}

#[tokio::test]
async fn unknown_methods_are_unimplemented_and_http_still_answers() {
    let (server, _script) = Server::start(options()).await;
    let mut client = tonic::client::Grpc::new(channel(&server).await);
    client.ready().await.unwrap();
    let codec = tonic_prost::ProstCodec::<GetModelRequest, GetModelRequest>::default();
    for path in ["/looplane.inference.v9.Nothing/Do", "/looplane.inference.v1.Inference/x/GetModel"] {
        let (path, codec) = (path.parse().unwrap(), codec.clone());
        let request = tonic::Request::new(GetModelRequest::default());
        let status = client.unary::<GetModelRequest, GetModelRequest, _>(request, path, codec).await.unwrap_err();
        assert_eq!(status.code(), Code::Unimplemented, "{status}");
        client.ready().await.unwrap();
    }
    assert_eq!(get(server.address, "/health/live").await.status, 200);
    let scrape = Scrape::parse(&get(server.address, "/metrics").await.body);
    assert_eq!(scrape.value("request_errors_total", &[("code", "not_found")]), 2.0);
}

const GENERATE: &str = "/looplane.inference.v1.Inference/Generate";
const GET_MODEL: &str = "/looplane.inference.v1.Inference/GetModel";
const GRPC: &str = "application/grpc";

/// Field 1 with a length that the message does not have.
const UNDECODABLE: &[u8] = &[0, 0, 0, 0, 2, 0x0a, 0x7f];

#[tokio::test]
async fn a_message_that_is_no_protobuf_is_the_clients_fault() {
    let (server, mut script) = Server::start(options()).await;
    let mut connection = Connection::open(server.address, None).await;
    for method in [GENERATE, GET_MODEL] {
        let response = connection.send(method, GRPC, UNDECODABLE).await;
        assert_eq!(grpc_status(response).await, Code::InvalidArgument as i32, "{method}");
    }
    script.nothing_more();
}

#[tokio::test]
async fn a_message_has_a_place_before_it_is_read_and_a_limit_in_time() {
    let client_limits = ClientLimits { body: Duration::from_millis(300), ..ClientLimits::default() };
    let (server, mut script) =
        Server::start(ServeOptions { max_concurrent_requests: 1, client_limits, ..options() }).await;
    let mut connection = Connection::open(server.address, None).await;
    let (_frames, slow) = connection.request(GENERATE, GRPC);
    let slow = tokio::spawn(slow);
    let crowded = async {
        loop {
            let refused = post(server.address, "/v1/completions", &serde_json::json!({"prompt": ""})).await;
            if refused.status == 429 {
                return;
            }
        }
    };
    tokio::time::timeout(crate::SOON, crowded).await.expect("the message that does not come has the only place");
    let response = slow.await.unwrap().unwrap();
    assert_eq!(grpc_status(response).await, Code::DeadlineExceeded as i32);
    let (_frames, slow) = connection.request(GET_MODEL, GRPC);
    assert_eq!(grpc_status(slow.await.unwrap()).await, Code::DeadlineExceeded as i32, "it has no place, but a limit");
    // The place is free again.
    let (received, _) = tokio::join!(collect(channel(&server).await, tokens(&[5])), script.play(answer("x")));
    received.unwrap();
}
