//! What is refused, by which code and field, and what is no call at all.

use super::*;

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
