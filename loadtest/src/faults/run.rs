//! One run with faults: makes what goes wrong beside the requests, and counts what became of all of it.

use crate::drive::Workload;
use crate::record::RequestRecord;

use super::FaultArgs;
use super::half_open::HalfOpen;
use super::report::FaultReport;

/// The faults of a run under way.
pub struct FaultRun {
    report: FaultReport,
    half_open: Option<HalfOpen>,
}

impl FaultRun {
    /// Begins what `args` ask for, just before the requests of `workload` are sent.
    pub async fn start(args: &FaultArgs, workload: &Workload) -> Self {
        let half_open = match args.half_open {
            Some(count) => Some(HalfOpen::open(count, &workload.client, workload.path()).await),
            None => None,
        };
        Self { report: FaultReport::of(args), half_open }
    }

    /// Counts one request of the run.
    pub fn observe(&mut self, record: &RequestRecord) {
        self.report.count(record);
    }

    /// Ends what is still wrong and tells what became of it all.
    pub async fn finish(mut self) -> FaultReport {
        if let Some(half_open) = self.half_open {
            self.report.half_open = Some(half_open.close().await);
        }
        self.report
    }
}
