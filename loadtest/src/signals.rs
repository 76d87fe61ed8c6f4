//! What ends the load tester from outside: signals, and the end of the process that started it.

use std::future::pending;
use std::io;

use anyhow::Context;
use procfs::process::Process;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// Runs `work` with a token that Ctrl-C cancels, or SIGTERM, or the end of the terminal (SIGHUP).
pub async fn until_signal<T>(work: impl AsyncFnOnce(&CancellationToken) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let stop = CancellationToken::new();
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    // Under nohup the run is to outlive its terminal.
    let hang_up = (!ignores_hang_up()).then(|| signal(SignalKind::hangup()));
    let mut hang_up = hang_up.transpose().context("cannot listen for SIGHUP")?;
    let on_signal = tokio::spawn({
        let stop = stop.clone();
        async move {
            let hung_up = async {
                match &mut hang_up {
                    Some(hang_up) => hang_up.recv().await,
                    None => pending().await,
                }
            };
            tokio::select! {
                pressed = tokio::signal::ctrl_c() => if pressed.is_err() { return },
                _ = terminate.recv() => {}
                _ = hung_up => {}
            }
            stop.cancel();
        }
    });
    let outcome = work(&stop).await;
    on_signal.abort();
    outcome
}

/// Completes when standard input ends, as it does where it is a pipe from the process that started this one, however
/// that ends.
pub async fn stdin_closed() {
    let (closed, ended) = oneshot::channel();
    // A thread of its own: reading standard input cannot be cancelled.
    std::thread::spawn(move || {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        let _ = closed.send(());
    });
    let _ = ended.await;
}

/// Whether whoever started this process had it ignore SIGHUP, the first bit of Linux's mask.
fn ignores_hang_up() -> bool {
    Process::myself().and_then(|process| process.status()).is_ok_and(|status| status.sigign & 1 == 1)
}
