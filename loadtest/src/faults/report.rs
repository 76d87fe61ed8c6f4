//! What became of the faults of a run, for the table, the page and the JSON of its report.

use std::collections::BTreeMap;
use std::time::Duration;

use hyper::StatusCode;
use serde_json::{Map, Value, json};

use crate::client::record::{Failure, RequestRecord};
use crate::faults::aftermath::{Aftermath, Compared};
use crate::faults::args::FaultArgs;
use crate::faults::half_open::HalfOpenEnds;
use crate::figures::tally::{Kinds, count_failure, worst};
use crate::load::broken::Breakage;
use crate::load::conduct::{Conduct, ShareAt};
use crate::report::contents::{Finding, Findings};

/// What became of the faults that were asked for.
#[derive(Debug, Default)]
pub struct FaultReport {
    asked: FaultArgs,
    cancelled: Ends,
    slow: Ends,
    /// Those with broken bodies, as [`Breakage::ALL`] has them.
    broken: [Ends; Breakage::ALL.len()],
    /// Connections with half a request.
    pub half_open: Option<HalfOpenEnds>,
    /// Workers that were killed, or were to be.
    pub kills: Vec<Aftermath>,
}

/// How the requests of one fault ended. Those that the user stopped are not counted.
#[derive(Debug, Default)]
struct Ends {
    /// As the fault would have it: cancelled, or refused as a broken body should be.
    as_meant: u64,
    /// With a whole answer.
    answered: u64,
    /// By `--timeout`, after its client had read some of the answer as slowly as it was to.
    timed_out: u64,
    /// In another way: kinds with their counts and one message of each.
    otherwise: Kinds,
    /// Longest time that one took.
    longest: Duration,
}

impl Ends {
    fn count(&mut self, record: &RequestRecord) {
        let took = Duration::from_nanos(record.ended_ns.saturating_sub(record.sent_ns));
        self.longest = took.max(self.longest);
        match &record.failure {
            None => self.answered += 1,
            Some(Failure::Interrupted) => {}
            Some(Failure::Cancelled) => self.as_meant += 1,
            // One that got nothing until then waited for the server.
            Some(Failure::Timeout)
                if matches!(record.conduct, Conduct::ReadSlowly(_)) && !record.chunks_ns.is_empty() =>
            {
                self.timed_out += 1;
            }
            Some(failure) if matches!(record.conduct, Conduct::SendBroken(_)) && is_refusal(failure) => {
                self.as_meant += 1;
            }
            Some(failure) => count_failure(&mut self.otherwise, failure),
        }
    }

    fn requests(&self) -> u64 {
        self.as_meant + self.answered + self.timed_out + self.failed()
    }

    fn failed(&self) -> u64 {
        self.otherwise.values().map(|(count, _)| count).sum()
    }
}

impl FaultReport {
    /// The report of the faults that `args` ask for, before anything happened.
    pub fn of(args: &FaultArgs) -> Self {
        let kills = args.kill_worker.iter().copied().map(Aftermath::of).collect();
        Self { asked: args.clone(), kills, ..Self::default() }
    }

    pub fn count(&mut self, record: &RequestRecord) {
        match record.conduct {
            Conduct::Usual => self.kills.iter_mut().for_each(|kill| kill.observe(record)),
            Conduct::HangUp(_) => self.cancelled.count(record),
            Conduct::ReadSlowly(_) => self.slow.count(record),
            Conduct::SendBroken(breakage) => self.broken[breakage as usize].count(record),
        }
    }

    /// Whether a request that was touched ended as its fault would have it, or was answered all the same.
    pub fn any_went_well(&self) -> bool {
        self.touched().any(|ends| ends.requests() > ends.failed())
    }

    /// The most frequent way in which requests that were touched ended otherwise: kind, count and one message.
    pub fn worst(&self) -> Option<(&str, u64, &str)> {
        worst(self.touched().flat_map(|ends| &ends.otherwise))
    }

    fn touched(&self) -> impl Iterator<Item = &Ends> {
        [&self.cancelled, &self.slow].into_iter().chain(&self.broken)
    }

    pub fn findings(&self) -> Findings {
        let mut lines = Vec::new();
        lines.extend(self.asked.cancel.map(|cancel| cancel_finding(cancel.time, &self.cancelled)));
        lines.extend(self.asked.slow_readers.map(|slow| slow_finding(slow.time, &self.slow)));
        lines.extend(self.asked.broken.map(|_| broken_finding(&self.broken)));
        lines.extend(self.half_open.as_ref().map(half_open_finding));
        lines.extend(self.kills.iter().flat_map(kill_findings));
        Findings { lines, events: self.events(), json: self.to_json() }
    }

    /// What stands on a timeline of the run: seconds, and what happened then.
    fn events(&self) -> Vec<(f64, String)> {
        let (mut kills, mut recoveries) = (Vec::new(), Vec::new());
        for kill in &self.kills {
            let Some(Ok((at_ns, _))) = kill.struck else { continue };
            let at_s = at_ns as f64 / 1e9;
            kills.push((at_s, format!("rank {} killed", kill.kill.rank)));
            recoveries.extend(kill.recovered_after().map(|after| at_s + after.as_secs_f64()));
        }
        // A second kill during the silence after the first one has the same end, to the millisecond that it is known.
        recoveries.sort_by(f64::total_cmp);
        recoveries.dedup_by(|next, before| *next - *before < 2e-3);
        kills.extend(recoveries.into_iter().map(|at_s| (at_s, "tokens again".into())));
        kills
    }

    /// The same as one JSON object with a field for each fault that was asked for; times in milliseconds.
    fn to_json(&self) -> Value {
        let kills: Vec<Value> = self.kills.iter().map(kill_to_json).collect();
        let fields = [
            ("cancel", self.asked.cancel.map(|cancel| cancel_to_json(cancel, &self.cancelled))),
            ("slow_readers", self.asked.slow_readers.map(|slow| slow_to_json(slow, &self.slow))),
            ("broken_bodies", self.asked.broken.map(|share| broken_to_json(share, &self.broken))),
            ("half_open", self.half_open.as_ref().map(half_open_to_json)),
            ("killed_workers", (!kills.is_empty()).then(|| json!(kills))),
        ];
        fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))).collect::<Map<_, _>>().into()
    }
}

/// Whether a server that fails a broken body so does right: 400, with an error that names its code or type.
fn is_refusal(failure: &Failure) -> bool {
    matches!(failure, Failure::Status { status: StatusCode::BAD_REQUEST, code: Some(_), .. })
}

/// What is to say of `requests` that a fault was drawn for.
fn finding(name: &str, requests: u64, text: String, is_bad: bool) -> Finding {
    let text = if requests == 0 { "no request was drawn for it".into() } else { text };
    Finding { name: name.into(), text, is_bad }
}

fn cancel_finding(time: Duration, ends: &Ends) -> Finding {
    let (cancelled, answered, failed) = (ends.as_meant, ends.answered, failed_in_words(ends));
    let text = format!("{cancelled} hung up {time:?} after they were sent, {answered} were answered before{failed}");
    finding("cancelled by client", ends.requests(), text, ends.failed() > 0)
}

fn cancel_to_json(cancel: ShareAt, ends: &Ends) -> Value {
    json!({
        "share": cancel.share,
        "after_ms": ms(cancel.time),
        "requests": ends.requests(),
        "cancelled": ends.as_meant,
        "answered_before": ends.answered,
        "failed": ends.failed(),
        "failed_by_kind": counts(&ends.otherwise),
    })
}

fn slow_finding(pause: Duration, ends: &Ends) -> Finding {
    let (answered, failed) = (ends.answered, failed_in_words(ends));
    let cut = match ends.timed_out {
        0 => String::new(),
        cut => format!(", {cut} ended by --timeout while they read"),
    };
    let longest_s = ends.longest.as_secs_f64();
    let text = format!("{answered} read an event each {pause:?} to the end, {longest_s:.1} s at most{cut}{failed}");
    finding("slow readers", ends.requests(), text, ends.failed() > 0)
}

fn slow_to_json(slow: ShareAt, ends: &Ends) -> Value {
    json!({
        "share": slow.share,
        "pause_ms": ms(slow.time),
        "requests": ends.requests(),
        "read_to_the_end": ends.answered,
        "ended_by_timeout": ends.timed_out,
        "longest_ms": ms(ends.longest),
        "failed": ends.failed(),
        "failed_by_kind": counts(&ends.otherwise),
    })
}

fn broken_finding(broken: &[Ends]) -> Finding {
    let requests: u64 = broken.iter().map(Ends::requests).sum();
    let refused: u64 = broken.iter().map(|ends| ends.as_meant).sum();
    let mut text = format!("{refused} of {requests} answered 400 with an error");
    for (breakage, ends) in Breakage::ALL.iter().zip(broken) {
        if ends.answered > 0 {
            text += &format!("; {}: {} answered 200", breakage.name(), ends.answered);
        }
        if ends.failed() > 0 {
            text += &format!("; {}: {}", breakage.name(), kinds_in_words(&ends.otherwise));
        }
    }
    finding("broken bodies", requests, text, refused < requests)
}

fn broken_to_json(share: f64, broken: &[Ends]) -> Value {
    let form = |(breakage, ends): (&Breakage, &Ends)| {
        let fields = json!({
            "requests": ends.requests(),
            "answered_400": ends.as_meant,
            "answered_200": ends.answered,
            "otherwise_by_kind": counts(&ends.otherwise),
        });
        (breakage.name().to_owned(), fields)
    };
    json!({
        "share": share,
        "requests": broken.iter().map(Ends::requests).sum::<u64>(),
        "answered_400": broken.iter().map(|ends| ends.as_meant).sum::<u64>(),
        "by_form": Breakage::ALL.iter().zip(broken).map(form).collect::<Map<_, _>>(),
    })
}

fn half_open_finding(ends: &HalfOpenEnds) -> Finding {
    let mut parts = Vec::new();
    if let [first, .., last] | [first @ last] = ends.closed_after[..] {
        let (count, first_s, last_s) = (ends.closed_after.len(), first.as_secs_f64(), last.as_secs_f64());
        let answers: Vec<String> =
            ends.statuses.iter().map(|(status, count)| format!(", {count} with {status}")).collect();
        parts.push(format!("{count} closed by the server after {first_s:.1} to {last_s:.1} s{}", answers.concat()));
    }
    if ends.open > 0 {
        parts.push(format!("{} still open after {:.1} s, when the run ended", ends.open, ends.watched.as_secs_f64()));
    }
    if let (count, Some(why)) = &ends.not_opened {
        parts.push(format!("{count} could not be opened: {why}"));
    }
    Finding {
        name: "half-open sockets".into(),
        text: format!("{}: {}", ends.asked, parts.join("; ")),
        is_bad: ends.not_opened.0 > 0,
    }
}

fn half_open_to_json(ends: &HalfOpenEnds) -> Value {
    json!({
        "connections": ends.asked,
        "closed_by_server": ends.closed_after.len(),
        "first_closed_after_ms": ends.closed_after.first().map(|&after| ms(after)),
        "last_closed_after_ms": ends.closed_after.last().map(|&after| ms(after)),
        "answers_by_status": ends.statuses.iter().map(|(status, count)| (status.to_string(), json!(count))).collect::<Map<_, _>>(),
        "still_open": ends.open,
        "watched_ms": ms(ends.watched),
        "not_opened": ends.not_opened.0,
        "not_opened_example": ends.not_opened.1,
    })
}

fn kill_findings(kill: &Aftermath) -> Vec<Finding> {
    let name = format!("worker {} killed", kill.kill.rank);
    let (at_ns, pid) = match &kill.struck {
        Some(Ok(struck)) => *struck,
        Some(Err(why)) => return vec![Finding { name, text: format!("not killed: {why}"), is_bad: true }],
        None => {
            let text = format!("not killed: the run ended before it was due at {:?}", kill.kill.at);
            return vec![Finding { name, text, is_bad: true }];
        }
    };
    let live = kill.lived + kill.failed.values().map(|(count, _)| count).sum::<u64>();
    let recovered = kill.recovered_after();
    let mut text = format!("at {:.2} s (process {pid}): ", at_ns as f64 / 1e9);
    match recovered {
        Some(after) => text += &format!("tokens again after {:.0} ms", ms(after)),
        None if live == 0 => text += "no stream was live",
        None if live == kill.lived => {
            text += "no token came after the longest silence, but every live stream ended well"
        }
        None => text += "no token came any more",
    }
    if let Some(gap) = kill.longest_gap {
        text += &format!("; longest gap of a live stream {:.0} ms", ms(gap));
    }
    if live == 0 {
        return vec![Finding { name, text, is_bad: false }];
    }
    let (lived, failed) = (kill.lived, kinds_in_words(&kill.failed));
    let mut streams = format!("{live}: {lived} went on to their end");
    if live > lived {
        streams += &format!(", {} failed ({failed})", live - lived);
    }
    let Compared { same, other, unanswered } = kill.compared;
    let asked = same + other + unanswered;
    if asked > 0 {
        streams += &format!("; {asked} prompts asked again after the run: {same} gave the same text");
    }
    if other > 0 {
        streams += &format!(", {other} another");
    }
    if unanswered > 0 {
        streams += &format!(", {unanswered} no answer");
    }
    vec![
        Finding { name, text, is_bad: recovered.is_none() && live > lived },
        Finding { name: "  streams live then".into(), text: streams, is_bad: live > lived || asked > same },
    ]
}

fn kill_to_json(kill: &Aftermath) -> Value {
    let (struck, why) = match &kill.struck {
        Some(Ok(struck)) => (Some(*struck), None),
        Some(Err(why)) => (None, Some(why.to_string())),
        None => (None, Some("the run ended before".to_owned())),
    };
    let Compared { same, other, unanswered } = kill.compared;
    json!({
        "rank": kill.kill.rank,
        "due_ms": ms(kill.kill.at),
        "killed_ms": struck.map(|(at_ns, _)| at_ns as f64 / 1e6),
        "pid": struck.map(|(_, pid)| pid),
        "not_killed": why,
        "recovery_ms": kill.recovered_after().map(ms),
        "longest_gap_ms": kill.longest_gap.map(ms),
        "live_streams_completed": kill.lived,
        "live_streams_failed_by_kind": counts(&kill.failed),
        "asked_again": { "same_text": same, "other_text": other, "unanswered": unanswered },
    })
}

/// ", 2 failed (http_500 × 2)", or nothing to say.
fn failed_in_words(ends: &Ends) -> String {
    match ends.failed() {
        0 => String::new(),
        failed => format!(", {failed} failed ({})", kinds_in_words(&ends.otherwise)),
    }
}

/// "http_500 × 2, timeout × 1".
fn kinds_in_words(kinds: &Kinds) -> String {
    kinds.iter().map(|(kind, (count, _))| format!("{kind} × {count}")).collect::<Vec<_>>().join(", ")
}

fn counts(kinds: &Kinds) -> Value {
    json!(kinds.iter().map(|(kind, (count, _))| (kind, count)).collect::<BTreeMap<_, _>>())
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_400_that_says_what_is_wrong_is_right() {
        let failure = |status: u16, code: Option<&str>| Failure::Status {
            status: StatusCode::from_u16(status).expect("valid"),
            code: code.map(str::to_owned),
            message: "m".into(),
        };
        assert!(is_refusal(&failure(400, Some("invalid_json"))));
        assert!(!is_refusal(&failure(400, None)) && !is_refusal(&failure(500, Some("oops"))));
        assert!(!is_refusal(&Failure::Timeout));
    }
}
