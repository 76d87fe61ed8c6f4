//! What deploy/monitoring asks Prometheus, asked for real: Prometheus scrapes the product while it serves, and every
//! query of the dashboard and every rule finds something.

use std::{
    collections::HashSet,
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::Request;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::common::{PATIENCE, Server, until};

/// Names Prometheus' binary; where it is set, nothing is skipped.
const VARIABLE: &str = "LOOPLANE_PROMETHEUS";

/// Prometheus' time between two scrapes, and between two looks at what it found.
const SCRAPE_PERIOD: Duration = Duration::from_secs(1);

/// The binary to use, or why there is none.
fn find() -> Result<PathBuf, String> {
    // Empty where it was to be set from a script that failed.
    let named = std::env::var_os(VARIABLE).filter(|named| !named.is_empty());
    let named = named.ok_or_else(|| format!("no Prometheus: give {VARIABLE}=\"$(.ci/prometheus)\""))?;
    let path = PathBuf::from(named);
    assert!(path.is_file(), "{VARIABLE} is {}, where there is no file", path.display());
    Ok(path)
}

fn deploy(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Prometheus with the configuration of deploy/compose; gone when dropped.
struct Prometheus {
    process: Child,
    base: String,
    client: Client<HttpConnector, Full<Bytes>>,
    _dir: tempfile::TempDir,
}

impl Prometheus {
    async fn start(binary: &Path, server: &Server) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let target = server.base().strip_prefix("http://").expect("it speaks HTTP");
        let config = deploy("compose/prometheus.yaml");
        assert!(config.contains("looplane:8000") && config.contains("15s"), "{config}");
        let config = config.replace("looplane:8000", target).replace("15s", &format!("{}s", SCRAPE_PERIOD.as_secs()));
        fs::write(dir.path().join("prometheus.yaml"), config).expect("writable");
        fs::write(dir.path().join("rules.yaml"), deploy("monitoring/rules.yaml")).expect("writable");
        let mut process = Command::new(binary)
            .args(["--web.listen-address=127.0.0.1:0", "--config.file"])
            .arg(dir.path().join("prometheus.yaml"))
            .arg("--storage.tsdb.path")
            .arg(dir.path().join("data"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("Prometheus starts");
        let mut lines = BufReader::new(process.stderr.take().expect("piped")).lines().map_while(Result::ok);
        let mut said = Vec::new();
        let address = loop {
            let line = lines.next().unwrap_or_else(|| panic!("Prometheus ended: {said:#?}"));
            if let Some((_, address)) = line.split_once("msg=\"Listening on\" address=") {
                break address.to_owned();
            }
            said.push(line);
        };
        // Reads to the end, so that it never blocks on a full pipe.
        std::thread::spawn(move || lines.for_each(drop));
        let client = Client::builder(TokioExecutor::new()).build_http();
        let prometheus = Self { process, base: format!("http://{address}"), client, _dir: dir };
        // It answers 503 until it has read its configuration.
        until("Prometheus is ready", async || {
            let ready = format!("{}/-/ready", prometheus.base).parse().expect("an address");
            prometheus.client.get(ready).await.expect("Prometheus answers").status() == 200
        })
        .await;
        prometheus
    }

    /// What its API says to a GET, or to a POST of a query.
    async fn ask(&self, path: &str, query: Option<&str>) -> Value {
        let request = Request::builder().uri(format!("{}/api/v1/{path}", self.base));
        let request = match query {
            None => request.body(Full::default()),
            Some(query) => {
                let bytes: String = query.bytes().map(|byte| format!("%{byte:02x}")).collect();
                let form = "application/x-www-form-urlencoded";
                request.method("POST").header("content-type", form).body(Full::from(format!("query={bytes}")))
            }
        };
        let response = self.client.request(request.expect("a request")).await.expect("Prometheus answers");
        let body = response.into_body().collect().await.expect("the body arrives whole").to_bytes();
        let answer: Value = serde_json::from_slice(&body).unwrap_or(Value::Null);
        assert_eq!(answer["status"], "success", "{path} {query:?}: {answer}");
        answer["data"].clone()
    }

    /// Those of all groups.
    async fn rules(&self) -> Vec<Value> {
        let data = self.ask("rules", None).await;
        let groups = data["groups"].as_array().expect("groups").iter();
        groups.flat_map(|group| group["rules"].as_array().expect("rules").clone()).collect()
    }

    /// The series that a query finds, with their labels and values.
    async fn found(&self, query: &str) -> Vec<(Value, f64)> {
        let data = self.ask("query", Some(query)).await;
        let series = data["result"].as_array().expect("a vector").iter();
        let value = |one: &Value| one["value"][1].as_str().and_then(|value| value.parse().ok()).expect("a number");
        series.map(|one| (one["metric"].clone(), value(one))).collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // An error here means that it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// What has to be found, and by whom.
struct Query {
    of: String,
    text: String,
    /// A label that what is found has.
    label: Option<String>,
    /// Nothing to be found is no fault.
    may_be_empty: bool,
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no text")).to_owned()
}

/// Those of the dashboard. A panel that is empty in health says so to whoever looks at it: `noValue`.
fn of_dashboard(dashboard: &Value) -> Vec<Query> {
    let fill = |text: &Value| {
        let text = string(text).replace("$__rate_interval", "1m").replace("$__range", "30m");
        text.replace("$instance", ".*").replace("$model", ".*")
    };
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let may_be_empty = panel["fieldConfig"]["defaults"]["noValue"].is_string();
            queries.push(Query { of: string(&panel["title"]), text: fill(&target["expr"]), label: None, may_be_empty });
        }
    }
    for variable in dashboard["templating"]["list"].as_array().expect("variables") {
        if variable["type"] == "query" {
            let text = fill(&variable["query"]["query"]);
            let asked = text.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
            let (series, label) = asked.and_then(|asked| asked.rsplit_once(", ")).expect("values of a label");
            let (of, label) = (string(&variable["name"]), Some(label.to_owned()));
            queries.push(Query { of, text: series.to_owned(), label, may_be_empty: false });
        }
    }
    queries
}

/// Those of a rule. What an alert waits for is not there in health, but the series that it looks at are.
fn of_rule(rule: &Value) -> Vec<Query> {
    let (of, text) = (string(&rule["name"]), string(&rule["query"]));
    let query = |text: String| Query { of: of.clone(), text, label: None, may_be_empty: false };
    if rule["type"] == "recording" {
        return vec![query(text), query(string(&rule["name"]))];
    }
    let found = selectors(&text);
    assert!(!found.is_empty(), "{rule}");
    found.into_iter().map(query).collect()
}

/// The names of series in a query, with what stands in braces behind them.
fn selectors(query: &str) -> Vec<String> {
    let of_name = |character: char| character.is_ascii_alphanumeric() || "_:".contains(character);
    let mut found = Vec::new();
    let mut rest = query;
    while let Some(start) = rest.find(of_name) {
        rest = &rest[start..];
        let end = rest.find(|character| !of_name(character)).unwrap_or(rest.len());
        let matchers = rest[end..].strip_prefix('{').map_or(0, |rest| rest.find('}').expect("a closed brace") + 2);
        if ["looplane", "vllm:"].iter().any(|ours| rest.starts_with(ours)) || &rest[..end] == "up" {
            found.push(rest[..end + matchers].to_owned());
        }
        rest = &rest[end + matchers..];
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn dashboard_and_rules_find_what_the_product_tells() {
    let Some(binary) = find().map_err(|why| eprintln!("skipped: {why}")).ok() else { return };
    let dir = tempfile::tempdir().expect("a temporary directory");
    let file = dir.path().join("keys");
    let [(free, one), (limited, other)] = [draw(&["free"]), draw(&["limited", "--requests-per-minute", "1"])];
    fs::write(&file, one + &other).expect("writable");
    let file = file.to_str().expect("UTF-8");
    let server = Server::start(&["--tp", "2", "--metrics-without-key", "--api-key-file", file]).await;
    let complete = async |key: &str| {
        // Long enough for pages to be cached, and it repeats itself, for drafts.
        let prompt = "one two three four five six seven eight nine ten ".repeat(12);
        let body = json!({"prompt": prompt, "max_tokens": 40, "ignore_eos": true, "temperature": 0}).to_string();
        let headers = [("content-type", "application/json"), ("authorization", key)];
        server.call(hyper::Method::POST, "/v1/completions", &headers, body).await.status().as_u16()
    };
    assert_eq!([complete(&limited).await, complete(&limited).await], [200, 429]);

    let prometheus = Prometheus::start(&binary, &server).await;
    let dashboard = serde_json::from_str(&deploy("monitoring/dashboard.json")).expect("JSON");
    let mut wanted = of_dashboard(&dashboard);
    wanted.extend(prometheus.rules().await.iter().flat_map(of_rule));
    assert!(wanted.len() > 60, "{} queries", wanted.len());
    let start = Instant::now();
    // What is empty may become full with the next scrape, or the next request.
    while !wanted.is_empty() {
        let names: Vec<_> = wanted.iter().map(|query| (&query.of, &query.text)).collect();
        assert!(start.elapsed() < PATIENCE, "they find nothing in {PATIENCE:?}: {names:#?}");
        assert_eq!(complete(&free).await, 200);
        complete(&limited).await;
        let mut missing = Vec::new();
        for query in wanted {
            let found = prometheus.found(&query.text).await;
            let has_label = |metric: &Value| query.label.as_ref().is_none_or(|label| metric[label].is_string());
            let counts = |(metric, value): &(Value, f64)| value.is_finite() && has_label(metric);
            if !query.may_be_empty && !found.iter().any(counts) {
                missing.push(query);
            }
        }
        wanted = missing;
        sleep(SCRAPE_PERIOD).await;
    }
    let (_, metrics) = server.get("/metrics").await;
    let complaints = lint(&binary.with_file_name("promtool"), metrics.as_str().expect("no JSON"));
    // vLLM's names are as vLLM has them.
    let ours = complaints.lines().filter(|line| !line.ends_with(" metric names should not contain ':'"));
    assert_eq!(ours.collect::<Vec<_>>(), [""; 0]);
    for rule in prometheus.rules().await {
        assert!(rule["health"] == "ok" && rule["state"] != "firing", "{rule}");
    }
}

/// What promtool has against metrics. It reads the older text format, in which a counter's help and type have the whole
/// of its name.
fn lint(promtool: &Path, metrics: &str) -> String {
    let name = |line: &str| line.split(' ').nth(2).expect("help and type have a name").to_owned();
    let types = metrics.lines().filter(|line| line.starts_with("# TYPE ") && line.ends_with(" counter"));
    let counters: HashSet<String> = types.map(name).collect();
    let older = metrics.lines().map(|line| match line.starts_with("# ") && line != "# EOF" {
        true if counters.contains(&name(line)) => line.replacen(&name(line), &format!("{}_total", name(line)), 1),
        _ => line.to_owned(),
    });
    let older = older.collect::<Vec<_>>().join("\n") + "\n";
    let mut promtool = Command::new(promtool)
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("promtool is beside Prometheus");
    let mut input = promtool.stdin.take().expect("piped");
    input.write_all(older.as_bytes()).expect("promtool reads");
    drop(input);
    let output = promtool.wait_with_output().expect("it ends");
    String::from_utf8([output.stdout, output.stderr].concat()).expect("UTF-8")
}

/// A key's header, and its line in the server's file.
fn draw(args: &[&str]) -> (String, String) {
    let drawn = Command::new(env!("CARGO_BIN_EXE_looplane")).arg("key").args(args).output().expect("it draws a key");
    let [key, line] = [drawn.stderr, drawn.stdout].map(|bytes| String::from_utf8(bytes).expect("UTF-8"));
    (format!("Bearer {}", key.trim()), line)
}
