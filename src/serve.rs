//! `looplane serve`: the front end, and the workers as processes of this binary, from start to end.

use std::{path::Path, sync::Arc, time::Duration};

use anyhow::Context;
use looplane_proto::worker::v1::load_request;
use looplane_server::{
    config::{Config, Device, LogFormat},
    engine::{EngineHandle, EngineState},
    fleet::{Fleet, ListenConfig, vocabulary_digest},
    frontend::LargeWork,
    group::{Common, GroupConfig, ProcessLauncher},
    http,
    listener::{self, StopSignal, base_url},
    router,
    text::Text,
};
use looplane_worker::{cuda, model::config::ModelConfig, plan::ModelPlan};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{net::TcpListener, time::timeout};

use crate::{
    log::BANNER,
    notify::ServiceManager,
    progress,
    signals::{RestartSignal, Signals},
};

/// Workers that share a model on CPUs, unless the user says how many.
const USUAL_GROUP: u32 = 2;

/// For the service manager to be told why the server ends.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// File descriptors besides those of connections: workers, files, the runtime's own.
const OTHER_DESCRIPTORS: u64 = 128;

/// How many workers compute a model where the user does not say: a GPU does alone; on CPUs it is the usual number, or
/// what divides the model.
pub fn group_size(model: &Path, device: Device) -> u32 {
    // What is wrong with a model that cannot be read, the worker says.
    let Some(config) = ModelConfig::from_dir(model).ok().filter(|_| !is_gpu(device.into())) else { return 1 };
    let divides = |size: &u32| ModelPlan::new(&config, *size as usize).is_ok();
    (1..=USUAL_GROUP).rev().find(divides).unwrap_or(1)
}

fn is_gpu(device: load_request::Device) -> bool {
    match device {
        load_request::Device::Cuda => true,
        load_request::Device::Auto => cuda::probe(0).is_ok(),
        load_request::Device::Cpu => false,
    }
}

/// Serves until a signal, or until the workers cannot be had any more.
///
/// # Errors
/// The model or the address cannot be used, the workers fail for good, or a second signal cut requests off.
pub async fn run(mut config: Config, format: LogFormat) -> anyhow::Result<()> {
    let (signals, restart_signal) = (Signals::take()?, RestartSignal::take()?);
    raise_descriptor_limit(config.serve.max_connections as u64);
    let text = Arc::new(Text::load(&config.group.model_dir)?.with_parsers(config.parsers));
    config.group.vocabulary = text.grammars.vocabulary().map(Arc::new);
    let address = (config.host.as_str(), config.port);
    let listener = TcpListener::bind(address).await.with_context(|| cannot_listen(&config))?;
    let url = base_url(listener.local_addr()?, config.serve.tls.is_some());
    let with_key = config.serve.access.keys.is_some();
    let group = &config.group;
    if group.replicas == 0 || is_gpu(group.device) {
        config.serve.large_work = LargeWork::GivesWay;
    }
    let (model, threads) = (group.model_dir.display(), counted(group.threads, "compute thread", "compute threads"));
    let loads = match group.replicas * group.tensor_parallel {
        0 => format!("serving {model} by hosts that join"),
        ranks => {
            format!("loading {model} into {}, {threads} each", counted(ranks, "worker process", "worker processes"))
        }
    };
    tracing::info!(target: BANNER, "Looplane {}: {loads}", env!("CARGO_PKG_VERSION"));

    let launcher = Arc::new(ProcessLauncher::this_binary(Vec::new()));
    let common = Arc::new(Common::new(group.timeouts.quarantine));
    let (places, fleet) = match config.join {
        Some(join) => let_hosts_join(join, group, &common).await?,
        None => (Vec::new(), None),
    };
    let (engine, replicas) = router::spawn(group.clone(), &common, places, |_| launcher.clone())?;
    let stop = StopSignal::default();
    tokio::spawn(signals.follow(config.until_stdin_closes, stop.clone()));
    tokio::spawn(restart_signal.follow(engine.clone(), config.serve.drain));
    let manager = ServiceManager::of_environment();
    let told = manager.map(|manager| tokio::spawn(manager.keep_told(engine.clone(), stop.clone())));
    tokio::spawn(progress::show(engine.watch_state(), format));
    let example = http::example(&url, &config.serve.model_id, text.template.is_some(), with_key);
    tokio::spawn(announce(engine.clone(), config.serve.model_id.clone(), url, example));
    let served = listener::run(listener, engine, text, config.serve, stop.clone()).await;
    if let Some(fleet) = fleet {
        fleet.close().await;
    }
    replicas.shutdown_unless(stop.now.cancelled()).await;
    if let (Some(told), Err(why)) = (told, &served) {
        let last_words = async {
            if let Ok(manager) = told.await {
                manager.last_words(why).await;
            }
        };
        // A manager that takes nothing does not hold up the end.
        let _ = timeout(LAST_WORDS, last_words).await;
    }
    anyhow::ensure!(!stop.now.is_cancelled(), "ended at once, as a second signal asked; running requests were cut off");
    Ok(served?)
}

/// Opens the door to hosts; the handles of their places, which are numbered behind the replicas of this machine.
async fn let_hosts_join(
    join: ListenConfig,
    group: &GroupConfig,
    common: &Arc<Common>,
) -> anyhow::Result<(Vec<EngineHandle>, Option<Fleet>)> {
    let listener = TcpListener::bind(join.address);
    let listener = listener.await.with_context(|| format!("cannot listen on {} (--join-listen)", join.address))?;
    let (places, address) = (counted(join.places, "host", "hosts"), listener.local_addr()?);
    tracing::info!(target: BANNER, "Up to {places} may join at {address}");
    let digest = vocabulary_digest(group.vocabulary.as_deref());
    let (places, fleet) = Fleet::open(listener, join, group.replicas, common, digest);
    Ok((places, Some(fleet)))
}

/// Shells start programs with few file descriptors, and let them take more.
fn raise_descriptor_limit(connections: u64) {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        tracing::debug!("the limit on file descriptors stays {:?}: {error}", limit.current);
    }
    // An unlimited one is none.
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    if descriptors < connections + OTHER_DESCRIPTORS {
        tracing::warn!(
            "this process may open {descriptors} files, fewer than --max-connections {connections} need: connections \
             beyond that take the place of idle ones (raise the limit with ulimit -n or LimitNOFILE)"
        );
    }
}

fn cannot_listen(config: &Config) -> String {
    format!("cannot listen on {}:{} (--host, --port)", config.host, config.port)
}

/// A number of things in words.
pub fn counted(count: u32, one: &str, several: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { several })
}

/// Says what was loaded and how to use it, once it can be used.
async fn announce(engine: EngineHandle, id: String, url: String, example: String) {
    let mut state = engine.watch_state();
    if state.wait_for(|state| *state == EngineState::Ready).await.is_err() {
        return;
    }
    let Some(model) = engine.model() else { return };
    tracing::info!(
        target: BANNER,
        "Serving {id}: {}, vocabulary {}, context {}, tensor parallelism {}, bits {}",
        model.architecture,
        model.vocab_size,
        model.max_context,
        model.tensor_parallel,
        model.bit_domain,
    );
    tracing::info!(target: BANNER, "Listening {url} (HTTP and gRPC; open it in a browser to chat)");
    tracing::info!(target: BANNER, "Try {example}");
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_model_that_two_workers_cannot_share_gets_one() {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("worker/tests/fixtures/llama-gqa");
        assert_eq!(group_size(&fixture, Device::Cpu), 2);
        assert_eq!(group_size(&fixture, Device::Cuda), 1);
        let dir = tempfile::tempdir().expect("a temporary directory");
        let config = fs::read_to_string(fixture.join("config.json")).expect("the fixture has one");
        let mut config: serde_json::Value = serde_json::from_str(&config).expect("it is JSON");
        // As SmolLM2 135M has them.
        for (key, value) in
            [("num_attention_heads", 9), ("num_key_value_heads", 3), ("hidden_size", 576), ("head_dim", 64)]
        {
            config[key] = value.into();
        }
        fs::write(dir.path().join("config.json"), config.to_string()).expect("writable");
        ModelConfig::from_dir(dir.path()).expect("a model that can be served");
        assert_eq!(group_size(dir.path(), Device::Cpu), 1);
    }
}
