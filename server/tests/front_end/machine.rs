//! `/machine`, which the page at `/` polls, and the end of requests by their ids.

use std::time::Duration;

use looplane_server::{engine::EngineState, listener::ServeOptions, metrics::StepRun, sched::Load};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    Server,
    client::{Response, get, open, read, read_until, request},
    conform,
    engine::{answer, prompt},
    keys, options,
};

async fn machine(server: &Server) -> Value {
    let response = get(server.address, "/machine").await;
    assert_eq!(response.status, 200);
    response.json()
}

/// With a key.
async fn asked(server: &Server, method: &str, path: &str, key: &str) -> Response {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {key}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let response = read(stream).await;
    conform::check(method, path, &response);
    response
}

#[tokio::test]
async fn it_tells_what_is_counted_and_at_hand() {
    let (server, script) = Server::start(options()).await;
    let empty = machine(&server).await;
    assert_eq!((&empty["state"], &empty["replicas"][0]["ranks"]), (&json!("ready"), &json!([])));
    script.metrics.set_load(Load { running: 3, waiting: 2, kv_pages_used: 2, kv_pages: 8, ..Load::default() });
    script.metrics.ranks.set_present(2);
    let times = |ms, wait: Option<u64>| (Duration::from_millis(ms), wait.map(Duration::from_millis));
    for (time, wait) in [times(8, Some(4)), times(2, Some(1))] {
        script.metrics.ranks.step(0, time, wait);
        script.metrics.ranks.step(1, time, None);
        script.metrics.step(StepRun { decode_rows: 3, prompt_rows: 0, time, wait, read_bytes: 100 });
        script.metrics.ranks.iter().for_each(|rank| rank.read(50));
    }
    script.metrics.ranks.iter().next().unwrap().set_read_limit(10_000);
    let told = machine(&server).await;
    let replica = &told["replicas"][0];
    assert_eq!([&replica["running"], &replica["waiting"], &replica["kv_pages_used"]], [3, 2, 2]);
    assert_eq!(replica["steps"], json!({"count": 2, "seconds": 0.01}));
    let newest = json!({"seconds": 0.002, "wait_seconds": 0.001, "read_bytes": 50});
    assert_eq!(
        replica["ranks"][0],
        json!({"step_seconds": 0.01, "wait_seconds": 0.005, "read_bytes": 100, "read_limit": 10_000,
               "newest_step": newest})
    );
    // As of a GPU: what it does not tell is not made up.
    let [wait, limit] = ["wait_seconds", "read_limit"].map(|field| &replica["ranks"][1][field]);
    assert_eq!(
        (wait, limit, &replica["ranks"][1]["newest_step"]["wait_seconds"]),
        (&json!(null), &json!(null), &json!(null))
    );
    for state in [EngineState::Recovering("rank 1 was killed".into()), EngineState::Draining] {
        script.state.send_replace(state);
        let told = machine(&server).await;
        assert_eq!(told["state"], told["replicas"][0]["state"]);
        assert_ne!(told["detail"], "ready");
    }
}

#[tokio::test]
async fn requests_are_told_of_from_their_arrival_to_behind_their_end() {
    let (server, mut script) = Server::start(options()).await;
    let mut client = open(server.address, "/v1/completions", &json!({"prompt": [5], "stream": true}).to_string()).await;
    let sequence = script.accept().await;
    read_until(&mut client, "text/event-stream").await;
    let told = machine(&server).await;
    let of = |told: &Value, list: &str| told["requests"][list].as_array().unwrap().clone();
    let running = of(&told, "newest");
    assert_eq!((running.len(), of(&told, "ended").len(), &told["requests"]["own"]), (1, 0, &json!(1)));
    let (id, seconds) = (running[0]["id"].clone(), &running[0]["seconds"]);
    assert!(
        seconds["submitted"].is_number() && seconds["admitted"].is_null() && seconds["ended"].is_null(),
        "{seconds}"
    );
    tokio::time::sleep(Duration::from_millis(60)).await;
    let mut events = answer("xy");
    let rest = events.split_off(1);
    sequence.send(prompt(0, Vec::new())).await;
    sequence.send(events.remove(0)).await;
    read_until(&mut client, "\"x\"").await;
    let told = machine(&server).await;
    let running = of(&told, "newest");
    let seconds = &running[0]["seconds"];
    let at = |point: &str| seconds[point].as_f64().unwrap_or_else(|| panic!("{point} of {seconds}"));
    assert!(at("submitted") < at("admitted") && at("admitted") < at("computed") && at("computed") < at("total"));
    assert_eq!((&running[0]["completion_tokens"], &running[0]["reason"]), (&json!(1), &json!(null)));
    for event in rest {
        sequence.send(event).await;
    }
    read_until(&mut client, "[DONE]").await;
    drop(client);
    let ended = loop {
        let told = machine(&server).await;
        if told["requests"]["own"] == 0 {
            break of(&told, "ended");
        }
    };
    assert_eq!(
        (&ended[0]["id"], &ended[0]["reason"], &ended[0]["completion_tokens"]),
        (&id, &json!("stop"), &json!(3))
    );
    assert!(ended[0]["seconds"]["ended"].is_number());
}

#[tokio::test]
async fn a_request_is_ended_by_its_id_by_its_own_key_alone() {
    let (server, mut script, keys) =
        keys::server(&[keys::limits(None, None), keys::limits(None, None)], ServeOptions { ..options() }).await;
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    let (id, body) = ("a/b%c", "{\"prompt\": [5]}");
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
         authorization: Bearer {}\r\nx-request-id: {id}\r\ncontent-length: {}\r\n\r\n{body}",
        keys[0],
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let sequence = script.accept().await;
    let path = "/requests/a%2Fb%25c";
    // Whoever has another key, or none, learns nothing of it.
    let told = asked(&server, "GET", "/machine", &keys[1]).await.json();
    assert_eq!([&told["requests"]["served"], &told["requests"]["own"]], [1, 0]);
    assert_eq!(told["requests"]["newest"], json!([]));
    keys::refused(&asked(&server, "DELETE", path, &keys[1]).await, 404, "request_not_found");
    keys::refused(&request(server.address, "DELETE", path, "text/plain", b"").await, 401, "invalid_api_key");
    keys::refused(&request(server.address, "GET", "/machine", "text/plain", b"").await, 401, "invalid_api_key");
    let told = asked(&server, "GET", "/machine", &keys[0]).await.json();
    assert_eq!(told["requests"]["newest"][0]["id"], id);
    assert_eq!(asked(&server, "DELETE", path, &keys[0]).await.json(), json!({"requests": 1}));
    assert_eq!(script.cancelled().await, sequence.id);
    keys::refused(&read(stream).await, 499, "request_aborted");
    keys::refused(&asked(&server, "DELETE", path, &keys[0]).await, 404, "request_not_found");
}
