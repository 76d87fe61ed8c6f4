//! Starts and ends worker processes: the only place that knows that a rank is a process.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::start::StartError;
use futures::future::BoxFuture;
use rustix::process::{Signal, geteuid};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::runtime::Handle;
use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;
use tracing::Level;

/// Of the names of the sockets' directories; the server's process id follows.
const SOCKET_DIR_PREFIX: &str = "looplane-";
/// Longest path of a Unix socket, in bytes (Linux: 108 with the final zero).
const SOCKET_PATH_LIMIT: usize = 107;
/// Bytes of a worker's log line that are kept; a longer one is cut in several.
const LOG_LINE_LIMIT: u64 = 8 * 1024;
/// How long a worker's last words may take to arrive after it exited.
const LAST_WORDS_LIMIT: Duration = Duration::from_secs(1);
/// A killed process is gone by then, unless the kernel holds it.
pub(super) const KILL_LIMIT: Duration = Duration::from_secs(20);

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

/// Starts `BINARY worker --socket PATH --rank N --parent PID` as a process of its own; PID is the server's.
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
        command.arg0("looplane").arg("worker").arg("--socket").arg(socket).arg("--rank").arg(rank.to_string());
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
        tokio::spawn(forward_log(rank, stdout));
        let log = tokio::spawn(forward_log(rank, stderr));
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

/// Spawns from a thread that lives until the sender is dropped. A worker asks the kernel to be killed when its parent dies,
/// and the kernel takes the thread that spawned it for the parent: a thread of the runtime's may end much earlier.
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
                // The last words of the rank that ends a group are told with its end. The others' say the same, or follow.
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

/// The level that a line of a worker's log begins with, and the rest. What begins otherwise, such as a panic's message, is
/// passed on as it is.
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

/// A directory for the sockets of one group, for this user alone; removed when dropped, or as soon as all are connected.
#[derive(Debug)]
struct SocketDir(PathBuf);

impl SocketDir {
    fn create(temp: &Path) -> Result<Self, StartError> {
        remove_socket_dirs_of_the_dead(temp);
        let name = format!("{SOCKET_DIR_PREFIX}{}-{}", std::process::id(), uuid::Uuid::new_v4().simple());
        let path = temp.join(name);
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map(|()| Self(path)).map_err(|error| {
            StartError::refusal(format!(
                "the workers' sockets need a directory in {}, which cannot be made ({error}): set TMPDIR to another place",
                temp.display()
            ))
        })
    }

    fn socket(&self, rank: u32) -> Result<PathBuf, StartError> {
        let path = self.0.join(format!("rank-{rank}.sock"));
        if path.as_os_str().len() > SOCKET_PATH_LIMIT {
            return Err(StartError::refusal(format!(
                "the socket path {} is longer than {SOCKET_PATH_LIMIT} bytes: set TMPDIR to a shorter one",
                path.display()
            )));
        }
        Ok(path)
    }
}

/// Removes what servers left behind that were killed while their workers started: directories of this user, named after
/// a process that is no more. A link is left alone, whatever it is called.
fn remove_socket_dirs_of_the_dead(temp: &Path) {
    let Ok(entries) = fs::read_dir(temp) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let after_prefix = name.to_str().and_then(|name| name.strip_prefix(SOCKET_DIR_PREFIX));
        let Some((pid, _)) = after_prefix.and_then(|rest| rest.split_once('-')) else { continue };
        let is_dead = pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists();
        // Of the entry itself: a link is none.
        let is_ours = entry.metadata().is_ok_and(|entry| entry.is_dir() && entry.uid() == geteuid().as_raw());
        if is_dead
            && is_ours
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::debug!("cannot remove {}: {error}", entry.path().display());
        }
    }
}

/// Removes the sockets' directory once every worker is connected: a server that is killed later leaves nothing behind.
pub(super) fn remove_socket_dir(sockets: &[PathBuf]) {
    let Some(dir) = sockets.first().and_then(|socket| socket.parent()) else { return };
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!("cannot remove {}: {error}", dir.display());
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// Held for as long as a worker is there. Nothing is ever sent.
pub(super) type Alive = tokio::sync::mpsc::Sender<()>;

/// The workers of one group, running or ended. Dropping it kills them.
#[derive(Debug)]
pub(super) struct Workers {
    exits: JoinSet<(u32, WorkerExit)>,
    /// By rank.
    kills: Vec<CancellationToken>,
    pub(super) sockets: Vec<PathBuf>,
    _dir: SocketDir,
}

impl Workers {
    /// Starts ranks 0 to `ranks`. A clone of `alive` is dropped as each of them is gone.
    pub(super) fn launch(launcher: &dyn Launcher, ranks: u32, alive: &Alive) -> Result<Self, StartError> {
        let dir = SocketDir::create(&std::env::temp_dir())?;
        let mut workers = Self { exits: JoinSet::new(), kills: Vec::new(), sockets: Vec::new(), _dir: dir };
        for rank in 0..ranks {
            let socket = workers._dir.socket(rank)?;
            let kill = CancellationToken::new();
            workers.kills.push(kill.clone());
            let exit = launcher.launch(rank, &socket, kill);
            let exit = exit.map_err(|error| StartError::fault(format!("rank {rank} could not be started: {error}")))?;
            let alive = alive.clone();
            workers.exits.spawn(async move {
                let exit = exit.await;
                drop(alive);
                (rank, exit)
            });
            workers.sockets.push(socket);
        }
        Ok(workers)
    }

    /// The next worker that ends, in words; pending if none is left. Cancel-safe.
    pub(super) async fn next_exit(&mut self) -> String {
        match self.exits.join_next().await {
            Some(exit) => words_of(exit),
            None => std::future::pending().await,
        }
    }

    /// Kills all but `rank`, whose connection broke, perhaps because it ends, and says which worker ended by itself, in words; `None` if none has within `limit`.
    /// The others do not wait for it: the system may take a second to end a process with a GPU.
    pub(super) async fn end_beside(&mut self, rank: u32, limit: Duration) -> Option<String> {
        self.kills.iter().zip(0..).filter(|(_, other)| *other != rank).for_each(|(kill, _)| kill.cancel());
        let own = async {
            while let Some(exit) = self.exits.join_next().await {
                match exit {
                    Ok((_, exit)) if exit.killed => {}
                    exit => return Some(words_of(exit)),
                }
            }
            None
        };
        tokio::time::timeout(limit, own).await.ok().flatten()
    }

    /// Kills all that still run and waits until they are gone.
    pub(super) async fn kill(mut self) {
        self.kills.iter().for_each(CancellationToken::cancel);
        self.gone(KILL_LIMIT).await;
    }

    /// Waits until all have ended by themselves; past `limit` they are killed. Says what was not as it should be.
    pub(super) async fn end(mut self, limit: Duration) -> Vec<String> {
        let mut words = Vec::new();
        let ended = tokio::time::timeout(limit, async {
            while let Some(exit) = self.exits.join_next().await {
                match exit {
                    Ok((_, exit)) if exit.success => {}
                    Ok((rank, exit)) => words.push(format!("rank {rank} {}", exit.words)),
                    Err(error) => words.push(format!("the watch over a worker failed: {error}")),
                }
            }
        });
        if ended.await.is_err() {
            words.push(format!("{} workers were killed as they had not ended after {limit:?}", self.exits.len()));
        }
        self.kill().await;
        words
    }

    async fn gone(&mut self, limit: Duration) {
        let all = async { while self.exits.join_next().await.is_some() {} };
        if tokio::time::timeout(limit, all).await.is_err() {
            tracing::error!("{} killed workers are still there after {limit:?}", self.exits.len());
        }
    }
}

fn words_of(exit: Result<(u32, WorkerExit), JoinError>) -> String {
    match exit {
        Ok((rank, exit)) => format!("rank {rank} {}", exit.words),
        Err(error) => format!("the watch over a worker failed: {error}"),
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        self.kills.iter().for_each(CancellationToken::cancel);
        // They end by themselves now, once their processes are gone.
        self.exits.detach_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stand-in for the binary: a shell script, which gets `worker --socket PATH --rank N` as arguments.
    fn script(dir: &Path, body: &str) -> ProcessLauncher {
        use std::os::unix::fs::PermissionsExt;
        let binary = dir.join("looplane");
        fs::write(&binary, format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(&binary, fs::Permissions::from_mode(0o700)).unwrap();
        ProcessLauncher { binary, env: vec![("LOOPLANE_TEST".into(), "seen".into())] }
    }

    fn alive() -> Alive {
        tokio::sync::mpsc::channel(1).0
    }

    #[tokio::test]
    async fn an_exit_comes_with_the_last_words() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "echo \"$1 $2 $4 $5 $LOOPLANE_TEST\" >&2; exit 3");
        let mut workers = Workers::launch(&launcher, 1, &alive()).unwrap();
        let words = workers.next_exit().await;
        assert!(words.starts_with("rank 0 (process "), "{words}");
        assert!(words.ends_with(") exited with code 3, after: worker --socket --rank 0 seen"), "{words}");
    }

    #[test]
    fn a_temporary_directory_that_cannot_be_used_is_named() {
        let error = SocketDir::create(Path::new("/nowhere")).unwrap_err();
        assert!(error.is_final && error.reason.contains("/nowhere,") && error.reason.contains("TMPDIR"), "{error:?}");
        let temp = tempfile::tempdir().unwrap();
        let long = temp.path().join("x".repeat(80));
        fs::create_dir(&long).unwrap();
        let error = SocketDir::create(&long).unwrap().socket(0).unwrap_err();
        assert!(error.is_final && error.reason.contains("TMPDIR"), "{error:?}");
    }

    #[tokio::test]
    async fn a_kill_is_told_with_its_signal() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "kill -9 $$");
        let words = Workers::launch(&launcher, 1, &alive()).unwrap().next_exit().await;
        assert!(words.ends_with("was killed by signal 9 (SIGKILL)"), "{words}");
    }

    #[test]
    fn levels_are_taken_from_the_workers_lines() {
        assert_eq!(split_level(" WARN looplane_worker: slow"), (Level::WARN, "looplane_worker: slow"));
        assert_eq!(split_level("thread 'main' panicked"), (Level::INFO, "thread 'main' panicked"));
    }

    #[test]
    fn what_killed_servers_left_is_removed_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str| temp.path().join(name);
        // No process has an id over 2^22.
        let (dead, alive) = (at("looplane-99999999-a"), at(&format!("looplane-{}-a", std::process::id())));
        let (other, link) = (at("looplane-notes"), at("looplane-99999999-link"));
        for dir in [&dead, &alive, &other] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("rank-0.sock"), "").unwrap();
        }
        std::os::unix::fs::symlink(&other, &link).unwrap();
        remove_socket_dirs_of_the_dead(temp.path());
        assert!(!dead.exists());
        assert!(alive.exists() && link.is_symlink() && other.join("rank-0.sock").exists());
    }

    #[tokio::test]
    async fn killed_workers_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "echo $$ > \"$3.pid\"; exec sleep 1000");
        let workers = Workers::launch(&launcher, 2, &alive()).unwrap();
        let sockets = workers._dir.0.clone();
        let pid_files: Vec<PathBuf> = workers.sockets.iter().map(|s| format!("{}.pid", s.display()).into()).collect();
        let pids = loop {
            let read: Vec<String> = pid_files.iter().filter_map(|file| fs::read_to_string(file).ok()).collect();
            if read.len() == 2 && read.iter().all(|pid| pid.ends_with('\n')) {
                break read;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        };
        assert_eq!(fs::metadata(&sockets).unwrap().permissions().mode_bits(), 0o700);
        workers.kill().await;
        for pid in pids {
            assert!(!Path::new(&format!("/proc/{}", pid.trim())).exists(), "process {pid} is still there");
        }
        assert!(!sockets.exists());
    }

    #[tokio::test]
    async fn the_worker_that_ends_by_itself_is_told_from_those_that_are_killed() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "[ $5 = 1 ] && { sleep 0.3; exit 3; }; exec sleep 1000");
        let mut workers = Workers::launch(&launcher, 3, &alive()).unwrap();
        let words = workers.end_beside(1, Duration::from_secs(20)).await.expect("rank 1 ends");
        assert!(words.starts_with("rank 1 ") && words.contains("exited with code 3"), "{words}");
        let launcher = script(dir.path(), "exec sleep 1000");
        let mut workers = Workers::launch(&launcher, 3, &alive()).unwrap();
        assert_eq!(workers.end_beside(1, Duration::from_secs(1)).await, None);
        assert_eq!(workers.exits.len(), 1, "the others have ended");
    }

    #[tokio::test]
    async fn workers_that_do_not_end_are_killed() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "[ $5 = 0 ] && exit 0; exec sleep 1000");
        let words = Workers::launch(&launcher, 2, &alive()).unwrap().end(Duration::from_millis(300)).await;
        assert_eq!(words, ["1 workers were killed as they had not ended after 300ms"]);
    }

    trait Mode {
        fn mode_bits(&self) -> u32;
    }

    impl Mode for fs::Permissions {
        fn mode_bits(&self) -> u32 {
            use std::os::unix::fs::PermissionsExt;
            self.mode() & 0o777
        }
    }
}
