//! What clients saw of a worker's death: how long no token came, and what became of the streams that were live.

use std::time::Duration;

use futures::future::join_all;

use crate::client::record::{Clock, Failure, RequestRecord};
use crate::faults::kill::{KillAt, KillError};
use crate::figures::tally::{Kinds, count_failure};
use crate::run::workload::Workload;

/// Most streams of a kill whose prompts are asked again after the run, to compare the texts.
const MAX_COMPARED: usize = 16;
/// Tokens that were on their way at the kill arrive within this time: the silence begins no later.
const ON_THE_WAY: Duration = Duration::from_millis(500);
/// Tokens are listened for so long after a kill.
const LISTENED: Duration = Duration::from_secs(600);

/// One kill and what came of it.
#[derive(Debug, Default)]
pub struct Aftermath {
    pub kill: KillAt,
    /// When it was done in nanoseconds of the run, and to which process; none before that is known.
    pub struck: Option<Result<(u64, u32), KillError>>,
    /// Requests that ended since it was due and before it was known: maybe after it was done.
    early: Vec<RequestRecord>,
    silence: Silence,
    /// Streams that were live at the kill and came to their end.
    pub lived: u64,
    pub failed: Kinds,
    /// Longest time between two tokens of one of them that ended after the kill.
    pub longest_gap: Option<Duration>,
    texts: Vec<(u64, String)>,
    /// What the same prompts were answered after the run.
    pub compared: Compared,
}

/// Answers to prompts of streams that lived through a kill, asked again after the run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Compared {
    pub same: u64,
    pub other: u64,
    pub unanswered: u64,
}

impl Aftermath {
    pub fn of(kill: KillAt) -> Self {
        Self { kill, ..Self::default() }
    }

    pub fn strike(&mut self, outcome: Result<(u64, u32), KillError>) {
        self.struck = Some(outcome);
        for record in std::mem::take(&mut self.early) {
            self.observe(&record);
        }
    }

    /// Counts one request of the run that no fault of its own was chosen for.
    pub fn observe(&mut self, record: &RequestRecord) {
        let at_ns = match self.struck {
            Some(Ok((at_ns, _))) => at_ns,
            Some(Err(_)) => return,
            None => {
                if u128::from(record.ended_ns) >= self.kill.at.as_nanos() {
                    self.early.push(record.clone());
                }
                return;
            }
        };
        if record.sent_ns > at_ns || record.ended_ns < at_ns {
            return;
        }
        let after_ns = record.chunks_ns.iter().filter_map(|chunk_ns| chunk_ns.checked_sub(at_ns));
        after_ns.for_each(|after_ns| self.silence.hear(Duration::from_nanos(after_ns)));
        self.silence.streams_ended(Duration::from_nanos(record.ended_ns.saturating_sub(at_ns)));
        match &record.failure {
            None => self.lived += 1,
            Some(Failure::Interrupted) => return,
            Some(failure) => count_failure(&mut self.failed, failure),
        }
        let gaps = record.chunks_ns.windows(2).filter(|pair| pair[1] > at_ns).map(|pair| pair[1] - pair[0]);
        self.longest_gap = self.longest_gap.max(gaps.max().map(Duration::from_nanos));
        // A later turn of a chat cannot be asked without those before it.
        if let (Some(text), None, 0) = (&record.text, &record.failure, record.turn)
            && self.texts.len() < MAX_COMPARED
        {
            self.texts.push((record.index, text.clone()));
        }
    }

    /// From the kill to the first token of the streams that were live then, after the longest time without any that
    /// began at the kill or within half a second of it; none where no token came any more, and where no stream was
    /// live.
    pub fn recovered_after(&self) -> Option<Duration> {
        self.silence.end()
    }

    /// Asks the server the prompts of streams that lived through the kill once more. The answers are greedy: a server
    /// that goes on right has given the same text.
    pub async fn compare(&mut self, workload: &Workload) {
        let asked = self.texts.iter().map(async |(index, text)| {
            let shape = workload.shapes.of(*index);
            let prompt = workload.prompts.text(*index, shape.prompt_tokens);
            let request = workload.request(&[], &prompt, shape.max_tokens);
            let mut record = RequestRecord::new(*index, 0, 0);
            record.text = Some(String::new());
            request.send(Clock::start(), &mut record).await;
            record.failure.is_none().then(|| record.text.as_ref() == Some(text))
        });
        for is_same in join_all(asked).await {
            match is_same {
                Some(true) => self.compared.same += 1,
                Some(false) => self.compared.other += 1,
                None => self.compared.unanswered += 1,
            }
        }
    }
}

/// When tokens of the streams that were live came after a kill, to the millisecond: records end in another order.
#[derive(Debug, Default)]
struct Silence {
    /// For each millisecond whether a token came in it.
    heard: Vec<bool>,
    ended: Duration,
}

impl Silence {
    fn hear(&mut self, after: Duration) {
        if after < LISTENED {
            let millisecond = after.as_millis() as usize;
            if self.heard.len() <= millisecond {
                self.heard.resize(millisecond + 1, false);
            }
            self.heard[millisecond] = true;
        }
    }

    /// A stream ended so long after the kill: it was listened to until then.
    fn streams_ended(&mut self, after: Duration) {
        self.ended = self.ended.max(after);
    }

    /// The first token after the longest silence; none where that lasted until the streams' end.
    fn end(&self) -> Option<Duration> {
        let times =
            self.heard.iter().enumerate().filter_map(|(millisecond, heard)| heard.then_some(millisecond as u64));
        let on_the_way_ms = ON_THE_WAY.as_millis() as u64;
        let (mut from_ms, mut longest_ms, mut end_ms) = (0, 0, None);
        for to_ms in times {
            if from_ms <= on_the_way_ms && to_ms - from_ms >= longest_ms {
                (longest_ms, end_ms) = (to_ms - from_ms, Some(to_ms));
            }
            from_ms = to_ms;
        }
        let last_ms = (self.ended.as_millis() as u64).saturating_sub(from_ms);
        let ends_in_silence = from_ms <= on_the_way_ms && last_ms > longest_ms;
        end_ms.filter(|_| !ends_in_silence).map(Duration::from_millis)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::records::{self, MS};

    fn silence(heard_ms: &[u64], ended_ms: u64) -> Option<u64> {
        let mut silence = Silence::default();
        heard_ms.iter().for_each(|&ms| silence.hear(Duration::from_millis(ms)));
        silence.streams_ended(Duration::from_millis(ended_ms));
        silence.end().map(|end| end.as_millis() as u64)
    }

    #[test]
    fn recovery_is_the_end_of_the_silence_and_not_a_token_on_its_way() {
        assert_eq!(silence(&[2, 40, 900, 920, 940], 941), Some(900));
        assert_eq!(silence(&[450, 40, 2], 2000), None, "more silent after 450 ms than ever before");
        assert_eq!(silence(&[700], 700), Some(700));
        assert_eq!(silence(&[3, 10], 9000), None, "nothing came any more");
        assert_eq!(silence(&[], 9000), None);
        // A pause of the load long after is no silence of the kill's.
        assert_eq!(silence(&[1, 400, 900, 1500, 60_000], 60_001), Some(900));
        assert_eq!(silence(&[1, 800, 900, 1100, 60_000], 60_001), Some(800));
    }

    fn aftermath() -> Aftermath {
        let kill = KillAt { rank: 1, at: Duration::from_secs(1) };
        Aftermath { struck: Some(Ok((1000 * MS, 7))), ..Aftermath::of(kill) }
    }

    fn record(sent_ms: u64, chunks_ms: &[u64]) -> RequestRecord {
        let record = records::record(sent_ms, sent_ms, chunks_ms);
        RequestRecord { index: sent_ms, ended_ns: record.ended_ns + MS, text: Some("t".into()), ..record }
    }

    /// Cut off at a time.
    fn failed(ended_ms: u64) -> RequestRecord {
        RequestRecord { failure: Some(Failure::Truncated), ended_ns: ended_ms * MS, ..record(600, &[700]) }
    }

    #[test]
    fn streams_that_were_live_are_told_from_the_others() {
        let mut aftermath = aftermath();
        aftermath.observe(&record(0, &[500, 900]));
        aftermath.observe(&record(800, &[990, 1002, 1700, 1710]));
        aftermath.observe(&record(950, &[1600, 1610]));
        aftermath.observe(&record(1500, &[1900, 3900]));
        aftermath.observe(&failed(1100));
        assert_eq!((aftermath.lived, aftermath.failed["truncated"].0), (2, 1));
        assert_eq!(aftermath.longest_gap, Some(Duration::from_millis(698)));
        assert_eq!(aftermath.recovered_after(), Some(Duration::from_millis(600)));
        assert_eq!(aftermath.texts.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [800, 950]);
    }

    #[test]
    fn a_kill_that_was_not_done_has_no_aftermath() {
        let mut aftermath = Aftermath { struck: None, ..aftermath() };
        aftermath.observe(&record(800, &[990, 1700]));
        aftermath.strike(Err(KillError::NobodyListens("h:1".into())));
        assert_eq!((aftermath.lived, aftermath.recovered_after()), (0, None));
    }

    /// A kill that is due at 1000 ms, done at 1020 and known at 1100.
    #[test]
    fn streams_that_end_before_a_kill_is_known_are_seen_all_the_same() {
        let mut aftermath = Aftermath { struck: None, ..aftermath() };
        aftermath.observe(&record(800, &[900, 980]));
        aftermath.observe(&record(800, &[990, 1010]));
        aftermath.observe(&failed(1050));
        assert_eq!((aftermath.early.len(), aftermath.lived), (2, 0));
        aftermath.strike(Ok((1020 * MS, 7)));
        aftermath.observe(&record(900, &[1000, 1300]));
        assert_eq!((aftermath.lived, aftermath.failed["truncated"].0, aftermath.early.len()), (1, 1, 0));
    }
}
