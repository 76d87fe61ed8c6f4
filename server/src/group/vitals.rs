//! Whether the ranks of a group are still there: a busy one is heard from, an idle one is asked.

use std::time::Duration;

use futures::future::try_join_all;
use looplane_proto::worker::v1::HealthRequest;
use looplane_proto::worker::v1::worker_client::WorkerClient;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Channel;

/// When a rank last reported a step, and which (plan, step in it).
#[derive(Debug, Clone, Copy)]
pub(super) struct Heard {
    pub(super) when: Instant,
    pub(super) step: (u64, u32),
}

/// When the first rank has been silent for too long, and which. A rank owes a word while the group does, and while it is
/// behind rank 0.
pub(super) fn silent_rank(ranks: &[Heard], owed_since: Option<Instant>, limit: Duration) -> Option<(Instant, usize)> {
    let ahead = ranks[0];
    let owing = ranks.iter().enumerate().filter_map(|(rank, heard)| match owed_since {
        Some(since) => Some((heard.when.max(since) + limit, rank)),
        None => (heard.step < ahead.step).then_some((heard.when.max(ahead.when) + limit, rank)),
    });
    owing.min()
}

/// Asks all ranks whether they are still there, `pause` from now; each has twice `limit` to answer. (Twice, for a server
/// that stood still itself finds its own clock run out first.)
///
/// # Errors
/// Names a rank that does not answer, or answers with an error, in words that follow "rank 3 ".
pub(super) async fn probe(
    ranks: Vec<WorkerClient<Channel>>,
    pause: Duration,
    limit: Duration,
) -> Result<(), (usize, String)> {
    sleep(pause).await;
    let probes = ranks.into_iter().enumerate().map(async |(rank, mut client)| {
        for _ in 0..2 {
            match timeout(limit, client.health(HealthRequest {})).await {
                Ok(Ok(_)) => return Ok(()),
                Ok(Err(status)) => return Err((rank, format!("is not well: {}", status.message()))),
                Err(_) => {}
            }
        }
        Err((rank, format!("does not answer: nothing for {:?}, though nothing was to do", 2 * limit)))
    });
    try_join_all(probes).await.map(|_| ())
}

/// The end of a probe; pending where there is none. Cancel-safe.
pub(super) async fn answer(
    probing: &mut Option<impl Future<Output = Result<(), (usize, String)>> + Unpin>,
) -> Result<(), (usize, String)> {
    match probing {
        Some(probe) => probe.await,
        None => std::future::pending().await,
    }
}
