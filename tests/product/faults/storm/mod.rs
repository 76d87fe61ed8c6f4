//! A storm on the product from outside: many clients at once on all routes, most of them careless or hostile, and a
//! worker that dies in the middle. Behind it nothing is held for any of them, and who asks gets the bytes of before.

mod client;
mod scene;

use std::{
    collections::BTreeMap,
    fs,
    net::SocketAddr,
    path::Path,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use futures::{StreamExt, stream};
use rustix::process::Signal;
use serde_json::Value;
use tokio::time::{sleep, timeout};

use crate::{
    common::{LOOK_PERIOD, PATIENCE, Rng, Server, draw_key, from_environment, signal, until},
    scrape::Scrape,
};
use client::Answer;
use scene::{Ask, Scene, Storm};

/// Within so long a probe is answered: many times what orchestrators allow, for a machine that is busy otherwise.
const PROBE: Duration = Duration::from_secs(20);
/// Clients at one time.
const CLIENTS: usize = 16;
/// Behind the storm nothing is held for longer: no client that is still there could hold anything for so long.
const CALM: Duration = Duration::from_secs(60);
/// What the server's own memory may grow by, whatever was asked of it: it keeps caches and answers, each with a bound.
const GROWTH_BYTES: u64 = 192 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn behind_a_storm_nothing_is_held_and_nothing_has_changed() {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).expect("it is later than 1970");
    let seed = from_environment("LOOPLANE_STORM_SEED", u64::from(since_1970.subsec_nanos()));
    let scenes = from_environment("LOOPLANE_STORM_SCENES", 240);
    println!("LOOPLANE_STORM_SEED={seed} LOOPLANE_STORM_SCENES={scenes}");

    let dir = tempfile::tempdir().expect("a temporary directory");
    let (keys_file, log) = (dir.path().join("keys"), dir.path().join("log"));
    let keys = ["alice", "bob"].map(|id| draw_key(&[id]));
    fs::write(&keys_file, keys.clone().map(|(_, line)| line).join("\n")).expect("the directory can be written");
    let mut command = Server::command(Path::new(env!("CARGO_BIN_EXE_looplane")));
    command.args(["--tp", "2", "--max-slots", "4", "--kv-pages", "40", "--max-body-bytes", "100000"]);
    command.args(["--max-concurrent-requests", "20", "--max-queued-requests", "12", "--max-connections", "80"]);
    command.arg("--api-key-file").arg(&keys_file).arg("--metrics-without-key");
    let server = Server::spawn(command.stderr(fs::File::create(&log).expect("the directory can be written")));
    let address: SocketAddr = server.base().trim_start_matches("http://").parse().expect("an address");
    // Nothing is asked by connections that stay open: they would be counted.
    until("the server is ready", async || client::get(address, "/health/ready").await.status == 200).await;

    let mut storm = Storm::new(address, keys.map(|(key, _)| key));
    let mut plain = BTreeMap::new();
    for ask in Ask::all() {
        let answer = storm.ask(&ask).await;
        assert_eq!(answer.status, 200, "{ask:?}: {answer:?}");
        storm.calm.insert(ask.clone(), answer.texts(ask.route));
        plain.insert(ask, bare(answer));
    }
    until("calm", async || held(address).await.is_empty()).await;
    let before = (settled_descriptors(&server).await, memory_bytes(&server));

    let victim = *server.workers().last().expect("a worker");
    let mut became: BTreeMap<&str, u64> = BTreeMap::new();
    let mut scenes_ended = 0;
    // It is a storm where some are answered, some sent away, some cut short: there are more scenes until it is one.
    let ends = ["answered over gRPC", "told to come back", "ended by its id", "too late", "refused", "left"];
    let lacking = |became: &BTreeMap<&str, u64>| {
        let all = ends.map(|end| (end, 1)).into_iter().chain([("answered", scenes / 10)]);
        let is_lacking = |(end, least): &(&str, u64)| became.get(end).copied().unwrap_or_default() < *least;
        if scenes < 240 { None } else { { all }.find(is_lacking) }
    };
    let scene = |number| {
        let (storm, scene) = (&storm, Scene::draw(&mut Rng::of(seed, number)));
        async move {
            let what = format!("LOOPLANE_STORM_SEED={seed}: scene {number}, {scene:?}");
            let mut rng = Rng::of(!seed, number);
            let playing = timeout(PATIENCE, storm.play(&scene, &mut rng, number));
            playing
                .await
                .unwrap_or_else(|_| panic!("{what} does not end"))
                .unwrap_or_else(|why| panic!("{what}: {why}"))
        }
    };
    let storming = async {
        let mut numbers = 0..scenes;
        loop {
            let mut run = std::pin::pin!(stream::iter(numbers.clone()).map(scene).buffer_unordered(CLIENTS));
            while let Some(end) = run.next().await {
                *became.entry(end).or_default() += 1;
                scenes_ended += 1;
                if scenes_ended == scenes / 2 {
                    signal(victim, Signal::KILL);
                }
            }
            numbers = numbers.end..numbers.end + 3 * CLIENTS as u64;
            if lacking(&became).is_none() || numbers.end > 3 * scenes {
                break;
            }
        }
    };
    tokio::select! {
        () = storming => {}
        () = stays_alive(address) => unreachable!("it probes for ever"),
    }
    println!("{became:?}");
    assert_eq!(lacking(&became), None, "LOOPLANE_STORM_SEED={seed}: {became:?}");

    let start = Instant::now();
    loop {
        let (held, now) = (held(address).await, settled_descriptors(&server).await);
        if held.is_empty() && now == before.0 {
            break;
        }
        let late = start.elapsed() > CALM;
        assert!(!late, "LOOPLANE_STORM_SEED={seed}: {held:?} are still held; open were {:?}, are {now:?}", before.0);
    }
    let (bytes, after) = (before.1, memory_bytes(&server));
    println!("memory: {bytes} bytes before, {after} after");
    assert!(after < bytes + GROWTH_BYTES, "LOOPLANE_STORM_SEED={seed}: from {bytes} bytes of memory to {after}");
    for (ask, before) in plain {
        assert_eq!(bare(storm.ask(&ask).await), before, "LOOPLANE_STORM_SEED={seed}: {ask:?}");
    }
    let log = fs::read_to_string(&log).expect("the log is UTF-8");
    assert!(!log.contains("panicked"), "LOOPLANE_STORM_SEED={seed}: {log}");
}

/// Probes the server until it is late.
async fn stays_alive(address: SocketAddr) {
    loop {
        // Where no connection is idle, a probe gives way to later ones, and asks again.
        let answered = async { while client::get(address, "/health/live").await.status != 200 {} };
        timeout(PROBE, answered).await.expect("a server in a storm says that it lives");
        sleep(Duration::from_millis(100)).await;
    }
}

/// An answer without what differs between any two, and without what the prefix cache has by now.
fn bare(answer: Answer) -> Value {
    let mut value: Value = serde_json::from_slice(&answer.body).unwrap_or(Value::Null);
    let ids = ["id", "created", "created_at", "completed_at", "usage"];
    if let Value::Object(fields) = &mut value {
        fields.retain(|name, _| !ids.contains(&name.as_str()));
        for item in fields.get_mut("output").and_then(Value::as_array_mut).into_iter().flatten() {
            item["id"].take();
        }
    }
    value
}

/// What `/metrics` says is held for somebody.
async fn held(address: SocketAddr) -> Vec<String> {
    let scrape = client::get(address, "/metrics").await;
    let scrape = Scrape::parse(std::str::from_utf8(&scrape.body).expect("metrics are text"));
    let gauges = [
        // That of this question.
        ("connections", 1.0),
        ("requests_in_progress", 0.0),
        ("upload_bytes", 0.0),
        ("num_requests_running", 0.0),
        ("num_requests_waiting", 0.0),
        ("kv_cache_pages_used", 0.0),
    ];
    let of_keys = ["alice", "bob"].map(|key| ("key_requests_in_progress", vec![("key", key)], 0.0));
    let gauges = gauges.map(|(name, calm)| (name, Vec::new(), calm)).into_iter().chain(of_keys);
    let values = gauges.map(|(name, labels, calm)| (name, scrape.value(name, &labels), calm));
    values.filter(|(_, value, calm)| value != calm).map(|(name, value, _)| format!("{name} {value}")).collect()
}

/// By process and what they are.
type Descriptors = BTreeMap<(usize, String), usize>;

/// Open files of the server and its workers, once that of the last question is closed.
async fn settled_descriptors(server: &Server) -> Descriptors {
    let (mut last, mut alike) = (descriptors(server), 0);
    while alike < 10 {
        sleep(LOOK_PERIOD).await;
        let now = descriptors(server);
        alike = if now == last { alike + 1 } else { 0 };
        last = now;
    }
    last
}

fn descriptors(server: &Server) -> Descriptors {
    let mut open = BTreeMap::new();
    for (process, pid) in std::iter::once(server.pid()).chain(server.workers()).enumerate() {
        // A worker that ends meanwhile has none.
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let target = target.to_string_lossy().into_owned();
            let what = target.split([':', '(']).next().unwrap_or_default().trim_end().to_owned();
            *open.entry((process, what)).or_default() += 1;
        }
    }
    open
}

/// What the server holds itself of memory: no files.
fn memory_bytes(server: &Server) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).expect("the server runs");
    let kib = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok())
    };
    (kib("RssAnon:").expect("Linux says so") + kib("VmSwap:").unwrap_or(0)) << 10
}
