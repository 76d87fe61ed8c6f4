//! `/replicas`: what is told of them, and who may have one restarted.

use std::time::Duration;

use looplane_server::{
    engine::{Command, EngineState, Restart, RestartError},
    keys::KeyLimits,
};
use serde_json::{Value, json};

use crate::{
    Server,
    client::{Response, get, post, read, request},
    engine::Script,
    keys, options,
};

const PATH: &str = "/replicas/0/restart";

/// The restart that the engine is asked for, which is answered with `answer`.
async fn asked(script: &mut Script, answer: Result<(), RestartError>) -> (usize, Duration, bool) {
    match script.command().await {
        Command::Restart(Restart { replica, limit, even_if_last, reply, .. }) => {
            reply.send(answer).expect("the front end waits for it");
            (replica, limit, even_if_last)
        }
        other => panic!("a restart was expected, not {other:?}"),
    }
}

fn code(response: &Response) -> (u16, Value) {
    (response.status, response.json()["error"]["code"].clone())
}

#[tokio::test]
async fn what_is_asked_reaches_the_engine_and_its_refusals_are_told() {
    let (server, mut script) = Server::start(options()).await;
    script.state.send_replace(EngineState::Recovering("restarting on request".into()));
    let told = get(server.address, "/replicas").await.json();
    let detail = "recovering (restarting on request)";
    let replica = json!({"id": 0, "state": "recovering", "detail": detail, "running": 0, "waiting": 0});
    assert_eq!(told, json!({"replicas": [replica]}));
    for (body, limit_s, even_if_last) in [
        // As long as sequences have where the server shuts down.
        (json!({}), 20, false),
        (json!({"limit_seconds": 0, "even_if_last": true}), 0, true),
        (json!({"limit_seconds": 86_400, "even_if_last": null}), 86_400, false),
    ] {
        let (response, asked) = tokio::join!(post(server.address, PATH, &body), asked(&mut script, Ok(())));
        assert_eq!(asked, (0, Duration::from_secs(limit_s), even_if_last));
        assert_eq!((response.status, response.json()), (200, replica.clone()));
    }
    for (error, status, word) in [
        (RestartError::UnderWay { replica: 3 }, 409, "restart_under_way"),
        (RestartError::NotReady { replica: 0 }, 409, "replica_not_ready"),
        (RestartError::LastReady { replica: 0 }, 409, "last_ready_replica"),
        (RestartError::ShuttingDown, 503, "shutting_down"),
    ] {
        let says = error.to_string();
        let (response, _) = tokio::join!(post(server.address, PATH, json!({})), asked(&mut script, Err(error)));
        assert_eq!(code(&response), (status, json!(word)));
        assert_eq!(response.json()["error"]["message"], says);
    }
}

#[tokio::test]
async fn what_cannot_be_meant_is_refused_before_the_engine_is_asked() {
    let (server, mut script) = Server::start(options()).await;
    for (path, body, status, word) in [
        ("/replicas/1/restart", json!({}), 404, "replica_not_found"),
        ("/replicas/-1/restart", json!({}), 404, "not_found"),
        ("/replicas/first/restart", json!({}), 404, "not_found"),
        (PATH, json!({"limit_seconds": -1}), 400, "invalid_value"),
        (PATH, json!({"limit_seconds": 86_401}), 400, "invalid_value"),
        (PATH, json!({"limit_seconds": "0"}), 400, "invalid_type"),
        (PATH, json!({"even_if_last": 1}), 400, "invalid_type"),
        (PATH, json!({"force": true}), 400, "unknown_parameter"),
        (PATH, json!([]), 400, "invalid_type"),
    ] {
        assert_eq!(code(&post(server.address, path, &body).await), (status, json!(word)), "{path} {body}");
    }
    // A page of another origin can send no body of this type unasked.
    let response = request(server.address, "POST", PATH, "text/plain", b"{}").await;
    assert_eq!(code(&response), (415, json!("unsupported_media_type")));
    assert_eq!(request(server.address, "GET", PATH, "application/json", b"").await.status, 405);
    script.nothing_more();
}

#[tokio::test]
async fn of_several_keys_only_those_marked_may_and_all_may_look() {
    let admin = KeyLimits { admin: true, ..KeyLimits::default() };
    let (server, mut script, keys) = keys::server(&[KeyLimits::default(), admin], options()).await;
    assert_eq!(post(server.address, PATH, json!({})).await.status, 401);
    let refused = read(keys::send_to(&server, PATH, &keys[0], &json!({})).await).await;
    assert_eq!(code(&refused), (403, json!("not_allowed")));
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("looplane key ID --admin"), "{message}");
    script.nothing_more();
    let stream = keys::send_to(&server, PATH, &keys[1], &json!({})).await;
    assert_eq!(asked(&mut script, Ok(())).await.0, 0);
    assert_eq!(read(stream).await.status, 200);
}

#[tokio::test]
async fn without_keys_a_server_that_others_reach_restarts_nothing() {
    let (server, mut script) = Server::start_at("0.0.0.0:0", options()).await;
    let refused = post(server.address, PATH, json!({})).await;
    assert_eq!(code(&refused), (403, json!("not_allowed")));
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("--api-key-file") && message.contains("--host"), "{message}");
    script.nothing_more();
    assert_eq!(get(server.address, "/replicas").await.status, 200);
}
