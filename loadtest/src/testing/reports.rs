//! Reports by hand.

use crate::client::record::RequestRecord;
use crate::figures::tally::Tally;
use crate::load::lengths::Lengths;
use crate::load::shapes::Shapes;
use crate::report::contents::{Report, Setup};

pub fn tally<'a>(records: impl IntoIterator<Item = &'a RequestRecord>) -> Tally {
    let mut tally = Tally::default();
    records.into_iter().for_each(|record| tally.add(record));
    tally
}

/// A closed loop of four.
pub fn setup() -> Setup {
    Setup {
        target: "http://h:1".into(),
        backend: "openai-chat",
        model: "m".into(),
        pacing: "closed loop".into(),
        rate: None,
        burstiness: None,
        max_concurrency: 4,
        seed: 0,
        shapes: Shapes::Drawn { prompt: Lengths::Constant(10), output: Lengths::Constant(3), seed: 0 },
        min_tokens: None,
        shared_prefix: 0.0,
        ignore_eos: true,
        warmup: 0,
        calibration: None,
        notes: Vec::new(),
    }
}

/// The report of a run that is none of several and had no faults.
pub fn report(tally: Tally) -> Report {
    Report { setup: setup(), tally, spread: None, faults: None, server_side: None }
}
