//! Kills workers of a server on this machine, as a machine's fault would.
//!
//! The server is whoever listens at the target's address, and a worker is a process that was started as
//! `looplane rank --rank R --parent PID`: both can be seen in `/proc` without the server's help.

use std::fmt::{self, Display};
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::str::FromStr;
use std::time::Duration;

use procfs::ProcError;
use procfs::net::TcpState;
use procfs::process::{FDTarget, Process, all_processes};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::mpsc;
use tokio::task::{JoinSet, spawn_blocking};
use tokio_util::sync::CancellationToken;

use crate::client::record::Clock;
use crate::text::parse_duration;

/// A worker to kill, written `1@5s`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KillAt {
    pub rank: u32,
    /// When, from the start of the run.
    pub at: Duration,
}

/// Why a worker cannot be killed.
#[derive(Debug, thiserror::Error)]
pub enum KillError {
    #[error("--kill-worker needs a server on this machine, which {0} is not")]
    Elsewhere(String),
    #[error("no process that this user may look into listens at {0}: run as the server's user, or give --server-pid")]
    NobodyListens(String),
    #[error("processes {pids:?} all listen at {address}: say which one is the server (--server-pid)")]
    SeveralListen { address: SocketAddr, pids: Vec<u32> },
    #[error(
        "process {server} has no worker of rank {rank}: --kill-worker needs `looplane serve` with more ranks, or its process id (--server-pid)"
    )]
    NoWorker { server: u32, rank: u32 },
    #[error("processes cannot be found ({0}): --kill-worker needs Linux with /proc")]
    Proc(ProcError),
    #[error("process {pid} cannot be killed: {source}")]
    Kill { pid: u32, source: io::Error },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalServer {
    pid: u32,
}

#[derive(Debug)]
pub struct Strike {
    /// Its place among those that were asked for.
    pub number: usize,
    /// When in nanoseconds of the run, and the worker's process id.
    pub outcome: Result<(u64, u32), KillError>,
}

/// Kills that are due in a run under way.
pub struct Killer {
    tasks: JoinSet<()>,
    stop: CancellationToken,
    /// Each kill, right after it was done.
    pub strikes: mpsc::UnboundedReceiver<Strike>,
}

impl FromStr for KillAt {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let malformed = || format!("'{text}' is not of the form RANK@TIME, such as 1@5s");
        let (rank, time) = text.split_once('@').ok_or_else(malformed)?;
        Ok(Self { rank: rank.trim().parse().map_err(|_| malformed())?, at: parse_duration(time)? })
    }
}

impl Display for KillAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{:?}", self.rank, self.at)
    }
}

impl LocalServer {
    pub fn of_pid(pid: u32) -> Self {
        Self { pid }
    }

    /// The process that listens at `address` (`HOST:PORT`).
    pub async fn behind(address: &str) -> Result<Self, KillError> {
        // An unknown host has no addresses.
        let mut found: Vec<SocketAddr> = tokio::net::lookup_host(address).await.into_iter().flatten().collect();
        found.retain(|found| is_of_this_machine(found.ip()));
        if found.is_empty() {
            return Err(KillError::Elsewhere(address.to_owned()));
        }
        let look = spawn_blocking(move || {
            // As clients do: where nobody listens at a name's first address, its next one is tried.
            found.into_iter().find_map(|address| Self::listening_at(address).transpose()).transpose()
        });
        let server = look.await.expect("looking does not panic")?;
        server.ok_or_else(|| KillError::NobodyListens(address.to_owned()))
    }

    fn listening_at(address: SocketAddr) -> Result<Option<Self>, KillError> {
        let sockets = listening_sockets(address)?;
        let reached = |target: FDTarget| matches!(target, FDTarget::Socket(inode) if sockets.contains(&inode));
        // Processes of others cannot be looked into, and some end meanwhile.
        let listens = |process: &Process| {
            process.fd().is_ok_and(|mut files| files.any(|file| file.is_ok_and(|file| reached(file.target))))
        };
        let listening: Vec<Process> = processes()?.filter(listens).collect();
        let pids: Vec<u32> = listening.iter().map(|process| process.pid as u32).collect();
        // A process that was just forked holds its parent's sockets until it becomes another program.
        let of_their_own =
            listening.iter().filter(|process| process.stat().is_ok_and(|stat| !pids.contains(&(stat.ppid as u32))));
        match *of_their_own.map(|process| process.pid as u32).collect::<Vec<_>>() {
            [] => Ok(None),
            [pid] => Ok(Some(Self { pid })),
            [..] => Err(KillError::SeveralListen { address, pids }),
        }
    }

    /// Process id of its worker of this rank. There is none between a worker's end and the start of the next one.
    pub fn worker(self, rank: u32) -> Result<u32, KillError> {
        let server = self.pid;
        let is_worker = |process: &Process| {
            let words = process.cmdline().unwrap_or_default();
            let says =
                |name: &str, value: u32| words.windows(2).any(|pair| pair == [name.to_owned(), value.to_string()]);
            says("--rank", rank) && says("--parent", server)
        };
        let worker = processes()?.find(is_worker);
        worker.map(|process| process.pid as u32).ok_or(KillError::NoWorker { server, rank })
    }
}

impl Killer {
    /// Does each of `kills` on `server` when it is due by `clock`.
    pub fn start(kills: &[KillAt], server: LocalServer, clock: Clock) -> Self {
        let (done, strikes) = mpsc::unbounded_channel();
        let (mut tasks, stop) = (JoinSet::new(), CancellationToken::new());
        for (number, &KillAt { rank, at }) in kills.iter().enumerate() {
            let (done, stop) = (done.clone(), stop.clone());
            tasks.spawn(async move {
                tokio::select! {
                    () = clock.sleep_until(at) => {}
                    () = stop.cancelled() => return,
                }
                let strike = spawn_blocking(move || strike(server, rank, clock));
                let outcome = strike.await.expect("killing does not panic");
                // A run that is over asks for no more kills.
                let _ = done.send(Strike { number, outcome });
            });
        }
        Self { tasks, stop, strikes }
    }

    /// Gives up the kills that are not due yet and waits until those under way are done.
    pub async fn stop(&mut self) {
        self.stop.cancel();
        while self.tasks.join_next().await.is_some() {}
    }
}

fn strike(server: LocalServer, rank: u32, clock: Clock) -> Result<(u64, u32), KillError> {
    let pid = server.worker(rank)?;
    let at_ns = clock.now_ns();
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("the name of a directory in /proc");
    kill_process(process, Signal::KILL).map_err(|error| KillError::Kill { pid, source: error.into() })?;
    Ok((at_ns, pid))
}

/// Only an address of this machine can be bound to.
fn is_of_this_machine(address: IpAddr) -> bool {
    UdpSocket::bind(SocketAddr::new(address, 0)).is_ok()
}

fn processes() -> Result<impl Iterator<Item = Process>, KillError> {
    Ok(all_processes().map_err(KillError::Proc)?.flatten())
}

/// Inodes of the sockets that a connection to `address` reaches: those that are bound to it, else those bound to every
/// address of its kind, else those bound to every address of both.
fn listening_sockets(address: SocketAddr) -> Result<Vec<u64>, KillError> {
    // A kernel without IPv6 has no table of it.
    let tables =
        procfs::net::tcp().map_err(KillError::Proc)?.into_iter().chain(procfs::net::tcp6().unwrap_or_default());
    let listening =
        tables.filter(|entry| entry.state == TcpState::Listen && entry.local_address.port() == address.port());
    let on_its_port: Vec<(IpAddr, u64)> =
        listening.map(|entry| (entry.local_address.ip().to_canonical(), entry.inode)).collect();
    let ip = address.ip().to_canonical();
    let every_of_its_kind = if ip.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { Ipv6Addr::UNSPECIFIED.into() };
    let bound = [ip, every_of_its_kind, Ipv6Addr::UNSPECIFIED.into()];
    let reached = bound.into_iter().find(|bound| on_its_port.iter().any(|(ip, _)| ip == bound));
    Ok(on_its_port.into_iter().filter(|(ip, _)| Some(*ip) == reached).map(|(_, socket)| socket).collect())
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::fs;
    use std::process::{Child, Command, Stdio};

    /// A process that looks like a worker of `server`; it ends with its standard input.
    pub fn stand_in(server: u32, rank: u32) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", "read never", "rank", "--socket", "s", "--rank", &rank.to_string()]);
        command.args(["--parent", &server.to_string()]).stdin(Stdio::piped());
        let mut child = command.spawn().expect("a shell");
        // The system lets `spawn` go on before it has put the new program's command line in its place.
        while fs::read(format!("/proc/{}/cmdline", child.id())).expect("it is not reaped").is_empty() {
            assert_eq!(child.try_wait().expect("it is this process's"), None, "the shell has ended");
            std::thread::yield_now();
        }
        child
    }

    #[tokio::test]
    async fn a_server_is_found_by_its_port_and_a_worker_by_its_rank() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound").to_string();
        let server = LocalServer::behind(&address).await.expect("this process listens");
        assert_eq!(server, LocalServer::of_pid(std::process::id()));
        drop(listener);
        let refusal = LocalServer::behind(&address).await.expect_err("nobody listens");
        assert!(matches!(refusal, KillError::NobodyListens(_)), "{refusal}");
        // TEST-NET-1 of RFC 5737, which no machine has.
        let refusal = LocalServer::behind("192.0.2.1:8000").await.expect_err("elsewhere");
        assert!(refusal.to_string().contains("192.0.2.1:8000"), "{refusal}");

        // Ranks that no other test has workers of.
        let workers = [stand_in(std::process::id(), 70), stand_in(std::process::id(), 7)];
        let of_another = stand_in(1, 71);
        assert_eq!([70, 7].map(|rank| server.worker(rank).expect("started")), [workers[0].id(), workers[1].id()]);
        assert!(matches!(server.worker(71), Err(KillError::NoWorker { rank: 71, .. })));
        for mut child in workers.into_iter().chain([of_another]) {
            drop(child.stdin.take());
            child.wait().expect("it ends");
        }
    }

    #[tokio::test]
    async fn only_sockets_that_the_address_reaches_are_the_servers() {
        let listen = async |address: SocketAddr| tokio::net::TcpListener::bind(address).await.expect("a free port");
        let at = |ip: &str, port: u16| SocketAddr::new(ip.parse().expect("valid"), port);
        let sockets = |ip: &str, port| listening_sockets(at(ip, port)).expect("Linux");
        let one = listen(at("127.0.0.1", 0)).await;
        let port = one.local_addr().expect("bound").port();
        assert_eq!((sockets("127.0.0.1", port).len(), sockets("127.0.0.2", port).len()), (1, 0));
        let refusal = LocalServer::behind(&format!("127.0.0.2:{port}")).await.expect_err("nobody listens there");
        assert!(matches!(refusal, KillError::NobodyListens(_)), "{refusal}");
        let _other = listen(at("127.0.0.2", port)).await;
        let found = [sockets("127.0.0.1", port), sockets("127.0.0.2", port)];
        assert!(found[0].len() == 1 && found[1].len() == 1 && found[0] != found[1], "{found:?}");
        assert_eq!(sockets("::ffff:127.0.0.1", port), found[0]);

        let everywhere = listen(at("0.0.0.0", 0)).await;
        let port = everywhere.local_addr().expect("bound").port();
        assert_eq!((sockets("127.0.0.2", port).len(), sockets("::1", port).len()), (1, 0));
    }
}
