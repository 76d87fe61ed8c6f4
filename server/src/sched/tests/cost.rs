//! What plans and outcomes cost, by the slots: their growth in every build, microseconds in a release build.

use std::time::{Duration, Instant};

use super::{FakeWorker, Shape, request};
use crate::sched::{Event, Limits, Scheduler, Standing};

/// Times of steps in which all slots decode and as many sequences wait: of the plan, if there was one, and of the
/// outcome. With pages of one position each plan grants some to every slot.
fn steps(slots: u32, steps_per_plan: u32, page_positions: u32) -> Vec<(Option<Duration>, Duration)> {
    const STEPS: u32 = 40;
    let (count, kv_pages) = (u64::from(slots), 4 * STEPS * slots);
    let limits = Limits {
        max_slots: slots,
        max_batch_tokens: slots,
        steps_per_plan,
        max_waiting_requests: 2 * count,
        ..Limits::default()
    };
    let shape = Shape { max_slots: slots, max_batch_tokens: slots, kv_pages, page_positions };
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.leave_unchecked();
    scheduler.apply(shape.ready(), &mut Vec::new());
    let mut worker = FakeWorker::new(shape);
    let requests = (0..2 * count).map(|seed| request(seed, 1, 2 * STEPS, vec![])).collect();
    scheduler.submit(requests, &Standing::default()).unwrap();
    worker.receive(scheduler.next_plan().expect("all slots are filled"));
    let mut timed = |_| {
        let outcome = worker.run(u64::MAX).expect("the loop never waits");
        assert_eq!(outcome.rows, slots);
        let begun = Instant::now();
        scheduler.apply(Event::Outcome(outcome), &mut Vec::new());
        let applied = begun.elapsed();
        let plan = scheduler.next_plan();
        let planned = begun.elapsed() - applied;
        let sent = plan.map(|plan| worker.receive(plan)).map(|()| planned);
        (sent, applied)
    };
    (0..STEPS).map(&mut timed).collect()
}

#[test]
fn plans_cost_more_with_more_slots_and_not_with_their_square() {
    let fastest = |slots: u32| {
        let plans = steps(slots, 2, 1).into_iter().filter_map(|(plan, _)| Some(plan?.as_secs_f64()));
        plans.fold(f64::INFINITY, f64::min)
    };
    // Of several: another process may take the time of one, or what the caches hold.
    let growth = (0..3).map(|_| fastest(2048) / fastest(512)).fold(f64::INFINITY, f64::min);
    assert!(growth < 6.0, "4 times the slots cost {growth:.1} times as much");
}

/// `cargo test --release --workspace --lib -- --ignored sched::tests::cost --nocapture`
#[test]
#[ignore = "times of a release build"]
fn a_plan_of_1024_slots_takes_less_than_100_microseconds_in_the_mean() {
    for slots in [512, 1024, 2048] {
        let steps = steps(slots, 16, 16);
        let plans: Vec<Duration> = steps.iter().filter_map(|(plan, _)| *plan).collect();
        let mean = |times: &[Duration]| times.iter().sum::<Duration>() / times.len() as u32;
        let outcomes: Vec<Duration> = steps.iter().map(|(_, outcome)| *outcome).collect();
        println!("{slots} slots: a plan takes {:?} in the mean, an outcome {:?}", mean(&plans), mean(&outcomes));
        assert!(slots > 1024 || mean(&plans) < Duration::from_micros(100));
    }
}

/// What scheduling takes a step, of plans, outcomes and submissions: 256 streams in a closed loop, prompts of 1024 tokens
/// of which 960 are those of all others, answers of 128.
fn crowd(prefix_cache: bool) -> Duration {
    const STREAMS: u32 = 256;
    let limits = Limits {
        max_slots: STREAMS,
        max_batch_tokens: 2048,
        prefix_cache,
        max_waiting_requests: 1000,
        ..Limits::default()
    };
    let shape = Shape { max_slots: STREAMS, max_batch_tokens: 2048, kv_pages: 8000, page_positions: 64 };
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.leave_unchecked();
    scheduler.apply(shape.ready(), &mut Vec::new());
    let mut worker = FakeWorker::new(shape);
    let common = request(1, 960, 1, vec![]).prompt;
    let (mut spent, mut steps, mut seed, mut actions) = (Duration::ZERO, 0, 2, Vec::new());
    while steps < 600 {
        let arriving = STREAMS as usize - scheduler.sequences();
        let mut requests: Vec<_> = (seed..).take(arriving).map(|seed| request(seed, 1024, 128, vec![])).collect();
        seed += arriving as u64;
        requests.iter_mut().for_each(|request| request.prompt[..960].copy_from_slice(&common));
        let begun = Instant::now();
        for request in requests {
            scheduler.submit(vec![request], &Standing::default()).unwrap();
        }
        let plans: Vec<_> = std::iter::from_fn(|| scheduler.next_plan()).collect();
        spent += begun.elapsed();
        plans.into_iter().for_each(|plan| worker.receive(plan));
        let outcome = worker.run(u64::MAX).expect("the loop never waits");
        let begun = Instant::now();
        scheduler.apply(Event::Outcome(outcome), &mut actions);
        spent += begun.elapsed();
        actions.clear();
        steps += 1;
    }
    spent / steps
}

/// 1 % of a step of 256 rows of 8B on an H200.
#[test]
#[ignore = "times of a release build"]
fn the_prefix_cache_costs_a_crowd_less_than_100_microseconds_a_step() {
    let [off, on] = [false, true].map(crowd);
    println!("256 streams: {off:?} a step without a prefix cache, {on:?} with it");
    assert!(on < off + Duration::from_micros(100));
}
