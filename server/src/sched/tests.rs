//! Seeded random runs of the scheduler against a worker that follows the protocol to the letter. A failure prints its seed.

use std::collections::{BTreeMap, VecDeque};

use looplane_proto::worker::v1::{Finish, Outcome, Plan};

use super::fake_worker::{FakeWorker, Shape, expected, mix, request};
use super::{Action, Blame, Event, FinishReason, Limits, LimitsError, Scheduler, SequenceRequest, SubmitError};

/// What one run tries.
#[derive(Debug, Clone)]
struct Scene {
    shape: Shape,
    limits: Limits,
    sequences: u64,
    max_prompt: u64,
    max_output: u64,
    /// Of 1000 rounds: how many bring a new sequence, a cancel, the loss of the group.
    arrivals: u64,
    cancels: u64,
    losses: u64,
}

impl Scene {
    fn random(rng: &mut Rng) -> Self {
        let max_slots = 1 + rng.below(6) as u32;
        let limits = Limits {
            max_slots,
            max_batch_tokens: max_slots + rng.below(12) as u32,
            steps_per_plan: 1 + rng.below(6) as u32,
            plans_ahead: 1 + rng.below(3) as u32,
            max_waiting_requests: 1000,
            max_waiting_tokens: 100_000,
            suspect_after: 1000,
        };
        let page_positions = 1 + rng.below(5) as u32;
        let (max_prompt, max_output) = (1 + rng.below(20), 1 + rng.below(24));
        let largest = (max_prompt + max_output).div_ceil(u64::from(page_positions)) as u32;
        // From a cache that holds the largest sequence alone, where preemption is the rule, to an ample one.
        let kv_pages = largest + rng.below(u64::from(largest * max_slots)) as u32;
        Self {
            shape: Shape { max_slots, max_batch_tokens: limits.max_batch_tokens, kv_pages, page_positions },
            limits,
            sequences: 1 + rng.below(24),
            max_prompt,
            max_output,
            arrivals: 50 + rng.below(500),
            cancels: 0,
            losses: 0,
        }
    }
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % bound.max(1)
    }

    fn chance(&mut self, permille: u64) -> bool {
        self.below(1000) < permille
    }
}

#[derive(Debug, Default)]
struct Seen {
    request: Option<SequenceRequest>,
    tokens: Vec<u32>,
    finish: Option<FinishReason>,
    cancelled: bool,
}

/// A run in progress: the scheduler, the worker, and plans and outcomes on their way between them.
struct Run {
    rng: Rng,
    scene: Scene,
    scheduler: Scheduler,
    worker: FakeWorker,
    plans: VecDeque<Plan>,
    outcomes: VecDeque<Outcome>,
    seen: BTreeMap<u64, Seen>,
    /// Sequences in the order of their admissions, with repeats.
    admitted: Vec<u64>,
    /// By slot, as the plans say.
    slots: BTreeMap<u32, u64>,
    preemptions: u64,
    up: bool,
}

impl Run {
    fn new(seed: u64, scene: Scene) -> Self {
        let mut run = Self {
            rng: Rng(mix(seed)),
            scheduler: Scheduler::new(scene.limits.clone()).unwrap(),
            worker: FakeWorker::new(scene.shape.clone()),
            scene,
            plans: VecDeque::new(),
            outcomes: VecDeque::new(),
            seen: BTreeMap::new(),
            admitted: Vec::new(),
            slots: BTreeMap::new(),
            preemptions: 0,
            up: false,
        };
        run.group_ready();
        run
    }

    fn group_ready(&mut self) {
        let Shape { kv_pages, page_positions, .. } = self.scene.shape;
        self.up = true;
        self.apply(Event::GroupReady { kv_pages, page_positions });
    }

    fn apply(&mut self, event: Event) {
        let mut actions = Vec::new();
        let wanted = match &event {
            Event::Outcome(outcome) => outcome.tokens.iter().filter(|token| self.lives(token.sequence)).count(),
            _ => 0,
        };
        self.scheduler.apply(event, &mut actions);
        self.scheduler.check().unwrap();
        let tokens = actions.iter().filter(|action| matches!(action, Action::Token { .. })).count();
        assert_eq!(tokens, wanted, "every token that somebody wants is handed on");
        for action in actions {
            match action {
                Action::Token { sequence, token } => {
                    let seen = self.seen.get_mut(&sequence).unwrap();
                    assert!(!seen.cancelled && seen.finish.is_none(), "a token after the end of {sequence}");
                    seen.tokens.push(token.id);
                }
                Action::Finished { sequence, reason } => self.seen.get_mut(&sequence).unwrap().finish = Some(reason),
                other => panic!("{other:?}"),
            }
        }
    }

    fn lives(&self, sequence: u64) -> bool {
        self.seen.get(&sequence).is_some_and(|seen| !seen.cancelled && seen.finish.is_none())
    }

    /// Who gives up a slot and who enters: the latest of all, the earliest of all.
    fn check_order(&mut self, plan: &Plan) {
        let mut preempted = Vec::new();
        for slot in &plan.release {
            let sequence = self.slots.remove(slot).expect("a released slot is in use");
            if self.lives(sequence) {
                preempted.push(sequence);
            }
        }
        self.preemptions += preempted.len() as u64;
        let least = preempted.into_iter().min().unwrap_or(u64::MAX);
        assert!(self.slots.values().all(|&other| other < least), "{least} was preempted before a later one");
        self.slots.extend(plan.admit.iter().map(|admit| (admit.slot, admit.sequence)));
        let load = self.scheduler.load();
        assert_eq!((load.running, load.preemptions), (self.slots.len() as u64, self.preemptions), "what is told");
        for admit in &plan.admit {
            let overtaken = |id: &u64| self.lives(*id) && !self.slots.values().any(|in_slot| in_slot == id);
            let earlier = self.seen.keys().find(|&&id| id < admit.sequence && overtaken(&id));
            assert_eq!(earlier, None, "{} overtook it", admit.sequence);
        }
    }

    fn submit(&mut self) {
        let sequence = self.seen.len() as u64 + 1;
        let prompt = 1 + self.rng.below(self.scene.max_prompt) as u32;
        let output = 1 + self.rng.below(self.scene.max_output) as u32;
        let stop = (0..self.rng.below(60)).map(|i| (i * 7) as u32).collect();
        let request = request(self.rng.below(1 << 50), prompt, output, stop);
        self.seen.insert(sequence, Seen { request: Some(request.clone()), ..Seen::default() });
        assert_eq!(self.scheduler.submit(vec![request]), Ok(sequence..sequence + 1));
    }

    fn lose_group(&mut self) {
        self.up = false;
        self.plans.clear();
        self.outcomes.clear();
        self.slots.clear();
        self.worker = FakeWorker::new(self.scene.shape.clone());
        let mut actions = Vec::new();
        assert_eq!(self.scheduler.group_lost(&mut actions), Blame::Nobody);
        assert!(actions.is_empty(), "{actions:?}");
    }

    fn send_plans(&mut self) {
        while let Some(plan) = self.scheduler.next_plan() {
            self.scheduler.check().unwrap();
            let rows = plan.release.len() + plan.admit.len() + plan.prefill.len() + plan.decode.len();
            assert!(rows > 0, "a plan without a point: {plan:?}");
            self.check_order(&plan);
            self.admitted.extend(plan.admit.iter().map(|admit| admit.sequence));
            self.plans.push_back(plan);
            // Those under way: unstarted ones, and the one that runs.
            assert!(self.plans.len() <= self.scene.limits.plans_ahead as usize + 1);
        }
    }

    /// One round: chance decides what happens next.
    fn round(&mut self) {
        let arrived = self.seen.len() as u64;
        if arrived < self.scene.sequences && (self.rng.chance(self.scene.arrivals) || self.scheduler.is_idle()) {
            self.submit();
        }
        if self.rng.chance(self.scene.cancels) && arrived > 0 {
            let sequence = 1 + self.rng.below(arrived);
            let seen = self.seen.get_mut(&sequence).unwrap();
            seen.cancelled |= seen.finish.is_none();
            self.apply(Event::Cancel { sequence });
        }
        if self.up && self.rng.chance(self.scene.losses) {
            self.lose_group();
        } else if !self.up && self.rng.chance(300) {
            self.group_ready();
        }
        if self.rng.chance(800) {
            self.send_plans();
        }
        for _ in 0..self.rng.below(3) {
            if let Some(plan) = self.plans.pop_front() {
                self.worker.receive(plan);
            }
        }
        for _ in 0..self.rng.below(4) {
            self.outcomes.extend(self.worker.run(u64::MAX));
        }
        for _ in 0..self.rng.below(4) {
            if let Some(outcome) = self.outcomes.pop_front() {
                assert!(self.scheduler.is_outstanding(), "an outcome that was not owed");
                self.apply(Event::Outcome(outcome));
            }
        }
    }

    /// Runs to the end and checks what every sequence got.
    fn finish(mut self) -> Self {
        let bound = 4000 + self.scene.sequences * 400;
        let done = |run: &Self| run.seen.len() as u64 == run.scene.sequences && run.scheduler.is_idle();
        let mut rounds = 0;
        while !done(&self) {
            self.round();
            rounds += 1;
            assert!(rounds < bound, "no end after {rounds} rounds: {:?}", self.scheduler);
        }
        for (sequence, seen) in &self.seen {
            let (tokens, finish) = expected(seen.request.as_ref().unwrap());
            if seen.cancelled {
                assert!(tokens.starts_with(&seen.tokens), "sequence {sequence} got {:?} of {tokens:?}", seen.tokens);
            } else {
                assert_eq!(seen.tokens, tokens, "sequence {sequence}");
                let reason = if finish == Finish::Stop { FinishReason::Stop } else { FinishReason::Length };
                assert_eq!(seen.finish, Some(reason), "sequence {sequence}");
            }
        }
        assert_eq!(self.scheduler.next_plan(), None, "an idle scheduler has no plan");
        if self.up {
            self.scheduler.check().unwrap();
            assert_eq!(self.scheduler.pages.as_ref().unwrap().available(), u64::from(self.scene.shape.kv_pages));
            assert_eq!(self.worker.slots_in_use(), 0, "the worker was told of every release");
        }
        self
    }
}

/// Runs `scene` for a number of seeds; `LOOPLANE_TEST_SEED` picks one.
fn runs(name: &str, seeds: u64, mut change: impl FnMut(&mut Scene, &mut Rng)) -> Vec<Run> {
    let chosen = std::env::var("LOOPLANE_TEST_SEED").ok().map(|seed| seed.parse::<u64>().expect("a number"));
    let seeds = chosen.map_or(0..seeds, |seed| seed..seed + 1);
    let run = |seed: u64| {
        let mut rng = Rng(mix(seed ^ 0x5eed));
        let mut scene = Scene::random(&mut rng);
        change(&mut scene, &mut rng);
        println!("{name}: LOOPLANE_TEST_SEED={seed} {scene:?}");
        Run::new(seed, scene).finish()
    };
    seeds.map(run).collect()
}

#[test]
fn every_sequence_gets_its_tokens() {
    runs("plain", 300, |_, _| {});
}

#[test]
fn preemption_storms_end() {
    let runs = runs("preempt", 300, |scene, _| {
        scene.limits.max_slots = 6;
        scene.limits.max_batch_tokens = 12;
        scene.shape.max_slots = 6;
        scene.shape.max_batch_tokens = 12;
        scene.arrivals = 900;
        scene.shape.kv_pages = (scene.max_prompt + scene.max_output).div_ceil(scene.shape.page_positions.into()) as u32;
    });
    let preempted = runs.iter().filter(|run| run.preemptions > 0).count();
    assert!(preempted > 100 || runs.len() == 1, "only {preempted} runs preempted anything");
}

#[test]
fn cancel_storms_leak_nothing() {
    let runs = runs("cancel", 300, |scene, rng| scene.cancels = 20 + rng.below(500));
    assert!(runs.iter().any(|run| run.seen.values().any(|seen| seen.cancelled && !seen.tokens.is_empty())));
}

#[test]
fn a_lost_group_loses_no_token() {
    let runs = runs("loss", 300, |scene, rng| {
        scene.losses = 1 + rng.below(30);
        scene.cancels = rng.below(20);
    });
    assert!(runs.iter().any(|run| run.admitted.len() > run.seen.len()));
}

#[test]
fn everything_at_once() {
    runs("all", 300, |scene, rng| {
        scene.losses = rng.below(15);
        scene.cancels = rng.below(60);
        scene.shape.kv_pages = (scene.max_prompt + scene.max_output).div_ceil(scene.shape.page_positions.into()) as u32;
    });
}

fn scheduler(limits: Limits, kv_pages: u32) -> Scheduler {
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.apply(Event::GroupReady { kv_pages, page_positions: 4 }, &mut Vec::new());
    scheduler
}

/// Submits one sequence; the seed of its request is `seed`.
fn submit(scheduler: &mut Scheduler, seed: u64, prompt: u32, output: u32) -> Result<u64, SubmitError> {
    scheduler.submit(vec![request(seed, prompt, output, vec![])]).map(|numbers| numbers.start)
}

#[test]
fn bounds_of_the_queue_are_named() {
    let limits = Limits { max_waiting_requests: 3, max_waiting_tokens: 10, ..Limits::default() };
    let mut scheduler = scheduler(limits, 5);
    // 17 positions fit 5 pages of 4; the last token is never computed: 21 do not, 20 do.
    assert_eq!(submit(&mut scheduler, 1, 12, 9), Ok(1));
    assert_eq!(submit(&mut scheduler, 2, 12, 10), Err(SubmitError::TooLarge { needed: 6, available: 5 }));
    let full = SubmitError::QueueFull { waiting: 12, limit: 10, what: "prompt tokens" };
    assert_eq!(submit(&mut scheduler, 3, 1, 1), Err(full));
    scheduler.next_plan().unwrap();
    for number in 2..5 {
        assert_eq!(submit(&mut scheduler, 4, 1, 1), Ok(number));
    }
    let full = SubmitError::QueueFull { waiting: 3, limit: 3, what: "sequences" };
    assert_eq!(submit(&mut scheduler, 7, 1, 1), Err(full));
    scheduler.apply(Event::Cancel { sequence: 3 }, &mut Vec::new());
    assert_eq!(submit(&mut scheduler, 8, 1, 1), Ok(5));
}

#[test]
fn the_sequences_of_a_request_are_taken_together_or_not_at_all() {
    let limits = Limits { max_waiting_requests: 4, max_waiting_tokens: 20, ..Limits::default() };
    let mut scheduler = scheduler(limits, 100);
    let choices = |count: u64, prompt| (0..count).map(|seed| request(seed, prompt, 5, vec![])).collect::<Vec<_>>();
    let never = |asked, limit, what, option| Err(SubmitError::NeverFits { asked, limit, what, option });
    // However empty the queue is: not a matter of waiting.
    assert_eq!(scheduler.submit(choices(5, 1)), never(5, 4, "sequences", "--max-queued-requests"));
    assert_eq!(scheduler.submit(choices(3, 7)), never(21, 20, "prompt tokens", "--max-queued-tokens"));
    assert!(scheduler.is_idle() && scheduler.next_plan().is_none(), "nothing of them is left behind");
    assert_eq!(scheduler.submit(choices(3, 5)), Ok(1..4));
    let full = SubmitError::QueueFull { waiting: 3, limit: 4, what: "sequences" };
    assert_eq!(scheduler.submit(choices(2, 1)), Err(full));
    assert_eq!(scheduler.sequences(), 3);
    // A single prompt is bounded by the context alone.
    scheduler.next_plan().unwrap();
    assert_eq!(scheduler.submit(choices(1, 30)), Ok(4..5));
}

#[test]
fn nothing_is_taken_before_the_first_group() {
    let mut scheduler = Scheduler::new(Limits::default()).unwrap();
    assert!(matches!(submit(&mut scheduler, 1, 1, 1), Err(SubmitError::Unavailable(_))));
    assert!(scheduler.is_idle() && scheduler.next_plan().is_none());
}

#[test]
fn a_cancel_goes_out_with_the_next_plan() {
    let mut scheduler = scheduler(Limits::default(), 100);
    submit(&mut scheduler, 1, 3, 50).unwrap();
    let plan = scheduler.next_plan().unwrap();
    assert_eq!((plan.version, plan.admit.len(), plan.decode.as_slice()), (1, 1, &[0][..]));
    assert_eq!(scheduler.next_plan(), None, "the steps of plan 1 last");
    scheduler.apply(Event::Cancel { sequence: 1 }, &mut Vec::new());
    let plan = scheduler.next_plan().unwrap();
    assert_eq!((plan.version, plan.release.as_slice(), plan.decode.len()), (2, &[0][..], 0));
    assert!(!scheduler.is_idle(), "the group owes the outcome of plan 2");
}

#[test]
fn decode_goes_on_during_prefill() {
    let limits = Limits { max_slots: 4, max_batch_tokens: 4, plans_ahead: 1, ..Limits::default() };
    let mut scheduler = scheduler(limits, 100);
    let mut worker = FakeWorker::new(Shape { max_slots: 4, max_batch_tokens: 4, kv_pages: 100, page_positions: 4 });
    submit(&mut scheduler, 1, 1, 40).unwrap();
    let mut tokens = Vec::new();
    for round in 0..20 {
        if round == 2 {
            submit(&mut scheduler, 2, 30, 1).unwrap();
        }
        if let Some(plan) = scheduler.next_plan() {
            worker.receive(plan);
        }
        let outcome = worker.run(u64::MAX).unwrap();
        tokens.push(outcome.tokens.iter().filter(|token| token.sequence == 1).count());
        scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
    }
    assert_eq!(tokens, [1; 20], "a token in every step");
}

#[test]
fn the_loop_never_waits_for_the_server() {
    for steps_per_plan in 1..9 {
        let limits = Limits { max_slots: 2, max_batch_tokens: 4, steps_per_plan, ..Limits::default() };
        let mut scheduler = scheduler(limits, 40);
        let mut worker = FakeWorker::new(Shape { max_slots: 2, max_batch_tokens: 4, kv_pages: 40, page_positions: 4 });
        submit(&mut scheduler, 1, 9, 60).unwrap();
        submit(&mut scheduler, 2, 7, 60).unwrap();
        let mut on_the_way = VecDeque::new();
        let (mut plans, mut ended) = (0, 0);
        loop {
            while let Some(plan) = scheduler.next_plan() {
                plans += 1;
                worker.receive(plan);
            }
            if scheduler.sequences() == 0 {
                break;
            }
            // The server hears of a step while the next one runs.
            let outcome = worker.run(u64::MAX).filter(|outcome| outcome.ran_step);
            let finished = |outcome: &Outcome| outcome.tokens.iter().filter(|token| token.finish != 0).count();
            ended += outcome.as_ref().map_or(0, finished);
            assert!(outcome.is_some() || ended == 2, "the loop came to rest, {steps_per_plan} steps a plan");
            on_the_way.extend(outcome);
            if on_the_way.len() > 1 || worker.rests() {
                scheduler.apply(Event::Outcome(on_the_way.pop_front().unwrap()), &mut Vec::new());
            }
        }
        assert!(plans < 30 + 130 / steps_per_plan, "{plans} plans of {steps_per_plan} steps");
    }
}

/// Steps the group until the scheduler has nothing to send and the group nothing to do; false if it was killed by a step
/// that computed one of `poison`.
fn steps(scheduler: &mut Scheduler, worker: &mut FakeWorker, poison: &[u64], actions: &mut Vec<Action>) -> bool {
    loop {
        while let Some(plan) = scheduler.next_plan() {
            worker.receive(plan);
        }
        let Some(outcome) = worker.run(u64::MAX) else { return true };
        if outcome.tokens.iter().any(|token| poison.contains(&token.sequence)) {
            return false;
        }
        scheduler.apply(Event::Outcome(outcome), actions);
    }
}

#[test]
fn only_the_culprit_of_a_crowd_fails() {
    let shape = Shape { max_slots: 32, max_batch_tokens: 64, kv_pages: 200, page_positions: 4 };
    let limits = Limits { max_slots: 32, max_batch_tokens: 64, ..Limits::default() };
    let mut scheduler = scheduler(limits, 200);
    let requests: Vec<SequenceRequest> = (1..22).map(|seed| request(seed, 5, 20, vec![])).collect();
    for request in &requests {
        scheduler.submit(vec![request.clone()]).unwrap();
    }
    let culprit = 11;
    let mut actions = Vec::new();
    let mut blames = Vec::new();
    loop {
        let mut worker = FakeWorker::new(shape.clone());
        if steps(&mut scheduler, &mut worker, &[culprit], &mut actions) {
            break;
        }
        blames.push(scheduler.group_lost(&mut actions));
        scheduler.apply(Event::GroupReady { kv_pages: 200, page_positions: 4 }, &mut actions);
    }
    // Twice with all the others, then alone.
    let fingerprint = requests[culprit as usize - 1].fingerprint();
    let convicted = Blame::Sequence { sequence: culprit, fingerprint, losses: 3 };
    assert_eq!(blames, [Blame::Nobody, Blame::Nobody, convicted]);
    let failed = actions.iter().filter_map(|action| match action {
        Action::Failed { sequence, reason } => Some((*sequence, reason.contains("lost 3 times"))),
        _ => None,
    });
    assert_eq!(failed.collect::<Vec<_>>(), [(culprit, true)]);
    for (sequence, request) in (1..).zip(&requests).filter(|(sequence, _)| *sequence != culprit) {
        let tokens = actions.iter().filter_map(|action| match action {
            Action::Token { sequence: of, token } if *of == sequence => Some(token.id),
            _ => None,
        });
        assert_eq!(tokens.collect::<Vec<_>>(), expected(request).0, "sequence {sequence}");
    }
    assert!(scheduler.is_idle());
}

#[test]
fn a_group_that_cannot_prove_itself_is_to_blame() {
    let mut scheduler = scheduler(Limits::default(), 10);
    submit(&mut scheduler, 1, 3, 5).unwrap();
    let mut actions = Vec::new();
    let mut lose = |scheduler: &mut Scheduler| {
        // It dies in its first step, whatever that computes.
        assert_eq!(scheduler.next_plan().unwrap().version, 1, "versions begin again with the group");
        let blame = scheduler.group_lost(&mut actions);
        scheduler.apply(Event::GroupReady { kv_pages: 10, page_positions: 4 }, &mut actions);
        blame
    };
    assert_eq!([lose(&mut scheduler), lose(&mut scheduler)], [Blame::Nobody, Blame::Nobody]);
    for _ in 0..10 {
        assert_eq!(lose(&mut scheduler), Blame::Group);
    }
    assert!(actions.is_empty(), "{actions:?}");
    assert_eq!(scheduler.sequences(), 2, "the request, and what the group is to prove itself with");
    scheduler.apply(Event::Cancel { sequence: 1 }, &mut actions);
    let shape = Shape { max_slots: 64, max_batch_tokens: 512, kv_pages: 10, page_positions: 4 };
    assert!(steps(&mut scheduler, &mut FakeWorker::new(shape), &[], &mut actions));
    assert!(scheduler.is_idle() && actions.is_empty());
}

#[test]
fn losses_with_progress_in_between_make_no_suspect() {
    let shape = Shape { max_slots: 64, max_batch_tokens: 512, kv_pages: 10, page_positions: 4 };
    let mut scheduler = scheduler(Limits::default(), 10);
    let sequence = submit(&mut scheduler, 1, 3, 36).unwrap();
    for _ in 0..6 {
        let mut worker = FakeWorker::new(shape.clone());
        let plan = scheduler.next_plan().unwrap();
        assert_eq!(plan.admit[0].sequence, sequence, "it is not computed behind a test of the group");
        worker.receive(plan);
        let mut actions = Vec::new();
        for _ in 0..5 {
            scheduler.apply(Event::Outcome(worker.run(u64::MAX).unwrap()), &mut actions);
        }
        assert_eq!((actions.len(), scheduler.group_lost(&mut actions)), (5, Blame::Nobody));
        scheduler.apply(Event::GroupReady { kv_pages: 10, page_positions: 4 }, &mut actions);
    }
}

#[test]
fn a_short_prompt_is_computed_beside_a_long_one() {
    let limits = Limits { max_slots: 8, max_batch_tokens: 16, ..Limits::default() };
    let mut scheduler = scheduler(limits, 200);
    let shape = Shape { max_slots: 8, max_batch_tokens: 16, kv_pages: 200, page_positions: 4 };
    let mut worker = FakeWorker::new(shape);
    let long = [submit(&mut scheduler, 1, 300, 2).unwrap(), submit(&mut scheduler, 2, 200, 2).unwrap()];
    let short: Vec<u64> = [3, 1, 4].map(|prompt| submit(&mut scheduler, 3, prompt, 1).unwrap()).into();
    let plan = scheduler.next_plan().unwrap();
    // Half of the rows for those that end, the rest for the oldest.
    let rows: Vec<(u32, u32)> = plan.prefill.iter().map(|chunk| (chunk.slot, chunk.len)).collect();
    assert_eq!(rows, [(3, 1), (2, 3), (4, 4), (0, 8)]);
    worker.receive(plan);
    let outcome = worker.run(u64::MAX).unwrap();
    assert_eq!(outcome.tokens.iter().map(|token| token.sequence).collect::<Vec<_>>(), [short[1], short[0], short[2]]);
    scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
    // Then the oldest has all of them.
    let rows: Vec<(u32, u32)> = scheduler.next_plan().unwrap().prefill.iter().map(|c| (c.slot, c.len)).collect();
    assert_eq!((rows, long), (vec![(0, 16)], [1, 2]));
    scheduler.limit_prompt_rows(5);
    let rows: Vec<(u32, u32)> = scheduler.next_plan().unwrap().prefill.iter().map(|c| (c.slot, c.len)).collect();
    assert_eq!(rows, [(0, 5)], "the owner bounds the rows of prompts");
}

#[test]
fn who_does_not_read_leaves_its_slot_to_those_who_wait() {
    let shape = Shape { max_slots: 2, max_batch_tokens: 4, kv_pages: 40, page_positions: 4 };
    let limits = Limits { max_slots: 2, max_batch_tokens: 4, steps_per_plan: 4, ..Limits::default() };
    let mut scheduler = scheduler(limits, 40);
    let mut worker = FakeWorker::new(shape);
    let requests: Vec<SequenceRequest> = (1..4).map(|seed| request(seed, 3, 40, vec![])).collect();
    let behind = [0, 1].map(|i| scheduler.submit(vec![requests[i].clone()]).unwrap().start);
    let mut actions = Vec::new();
    let mut run = |scheduler: &mut Scheduler, steps: usize| {
        for _ in 0..steps {
            while let Some(plan) = scheduler.next_plan() {
                worker.receive(plan);
            }
            if let Some(outcome) = worker.run(u64::MAX) {
                scheduler.apply(Event::Outcome(outcome), &mut actions);
            }
        }
    };
    run(&mut scheduler, 6);
    for sequence in behind {
        scheduler.apply(Event::Reader { sequence, behind: true }, &mut Vec::new());
    }
    run(&mut scheduler, 6);
    assert_eq!(scheduler.load().preemptions, 0, "nobody waits: they go on");
    let reads = scheduler.submit(vec![requests[2].clone()]).unwrap().start;
    run(&mut scheduler, 12);
    assert_eq!((scheduler.load().preemptions, scheduler.load().running), (1, 2), "one makes room for it");
    let other = submit(&mut scheduler, 9, 3, 5).unwrap();
    run(&mut scheduler, 12);
    assert_eq!((scheduler.load().preemptions, scheduler.load().waiting), (2, 1), "and one comes back behind it");
    // It has caught up: as the earliest of all it is first again.
    scheduler.apply(Event::Reader { sequence: behind[1], behind: false }, &mut Vec::new());
    run(&mut scheduler, 200);
    assert!(scheduler.is_idle());
    for (sequence, request) in behind.into_iter().chain([reads]).zip(&requests) {
        let tokens = actions.iter().filter_map(|action| match action {
            Action::Token { sequence: of, token } if *of == sequence => Some(token.id),
            _ => None,
        });
        assert_eq!(tokens.collect::<Vec<_>>(), expected(request).0, "sequence {sequence}");
    }
    let finished = actions.iter().position(|a| matches!(a, Action::Finished { sequence, .. } if *sequence == other));
    assert!(finished.is_some());
}

#[test]
fn a_smaller_cache_after_a_loss_fails_what_cannot_fit() {
    let mut scheduler = scheduler(Limits::default(), 10);
    submit(&mut scheduler, 1, 30, 5).unwrap();
    submit(&mut scheduler, 2, 3, 5).unwrap();
    let mut actions = Vec::new();
    scheduler.group_lost(&mut actions);
    scheduler.apply(Event::GroupReady { kv_pages: 5, page_positions: 4 }, &mut actions);
    assert!(matches!(&actions[..], [Action::Failed { sequence: 1, .. }]), "{actions:?}");
    assert_eq!(scheduler.next_plan().unwrap().admit[0].sequence, 2);
}

#[test]
fn a_worker_that_breaks_the_protocol_is_a_fault() {
    use looplane_proto::worker::v1::SampledToken;
    let token = |sequence, finish: i32| SampledToken { sequence, finish, ..SampledToken::default() };
    let cases = [
        Outcome { version: 2, ran_step: true, ..Outcome::default() },
        Outcome { version: 1, step: 1, ran_step: true, ..Outcome::default() },
        Outcome { version: 1, ran_step: true, tokens: vec![token(1, 0)], ..Outcome::default() },
        Outcome { version: 1, ran_step: true, tokens: vec![token(1, 9)], ..Outcome::default() },
        Outcome { version: 1, ran_step: true, tokens: vec![token(2, 0)], ..Outcome::default() },
    ];
    for outcome in cases {
        let mut scheduler = scheduler(Limits { max_slots: 1, ..Limits::default() }, 10);
        submit(&mut scheduler, 1, 3, 1).unwrap();
        submit(&mut scheduler, 2, 3, 1).unwrap();
        scheduler.next_plan().unwrap();
        let mut actions = Vec::new();
        scheduler.apply(Event::Outcome(outcome.clone()), &mut actions);
        assert!(matches!(&actions[..], [Action::Fault(_)]), "{outcome:?} gave {actions:?}");
        scheduler.group_lost(&mut actions);
    }
}

#[test]
fn limits_that_cannot_work_are_named() {
    let zero = Limits { steps_per_plan: 0, ..Limits::default() };
    assert_eq!(zero.validate(), Err(LimitsError::Zero("steps_per_plan")));
    let small = Limits { max_batch_tokens: 10, ..Limits::default() };
    assert_eq!(small.validate(), Err(LimitsError::BatchTooSmall { tokens: 10, slots: 64 }));
}
