//! What the engine counts, against what it was asked for.

use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::*;
use crate::drafts::DraftReport;
use crate::engine::Unwanted;
use crate::frontend::{Frontend, GenerateError, LargeWork, Record};
use crate::metrics::Engines;
use crate::request::{Input, RawRequest, validate};
use crate::text::Text;
use crate::upload::Uploads;

/// The value of a series of the one engine, by its name without the prefix and its other labels, as a scrape shows it.
fn value(handle: &EngineHandle, series: &str) -> f64 {
    let mut registry = Registry::default();
    registry
        .register_collector(Box::new(Engines::new(handle.replicas().iter().map(|replica| replica.metrics.clone()))));
    let mut text = String::new();
    encode(&mut text, &registry).unwrap();
    let text = text.replace("{engine=\"0\"}", "").replace("engine=\"0\",", "");
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("vllm:").or(line.strip_prefix("looplane_")));
    let line = lines.find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {text}")).parse().unwrap()
}

fn ended(handle: &EngineHandle, reason: &str) -> f64 {
    value(handle, &format!("request_success_total{{finished_reason=\"{reason}\"}}"))
}

/// Waits for what the engine counts after the client knows.
async fn comes_to(handle: &EngineHandle, series: &str, wanted: f64) {
    let counted = async {
        while value(handle, series) != wanted {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let waited = tokio::time::timeout(LIMIT, counted).await;
    waited.unwrap_or_else(|_| panic!("{series} stays {}, not {wanted}", value(handle, series)));
}

#[tokio::test(start_paused = true)]
async fn counts_match_what_was_asked_and_answered() {
    let launcher = FakeLauncher::new(2, |_, _| Script::default());
    let (handle, _task) = start(config(2), launcher);
    assert_eq!((value(&handle, "kv_cache_pages"), ended(&handle, "stop")), (0.0, 0.0), "there before the first event");
    ready(&handle).await;
    let requests: Vec<SequenceRequest> = (0..10).map(|seed| request(seed, 3 + seed as u32, 8, vec![])).collect();
    let streams = requests.iter().map(async |request| read(submit(&handle, request.clone()).await.unwrap()).await);
    let answers = futures::future::join_all(streams).await;
    let generated: usize = answers.iter().map(|(tokens, _)| tokens.len()).sum();
    let prompt: usize = requests.iter().map(|request| request.prompt.len()).sum();
    comes_to(&handle, "request_success_total{finished_reason=\"length\"}", 10.0).await;
    comes_to(&handle, "num_requests_running", 0.0).await;
    for (series, wanted) in [
        ("num_requests_waiting", 0.0),
        ("generation_tokens_total", generated as f64),
        ("prompt_tokens_total", prompt as f64),
        // Every prompt was computed once; each token but the last of a sequence was a row of its own.
        ("prompt_rows_total", prompt as f64),
        ("decode_rows_total", (generated - 10) as f64),
        ("step_rows_sum", (prompt + generated - 10) as f64),
        ("time_to_first_token_seconds_count", 10.0),
        ("inter_token_latency_seconds_count", (generated - 10) as f64),
        ("request_queue_time_seconds_count", 10.0),
        ("request_prefill_time_seconds_count", 10.0),
        ("request_decode_time_seconds_count", 10.0),
        ("e2e_request_latency_seconds_count", 10.0),
        ("request_generation_tokens_sum", generated as f64),
        ("request_prompt_tokens_sum", prompt as f64),
        ("kv_cache_pages", 64.0),
        ("kv_cache_pages_used", 0.0),
        // 64 pages of 4 positions of 10 bytes, on rank 0 one page more.
        ("kv_cache_size_bytes", (64 + 65) as f64 * 40.0),
        ("weight_stream_bytes", 2000.0),
        ("worker_losses_total", 0.0),
        ("request_inference_time_seconds_count", 10.0),
        ("request_time_per_output_token_seconds_count", 10.0),
        ("cache_config_info{block_size=\"4\",num_gpu_blocks=\"64\"}", 1.0),
    ] {
        assert_eq!(value(&handle, series), wanted, "{series}");
    }
    let queued = value(&handle, "request_queue_time_seconds_sum");
    assert!(queued <= value(&handle, "time_to_first_token_seconds_sum"), "{queued}");
}

#[tokio::test(start_paused = true)]
async fn steps_read_the_weights_once_and_what_their_rows_see() {
    let launcher = FakeLauncher::new(2, |_, _| Script::default());
    let (handle, _task) = start(config(2), launcher);
    ready(&handle).await;
    read(submit(&handle, request(1, 12, 3, vec![])).await.unwrap()).await;
    comes_to(&handle, "step_duration_seconds_count", 4.0).await;
    // Two chunks of the prompt, whose rows read together, and 2 rows that see one position more each. On each of the
    // two ranks a position has 10 bytes, the weights 1000; 100 of these are the LM head, for which the first chunk has
    // no use.
    let (weights, positions) = (4 * 1000 - 100, 8 + 12 + 13 + 14);
    assert_eq!(value(&handle, "step_read_bytes_total"), f64::from(2 * (weights + positions * 10)));
    for rank in 0..2 {
        let of_rank = |what: &str| value(&handle, &format!("rank_{what}_total{{rank=\"{rank}\"}}"));
        assert_eq!(of_rank("read_bytes"), f64::from(weights + positions * 10));
        assert_eq!((of_rank("step_seconds") * 1e9).round(), 4000.0, "rank {rank}: 1 us a step");
        assert_eq!((of_rank("wait_seconds") * 1e9).round(), 1000.0, "rank {rank}: a quarter of it");
    }
}

#[tokio::test(start_paused = true)]
async fn what_nobody_wants_any_more_is_told_apart() {
    let launcher = FakeLauncher::new(1, |_, _| Script { step: Duration::from_millis(2), ..Script::default() });
    let (handle, _task) = start(config(1), launcher);
    ready(&handle).await;
    let mut stream = submit(&handle, long_request()).await.unwrap();
    stream.next().await.unwrap();
    comes_to(&handle, "num_requests_running", 1.0).await;
    assert!(value(&handle, "kv_cache_usage_perc") > 0.0);
    drop(stream);
    comes_to(&handle, "num_requests_running", 0.0).await;
    assert_eq!((ended(&handle, "abort"), ended(&handle, "stop")), (1.0, 0.0), "its client went away");
    assert_eq!(value(&handle, "kv_cache_usage_perc"), 0.0, "and its pages are free");
    let mut stream = submit(&handle, long_request()).await.unwrap();
    stream.next().await.unwrap();
    // As behind a stop text, which its reader finds some tokens later than the group samples it.
    stream.let_go(Unwanted::Complete);
    comes_to(&handle, "request_success_total{finished_reason=\"stop\"}", 1.0).await;
    assert_eq!(ended(&handle, "abort"), 1.0, "a stop text is no abort");
    // Neither was followed to an end of the loop's own, but the second was whole.
    assert_eq!(value(&handle, "e2e_request_latency_seconds_count"), 1.0);
    assert_eq!(value(&handle, "request_generation_tokens_sum"), 1.0, "what its reader took, and was told of");
    assert_eq!(value(&handle, "generation_tokens_total"), 2.0);
    let mut stream = submit(&handle, long_request()).await.unwrap();
    stream.next().await.unwrap();
    stream.let_go(Unwanted::GivenUp);
    comes_to(&handle, "request_success_total{finished_reason=\"error\"}", 1.0).await;
    assert_eq!(ended(&handle, "abort"), 1.0, "the server's own errors are no abort");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_does_not_fit_the_queue_leaves_no_trace() {
    // Slow enough that nothing ends meanwhile.
    let launcher = FakeLauncher::new(1, |_, _| Script { step: Duration::from_millis(50), ..Script::default() });
    let mut config = config(1);
    (config.limits.max_slots, config.limits.max_waiting_requests) = (1, 3);
    let (handle, _task) = start(config, launcher);
    ready(&handle).await;
    let mut running = submit(&handle, long_request()).await.unwrap();
    running.next().await.unwrap();
    let _waiting = submit(&handle, long_request()).await.unwrap();
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
    let text = Arc::new(Text::load(&fixture).unwrap());
    let uploads = Uploads::new(1, LIMIT);
    let frontend = Frontend::new(
        handle.clone(),
        text.clone(),
        "fake".into(),
        (DraftReport::None, 0),
        8,
        uploads,
        LargeWork::Shares,
    );
    let raw = RawRequest { n: Some(3), ..RawRequest::new("prompt", Input::Tokens(vec![vec![5]])) };
    let model = frontend.model().unwrap();
    let valid = validate(raw, &model, &text).unwrap();
    let refused = frontend
        .admit(valid, model, frontend.enter(&Arc::new(Record::new("id".into(), None, None)), None, "/").unwrap())
        .await;
    assert!(matches!(refused, Err(GenerateError::Submit(SubmitError::QueueFull { .. }))), "{refused:?}");
    comes_to(&handle, "num_requests_waiting", 1.0).await;
    for reason in ["stop", "length", "abort", "error"] {
        assert_eq!(ended(&handle, reason), 0.0, "{reason}");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_workers_and_their_recovery_are_counted() {
    let launcher = FakeLauncher::new(2, |start, rank| Script {
        after: (start == 0 && rank == 1).then_some((20, Trouble::Exit)),
        kill_takes: Duration::from_millis(30),
        ..Script::default()
    });
    let (handle, _task) = start(config(2), launcher);
    ready(&handle).await;
    let request = request(1, 5, 60, vec![]);
    let (tokens, _) = read(submit(&handle, request.clone()).await.unwrap()).await;
    assert_eq!(tokens, expected(&request).0);
    comes_to(&handle, "request_success_total{finished_reason=\"length\"}", 1.0).await;
    assert_eq!((value(&handle, "worker_losses_total"), value(&handle, "worker_recovery_seconds_count")), (1.0, 1.0));
    assert!(value(&handle, "worker_recovery_seconds_sum") >= 0.03);
    assert_eq!(value(&handle, "prompt_tokens_total"), 5.0, "the client's prompt, though it was computed twice");
    assert!(value(&handle, "prompt_rows_total") > 10.0, "with the tokens that came before the loss");
    assert_eq!(value(&handle, "request_queue_time_seconds_count"), 1.0);
}
