//! What `Chat` makes of messages, and prompts of both calls.

use super::*;

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
