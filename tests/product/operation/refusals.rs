//! Models that cannot be served: one sentence that names what is wrong and where, and an exit code that is not 0.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::common::{PATIENCE, copy_of, edit_json, fixture};
use serde_json::{Value, json};

/// Runs `serve` on a model that it must refuse; what it said on stderr.
fn refused(dir: &Path, args: &[&str]) -> String {
    let mut child = Command::new(env!("CARGO_BIN_EXE_looplane"))
        .args(["serve", "--port", "0", "--model"])
        .arg(dir)
        .args(args)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary under test starts");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child is ours") {
            break status;
        }
        if start.elapsed() > PATIENCE {
            let _ = child.kill();
            panic!("it serves, or hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let mut said = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().expect("stderr is piped"), &mut said)
        .expect("stderr is UTF-8");
    assert!(!status.success(), "{said}");
    assert!(!said.contains("panicked"), "{said}");
    // The reason stands in the last line and nowhere else.
    assert!(!said.contains("ERROR"), "{said}");
    assert_eq!(said.lines().position(|line| line.starts_with("looplane: ")), Some(said.lines().count() - 1), "{said}");
    said
}

fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    edit_json(&dir.join("config.json"), edit);
}

fn check(said: &str, wanted: &[&str]) {
    for word in wanted {
        assert!(said.contains(word), "{word:?} is missing in:\n{said}");
    }
}

#[test]
fn configurations_that_cannot_be() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 7] = [
        (|c| c["architectures"] = json!(["MambaForCausalLM"]), &["config.json", "MambaForCausalLM"]),
        (|c| c["hidden_size"] = json!(-1), &["config.json", "hidden_size", "-1"]),
        (|c| c["hidden_size"] = json!(1e30), &["config.json", "hidden_size"]),
        (|c| c["num_hidden_layers"] = json!(4_000_000_000_u64), &["num_hidden_layers", "4000000000"]),
        (|c| c["num_key_value_heads"] = json!(3), &["num_key_value_heads", "3"]),
        (|c| c["rope_parameters"] = json!({"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}), &["yarn"]),
        (|c| c["hidden_size"] = json!(512), &["512", "256"]),
    ];
    for (edit, wanted) in cases {
        let dir = copy_of("llama-gqa");
        edit_config(dir.path(), edit);
        check(&refused(dir.path(), &["--tp", "1"]), wanted);
    }
}

#[test]
fn a_group_size_that_does_not_divide_the_model() {
    let said = refused(&fixture("llama-tied"), &["--tp", "8"]);
    check(&said, &["8", "4"]);
    let said = refused(&fixture("llama-tied"), &["--tp", "3"]);
    assert_eq!(said.trim(), "looplane: --tp is 3, but must be 1, 2, 4, 8 or 16");
}

#[test]
fn variables_that_are_set_to_nothing_count_as_unset() {
    let dir = tempfile::tempdir().expect("a temporary directory can be made");
    let file = dir.path().join("looplane.toml");
    fs::write(&file, "tp = 3\n").expect("the directory can be written");
    let serve = |tp: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_looplane"))
            .args(["serve", "--port", "0", "--threads", "0", "--config"])
            .arg(&file)
            .env("LOOPLANE_TP", tp)
            .env("LOOPLANE_MODEL", "")
            .env("LOOPLANE_DEVICE", "")
            .env("LOOPLANE_LOADTEST_MODEL", "")
            .output()
            .expect("the binary under test runs");
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).expect("stderr is UTF-8")
    };
    // The file says 3, which a variable that says something overrides.
    assert_eq!(serve("").trim(), "looplane: --tp is 3, but must be 1, 2, 4, 8 or 16");
    assert_eq!(serve("5").trim(), "looplane: --tp is 5, but must be 1, 2, 4, 8 or 16");
    assert_eq!(serve("2").trim(), "looplane: --threads is 0, but must be at least 1");
}

#[test]
fn a_port_that_is_taken() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("some port is free");
    let port = taken.local_addr().expect("it is bound").port().to_string();
    let said = refused(&fixture("llama-tied"), &["--port", &port]);
    check(&said, &[&port, "--port"]);
    assert_eq!(said.trim().lines().count(), 1, "{said}");
}

#[test]
fn files_that_are_missing_or_damaged() {
    let dir = copy_of("llama-gqa");
    fs::remove_file(dir.path().join("model-00002-of-00004.safetensors")).expect("the shard is there");
    check(&refused(dir.path(), &[]), &["model-00002-of-00004.safetensors"]);

    let dir = copy_of("llama-tied");
    let path = dir.path().join("model.safetensors");
    let bytes = fs::read(&path).expect("the file is there");
    fs::write(&path, &bytes[..bytes.len() - 1000]).expect("the copy can be written");
    check(&refused(dir.path(), &[]), &["model.safetensors"]);

    // A header that claims to be 2^60 bytes long.
    let mut lying = bytes.clone();
    lying[..8].copy_from_slice(&(1u64 << 60).to_le_bytes());
    fs::write(&path, &lying).expect("the copy can be written");
    check(&refused(dir.path(), &[]), &["model.safetensors"]);

    let dir = copy_of("qwen2-bias");
    fs::remove_file(dir.path().join("tokenizer.json")).expect("the tokenizer is there");
    check(&refused(dir.path(), &[]), &["tokenizer.json"]);

    let dir = copy_of("qwen2-bias");
    edit_config(dir.path(), |c| c["num_hidden_layers"] = json!(3));
    check(&refused(dir.path(), &[]), &["model.layers.2."]);

    check(&refused(Path::new("/nowhere/at/all"), &[]), &["/nowhere/at/all"]);
}

#[test]
fn a_tokenizer_that_does_not_match_the_vocabulary() {
    // The embedding says 768 rows; the tokenizer gets an id beyond them.
    let dir = copy_of("llama-tied");
    edit_json(&dir.path().join("tokenizer.json"), |tokenizer| {
        tokenizer["added_tokens"].as_array_mut().expect("a list").push(json!({
            "id": 768, "content": "<|beyond|>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    });
    check(&refused(dir.path(), &[]), &["768", "tokenizer"]);
}
