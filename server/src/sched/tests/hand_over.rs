//! Sequences that one scheduler leaves to another.

use crate::sched::fake_worker::{FakeWorker, Shape, expected, request};
use crate::sched::{Action, Blame, Event, FinishReason, Handed, Limits, Scheduler, SequenceRequest, Standing};

const SHAPE: Shape = Shape { max_slots: 3, max_batch_tokens: 16, kv_pages: 60, page_positions: 4 };

fn scheduler() -> Scheduler {
    let limits = Limits { max_slots: SHAPE.max_slots, max_batch_tokens: SHAPE.max_batch_tokens, ..Limits::default() };
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.apply(SHAPE.ready(), &mut Vec::new());
    scheduler
}

/// Tokens of each sequence in `actions`, in the order of their numbers.
fn tokens(actions: &[Action], sequence: u64) -> Vec<u32> {
    let of = |action: &Action| match action {
        Action::Token { sequence: of, token } if *of == sequence => Some(token.id),
        _ => None,
    };
    actions.iter().filter_map(of).collect()
}

fn run(scheduler: &mut Scheduler, worker: &mut FakeWorker, outcomes: usize, actions: &mut Vec<Action>) {
    for _ in 0..outcomes {
        while let Some(plan) = scheduler.next_plan() {
            worker.receive(plan);
        }
        let Some(outcome) = worker.run(u64::MAX) else { return };
        scheduler.apply(Event::Outcome(outcome), actions);
    }
}

/// Two sequences in slots with tokens, and three that wait; the group is lost.
fn lost() -> (Scheduler, Vec<SequenceRequest>, Vec<Action>) {
    let mut scheduler = scheduler();
    let requests: Vec<_> = (0..5).map(|seed| request(seed, 20, 30, vec![])).collect();
    let mut actions = Vec::new();
    for request in &requests {
        scheduler.submit(vec![request.clone()], &Standing::default()).unwrap();
    }
    run(&mut scheduler, &mut FakeWorker::new(SHAPE), 12, &mut actions);
    assert!(scheduler.hand_over().is_empty(), "a group that is up goes on with its own");
    assert_eq!(scheduler.group_lost(&mut actions), Blame::Nobody);
    (scheduler, requests, actions)
}

#[test]
fn another_scheduler_goes_on_with_the_token_that_would_have_come() {
    let (mut from, requests, before) = lost();
    let mut to = scheduler();
    to.submit(vec![request(9, 20, 30, vec![])], &Standing::default()).unwrap();
    let handed = from.hand_over();
    assert_eq!(handed.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 2, 3, 4, 5], "the first to be served first");
    assert_eq!(from.sequences(), 0);
    let began: Vec<usize> = handed.iter().map(|(_, handed)| handed.generated.len()).collect();
    assert!(began[0] > 0 && began[4] == 0, "{began:?}");
    for (sequence, (old, handed)) in (2..).zip(handed) {
        assert_eq!(handed.request, requests[old as usize - 1]);
        assert_eq!(to.adopt(handed), Ok(sequence));
    }
    let plan = to.next_plan().unwrap();
    let entered: Vec<u64> = plan.admit.iter().map(|admit| admit.sequence).collect();
    assert_eq!(entered, [2, 3, 4], "what was in a slot before goes before what never was");
    let (mut worker, mut after) = (FakeWorker::new(SHAPE), Vec::new());
    worker.receive(plan);
    run(&mut to, &mut worker, 2000, &mut after);
    for (old, request) in (1..).zip(&requests) {
        let all = [tokens(&before, old), tokens(&after, old + 1)].concat();
        assert_eq!(all, expected(request).0, "sequence {old}");
        let prompts = |actions: &[Action], of| {
            actions.iter().filter(|a| matches!(a, Action::Prompt { sequence, .. } if *sequence == of)).count()
        };
        assert_eq!(prompts(&before, old) + prompts(&after, old + 1), 1, "its prompt is told of once");
    }
    assert!(to.is_idle());
}

#[test]
fn suspects_stay_and_losses_are_remembered() {
    let (mut from, _, _) = lost();
    let mut to = scheduler();
    let handed = from.hand_over();
    for (_, handed) in handed {
        to.adopt(handed).unwrap();
    }
    // The rows of its first step are for the first alone, which was being computed in the first loss, too.
    assert_eq!(to.next_plan().unwrap().prefill.len(), 1);
    assert_eq!(to.group_lost(&mut Vec::new()), Blame::Nobody);
    let rest = to.hand_over();
    assert_eq!((rest.len(), to.sequences()), (4, 1), "who may have lost two groups loses no third");
}

#[test]
fn a_group_that_is_to_end_hands_over_what_it_has_not_begun_and_nobody_is_charged() {
    let mut from = scheduler();
    let requests: Vec<_> = (0..5).map(|seed| request(seed, 20, 30, vec![])).collect();
    for request in &requests {
        from.submit(vec![request.clone()], &Standing::default()).unwrap();
    }
    let (mut worker, mut actions) = (FakeWorker::new(SHAPE), Vec::new());
    run(&mut from, &mut worker, 12, &mut actions);
    from.group_ending();
    let handed: Vec<u64> = from.hand_over().iter().map(|(id, _)| *id).collect();
    assert_eq!(handed, [4, 5], "three slots are taken");
    assert!(!from.is_at_rest());
    let late = from.submit(vec![request(9, 20, 30, vec![])], &Standing::default()).unwrap().start;
    run(&mut from, &mut worker, 2000, &mut actions);
    assert!(from.is_at_rest() && tokens(&actions, late).is_empty());
    for (sequence, request) in (1..4).zip(&requests) {
        assert_eq!(tokens(&actions, sequence), expected(request).0);
    }
    from.group_ended();
    assert_eq!(from.hand_over().iter().map(|(id, _)| *id).collect::<Vec<_>>(), [late]);
}

#[test]
fn groups_that_are_ended_under_a_sequence_make_it_no_suspect() {
    let mut scheduler = scheduler();
    let request = request(1, 20, 30, vec![]);
    scheduler.submit(vec![request.clone()], &Standing::default()).unwrap();
    let mut actions = Vec::new();
    for _ in 0..5 {
        run(&mut scheduler, &mut FakeWorker::new(SHAPE), 4, &mut actions);
        scheduler.group_ending();
        scheduler.group_ended();
        scheduler.apply(SHAPE.ready(), &mut actions);
    }
    let next = scheduler.next_plan().unwrap();
    assert_eq!(next.admit[0].sequence, 1, "no sequence of the scheduler's own goes before it");
    let mut worker = FakeWorker::new(SHAPE);
    worker.receive(next);
    run(&mut scheduler, &mut worker, 2000, &mut actions);
    assert_eq!(tokens(&actions, 1), expected(&request).0);
}

#[test]
fn a_sequence_that_has_its_last_token_has_ended() {
    let of = |min_tokens, generated: &[u32]| {
        let request = SequenceRequest { min_tokens, ..request(1, 5, 4, vec![7]) };
        Handed { generated: generated.to_vec(), ..Handed::new(request, Standing::default()) }.ended()
    };
    assert_eq!(of(0, &[]), None);
    assert_eq!(of(0, &[7, 8]), None, "only the last may be one");
    assert_eq!(of(0, &[8, 7]), Some(FinishReason::Stop));
    assert_eq!(of(2, &[8, 7]), None, "too early to stop");
    assert_eq!(of(2, &[8, 8, 7]), Some(FinishReason::Stop));
    assert_eq!(of(0, &[8, 8, 8, 8]), Some(FinishReason::Length));
    assert_eq!(of(4, &[8, 8, 8, 7]), Some(FinishReason::Length));
}

#[test]
fn what_a_smaller_cache_cannot_hold_is_refused_by_name() {
    let (mut from, _, _) = lost();
    let mut to = Scheduler::new(Limits::default()).unwrap();
    to.apply(Shape { kv_pages: 3, ..SHAPE }.ready(), &mut Vec::new());
    let (_, handed) = from.hand_over().remove(0);
    assert_eq!(to.adopt(handed), Err("the request needs 13 KV pages, but the cache has only 3 now".into()));
    assert_eq!(to.sequences(), 0);
}
