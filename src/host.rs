//! `looplane worker`: the workers as processes of this binary, computing for a front end on another machine.

use std::sync::Arc;

use anyhow::Context;
use looplane_server::{
    config::{HostConfig, LogFormat},
    fleet,
    group::{Common, ProcessLauncher},
    listener::{self, StopSignal, base_url},
    router,
    text::Text,
};
use tokio::net::TcpListener;

use crate::{log::BANNER, progress, serve::counted, signals::Signals};

/// Computes until a signal, or until the front end or the workers cannot be had for good.
///
/// # Errors
/// The model cannot be used, the workers fail for good, the front end refuses this host for good, or a second signal
/// cut sequences off.
pub async fn run(mut config: HostConfig, format: LogFormat) -> anyhow::Result<()> {
    let signals = Signals::take()?;
    let text = Arc::new(Text::load(&config.group.model_dir)?);
    let metrics = match config.metrics {
        Some((address, options)) => {
            let listener = TcpListener::bind(address).await;
            Some((listener.with_context(|| format!("cannot listen on {address} (--metrics-listen)"))?, options))
        }
        None => None,
    };
    config.group.vocabulary = text.grammars.vocabulary().map(Arc::new);
    config.join.vocabulary_digest = fleet::vocabulary_digest(config.group.vocabulary.as_deref());
    let group = &config.group;
    tracing::info!(
        target: BANNER,
        "Looplane {}: loading {} into {}, for the front end at {}:{}",
        env!("CARGO_PKG_VERSION"),
        group.model_dir.display(),
        counted(group.replicas * group.tensor_parallel, "worker process", "worker processes"),
        config.join.front,
        config.join.port,
    );
    let launcher = Arc::new(ProcessLauncher::this_binary(Vec::new()));
    let common = Arc::new(Common::new(group.timeouts.quarantine));
    let (engine, replicas) = router::spawn(group.clone(), &common, Vec::new(), |_| launcher.clone())?;
    let stop = StopSignal::default();
    tokio::spawn(signals.follow(false, stop.clone()));
    tokio::spawn(progress::show(engine.watch_state(), format));
    // What is told goes on until nothing is computed any more.
    let over = StopSignal { drain: stop.drain.clone(), ..StopSignal::default() };
    let watched = match metrics {
        Some((listener, options)) => {
            let url = base_url(listener.local_addr()?, options.tls.is_some());
            tracing::info!(target: BANNER, "Metrics at {url}/metrics");
            let watched = listener::watch(listener, engine.clone(), text, options, over.clone());
            Some(tokio::spawn(watched))
        }
        None => None,
    };
    let ended = fleet::join(engine, config.join, stop.clone()).await;
    over.now.cancel();
    if let Some(watched) = watched {
        watched.await??;
    }
    // What still runs here belongs to nobody any more.
    replicas.shutdown_unless(stop.now.cancelled()).await;
    anyhow::ensure!(!stop.now.is_cancelled(), "ended at once, as a second signal asked");
    Ok(ended?)
}
