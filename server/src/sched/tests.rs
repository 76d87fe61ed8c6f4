//! Seeded random runs of the scheduler against a worker that follows the protocol to the letter. A failure prints its
//! seed.

mod cost;
mod fairness;
mod hand_over;
mod prefix;
mod rules;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use looplane_proto::worker::v1::{Admit, Finish, Outcome, Plan};

use super::fake_worker::{FakeWorker, Rng, Shape, expected, mix, request};
use super::{Action, Blame, Event, FinishReason, Limits, Scheduler, SequenceRequest, Standing, StepRows, StepSize};

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
    /// The same: how many begin to end the group on purpose, and of those after them how many end it before it rests.
    endings: [u64; 2],
    /// The same: how many change the bounds on rows of steps with prompts.
    bounds: u64,
    /// The same, of the sequences that arrive: how many begin as an earlier one does, its answer perhaps included.
    alike: u64,
    /// Each group after a loss has a shape of its own.
    is_reshaped: bool,
    /// Of whom sequences are: their weights. None: of nobody.
    owners: Vec<u32>,
    /// Priorities are as many, around 0.
    priorities: u64,
    /// Sequences that come before the first plan.
    at_once: u64,
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
            prefix_cache: rng.below(4) > 0,
            drafts: rng.below(5) as u32,
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
            endings: [0, 0],
            bounds: 0,
            alike: rng.below(1000),
            is_reshaped: false,
            owners: (0..rng.below(4)).map(|_| 1 + rng.below(4) as u32).collect(),
            priorities: 1 + rng.below(2) * rng.below(5),
            at_once: 0,
        }
    }

    fn standing(&self, rng: &mut Rng) -> Standing {
        let at = rng.below(self.owners.len() as u64) as usize;
        let priority = rng.below(self.priorities) as i32 - (self.priorities / 2) as i32;
        let Some(&weight) = self.owners.get(at) else { return Standing { priority, ..Standing::default() } };
        Standing { priority, owner: Some(format!("key-{at}").into()), weight }
    }

    /// Another group, which can take every sequence.
    fn reshape(&mut self, rng: &mut Rng) {
        let largest = (self.max_prompt + self.max_output).div_ceil(u64::from(self.shape.page_positions)) as u32;
        let max_slots = 1 + rng.below(8) as u32;
        let max_batch_tokens = max_slots + rng.below(12) as u32;
        let kv_pages = largest + rng.below(u64::from(largest * max_slots)) as u32;
        self.shape = Shape { max_slots, max_batch_tokens, kv_pages, ..self.shape };
    }
}

#[derive(Debug, Default)]
struct Seen {
    request: Option<SequenceRequest>,
    standing: Standing,
    cached_tokens: Option<u32>,
    tokens: Vec<u32>,
    finish: Option<FinishReason>,
    cancelled: bool,
}

/// A first admission.
struct Entry {
    sequence: u64,
    /// Owners of whom some have waited for theirs since the run began.
    wait: BTreeSet<String>,
    /// How many of each owner have entered and not ended, this one included.
    inside: BTreeMap<String, u64>,
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
    /// First admissions.
    entries: Vec<Entry>,
    entered: BTreeSet<u64>,
    always_wait: BTreeSet<String>,
    /// By slot, as the plans say.
    slots: BTreeMap<u32, u64>,
    preemptions: u64,
    rows: StepRows,
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
            entries: Vec::new(),
            entered: BTreeSet::new(),
            always_wait: BTreeSet::new(),
            slots: BTreeMap::new(),
            preemptions: 0,
            rows: StepRows::default(),
            up: false,
        };
        run.group_ready();
        (0..run.scene.at_once.min(run.scene.sequences)).for_each(|_| run.submit());
        run.always_wait = run.waiting(&run.entered);
        run
    }

    fn group_ready(&mut self) {
        self.up = true;
        self.apply(self.scene.shape.ready());
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
                Action::Prompt { sequence, cached_tokens, .. } => {
                    let seen = self.seen.get_mut(&sequence).unwrap();
                    assert!(seen.cached_tokens.is_none() && seen.tokens.is_empty(), "said once, and first");
                    seen.cached_tokens = Some(cached_tokens);
                }
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

    /// Who gives up a slot and who enters: who was first admitted the latest of all, or the earliest. Of those that
    /// were never admitted the first of its owner.
    fn check_order(&mut self, plan: &Plan) {
        let mut preempted = Vec::new();
        for slot in &plan.release {
            let sequence = self.slots.remove(slot).expect("a released slot is in use");
            if self.lives(sequence) {
                preempted.push(sequence);
            }
        }
        self.preemptions += preempted.len() as u64;
        let ticket = |id: &u64| self.admitted.iter().position(|admitted| admitted == id);
        let least = preempted.iter().map(ticket).min().flatten().unwrap_or(usize::MAX);
        let later = self.slots.values().find(|other| ticket(other) > Some(least));
        assert_eq!(later, None, "one was preempted before it");
        self.slots.extend(plan.admit.iter().map(|admit| (admit.slot, admit.sequence)));
        let load = self.scheduler.load();
        assert_eq!((load.running, load.preemptions), (self.slots.len() as u64, self.preemptions), "what is told");
        for admit in &plan.admit {
            // Only what is cached goes before what was never admitted, and the check of the invariants bounds how
            // often.
            let is_cached = plan.prefill.iter().any(|chunk| chunk.slot == admit.slot && chunk.start > 0)
                || self.scheduler.limits.prefix_cache && !plan.prefill.iter().any(|chunk| chunk.slot == admit.slot);
            let waits = |id: &u64| self.lives(*id) && !self.slots.values().any(|in_slot| in_slot == id);
            let is_like = |id: &u64| self.seen[id].standing == self.seen[&admit.sequence].standing;
            let goes_before = |id: &u64| match (ticket(id), ticket(&admit.sequence)) {
                (None, None) => *id < admit.sequence && !is_cached && is_like(id),
                (Some(own), Some(other)) => own < other,
                (own, _) => own.is_some(),
            };
            let earlier = self.seen.keys().find(|id| waits(id) && goes_before(id));
            assert_eq!(earlier, None, "{} overtook it", admit.sequence);
        }
    }

    /// Steps with prompts are as large as they may be at most, and prompts go on in each.
    fn check_rows(&self, plan: &Plan) {
        let prompts: u32 = plan.prefill.iter().map(|chunk| chunk.len).sum();
        let is_prompt = |slot: &&u32| plan.prefill.iter().any(|chunk| chunk.slot == **slot);
        let decoding = (plan.decode.len() - plan.decode.iter().filter(is_prompt).count()) as u32;
        let StepRows { sizes, alone, least, .. } = &self.rows;
        let most = sizes.last().map_or(0, |size| size.rows.saturating_sub(decoding));
        let most = if decoding == 0 { *alone } else { most };
        assert!(prompts <= most.max(*least), "{prompts} rows of prompts beside {decoding}, {:?}", self.rows);
        assert!(prompts + decoding <= self.scene.shape.max_batch_tokens, "a step holds {prompts} and {decoding} rows");
        assert!(prompts > 0 || self.scheduler.prompts == 0, "prompts stand still");
    }

    /// Owners of whom some wait for their first admission.
    fn waiting(&self, entered: &BTreeSet<u64>) -> BTreeSet<String> {
        self.seen.keys().filter(|id| self.lives(**id) && !entered.contains(id)).map(|id| self.owner(id)).collect()
    }

    fn owner(&self, id: &u64) -> String {
        self.seen[id].standing.owner.as_deref().unwrap_or_default().to_owned()
    }

    /// Who enters for the first time, one after another, and beside whom.
    fn note_entries(&mut self, plan: &Plan) {
        for admit in &plan.admit {
            let wait = self.waiting(&self.entered);
            self.always_wait.retain(|owner| wait.contains(owner));
            if !self.entered.insert(admit.sequence) {
                continue;
            }
            let mut inside = BTreeMap::new();
            for id in self.entered.iter().filter(|id| self.lives(**id)) {
                *inside.entry(self.owner(id)).or_default() += 1;
            }
            self.entries.push(Entry { sequence: admit.sequence, wait: self.always_wait.clone(), inside });
        }
    }

    fn bound_rows(&mut self) {
        let mut rows = || self.rng.below(20) as u32;
        let mut sizes: Vec<u32> = (0..rows() % 4).map(|_| rows()).collect();
        sizes.sort_unstable();
        let size = |rows| StepSize { rows, time: Duration::from_millis(u64::from(5 + rows)) };
        let sizes = sizes.into_iter().map(size).collect();
        self.rows = StepRows { sizes, decode: vec![size(1), size(8)], alone: rows(), least: 1 + rows() / 4 };
        self.scheduler.limit_step_rows(self.rows.clone());
    }

    fn submit(&mut self) {
        let sequence = self.seen.len() as u64 + 1;
        let prompt = 1 + self.rng.below(self.scene.max_prompt) as u32;
        let output = 1 + self.rng.below(self.scene.max_output) as u32;
        let stop = (0..self.rng.below(60)).map(|i| (i * 7) as u32).collect();
        let mut request = request(self.rng.below(1 << 50), prompt, output, stop);
        if self.rng.chance(self.scene.alike) && sequence > 1 {
            self.begin_alike(&mut request);
        }
        let standing = self.scene.standing(&mut self.rng);
        let seen = Seen { request: Some(request.clone()), standing: standing.clone(), ..Seen::default() };
        self.seen.insert(sequence, seen);
        assert_eq!(self.scheduler.submit(vec![request], &standing), Ok(sequence..sequence + 1));
    }

    /// The request begins as an earlier one does, with its answer behind it: all of that, or a part.
    fn begin_alike(&mut self, request: &mut SequenceRequest) {
        let earlier = &self.seen[&(1 + self.rng.below(self.seen.len() as u64))];
        let tokens = [&earlier.request.as_ref().unwrap().prompt[..], &earlier.tokens].concat();
        let shared = if self.rng.chance(500) { tokens.len() } else { self.rng.below(tokens.len() as u64) as usize };
        request.prompt.splice(0..0, tokens[..shared].iter().copied());
        request.prompt.truncate(self.scene.max_prompt as usize);
        if self.rng.chance(100) {
            request.cache_salt = "salt".into();
        }
    }

    fn lose_group(&mut self) {
        self.forget_group();
        let mut actions = Vec::new();
        assert_eq!(self.scheduler.group_lost(&mut actions), Blame::Nobody);
        assert!(actions.is_empty(), "{actions:?}");
    }

    /// Ends the group on purpose, at last when it has finished what it began.
    fn end_group(&mut self) {
        let [begin, cut_off] = self.scene.endings;
        if self.rng.chance(begin) {
            self.scheduler.group_ending();
        }
        if self.scheduler.is_ending && (self.scheduler.is_at_rest() || self.rng.chance(cut_off)) {
            self.forget_group();
            self.scheduler.group_ended();
        }
    }

    fn forget_group(&mut self) {
        self.up = false;
        self.plans.clear();
        self.outcomes.clear();
        self.slots.clear();
        if self.scene.is_reshaped {
            self.scene.reshape(&mut self.rng);
        }
        self.worker = FakeWorker::new(self.scene.shape.clone());
    }

    fn send_plans(&mut self) {
        while let Some(plan) = self.scheduler.next_plan() {
            self.scheduler.check().unwrap();
            let rows = plan.release.len() + plan.admit.len() + plan.prefill.len() + plan.decode.len();
            assert!(rows > 0, "a plan without a point: {plan:?}");
            self.check_rows(&plan);
            self.check_order(&plan);
            self.note_entries(&plan);
            let began = |admit: &Admit| self.admitted.contains(&admit.sequence);
            assert!(!self.scheduler.is_ending || plan.admit.iter().all(began), "a group that is to end begins nothing");
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
            let wait = self.waiting(&self.entered);
            self.always_wait.retain(|owner| wait.contains(owner));
        }
        if self.rng.chance(self.scene.bounds) {
            self.bound_rows();
        }
        if self.up && self.scene.endings[0] > 0 {
            self.end_group();
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
            assert_eq!(
                seen.cached_tokens.is_some(),
                !seen.tokens.is_empty(),
                "sequence {sequence}: told of its prompt"
            );
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
    let cut_short = |run: &Run| run.seen.values().any(|seen| seen.cancelled && !seen.tokens.is_empty());
    assert!(runs.iter().any(cut_short) || runs.len() == 1);
}

#[test]
fn a_lost_group_loses_no_token() {
    let runs = runs("loss", 300, |scene, rng| {
        scene.losses = 1 + rng.below(30);
        scene.cancels = rng.below(20);
    });
    assert!(runs.iter().any(|run| run.admitted.len() > run.seen.len()) || runs.len() == 1);
}

#[test]
fn a_group_that_is_ended_on_purpose_loses_no_token() {
    let runs = runs("ending", 300, |scene, rng| {
        scene.endings = [1 + rng.below(30), rng.below(2) * rng.below(200)];
        scene.losses = rng.below(5);
        scene.cancels = rng.below(20);
    });
    assert!(runs.iter().any(|run| run.admitted.len() > run.seen.len()) || runs.len() == 1);
}

#[test]
fn everything_at_once() {
    runs("all", 300, |scene, rng| {
        scene.losses = rng.below(15);
        scene.endings = [rng.below(15), rng.below(50)];
        scene.cancels = rng.below(60);
        scene.shape.kv_pages = (scene.max_prompt + scene.max_output).div_ceil(scene.shape.page_positions.into()) as u32;
    });
}

#[test]
fn bounds_of_steps_and_groups_of_other_shapes_change_no_token() {
    runs("bounds", 400, |scene, rng| {
        scene.losses = rng.below(30);
        scene.cancels = rng.below(60);
        scene.bounds = 20 + rng.below(300);
        scene.is_reshaped = true;
    });
}
