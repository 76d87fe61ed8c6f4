use super::*;
use crate::faults::Conduct;
use crate::mock::{Fault, Mock};
use crate::record::RequestRecord;
use crate::report::{Tally, Window};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// What Looplane says after so many seconds at a step every 10 ms.
fn said(seconds: f64, running: u32, kv_usage: f64) -> (f64, Snapshot) {
    let (steps, step_seconds) = (100.0 * seconds, 0.5 * seconds);
    let text = format!(
        "looplane_num_requests_running {running}\nlooplane_kv_cache_usage_perc {kv_usage}\n\
         looplane_step_duration_seconds_count {steps}\nlooplane_step_duration_seconds_sum {step_seconds}\n\
         looplane_step_wait_seconds_sum {}\nlooplane_step_rows_sum {}\nlooplane_decode_rows_total {}\n\
         looplane_step_read_bytes_total {}\nlooplane_generation_tokens_total {}\n\
         looplane_time_to_first_token_seconds_count {}\nlooplane_time_to_first_token_seconds_sum {}\n",
        step_seconds / 10.0,
        8.0 * steps,
        6.0 * steps,
        1e8 * steps,
        5.0 * steps,
        2.0 * seconds,
        0.05 * seconds,
    );
    (seconds, Snapshot::read(&text).expect("Looplane's names"))
}

fn series() -> Series {
    let said = vec![said(0.0, 0, 0.0), said(1.0, 4, 0.2), said(2.0, 6, 0.4), said(3.0, 5, 0.9), said(3.4, 0, 0.0)];
    Series { said, missed: 0, read_limit_gb_s: Some(40.0) }
}

#[test]
fn figures_are_of_the_part_that_counts() {
    let figures = series().figures((0.0, 3.3));
    let near =
        |value: Option<f64>, want: f64| assert!(value.is_some_and(|v| (v - want).abs() < 1e-9), "{value:?} {want}");
    near(Some(figures.length_s), 3.4);
    near(figures.step_ms, 5.0);
    near(figures.steps_per_s, 100.0);
    near(figures.busy, 0.5);
    near(figures.rank_wait, 0.1);
    near(figures.rows, 8.0);
    near(figures.decode_rows, 6.0);
    near(figures.tokens_per_s, 500.0);
    // 100 MB in 5 ms.
    near(figures.read_gb_s, 20.0);
    near(figures.share_of_read_limit, 0.5);
    near(figures.ttft_ms, 25.0);
    assert_eq!(figures.running, Some(Range { mean: 5.0, most: 6.0 }), "neither before nor after");
    assert_eq!(
        (figures.waiting, figures.preemptions, figures.itl_ms),
        (None, None, None),
        "what was not said is not made up"
    );
    let part = series().figures((1.5, 2.5));
    assert_eq!(part.kv_usage, Some(Range { mean: 0.4, most: 0.4 }));
    near(Some(part.length_s), 2.0);
    let moment = Series { said: vec![said(0.0, 0, 0.0), said(0.4, 3, 0.1)], ..series() }.figures((0.0, 0.3));
    assert_eq!(moment.running, None, "nobody looked while it ran");
    near(moment.step_ms, 5.0);
}

#[test]
fn a_server_that_began_to_count_again_gives_no_figures() {
    let said = vec![said(5.0, 0, 0.0), said(1.0, 4, 0.2), said(2.0, 6, 0.4)];
    let figures = Series { said, ..series() }.figures((5.0, 2.0));
    assert_eq!((figures.step_ms, figures.tokens_per_s, figures.share_of_read_limit), (None, None, None));
}

#[test]
fn a_long_run_keeps_its_first_answer_and_few_others() {
    let mut series = series();
    series.thin();
    assert_eq!(series.said.iter().map(|(time_s, _)| *time_s).collect::<Vec<_>>(), [0.0, 2.0, 3.4]);
}

#[test]
fn tables_json_and_page_say_what_is_known() {
    let mut tally = Tally::new(Window { from_ns: 0, to_ns: 3_300_000_000 }, None);
    let mut record = RequestRecord::new(0, 0, 0);
    (record.chunks_ns, record.ended_ns) = (vec![3_000_000_000], 3_300_000_000);
    tally.add(&record);
    tally.set_server_side(ServerSide::Seen(series()));
    let side = tally.server_side().expect("just set");
    let ServerSide::Seen(seen) = side else { panic!("{side:?}") };
    let words = seen.figures((0.0, 3.3)).in_words(&tally, seen.read_limit_gb_s);
    let of = |name: &str| {
        words.iter().find(|row| row.0 == name).unwrap_or_else(|| panic!("no {name} in {words:?}")).1.as_str()
    };
    assert_eq!(
        of("step"),
        "5.000 ms in the mean, 100.0 a second, 50.0 % of the time in steps, 10.0 % of that for other ranks"
    );
    assert_eq!(of("rows of a step"), "8.00 in the mean: 6.00 that decode, 2.00 of prompts");
    assert_eq!(of("KV cache in use"), "50.0 % in the mean, at most 90.0 %");
    assert_eq!(of("read in steps"), "20.0 GB/s, 50.0 % of the read limit (40.0 GB/s)");
    assert!(words.iter().all(|row| row.0 != "in the queue" && row.0 != "preempted"));
    let json = side.to_json(&tally);
    assert_eq!((&json["mean_step_ms"], &json["mean_itl_ms"]), (&5.0.into(), &serde_json::Value::Null));
    assert_eq!(json["timeline"]["running"].as_array().map(Vec::len), Some(5));
    let page = Written(&tally).to_string();
    let drawn = crate::markup::elements(&page);
    crate::markup::within(&drawn);
    assert_eq!(
        drawn.iter().filter(|element| element.name == "polyline").count(),
        3,
        "no line of who waits, nobody said"
    );
    assert!(page.contains("<th>step</th><td>5.000 ms") && page.contains("with Looplane's names, 5 times"));
}

#[test]
fn the_clients_figures_say_where_they_are_not_of_every_request() {
    let words_after = |conduct| {
        let mut tally = Tally::new(Window { from_ns: 0, to_ns: 3_300_000_000 }, None);
        let mut record = RequestRecord::new(0, 0, 0);
        (record.chunks_ns, record.ended_ns) = (vec![3_000_000_000], 3_300_000_000);
        tally.add(&record);
        tally.add(&RequestRecord { conduct, ..record });
        let words = series().figures((0.0, 3.3)).in_words(&tally, None);
        ["tokens generated", "time to first token"].map(|name| {
            let row = words.iter().find(|row| row.0 == name).unwrap_or_else(|| panic!("no {name} in {words:?}"));
            row.1.contains(", of the requests without a fault: ")
        })
    };
    assert_eq!(words_after(Conduct::Usual), [false, false]);
    assert_eq!(words_after(Conduct::HangUp(Duration::from_secs(1))), [true, true]);
}

struct Written<'a>(&'a Tally);

impl std::fmt::Display for Written<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.server_side().expect("it was asked").write_page(self.0, f)
    }
}

async fn watched(mock: Mock) -> ServerSide {
    let mock = mock.serve().await;
    let before = Before::ask(&mock.base, None).await;
    let watch = before.watch(Clock::start(), None);
    let client = Client::new(&mock.base, None, ANSWER_LIMIT).expect("the mock's address");
    let body = bytes::Bytes::from_static(br#"{"max_tokens": 7, "stream": true, "prompt": "a b c"}"#);
    let mut record = RequestRecord::new(0, 0, 0);
    client.stream("/v1/completions", body, Clock::start(), &mut record).await;
    assert_eq!(record.failure, None);
    watch.end().await
}

#[tokio::test]
async fn a_server_is_asked_before_during_and_after() {
    let mock = Mock { ttft: Duration::from_millis(1300), ..Mock::default() };
    let ServerSide::Seen(series) = watched(mock).await else { panic!("the mock has /metrics") };
    assert_eq!((series.dialect(), series.missed), ("vLLM", 0));
    assert!(series.said.len() >= 3, "{series:?}");
    let (first, last) = (&series.said[0].1, &series.said[series.said.len() - 1].1);
    assert_eq!(
        (first.get(Field::GenerationTokens), last.since(first, Field::GenerationTokens)),
        (Some(0.0), Some(7.0))
    );
    assert_eq!(last.since(first, Field::PromptTokens), Some(9.0));
    assert_eq!(series.said[1].1.get(Field::Running), Some(1.0), "asked while it answered");
    assert_eq!(series.figures((0.0, 1.3)).running, Some(Range { mean: 1.0, most: 1.0 }));
}

/// Answers the first and the third question, in the second's stead nothing.
async fn silent_at_second() -> String {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let base = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move {
        let mut held = Vec::new();
        for question in 1.. {
            let (mut stream, _) = listener.accept().await.expect("a client");
            if question == 2 {
                held.push(stream);
                continue;
            }
            stream.read_u8().await.expect("a question");
            let body = "looplane_num_requests_running 1\n";
            let length = body.len();
            let answer = format!("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}");
            stream.write_all(answer.as_bytes()).await.expect("it listens");
            held.push(stream);
        }
    });
    base
}

#[tokio::test]
async fn a_question_that_is_open_when_the_run_is_over_is_given_up() {
    let before = Before::ask(&silent_at_second().await, None).await;
    let watch = before.watch(Clock::start(), None);
    tokio::time::sleep(PERIOD + Duration::from_millis(300)).await;
    let ending = std::time::Instant::now();
    let ServerSide::Seen(series) = watch.end().await else { panic!("it answered the first question") };
    assert!(ending.elapsed() < ANSWER_LIMIT / 2, "{:?}", ending.elapsed());
    assert_eq!((series.said.len(), series.missed), (2, 0));
}

#[test]
fn a_server_of_which_nothing_follows_is_said_to_have_no_figures() {
    let mut tally = Tally::default();
    tally.set_server_side(ServerSide::Seen(Series { said: vec![said(0.0, 0, 0.0)], missed: 3, read_limit_gb_s: None }));
    let page = Written(&tally).to_string();
    assert!(page.contains("<th>figures</th><td>none: it answered too few questions"), "{page}");
}

#[tokio::test]
async fn a_server_without_metrics_is_named_in_a_line() {
    let ServerSide::Unknown(why) = watched(Mock { fault: Fault::NoMetrics, ..Mock::default() }).await else {
        panic!("the mock has none")
    };
    assert!(why.starts_with("it has no /metrics to read (HTTP 404"), "{why}");
    let mut tally = Tally::default();
    tally.set_server_side(ServerSide::Unknown(why));
    assert!(Written(&tally).to_string().contains("Not known: it has no /metrics"));
    assert!(tally.server_side().expect("set").to_json(&tally)["unknown"].is_string());
}
