//! The worker processes of one group, from their launch to the end of the last.

use std::path::PathBuf;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};
use tokio_util::sync::CancellationToken;

use super::fault::StartError;
use super::process::{Launcher, WorkerExit};
use super::sockets::SocketDir;

/// A killed process is gone by then, unless the kernel holds it.
pub(super) const KILL_LIMIT: Duration = Duration::from_secs(20);

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

    /// Kills all but `rank`, whose connection broke, perhaps because it ends, and says which worker ended by itself, in
    /// words; `None` if none has within `limit`. The others do not wait for it: the system may take a second to end a
    /// process with a GPU.
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
    use std::fs;
    use std::path::Path;

    use super::super::process::ProcessLauncher;
    use super::*;

    /// A stand-in for the binary: a shell script, which gets `rank --socket PATH --rank N` as arguments.
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
        assert!(words.ends_with(") exited with code 3, after: rank --socket --rank 0 seen"), "{words}");
    }

    #[tokio::test]
    async fn a_kill_is_told_with_its_signal() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "kill -9 $$");
        let words = Workers::launch(&launcher, 1, &alive()).unwrap().next_exit().await;
        assert!(words.ends_with("was killed by signal 9 (SIGKILL)"), "{words}");
    }

    #[tokio::test]
    async fn killed_workers_leave_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let launcher = script(dir.path(), "echo $$ > \"$3.pid\"; exec sleep 1000");
        let workers = Workers::launch(&launcher, 2, &alive()).unwrap();
        let sockets = workers.sockets[0].parent().unwrap().to_path_buf();
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
