//! Shares of owners, and how far priority goes: rules, and random runs held to the bound that `shares` states.

use std::collections::BTreeMap;

use super::{Run, Scene, Seen, Shape, runs};
use crate::sched::fake_worker::{FakeWorker, Rng, mix, request};
use crate::sched::{Event, Limits, PRIORITY_TOKENS, Scheduler, Standing, SubmitError};

fn standing(owner: &str, weight: u32, priority: i32) -> Standing {
    Standing { priority, owner: Some(owner.into()), weight }
}

/// Who would be admitted, one after another, without end: sequences of one token of prompt and one of answer.
struct Line {
    scheduler: Scheduler,
    worker: FakeWorker,
    /// Names of those who wait or run.
    names: BTreeMap<u64, String>,
    admitted: Vec<String>,
}

impl Line {
    /// Of so many slots, and with a queue of so many.
    fn new(max_slots: u32, max_waiting_requests: u64) -> Self {
        let shape = Shape { max_slots, max_batch_tokens: 512, kv_pages: 100_000, page_positions: 4 };
        let limits = Limits {
            max_slots,
            max_batch_tokens: 512,
            max_waiting_requests,
            max_waiting_tokens: 10_000_000,
            ..Limits::default()
        };
        let mut scheduler = Scheduler::new(limits).unwrap();
        // Random runs check the invariants; crowds take their time.
        scheduler.leave_unchecked();
        scheduler.apply(shape.ready(), &mut Vec::new());
        Self { scheduler, worker: FakeWorker::new(shape), names: BTreeMap::new(), admitted: Vec::new() }
    }

    fn submit(&mut self, name: &str, standing: &Standing, prompt: u32, output: u32) -> Result<u64, SubmitError> {
        let request = request(self.names.len() as u64, prompt, output, vec![]);
        let id = self.scheduler.submit(vec![request], standing)?.start;
        self.names.insert(id, name.into());
        Ok(id)
    }

    fn step(&mut self) {
        while let Some(plan) = self.scheduler.next_plan() {
            self.admitted.extend(plan.admit.iter().map(|admit| self.names[&admit.sequence].clone()));
            self.worker.receive(plan);
        }
        if let Some(outcome) = self.worker.run(u64::MAX) {
            self.scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
        }
    }

    /// Runs until so many were admitted.
    fn run(&mut self, admitted: usize) -> Vec<String> {
        while self.admitted.len() < admitted {
            self.step();
        }
        std::mem::take(&mut self.admitted)
    }

    fn idle(&mut self) -> Vec<String> {
        while !self.scheduler.is_idle() {
            self.step();
        }
        std::mem::take(&mut self.admitted)
    }
}

#[test]
fn a_key_that_floods_the_queue_does_not_delay_another() {
    let mut line = Line::new(1, 2000);
    let (flood, polite) = (standing("flood", 1, 0), standing("polite", 1, 0));
    for _ in 0..1000 {
        line.submit("flood", &flood, 8, 8).unwrap();
    }
    line.run(20);
    for round in 0..50 {
        // As it gets its answer it asks again.
        line.submit("polite", &polite, 8, 8).unwrap();
        let admitted = line.run(1 + usize::from(round > 0));
        let at = admitted.iter().position(|name| name == "polite");
        assert!(at.is_some_and(|at| at <= 1), "round {round}: {admitted:?}");
    }
    assert!(line.idle().iter().filter(|name| *name == "flood").count() > 900);
}

#[test]
fn weights_divide_what_is_computed() {
    let mut line = Line::new(4, 4000);
    let owners = [("one", 1, 10, 10), ("two", 2, 5, 35), ("seven", 7, 30, 10)];
    for (name, weight, prompt, output) in owners {
        for _ in 0..1000 {
            line.submit(name, &standing(name, weight, 0), prompt, output).unwrap();
        }
    }
    let admitted = line.run(800);
    let tokens = |name: &str, each: u32| admitted.iter().filter(|of| *of == name).count() as u32 * each;
    let (one, two, seven) = (tokens("one", 20), tokens("two", 40), tokens("seven", 40));
    let is_near = |tokens: u32, weight: u32| tokens.abs_diff(weight * one) <= 40 * 8 * (1 + weight);
    assert!(one > 1000 && is_near(two, 2) && is_near(seven, 7), "{one} {two} {seven}");
}

#[test]
fn long_answers_cost_what_they_are_not_what_was_expected() {
    let mut line = Line::new(2, 4000);
    let (short, long) = (standing("short", 1, 0), standing("long", 1, 0));
    for _ in 0..1000 {
        line.submit("short", &short, 10, 10).unwrap();
        line.submit("long", &long, 10, 190).unwrap();
    }
    let admitted = line.run(1100);
    let longs = admitted.iter().filter(|name| *name == "long").count();
    assert!((95..=105).contains(&longs), "a tenth of the requests, with half of the tokens: {longs}");
}

#[test]
fn who_rests_saves_nothing_up() {
    let mut line = Line::new(1, 4000);
    let (busy, idle) = (standing("busy", 1, 0), standing("idle", 1, 0));
    line.submit("idle", &idle, 8, 8).unwrap();
    for _ in 0..500 {
        line.submit("busy", &busy, 8, 8).unwrap();
    }
    line.run(300);
    for _ in 0..100 {
        line.submit("idle", &idle, 8, 8).unwrap();
    }
    let admitted = line.run(40);
    let idles = admitted.iter().filter(|name| *name == "idle").count();
    assert!((19..=22).contains(&idles), "half from then on, not all: {admitted:?}");
    // Nor does anybody have to pay for having had a server for itself.
    line.idle();
    assert_eq!(line.scheduler.sequences(), 0);
    for name in ["busy", "idle", "busy", "idle"] {
        line.submit(name, &standing(name, 1, 0), 8, 8).unwrap();
    }
    assert_eq!(line.idle(), ["busy", "idle", "busy", "idle"]);
}

#[test]
fn priority_goes_before_arrival_and_ages() {
    let mut line = Line::new(1, 4000);
    let of = |priority| Standing { priority, ..Standing::default() };
    for (name, priority) in [("first", 0), ("late", 1), ("soon", -1), ("second", 0), ("soon, too", -1)] {
        line.submit(name, &of(priority), 100, 1).unwrap();
    }
    assert_eq!(line.run(5), ["soon", "soon, too", "first", "second", "late"]);
    // As long as others keep coming, it waits for a step's worth of their tokens, and not for more.
    line.idle();
    line.submit("runs", &of(0), 100, 900).unwrap();
    line.run(1);
    line.submit("late", &of(1), 100, 1).unwrap();
    let mut before = 0;
    loop {
        line.submit("urgent", &of(0), 999, 1).unwrap();
        if line.run(1) == ["late"] {
            break;
        }
        before += 1;
    }
    let bound = PRIORITY_TOKENS / 1000;
    assert!((bound - 2..=bound + 2).contains(&before), "{before} went before it");
}

#[test]
fn priority_goes_between_owners_as_far_as_a_step_is_worth() {
    let mut line = Line::new(1, 4000);
    for _ in 0..200 {
        line.submit("soon", &standing("a", 1, 0), 999, 1).unwrap();
        line.submit("late", &standing("b", 1, 1), 999, 1).unwrap();
    }
    let admitted = line.run(200);
    let first = admitted.iter().position(|name| name == "late").unwrap() as u64;
    let bound = PRIORITY_TOKENS / 1000;
    assert!((bound - 2..=bound + 2).contains(&first), "{first} went before the first");
    let lates = admitted.iter().filter(|name| *name == "late").count();
    assert!((60..=70).contains(&lates), "and then both in turn: {lates}");
}

#[test]
fn those_overtaken_by_their_own_do_not_hold_an_urgent_one_back() {
    let mut line = Line::new(1, 4000);
    line.submit("other", &standing("b", 1, 0), 100, 1).unwrap();
    line.submit("late", &standing("a", 1, 3), 100, 1).unwrap();
    line.submit("soon", &standing("a", 1, -1), 100, 1).unwrap();
    assert_eq!(line.run(3), ["soon", "other", "late"]);
}

#[test]
fn one_key_leaves_room_in_the_queue_and_without_keys_it_is_filled() {
    let fill = |owner: &dyn Fn(u32) -> Standing, keys: u32| -> Vec<u64> {
        let mut line = Line::new(1, 64);
        let count = |key| (0..100).take_while(|_| line.submit("", &owner(key), 1, 1).is_ok()).count() as u64;
        (0..keys).map(count).collect()
    };
    assert_eq!(fill(&|_| Standing::default(), 2), [64, 0]);
    // Three quarters of what is left, each.
    assert_eq!(fill(&|key| standing(&key.to_string(), 1, 0), 5), [48, 12, 3, 1, 0]);
    let mut line = Line::new(1, 64);
    let flood = standing("flood", 1, 0);
    let refused = (0..100).find_map(|_| line.submit("", &flood, 1, 1).err()).unwrap();
    assert_eq!(refused, SubmitError::QueueFull { waiting: 48, limit: 48, what: "sequences of this API key".into() });
    assert!(refused.to_string().ends_with("48 of at most 48 sequences of this API key wait"), "{refused}");
    // A place that gets free is not the flood's if others wait.
    for _ in 0..12 {
        line.submit("", &standing("other", 1, 0), 1, 1).unwrap();
    }
    line.scheduler.apply(Event::Cancel { sequence: 1 }, &mut Vec::new());
    assert!(line.submit("", &flood, 1, 1).is_err());
    line.submit("", &standing("third", 1, 0), 1, 1).unwrap();
}

#[test]
fn tokens_of_the_queue_are_left_to_others_too() {
    let limits = Limits { max_waiting_tokens: 400, ..Limits::default() };
    let mut scheduler = Scheduler::new(limits).unwrap();
    let shape = Shape { max_slots: 64, max_batch_tokens: 512, kv_pages: 100, page_positions: 16 };
    scheduler.apply(shape.ready(), &mut Vec::new());
    let mut submit =
        |owner: &str, prompt| scheduler.submit(vec![request(1, prompt, 1, vec![])], &standing(owner, 1, 0));
    // A single prompt is bounded by the context alone.
    submit("a", 390).unwrap();
    let full = SubmitError::QueueFull { waiting: 390, limit: 30, what: "prompt tokens of this API key".into() };
    assert_eq!(submit("a", 5), Err(full));
    submit("b", 5).unwrap();
    let full = SubmitError::QueueFull { waiting: 395, limit: 400, what: "prompt tokens".into() };
    assert_eq!(submit("c", 6), Err(full));
}

/// How far one was ahead of another each time it entered, while both waited since the run began, and the bound.
fn lead(run: &Run, a: &Owner, b: &Owner) -> Vec<(f64, f64)> {
    let largest = (run.scene.max_prompt + run.scene.max_output) as f64;
    let tokens = |seen: &Seen| (seen.request.as_ref().unwrap().prompt.len() + seen.tokens.len()) as f64;
    let (mut had, mut leads) = ([0.0, 0.0], Vec::new());
    for entry in &run.entries {
        let seen = &run.seen[&entry.sequence];
        let of = |owner: &Owner| seen.standing.owner.as_deref() == Some(&*owner.name);
        for (owner, had) in [a, b].into_iter().zip(&mut had) {
            *had += if of(owner) { tokens(seen) / owner.weight } else { 0.0 };
        }
        if ![a, b].iter().all(|owner| entry.wait.contains(&owner.name)) {
            break;
        }
        if of(a) {
            let inside = |owner: &Owner| entry.inside.get(&owner.name).copied().unwrap_or(0) as f64;
            leads.push((had[0] - had[1], inside(a) * largest / a.weight + inside(b) * largest / b.weight));
        }
    }
    leads
}

struct Owner {
    name: String,
    weight: f64,
}

#[test]
fn nobody_is_further_ahead_than_the_bound() {
    let change = |scene: &mut Scene, rng: &mut Rng| {
        scene.limits.prefix_cache = false;
        scene.owners = (0..2 + rng.below(3)).map(|_| 1 + rng.below(4) as u32).collect();
        scene.priorities = 1;
        scene.sequences = 40 + rng.below(80);
        scene.at_once = scene.sequences / 2;
        scene.losses = rng.below(12);
        scene.cancels = rng.below(60);
        scene.is_reshaped = rng.chance(300);
    };
    let (mut compared, mut narrowest) = (0, f64::INFINITY);
    let all = runs("fair", 400, change);
    for (run, seed) in all.iter().zip(0..) {
        let owner = |at: usize| Owner { name: format!("key-{at}"), weight: run.scene.owners[at].into() };
        for a in 0..run.scene.owners.len() {
            for b in (0..run.scene.owners.len()).filter(|b| *b != a) {
                for (lead, bound) in lead(run, &owner(a), &owner(b)) {
                    assert!(lead <= bound + 0.01, "seed {seed}: key-{a} is {lead} ahead of key-{b}, over {bound}");
                    narrowest = narrowest.min(bound - lead);
                    compared += 1;
                }
            }
        }
    }
    println!("{compared} compared; the narrowest was {narrowest} tokens below");
    assert!(compared > 10_000 || all.len() == 1, "only {compared} compared");
}

#[test]
fn storms_of_all_owners_and_priorities_end() {
    runs("shares", 300, |scene, rng| {
        scene.owners = (0..rng.below(5)).map(|_| 1 + rng.below(1000) as u32).collect();
        scene.priorities = 1 + rng.below(201);
        scene.losses = rng.below(15);
        scene.cancels = rng.below(100);
        scene.at_once = rng.below(20);
        scene.shape.kv_pages = (scene.max_prompt + scene.max_output).div_ceil(scene.shape.page_positions.into()) as u32;
    });
}

#[test]
fn who_owns_a_sequence_changes_none_of_its_tokens() {
    // Each run checks all tokens against what the requests alone make of them: here the same with other owners.
    for seed in 0..40 {
        let mut rng = Rng(mix(seed));
        let scene = Scene::random(&mut rng);
        for owners in [vec![], vec![1, 1], vec![3, 1, 7]] {
            Run::new(seed, Scene { owners, ..scene.clone() }).finish();
        }
    }
}
