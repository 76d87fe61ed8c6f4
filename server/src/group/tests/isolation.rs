//! Requests that cannot hurt each other, and a replica that survives the ones that try.

use super::*;

/// The first token of prompts that lose the group.
const POISON: u32 = 777;

#[tokio::test(start_paused = true)]
async fn a_poison_request_fails_alone_and_is_not_computed_again() {
    let launcher = FakeLauncher::new(2, |_, _| Script { poison: Some(POISON), ..Script::default() });
    let (handle, task) = start(config(2), launcher.clone());
    ready(&handle).await;
    let mut poison = request(99, 5, 20, vec![]);
    poison.prompt[0] = POISON;
    for round in 0..5 {
        // In the midst of 20 others, three of which are computed beside it at a time.
        let ((), culprit, ()) = tokio::join!(
            serve(&handle, 10),
            async {
                match submit(&handle, poison.clone()).await {
                    Ok(stream) => Some(read(stream).await),
                    Err(SubmitError::Quarantined { .. }) => None,
                    Err(error) => panic!("{error}"),
                }
            },
            serve(&handle, 10),
        );
        if round == 0 {
            let (tokens, end) = culprit.expect("it was not known yet");
            assert!(tokens.is_empty(), "{tokens:?}");
            assert!(matches!(&end, SequenceEvent::Failed(words) if words.contains("lost 3 times")), "{end:?}");
        } else {
            assert_eq!(culprit, None, "it is computed again");
        }
        assert_eq!(launcher.starts.load(Ordering::SeqCst), 4, "twice with others, once alone");
    }
    // Others that lose the group, more of them in a row than failed starts are allowed, do not end the server.
    for seed in 0..4 {
        let mut poison = request(seed, 6, 20, vec![]);
        poison.prompt[0] = POISON;
        let (_, end) = read(submit(&handle, poison).await.unwrap()).await;
        assert!(matches!(end, SequenceEvent::Failed(_)), "{end:?}");
    }
    serve(&handle, 5).await;
    assert_eq!(task.figures().losses, 15);
    task.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn a_group_that_dies_whatever_it_computes_is_given_up_and_no_request_blamed() {
    let launcher = FakeLauncher::new(1, |_, _| Script { after: Some((0, Trouble::Exit)), ..Script::default() });
    let mut config = GroupConfig { max_failed_starts: 6, ..config(1) };
    config.timeouts.loss_window = Duration::from_millis(1);
    let (handle, _task) = start(config, launcher.clone());
    ready(&handle).await;
    let (tokens, end) = read(submit(&handle, long_request()).await.unwrap()).await;
    assert!(tokens.is_empty());
    assert!(matches!(&end, SequenceEvent::Failed(words) if words.contains("failed 6 times in a row")), "{end:?}");
    // Twice with the request, and then with nothing but the test of the group.
    assert_eq!(launcher.starts.load(Ordering::SeqCst), 2 + 6);
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_dies_every_few_steps_is_started_ever_more_seldom() {
    let launcher = FakeLauncher::new(1, |_, _| Script { after: Some((20, Trouble::Exit)), ..Script::default() });
    let mut config = config(1);
    (config.timeouts.backoff, config.timeouts.backoff_limit) = (Duration::from_millis(100), Duration::from_secs(5));
    let (handle, _task) = start(config, launcher.clone());
    ready(&handle).await;
    let request = request(1, 5, 100, vec![]);
    let reading = tokio::spawn(read(submit(&handle, request.clone()).await.unwrap()));
    tokio::time::sleep(Duration::from_secs(3)).await;
    let starts = launcher.starts.load(Ordering::SeqCst);
    assert!((5..8).contains(&starts), "{starts} starts in 3 s");
    assert_eq!(reading.await.unwrap().0, expected(&request).0, "and it gets on");
}

#[tokio::test(start_paused = true)]
async fn a_group_with_fewer_pages_goes_on_with_what_fits() {
    let script = |start: u32, _| Script {
        kv_pages: if start == 0 { 64 } else { 16 },
        after: (start == 0).then_some((10, Trouble::Exit)),
        ..Script::default()
    };
    let (handle, task) = start(config(2), FakeLauncher::new(2, script));
    ready(&handle).await;
    assert_eq!(handle.model().unwrap().max_context, 64 * 4);
    // 104 and 45 positions; 16 pages of 4 hold 64.
    let (large, small) = (request(1, 5, 100, vec![]), request(2, 6, 40, vec![]));
    let streams = (submit(&handle, large.clone()).await.unwrap(), submit(&handle, small.clone()).await.unwrap());
    let ((tokens, end), (rest, ended)) = tokio::join!(read(streams.0), read(streams.1));
    assert!(expected(&large).0.starts_with(&tokens) && !tokens.is_empty());
    assert!(matches!(&end, SequenceEvent::Failed(words) if words.contains("needs 26 KV pages")), "{end:?}");
    assert_eq!((rest, ended), (expected(&small).0, SequenceEvent::Finished(FinishReason::Length)));
    ready(&handle).await;
    assert_eq!(handle.model().unwrap().max_context, 16 * 4, "new requests are told of what there is");
    let refused = submit(&handle, large).await.unwrap_err();
    assert_eq!(refused, SubmitError::TooLarge { needed: 26, available: 16 });
    task.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn those_who_do_not_read_do_not_keep_the_slots() {
    let launcher = FakeLauncher::new(1, |_, _| Script { step: Duration::from_millis(2), ..Script::default() });
    let (handle, task) = start(config(1), launcher);
    ready(&handle).await;
    // All slots, and nobody takes a token.
    let requests: Vec<SequenceRequest> = (0..4).map(|seed| request(seed, 5, 240, vec![])).collect();
    let mut idle = Vec::new();
    for request in &requests {
        idle.push(submit(&handle, request.clone()).await.unwrap());
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let began = Instant::now();
    let chat = request(9, 5, 10, vec![]);
    assert_eq!(read(submit(&handle, chat.clone()).await.unwrap()).await.0, expected(&chat).0);
    assert!(began.elapsed() < Duration::from_millis(200), "it waited for those who do not read: {:?}", began.elapsed());
    for (stream, request) in idle.into_iter().zip(&requests) {
        assert_eq!(read(stream).await.0, expected(request).0, "who gave up its slot gets every token");
    }
    task.shutdown().await;
}
