//! What plans and outcomes cost, by the slots: their growth in every build, microseconds in a release build.

use std::time::{Duration, Instant};

use super::{FakeWorker, Shape, request};
use crate::sched::{Event, Limits, Scheduler};

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
    scheduler.is_unchecked = true;
    scheduler.apply(shape.ready(), &mut Vec::new());
    let mut worker = FakeWorker::new(shape);
    scheduler.submit((0..2 * count).map(|seed| request(seed, 1, 2 * STEPS, vec![])).collect()).unwrap();
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
