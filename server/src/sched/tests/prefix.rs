//! Sequences that begin alike: what is computed, what is shared, and that no token tells.

use looplane_proto::worker::v1::Plan;

use super::super::prefix::{SABOTAGE, Sabotage};
use super::{FakeWorker, Rng, Run, Scene, Shape, expected, request, runs};
use crate::sched::{Action, Event, Limits, Scheduler, SequenceRequest, Standing};

/// Many begin alike, in caches that hold them all and in such that hold hardly one.
fn alike(scene: &mut Scene, rng: &mut Rng) {
    scene.limits.prefix_cache = true;
    scene.alike = 500 + rng.below(500);
    scene.sequences = 10 + rng.below(40);
    (scene.max_prompt, scene.max_output) = (20 + rng.below(80), 1 + rng.below(12));
    scene.losses = rng.below(4);
    scene.cancels = rng.below(40);
    let largest = (scene.max_prompt + scene.max_output).div_ceil(scene.shape.page_positions.into());
    scene.shape.kv_pages = (largest + rng.below(4 * largest)) as u32;
}

#[test]
fn a_storm_of_sequences_that_begin_alike_gets_its_tokens() {
    let runs = runs("alike", 400, alike);
    let seen = || runs.iter().flat_map(|run| run.seen.values());
    let prompt = |seen: &super::Seen| seen.request.as_ref().unwrap().prompt.len() as u32;
    assert!(seen().count() > 10_000 || runs.len() == 1);
    assert!(seen().all(|seen| seen.cached_tokens.is_none_or(|tokens| tokens < prompt(seen))), "the last is computed");
    let prompts: u32 = seen().map(prompt).sum();
    let cached: u32 = seen().filter_map(|seen| seen.cached_tokens).sum();
    assert!(cached * 5 > prompts || runs.len() == 1, "only {cached} of {prompts} tokens were not computed");
}

fn sabotaged(sabotage: Sabotage) -> Vec<Run> {
    SABOTAGE.set(sabotage);
    runs("sabotage", 20, alike)
}

#[test]
#[should_panic(expected = "sequence ")]
fn a_key_that_forgets_a_token_is_noticed() {
    sabotaged(Sabotage::ForgetToken);
}

#[test]
#[should_panic(expected = "every earlier position was computed")]
fn a_tail_that_is_said_to_be_longer_is_noticed() {
    sabotaged(Sabotage::LongTail);
}

#[test]
#[should_panic]
fn a_page_that_is_found_before_it_is_full_is_noticed() {
    sabotaged(Sabotage::PublishEarly);
}

/// A group that computes each plan as it comes. Pages hold four positions.
struct Group {
    scheduler: Scheduler,
    worker: FakeWorker,
}

impl Group {
    fn new(kv_pages: u32, prefix_cache: bool) -> Self {
        let limits = Limits { max_slots: 8, max_batch_tokens: 32, plans_ahead: 1, prefix_cache, ..Limits::default() };
        let shape = Shape { max_slots: 8, max_batch_tokens: 32, kv_pages, page_positions: 4 };
        let mut scheduler = Scheduler::new(limits).unwrap();
        scheduler.apply(shape.ready(), &mut Vec::new());
        Self { scheduler, worker: FakeWorker::new(shape) }
    }

    fn submit(&mut self, request: &SequenceRequest) {
        self.scheduler.submit(vec![request.clone()], &Standing::default()).unwrap();
    }

    /// The next plan, which the worker has by then.
    fn plan(&mut self) -> Plan {
        let plan = self.scheduler.next_plan().expect("something to compute");
        self.worker.receive(plan.clone());
        plan
    }

    /// Runs a step; the tokens of its prompts that were cached, by sequence.
    fn step(&mut self) -> Vec<(u64, u32)> {
        let mut actions = Vec::new();
        self.scheduler.apply(Event::Outcome(self.worker.run(u64::MAX).expect("a step")), &mut actions);
        let prompt = |action| match action {
            Action::Prompt { sequence, cached_tokens, .. } => Some((sequence, cached_tokens)),
            _ => None,
        };
        actions.into_iter().filter_map(prompt).collect()
    }

    /// Runs until nothing is left; tokens of all prompts that were cached, by sequence.
    fn finish(&mut self) -> Vec<(u64, u32)> {
        let mut prompts = Vec::new();
        while !self.scheduler.is_idle() {
            if let Some(plan) = self.scheduler.next_plan() {
                self.worker.receive(plan);
            }
            prompts.extend(self.step());
        }
        prompts
    }
}

/// First position and length of each chunk.
fn chunks(plan: &Plan) -> Vec<(u32, u32)> {
    plan.prefill.iter().map(|chunk| (chunk.start, chunk.len)).collect()
}

fn after(request: &SequenceRequest, tokens: &[u32]) -> SequenceRequest {
    let prompt = [&request.prompt, &expected(request).0[..], tokens].concat();
    SequenceRequest { prompt, ..request.clone() }
}

#[test]
fn a_conversation_is_computed_once() {
    let mut group = Group::new(40, true);
    let first = request(1, 10, 8, vec![]);
    group.submit(&first);
    assert_eq!(group.finish(), [(1, 0)]);
    // 17 of 18 tokens were computed: the last one sampled was not. The first 16 fill pages, one is in the tail.
    let second = after(&first, &[3, 4, 5]);
    group.submit(&second);
    assert_eq!(chunks(&group.plan()), [(17, 4)]);
    assert_eq!(group.finish(), [(2, 17)]);
    group.submit(&second);
    assert_eq!(chunks(&group.plan()), [(20, 1)], "at least the last token is computed");
    // A whole number of pages: so is the last of them.
    let whole = SequenceRequest { prompt: second.prompt[..20].to_vec(), ..second.clone() };
    group.submit(&whole);
    assert_eq!(
        (group.finish(), chunks(&group.scheduler.next_plan().unwrap_or_default())),
        (vec![(3, 20), (4, 16)], vec![])
    );
    for other in [SequenceRequest { cache_salt: "s".into(), ..second.clone() }, request(2, 21, 8, vec![])] {
        group.submit(&other);
        assert_eq!(chunks(&group.plan()), [(0, 21)], "another salt, other tokens");
        group.finish();
    }
    let mut off = Group::new(40, false);
    for _ in 0..2 {
        off.submit(&first);
        assert_eq!(chunks(&off.plan()), [(0, 10)]);
        off.finish();
    }
    assert_eq!(off.scheduler.load().kv_pages_cached, 0);
}

#[test]
fn who_goes_on_with_a_tail_takes_it() {
    let mut group = Group::new(40, true);
    let first = request(1, 10, 10, vec![]);
    group.submit(&first);
    group.finish();
    // 19 tokens were computed, 16 of which fill pages.
    let load = group.scheduler.load();
    assert_eq!((load.kv_pages_used, load.kv_pages_cached), (0, 5));
    let second = after(&first, &[3, 4]);
    for other in [&second.prompt[..18], &[&second.prompt[..17], &[1, 2, 3][..]].concat()] {
        group.submit(&SequenceRequest { prompt: other.to_vec(), max_tokens: 1, ..first.clone() });
        let [(16, _)] = chunks(&group.plan())[..] else { panic!("the tail has more, or other tokens") };
        group.finish();
    }
    let salted = SequenceRequest { cache_salt: "s".into(), ..second.clone() };
    for (request, start) in [(&salted, 0), (&second, 19), (&second, 20)] {
        group.submit(request);
        assert_eq!(chunks(&group.plan())[0].0, start);
        group.finish();
    }
    // Of two that go on the same way one has it, and the other waits for the page that the first fills.
    let third = after(&second, &[7, 8, 9, 10, 11]);
    group.submit(&third);
    group.submit(&third);
    let computed = second.prompt.len() as u32 + 9;
    assert_eq!(chunks(&group.plan()), [(computed, third.prompt.len() as u32 - computed)]);
    group.finish();
    // Of a sequence whose prompt is given up in the middle.
    let long = request(9, 90, 1, vec![]);
    let part = |len: usize| SequenceRequest { prompt: long.prompt[..len].to_vec(), ..long.clone() };
    group.submit(&part(7));
    group.finish();
    group.submit(&long);
    assert_eq!(chunks(&group.plan()), [(7, 32)]);
    group.step();
    group.scheduler.apply(Event::Cancel { sequence: 10 }, &mut Vec::new());
    group.submit(&part(41));
    assert_eq!(chunks(&group.plan()), [(39, 2)]);
    group.finish();
}

#[test]
fn the_longest_tail_is_taken_and_none_is_kept_of_a_prompt_without_a_page() {
    let mut group = Group::new(12, true);
    let cached = |group: &Group| group.scheduler.load().kv_pages_cached;
    // Lengths of prompts that begin alike, where their chunks begin, and pages that are cached then.
    for (len, start, pages) in [(3, 0, 0), (7, 0, 2), (5, 4, 3), (8, 7, 3), (6, 5, 3), (7, 6, 3)] {
        group.submit(&request(1, len, 1, vec![]));
        assert_eq!(chunks(&group.plan()), [(start, len - start)], "{len} tokens");
        group.finish();
        assert_eq!(cached(&group), pages, "{len} tokens");
    }
    // All pages are needed.
    group.submit(&request(2, 48, 1, vec![]));
    group.finish();
    group.submit(&request(1, 7, 1, vec![]));
    assert_eq!(chunks(&group.plan()), [(0, 7)]);
}

#[test]
fn two_that_take_tails_of_one_page_compute_the_rest_once() {
    let mut group = Group::new(40, true);
    for len in [7, 5] {
        group.submit(&request(1, len, 1, vec![]));
        group.finish();
    }
    let long = request(1, 40, 2, vec![]);
    group.submit(&long);
    group.submit(&long);
    assert_eq!(chunks(&group.plan()), [(7, 29), (5, 3)], "up to the end of its page");
    group.step();
    assert_eq!(chunks(&group.plan()), [(36, 4), (36, 4)], "it took over those of the first but for the last");
    assert_eq!(group.finish(), [(3, 7), (4, 5 + 4 * 7)]);
}

#[test]
fn sequences_that_come_together_compute_their_beginning_once() {
    let mut group = Group::new(100, true);
    let first = request(1, 50, 4, vec![]);
    let other =
        after(&SequenceRequest { prompt: first.prompt[..40].to_vec(), max_tokens: 1, ..first.clone() }, &[1, 2]);
    [&first, &first, &other].into_iter().for_each(|request| group.submit(request));
    assert_eq!(chunks(&group.plan()), [(0, 32)], "the others wait for it");
    group.step();
    // 18 are left of the first; at position 40 the third goes a way of its own.
    assert_eq!(chunks(&group.plan()), [(32, 18)]);
    group.step();
    assert_eq!(chunks(&group.plan()), [(48, 2), (40, 3)]);
    assert_eq!(group.finish(), [(2, 48), (3, 40)]);
    let load = group.scheduler.load();
    assert_eq!(
        (load.kv_pages_used, load.kv_pages_cached),
        (0, 13 + 1 + 1),
        "13 pages of the first and second, and what is over of them, none twice; what is over of the third"
    );
}

/// One slot: whose beginning is cached goes first, but not before anybody for ever.
#[test]
fn what_is_cached_goes_first_within_a_bound() {
    let limits = Limits { max_slots: 1, max_batch_tokens: 32, plans_ahead: 1, ..Limits::default() };
    let shape = Shape { max_slots: 1, max_batch_tokens: 32, kv_pages: 20, page_positions: 4 };
    let mut group = Group { scheduler: Scheduler::new(limits).unwrap(), worker: FakeWorker::new(shape.clone()) };
    group.scheduler.apply(shape.ready(), &mut Vec::new());
    let (cached, other) = (request(1, 20, 1, vec![]), request(2, 20, 1, vec![]));
    group.submit(&cached);
    let prompts = group.finish();
    group.submit(&other);
    (0..12).for_each(|_| group.submit(&cached));
    let order: Vec<u64> = prompts.into_iter().chain(group.finish()).map(|(sequence, _)| sequence).collect();
    assert_eq!(order, [1, 3, 4, 5, 6, 7, 8, 9, 10, 2, 11, 12, 13, 14]);
}

#[test]
fn a_sequence_that_was_preempted_finds_its_own_pages() {
    // The two do not fit beside each other to their ends: the second gives way, and its pages stay until they are
    // taken.
    let mut group = Group::new(16, true);
    group.submit(&request(1, 16, 20, vec![]));
    group.submit(&request(2, 16, 20, vec![]));
    let mut starts = Vec::new();
    while !group.scheduler.is_idle() {
        if let Some(plan) = group.scheduler.next_plan() {
            starts.extend(plan.prefill.iter().map(|chunk| chunk.start));
            group.worker.receive(plan);
        }
        group.step();
    }
    assert_eq!(group.scheduler.load().preemptions, 1);
    assert!(starts.len() == 3 && starts[2] >= 16, "{starts:?}");
}

/// Equal answers are computed twice, since they are not known before; they are kept once.
#[test]
fn what_was_computed_twice_is_kept_once() {
    let mut group = Group::new(100, true);
    let request = request(1, 3, 30, vec![]);
    group.submit(&request);
    group.submit(&request);
    group.finish();
    let load = group.scheduler.load();
    assert_eq!((load.kv_pages_used, load.kv_pages_cached), (0, 8), "32 of 33 tokens");
}
