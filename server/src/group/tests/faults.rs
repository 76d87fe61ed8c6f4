//! Workers that die, hang, lie or come back as others: no token is lost, and nothing is left behind.

use super::*;
use crate::group::fake::SLOW_END;

/// Waits until so many workers are left, or fewer.
async fn down_to(alive: &AtomicUsize, count: usize) {
    let wait = async {
        while alive.load(Ordering::SeqCst) > count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.expect("a worker stays");
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_hangs_is_noticed_by_what_steps_take() {
    // Steps of 0.2 ms, and a bound on the longest of two minutes.
    let script = |start: u32, rank: u32| Script {
        after: (start == 0 && rank == 1).then_some((40, Trouble::Hang)),
        ..Script::default()
    };
    let mut config = config(2);
    (config.timeouts.step, config.timeouts.step_floor) = (Duration::from_secs(120), Duration::from_secs(3));
    let (handle, task) = start(config, FakeLauncher::new(2, script));
    ready(&handle).await;
    let began = Instant::now();
    let request = request(1, 5, 100, vec![]);
    let reading = tokio::spawn(read(submit(&handle, request.clone()).await.unwrap()));
    let late = |state: &EngineState| matches!(state, EngineState::Recovering(words) if words.contains("has reported"));
    until(&handle, late).await;
    assert!(began.elapsed() < Duration::from_millis(2000), "not ready while a report is late: {:?}", began.elapsed());
    assert_eq!(task.figures().losses, 0);
    assert_eq!(reading.await.unwrap().0, expected(&request).0);
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    assert_eq!(task.figures().losses, 1);
}

#[tokio::test(start_paused = true)]
async fn a_step_that_is_late_is_told_and_forgotten_once_it_comes() {
    let script = |_, _| Script { after: Some((40, Trouble::Pause(Duration::from_secs(2)))), ..Script::default() };
    let mut config = config(1);
    (config.timeouts.step, config.timeouts.step_floor) = (Duration::from_secs(120), Duration::from_secs(3));
    let (handle, task) = start(config, FakeLauncher::new(1, script));
    ready(&handle).await;
    let request = request(1, 5, 100, vec![]);
    let reading = tokio::spawn(read(submit(&handle, request.clone()).await.unwrap()));
    until(&handle, |state| matches!(state, EngineState::Recovering(_))).await;
    ready(&handle).await;
    assert_eq!(reading.await.unwrap().0, expected(&request).0);
    assert_eq!(task.figures().losses, 0);
}

#[tokio::test(start_paused = true)]
async fn a_group_that_is_lost_while_its_steps_are_timed_is_started_again() {
    // Once in the steps that are timed, and once in those of the request.
    let script = |start: u32, rank: u32| {
        let steps = [2, 30].get(start as usize).filter(|_| rank == 1);
        Script { after: steps.map(|&steps| (steps, Trouble::Exit)), ..Script::default() }
    };
    let launcher = FakeLauncher::new(2, script);
    let (handle, task) = start(GroupConfig { timing: Duration::from_secs(1), ..config(2) }, launcher.clone());
    ready(&handle).await;
    assert_eq!(launcher.starts.load(Ordering::SeqCst), 2);
    let figures = task.figures();
    assert_eq!((figures.steps, figures.plans, figures.losses), (0, 0, 0), "what was timed is no request's");
    let request = request(1, 5, 100, vec![]);
    assert_eq!(read(submit(&handle, request.clone()).await.unwrap()).await.0, expected(&request).0);
    assert_eq!((launcher.starts.load(Ordering::SeqCst), task.figures().losses), (3, 1));
    task.shutdown().await;
    assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
}

#[tokio::test(start_paused = true)]
async fn a_lost_rank_loses_no_token() {
    for (trouble, words) in [
        (Trouble::Exit, "rank 1 was killed by signal 9"),
        (Trouble::BreakStream, "rank 1 broke its outcomes off: out of luck"),
        (Trouble::Hang, "rank 1 has reported nothing for"),
    ] {
        // Two short lives, the third one whole.
        let script = move |start: u32, rank: u32| Script {
            after: (rank == 1 && start < 2).then_some((9 * u64::from(start) + 5, trouble)),
            ..Script::default()
        };
        let launcher = FakeLauncher::new(2, script);
        let (handle, task) = start(impatient(2), launcher.clone());
        ready(&handle).await;
        let watch = async {
            let seen = until(&handle, |state| matches!(state, EngineState::Recovering(_))).await;
            let EngineState::Recovering(reason) = seen.last().unwrap() else { unreachable!() };
            assert!(reason.starts_with(words), "{reason}");
        };
        tokio::join!(serve(&handle, 12), watch);
        assert_eq!((launcher.starts.load(Ordering::SeqCst), task.figures().losses), (3, 2), "{trouble:?}");
        ready(&handle).await;
        task.shutdown().await;
        assert_eq!(launcher.alive.load(Ordering::SeqCst), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn the_others_end_at_once_where_the_lost_one_takes_its_time() {
    // As of a process whose GPU is being given back.
    let script = |start: u32, rank: u32| Script {
        after: (rank == 1 && start == 0).then_some((5, Trouble::EndSlowly)),
        ..Script::default()
    };
    let launcher = FakeLauncher::new(2, script);
    let (handle, task) = start(config(2), launcher.clone());
    ready(&handle).await;
    let running = submit(&handle, request(1, 5, 10, vec![])).await.unwrap();
    until(&handle, |state| matches!(state, EngineState::Recovering(_))).await;
    let lost = Instant::now();
    down_to(&launcher.alive, 1).await;
    assert!(lost.elapsed() < SLOW_END * 3 / 4, "rank 0 ended after {:?}", lost.elapsed());
    let ended = |state: &EngineState| matches!(state, EngineState::Recovering(words) if words.contains("signal"));
    let seen = until(&handle, ended).await;
    assert!(lost.elapsed() > SLOW_END / 2, "or rank 1 did not take its time");
    let EngineState::Recovering(reason) = seen.last().unwrap() else { unreachable!() };
    assert!(reason.starts_with("rank 1 was killed by signal 9"), "{reason}");
    assert_eq!(read(running).await.0, expected(&request(1, 5, 10, vec![])).0);
    task.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_is_lost_while_it_loads_keeps_no_other() {
    // It says so, and does not exit.
    let script = |start: u32, rank: u32| Script {
        load_error: (rank == 1 && start == 0).then(|| Status::unavailable("out of luck")),
        ..Script::default()
    };
    let launcher = FakeLauncher::new(2, script);
    let (handle, task) = start(config(2), launcher.clone());
    let both = async {
        while launcher.alive.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, both).await.expect("the launch stands still");
    let started = Instant::now();
    down_to(&launcher.alive, 1).await;
    assert!(started.elapsed() < Duration::from_millis(700), "rank 0 ended after {:?}", started.elapsed());
    assert_eq!(launcher.starts.load(Ordering::SeqCst), 1, "rank 1 has not ended yet");
    ready(&handle).await;
    task.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn rank_zero_may_be_the_one() {
    for trouble in [Trouble::Exit, Trouble::BreakStream, Trouble::Hang, Trouble::Lie] {
        let after = move |start, rank| (rank == 0 && start < 2).then_some((7, trouble));
        let launcher =
            FakeLauncher::new(2, move |start, rank| Script { after: after(start, rank), ..Script::default() });
        let (handle, task) = start(impatient(2), launcher);
        ready(&handle).await;
        serve(&handle, 8).await;
        assert_eq!(task.figures().losses, 2, "{trouble:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_rank_that_does_not_answer_is_noticed() {
    let launcher = FakeLauncher::new(2, |start, rank| Script { is_deaf: start == 0 && rank == 1, ..Script::default() });
    let mut config = config(2);
    config.timeouts.answer = Duration::from_millis(500);
    let (handle, task) = start(config, launcher.clone());
    ready(&handle).await;
    let words = "rank 1 does not answer: nothing for 1s";
    until(&handle, |state| matches!(state, EngineState::Recovering(why) if why.starts_with(words))).await;
    ready(&handle).await;
    serve(&handle, 3).await;
    assert_eq!((launcher.starts.load(Ordering::SeqCst), task.figures().losses), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn an_idle_group_that_is_lost_comes_back() {
    let lifetime = |start, rank| (start == 0 && rank == 1).then_some(Duration::from_millis(300));
    let launcher =
        FakeLauncher::new(2, move |start, rank| Script { lifetime: lifetime(start, rank), ..Script::default() });
    let (handle, task) = start(config(2), launcher.clone());
    ready(&handle).await;
    until(&handle, |state| matches!(state, EngineState::Recovering(words) if words.contains("code 101"))).await;
    ready(&handle).await;
    serve(&handle, 3).await;
    assert_eq!((launcher.starts.load(Ordering::SeqCst), task.figures().losses), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_rank_that_never_reports_the_last_step_is_noticed() {
    // 10 tokens and the release of the slot: the eleventh report, after which nothing is owed by rank 0.
    let after = |start, rank| (start == 0 && rank == 1).then_some((10, Trouble::Hang));
    let launcher = FakeLauncher::new(2, move |start, rank| Script { after: after(start, rank), ..Script::default() });
    let (handle, task) = start(impatient(2), launcher.clone());
    ready(&handle).await;
    let stream = submit(&handle, request(1, 5, 10, vec![])).await.unwrap();
    assert_eq!(read(stream).await.0.len(), 10);
    until(
        &handle,
        |state| matches!(state, EngineState::Recovering(words) if words.starts_with("rank 1 has reported nothing")),
    )
    .await;
    ready(&handle).await;
    assert_eq!(task.figures().losses, 1);
}

#[tokio::test(start_paused = true)]
async fn another_bit_domain_is_never_mixed_in() {
    let script = |start: u32, _| Script {
        bit_domain: if start == 0 { "fake" } else { "other" },
        after: Some((5, Trouble::Exit)),
        ..Script::default()
    };
    let (handle, _task) = start(config(1), FakeLauncher::new(1, script));
    ready(&handle).await;
    let stream = submit(&handle, long_request()).await.unwrap();
    let (tokens, end) = read(stream).await;
    assert!(expected(&long_request()).0.starts_with(&tokens) && !tokens.is_empty());
    assert!(matches!(end, SequenceEvent::Failed(_)), "{end:?}");
    until(&handle, |state| matches!(state, EngineState::Failed(words) if words.contains("another model"))).await;
}

#[tokio::test(start_paused = true)]
async fn another_checkpoint_is_never_mixed_in() {
    let script = |start: u32, _| Script {
        model_digest: if start == 0 { "digest" } else { "another" },
        after: Some((5, Trouble::Exit)),
        ..Script::default()
    };
    let (handle, _task) = start(config(2), FakeLauncher::new(2, script));
    ready(&handle).await;
    let stream = submit(&handle, long_request()).await.unwrap();
    let (tokens, end) = read(stream).await;
    assert!(expected(&long_request()).0.starts_with(&tokens) && !tokens.is_empty());
    assert!(matches!(&end, SequenceEvent::Failed(words) if words.contains("have changed")), "{end:?}");
    until(&handle, |state| matches!(state, EngineState::Failed(words) if words.contains("have changed"))).await;
}

#[tokio::test(start_paused = true)]
async fn ranks_that_read_different_files_load_again() {
    let digest = |start, rank| if start == 0 && rank == 1 { "another" } else { "digest" };
    let launcher =
        FakeLauncher::new(2, move |start, rank| Script { model_digest: digest(start, rank), ..Script::default() });
    let (handle, _task) = start(config(2), launcher.clone());
    ready(&handle).await;
    assert_eq!(launcher.starts.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn the_front_end_is_answered_while_workers_are_killed() {
    let script = |start: u32, rank: u32| Script {
        after: (start == 0 && rank == 0).then_some((5, Trouble::Exit)),
        kill_takes: Duration::from_secs(2),
        ..Script::default()
    };
    let (handle, task) = start(config(2), FakeLauncher::new(2, script));
    ready(&handle).await;
    let running = submit(&handle, long_request()).await.unwrap();
    until(&handle, |state| matches!(state, EngineState::Recovering(_))).await;
    let started = Instant::now();
    let late = submit(&handle, request(2, 5, 10, vec![])).await.unwrap();
    drop(submit(&handle, request(3, 5, 10, vec![])).await.unwrap());
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(read(running).await.0, expected(&long_request()).0);
    assert_eq!(read(late).await.0, expected(&request(2, 5, 10, vec![])).0);
    assert!(started.elapsed() > Duration::from_secs(1), "or no kill took its time");
    // A shutdown in the midst of it waits for the last.
    task.shutdown().await;
}
