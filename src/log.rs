//! The log. It goes to standard error: standard output is for what the user asked for.

use std::{
    env,
    io::{self, IsTerminal},
};

use tracing_subscriber::EnvFilter;

/// Starts the log of this process.
pub fn start(in_worker: bool) {
    let given = env::var("LOOPLANE_LOG").ok().filter(|filter| !filter.is_empty());
    let filter = given.and_then(|filter| EnvFilter::try_new(filter).ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    match in_worker {
        // The server passes these lines on, with the time and the rank.
        true => log.without_time().with_target(false).with_ansi(false).init(),
        false => log.with_ansi(io::stderr().is_terminal()).init(),
    }
}
