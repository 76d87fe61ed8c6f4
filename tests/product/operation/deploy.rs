//! What files of deploy/ say in several places has to agree, and what they name has to be there. (`.ci/deploy` has the
//! tools that read them.)

use std::{fs, path::Path};

fn text(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// What follows the start of the only line that begins so.
fn after<'a>(text: &'a str, start: &str) -> &'a str {
    let mut lines = text.lines().filter_map(|line| line.trim_start().strip_prefix(start));
    let found = lines.next().unwrap_or_else(|| panic!("no line begins with {start:?}"));
    assert_eq!(lines.next(), None, "several lines begin with {start:?}");
    found.trim()
}

#[test]
fn the_image_is_built_from_what_is_there() {
    let dockerfile = text("deploy/container/Dockerfile");
    let ignored = text("deploy/container/Dockerfile.dockerignore");
    let ignored: Vec<&str> = ignored.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).collect();
    let copies =
        dockerfile.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|copy| !copy.starts_with("--"));
    let words: Vec<Vec<&str>> = copies.map(|copy| copy.split_whitespace().collect()).collect();
    let sources: Vec<&str> = words.iter().flat_map(|words| &words[..words.len() - 1]).copied().collect();
    assert!(sources.contains(&"deploy/demo/model"), "{sources:?}");
    for source in sources {
        assert!(Path::new(env!("CARGO_MANIFEST_DIR")).join(source).exists(), "{source}");
        let is_ignored = ignored.iter().any(|path| source == *path || source.starts_with(&format!("{path}/")));
        assert!(!is_ignored, "{source} is ignored");
    }
    // The compiler that the manifest asks for, the kernels' of CI, and no user that is root.
    let rust = after(&dockerfile, "FROM rust:").split('-').next().expect("a version").to_owned();
    assert!(env!("CARGO_PKG_RUST_VERSION").starts_with(&rust), "{rust}");
    let nvrtc = format!("nvidia-cuda-nvrtc=={}", after(&text(".ci/nvrtc"), "version="));
    assert!(dockerfile.contains(&nvrtc), "{nvrtc}");
    for image in dockerfile.split("\nFROM ").filter(|image| image.contains("\nUSER ")) {
        let user = image.lines().filter_map(|line| line.strip_prefix("USER ")).next_back();
        assert!(user.and_then(|user| user.parse::<u32>().ok()).is_some_and(|user| user > 0), "{user:?}");
    }
    assert!(dockerfile.contains("cargo build --release --locked --workspace"));
    assert_eq!(after(&dockerfile, "STOPSIGNAL "), "SIGTERM");
}

/// Requests are drained and then workers: whoever waits for the end waits for more than twice the time of one.
#[test]
fn who_stops_a_server_waits_for_it_to_drain() {
    let seconds = |text: &str| text.trim_end_matches('s').parse::<u32>().unwrap_or_else(|_| panic!("{text}"));
    let drain = seconds(after(&text("deploy/systemd/looplane.env"), "LOOPLANE_DRAIN_SECONDS="));
    assert!(seconds(after(&text("deploy/systemd/looplane.service"), "TimeoutStopSec=")) > 2 * drain);
    assert!(seconds(after(&text("deploy/compose/compose.yaml"), "stop_grace_period: ")) > 2 * drain);
    let chart = text("deploy/helm/looplane/values.yaml");
    let [grace, stop, drain] = ["terminationGracePeriodSeconds: ", "preStopSeconds: ", "drainSeconds: "]
        .map(|name| seconds(after(&chart, name)));
    assert!(grace > stop + 2 * drain);
}

#[test]
fn the_chart_is_of_this_version() {
    assert_eq!(after(&text("deploy/helm/looplane/Chart.yaml"), "appVersion: "), env!("CARGO_PKG_VERSION"));
}
