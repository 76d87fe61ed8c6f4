//! What `Generate` answers, and how a call ends.

use super::*;

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
