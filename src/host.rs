//! `looplane worker`: the workers as processes of this binary, computing for a front end on another machine.

use std::sync::Arc;

use looplane_server::{
    config::{HostConfig, LogFormat},
    fleet,
    group::{Common, ProcessLauncher},
    listener::StopSignal,
    router,
    text::Text,
};

use crate::{log::BANNER, progress, serve::counted, signals::Signals};

/// Computes until a signal, or until the front end or the workers cannot be had for good.
///
/// # Errors
/// The model cannot be used, the workers fail for good, the front end refuses this host for good, or a second signal
/// cut sequences off.
pub async fn run(mut config: HostConfig, format: LogFormat) -> anyhow::Result<()> {
    let signals = Signals::take()?;
    let text = Text::load(&config.group.model_dir)?;
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
    let ended = fleet::join(engine, config.join, stop.clone()).await;
    // What still runs here belongs to nobody any more.
    replicas.shutdown_unless(stop.now.cancelled()).await;
    anyhow::ensure!(!stop.now.is_cancelled(), "ended at once, as a second signal asked");
    Ok(ended?)
}
