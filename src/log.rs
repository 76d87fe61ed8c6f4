//! What a process says while it works: one format for the log and for the banner of `serve`.
//!
//! The banner goes to standard output whatever the filter is, since that is what the user asked for; all else goes to
//! standard error.

use std::{
    env,
    ffi::OsString,
    io::{self, IsTerminal, Write},
};

use anyhow::anyhow;
use looplane_server::config::LogFormat;
use tracing::Metadata;
use tracing_subscriber::{EnvFilter, fmt::MakeWriter};

use crate::progress;

/// The target of the banner's lines. No other begins so.
pub const BANNER: &str = "looplane::serve";
/// Variables that hold the filter; the first that is set counts.
const FILTERS: [&str; 2] = ["LOOPLANE_LOG", "RUST_LOG"];
/// The filter without them.
const DEFAULT_FILTER: &str = "info";

/// Starts the log of this process.
///
/// # Errors
/// A variable holds what is no filter.
pub fn start(format: LogFormat) -> anyhow::Result<()> {
    let banner = format!("{BANNER}=info").parse().expect("a target and a level");
    let filter = filter(|name| env::var_os(name))?.add_directive(banner);
    let in_colour = io::stderr().is_terminal() && io::stdout().is_terminal();
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(Outputs);
    match format {
        LogFormat::Text => log.with_ansi(in_colour).init(),
        LogFormat::Json => log.json().flatten_event(true).init(),
    }
    Ok(())
}

/// Starts the log of a worker, whose lines the server passes on with the time and the rank.
///
/// # Errors
/// A variable holds what is no filter.
pub fn start_in_worker() -> anyhow::Result<()> {
    let filter = filter(|name| env::var_os(name))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr);
    log.without_time().with_target(false).with_ansi(false).init();
    Ok(())
}

fn filter(variable: impl Fn(&str) -> Option<OsString>) -> anyhow::Result<EnvFilter> {
    let given = FILTERS.iter().find_map(|name| Some((name, variable(name).filter(|value| !value.is_empty())?)));
    let Some((name, value)) = given else { return Ok(EnvFilter::new(DEFAULT_FILTER)) };
    let value = value.to_string_lossy();
    // The cause's own causes say the same again.
    EnvFilter::builder().parse(&value).map_err(|why| {
        anyhow!("{name} is {value:?}, but must be a filter such as warn or info,looplane_server=debug: {why}")
    })
}

/// Chooses the output for each line.
struct Outputs;

enum Output {
    Standard,
    Error,
}

impl MakeWriter<'_> for Outputs {
    type Writer = Output;

    fn make_writer(&self) -> Output {
        Output::Error
    }

    fn make_writer_for(&self, line: &Metadata<'_>) -> Output {
        if line.target() == BANNER { Output::Standard } else { Output::Error }
    }
}

impl Write for Output {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // An output that was closed takes nothing away from serving.
        progress::beside(|| match self {
            Self::Standard => drop(io::stdout().write_all(line)),
            Self::Error => drop(io::stderr().write_all(line)),
        });
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filter_is_our_own_variables_or_everybodys_and_a_wrong_one_is_named() {
        let of = |own: &str, common: &str| {
            let value = |name: &str| Some(if name == "LOOPLANE_LOG" { own } else { common }.into());
            filter(value).map(|filter| filter.to_string()).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(of("", "").as_deref(), Ok("info"));
        assert_eq!(of("", "warn").as_deref(), Ok("warn"));
        assert_eq!(of("debug", "warn").as_deref(), Ok("debug"));
        assert_eq!(of("debug", "a=b=c").as_deref(), Ok("debug"));
        let error = of("looplane=loud", "warn").expect_err("no such level");
        assert!(error.starts_with("LOOPLANE_LOG is \"looplane=loud\", but must be a filter such as"), "{error}");
        assert_eq!(error.matches("error parsing level filter").count(), 1, "{error}");
        assert!(of("", "a=b=c").expect_err("no filter").starts_with("RUST_LOG is "));
    }
}
