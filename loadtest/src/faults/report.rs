//! What became of the faults of a run, for the table, the page and the JSON of its report.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::record::{Failure, RequestRecord};
use crate::report::count_failure;

use super::{FaultArgs, ShareAt};

/// What became of the faults that were asked for.
#[derive(Debug, Default)]
pub struct FaultReport {
    /// Requests that the client hung up.
    pub(super) cancel: Option<(ShareAt, Ends)>,
}

/// How the requests of one fault ended. Those that the user stopped are not counted.
#[derive(Debug, Default)]
pub(super) struct Ends {
    /// As the fault would have it.
    pub as_meant: u64,
    /// With a whole answer.
    pub answered: u64,
    /// In another way: kinds with their counts and one message of each.
    pub otherwise: BTreeMap<String, (u64, String)>,
}

/// One line of the report.
#[derive(Debug, PartialEq, Eq)]
pub struct Finding {
    /// Of what.
    pub name: String,
    /// What was found.
    pub text: String,
    /// Whether a server should have done better.
    pub is_bad: bool,
}

impl Ends {
    pub fn count(&mut self, record: &RequestRecord) {
        match &record.failure {
            None => self.answered += 1,
            Some(Failure::Cancelled) => self.as_meant += 1,
            Some(Failure::Interrupted) => {}
            Some(failure) => count_failure(&mut self.otherwise, failure),
        }
    }

    fn requests(&self) -> u64 {
        self.as_meant + self.answered + self.failed()
    }

    fn failed(&self) -> u64 {
        self.otherwise.values().map(|(count, _)| count).sum()
    }

    /// ", 2 failed (http_500 × 2)", or nothing to say.
    fn failed_in_words(&self) -> String {
        match self.failed() {
            0 => String::new(),
            failed => format!(", {failed} failed ({})", kinds_in_words(&self.otherwise)),
        }
    }

    fn failed_by_kind(&self) -> Value {
        counts(&self.otherwise)
    }
}

impl FaultReport {
    /// The report of the faults that `args` ask for, before anything happened.
    pub(super) fn of(args: &FaultArgs) -> Self {
        Self { cancel: args.cancel.map(|cancel| (cancel, Ends::default())) }
    }

    /// Every finding, in the order of the options.
    pub fn findings(&self) -> Vec<Finding> {
        self.cancel.iter().map(|(cancel, ends)| cancel_finding(cancel, ends)).collect()
    }

    /// The same as one JSON object with a field for each fault that was asked for; times in milliseconds.
    pub fn to_json(&self) -> Value {
        let mut fields = Map::new();
        if let Some((cancel, ends)) = &self.cancel {
            let fault = json!({
                "share": cancel.share,
                "after_ms": cancel.time.as_secs_f64() * 1e3,
                "requests": ends.requests(),
                "cancelled": ends.as_meant,
                "answered_before": ends.answered,
                "failed": ends.failed(),
                "failed_by_kind": ends.failed_by_kind(),
            });
            fields.insert("cancel".into(), fault);
        }
        Value::Object(fields)
    }
}

fn cancel_finding(cancel: &ShareAt, ends: &Ends) -> Finding {
    let (time, cancelled, answered, failed) = (cancel.time, ends.as_meant, ends.answered, ends.failed_in_words());
    Finding {
        name: "cancelled by client".into(),
        text: format!("{cancelled} hung up {time:?} after they were sent, {answered} were answered before{failed}"),
        is_bad: ends.failed() > 0,
    }
}

/// "http_500 × 2, timeout × 1".
fn kinds_in_words(kinds: &BTreeMap<String, (u64, String)>) -> String {
    kinds.iter().map(|(kind, (count, _))| format!("{kind} × {count}")).collect::<Vec<_>>().join(", ")
}

fn counts(kinds: &BTreeMap<String, (u64, String)>) -> Value {
    json!(kinds.iter().map(|(kind, (count, _))| (kind, count)).collect::<BTreeMap<_, _>>())
}
