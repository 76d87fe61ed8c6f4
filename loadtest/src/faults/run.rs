//! One run with faults: makes what goes wrong beside the requests, and counts what became of all of it.

use futures::future::join_all;
use tokio_util::sync::CancellationToken;

use crate::client::record::{Clock, RequestRecord};
use crate::client::target::Target;
use crate::faults::args::FaultArgs;
use crate::faults::half_open::HalfOpen;
use crate::faults::kill::{Killer, LocalServer};
use crate::faults::report::FaultReport;
use crate::run::workload::Workload;

pub struct FaultRun {
    report: FaultReport,
    half_open: Option<HalfOpen>,
    victim: Option<LocalServer>,
    killer: Option<Killer>,
}

impl FaultRun {
    /// Begins what `args` ask for, just before the requests of `workload` are sent; `victim` is the server whose
    /// workers are killed, where any are.
    pub async fn start(args: &FaultArgs, victim: Option<LocalServer>, workload: &Workload) -> Self {
        let half_open = match (args.half_open, &workload.target) {
            (Some(count), Target::Http(client)) => Some(HalfOpen::open(count, client, workload.path()).await),
            // Refused over gRPC before the run: `FaultArgs::check`.
            (Some(_), Target::Grpc(_)) | (None, _) => None,
        };
        Self { report: FaultReport::of(args), half_open, victim, killer: None }
    }

    /// The run began: kills are due by its `clock`.
    pub fn begin(&mut self, args: &FaultArgs, clock: Clock) {
        self.killer = self.victim.map(|server| Killer::start(&args.kill_worker, server, clock));
    }

    pub fn observe(&mut self, record: &RequestRecord) {
        self.take_strikes();
        self.report.count(record);
    }

    /// Ends what is still wrong, asks once more what live streams were asked when a worker was killed unless `stop`
    /// says otherwise, and tells what became of it all.
    pub async fn finish(mut self, workload: &Workload, stop: &CancellationToken) -> FaultReport {
        if let Some(killer) = &mut self.killer {
            killer.stop().await;
        }
        self.take_strikes();
        if let Some(half_open) = self.half_open {
            self.report.half_open = Some(half_open.close().await);
        }
        tokio::select! {
            _ = join_all(self.report.kills.iter_mut().map(|kill| kill.compare(workload))) => {}
            () = stop.cancelled() => {}
        }
        self.report
    }

    /// Enters the kills that were done since.
    fn take_strikes(&mut self) {
        while let Some(strike) = self.killer.as_mut().and_then(|killer| killer.strikes.try_recv().ok()) {
            self.report.kills[strike.number].strike(strike.outcome);
        }
    }
}
