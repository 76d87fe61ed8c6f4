//! What a server does until it is ready: in a terminal one line that is written anew, elsewhere a line of the log now
//! and then.

use std::{
    env,
    io::{self, IsTerminal},
    sync::OnceLock,
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use looplane_server::{config::LogFormat, engine::EngineState, frontend::in_words};
use tokio::{sync::watch, time::interval};

/// Between two looks at the state, each of which is drawn in a terminal.
const DRAW_PERIOD: Duration = Duration::from_millis(100);
/// Between two lines of the log.
const LINE_PERIOD: Duration = Duration::from_secs(5);

/// The line in the terminal.
static LINE: OnceLock<ProgressBar> = OnceLock::new();

/// Shows what is being loaded until that is over.
pub async fn show(state: watch::Receiver<EngineState>, format: LogFormat) {
    let steers = env::var_os("TERM").is_none_or(|terminal| terminal != "dumb");
    if format == LogFormat::Text && steers && io::stderr().is_terminal() {
        follow(state, DRAW_PERIOD, draw).await;
        if let Some(line) = LINE.get() {
            line.finish_and_clear();
        }
    } else {
        follow(state, LINE_PERIOD, |words| tracing::info!("{words}")).await;
    }
}

/// Tells the state every `period` for as long as it is that of loading.
async fn follow(mut state: watch::Receiver<EngineState>, period: Duration, mut tell: impl FnMut(String)) {
    let mut looks = interval(period);
    // The first tick is at once, and nothing to tell has happened yet.
    looks.tick().await;
    loop {
        let words = match &*state.borrow_and_update() {
            loading @ EngineState::Loading(_) => in_words(loading),
            _ => return,
        };
        tokio::select! {
            _ = looks.tick() => tell(words),
            changed = state.changed() => if changed.is_err() { return },
        }
    }
}

/// Writes something else: the line in the terminal makes room for it.
pub fn beside(write: impl FnOnce()) {
    match LINE.get() {
        Some(line) => line.suspend(write),
        None => write(),
    }
}

fn draw(words: String) {
    let style = ProgressStyle::with_template("{spinner} {msg}, {elapsed}").expect("a template of indicatif's");
    let line = LINE.get_or_init(|| ProgressBar::new_spinner().with_style(style));
    line.set_message(words);
    line.tick();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_loaded_is_told_again_and_again_until_it_is_loaded() {
        let (state, receiver) = watch::channel(EngineState::Loading("rank 0: reading".into()));
        let mut told = Vec::new();
        follow(receiver, Duration::from_millis(1), |words| {
            told.push(words);
            state.send_replace(match told.len() {
                1 => EngineState::Loading("rank 1: reading".into()),
                _ => EngineState::Ready,
            });
        })
        .await;
        assert_eq!(told, ["loading the model (rank 0: reading)", "loading the model (rank 1: reading)"]);
    }
}
