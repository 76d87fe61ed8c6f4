//! `/metrics`: what the front end counts, and that it answers whatever the engine does.

use looplane_server::engine::{EngineState, SequenceEvent, SubmitError};
use serde_json::json;

use crate::{
    Server,
    client::{get, open, post, read_until},
    engine::{answer, model, token},
    options,
    scrape::Scrape,
    spell,
};

const COMPLETION: &str = "/v1/completions";

async fn scrape(server: &Server) -> Scrape {
    let response = get(server.address, "/metrics").await;
    assert_eq!(response.status, 200);
    let content_type = response.header("content-type").expect("a type");
    assert!(content_type.starts_with("application/openmetrics-text; version=1.0.0"), "{content_type}");
    let kinds = response.body.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    for (name, kind) in kinds {
        assert!(["counter", "gauge", "histogram"].contains(&kind), "not every client knows a {kind}: {name}");
    }
    Scrape::parse(&response.body)
}

#[tokio::test]
async fn answers_are_counted_by_route_and_errors_by_code() {
    let (server, mut script) = Server::start(options()).await;
    let request = json!({"prompt": [5]});
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(response.status, 200);
    post(server.address, COMPLETION, json!({"prompt": [5], "colour": "red"})).await;
    post(server.address, COMPLETION, json!({"prompt": [5], "colour": "red"})).await;
    let full = SubmitError::QueueFull { waiting: 8, limit: 8, what: "sequences" };
    tokio::join!(post(server.address, COMPLETION, &request), script.refuse(full));
    // Given up in the middle of a stream, whose head said 200.
    let mut client = open(server.address, COMPLETION, &json!({"prompt": [5], "stream": true}).to_string()).await;
    let sequence = script.accept().await;
    sequence.send(token(spell("x")[0])).await;
    sequence.send(SequenceEvent::Failed("no luck".into())).await;
    read_until(&mut client, "generation_failed").await;
    for path in ["/wp-admin.php", "/.git/config", "/v1/models/no/such"] {
        get(server.address, path).await;
    }
    let scrape = scrape(&server).await;
    let answers = |handler, status| scrape.value("http_requests_total", &[("handler", handler), ("status", status)]);
    assert_eq!([answers(COMPLETION, "200"), answers(COMPLETION, "400"), answers(COMPLETION, "429")], [2.0, 2.0, 1.0]);
    assert_eq!([answers("none", "404"), answers("/v1/models/{*id}", "404")], [2.0, 1.0], "paths are no labels");
    for (code, count) in [
        ("unknown_parameter", 2.0),
        ("rate_limit_exceeded", 1.0),
        ("generation_failed", 1.0),
        ("not_found", 2.0),
        ("model_not_found", 1.0),
    ] {
        assert_eq!(scrape.value("request_errors_total", &[("code", code)]), count, "{code}");
    }
    let model = [("architecture", "LlamaForCausalLM"), ("tensor_parallel", "2"), ("bit_domain", "cpu-test")];
    assert_eq!(scrape.value("model_info", &model), 1.0);
    assert_eq!(scrape.value("build_info", &[("version", env!("CARGO_PKG_VERSION"))]), 1.0);
}

#[tokio::test]
async fn it_answers_in_every_state_that_the_server_outlives() {
    let (server, mut script) = Server::start(options()).await;
    script.model.send_replace(None);
    assert!(!scrape(&server).await.has("model_info"), "nothing is known of a model that loads");
    script.model.send_replace(Some(std::sync::Arc::new(model())));
    for (state, word) in [
        (EngineState::Loading("packing".into()), "loading"),
        (EngineState::Ready, "ready"),
        (EngineState::Recovering("rank 1 was killed".into()), "recovering"),
    ] {
        script.state.send_replace(state);
        let scrape = scrape(&server).await;
        for other in ["loading", "ready", "recovering", "draining", "failed"] {
            assert_eq!(
                scrape.value("engine_state", &[("state", other)]),
                f64::from(u8::from(other == word)),
                "{other}"
            );
        }
    }
    script.state.send_replace(EngineState::Ready);
    // A request that runs keeps a draining server up.
    let mut client = open(server.address, COMPLETION, &json!({"prompt": [5], "stream": true}).to_string()).await;
    let _sequence = script.accept().await;
    read_until(&mut client, "text/event-stream").await;
    server.stop.drain.cancel();
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert_eq!(scrape(&server).await.value("engine_state", &[("state", "draining")]), 1.0);
}
