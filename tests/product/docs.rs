//! What the documents say of the sources: promises name tests that are there, and links lead somewhere.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
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

#[test]
fn what_the_tests_here_look_for_is_told_apart() {
    let source =
        "#[test]\nfn one() {}\n#[tokio::test(flavor = \"x\")]\n#[cfg(unix)]\nasync fn two() {}\nfn none() {}\n";
    assert_eq!(tests_of(source), ["one", "two"]);
    assert_eq!(anchor("## Throughput and the time between tokens"), "throughput-and-the-time-between-tokens");
    assert_eq!(anchor("### Keys, TLS and `other` origins"), "keys-tls-and-other-origins");
    let document = "a [b](c.md#d) and [e](f)\n```\n[no](link)\n```\n[g]: h.md\n";
    assert_eq!(links(document), ["c.md#d", "f", "h.md"]);
}
