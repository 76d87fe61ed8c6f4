//! `looplane serve`: the front end, and the workers as processes of this binary, from start to end.

use std::sync::Arc;

use anyhow::Context;
use looplane_server::{
    config::Config,
    engine::{EngineHandle, EngineState},
    group::{self, ProcessLauncher},
    http,
    serve::{StopSignal, base_url, serve},
    text::Text,
};
use tokio::net::TcpListener;

use crate::{output::say, signals::Signals};

/// Serves until a signal, or until the workers cannot be had any more.
///
/// # Errors
/// The model or the address cannot be used, the workers fail for good, or a second signal cut requests off.
pub async fn run(config: Config) -> anyhow::Result<()> {
    let signals = Signals::take()?;
    let text = Arc::new(Text::load(&config.group.model_dir)?);
    let address = (config.host.as_str(), config.port);
    let listener = TcpListener::bind(address).await.with_context(|| cannot_listen(&config))?;
    let url = base_url(listener.local_addr()?);
    let group = &config.group;
    say(&format!(
        "Looplane {}: loading {} into {}, {} each",
        env!("CARGO_PKG_VERSION"),
        group.model_dir.display(),
        counted(group.tensor_parallel, "worker process", "worker processes"),
        counted(group.threads, "compute thread", "compute threads"),
    ));

    let launcher = Arc::new(ProcessLauncher::this_binary(Vec::new()));
    let (engine, group) = group::spawn(config.group.clone(), launcher)?;
    let stop = StopSignal::default();
    tokio::spawn(signals.follow(config.until_stdin_closes, stop.clone()));
    tokio::spawn(announce(engine.clone(), config.clone(), url));
    let served = serve(listener, engine, text, config.serve, stop.clone()).await;
    group.shutdown_unless(stop.now.cancelled()).await;
    anyhow::ensure!(!stop.now.is_cancelled(), "ended at once, as a second signal asked; running requests were cut off");
    Ok(served?)
}

fn cannot_listen(config: &Config) -> String {
    format!("cannot listen on {}:{} (--host, --port)", config.host, config.port)
}

fn counted(count: u32, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Says what was loaded and how to use it, once it can be used.
async fn announce(engine: EngineHandle, config: Config, url: String) {
    let mut state = engine.watch_state();
    if state.wait_for(|state| *state == EngineState::Ready).await.is_err() {
        return;
    }
    let Some(model) = engine.model() else { return };
    let id = &config.serve.model_id;
    say(&format!(
        "Serving   {id}: {}, vocabulary {}, context {}, tensor parallelism {}, bits {}\n\
         Listening {url} (HTTP and gRPC; open it in a browser to chat)\n\
         Try       {}",
        model.architecture,
        model.vocab_size,
        model.max_context,
        model.tensor_parallel,
        model.bit_domain,
        http::example(&url, id),
    ));
}
