//! A rank as a process: started, its log passed on, its end put into words.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use futures::future::BoxFuture;
use rustix::process::Signal;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::{Instrument, Level};

/// Bytes of a worker's log line that are kept; a longer one is cut in several.
const LOG_LINE_LIMIT: u64 = 8 * 1024;
/// How long a worker's last words may take to arrive after it exited.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(1);

/// How a worker ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerExit {
    /// Exit code 0.
    pub success: bool,
    /// How, in words that follow "rank 3 ".
    pub words: String,
    /// `kill` ended it, or somebody else's SIGKILL that the system took longer to carry out than `kill` took to come.
    pub killed: bool,
}

/// Starts the workers of a group.
pub trait Launcher: Send + Sync + 'static {
    /// Starts rank `rank`, which is to listen on `socket`. The future ends with the worker; `kill` ends both at once.
    ///
    /// # Errors
    /// The worker could not be started.
    fn launch(&self, rank: u32, socket: &Path, kill: CancellationToken) -> io::Result<BoxFuture<'static, WorkerExit>>;
}

/// Starts `BINARY rank --socket PATH --rank N --parent PID` as a process of its own; PID is the server's.
#[derive(Debug, Clone)]
pub struct ProcessLauncher {
    /// The binary; the server's own, in production.
    pub binary: PathBuf,
    /// Set in the worker's environment, such as its log level.
    pub env: Vec<(String, String)>,
}

impl ProcessLauncher {
    /// Workers of the binary that runs now, with `env` set in their environment.
    ///
    /// Between fork and exec this link leads to the server's own program, also where an upgrade has put another in its
    /// place: the workers of one server are always of one build.
    pub fn this_binary(env: Vec<(String, String)>) -> Self {
        Self { binary: "/proc/self/exe".into(), env }
    }
}

impl Launcher for ProcessLauncher {
    fn launch(&self, rank: u32, socket: &Path, kill: CancellationToken) -> io::Result<BoxFuture<'static, WorkerExit>> {
        let mut command = Command::new(&self.binary);
        command.arg0("looplane").arg("rank").arg("--socket").arg(socket).arg("--rank").arg(rank.to_string());
        command.arg("--parent").arg(std::process::id().to_string());
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A group of its own: Ctrl-C in a terminal reaches the server alone, which drains its workers.
        command.process_group(0).kill_on_drop(true);
        let (mut child, parent) = spawn_from_lasting_thread(command)?;
        let pid = child.id().unwrap_or(0);
        tracing::debug!("rank {rank} is process {pid}");
        let stdout = child.stdout.take().expect("stdout was piped");
        let stderr = child.stderr.take().expect("stderr was piped");
        tokio::spawn(forward_log(rank, stdout).in_current_span());
        let log = tokio::spawn(forward_log(rank, stderr).in_current_span());
        Ok(Box::pin(async move {
            let (status, asked) = tokio::select! {
                biased;
                status = child.wait() => (status, false),
                () = kill.cancelled() => match child.start_kill() {
                    Ok(()) => (child.wait().await, true),
                    Err(error) => (Err(error), true),
                },
            };
            // A process that is ending already keeps the status that it ends with.
            let killed = asked && status.as_ref().is_ok_and(|status| status.signal() == Some(Signal::KILL.as_raw()));
            drop(parent);
            let last_line = tokio::time::timeout(LAST_WORDS_LIMIT, log).await.ok().and_then(Result::ok).flatten();
            match status {
                Ok(status) => {
                    WorkerExit { success: status.success(), words: exit_words(pid, status, last_line), killed }
                }
                Err(error) => {
                    let words = format!("(process {pid}) could not be waited for: {error}");
                    WorkerExit { success: false, words, killed }
                }
            }
        }))
    }
}

/// Spawns from a thread that lives until the sender is dropped. A worker asks the kernel to be killed when its parent
/// dies, and the kernel takes the thread that spawned it for the parent: a thread of the runtime's may end much
/// earlier.
fn spawn_from_lasting_thread(mut command: Command) -> io::Result<(Child, mpsc::Sender<()>)> {
    let (parent, end) = mpsc::channel::<()>();
    let (answer, spawned) = mpsc::channel();
    let runtime = Handle::current();
    let body = move || {
        let _runtime = runtime.enter();
        // Nobody takes the child if its launch was given up: dropped, it is killed.
        let _ = answer.send(command.spawn());
        // Returns once the sender is dropped; nothing is ever sent.
        let _ = end.recv();
    };
    thread::Builder::new().name("worker-parent".into()).spawn(body)?;
    let gone = |_| io::Error::other("the thread that spawns a worker ended without an answer");
    Ok((spawned.recv().map_err(gone)??, parent))
}

fn exit_words(pid: u32, status: ExitStatus, last_line: Option<String>) -> String {
    let how = match (status.code(), status.signal()) {
        (Some(code), _) => format!("(process {pid}) exited with code {code}"),
        // Such as "signal: 9 (SIGKILL)".
        (None, Some(_)) => {
            format!("(process {pid}) was killed by {}", status.to_string().replacen("signal:", "signal", 1))
        }
        (None, None) => format!("(process {pid}) ended: {status}"),
    };
    match last_line {
        Some(line) if !status.success() => format!("{how}, after: {line}"),
        _ => how,
    }
}

/// Passes a worker's log on, line by line and with its levels, and returns the last one.
async fn forward_log(rank: u32, stderr: impl AsyncRead + Unpin) -> Option<String> {
    let mut reader = BufReader::new(stderr);
    let mut last = None;
    loop {
        let mut line = Vec::new();
        match (&mut reader).take(LOG_LINE_LIMIT).read_until(b'\n', &mut line).await {
            Ok(0) | Err(_) => return last,
            Ok(_) => {}
        }
        let line = String::from_utf8_lossy(&line).trim_end().to_string();
        if !line.is_empty() {
            let (level, text) = split_level(&line);
            match level {
                // The last words of the rank that ends a group are told with its end. The others' say the same, or
                // follow.
                Level::ERROR => tracing::debug!(target: "looplane::worker", "rank {rank}: {text}"),
                Level::WARN => tracing::warn!(target: "looplane::worker", "rank {rank}: {text}"),
                Level::INFO => tracing::info!(target: "looplane::worker", "rank {rank}: {text}"),
                Level::DEBUG => tracing::debug!(target: "looplane::worker", "rank {rank}: {text}"),
                Level::TRACE => tracing::trace!(target: "looplane::worker", "rank {rank}: {text}"),
            }
            last = Some(text.to_string());
        }
    }
}

/// The level that a line of a worker's log begins with, and the rest. What begins otherwise, such as a panic's message,
/// is passed on as it is.
fn split_level(line: &str) -> (Level, &str) {
    let line = line.trim_start();
    let split = line.split_once(' ').and_then(|(word, rest)| match word {
        "ERROR" => Some((Level::ERROR, rest)),
        "WARN" => Some((Level::WARN, rest)),
        "INFO" => Some((Level::INFO, rest)),
        "DEBUG" => Some((Level::DEBUG, rest)),
        "TRACE" => Some((Level::TRACE, rest)),
        _ => None,
    });
    split.unwrap_or((Level::INFO, line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_taken_from_the_workers_lines() {
        assert_eq!(split_level(" WARN looplane_worker: slow"), (Level::WARN, "looplane_worker: slow"));
        assert_eq!(split_level("thread 'main' panicked"), (Level::INFO, "thread 'main' panicked"));
    }
}
