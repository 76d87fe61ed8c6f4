//! New workers for one replica at a time: its sequences end there or go on elsewhere, and nobody is charged for it.

use std::sync::atomic::Ordering::SeqCst;

use super::*;
use crate::engine::RestartError;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

/// As `start_with`, with how often the workers of each replica were started.
fn start_counted(
    config: GroupConfig,
    script: impl Fn(u32, u32) -> Script + Copy + Send + Sync + 'static,
) -> (EngineHandle, Replicas, impl Fn() -> Vec<u32>) {
    let launcher = |replica| FakeLauncher::new(1, move |start, _| script(replica, start));
    let launchers: Vec<_> = (0..config.replicas).map(launcher).collect();
    let launch = |replica: u32| launchers[replica as usize].clone() as Arc<dyn Launcher>;
    let common = Arc::new(Common::new(config.timeouts.quarantine));
    let (handle, replicas) = spawn(config, &common, Vec::new(), launch).unwrap();
    (handle, replicas, move || launchers.iter().map(|launcher| launcher.starts.load(SeqCst)).collect())
}

fn two() -> GroupConfig {
    GroupConfig { replicas: 2, ..config(1) }
}

/// Steps that take their time, by workers whose plans may end before their sequences do.
fn cut_off() -> Script {
    Script { may_be_cut_off: true, ..slow() }
}

fn requests(count: u64, tokens: u32) -> Vec<SequenceRequest> {
    (0..count).map(|seed| request(seed, 6 + seed as u32, tokens, vec![])).collect()
}

async fn submit_all(handle: &EngineHandle, requests: &[SequenceRequest]) -> Vec<SequenceStream> {
    let mut streams = Vec::new();
    for request in requests {
        streams.push(submit(handle, request.clone()).await.unwrap());
    }
    streams
}

async fn all_get_their_tokens(streams: Vec<SequenceStream>, requests: &[SequenceRequest]) {
    for (stream, request) in streams.into_iter().zip(requests) {
        let wanted = (expected(request).0, SequenceEvent::Finished(FinishReason::Length));
        assert_eq!(read(stream).await, wanted, "no token is missing, and none comes twice");
    }
}

async fn is_over(restart: CancellationToken) {
    timeout(LIMIT, restart.cancelled()).await.expect("the restart ends");
}

fn losses(handle: &EngineHandle) -> u64 {
    handle.replicas().iter().map(|replica| replica.metrics.losses.get()).sum()
}

#[tokio::test(start_paused = true)]
async fn all_replicas_restart_one_after_the_other_and_no_stream_notices() {
    let (handle, replicas, starts) = start_counted(GroupConfig { replicas: 3, ..config(1) }, |_, _| slow());
    all_ready(&handle).await;
    let requests = requests(12, 100);
    let streams = submit_all(&handle, &requests).await;
    let mut state = handle.watch_state();
    let watched = tokio::spawn(async move {
        while state.changed().await.is_ok() {
            let now = state.borrow().clone();
            assert!(matches!(now, EngineState::Ready | EngineState::Draining), "{now:?}");
        }
    });
    let (restarted, ()) = tokio::join!(handle.restart_all(LONG), all_get_their_tokens(streams, &requests));
    restarted.unwrap();
    assert_eq!((starts(), losses(&handle)), (vec![2, 2, 2], 0));
    serve(&handle, 30).await;
    replicas.shutdown_unless(std::future::pending()).await;
    drop(handle);
    timeout(LIMIT, watched).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn without_time_to_end_all_goes_on_elsewhere_at_once() {
    let (handle, _replicas, starts) = start_counted(two(), |_, _| cut_off());
    all_ready(&handle).await;
    let requests = requests(12, 80);
    let streams = submit_all(&handle, &requests).await;
    settles(&handle, &[6, 6]).await;
    let began = Instant::now();
    let restart = handle.restart(0, Duration::ZERO, false).await.unwrap();
    settles(&handle, &[0, 12]).await;
    assert!(began.elapsed() < Duration::from_millis(100), "{:?}", began.elapsed());
    is_over(restart).await;
    assert_eq!((starts(), losses(&handle)), (vec![2, 1], 0));
    all_get_their_tokens(streams, &requests).await;
    serve(&handle, 10).await;
}

#[tokio::test(start_paused = true)]
async fn what_waits_goes_elsewhere_at_once_and_what_runs_ends_where_it_is() {
    // Four slots, and pages for all of them.
    let (handle, _replicas, starts) = start_counted(two(), |_, _| Script { kv_pages: 1200, ..slow() });
    all_ready(&handle).await;
    let requests = requests(12, 80);
    let streams = submit_all(&handle, &requests).await;
    let all_slots = async {
        while handle.replicas().iter().any(|replica| replica.metrics.load().running < 4) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, all_slots).await.expect("all slots are taken");
    let restart = handle.restart(0, LONG, false).await.unwrap();
    assert_eq!(starts(), [1, 1]);
    settles(&handle, &[4, 8]).await;
    let words = |state: &EngineState| matches!(state, EngineState::Recovering(words) if words.contains("on request"));
    assert!(words(&handle.replicas()[0].state.borrow()));
    all_get_their_tokens(streams, &requests).await;
    is_over(restart).await;
    assert_eq!((starts(), losses(&handle)), (vec![2, 1], 0));
}

#[tokio::test(start_paused = true)]
async fn what_is_sent_to_a_replica_before_it_tells_that_it_restarts_goes_elsewhere() {
    let (handle, _replicas, _) = start_counted(two(), |_, _| slow());
    all_ready(&handle).await;
    // As it runs, the restart waits for it.
    let running = submit(&handle, request(1, 5, 200, vec![])).await.unwrap();
    let replica = loads(&handle).iter().position(|load| *load == 1).unwrap();
    let many = (0..4).map(|seed| handle.submit(vec![request(seed, 5, 200, vec![])], Standing::default()));
    let (restart, streams) = tokio::join!(biased; handle.restart(replica, LONG, false), join_all(many));
    let restart = restart.unwrap();
    assert_eq!(loads(&handle)[1 - replica], 4, "all of {:?}", loads(&handle));
    drop((running, streams));
    is_over(restart).await;
    settles(&handle, &[0, 0]).await;
}

#[tokio::test(start_paused = true)]
async fn one_restarts_at_a_time_and_never_the_last_that_is_ready() {
    let (handle, _replicas, starts) =
        start_counted(two(), |replica, start| Script { load_hangs: replica == 1 && start == 1, ..slow() });
    all_ready(&handle).await;
    assert_eq!(handle.restart(2, LONG, true).await.unwrap_err(), RestartError::NoSuchReplica { asked: 2, last: 1 });
    let running = submit_all(&handle, &requests(2, 200)).await;
    let restart = handle.restart(0, LONG, false).await.unwrap();
    for replica in [0, 1] {
        let refused = handle.restart(replica, LONG, true).await.unwrap_err();
        assert_eq!(refused, RestartError::UnderWay { replica: 0 });
    }
    drop(running);
    is_over(restart).await;
    let restart = handle.restart(1, LONG, false).await.unwrap();
    // It loads for ever, until that is given up.
    until_started(&starts, [2, 2]).await;
    assert_eq!(handle.restart(0, LONG, true).await.unwrap_err(), RestartError::UnderWay { replica: 1 });
    is_over(restart).await;
    assert_eq!(starts(), [2, 3]);
}

async fn until_started(starts: &impl Fn() -> Vec<u32>, wanted: [u32; 2]) {
    let started = async {
        while starts() != wanted {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, started).await.expect("the workers are started");
}

#[tokio::test(start_paused = true)]
async fn the_last_that_is_ready_restarts_if_requests_may_wait() {
    let (handle, _replicas, starts) = start_counted(two(), |replica, start| Script {
        lifetime: (replica == 0 && start == 0).then_some(Duration::from_millis(20)),
        load_hangs: replica == 0 && start > 0,
        ..cut_off()
    });
    all_ready(&handle).await;
    until_started(&starts, [2, 1]).await;
    assert_eq!(handle.restart(0, LONG, true).await.unwrap_err(), RestartError::NotReady { replica: 0 });
    assert_eq!(handle.restart(1, LONG, false).await.unwrap_err(), RestartError::LastReady { replica: 1 });
    let requests = requests(6, 80);
    let streams = submit_all(&handle, &requests).await;
    let restart = handle.restart(1, Duration::ZERO, true).await.unwrap();
    let late = submit(&handle, request(50, 5, 5, vec![])).await.unwrap();
    all_get_their_tokens(streams, &requests).await;
    assert_eq!(read(late).await.0, expected(&request(50, 5, 5, vec![])).0);
    is_over(restart).await;
    assert_eq!((starts()[1], losses(&handle)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_replica_that_is_alone_keeps_its_streams_while_it_restarts() {
    for limit in [Duration::ZERO, LONG] {
        let (handle, _replicas, starts) = start_counted(config(1), |_, _| cut_off());
        all_ready(&handle).await;
        let requests = requests(6, 80);
        let streams = submit_all(&handle, &requests).await;
        assert_eq!(handle.restart(0, limit, false).await.unwrap_err(), RestartError::LastReady { replica: 0 });
        let restart = handle.restart(0, limit, true).await.unwrap();
        assert_eq!(handle.restart(0, limit, true).await.unwrap_err(), RestartError::UnderWay { replica: 0 });
        all_get_their_tokens(streams, &requests).await;
        is_over(restart).await;
        assert_eq!((starts(), losses(&handle)), (vec![2], 0));
        assert_eq!(handle.restart_all(limit).await, Err(RestartError::LastReady { replica: 0 }));
    }
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_meanwhile_is_a_loss_like_any_other_and_ends_the_restart() {
    let (handle, _replicas, starts) = start_counted(two(), |replica, start| Script {
        after: (replica == 0 && start == 0).then_some((30, Trouble::Exit)),
        ..slow()
    });
    all_ready(&handle).await;
    let requests = requests(12, 80);
    let streams = submit_all(&handle, &requests).await;
    let restart = handle.restart(0, LONG, false).await.unwrap();
    all_get_their_tokens(streams, &requests).await;
    is_over(restart).await;
    assert_eq!((starts(), losses(&handle)), (vec![2, 1], 1));
    is_over(handle.restart(1, LONG, false).await.unwrap()).await;
}

#[tokio::test(start_paused = true)]
async fn shutting_down_meanwhile_lets_what_runs_and_what_waits_end() {
    // In front of a single replica, whose queue can go nowhere else.
    let (handle, replicas, starts) = start_counted(config(1), |_, _| slow());
    all_ready(&handle).await;
    let requests = requests(7, 80);
    let streams = submit_all(&handle, &requests).await;
    let restart = handle.restart(0, LONG, true).await.unwrap();
    let ((), ()) =
        tokio::join!(replicas.shutdown_unless(std::future::pending()), all_get_their_tokens(streams, &requests));
    is_over(restart).await;
    assert_eq!((starts(), handle.state()), (vec![1], EngineState::Draining));
    assert_eq!(handle.restart(0, LONG, true).await.unwrap_err(), RestartError::ShuttingDown);
}

#[tokio::test(start_paused = true)]
async fn restarts_cost_no_pause_make_no_suspect_and_forget_no_poison() {
    const POISON: u32 = 777;
    let mut config = two();
    (config.timeouts.backoff, config.timeouts.backoff_limit) = (LONG, LONG);
    let (handle, _replicas, starts) = start_counted(config, |_, start| Script {
        poison: Some(POISON),
        step: if start == 0 { Duration::from_micros(200) } else { Duration::from_millis(2) },
        ..cut_off()
    });
    all_ready(&handle).await;
    let mut poison = request(99, 5, 20, vec![]);
    poison.prompt[0] = POISON;
    let culprit = timeout(10 * LONG, read(submit(&handle, poison.clone()).await.unwrap())).await.unwrap();
    assert!(matches!(culprit.1, SequenceEvent::Failed(_)), "{culprit:?}");
    all_ready(&handle).await;
    until(&handle, |state| *state == EngineState::Ready).await;
    let all_up = async {
        while handle.replicas().iter().any(|replica| *replica.state.borrow() != EngineState::Ready) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(10 * LONG, all_up).await.unwrap();
    let (before, lost) = (starts(), losses(&handle));
    let long = request(1, 5, 240, vec![]);
    let stream = submit(&handle, long.clone()).await.unwrap();
    let began = Instant::now();
    for _ in 0..3 {
        handle.restart_all(Duration::ZERO).await.unwrap();
    }
    assert!(began.elapsed() < LONG / 10, "{:?}", began.elapsed());
    assert_eq!(read(stream).await, (expected(&long).0, SequenceEvent::Finished(FinishReason::Length)));
    assert_eq!((starts(), losses(&handle)), (before.iter().map(|starts| starts + 3).collect(), lost));
    let refused = submit(&handle, poison).await.unwrap_err();
    assert!(matches!(refused, SubmitError::Quarantined { .. }), "{refused}");
}

/// Restarts, losses and cancels at once: each reader gets its tokens, and no more.
#[tokio::test(start_paused = true)]
async fn a_storm_of_restarts_leaves_every_stream_whole() {
    for seed in 0..8 {
        let (handle, replicas, starts) =
            start_counted(GroupConfig { replicas: 3, ..config(1) }, move |replica, start| {
                let chance = mix(seed << 32 | u64::from(replica) << 16 | u64::from(start));
                Script { after: (start == 1).then_some((20 + chance % 120, Trouble::Exit)), ..cut_off() }
            });
        all_ready(&handle).await;
        let one = async |number: u64| {
            let chance = mix(seed << 40 | number);
            tokio::time::sleep(Duration::from_millis(chance % 1500)).await;
            let request = request(number, 1 + (chance % 90) as u32, 5 + (chance % 60) as u32, vec![]);
            let mut stream = submit(&handle, request.clone()).await.unwrap();
            let (tokens, _) = expected(&request);
            let takes = if chance.is_multiple_of(4) { tokens.len() / 2 } else { tokens.len() };
            for wanted in &tokens[..takes] {
                match timeout(LIMIT, stream.next()).await.expect("it stands still") {
                    Some(SequenceEvent::Token(token)) => assert_eq!(token.id, *wanted, "seed {seed}, request {number}"),
                    other => panic!("seed {seed}, request {number}: {other:?}"),
                }
            }
            if takes == tokens.len() {
                let end = stream.next().await;
                assert!(matches!(end, Some(SequenceEvent::Finished(_))), "seed {seed}, request {number}: {end:?}");
            }
        };
        let restarts = async {
            for number in 0..12 {
                let chance = mix(seed << 50 | number);
                let limit = Duration::from_millis(chance % 3 * (chance % 200));
                match handle.restart((chance % 3) as usize, limit, chance.is_multiple_of(5)).await {
                    Ok(restart) => is_over(restart).await,
                    Err(RestartError::NotReady { .. } | RestartError::LastReady { .. }) => {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(other) => panic!("seed {seed}: {other}"),
                }
            }
        };
        tokio::join!(join_all((0..120).map(one)), restarts);
        assert!(starts().iter().sum::<u32>() > 9, "seed {seed}: {:?}", starts());
        settles(&handle, &[0, 0, 0]).await;
        replicas.shutdown_unless(std::future::pending()).await;
    }
}
