//! What the documents say of the sources: promises name tests that are there, links lead somewhere, and commands and
//! options are those of the binary.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Folders whose sources and documents are looked at.
const FOLDERS: [&str; 8] = ["server", "worker", "loadtest", "proto", "src", "tests", "deploy", "docs"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files below `folder` with this extension.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())).flatten();
    let of = |entry: fs::DirEntry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => files(&entry.path(), extension),
        _ if entry.path().extension().is_some_and(|found| found == extension) => vec![entry.path()],
        _ => Vec::new(),
    };
    entries.flat_map(of).collect()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Names of functions that stand behind an attribute of tests.
fn tests_of(source: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim_start) {
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            let function = line.trim_start_matches("async ").strip_prefix("fn ");
            names.extend(function.filter(|_| is_test).and_then(|rest| rest.split('(').next()));
            is_test = false;
        }
    }
    names
}

#[test]
fn each_promise_names_a_test_that_is_there() {
    let sources: Vec<String> =
        FOLDERS.iter().flat_map(|folder| files(&root().join(folder), "rs")).map(|path| read(&path)).collect();
    let tests: BTreeSet<&str> = sources.iter().flat_map(|source| tests_of(source)).collect();
    let page = read(&root().join("docs/promises.md"));
    let promises: Vec<&str> =
        page.lines().filter(|line| line.starts_with("| ") && *line != "| promise | test |").collect();
    assert!(promises.len() > 20, "{promises:?}");
    for line in promises {
        let named: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty() && line.ends_with("` |"), "this promise names no test: {line}");
        for name in named {
            assert!(tests.contains(name), "there is no test {name}, of which docs/promises.md says: {line}");
        }
    }
}

/// A heading as pages are linked to by it.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|char| char.is_alphanumeric() || " -_".contains(*char));
    kept.map(|char| if char == ' ' { '-' } else { char }).collect()
}

/// Lines of a document outside of its blocks of code.
fn prose(document: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    document.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_fence && !is_code
    })
}

/// Where the links of a document lead.
fn links(document: &str) -> Vec<&str> {
    let inline = |line| str::split(line, "](").skip(1).filter_map(|rest| rest.split(')').next());
    let defined = prose(document).filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("]: "));
    prose(document).flat_map(inline).chain(defined.map(|(_, target)| target)).collect()
}

#[test]
fn links_of_the_documents_lead_somewhere() {
    let pages = FOLDERS.iter().flat_map(|folder| files(&root().join(folder), "md"));
    let pages: Vec<PathBuf> = pages
        .chain(fs::read_dir(root()).expect("it is there").flatten().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect();
    let mut count = 0;
    for page in &pages {
        let text = read(page);
        for link in links(&text).into_iter().filter(|link| !link.contains("://") && !link.starts_with("mailto:")) {
            let (path, heading) = link.split_once('#').map_or((link, None), |(path, heading)| (path, Some(heading)));
            let target = match path {
                "" => page.clone(),
                path => page.parent().expect("a file has a folder").join(path),
            };
            assert!(target.exists(), "{}: the link {link} leads to nothing", page.display());
            if let Some(heading) = heading {
                let target = read(&target);
                let is_there = prose(&target).any(|line| line.starts_with('#') && anchor(line) == heading);
                assert!(is_there, "{}: the link {link} names no heading", page.display());
            }
            count += 1;
        }
    }
    assert!(count > 50, "only {count} links were found");
}

/// Pages whose commands are looked at.
const HANDBOOK: [&str; 9] = [
    "README.md",
    "CONTRIBUTING.md",
    "deploy/README.md",
    "docs/benchmarks.md",
    "docs/clients.md",
    "docs/formats.md",
    "docs/interface.md",
    "docs/metrics.md",
    "docs/shapes.md",
];

/// Options that the handbook names of other programs: Docker, clients, scripts.
const OTHERS: [&str; 7] = [
    "--cpuset-cpus",
    "--interrupt_requests",
    "--profile",
    "--reset-prefix-cache",
    "--rows",
    "--shm-size",
    "--stop-timeout",
];

/// What the binary writes where it is called with these words.
fn looplane(words: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_looplane")).args(words).output().expect("the binary runs");
    let text = |bytes| String::from_utf8(bytes).expect("UTF-8");
    (output.status.success(), text(output.stdout) + &text(output.stderr))
}

/// Commands in blocks of code that call the binary, each with its words behind `looplane`. A line that ends with a
/// backslash goes on; what stands behind a redirection is no part of it.
fn commands(document: &str) -> Vec<Vec<String>> {
    let mut is_code = false;
    let code = document.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        is_code && !is_fence
    });
    let code = code.collect::<Vec<_>>().join("\n").replace("\\\n", " ");
    let called = ["looplane ", "cargo run --release -- "];
    let line_of = |line: &str| called.iter().find_map(|called| line.strip_prefix(called).map(str::to_owned));
    let lines = code.lines().filter_map(|line| line_of(line.trim_start().trim_start_matches("$ ")));
    let words = |line: String| {
        let words = line.split_whitespace().take_while(|word| ![">", ">>", "|", "#", "&"].contains(word));
        words.map(|word| word.trim_matches('\'').to_owned()).collect()
    };
    lines.map(words).collect()
}

/// What stands between backticks in the prose of a document, which may go on in the next line.
fn spans(document: &str) -> Vec<String> {
    let prose = prose(document).collect::<Vec<_>>().join("\n");
    prose.split('`').skip(1).step_by(2).map(|span| span.replace('\n', " ")).collect()
}

/// Words that are long options.
fn options(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|char: char| !char.is_ascii_alphanumeric() && !"-_".contains(char));
    words.filter(|word| word.strip_prefix("--").is_some_and(|name| name.starts_with(|char: char| char.is_lowercase())))
}

#[test]
fn commands_of_the_handbook_are_taken() {
    let mut count = 0;
    for page in HANDBOOK {
        for command in commands(&read(&root().join(page))) {
            // Help is asked for last: what stands before it is read as ever, and nothing is started.
            let words: Vec<&str> = command.iter().map(String::as_str).chain(["--help"]).collect();
            let (is_taken, says) = looplane(&words);
            assert!(is_taken, "{page}: `looplane {}` is not taken: {says}", command.join(" "));
            count += 1;
        }
    }
    assert!(count >= 4, "only {count} commands were found");
}

#[test]
fn options_that_the_handbook_names_are_there() {
    let names = ["serve", "worker", "bench", "scaling", "key", "loadtest"];
    let helps: BTreeMap<&str, String> = names.iter().map(|name| (*name, looplane(&[name, "--help"]).1)).collect();
    let of = |help: &str| options(help).map(str::to_owned).collect::<BTreeSet<_>>();
    let mut known: BTreeMap<&str, BTreeSet<String>> = helps.iter().map(|(name, help)| (*name, of(help))).collect();
    for (command, more) in
        [("loadtest", "calibrate"), ("loadtest", "saturate"), ("loadtest", "sweep"), ("loadtest", "faults")]
    {
        known.get_mut(command).expect("it is there").extend(of(&looplane(&[command, more, "--help"]).1));
    }
    let all: BTreeSet<String> = known.values().flatten().cloned().collect();
    let (mut count, mut unknown) = (0, Vec::new());
    for page in HANDBOOK {
        for span in spans(&read(&root().join(page))) {
            let command = span.strip_prefix("looplane ").and_then(|rest| rest.split(' ').next());
            let of_it = match command {
                Some(command) => known.get(command),
                None => span.starts_with("--").then_some(&all),
            };
            let Some(of_it) = of_it else { continue };
            count += 1;
            let missing = options(&span).filter(|option| !of_it.contains(*option) && !OTHERS.contains(option));
            unknown.extend(missing.map(|option| format!("{page}: {option} in `{span}`")));
        }
    }
    assert!(unknown.is_empty(), "{unknown:#?}");
    assert!(count > 100, "only {count} options were found");
}

#[test]
fn the_handbook_has_every_page() {
    let summary = read(&root().join("docs/SUMMARY.md"));
    let chapters: BTreeSet<&str> = links(&summary).into_iter().collect();
    for page in files(&root().join("docs"), "md") {
        let name = page.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        assert!(name == "SUMMARY.md" || chapters.contains(name), "docs/SUMMARY.md lacks {name}");
    }
}

#[test]
fn what_the_tests_here_look_for_is_told_apart() {
    let source =
        "#[test]\nfn one() {}\n#[tokio::test(flavor = \"x\")]\n#[cfg(unix)]\nasync fn two() {}\nfn none() {}\n";
    assert_eq!(tests_of(source), ["one", "two"]);
    assert_eq!(anchor("## Throughput and the time between tokens"), "throughput-and-the-time-between-tokens");
    assert_eq!(anchor("### Keys, TLS and `other` origins"), "keys-tls-and-other-origins");
    let document = "a [b](c.md#d) and [e](f)\n```\n[no](link)\n```\n[g]: h.md\n";
    assert_eq!(links(document), ["c.md#d", "f", "h.md"]);
    let document = "`--a\nb`\n```\nlooplane serve \\\n    --model 'D' > f\n$ cargo run --release -- key x\nls\n```\n";
    assert_eq!(commands(document), [vec!["serve", "--model", "D"], vec!["key", "x"]]);
    assert_eq!(spans(document), ["--a b"]);
    assert_eq!(options("--a-b=c, [--d] -e --- --F").collect::<Vec<_>>(), ["--a-b", "--d"]);
}
