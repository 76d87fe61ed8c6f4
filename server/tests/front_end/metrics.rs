//! `/metrics`: what the front end counts, and that it answers whatever the engine does.

use std::{path::Path, time::Duration};

use looplane_server::{
    drafts::DraftStep,
    engine::{EngineState, SequenceEvent, SubmitError},
    sched::Load,
};
use serde_json::json;
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    Server,
    client::{get, open, post, read, read_until},
    engine::{answer, model, token},
    keys, options,
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
    let full = SubmitError::QueueFull { waiting: 8, limit: 8, what: "sequences".into() };
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

/// A row of docs/metrics.md: name as queries have it, type, labels but for the model's name, meaning.
type Row = [String; 4];

fn documented() -> Vec<Row> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md");
    let page = std::fs::read_to_string(page).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `vllm:") || line.starts_with("| `looplane_"));
    let cells = |line: &str| -> Row {
        let cells: Vec<String> = line.trim_matches('|').split('|').map(|cell| cell.trim().replace('`', "")).collect();
        cells.try_into().unwrap_or_else(|_| panic!("four cells: {line}"))
    };
    rows.map(cells).collect()
}

/// The same of what a scrape says.
fn told(text: &str) -> Vec<Row> {
    let family = |line: &str| -> Row {
        let (name, kind) = line.split_once(' ').unwrap();
        let name = if kind == "counter" { format!("{name}_total") } else { name.to_owned() };
        let bare = name.trim_end_matches("_total");
        let help = text.lines().find_map(|line| line.strip_prefix("# HELP ")?.strip_prefix(bare)?.strip_prefix(' '));
        let samples = text.lines().filter_map(|line| line.strip_prefix(bare)?.split_once('{'));
        let is_sample = |suffix: &str| ["", "_total", "_bucket", "_sum", "_count"].contains(&suffix);
        let of_samples =
            samples.filter(|(suffix, _)| is_sample(suffix)).flat_map(|(_, rest)| rest.split("\",").collect::<Vec<_>>());
        let names = of_samples.filter_map(|label| Some(label.split_once("=\"")?.0));
        let mut labels: Vec<&str> = names.filter(|label| !["model_name", "le"].contains(label)).collect();
        labels.sort_unstable();
        labels.dedup();
        let help = help.and_then(|help| help.strip_suffix('.')).unwrap_or_else(|| panic!("no help for {name}"));
        [name.clone(), kind.into(), labels.join(", "), help.into()]
    };
    text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).map(family).collect()
}

#[tokio::test]
async fn the_docs_have_every_series_and_no_other() {
    let (server, mut script, keys) = keys::server(&[keys::limits(None, None)], options()).await;
    let request = json!({"prompt": [5]});
    let (response, _) =
        tokio::join!(async { read(keys::send(&server, &keys[0], &request).await).await }, script.play(answer("x")));
    assert_eq!(response.status, 200);
    read(keys::send(&server, &keys[0], &json!({"prompt": []})).await).await;
    // What a group would count.
    script.metrics.drafts(DraftStep { drafted: 2, accepted: 1 });
    script.metrics.set_load(Load { kv_pages: 8, ..Load::default() });
    script.metrics.ranks.set_present(1);
    script.metrics.ranks.iter().for_each(|rank| rank.set_read_limit(1 << 30));
    script.metrics.ranks.step(0, Duration::from_millis(3), Some(Duration::from_millis(1)));
    let head =
        format!("GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {}\r\n\r\n", keys[0]);
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(head.as_bytes()).await.unwrap();
    let text = read(stream).await.body;
    let (mut told, mut documented) = (told(&text), documented());
    told.sort();
    documented.sort();
    let row = |row: &Row| format!("| `{}` | {} | {} | {} |", row[0], row[1], row[2], row[3]);
    let missing: Vec<String> = told.iter().filter(|told| !documented.contains(told)).map(row).collect();
    let untrue: Vec<String> = documented.iter().filter(|said| !told.contains(said)).map(row).collect();
    assert!(
        missing.is_empty() && untrue.is_empty(),
        "missing:\n{}\nuntrue:\n{}",
        missing.join("\n"),
        untrue.join("\n")
    );
    assert_eq!(told.len(), documented.len(), "each once");
}

/// What the endpoint picker of the Gateway API inference extension looks for where it is told nothing else.
#[tokio::test]
async fn an_endpoint_picker_finds_what_it_reads_of_vllm() {
    let (server, script) = Server::start(options()).await;
    let before = get(server.address, "/metrics").await.body;
    assert!(!before.contains("cache_config_info{"), "nothing is known of the cache before a group has loaded");
    script.metrics.set_load(Load { running: 3, waiting: 2, kv_pages_used: 2, kv_pages: 8, ..Load::default() });
    script.metrics.page_positions.set(64);
    let text = get(server.address, "/metrics").await.body;
    let engine = "model_name=\"tiny\",engine=\"0\"";
    for line in [
        format!("vllm:num_requests_running{{{engine}}} 3"),
        format!("vllm:num_requests_waiting{{{engine}}} 2"),
        format!("vllm:kv_cache_usage_perc{{{engine}}} 0.25"),
        format!("vllm:cache_config_info{{{engine},block_size=\"64\",num_gpu_blocks=\"8\"}} 1"),
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    // Its parser takes the older text format: an exemplar behind a value would make it give up all of the answer.
    assert!(text.lines().all(|line| {
        line.starts_with('#')
            || line
                .rsplit_once(' ')
                .is_some_and(|(series, value)| series.ends_with('}') && value.parse::<f64>().is_ok())
    }));
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
