//! The group against scripted workers on real Unix sockets: loading, streaming, faults, drain. In virtual time:
//! faults of all kinds (`simulation`), and what crowds see of a GPU (`crowds`).

mod crowds;
mod faults;
mod isolation;
mod metrics;
mod simulation;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use looplane_proto::worker::v1::Finish;
use tokio::time::Instant;
use tonic::Status;

use super::fake::{FakeLauncher, Script, Trouble};
use super::{GroupConfig, GroupError, GroupTask, Launcher, Timeouts, spawn};
use crate::engine::{
    EngineHandle, EngineState, FinishReason, SequenceEvent, SequenceRequest, SequenceStream, Standing, SubmitError,
};
use crate::sched::Limits;
use crate::sched::fake_worker::{expected, request};

/// Nothing here takes long; a wait that ends at this limit has failed.
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

pub(crate) fn config(tensor_parallel: u32) -> GroupConfig {
    GroupConfig {
        limits: Limits { max_slots: 4, max_batch_tokens: 8, steps_per_plan: 4, ..Limits::default() },
        timeouts: Timeouts {
            step: Duration::from_secs(10),
            step_floor: Duration::from_secs(5),
            start: Duration::from_secs(5),
            load: Duration::from_secs(10),
            drain: Duration::from_secs(10),
            probe: Duration::from_millis(200),
            answer: Duration::from_secs(2),
            exit: Duration::from_millis(500),
            backoff: Duration::from_millis(5),
            backoff_limit: Duration::from_millis(20),
            ..Timeouts::default()
        },
        // Scripts count steps.
        timing: Duration::ZERO,
        max_failed_starts: 3,
        ..GroupConfig::new(PathBuf::from("/models/fake"), tensor_parallel)
    }
}

/// For tests in which a rank stops reporting: soon noticed, yet long enough for a busy machine.
fn impatient(ranks: u32) -> GroupConfig {
    let mut config = config(ranks);
    config.timeouts.step = Duration::from_millis(700);
    config.timeouts.load = Duration::from_millis(700);
    config
}

fn start(config: GroupConfig, launcher: Arc<dyn Launcher>) -> (EngineHandle, GroupTask) {
    spawn(config, launcher).unwrap()
}

/// Submits a request of one sequence.
pub(crate) async fn submit(handle: &EngineHandle, request: SequenceRequest) -> Result<SequenceStream, SubmitError> {
    let mut streams = handle.submit(vec![request], Standing::default()).await?;
    Ok(streams.remove(0))
}

/// Waits until the state is as wanted and returns every state seen on the way.
pub(crate) async fn until(handle: &EngineHandle, wanted: impl Fn(&EngineState) -> bool) -> Vec<EngineState> {
    let mut watch = handle.watch_state();
    let mut seen = vec![watch.borrow_and_update().clone()];
    let changes = async {
        while !wanted(seen.last().unwrap()) {
            watch.changed().await.expect("the engine is gone");
            seen.push(watch.borrow_and_update().clone());
        }
    };
    tokio::time::timeout(LIMIT, changes).await.unwrap_or_else(|_| panic!("the state stays {:?}", handle.state()));
    seen
}

pub(crate) async fn ready(handle: &EngineHandle) {
    until(handle, |state| *state == EngineState::Ready).await;
}

/// Reads a stream to its end.
pub(crate) async fn read(mut stream: SequenceStream) -> (Vec<u32>, SequenceEvent) {
    let mut tokens = Vec::new();
    loop {
        let event = tokio::time::timeout(LIMIT, stream.next()).await.expect("the stream stands still");
        match event.expect("a stream ends with an event") {
            SequenceEvent::Token(token) => tokens.push(token.id),
            end => return (tokens, end),
        }
    }
}

fn reason(finish: Finish) -> FinishReason {
    if finish == Finish::Stop { FinishReason::Stop } else { FinishReason::Length }
}

/// Submits `count` sequences at once and checks that each gets exactly its tokens.
pub(crate) async fn serve(handle: &EngineHandle, count: u64) {
    let one = async |seed: u64| {
        let stop = (0..40).map(|i| i * 11).collect();
        let request = request(seed, 1 + (seed * 7 % 23) as u32, 5 + (seed * 5 % 30) as u32, stop);
        let stream = submit(handle, request.clone()).await.unwrap();
        let (tokens, finish) = expected(&request);
        assert_eq!(read(stream).await, (tokens, SequenceEvent::Finished(reason(finish))), "sequence {seed}");
    };
    futures::future::join_all((0..count).map(one)).await;
}

fn long_request() -> SequenceRequest {
    request(1, 5, 200, vec![])
}

#[tokio::test(start_paused = true)]
async fn loads_serves_and_drains() {
    for ranks in [1, 2, 4] {
        let launcher = FakeLauncher::new(ranks, |_, _| Script::default());
        let (handle, task) = start(config(ranks), launcher.clone());
        assert!(matches!(handle.state(), EngineState::Loading(_)) && handle.model().is_none());
        ready(&handle).await;
        let model = handle.model().unwrap();
        assert_eq!((model.architecture.as_str(), model.tensor_parallel), ("FakeForCausalLM", ranks));
        // The model could take 4096 positions; 64 pages of 4 hold fewer, and rank 0's one more page is of no use to
        // all.
        assert_eq!(model.max_context, if ranks == 1 { 65 * 4 } else { 64 * 4 });
        serve(&handle, 20).await;
        let figures = task.figures();
        assert!(figures.tokens > 100 && figures.rows >= figures.tokens && figures.losses == 0, "{figures:?}");
        let running = submit(&handle, request(3, 4, 60, vec![])).await.unwrap();
        let ending = tokio::spawn(task.shutdown());
        until(&handle, |state| *state == EngineState::Draining).await;
        let refused = submit(&handle, request(4, 4, 60, vec![])).await.unwrap_err();
        assert_eq!(refused, SubmitError::Unavailable("shutting down".into()));
        assert_eq!(read(running).await.0, expected(&request(3, 4, 60, vec![])).0, "what runs may end");
        ending.await.unwrap();
        assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
        assert!(submit(&handle, request(4, 4, 60, vec![])).await.is_err());
    }
}

#[tokio::test(start_paused = true)]
async fn progress_is_told_in_words() {
    let launcher = FakeLauncher::new(2, |_, rank| Script { load_hangs: rank == 1, ..Script::default() });
    let (handle, _task) = start(impatient(2), launcher);
    let words =
        |state: &EngineState| matches!(state, EngineState::Loading(words) if words == "rank 1: packing weights 40 %");
    until(&handle, words).await;
    assert!(matches!(submit(&handle, long_request()).await, Err(SubmitError::Unavailable(_))));
    // It says nothing more: the load fails, is tried again, and in the end given up.
    let seen = until(&handle, |state| matches!(state, EngineState::Failed(_))).await;
    let EngineState::Failed(reason) = seen.last().unwrap() else { unreachable!() };
    assert!(reason.contains("3 times in a row") && reason.contains("rank 1 said nothing"), "{reason}");
}

#[tokio::test(start_paused = true)]
async fn a_model_that_cannot_be_served_fails_at_once() {
    let status = Status::invalid_argument("tensor lm_head.weight is missing from model.safetensors");
    let launcher = FakeLauncher::new(2, move |_, _| Script { load_error: Some(status.clone()), ..Script::default() });
    let (handle, task) = start(config(2), launcher.clone());
    until(&handle, |state| matches!(state, EngineState::Failed(_))).await;
    let words = "rank 0: tensor lm_head.weight is missing from model.safetensors";
    assert_eq!(handle.state(), EngineState::Failed(words.into()));
    assert_eq!(launcher.starts.load(Ordering::SeqCst), 1, "another try would end the same way");
    let refused = submit(&handle, long_request()).await.unwrap_err();
    assert!(matches!(&refused, SubmitError::Unavailable(text) if text.contains(words)), "{refused}");
    task.shutdown().await;
    assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn ranks_that_disagree_are_refused() {
    let domain = |rank| if rank == 1 { "other" } else { "fake" };
    let launcher = FakeLauncher::new(2, move |_, rank| Script { bit_domain: domain(rank), ..Script::default() });
    let (handle, _task) = start(config(2), launcher);
    until(&handle, |state| matches!(state, EngineState::Failed(words) if words.contains("bit_domain"))).await;
}

#[tokio::test(start_paused = true)]
async fn workers_that_never_start_are_given_up() {
    let launcher = FakeLauncher::new(1, |_, _| Script { exits_at_once: true, ..Script::default() });
    let (handle, _task) = start(config(1), launcher.clone());
    let seen = until(&handle, |state| matches!(state, EngineState::Failed(_))).await;
    let EngineState::Failed(reason) = seen.last().unwrap() else { unreachable!() };
    assert!(reason.contains("no such luck"), "{reason}");
    assert_eq!(launcher.starts.load(Ordering::SeqCst), 3);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_stream_frees_its_slot() {
    let launcher = FakeLauncher::new(1, |_, _| Script { step: Duration::from_millis(2), ..Script::default() });
    let (handle, task) = start(config(1), launcher);
    ready(&handle).await;
    // Each alone needs most of the 64 pages of 4: the second runs only once the first is gone.
    let mut stream = submit(&handle, request(1, 50, 200, vec![])).await.unwrap();
    stream.next().await.unwrap();
    let second = submit(&handle, request(2, 180, 3, vec![])).await.unwrap();
    drop(stream);
    assert_eq!(read(second).await.0, expected(&request(2, 180, 3, vec![])).0);
    let tokens = task.figures().rows;
    assert!(tokens < 150 + 50 + 180, "{tokens} rows: the 200 of the first were not waited for");
}

#[tokio::test(start_paused = true)]
async fn an_idle_group_is_left_alone() {
    let launcher = FakeLauncher::new(1, |_, _| Script::default());
    let (handle, task) = start(impatient(1), launcher);
    ready(&handle).await;
    serve(&handle, 3).await;
    // The release of the last slot is on its way.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let plans = task.figures().plans;
    tokio::time::sleep(Duration::from_millis(1000)).await;
    assert_eq!(handle.state(), EngineState::Ready, "no report is missing where none is owed");
    assert_eq!(task.figures().plans, plans, "an idle group gets no plans");
}

#[tokio::test(start_paused = true)]
async fn a_busy_rank_is_not_asked() {
    let launcher =
        FakeLauncher::new(2, |_, _| Script { is_deaf: true, step: Duration::from_millis(10), ..Script::default() });
    let mut config = config(2);
    config.timeouts.answer = Duration::from_millis(200);
    let (handle, task) = start(config, launcher);
    ready(&handle).await;
    let started = Instant::now();
    let request = request(1, 5, 200, vec![]);
    assert_eq!(read(submit(&handle, request.clone()).await.unwrap()).await.0, expected(&request).0);
    assert!(started.elapsed() > Duration::from_secs(1), "or there was no time to ask");
    assert_eq!(task.figures().losses, 0);
}

#[tokio::test(start_paused = true)]
async fn cancels_in_a_storm_leave_nothing_behind() {
    let launcher = FakeLauncher::new(2, |start, rank| Script {
        after: (rank == 0 && start < 2).then_some((60, Trouble::Exit)),
        ..Script::default()
    });
    let (handle, task) = start(config(2), launcher.clone());
    ready(&handle).await;
    let one = async |seed: u64| {
        let request = request(seed, 1 + (seed % 17) as u32, 40, vec![]);
        let mut stream = submit(&handle, request.clone()).await.unwrap();
        for expected in expected(&request).0.into_iter().take((seed % 5) as usize) {
            assert!(matches!(stream.next().await, Some(SequenceEvent::Token(token)) if token.id == expected));
        }
    };
    futures::future::join_all((0..100).map(one)).await;
    // Nothing of them is left in the way of a sequence that needs nearly every page.
    let large = request(7, 200, 50, vec![]);
    assert_eq!(read(submit(&handle, large.clone()).await.unwrap()).await.0, expected(&large).0);
    tokio::time::timeout(LIMIT, task.shutdown()).await.expect("nothing to wait for");
    assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_burst_of_messages_is_handled_whole() {
    let launcher = FakeLauncher::new(1, |_, _| Script { step: Duration::from_millis(2), ..Script::default() });
    let (handle, task) = start(config(1), launcher);
    ready(&handle).await;
    // All are sent before the supervisor, on this one thread, takes the first.
    let submissions = (0..600).map(|seed| submit(&handle, request(seed, 5, 200, vec![])));
    let streams = tokio::time::timeout(LIMIT, futures::future::join_all(submissions)).await.expect("all are answered");
    let streams: Vec<SequenceStream> = streams.into_iter().map(Result::unwrap).collect();
    drop(streams);
    // Behind all the cancels.
    let last = submit(&handle, request(7, 5, 3, vec![])).await.unwrap();
    assert_eq!(read(last).await.0, expected(&request(7, 5, 3, vec![])).0);
    let rows = task.figures().rows;
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(task.figures().rows, rows, "a sequence whose cancel was lost runs on");
}

#[test]
fn figures_are_told_in_words() {
    let figures = super::Figures {
        plans: 3,
        steps: 4,
        rows: 9,
        tokens: 8,
        step_ns: 10_000_000,
        wait_ns: Some(2_500_000),
        losses: 1,
    };
    let words = "8 tokens in 4 steps (9 rows, 3 plans), 2.500 ms a step on rank 0, 25.0 % of it waiting for other \
                 ranks; the workers were lost once";
    assert_eq!(figures.to_string(), words);
    assert_eq!(super::Figures::default().to_string(), "0 tokens in 0 steps (0 rows, 0 plans)");
}

#[tokio::test(start_paused = true)]
async fn drain_is_bounded() {
    let script = |_, _| Script { step: Duration::from_millis(20), ignores_drain: true, ..Script::default() };
    let launcher = FakeLauncher::new(2, script);
    let mut config = config(2);
    config.timeouts.drain = Duration::from_millis(200);
    let (handle, task) = start(config, launcher.clone());
    ready(&handle).await;
    let stream = submit(&handle, long_request()).await.unwrap();
    let started = Instant::now();
    let ((_, end), ()) = tokio::join!(read(stream), task.shutdown());
    assert_eq!(end, SequenceEvent::Failed("the server is shutting down".into()));
    let took = started.elapsed();
    assert!(took > Duration::from_millis(200) && took < Duration::from_secs(3), "{took:?}");
    assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_that_may_not_take_its_time_kills_and_waits_for_the_last() {
    let script = |_, _| Script { kill_takes: Duration::from_millis(300), ..Script::default() };
    let launcher = FakeLauncher::new(2, script);
    let (handle, task) = start(config(2), launcher.clone());
    ready(&handle).await;
    let _running = submit(&handle, request(1, 5, 200, vec![])).await.unwrap();
    let started = Instant::now();
    task.shutdown_unless(std::future::ready(())).await;
    assert!(started.elapsed() >= Duration::from_millis(300));
    assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn shutdown_while_loading_waits_for_nothing() {
    let launcher = FakeLauncher::new(2, |_, _| Script { load_hangs: true, ..Script::default() });
    let mut config = config(2);
    config.timeouts.load = LIMIT;
    let (handle, task) = start(config, launcher.clone());
    until(&handle, |state| matches!(state, EngineState::Loading(words) if words.contains("packing"))).await;
    tokio::time::timeout(Duration::from_secs(2), task.shutdown()).await.expect("nothing to wait for");
    assert_eq!(handle.state(), EngineState::Draining);
    assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_task_kills_its_workers() {
    let launcher = FakeLauncher::new(2, |_, _| Script::default());
    let (handle, task) = start(config(2), launcher.clone());
    ready(&handle).await;
    let stream = submit(&handle, long_request()).await.unwrap();
    drop(task);
    let gone = async {
        while launcher.alive.load(Ordering::SeqCst) > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(LIMIT, gone).await.expect("the workers are killed");
    drop(stream);
}

#[tokio::test(start_paused = true)]
async fn bad_configurations_are_named() {
    let launcher = FakeLauncher::new(1, |_, _| Script::default());
    let error = |config| spawn(config, launcher.clone()).err();
    assert_eq!(error(config(3)), Some(GroupError::TensorParallel(3)));
    assert_eq!(error(GroupConfig { threads: 0, ..config(1) }), Some(GroupError::Zero("threads")));
    let limits = Limits { steps_per_plan: 0, ..Limits::default() };
    assert!(matches!(error(GroupConfig { limits, ..config(1) }), Some(GroupError::Limits(_))));
}
