use super::*;
use crate::client::metrics::Field;
use crate::client::record::RequestRecord;
use crate::run::mock::{Fault, Mock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SHORT: Duration = Duration::from_millis(100);

fn running(sequences: u32) -> Snapshot {
    Snapshot::read(&format!("looplane_num_requests_running {sequences}\n")).expect("Looplane's name")
}

#[test]
fn a_long_run_keeps_its_first_answer_and_few_others() {
    let said = [0.0, 1.0, 2.0, 3.0, 3.4].map(|time_s| (time_s, running(1)));
    let mut series = Series { said: said.into(), missed: 0, read_limit_gb_s: None };
    series.thin();
    assert_eq!(series.said.iter().map(|(time_s, _)| *time_s).collect::<Vec<_>>(), [0.0, 2.0, 3.4]);
}

async fn watched(mock: Mock) -> ServerSide {
    let mock = mock.serve().await;
    let before = Before::ask(&mock.base, None).await;
    let watch = before.watch(SHORT, Clock::start(), None);
    let client = Client::new(&mock.base, None, ANSWER_LIMIT).expect("the mock's address");
    let body = bytes::Bytes::from_static(br#"{"max_tokens": 7, "stream": true, "prompt": "a b c"}"#);
    let mut record = RequestRecord::new(0, 0, 0);
    client.stream("/v1/completions", body, Clock::start(), &mut record).await;
    assert_eq!(record.failure, None);
    watch.end().await
}

#[tokio::test]
async fn a_server_is_asked_before_during_and_after() {
    let mock = Mock { ttft: Duration::from_millis(400), ..Mock::default() };
    let ServerSide::Seen(series) = watched(mock).await else { panic!("the mock has /metrics") };
    assert_eq!((series.dialect(), series.missed), ("vLLM", 0));
    assert!(series.said.len() >= 3, "{series:?}");
    let (first, last) = (&series.said[0].1, &series.said[series.said.len() - 1].1);
    assert_eq!(
        (first.get(Field::GenerationTokens), last.since(first, Field::GenerationTokens)),
        (Some(0.0), Some(7.0))
    );
    assert_eq!(last.since(first, Field::PromptTokens), Some(9.0));
    let asked_while_it_answered = series.said.iter().any(|(_, said)| said.get(Field::Running) == Some(1.0));
    assert!(asked_while_it_answered, "{series:?}");
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
    let watch = before.watch(SHORT, Clock::start(), None);
    tokio::time::sleep(3 * SHORT).await;
    let ending = std::time::Instant::now();
    let ServerSide::Seen(series) = watch.end().await else { panic!("it answered the first question") };
    assert!(ending.elapsed() < ANSWER_LIMIT / 2, "{:?}", ending.elapsed());
    assert_eq!((series.said.len(), series.missed), (2, 0));
}

#[tokio::test]
async fn a_server_without_metrics_is_named_in_a_line() {
    let ServerSide::Unknown(why) = watched(Mock { fault: Fault::NoMetrics, ..Mock::default() }).await else {
        panic!("the mock has none")
    };
    assert!(why.starts_with("it has no /metrics to read (HTTP 404"), "{why}");
}
