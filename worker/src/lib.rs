//! One socket's worker: reads its tensor-parallel shard of a checkpoint and runs it in a looped decoder.
//!
//! `model` reads the checkpoint, `plan` says what is cut where and in which order it is summed, `batch` turns the
//! server's plans into the rows of each step, `backend` chooses between `cpu`, which runs the loop with the functions
//! of `math`, and `cuda`, `sampling` draws the tokens, `grammar` says which it may draw, `control` speaks worker/v1,
//! `bench` measures.
#![deny(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use tokio::net::UnixListener;

pub mod backend;
pub mod batch;
pub mod bench;
pub mod control;
pub mod convert;
pub mod cpu;
pub mod cuda;
pub mod decoder;
#[cfg(test)]
mod golden;
pub mod grammar;
pub mod math;
pub mod model;
pub mod plan;
pub mod rope;
pub mod sampling;
pub mod scaling;
pub mod shm;
pub mod wait;

use decoder::{Fault, Load};

/// Exit code of a worker that ended with a fault: the server starts the group again.
pub const EXIT_FAULT: u8 = 70;

/// Options of `looplane rank`, which the server starts; not meant to be typed.
#[derive(Debug, Clone, clap::Args)]
pub struct WorkerArgs {
    /// Unix socket to listen on; must not exist.
    #[arg(long)]
    pub socket: PathBuf,
    /// Rank of this worker in its group, from 0.
    #[arg(long)]
    pub rank: usize,
    /// Process id of the server: a worker whose server is gone before it starts does not start.
    #[arg(long)]
    pub parent: Option<u32>,
}

/// Serves one worker with the backend that its load request asks for, as [`run_with`] does.
pub fn run(args: &WorkerArgs) -> ExitCode {
    run_with(args, Arc::new(backend::load))
}

/// Serves one worker until its run ends and says how the process should exit: 0 after a drain, [`EXIT_FAULT`] after a
/// fault, which is logged. The worker is killed when the thread that started it ends, so that a dead server leaves no
/// orphan; a server therefore starts workers from a thread that lives as long as it does.
pub fn run_with(args: &WorkerArgs, load: Arc<Load>) -> ExitCode {
    let result = follow_parent(args.parent).and_then(|()| serve(&args.socket, args.rank, load));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            tracing::error!(rank = args.rank, socket = %args.socket.display(), "{fault}");
            ExitCode::from(EXIT_FAULT)
        }
    }
}

/// Ties the life of this process to its parent's.
fn follow_parent(expected: Option<u32>) -> Result<(), Fault> {
    let parent = getppid();
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| Fault::Socket(format!("prctl(PR_SET_PDEATHSIG): {error}")))?;
    // A parent that died before the call sends no signal; then this process has a new one by now.
    let now = getppid();
    let as_number = now.map_or(0, |pid| pid.as_raw_nonzero().get() as u32);
    if now != parent || expected.is_some_and(|expected| expected != as_number) {
        return Err(Fault::ServerGone);
    }
    Ok(())
}

fn serve(socket: &Path, rank: usize, load: Arc<Load>) -> Result<(), Fault> {
    let failed = |error: std::io::Error| Fault::Socket(format!("{}: {error}", socket.display()));
    // One thread: it moves a few messages a step, and the cores belong to the decoder.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    runtime.block_on(async {
        let listener = UnixListener::bind(socket).map_err(failed)?;
        let result = control::serve(listener, rank, load).await;
        // The server owns the directory and may have removed it.
        let _ = std::fs::remove_file(socket);
        result
    })
}
