//! Every page that the load tester makes, opened in a browser: no error, nothing cut off or over something else, axes
//! with names and units, legends, and all of it readable in light and dark, in wide windows and narrow ones.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Parser;
use looplane_loadtest::mock::{Fault, Mock};
use looplane_loadtest::sweep::{self, Sweep};
use looplane_loadtest::{LoadtestArgs, run};
use tokio::net::TcpListener;

mod browser;

use browser::Browser;

const CHECK: &str = include_str!("check.js");
/// Widths of windows in pixels: a desk's and a telephone's.
const WIDTHS: [u32; 2] = [1280, 390];

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    args: LoadtestArgs,
}

/// Runs `loadtest LINE --html FILE` against `mock` and returns the page.
async fn page(mock: Mock, folder: &Path, name: &str, line: &str) -> PathBuf {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let target = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(mock.serve_on(listener));
    let file = folder.join(name);
    let words = ["loadtest"].into_iter().chain(line.split_whitespace());
    let words = words.chain(["--target", &target, "--html", file.to_str().expect("a plain path"), "--quiet"]);
    let outcome = run(Cli::try_parse_from(words).expect("valid options").args).await;
    assert_eq!(outcome.is_err(), name == "failed.html", "{outcome:?}");
    file
}

/// The page of a sweep whose figures are in the repository.
fn sweep_page(folder: &Path, name: &str) -> PathBuf {
    let figures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name).with_extension("json");
    let figures = std::fs::read_to_string(&figures).unwrap_or_else(|error| panic!("{}: {error}", figures.display()));
    let sweep: Sweep = serde_json::from_str(&figures).expect("a sweep's figures");
    let file = folder.join(name).with_extension("html");
    std::fs::write(&file, sweep::page(&sweep)).expect("writable");
    file
}

async fn pages(folder: &Path) -> Vec<PathBuf> {
    let steady = Mock { ttft: Duration::from_millis(20), itl: Duration::from_millis(4), fault: Fault::None };
    let busy = r#"{"error":{"message":"this server's queue is full, as it has been for a while","code":"queue_full"}}"#;
    let long_name =
        "organisation/a-model-of-a-name-as-long-as-those-of-merged-and-quantised-ones-are-0123456789-instruct-awq";
    let limits = "--slo ttft=300ms,itl=50ms,tpot=40ms,e2e=2s --runs 2 --warmup 2";
    let run = format!("--rate 40 --duration 2s {limits} --model {long_name}");
    let faults = "--rate 40 --duration 2s --cancel 20%@30ms --slow-readers 5%@5ms --broken 10% --half-open 4";
    let search = "saturate --from 10 --precision 0.5 --duration 1500ms --max-tokens 20";
    let busy = Mock { fault: Fault::Status(429, busy), ..steady };
    let (run, faults, one, failed) = tokio::join!(
        page(steady, folder, "run.html", &run),
        page(steady, folder, "faults.html", faults),
        page(steady, folder, "one.html", "--requests 1 --max-tokens 1"),
        page(busy, folder, "failed.html", "--requests 9"),
    );
    let search = page(Mock { fault: Fault::Slots(4), ..steady }, folder, "saturate.html", search).await;
    vec![run, one, failed, faults, sweep_page(folder, "sweep-cpu"), sweep_page(folder, "sweep-gpu"), search]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_page_can_be_read_in_a_browser() {
    let path = match browser::find() {
        Ok(path) => path,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let folder = tempfile::tempdir().expect("a temporary directory");
    let pages = pages(folder.path()).await;
    let mut browser = Browser::start(&path);
    let mut found = Vec::new();
    for page in &pages {
        for width in WIDTHS {
            for is_dark in [false, true] {
                let problems = problems(&mut browser, page, width, is_dark);
                let name = page.file_name().unwrap_or_default().to_string_lossy();
                found.extend(problems.iter().map(|problem| format!("{name}, {width} wide, dark {is_dark}: {problem}")));
            }
        }
    }
    assert!(found.is_empty(), "{found:#?}");

    // The control: each of these makes a good page a bad one, and is seen.
    let good = std::fs::read_to_string(&pages[0]).expect("a page");
    for (from, to, complaint) in [
        ("</body>", "<script>nothing()</script></body>", "script error"),
        ("</body>", r#"<img src="nowhere.png"/></body>"#, "log: "),
        ("--muted: #5a6472", "--muted: #9aa2ac", "has a contrast of"),
        ("prefers-color-scheme: dark", "prefers-contrast: more", "of the other scheme"),
        (r#"<text class="plot-title" x="64""#, r#"<text class="plot-title" x="364""#, "is cut off"),
        (r#"x="92.0" y="39">"#, r#"x="92.0" y="19">"#, "lies over"),
        ("svg text { fill: var(--text); font-size: 12px; }", "svg text { font-size: 6px; }", "pixels high"),
        (r#"<text class="axis y""#, r#"<text class="axis""#, "no name on its y axis"),
        ("time, ms", "time", "no unit on its x axis"),
        (r#"<text class="legend""#, r#"<text class="other""#, "legends"),
        ("overflow-wrap: anywhere", "white-space: nowrap", "wider than the window"),
        (".wide svg { min-width: 960px; }", ".wide svg { min-width: 1400px; }", "does not fit a wide window"),
    ] {
        assert!(good.contains(from), "{from}");
        let bad = folder.path().join("bad.html");
        std::fs::write(&bad, good.replace(from, to)).expect("writable");
        let mut looks = WIDTHS.into_iter().flat_map(|width| [(width, false), (width, true)]);
        let is_seen = looks.any(|(width, is_dark)| {
            problems(&mut browser, &bad, width, is_dark).iter().any(|problem| problem.contains(complaint))
        });
        assert!(is_seen, "{complaint}");
    }
}

fn problems(browser: &mut Browser, page: &Path, width: u32, is_dark: bool) -> Vec<String> {
    browser.open(&format!("file://{}", page.display()), width, is_dark);
    let seen = browser.evaluate(&format!("({CHECK})({is_dark})"));
    let seen: Vec<String> = serde_json::from_value(seen).expect("a list of sentences");
    [browser.complaints(), &seen].concat()
}
