//! Replicas of scripted workers behind one handle: who computes what, and what is left of a replica that is lost.

mod restart;

use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::*;
use crate::engine::{FinishReason, SequenceEvent, Standing};
use crate::group::fake::{FakeLauncher, Script, Trouble};
use crate::group::tests::{LIMIT, config, read, ready, serve, submit, until};
use crate::sched::fake_worker::{expected, mix, request};

/// Replicas of one rank each; `script` is asked with the replica and the number of its start.
fn start(
    replicas: u32,
    script: impl Fn(u32, u32) -> Script + Copy + Send + Sync + 'static,
) -> (EngineHandle, Replicas) {
    start_with(GroupConfig { replicas, ..config(1) }, script)
}

fn start_with(
    config: GroupConfig,
    script: impl Fn(u32, u32) -> Script + Copy + Send + Sync + 'static,
) -> (EngineHandle, Replicas) {
    let common = Arc::new(Common::new(config.timeouts.quarantine));
    spawn(config, &common, Vec::new(), |replica| FakeLauncher::new(1, move |start, _| script(replica, start))).unwrap()
}

/// Until every replica is up.
async fn all_ready(handle: &EngineHandle) {
    let all = async {
        while handle.replicas().iter().any(|replica| replica.metrics.load().kv_pages == 0) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, all).await.expect("all replicas start");
    ready(handle).await;
}

fn slow() -> Script {
    Script { step: Duration::from_millis(2), ..Script::default() }
}

/// The first replica is lost in the midst, and is never back.
fn without_the_first(replica: u32, start: u32) -> Script {
    Script {
        after: (replica == 0 && start == 0).then_some((30, Trouble::Exit)),
        load_hangs: replica == 0 && start > 0,
        ..slow()
    }
}

/// Sequences of each replica, in slots or waiting.
fn loads(handle: &EngineHandle) -> Vec<u64> {
    handle.replicas().iter().map(|replica| replica.metrics.load()).map(|load| load.running + load.waiting).collect()
}

async fn settles(handle: &EngineHandle, wanted: &[u64]) {
    let settled = async {
        while loads(handle) != wanted {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(LIMIT, settled).await.unwrap_or_else(|_| panic!("the replicas have {:?}, not {wanted:?}", loads(handle)));
}

/// One behind the other.
async fn submit_all(handle: &EngineHandle, requests: &[SequenceRequest]) -> Vec<SequenceStream> {
    let mut streams = Vec::new();
    for request in requests {
        streams.push(submit(handle, request.clone()).await.unwrap());
    }
    streams
}

#[tokio::test(start_paused = true)]
async fn requests_are_shared_out_and_each_gets_its_tokens() {
    let (handle, replicas) = start(3, |_, _| slow());
    all_ready(&handle).await;
    assert_eq!(handle.model().unwrap().max_context, 65 * 4);
    let mut streams = Vec::new();
    for seed in 0..9 {
        streams.push(submit(&handle, request(seed, 8, 60, vec![])).await.unwrap());
    }
    settles(&handle, &[3, 3, 3]).await;
    for (stream, seed) in streams.into_iter().zip(0..) {
        let wanted = (expected(&request(seed, 8, 60, vec![])).0, SequenceEvent::Finished(FinishReason::Length));
        assert_eq!(read(stream).await, wanted);
    }
    serve(&handle, 40).await;
    settles(&handle, &[0, 0, 0]).await;
    replicas.shutdown_unless(std::future::pending()).await;
    assert_eq!(handle.state(), EngineState::Draining);
    assert!(matches!(submit(&handle, request(1, 5, 5, vec![])).await, Err(SubmitError::Unavailable(_))));
}

#[tokio::test(start_paused = true)]
async fn a_ping_is_answered_by_every_replica_or_not_at_all() {
    let (handle, mut replicas) = start(2, |_, _| slow());
    all_ready(&handle).await;
    handle.ping().await.unwrap();
    // Its task is cut off.
    drop(replicas.groups.pop());
    timeout(LIMIT, handle.ping()).await.unwrap().unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn a_long_request_keeps_others_away_and_a_cached_prompt_draws_its_like() {
    let (handle, _replicas) = start(2, |_, _| slow());
    all_ready(&handle).await;
    let long = submit(&handle, request(1, 100, 100, vec![])).await.unwrap();
    let mut short = Vec::new();
    for seed in 2..5 {
        short.push(submit(&handle, request(seed, 5, 20, vec![])).await.unwrap());
    }
    settles(&handle, &[1, 3]).await;
    drop((long, short));
    settles(&handle, &[0, 0]).await;
    // The same prompt again and again, one at a time: turns would spread it.
    let before: Vec<u64> = handle.replicas().iter().map(|replica| replica.metrics.prefix_cache_queries.get()).collect();
    for _ in 0..4 {
        read(submit(&handle, request(9, 130, 3, vec![])).await.unwrap()).await;
    }
    let asked = handle
        .replicas()
        .iter()
        .zip(before)
        .map(|(replica, before)| replica.metrics.prefix_cache_queries.get() - before);
    let mut asked: Vec<u64> = asked.collect();
    asked.sort_unstable();
    assert_eq!(asked, [0, 4 * 130]);
}

#[tokio::test(start_paused = true)]
async fn what_a_lost_replica_was_computing_goes_on_in_another_at_once() {
    let (handle, replicas) = start(2, without_the_first);
    all_ready(&handle).await;
    let requests: Vec<_> = (0..12).map(|seed| request(seed, 6 + seed as u32, 80, vec![])).collect();
    let streams = submit_all(&handle, &requests).await;
    settles(&handle, &[6, 6]).await;
    let began = Instant::now();
    settles(&handle, &[0, 12]).await;
    assert!(began.elapsed() < Duration::from_millis(500), "{:?}", began.elapsed());
    for (stream, request) in streams.into_iter().zip(&requests) {
        let wanted = (expected(request).0, SequenceEvent::Finished(FinishReason::Length));
        assert_eq!(read(stream).await, wanted, "no token is missing, and none comes twice");
    }
    assert_eq!(handle.state(), EngineState::Ready, "the other computes");
    serve(&handle, 10).await;
    settles(&handle, &[0, 0]).await;
    replicas.shutdown_unless(std::future::pending()).await;
}

#[tokio::test(start_paused = true)]
async fn while_none_is_up_requests_wait_for_the_first_that_is() {
    let (handle, _replicas) = start(2, |replica, start| Script {
        after: (start == 0).then_some((20, Trouble::Exit)),
        load_hangs: replica == 0 && start > 0,
        ..slow()
    });
    all_ready(&handle).await;
    let requests: Vec<_> = (0..6).map(|seed| request(seed, 6, 60, vec![])).collect();
    let streams = submit_all(&handle, &requests).await;
    until(&handle, |state| matches!(state, EngineState::Recovering(words) if words.starts_with("replica "))).await;
    let late = submit(&handle, request(50, 5, 5, vec![])).await.unwrap();
    for (stream, request) in streams.into_iter().zip(&requests) {
        assert_eq!(read(stream).await.0, expected(request).0);
    }
    assert_eq!(read(late).await.0, expected(&request(50, 5, 5, vec![])).0);
}

#[tokio::test(start_paused = true)]
async fn what_a_replica_has_that_is_given_up_waits_for_one_that_is_not() {
    let mut config = GroupConfig { replicas: 2, ..config(1) };
    config.timeouts.loss_window = Duration::from_millis(100);
    // The first never starts again; the second takes its time, and is no help meanwhile.
    let (handle, _replicas) = start_with(config, |replica, start| Script {
        after: (start == 0).then_some((20, Trouble::Exit)),
        exits_at_once: replica == 0 && start > 0,
        load_hangs: replica == 1 && start == 1,
        ..slow()
    });
    all_ready(&handle).await;
    let requests: Vec<_> = (0..6).map(|seed| request(seed, 6, 60, vec![])).collect();
    let streams = submit_all(&handle, &requests).await;
    for (stream, request) in streams.into_iter().zip(&requests) {
        assert_eq!(read(stream).await.0, expected(request).0);
    }
    assert!(handle.replicas()[0].state.borrow().is_failed());
}

#[tokio::test(start_paused = true)]
async fn what_a_full_replica_refuses_is_tried_at_the_others() {
    let mut config = GroupConfig { replicas: 2, ..config(1) };
    config.limits.max_waiting_requests = 2;
    let (handle, _replicas) =
        start_with(config, |_, _| Script { step: Duration::from_millis(5), kv_pages: 1200, ..Script::default() });
    all_ready(&handle).await;
    // Each has four slots and two places. The first request looks like so much work that all others would go to the
    // other replica, which has no room for them.
    let read_on = |stream| tokio::spawn(read(stream));
    let mut readers = vec![read_on(submit(&handle, request(99, 3000, 240, vec![])).await.unwrap())];
    for seed in 0..11 {
        let request = request(seed, 4, 240, vec![]);
        readers.push(read_on(submit(&handle, request).await.expect("one of them has room")));
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    settles(&handle, &[6, 6]).await;
    let refused = submit(&handle, request(20, 4, 5, vec![])).await.unwrap_err();
    assert!(matches!(refused, SubmitError::QueueFull { limit: 2, .. }), "{refused}");
    // All or none: of three, two would fit.
    readers.drain(..2).for_each(|reader| reader.abort());
    settles(&handle, &[5, 5]).await;
    let three = (0..3).map(|seed| request(30 + seed, 4, 5, vec![])).collect();
    assert!(handle.submit(three, Standing::default()).await.is_err());
    settles(&handle, &[5, 5]).await;
    readers.iter().for_each(|reader| reader.abort());
    settles(&handle, &[0, 0]).await;
    let plans = || handle.replicas().iter().map(|replica| replica.metrics.plans.get()).collect::<Vec<_>>();
    let before = plans();
    let four: Vec<_> = (0..4).map(|seed| request(40 + seed, 4, 5, vec![])).collect();
    let taken = handle.submit(four.clone(), Standing::default()).await.unwrap();
    for (stream, request) in taken.into_iter().zip(&four) {
        assert_eq!(read(stream).await.0, expected(request).0, "in the order of the request");
    }
    assert!(plans().iter().zip(before).all(|(now, before)| *now > before), "each computes a part");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_loses_replicas_is_found_out_and_the_rest_goes_on() {
    const POISON: u32 = 777;
    let (handle, _replicas) = start(3, |_, _| Script { poison: Some(POISON), ..Script::default() });
    all_ready(&handle).await;
    let mut poison = request(99, 5, 20, vec![]);
    poison.prompt[0] = POISON;
    let (culprit, ()) =
        tokio::join!(async { read(submit(&handle, poison.clone()).await.unwrap()).await }, serve(&handle, 30));
    assert!(matches!(&culprit.1, SequenceEvent::Failed(words) if words.contains("lost 3 times")), "{culprit:?}");
    let losses = || handle.replicas().iter().map(|replica| replica.metrics.losses.get()).sum::<u64>();
    assert_eq!(losses(), 3, "twice beside others, once alone");
    for _ in 0..6 {
        let refused = submit(&handle, poison.clone()).await.unwrap_err();
        assert!(matches!(refused, SubmitError::Quarantined { .. }), "every replica knows: {refused}");
    }
    serve(&handle, 30).await;
    assert_eq!(losses(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_replica_with_other_bits_is_refused_and_the_others_serve() {
    let domain = |replica| if replica == 1 { "other" } else { "fake" };
    let (handle, _replicas) = start(2, move |replica, _| Script {
        bit_domain: domain(replica),
        // The first is up first.
        load_hangs: false,
        exits_at_once: false,
        ..Script::default()
    });
    ready(&handle).await;
    // Whichever was first, the other is not served from.
    serve(&handle, 20).await;
    let served: Vec<bool> = handle.replicas().iter().map(|replica| replica.metrics.plans.get() > 0).collect();
    assert_eq!(served.iter().filter(|served| **served).count(), 1, "{served:?}");
    assert_eq!(handle.state(), EngineState::Ready);
}

#[tokio::test(start_paused = true)]
async fn readers_that_go_free_their_slots_wherever_they_are_computed() {
    let (handle, _replicas) = start(2, without_the_first);
    all_ready(&handle).await;
    let mut streams = Vec::new();
    for seed in 0..6 {
        streams.push(submit(&handle, request(seed, 6, 200, vec![])).await.unwrap());
    }
    settles(&handle, &[0, 6]).await;
    drop(streams);
    settles(&handle, &[0, 0]).await;
}

/// Replicas that are lost again and again under requests that come and go: each reader gets its tokens, and no more.
#[tokio::test(start_paused = true)]
async fn a_storm_of_losses_and_cancels_leaves_every_stream_whole() {
    for seed in 0..8 {
        let (handle, replicas) = start(3, move |replica, start| {
            let chance = mix(seed << 32 | u64::from(replica) << 16 | u64::from(start));
            let trouble = [Trouble::Exit, Trouble::BreakStream, Trouble::EndSlowly][(chance % 3) as usize];
            Script { after: (start < 6).then_some((20 + chance % 120, trouble)), ..Script::default() }
        });
        all_ready(&handle).await;
        let complete = AtomicUsize::new(0);
        let one = async |number: u64| {
            let chance = mix(seed << 40 | number);
            tokio::time::sleep(Duration::from_millis(chance % 400)).await;
            let request = request(number, 1 + (chance % 90) as u32, 5 + (chance % 60) as u32, vec![]);
            let mut stream = submit(&handle, request.clone()).await.unwrap();
            let (tokens, _) = expected(&request);
            let takes = if chance.is_multiple_of(4) { tokens.len() / 2 } else { tokens.len() };
            for wanted in &tokens[..takes] {
                match timeout(LIMIT, stream.next()).await.expect("it stands still") {
                    Some(SequenceEvent::Token(token)) => assert_eq!(token.id, *wanted, "seed {seed}, request {number}"),
                    // Bad luck: it was computed in two losses, and alone in a third.
                    Some(SequenceEvent::Failed(words)) if words.contains("lost 3 times") => return,
                    other => panic!("seed {seed}, request {number}: {other:?}"),
                }
            }
            if takes == tokens.len() {
                let end = stream.next().await;
                assert!(matches!(end, Some(SequenceEvent::Finished(_))), "seed {seed}, request {number}: {end:?}");
                complete.fetch_add(1, Ordering::Relaxed);
            }
        };
        join_all((0..120).map(one)).await;
        assert!(complete.load(Ordering::Relaxed) > 80, "seed {seed}: {complete:?} of 90 are complete");
        settles(&handle, &[0, 0, 0]).await;
        replicas.shutdown_unless(std::future::pending()).await;
    }
}

/// A replica that takes every request at once.
fn willing() -> EngineHandle {
    let (sender, mut commands) = mpsc::unbounded_channel();
    let (state, state_receiver) = watch::channel(EngineState::Ready);
    let (model, model_receiver) = watch::channel(None);
    let back = sender.clone();
    tokio::spawn(async move {
        let _open = (state, model);
        while let Some(command) = commands.recv().await {
            let Command::Submit(Submission { requests, reply, .. }) = command else { continue };
            let streams = requests.iter().map(|_| crate::engine::sequence(1, 1, back.clone()).1).collect();
            let _ = reply.send(Ok(streams));
        }
    });
    EngineHandle::new(sender, state_receiver, model_receiver, Arc::default())
}

/// A sequence that was begun where the context was longer does not go where it would lose the group.
#[tokio::test]
async fn a_sequence_goes_only_where_its_context_holds_it() {
    let with_context = |max_context| {
        let handle = willing();
        let (_, model) = watch::channel(Some(Arc::new(ModelInfo { max_context, ..ModelInfo::default() })));
        EngineHandle::new(handle.commands().clone(), handle.watch_state(), model, Arc::default())
    };
    let (_, mut router) = join(&[with_context(64), with_context(128), with_context(64)]);
    let chosen = |router: &mut Router, max_tokens| {
        router.choose(&request(1, 50, max_tokens, vec![]), 0, 0).map(|(replica, _)| replica)
    };
    assert!((0..6).all(|_| chosen(&mut router, 15) == Some(1)), "65 tokens");
    assert_eq!(chosen(&mut router, 79), None);
    let mut of_14: Vec<_> = (0..6).filter_map(|_| chosen(&mut router, 14)).collect();
    of_14.sort_unstable();
    of_14.dedup();
    assert_eq!(of_14, [0, 1, 2], "64 tokens go anywhere, in turn");
}

/// What the task in front costs a request: the figures are printed, and have a bound that only a mistake exceeds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_takes_little_longer_through_the_router() {
    let (through, router) = join(&[willing(), willing()]);
    tokio::spawn(router.run());
    let direct = willing();
    let median = async |handle: &EngineHandle, tokens: u32| {
        let mut times = Vec::new();
        for seed in 0..400 {
            let request = request(seed, tokens, 20, vec![]);
            let begin = std::time::Instant::now();
            let streams = handle.submit(vec![request], Standing::default()).await.unwrap();
            times.push(begin.elapsed());
            drop(streams);
        }
        times.sort_unstable();
        times[times.len() / 2]
    };
    for tokens in [100, 1000, 16_000] {
        let (alone, routed) = (median(&direct, tokens).await, median(&through, tokens).await);
        println!("{tokens} tokens: {alone:?} alone, {routed:?} through the router");
        assert!(routed < alone + Duration::from_millis(20), "{tokens} tokens: {alone:?}, {routed:?}");
    }
}
