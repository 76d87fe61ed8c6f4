//! Each rule of the scheduler by itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use looplane_proto::worker::v1::Outcome;

use crate::sched::fake_worker::{FakeWorker, Shape, VOCAB, expected, request};
use crate::sched::request::TokenBounds;
use crate::sched::step_rows::Waiting;
use crate::sched::{
    Action, Blame, Event, Limits, LimitsError, Scheduler, SequenceRequest, Standing, StepRows, StepSize, SubmitError,
};

fn scheduler(limits: Limits, kv_pages: u32) -> Scheduler {
    let shape = shape(&limits, kv_pages);
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.apply(shape.ready(), &mut Vec::new());
    scheduler
}

fn shape(limits: &Limits, kv_pages: u32) -> Shape {
    let Limits { max_slots, max_batch_tokens, .. } = *limits;
    Shape { max_slots, max_batch_tokens, kv_pages, page_positions: 4 }
}

/// Submits one sequence; the seed of its request is `seed`.
fn submit(scheduler: &mut Scheduler, seed: u64, prompt: u32, output: u32) -> Result<u64, SubmitError> {
    scheduler.submit(vec![request(seed, prompt, output, vec![])], &Standing::default()).map(|numbers| numbers.start)
}

#[test]
fn bounds_of_the_queue_are_named() {
    let limits = Limits { max_waiting_requests: 3, max_waiting_tokens: 10, ..Limits::default() };
    let mut scheduler = scheduler(limits, 5);
    // 17 positions fit 5 pages of 4; the last token is never computed: 21 do not, 20 do.
    assert_eq!(submit(&mut scheduler, 1, 12, 9), Ok(1));
    assert_eq!(submit(&mut scheduler, 2, 12, 10), Err(SubmitError::TooLarge { needed: 6, available: 5 }));
    let full = SubmitError::QueueFull { waiting: 12, limit: 10, what: "prompt tokens".into() };
    assert_eq!(submit(&mut scheduler, 3, 1, 1), Err(full));
    scheduler.next_plan().unwrap();
    for number in 2..5 {
        assert_eq!(submit(&mut scheduler, 4, 1, 1), Ok(number));
    }
    let full = SubmitError::QueueFull { waiting: 3, limit: 3, what: "sequences".into() };
    assert_eq!(submit(&mut scheduler, 7, 1, 1), Err(full));
    scheduler.apply(Event::Cancel { sequence: 3 }, &mut Vec::new());
    assert_eq!(submit(&mut scheduler, 8, 1, 1), Ok(5));
}

#[test]
fn the_sequences_of_a_request_are_taken_together_or_not_at_all() {
    let limits = Limits { max_waiting_requests: 4, max_waiting_tokens: 20, ..Limits::default() };
    let mut scheduler = scheduler(limits, 100);
    let choices = |count: u64, prompt| (0..count).map(|seed| request(seed, prompt, 5, vec![])).collect::<Vec<_>>();
    let never = |asked, limit, what: &'static str, option: &'static str| {
        Err(SubmitError::NeverFits { asked, limit, what: what.into(), option: option.into() })
    };
    // However empty the queue is: not a matter of waiting.
    assert_eq!(
        scheduler.submit(choices(5, 1), &Standing::default()),
        never(5, 4, "sequences", "--max-queued-requests")
    );
    assert_eq!(
        scheduler.submit(choices(3, 7), &Standing::default()),
        never(21, 20, "prompt tokens", "--max-queued-tokens")
    );
    assert!(scheduler.is_idle() && scheduler.next_plan().is_none(), "nothing of them is left behind");
    assert_eq!(scheduler.submit(choices(3, 5), &Standing::default()), Ok(1..4));
    let full = SubmitError::QueueFull { waiting: 3, limit: 4, what: "sequences".into() };
    assert_eq!(scheduler.submit(choices(2, 1), &Standing::default()), Err(full));
    assert_eq!(scheduler.sequences(), 3);
    // A single prompt is bounded by the context alone.
    scheduler.next_plan().unwrap();
    assert_eq!(scheduler.submit(choices(1, 30), &Standing::default()), Ok(4..5));
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
            // The server gets the report of a step while the next one runs.
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

/// Steps the group until the scheduler has nothing to send and the group nothing to do; false if it was killed by a
/// step that computed one of `poison`.
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

/// Whose tokens run out, at the first or in the middle, ends as a contradiction of its own, beside one that goes on.
#[test]
fn a_request_that_no_token_may_follow_ends_and_frees_what_it_had() {
    let shape = Shape { max_slots: 4, max_batch_tokens: 16, kv_pages: 40, page_positions: 4 };
    let limits = Limits { max_slots: 4, max_batch_tokens: 16, ..Limits::default() };
    let mut scheduler = scheduler(limits, 40);
    let mut worker = FakeWorker::new(shape);
    let (other, _) = expected(&request(3, 9, 30, vec![]));
    let bounded = |seed, tokens: &[u32]| {
        let bounds = TokenBounds { allowed: tokens.to_vec(), ..TokenBounds::default() };
        SequenceRequest { token_bounds: Arc::new(bounds), ..request(seed, 9, 30, vec![]) }
    };
    let (second, _) = expected(&request(2, 9, 30, vec![]));
    assert!(!second[..3].contains(&second[3]), "the fourth token is another");
    for request in [bounded(1, &[VOCAB as u32]), bounded(2, &second[..3]), request(3, 9, 30, vec![])] {
        scheduler.submit(vec![request], &Standing::default()).unwrap();
    }
    let mut actions = Vec::new();
    assert!(steps(&mut scheduler, &mut worker, &[], &mut actions));
    let tokens_of =
        |of| actions.iter().filter(|a| matches!(a, Action::Token { sequence, .. } if *sequence == of)).count();
    assert_eq!([1, 2, 3].map(tokens_of), [0, 3, other.len()], "{actions:?}");
    let ends = |of| actions.iter().filter(|a| **a == Action::Contradiction { sequence: of }).count();
    assert_eq!([1, 2, 3].map(ends), [1, 1, 0]);
    assert!(!actions.iter().any(|action| matches!(action, Action::Failed { .. } | Action::Fault(_))), "{actions:?}");
    assert_eq!(scheduler.sequences(), 0);
    scheduler.check().unwrap();
}

#[test]
fn only_the_culprit_of_a_crowd_fails() {
    let shape = Shape { max_slots: 32, max_batch_tokens: 64, kv_pages: 200, page_positions: 4 };
    let limits = Limits { max_slots: 32, max_batch_tokens: 64, ..Limits::default() };
    let mut scheduler = scheduler(limits, 200);
    let requests: Vec<SequenceRequest> = (1..22).map(|seed| request(seed, 5, 20, vec![])).collect();
    for request in &requests {
        scheduler.submit(vec![request.clone()], &Standing::default()).unwrap();
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
        scheduler.apply(shape.ready(), &mut actions);
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
    // Nobody waits for the whole of another's answer.
    let first_end = actions.iter().position(|action| matches!(action, Action::Finished { .. })).unwrap();
    let mut begun: Vec<u64> = actions[..first_end]
        .iter()
        .filter_map(|action| match action {
            Action::Token { sequence, .. } => Some(*sequence),
            _ => None,
        })
        .collect();
    begun.sort_unstable();
    begun.dedup();
    assert_eq!(begun.len(), 20);
    for (sequence, request) in (1..).zip(&requests).filter(|(sequence, _)| *sequence != culprit) {
        let tokens = actions.iter().filter_map(|action| match action {
            Action::Token { sequence: of, token } if *of == sequence => Some(token.id),
            _ => None,
        });
        assert_eq!(tokens.collect::<Vec<_>>(), expected(request).0, "sequence {sequence}");
    }
    assert!(scheduler.is_idle());
}

/// A scheduler whose group is about to compute suspects 1 and 2, the latter first.
fn before_trials(requests: [SequenceRequest; 2]) -> (Scheduler, FakeWorker) {
    let limits = Limits { max_slots: 2, max_batch_tokens: 64, ..Limits::default() };
    let shape = shape(&limits, 40);
    let mut scheduler = scheduler(limits, 40);
    for request in requests {
        scheduler.submit(vec![request], &Standing::default()).unwrap();
    }
    for _ in 0..2 {
        scheduler.next_plan().unwrap();
        assert_eq!(scheduler.group_lost(&mut Vec::new()), Blame::Nobody);
        scheduler.apply(shape.ready(), &mut Vec::new());
    }
    let mut worker = FakeWorker::new(shape);
    // What the group proves itself with.
    loop {
        while let Some(plan) = scheduler.next_plan() {
            if plan.admit.iter().any(|admit| admit.sequence == 2) {
                worker.receive(plan);
                return (scheduler, worker);
            }
            worker.receive(plan);
        }
        if let Some(outcome) = worker.run(u64::MAX) {
            scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
        }
    }
}

#[test]
fn who_follows_a_suspect_that_left_is_not_blamed_for_its_steps() {
    let (mut scheduler, _worker) = before_trials([request(1, 3, 5, vec![]), request(2, 3, 5, vec![])]);
    // Its client leaves while the plan that computes it is under way.
    scheduler.apply(Event::Cancel { sequence: 2 }, &mut Vec::new());
    let plan = scheduler.next_plan().unwrap();
    assert_eq!((plan.release.len(), plan.admit.len()), (1, 0), "nobody enters before its steps are over");
    let mut actions = Vec::new();
    assert_eq!(scheduler.group_lost(&mut actions), Blame::Nobody);
    assert!(actions.is_empty() && scheduler.sequences() == 1, "{actions:?}");
}

#[test]
fn copies_of_a_culprit_fail_with_it() {
    // Another seed makes no other request.
    let mut copy = request(1, 3, 5, vec![]);
    copy.sampling.seed = 9;
    let (mut scheduler, _worker) = before_trials([request(1, 3, 5, vec![]), copy]);
    let mut actions = Vec::new();
    assert!(matches!(scheduler.group_lost(&mut actions), Blame::Sequence { sequence: 2, losses: 3, .. }));
    let failed = actions.iter().map(|action| matches!(action, Action::Failed { .. })).collect::<Vec<_>>();
    assert_eq!((failed, scheduler.sequences()), (vec![true, true], 0));
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
        scheduler.apply(shape(&Limits::default(), 10).ready(), &mut actions);
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
        let tokens = actions.iter().filter(|action| matches!(action, Action::Token { .. })).count();
        assert_eq!((tokens, scheduler.group_lost(&mut actions)), (5, Blame::Nobody));
        scheduler.apply(shape.ready(), &mut actions);
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
    // Half of the rows for the short ones, the rest for the oldest.
    let rows: Vec<(u32, u32)> = plan.prefill.iter().map(|chunk| (chunk.slot, chunk.len)).collect();
    assert_eq!(rows, [(0, 8), (2, 3), (3, 1), (4, 4)]);
    worker.receive(plan);
    let outcome = worker.run(u64::MAX).unwrap();
    assert_eq!(outcome.tokens.iter().map(|token| token.sequence).collect::<Vec<_>>(), short);
    scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
    // Then the oldest has all of them.
    let rows: Vec<(u32, u32)> = scheduler.next_plan().unwrap().prefill.iter().map(|c| (c.slot, c.len)).collect();
    assert_eq!((rows, long), (vec![(0, 16)], [1, 2]));
}

/// Rows of prompts by slot in the next plan, which nothing precedes.
fn prompt_rows(scheduler: &mut Scheduler) -> Vec<(u32, u32)> {
    scheduler.next_plan().unwrap().prefill.iter().map(|chunk| (chunk.slot, chunk.len)).collect()
}

#[test]
fn no_prompt_waits_behind_the_whole_of_one_that_is_much_longer() {
    let limits = Limits { max_slots: 8, max_batch_tokens: 16, plans_ahead: 9, ..Limits::default() };
    let mut scheduler = scheduler(limits, 200);
    // The second does not end within half of a step's rows, the third is not much shorter than the first.
    for (seed, prompt) in [60, 20, 40].into_iter().enumerate() {
        submit(&mut scheduler, seed as u64, prompt, 2).unwrap();
    }
    assert_eq!(prompt_rows(&mut scheduler), [(0, 8), (1, 8)]);
    assert_eq!(prompt_rows(&mut scheduler), [(0, 8), (1, 8)]);
    assert_eq!(prompt_rows(&mut scheduler), [(0, 12), (1, 4)]);
    assert_eq!(prompt_rows(&mut scheduler)[..1], [(0, 15)], "one decodes by now");
}

#[test]
fn a_stream_of_short_prompts_slows_a_long_one_by_half_at_most() {
    let limits = Limits { max_slots: 32, max_batch_tokens: 64, ..Limits::default() };
    let shape = shape(&limits, 4000);
    let mut scheduler = scheduler(limits, 4000);
    scheduler.limit_step_rows(StepRows { sizes: sizes([(16, 10), (40, 12)]), decode: vec![], alone: 48, least: 8 });
    let mut worker = FakeWorker::new(shape);
    // Some decode all the time, and as many short ones come as may.
    let decoding: Vec<u64> = (0..4).map(|seed| submit(&mut scheduler, seed, 1, 900).unwrap()).collect();
    let long = submit(&mut scheduler, 5, 1600, 2).unwrap();
    let mut steps = 0;
    loop {
        while scheduler.load().running + scheduler.load().waiting < 30 {
            submit(&mut scheduler, 100 + steps, 24, 1).unwrap();
        }
        while let Some(plan) = scheduler.next_plan() {
            worker.receive(plan);
        }
        let outcome = worker.run(u64::MAX).unwrap();
        let all_decode = decoding.iter().all(|id| outcome.tokens.iter().any(|token| token.sequence == *id));
        assert!(steps == 0 || all_decode, "step {steps}");
        let is_done = outcome.tokens.iter().any(|token| token.sequence == long);
        scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
        steps += 1;
        if is_done {
            break;
        }
    }
    // Half of 36 rows of prompts in each.
    assert!((1600 / 36..=1600 / 18 + 4).contains(&steps), "{steps} steps");
}

/// Rows and milliseconds of steps.
fn sizes<const N: usize>(sizes: [(u32, u64); N]) -> Vec<StepSize> {
    sizes.map(|(rows, ms)| StepSize { rows, time: Duration::from_millis(ms) }).into()
}

#[test]
fn the_owner_bounds_the_rows_of_steps_with_prompts() {
    let limits = Limits { max_slots: 8, max_batch_tokens: 128, plans_ahead: 99, ..Limits::default() };
    let mut scheduler = scheduler(limits, 600);
    let rows = StepRows { sizes: sizes([(30, 10)]), decode: vec![], alone: 40, least: 3 };
    scheduler.limit_step_rows(rows.clone());
    submit(&mut scheduler, 1, 40, 9).unwrap();
    assert_eq!(prompt_rows(&mut scheduler), [(0, 40)], "nobody decodes");
    submit(&mut scheduler, 2, 348, 9).unwrap();
    (0..11).for_each(|_| assert_eq!(prompt_rows(&mut scheduler), [(1, 29)]));
    submit(&mut scheduler, 3, 240, 9).unwrap();
    assert_eq!(prompt_rows(&mut scheduler), [(1, 29)]);
    scheduler.limit_step_rows(StepRows { sizes: sizes([(1, 10)]), ..rows.clone() });
    assert_eq!(prompt_rows(&mut scheduler), [(2, 2)], "prompts go on, too");
    scheduler.limit_step_rows(StepRows { sizes: vec![], ..rows });
    assert_eq!(prompt_rows(&mut scheduler), [(2, 2)]);
    scheduler.limit_step_rows(StepRows::default());
    assert_eq!(prompt_rows(&mut scheduler), [(2, 126)], "no step has more than the group can take");
}

#[test]
fn steps_are_as_large_as_those_who_wait_need() {
    // An 8B model on an H200.
    let sizes = [(64, 5), (128, 7), (256, 9), (384, 13), (512, 14), (768, 23), (1024, 25), (1536, 37), (2048, 49)];
    let sizes = self::sizes(sizes);
    let rows = StepRows { sizes, decode: vec![], alone: 2048, least: 64 };
    for (decoding, waiting, wanted, why) in [
        (0, 9000, 2048, "nobody decodes"),
        (1, 200, 64, "is computed within 20 ms"),
        (1, 300, 128, "64 rows would bring less than 0.4 of the best rate"),
        (14, 6000, 256, "are computed within 250 ms"),
        (14, 8000, 512, "are not, but in steps of 512; 384 take nearly as long"),
        (14, 9000, 1024, "nor in these; larger ones bring hardly more rows a second"),
        (14, 60_000, 1024, "whatever waits"),
        (60, 200, 256, "of 128 rows a second fewer are of prompts now"),
        (230, 100, 512, "half of 384 are not theirs"),
        (230, 60_000, 1536, "rows that decode cost less in larger steps"),
        (1100, 60_000, 2048, "half of no step is for prompts"),
        (2040, 60_000, 2072, "prompts go on, too"),
    ] {
        assert_eq!(
            rows.of_prompts(decoding, Waiting { prompts: 1, tokens: waiting }, 8.0),
            wanted - decoding,
            "{decoding} decode, {waiting} wait: {why}"
        );
    }
    // A bound on the time of steps leaves the smallest.
    let rows = StepRows { sizes: self::sizes([(64, 5)]), ..rows };
    for (decoding, wanted, why) in [(14, 50, "64 rows in all"), (40, 32, "half of one is for prompts at least")] {
        let waiting = Waiting { prompts: 1, tokens: 9000 };
        assert_eq!(rows.of_prompts(decoding, waiting, 8.0), wanted, "{decoding} decode: {why}");
    }
}

#[test]
fn steps_with_prompts_are_so_large_that_others_are_many_and_quick() {
    // An 8B model on four H200, whose steps with prompts take long even if these are short.
    let sizes =
        [(64, 23), (128, 46), (256, 54), (384, 71), (512, 78), (768, 106), (1024, 128), (1536, 181), (2048, 217)];
    let decode = [(1, 10), (8, 12), (32, 18), (64, 23), (128, 46)];
    let rows = StepRows { sizes: self::sizes(sizes), decode: self::sizes(decode), alone: 2048, least: 64 };
    for (decoding, per_token, wanted, why) in [
        (60, 0.0, 512, "prompts are rare: a step of 512 rows is one of few"),
        (60, 0.5, 512, "still"),
        (60, 8.0, 2048, "1024 rows take 0.59 of the time, but tokens come more slowly by a thirteenth"),
        (30, 8.0, 2048, "still by a fourteenth"),
        (14, 8.0, 512, "by a tenth, which is not worth steps of 22 ms; nor steps of 13 by a twentieth"),
        (30, 1.0, 512, "by a twenty-fifth"),
        (60, 100.0, 2048, "nearly all that is computed is prompts"),
    ] {
        let found = rows.of_prompts(decoding, Waiting { prompts: 1, tokens: 100 }, per_token) + decoding;
        assert_eq!(found, wanted, "{decoding} decode, {per_token} rows of prompts a token: {why}");
    }
    let unknown = StepRows { decode: vec![], ..rows };
    assert_eq!(
        unknown.of_prompts(60, Waiting { prompts: 1, tokens: 100 }, 8.0),
        512 - 60,
        "what other steps take is not known"
    );
}

/// Where all steps of a size have prompts, these keep those who wait from decoding.
#[test]
fn steps_are_larger_where_more_wait_than_short_ones_leave_time_for() {
    // An 8B model on an H200.
    let sizes = [(64, 6), (128, 7), (256, 10), (384, 13), (512, 16), (768, 23), (1024, 29), (1536, 42), (2048, 55)];
    let decode = self::sizes([(8, 4), (64, 5), (128, 7), (256, 12)]);
    let rows = StepRows { sizes: self::sizes(sizes), decode, alone: 2048, least: 64 };
    for (decoding, per_token, prompts, wanted, why) in [
        (30, 8.0, 1, 256, "by 256 rows all steps have prompts, but only one waits"),
        (30, 8.0, 4, 384, "by 384 not all have any, so that nobody waits for long"),
        (60, 8.0, 4, 512, "four are few beside 60"),
        (60, 8.0, 16, 768, "by 512 all steps have prompts"),
        (60, 8.0, 256, 768, "by 768 not all do, however many wait"),
        (60, 4.0, 256, 384, "nor by 384, where prompts are half as long"),
    ] {
        let found = rows.of_prompts(decoding, Waiting { prompts, tokens: 100 }, per_token) + decoding;
        assert_eq!(found, wanted, "{decoding} decode, {prompts} wait, {per_token} rows of prompts a token: {why}");
    }
}

#[test]
fn nobody_who_goes_on_is_interrupted_for_a_slot_that_is_free() {
    let limits = Limits { max_slots: 3, steps_per_plan: 8, ..Limits::default() };
    let shape = shape(&limits, 100);
    let mut scheduler = scheduler(limits, 100);
    let mut worker = FakeWorker::new(shape);
    for output in [3, 20] {
        submit(&mut scheduler, 1, 1, output).unwrap();
    }
    // Until `steps` steps were run; the plan that is sent then, if there is one.
    let mut run = |scheduler: &mut Scheduler, steps: u32| {
        let mut plans = Vec::new();
        for _ in 0..steps {
            while let Some(plan) = scheduler.next_plan() {
                plans.push((plan.admit.len(), plan.release.clone(), plan.decode.len()));
                worker.receive(plan);
            }
            scheduler.apply(Event::Outcome(worker.run(u64::MAX).unwrap()), &mut Vec::new());
        }
        plans
    };
    assert_eq!(run(&mut scheduler, 4), [(2, vec![], 2)], "the first ended a step before");
    assert_eq!(run(&mut scheduler, 2), [(0, vec![0], 1)], "half of the plan is left");
    submit(&mut scheduler, 3, 1, 1).unwrap();
    assert_eq!(run(&mut scheduler, 1), [(1, vec![], 2)]);
    submit(&mut scheduler, 4, 1, 1).unwrap();
    assert_eq!(run(&mut scheduler, 1), [(1, vec![0], 2)], "with the next that comes");
    let last = run(&mut scheduler, 12);
    assert!(last[..last.len() - 1].iter().all(|(admit, ..)| *admit == 0), "{last:?}");
    assert_eq!(scheduler.next_plan().map(|plan| plan.release), Some(vec![1]), "nobody goes on");
}

#[test]
fn who_does_not_read_leaves_its_slot_to_those_who_wait() {
    let shape = Shape { max_slots: 2, max_batch_tokens: 4, kv_pages: 40, page_positions: 4 };
    let limits = Limits { max_slots: 2, max_batch_tokens: 4, steps_per_plan: 4, ..Limits::default() };
    let mut scheduler = scheduler(limits, 40);
    let mut worker = FakeWorker::new(shape);
    let requests: Vec<SequenceRequest> = (1..4).map(|seed| request(seed, 3, 40, vec![])).collect();
    let behind = [0, 1].map(|i| scheduler.submit(vec![requests[i].clone()], &Standing::default()).unwrap().start);
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
    let reads = scheduler.submit(vec![requests[2].clone()], &Standing::default()).unwrap().start;
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
    scheduler.apply(shape(&Limits::default(), 5).ready(), &mut actions);
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
