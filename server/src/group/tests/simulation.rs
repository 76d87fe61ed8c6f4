//! Scheduler, restart policy, quarantine and watchdog together with a group of workers, in virtual time: seeded
//! schedules of arrivals, cancels, readers that fall behind, full queues, poison requests, deaths, hangs, failed and
//! slow starts, and groups that come back with fewer pages. After each event the scheduler's own invariants are
//! checked; in addition, every sequence ends exactly once and with its own tokens, only culprits fail, hangs are
//! noticed and starts are spaced as promised. A failure prints its seed; `LOOPLANE_TEST_SEED` runs that one alone.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use looplane_proto::worker::v1::{Outcome, Plan};
use tokio::time::Instant;

use crate::group::config::Timeouts;
use crate::group::quarantine::Quarantine;
use crate::group::restart::{Loss, RestartPolicy, Verdict};
use crate::group::step_times::{StepTime, StepTimes};
use crate::group::watchdog::Reports;
use crate::sched::fake_worker::{FakeWorker, Rng, Shape, expected, mix, request};
use crate::sched::{Action, Blame, Event, Limits, Scheduler, SequenceRequest, Standing, SubmitError};

/// Schedules that CI runs.
const SCHEDULES: u64 = 30_000;
const MS: fn(u64) -> Duration = Duration::from_millis;

/// How often what goes wrong, of 1000.
#[derive(Debug, Clone, Copy)]
struct Faults {
    /// Of sequences: those that lose the group whenever they are computed.
    poison: u64,
    /// Of rounds.
    death: u64,
    hang: u64,
    cancel: u64,
    reader: u64,
    /// Of starts.
    failed_start: u64,
    fewer_pages: u64,
}

impl Faults {
    const NONE: Self = Self { poison: 0, death: 0, hang: 0, cancel: 0, reader: 0, failed_start: 0, fewer_pages: 0 };

    fn random(rng: &mut Rng) -> Self {
        let mut often = |bound: u64| if rng.chance(400) { rng.below(bound) } else { 0 };
        Self {
            poison: often(400),
            death: often(60),
            hang: often(30),
            cancel: often(80),
            reader: often(200),
            failed_start: often(500),
            fewer_pages: often(500),
        }
    }
}

/// The workers.
enum Group {
    /// The next start.
    Waiting(Duration),
    /// Up at this time, unless the start fails.
    Starting(Duration),
    Up(Box<Running>),
    GivenUp,
}

struct Running {
    worker: FakeWorker,
    plans: VecDeque<Plan>,
    outcomes: VecDeque<Outcome>,
    reports: Reports,
    /// It computes nothing any more, and has not been noticed.
    hangs_since: Option<Duration>,
    /// It was sent a plan.
    worked: bool,
}

struct Seen {
    request: SequenceRequest,
    tokens: Vec<u32>,
    is_poison: bool,
    /// It was computed alone when the group died of something else.
    was_unlucky: bool,
    ended: bool,
}

struct World {
    rng: Rng,
    faults: Faults,
    shape: Shape,
    timeouts: Timeouts,
    limits: Limits,
    epoch: Instant,
    now: Duration,
    scheduler: Scheduler,
    policy: RestartPolicy,
    times: StepTimes,
    quarantine: Quarantine,
    group: Group,
    kv_pages: u32,
    seen: BTreeMap<u64, Seen>,
    poison: BTreeSet<u64>,
    /// Failed starts in a row, and when the first was.
    failed_starts: u32,
    failing_since: Duration,
    /// When groups were lost.
    losses: Vec<Duration>,
    starts: u32,
    was_up: bool,
    convictions: u32,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(mix(seed));
        let max_slots = 1 + rng.below(5) as u32;
        let limits = Limits {
            max_slots,
            max_batch_tokens: max_slots + rng.below(8) as u32,
            steps_per_plan: 1 + rng.below(5) as u32,
            plans_ahead: 1 + rng.below(2) as u32,
            max_waiting_requests: 1 + rng.below(8),
            max_waiting_tokens: 8 + rng.below(30),
            suspect_after: 2,
            prefix_cache: rng.below(2) == 0,
            drafts: rng.below(4) as u32,
        };
        let page_positions = 1 + rng.below(4) as u32;
        let kv_pages = 17_u32.div_ceil(page_positions) + rng.below(20) as u32;
        let timeouts = Timeouts {
            step: MS(5000),
            step_floor: MS(1000),
            backoff: MS(100),
            backoff_limit: MS(2000),
            loss_window: MS(800),
            quarantine: MS(30_000),
            ..Timeouts::default()
        };
        Self {
            faults: Faults::random(&mut rng),
            rng,
            shape: Shape { max_slots, max_batch_tokens: limits.max_batch_tokens, kv_pages, page_positions },
            epoch: Instant::now(),
            now: Duration::ZERO,
            scheduler: Scheduler::new(limits.clone()).unwrap(),
            policy: RestartPolicy::new(&timeouts, 5),
            times: StepTimes::new(true, None),
            quarantine: Quarantine::new(timeouts.quarantine),
            timeouts,
            limits,
            group: Group::Starting(Duration::ZERO),
            kv_pages,
            seen: BTreeMap::new(),
            poison: BTreeSet::new(),
            failed_starts: 0,
            failing_since: Duration::ZERO,
            losses: Vec::new(),
            starts: 1,
            was_up: false,
            convictions: 0,
        }
    }

    fn at(&self) -> Instant {
        self.epoch + self.now
    }

    fn apply(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.scheduler.apply(event, &mut actions);
        self.act(actions);
    }

    fn act(&mut self, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Prompt { .. } => {}
                Action::Token { sequence, token } => {
                    let seen = self.seen.get_mut(&sequence).expect("a token for a sequence of the front end's");
                    assert!(!seen.ended, "a token after the end of {sequence}");
                    seen.tokens.push(token.id);
                }
                Action::Finished { sequence, .. } => {
                    let seen = self.end(sequence);
                    assert_eq!(seen.tokens, expected(&seen.request).0, "sequence {sequence}");
                }
                Action::Failed { sequence, reason } => {
                    let pages = self.kv_pages;
                    let positions = self.shape.page_positions;
                    let seen = self.end(sequence);
                    let needs = seen.request.positions().div_ceil(u64::from(positions));
                    let is_too_large = reason.contains("KV pages") && needs > u64::from(pages);
                    let is_culprit = reason.contains("lost") && (seen.is_poison || seen.was_unlucky);
                    assert!(is_too_large || is_culprit, "sequence {sequence} failed: {reason}");
                }
                Action::Contradiction { sequence } => panic!("{sequence} contradicts itself"),
                Action::Fault(reason) => panic!("{reason}"),
            }
        }
    }

    fn end(&mut self, sequence: u64) -> &mut Seen {
        let seen = self.seen.get_mut(&sequence).expect("an end of a sequence of the front end's");
        assert!(!std::mem::replace(&mut seen.ended, true), "sequence {sequence} ends twice");
        assert!(expected(&seen.request).0.starts_with(&seen.tokens), "sequence {sequence}: {:?}", seen.tokens);
        seen
    }

    /// A request of one to three sequences.
    fn submit(&mut self) {
        let is_poison = self.rng.chance(self.faults.poison);
        let (prompt, output) = (1 + self.rng.below(8) as u32, 1 + self.rng.below(9) as u32);
        let seed = self.rng.below(1 << 40);
        let requests = vec![request(seed, prompt, output, vec![]); 1 + self.rng.below(3) as usize];
        if self.quarantine.left(requests[0].fingerprint(), self.now).is_some() {
            return;
        }
        let (count, tokens) = (requests.len() as u64, requests.len() as u64 * u64::from(prompt));
        let queued = self.scheduler.load().waiting;
        let owner = [None, Some("a".into()), Some("b".into())][self.rng.below(3) as usize].clone();
        let (priority, weight) = (self.rng.below(3) as i32 - 1, 1 + self.rng.below(3) as u32);
        match self.scheduler.submit(requests.clone(), &Standing { priority, owner, weight }) {
            Ok(numbers) => {
                assert_eq!(numbers.end - numbers.start, count);
                for (number, request) in numbers.zip(requests) {
                    self.poison.extend(is_poison.then_some(number));
                    let seen = Seen { request, tokens: vec![], is_poison, was_unlucky: false, ended: false };
                    assert!(self.seen.insert(number, seen).is_none(), "number {number} is given twice");
                }
            }
            Err(SubmitError::QueueFull { .. }) => assert!(queued > 0, "an empty queue is not full"),
            Err(SubmitError::NeverFits { asked, limit, .. }) => {
                assert!(asked > limit && [count, tokens].contains(&asked) && count > 1);
            }
            Err(SubmitError::TooLarge { needed, available }) => assert!(needed > available),
            Err(SubmitError::Unavailable(_)) => assert!(!self.was_up, "only before the first group"),
            Err(error @ SubmitError::Quarantined { .. }) => panic!("the scheduler knows no quarantine: {error}"),
        }
    }

    fn front_end(&mut self) {
        if self.rng.chance(400) && self.seen.len() < 12 {
            self.submit();
        }
        let newest = self.seen.keys().next_back().copied().unwrap_or(0);
        if self.rng.chance(self.faults.cancel) {
            let sequence = 1 + self.rng.below(newest);
            if self.seen.get(&sequence).is_some_and(|seen| !seen.ended) {
                self.end(sequence);
            }
            self.apply(Event::Cancel { sequence });
        }
        if self.rng.chance(self.faults.reader) {
            let (sequence, behind) = (1 + self.rng.below(newest), self.rng.chance(500));
            self.apply(Event::Reader { sequence, behind });
        }
    }

    /// What the group does until the next round.
    fn group(&mut self) {
        match std::mem::replace(&mut self.group, Group::GivenUp) {
            Group::GivenUp => {}
            Group::Waiting(until) if self.now >= until => {
                self.starts += 1;
                let load = self.rng.below(300);
                self.group = Group::Starting(self.now + MS(load));
            }
            Group::Starting(until) if self.now >= until => match self.rng.chance(self.faults.failed_start) {
                true => self.lost(Loss::FailedStart),
                false => self.group_ready(),
            },
            Group::Up(running) => self.run(running),
            early => self.group = early,
        }
    }

    fn group_ready(&mut self) {
        if std::mem::replace(&mut self.was_up, true) && self.rng.chance(self.faults.fewer_pages) {
            self.kv_pages = 1 + self.rng.below(self.kv_pages.into()) as u32;
        }
        self.shape.kv_pages = self.kv_pages;
        self.group = Group::Up(Box::new(Running {
            worker: FakeWorker::new(self.shape.clone()),
            plans: VecDeque::new(),
            outcomes: VecDeque::new(),
            reports: Reports::new(1, self.at()),
            hangs_since: None,
            worked: false,
        }));
        self.policy.group_ready();
        self.apply(self.shape.ready());
    }

    fn run(&mut self, mut running: Box<Running>) {
        while let Some(plan) = self.scheduler.next_plan() {
            running.plans.push_back(plan);
            running.worked = true;
            assert!(running.plans.len() <= self.limits.plans_ahead as usize + 1, "plans are bounded");
        }
        running.reports.owe(self.scheduler.is_outstanding(), self.at());
        if running.hangs_since.is_none() && self.rng.chance(self.faults.hang) {
            running.hangs_since = Some(self.now);
        }
        if running.hangs_since.is_none() {
            for _ in 0..self.rng.below(4) {
                // Plans take their time to arrive.
                if self.rng.chance(700) {
                    running.plans.pop_front().into_iter().for_each(|plan| running.worker.receive(plan));
                }
                let Some(outcome) = running.worker.run(u64::MAX) else { continue };
                if outcome.tokens.iter().any(|token| self.poison.contains(&token.sequence)) {
                    return self.group_lost(&running, true);
                }
                running.outcomes.push_back(outcome);
            }
        }
        if self.rng.chance(self.faults.death) {
            return self.group_lost(&running, false);
        }
        for _ in 0..self.rng.below(5) {
            let Some(outcome) = running.outcomes.pop_front() else { break };
            assert!(self.scheduler.is_outstanding(), "an outcome that was not owed");
            running.reports.reported(0, (outcome.version, outcome.step), self.at());
            self.times.observe(&StepTime { decode_rows: outcome.rows.max(1), prompt_rows: 0, time: MS(1) });
            self.apply(Event::Outcome(outcome));
        }
        let Timeouts { step_floor, step, .. } = self.timeouts;
        let limit = self.times.limit(self.scheduler.rows_ahead(), step_floor, step);
        running.reports.owe(self.scheduler.is_outstanding(), self.at());
        if running.reports.overdue(limit).is_some_and(|(at, _)| at <= self.at()) && running.outcomes.is_empty() {
            assert!(running.hangs_since.is_some(), "a group that works is taken for one that hangs");
            return self.group_lost(&running, false);
        }
        // A group that hangs with nothing to do is found by the probe, which this does not play.
        let noticed = running.hangs_since.is_none_or(|since| {
            self.now < since + step + MS(100) || !self.scheduler.is_outstanding() || !running.outcomes.is_empty()
        });
        assert!(noticed, "a hang is not noticed");
        self.group = Group::Up(running);
    }

    fn group_lost(&mut self, running: &Running, by_poison: bool) {
        let mut actions = Vec::new();
        let blame = self.scheduler.group_lost(&mut actions);
        if let Blame::Sequence { sequence, fingerprint, .. } = blame {
            self.convictions += 1;
            self.quarantine.add(fingerprint, self.now);
            // Copies of what fails fail with it.
            for (&id, seen) in self.seen.iter_mut().filter(|(_, seen)| seen.request.fingerprint() == fingerprint) {
                seen.was_unlucky |= id != sequence || !by_poison;
            }
        }
        self.act(actions);
        self.lost(match blame {
            Blame::Sequence { losses, .. } => Loss::Attributed { losses },
            Blame::Nobody if running.worked => Loss::Running,
            Blame::Nobody | Blame::Group => Loss::FailedStart,
        });
    }

    fn lost(&mut self, loss: Loss) {
        match loss {
            Loss::FailedStart if self.failed_starts == 0 => self.failing_since = self.now,
            Loss::Running => self.failed_starts = 0,
            Loss::FailedStart | Loss::Attributed { .. } => {}
        }
        self.failed_starts += u32::from(loss == Loss::FailedStart);
        let may_go_on = self.failed_starts < 5
            || self.was_up && self.now - self.failing_since < self.timeouts.loss_window
            || loss != Loss::FailedStart;
        match self.policy.lost(loss, self.now) {
            Verdict::Restart { after } => {
                assert!(may_go_on, "it goes on after {} failed starts", self.failed_starts);
                assert!(after <= self.timeouts.backoff_limit);
                self.group = Group::Waiting(self.now + after);
            }
            Verdict::GiveUp { failed_starts } => {
                assert_eq!(failed_starts, self.failed_starts);
                assert!(failed_starts >= 5 && (!may_go_on || loss != Loss::FailedStart), "given up early");
                self.group = Group::GivenUp;
            }
        }
        self.losses.push(self.now);
        // Nine would follow pauses of 100 + 200 + 400 + 800 ms, even where one of them is put down to a request, and
        // the two before that with it.
        let within_a_second = self.losses.iter().filter(|then| **then + MS(1000) > self.now).count();
        assert!(within_a_second <= 8, "{within_a_second} losses within a second");
    }

    fn round(&mut self) {
        self.now += MS(1 + self.rng.below(40));
        self.front_end();
        self.group();
        if let Group::Up(running) = &self.group
            && running.hangs_since.is_some()
            && !self.scheduler.is_outstanding()
        {
            // The probe of an idle group.
            let Group::Up(running) = std::mem::replace(&mut self.group, Group::GivenUp) else { unreachable!() };
            self.group_lost(&running, false);
        }
    }

    /// Some rounds in which things go wrong, and then as many as it takes without.
    fn run_to_the_end(mut self) -> Self {
        let rounds = if self.rng.chance(200) { 120 } else { 30 };
        for _ in 0..rounds {
            self.round();
        }
        self.faults = Faults::NONE;
        // Whoever was read slowly is read.
        let behind: Vec<u64> = self.seen.keys().copied().collect();
        behind.into_iter().for_each(|sequence| self.apply(Event::Reader { sequence, behind: false }));
        let mut rounds = 0;
        while !matches!(self.group, Group::GivenUp) && self.seen.values().any(|seen| !seen.ended) {
            self.round();
            rounds += 1;
            assert!(rounds < 3000, "no end: {:?}", self.scheduler);
        }
        if matches!(self.group, Group::GivenUp) {
            return self;
        }
        if let Some(seen) = self.seen.values().find(|seen| seen.is_poison && !seen.tokens.is_empty()) {
            panic!("a poison sequence got tokens: {:?}", seen.tokens);
        }
        self
    }
}

#[test]
fn schedules_in_virtual_time() {
    let chosen = std::env::var("LOOPLANE_TEST_SEED").ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let run = |seeds: std::ops::Range<u64>| {
        let (mut starts, mut convictions, mut given_up) = (0, 0, 0);
        for seed in seeds {
            let world = std::panic::catch_unwind(|| World::new(seed).run_to_the_end());
            let world = world.unwrap_or_else(|_| panic!("LOOPLANE_TEST_SEED={seed} repeats this"));
            starts += u64::from(world.starts);
            convictions += u64::from(world.convictions);
            given_up += u64::from(matches!(world.group, Group::GivenUp));
        }
        (starts, convictions, given_up)
    };
    if let Some(seed) = chosen {
        run(seed..seed + 1);
        return;
    }
    let threads = 2;
    let counts: Vec<(u64, u64, u64)> = std::thread::scope(|scope| {
        let part = SCHEDULES / threads;
        let parts: Vec<_> = (0..threads).map(|i| scope.spawn(move || run(i * part..(i + 1) * part))).collect();
        parts.into_iter().map(|part| part.join().expect("a schedule failed")).collect()
    });
    // What the schedules are for has happened, often.
    let sum = |pick: fn(&(u64, u64, u64)) -> u64| counts.iter().map(pick).sum::<u64>();
    let (starts, convictions, given_up) = (sum(|c| c.0), sum(|c| c.1), sum(|c| c.2));
    println!("{SCHEDULES} schedules: {starts} starts, {convictions} convictions, {given_up} given up");
    assert!(starts > 3 * SCHEDULES / 2 && convictions > SCHEDULES / 20 && given_up > SCHEDULES / 5000);
}
