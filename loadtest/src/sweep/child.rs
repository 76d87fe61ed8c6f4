//! A process that the sweep starts: its log kept in a file, and its end seen to however the sweep ends. Its standard
//! input ends with the sweep, which tells a server whose sweep was killed (`--until-stdin-closes`).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::process::{Child as Process, ChildStdin, Command};
use tokio_util::sync::CancellationToken;

use crate::text::printable;

/// How often a log is looked at for the line that says that its server is ready.
const LOOK_PERIOD: Duration = Duration::from_millis(50);
/// A server that is not ready after so long is given up: it would have read a checkpoint of a terabyte by then.
const READY_LIMIT: Duration = Duration::from_secs(20 * 60);
/// A process that was told to end has so long to do it; then it is killed.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Begins the line in which `looplane serve` says that it is ready, and where.
const READY_LINE: &str = "Listening http://";
/// Variables of a server that is open to others; one of the sweep's is asked by the sweep alone, without key and TLS.
const OF_OPEN_SERVERS: [&str; 4] =
    ["LOOPLANE_API_KEY", "LOOPLANE_API_KEY_FILE", "LOOPLANE_TLS_CERT", "LOOPLANE_TLS_KEY"];
/// Lines of a log that an error quotes, and characters of each.
const QUOTED_LINES: usize = 6;
const QUOTED_CHARS: usize = 300;

/// What an error says where the user stopped the sweep.
pub const STOPPED: &str = "stopped by the user";

/// A process in a group of its own, so that Ctrl-C in a terminal reaches the sweep alone, which ends it in order. It is
/// killed when dropped.
#[derive(Debug)]
pub struct Child {
    name: String,
    log: PathBuf,
    process: Process,
    /// Until it was waited for: from then on the number may be another's.
    group: Option<Pid>,
    /// Open for as long as this is.
    _stdin: Option<ChildStdin>,
}

impl Child {
    /// Starts `program`; both of its outputs go to the file `log`. `name` is what errors call it.
    ///
    /// # Errors
    /// The log cannot be written or the program not be started.
    pub fn start<A: AsRef<OsStr>>(
        name: impl Into<String>,
        program: &Path,
        arguments: impl IntoIterator<Item = A>,
        log: &Path,
    ) -> anyhow::Result<Self> {
        let name = name.into();
        let outputs = File::create(log).and_then(|file| Ok([file.try_clone()?, file]));
        let [stdout, stderr] = outputs.with_context(|| format!("cannot write the log {}", log.display()))?;
        let mut command = Command::new(program);
        for variable in OF_OPEN_SERVERS {
            command.env_remove(variable);
        }
        let spawned = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(stderr)
            .process_group(0)
            .kill_on_drop(true)
            .spawn();
        let mut process = spawned.with_context(|| format!("cannot start {name}"))?;
        let stdin = process.stdin.take();
        let group = process.id().and_then(|pid| Pid::from_raw(pid as i32));
        Ok(Self { name, log: log.into(), process, group, _stdin: stdin })
    }

    /// Waits until a server says where it listens, which it does once it can answer; its address.
    ///
    /// # Errors
    /// It ended, takes too long, or `stop` was cancelled.
    pub async fn ready(&mut self, stop: &CancellationToken) -> anyhow::Result<String> {
        let begun = Instant::now();
        loop {
            if let Some(address) = fs::read_to_string(&self.log).ok().as_deref().and_then(ready_address) {
                return Ok(address);
            }
            self.check()?;
            if begun.elapsed() > READY_LIMIT {
                let (name, minutes, log) = (&self.name, READY_LIMIT.as_secs() / 60, self.log.display());
                bail!("{name} is not ready after {minutes} minutes; its log is {log}");
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_PERIOD) => {}
                () = stop.cancelled() => bail!(STOPPED),
            }
        }
    }

    /// An error if it has ended, which a server does not by itself.
    ///
    /// # Errors
    /// With the last lines of its log.
    pub fn check(&mut self) -> anyhow::Result<()> {
        let ended = self.process.try_wait().with_context(|| format!("cannot wait for {}", self.name))?;
        ended.map_or(Ok(()), |status| Err(self.ended(status)))
    }

    /// Waits for the end of a process that ends by itself.
    ///
    /// # Errors
    /// It failed, or `stop` was cancelled: then it was ended.
    pub async fn finish(mut self, stop: &CancellationToken) -> anyhow::Result<()> {
        let ended = tokio::select! {
            ended = self.process.wait() => Some(ended),
            () = stop.cancelled() => None,
        };
        let Some(ended) = ended else {
            self.end().await;
            bail!(STOPPED)
        };
        let status = ended.with_context(|| format!("cannot wait for {}", self.name))?;
        self.group = None;
        if status.success() { Ok(()) } else { Err(self.ended(status)) }
    }

    /// Ends it: by SIGTERM, and with SIGKILL where that takes too long. What had ended already stays so.
    pub async fn end(mut self) {
        self.signal(Signal::TERM);
        if tokio::time::timeout(END_LIMIT, self.process.wait()).await.is_ok() {
            self.group = None;
        } else {
            self.signal(Signal::KILL);
            if self.process.wait().await.is_ok() {
                self.group = None;
            }
        }
    }

    fn ended(&mut self, status: ExitStatus) -> anyhow::Error {
        self.group = None;
        let said = fs::read(&self.log).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        let quoted = &lines[lines.len().saturating_sub(QUOTED_LINES)..];
        let last_lines: String = quoted.iter().map(|line| format!("\n  {}", printable(line, QUOTED_CHARS))).collect();
        anyhow!("{} ended with {status}; its log, {}, ends with:{last_lines}", self.name, self.log.display())
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.group {
            // It fails where nobody is left in the group, which is what is wanted.
            let _ = kill_process_group(group, signal);
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// The address in the line that says that a server is ready.
fn ready_address(log: &str) -> Option<String> {
    // The last line may be half written.
    let whole = &log[..=log.rfind('\n')?];
    // Before it in the line are the time and such.
    let said = &whole[whole.find(READY_LINE)?..];
    said.split_whitespace().nth(1).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, log: &Path) -> Child {
        Child::start("the server", Path::new("/bin/sh"), ["-c", script], log).expect("a shell starts")
    }

    fn lives(pid: i32) -> bool {
        // A zombie has no command line.
        fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
    }

    async fn is_gone(pid: i32) {
        let begun = Instant::now();
        while lives(pid) {
            assert!(begun.elapsed() < Duration::from_secs(5), "process {pid} lives on");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn a_server_is_ready_when_it_says_so_and_is_ended_with_all_that_it_started() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let log = folder.path().join("log");
        let script = "sleep 300 & echo child $!; sleep 0.2; echo Listening http://127.0.0.1:7 '(HTTP)'; wait";
        let mut server = shell(script, &log);
        let stop = CancellationToken::new();
        assert_eq!(server.ready(&stop).await.expect("it says so"), "http://127.0.0.1:7");
        server.check().expect("it runs");
        let said = fs::read_to_string(&log).expect("a log");
        let started: i32 = said.lines().next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).expect("a number");
        assert!(lives(started));
        server.end().await;
        is_gone(started).await;
    }

    #[tokio::test]
    async fn a_process_that_is_dropped_is_killed_even_where_it_ignores_being_told() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let server = shell("trap '' TERM; echo up; sleep 300", &folder.path().join("log"));
        let pid = server.group.expect("it runs").as_raw_nonzero().get();
        drop(server);
        is_gone(pid).await;
    }

    #[tokio::test]
    async fn a_server_that_ends_at_start_says_why_in_the_error() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let stop = CancellationToken::new();
        let script = "for n in 1 2 3 4 5 6 7; do echo line $n; done; echo cannot listen: port in use >&2; exit 3";
        let mut server = shell(script, &folder.path().join("log"));
        let error = server.ready(&stop).await.expect_err("it ended").to_string();
        assert!(error.starts_with("the server ended with exit status: 3; its log, "), "{error}");
        assert!(
            error.ends_with(
                "ends with:\n  line 3\n  line 4\n  line 5\n  line 6\n  line 7\n  cannot listen: port in use"
            ),
            "{error}"
        );
        let failed = shell("exit 1", &folder.path().join("log")).finish(&stop).await;
        assert!(failed.expect_err("a failure").to_string().starts_with("the server ended with exit status: 1; "));
        shell("exit 0", &folder.path().join("log")).finish(&stop).await.expect("a success");
        let missing = Child::start("it", Path::new("/nowhere"), ["x"], &folder.path().join("log"));
        assert!(missing.expect_err("no such program").to_string().starts_with("cannot start it"));
    }

    #[tokio::test]
    async fn the_user_is_not_kept_waiting() {
        let folder = tempfile::tempdir().expect("a temporary directory");
        let stop = CancellationToken::new();
        stop.cancel();
        let mut server = shell("sleep 300", &folder.path().join("log"));
        assert_eq!(server.ready(&stop).await.expect_err("stopped").to_string(), STOPPED);
        server.end().await;
        let bench = shell("sleep 300", &folder.path().join("log"));
        assert_eq!(bench.finish(&stop).await.expect_err("stopped").to_string(), STOPPED);
    }

    #[test]
    fn a_line_that_is_half_written_names_no_address() {
        assert_eq!(ready_address("Listening http://127.0.0.1:41"), None);
        assert_eq!(ready_address("x\n12:34 INFO Listening http://[::1]:4 (HTTP\n").as_deref(), Some("http://[::1]:4"));
        assert_eq!(ready_address(""), None);
    }
}
