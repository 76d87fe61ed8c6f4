//! One run with faults: makes what goes wrong beside the requests, and counts what became of all of it.

use crate::record::RequestRecord;

use super::report::FaultReport;
use super::{Conduct, FaultArgs};

/// The faults of a run under way.
pub struct FaultRun {
    report: FaultReport,
}

impl FaultRun {
    /// The faults of a run that begins now.
    pub fn start(args: &FaultArgs) -> Self {
        Self { report: FaultReport::of(args) }
    }

    /// Counts one request of the run.
    pub fn observe(&mut self, record: &RequestRecord) {
        if let (Conduct::HangUp(_), Some((_, ends))) = (record.conduct, &mut self.report.cancel) {
            ends.count(record);
        }
    }

    /// What became of the faults.
    pub fn finish(self) -> FaultReport {
        self.report
    }
}
