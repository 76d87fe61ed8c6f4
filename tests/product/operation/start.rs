//! What a server says as it starts, in which format, and which model it finds.

use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::symlink,
    process::{Command, Output, Stdio},
};

use rustix::process::Signal;
use serde_json::Value;

use crate::common::{fixture, signal};

/// `looplane serve` of the smallest model on any port, with a log that no variable of the test's own changes.
fn serve(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_looplane"));
    command.args(["serve", "--port", "0", "--device", "cpu", "--threads", "1", "--model"]).arg(fixture("llama-tied"));
    command.args(arguments).env_remove("LOOPLANE_LOG").env_remove("RUST_LOG");
    command
}

/// Both outputs of a server that is stopped once it has said all that it says at its start.
fn until_it_serves(mut command: Command) -> [Vec<String>; 2] {
    let mut child =
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the binary under test starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
    let mut banner: Vec<String> = Vec::new();
    while !banner.last().is_some_and(|line| line.contains("Try curl")) {
        banner.push(lines.next().unwrap_or_else(|| panic!("it ended after {banner:?}")));
    }
    signal(child.id(), Signal::TERM);
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{output:?}");
    [banner, String::from_utf8(output.stderr).expect("UTF-8").lines().map(str::to_owned).collect()]
}

fn object(line: &str) -> Value {
    serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))
}

#[test]
fn banner_and_log_have_one_format() {
    let [banner, log] = until_it_serves(serve(&[]));
    let starts = ["Looplane ", "Serving llama-tied: ", "Listening http://127.0.0.1:", "Try curl http://127.0.0.1:"];
    assert_eq!(banner.len(), starts.len(), "{banner:?}");
    for (line, start) in banner.iter().zip(starts) {
        assert!(line.contains(&format!("Z  INFO looplane::serve: {start}")), "{line}");
    }
    assert!(!log.is_empty() && log.iter().all(|line| line.contains("Z  INFO looplane")), "{log:?}");

    let [banner, log] = until_it_serves(serve(&["--log", "json"]));
    for (line, start) in banner.iter().zip(starts) {
        let line = object(line);
        assert!(line["message"].as_str().is_some_and(|message| message.starts_with(start)), "{line}");
    }
    assert!(!log.is_empty());
    for line in log.iter().chain(&banner).map(|line| object(line)) {
        assert!(line["level"] == "INFO" && line["timestamp"].is_string() && line["target"].is_string(), "{line}");
    }
}

#[test]
fn the_error_that_ends_a_server_has_the_format_of_its_log() {
    let output = serve(&["--log", "json", "--max-slots", "0"]).output().expect("it runs");
    assert_eq!(output.status.code(), Some(2));
    let line = object(str::from_utf8(&output.stderr).expect("UTF-8").trim());
    assert_eq!(
        (&line["level"], &line["message"]),
        (&"ERROR".into(), &"--max-slots is 0, but must be at least 1".into())
    );
}

#[test]
fn the_filter_leaves_the_banner_and_one_that_is_none_is_refused() {
    let quiet = |own: &str, common: &str| {
        let mut command = serve(&[]);
        command.env("LOOPLANE_LOG", own).env("RUST_LOG", common);
        command
    };
    for (own, common) in [("", "warn"), ("warn", "debug"), ("off", "")] {
        let [banner, log] = until_it_serves(quiet(own, common));
        assert_eq!((banner.len(), log.len()), (4, 0), "{own:?} {common:?}: {log:?}");
    }
    let Output { status, stderr, .. } = quiet("a=b=c", "").output().expect("it runs");
    let said = String::from_utf8(stderr).expect("UTF-8");
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(said.starts_with("looplane: LOOPLANE_LOG is \"a=b=c\", but must be a filter"), "{said}");
}

#[test]
fn a_name_of_the_hub_is_served_from_its_cache_or_said_how_to_download() {
    let cache = tempfile::tempdir().expect("a temporary directory");
    let snapshots = cache.path().join("models--org--name/snapshots");
    let named = || {
        let mut command = serve(&["--model", "org/name"]);
        command.env("HF_HUB_CACHE", cache.path());
        command
    };
    let Output { status, stderr, .. } = named().output().expect("it runs");
    let said = String::from_utf8(stderr).expect("UTF-8");
    assert_eq!((status.code(), said.lines().count()), (Some(2), 1), "{said}");
    let cache = cache.path().display();
    assert!(said.contains(&format!("nor such a model in {cache}")), "{said}");
    assert!(said.contains("`hf download org/name --local-dir name`"), "{said}");

    fs::create_dir_all(&snapshots).expect("the cache can be written");
    symlink(fixture("llama-tied"), snapshots.join("0123456789abcdef")).expect("the cache can be written");
    let [banner, _] = until_it_serves(named());
    assert!(banner[1].contains("Serving org/name: LlamaForCausalLM"), "{banner:?}");
}
