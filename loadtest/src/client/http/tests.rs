use super::*;
use crate::run::mock::{Fault, Mock};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const CHAT: &str = "/v1/chat/completions";

async fn ask(base: &str, path: &str, timeout: Duration) -> RequestRecord {
    let client = Client::new(base, Some("sesame"), timeout).expect("the mock's address is valid");
    let body = Bytes::from_static(br#"{"model":"mock","max_tokens":5,"stream":true,"prompt":"a b c"}"#);
    let clock = Clock::start();
    let mut record = RequestRecord::new(0, 0, clock.now_ns());
    client.stream(path, body, clock, &mut record).await;
    record
}

async fn ask_mock(mock: Mock) -> RequestRecord {
    let mock = mock.serve().await;
    ask(&mock.base, CHAT, Duration::from_secs(20)).await
}

#[tokio::test]
async fn reads_a_chat_and_a_text_stream() {
    let timing = Mock { ttft: Duration::from_millis(60), itl: Duration::from_millis(20), ..Mock::default() };
    let mock = timing.serve().await;
    for path in [CHAT, "/v1/completions"] {
        let record = ask(&mock.base, path, Duration::from_secs(20)).await;
        assert_eq!(record.failure, None, "{path}");
        assert_eq!(record.chunks_ns.len(), 5, "the role delta and keep-alive comments are no tokens");
        assert_eq!((record.completion_tokens, record.prompt_tokens), (Some(5), Some(9)));
        assert_eq!(record.finish_reason.as_deref(), Some("length"));
        let first_ns = record.first_token_ns().expect("five chunks") - record.sent_ns;
        assert!(first_ns >= 60_000_000, "{path}: first token after {first_ns} ns");
        let last_ns = record.chunks_ns[4] - record.sent_ns;
        assert!(last_ns >= 60_000_000 + 4 * 20_000_000, "{path}: last token after {last_ns} ns");
        assert!(record.ended_ns >= record.finished_ns.expect("finish reason seen"));
    }
    assert!(mock.requests().iter().all(|request| request["authorization"] == "Bearer sesame"));
    assert_eq!(mock.connections(), 2, "each client has a connection of its own");
}

#[tokio::test]
async fn keeps_the_connection_for_the_next_request() {
    let mock = Mock::default().serve().await;
    let client = Client::new(&mock.base, None, Duration::from_secs(20)).expect("valid");
    let clock = Clock::start();
    for index in 0..10 {
        let mut record = RequestRecord::new(index, 0, 0);
        client.stream(CHAT, Bytes::from_static(b"{\"max_tokens\":2}"), clock, &mut record).await;
        assert_eq!(record.failure, None);
    }
    // Not always one: a request may open a second connection before the first is back in the pool.
    assert!(mock.connections() <= 3, "{} connections for ten requests in turn", mock.connections());
}

#[tokio::test]
async fn every_fault_has_its_name() {
    let busy = r#"{"error":{"message":"queue\u001b[2J full","type":"overloaded","code":"queue_full"}}"#;
    let error = r#"{"error":{"message":"rank 1 is gone","code":"worker lost!"}}"#;
    for (fault, kind) in [
        (Fault::Status(429, busy), "http_429:queue_full"),
        (Fault::Status(500, "<html>oops"), "http_500"),
        (Fault::Status(503, r#"{"object":"error","message":"m","code":503}"#), "http_503"),
        (Fault::CloseAfter(2), "connection_lost"),
        (Fault::EndAfter(2), "truncated"),
        (Fault::Data("not json"), "bad_json"),
        (Fault::Data("[]"), "bad_json"),
        (Fault::Data("null"), "bad_json"),
        (Fault::Data(r#"{"choices":7}"#), "bad_json"),
        (Fault::Data(error), "stream_error:workerlost"),
        (Fault::ContentType("application/json"), "not_an_event_stream"),
        (Fault::EndlessLine, "event_too_long"),
        // So a server cuts off an answer in favour of another.
        (Fault::Data("[DONE]"), "no_finish_reason"),
    ] {
        let record = ask_mock(Mock { fault, ..Mock::default() }).await;
        assert_eq!(record.failure.expect("the fault was not noticed").kind(), kind);
    }
}

#[tokio::test]
async fn tokens_that_arrived_before_a_failure_are_kept() {
    let record = ask_mock(Mock { fault: Fault::CloseAfter(3), itl: Duration::from_millis(5), ..Mock::default() }).await;
    assert!(matches!(record.failure, Some(Failure::ConnectionLost(_))));
    assert_eq!(record.chunks_ns.len(), 3);
}

#[tokio::test]
async fn a_finished_answer_counts_without_the_final_marker_and_is_over_at_it_even_if_the_body_stays_open() {
    for fault in [Fault::NoDone, Fault::HoldOpen] {
        let record = ask_mock(Mock { fault, ..Mock::default() }).await;
        assert_eq!(record.failure, None, "{fault:?}");
        let total = Duration::from_nanos(record.ended_ns - record.sent_ns);
        assert!(total < CLOSING_GRACE, "{fault:?}: the grace of {CLOSING_GRACE:?} is in the latency: {total:?}");
    }
}

#[tokio::test]
async fn a_silent_server_is_given_up_after_the_time_limit() {
    let mock = Mock { ttft: Duration::from_secs(60), ..Mock::default() }.serve().await;
    let record = ask(&mock.base, CHAT, Duration::from_millis(200)).await;
    assert_eq!(record.failure, Some(Failure::Timeout));
    assert!(record.ended_ns - record.sent_ns >= 200_000_000);
}

#[tokio::test]
async fn a_closed_port_and_a_server_that_speaks_no_http_are_told_apart() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let base = format!("http://{}", listener.local_addr().expect("bound"));
    let garbling = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.expect("the client connects");
        let _ = socket.read(&mut [0; 1024]).await;
        let _ = socket.write_all(b"\x00\xffSSH-2.0-nonsense\r\n\r\n").await;
    });
    let record = ask(&base, CHAT, Duration::from_secs(20)).await;
    assert_eq!(record.failure.expect("garbage is no answer").kind(), "not_http");
    garbling.await.expect("the listener is closed when its task is over");
    assert_eq!(ask(&base, CHAT, Duration::from_secs(20)).await.failure.expect("refused").kind(), "connect");
}

#[tokio::test]
async fn asks_the_server_for_its_model() {
    let mock = Mock::default().serve().await;
    let client = Client::new(&mock.base, None, Duration::from_secs(20)).expect("valid");
    assert_eq!(client.first_model().await, Ok("mock".into()));
}

#[test]
fn targets_are_checked_and_shortened() {
    for target in ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"] {
        assert_eq!(base_of(target).expect(target), "http://h:1");
    }
    assert_eq!(base_of("http://h/api/v1").expect("a prefix"), "http://h/api");
    assert_eq!(base_of("http://[::1]:8000").expect("IPv6"), "http://[::1]:8000");
    assert!(matches!(base_of("https://h"), Err(TargetError::Https(_))));
    for target in ["", "h:1", "localhost", "ftp://h", "http://", "http://h?x=1", "http://u:p@h"] {
        assert!(matches!(base_of(target), Err(TargetError::Form(_))), "{target}");
    }
    assert!(matches!(Client::new("http://h", Some("a\nb"), CLOSING_GRACE), Err(TargetError::ApiKey)));
}
