//! What a server says of itself: model, tokens, load, health, reflection.

use super::*;

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
