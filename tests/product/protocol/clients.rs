//! Clients that others wrote, as `.ci/clients` installs them, against the demo model.

use std::{path::PathBuf, process::Stdio};

use tokio::process::Command;

use crate::common::{PATIENCE, Server};

/// Names a Python that has the clients; where it is set, nothing is skipped.
const VARIABLE: &str = "LOOPLANE_CLIENTS";

/// The Python to use, or why there is none.
fn python() -> Result<PathBuf, String> {
    // Empty where it was to be set from a script that failed.
    let named = std::env::var_os(VARIABLE).filter(|named| !named.is_empty());
    let named = named.ok_or_else(|| format!("no clients to ask with: give {VARIABLE}=\"$(.ci/clients)\""))?;
    let path = PathBuf::from(named);
    assert!(path.is_file(), "{VARIABLE} is {}, where there is no file", path.display());
    Ok(path)
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_others_wrote_are_answered() {
    let Some(python) = python().map_err(|why| eprintln!("skipped: {why}")).ok() else { return };
    let server = Server::start(&["--tp", "1"]).await;
    let scripts = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/clients");
    // The demo model's template has no tools.
    let without_tools: &[&str] = &["--without-tools"];
    for (script, options) in
        [("openai_client.py", without_tools), ("anthropic_client.py", without_tools), ("grpc_client.py", &[])]
    {
        let mut command = Command::new(&python);
        command.arg(scripts.join(script)).arg(server.base()).args(options).stdin(Stdio::null()).kill_on_drop(true);
        // Where packages come by a proxy, this machine does not.
        command.env("NO_PROXY", "127.0.0.1").env("no_proxy", "127.0.0.1");
        let output = tokio::time::timeout(PATIENCE, command.output()).await;
        let output = output.unwrap_or_else(|_| panic!("{script} did not end within {PATIENCE:?}"));
        let output = output.expect("Python starts");
        let [said, complained] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        assert!(output.status.success(), "{script}: {said}\n{complained}");
    }
}
