//! Clients that are hostile, careless, or older than one would think: what they send, and what they get.

use std::time::Duration;

use looplane_proto::inference::v1::{GenerateRequest, generate_request::Input};
use looplane_server::listener::ServeOptions;
use prost::Message;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};
use tonic::Code;

use crate::{
    SOON, Server,
    client::{get, head, read, read_until, request},
    engine::answer,
    http2::{Connection, grpc_status},
    options,
    scrape::Scrape,
};

const COMPLETION: &str = "/v1/completions";
const GENERATE: &str = "/looplane.inference.v1.Inference/Generate";

/// Sends bytes as they are, and reads to the end.
async fn raw(server: &Server, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    // It may be refused, and closed, before all of it has come.
    let _ = stream.write_all(bytes).await;
    let mut answer = Vec::new();
    let _ = timeout(SOON, stream.read_to_end(&mut answer)).await.expect("the server closes the connection");
    String::from_utf8(answer).unwrap()
}

/// Waits until nothing is held for anybody.
async fn calm(server: &Server) {
    let calm = async {
        loop {
            let scrape = Scrape::parse(&get(server.address, "/metrics").await.body);
            let held = ["requests_in_progress", "upload_bytes"].map(|name| scrape.value(name, &[]));
            // That of this question.
            if held == [0.0, 0.0] && scrape.value("connections", &[]) == 1.0 {
                return;
            }
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, calm).await.expect("everything is given back");
}

#[tokio::test]
async fn who_sends_much_to_where_nobody_reads_it_gets_the_answer() {
    let (server, mut script) = Server::start(ServeOptions { max_body_bytes: 8 << 20, ..options() }).await;
    let body = vec![b' '; 6 << 20];
    for (method, path, content_type, status) in [
        ("POST", "/v1/chat/completion", "application/json", 404),
        ("POST", "/chat/completions", "application/json", 501),
        ("POST", "/v1/embeddings", "application/json", 501),
        ("PUT", COMPLETION, "application/json", 405),
        ("POST", COMPLETION, "text/plain", 415),
        ("POST", "/v1/messages", "text/plain", 415),
        ("POST", "/tokenize", "text/plain", 415),
    ] {
        let mut stream = TcpStream::connect(server.address).await.unwrap();
        stream.write_all(head(method, path, content_type, body.len()).as_bytes()).await.unwrap();
        // As most clients do, it sends all before it reads.
        stream.write_all(&body).await.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
        assert_eq!(read(stream).await.status, status, "{method} {path}");
    }
    calm(&server).await;
    script.nothing_more();
}

#[tokio::test]
async fn requests_that_are_sent_ahead_are_answered_in_turn() {
    let (server, mut script) = Server::start(options()).await;
    let body = r#"{"prompt": [5]}"#;
    let ask = format!(
        "POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let last = "GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
    // Old clients have an empty line behind a body.
    let all = format!("{ask}\r\n{ask}{last}");
    let (text, ()) = tokio::join!(raw(&server, all.as_bytes()), async {
        script.play(answer("first")).await;
        script.play(answer("second")).await;
    });
    let places =
        ["first", "second", "\"version\""].map(|word| text.find(word).unwrap_or_else(|| panic!("{word}: {text}")));
    assert!(places.is_sorted(), "{text}");
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 3);
}

#[tokio::test]
async fn who_asks_before_it_sends_a_body_is_told_to_go_on_or_why_not() {
    let (server, mut script) = Server::start(options()).await;
    let expecting = |length: usize| {
        head("POST", COMPLETION, "application/json", length).replacen("\r\n", "\r\nexpect: 100-continue\r\n", 1)
    };
    let body = r#"{"prompt": [5]}"#;
    let mut client = TcpStream::connect(server.address).await.unwrap();
    client.write_all(expecting(body.len()).as_bytes()).await.unwrap();
    assert_eq!(read_until(&mut client, "\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    client.write_all(body.as_bytes()).await.unwrap();
    let (response, _) = tokio::join!(read(client), script.play(answer("x")));
    assert_eq!(response.status, 200);

    let mut client = TcpStream::connect(server.address).await.unwrap();
    client.write_all(expecting(1 << 30).as_bytes()).await.unwrap();
    let said = read_until(&mut client, "\r\n\r\n").await;
    assert!(said.starts_with("HTTP/1.1 413"), "{said}");
}

#[tokio::test]
async fn a_body_in_chunks_may_have_trailers_and_no_more_than_its_size() {
    let (server, mut script) = Server::start(options()).await;
    let chunked = |body: &str| {
        format!(
            "POST {COMPLETION} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n\
             transfer-encoding: chunked\r\n\r\n{body}"
        )
    };
    let good = chunked("5;ext=\"x\"\r\n{\"pro\r\na\r\nmpt\": [5]}\r\n0\r\ncontent-length: 7\r\nx: y\r\n\r\n");
    let (text, _) = tokio::join!(raw(&server, good.as_bytes()), script.play(answer("x")));
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    let trailers = format!("2\r\n{{}}\r\n0\r\n{}\r\n", "x: y\r\n".repeat(10_000));
    let extensions = format!("2;{}\r\n{{}}\r\n0\r\n\r\n", "x".repeat(100_000));
    for (body, status) in [
        (&*trailers, "400"),
        (&extensions, "400"),
        ("fffffffffffffffff\r\n", "400"),
        ("-1\r\n{}\r\n0\r\n\r\n", "400"),
        ("zz\r\n{}\r\n", "400"),
        ("2\r\n{}xx\r\n0\r\n\r\n", "400"),
    ] {
        let text = raw(&server, chunked(body).as_bytes()).await;
        assert!(text.starts_with(&format!("HTTP/1.1 {status}")), "{body:.40}: {text}");
    }
    calm(&server).await;
    script.nothing_more();
}

#[tokio::test]
async fn heads_that_are_none_are_refused_and_hold_nothing() {
    let (server, mut script) = Server::start(options()).await;
    let ask = |head: &str| format!("POST {COMPLETION} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n{{}}");
    let path = "x".repeat(100_000);
    for (bytes, status) in [
        (ask(&format!("x: {}", "y".repeat(1 << 20))), "431"),
        (ask(&"x: y\r\n".repeat(10_000)), "431"),
        (ask("content-length: 2\r\ncontent-length: 3"), "400"),
        (ask("content-length: -2"), "400"),
        (ask("content-length: 99999999999999999999999"), "400"),
        (ask("transfer-encoding: chunked, gzip"), "400"),
        (ask("x y: z"), "400"),
        (ask("x: \0"), "400"),
        (format!("GET /{path} HTTP/1.1\r\nhost: x\r\n\r\n"), "431"),
        ("GET / HTTP/9.9\r\n\r\n".into(), ""),
        ("\x16\x03\x01\x02\0\x01\0\x01\u{7f}\r\n\r\n".into(), "400"),
        ("SSH-2.0-OpenSSH_9.6\r\n\r\n".into(), "400"),
    ] {
        let text = raw(&server, bytes.as_bytes()).await;
        let told = text.strip_prefix("HTTP/1.1 ").or(text.strip_prefix("HTTP/1.0 ")).unwrap_or_default();
        assert!(told.starts_with(status) && !told.starts_with('2'), "{bytes:.60}: {text}");
    }
    calm(&server).await;
    script.nothing_more();
}

#[tokio::test]
async fn paths_that_mean_nothing_are_told_in_the_shape_of_all_errors() {
    let (server, _script) = Server::start(options()).await;
    for (ask, status) in [
        ("GET /v1/models/%ff", 404),
        ("GET /v1/responses/%ff%fe", 404),
        ("DELETE /v1/responses/%c3%28", 404),
        ("POST /v1/responses/%ff/cancel", 404),
        ("GET //v1//models", 404),
        ("GET /v1/models/../../etc/passwd", 404),
        ("GET /%2e%2e/%00", 404),
        ("CONNECT localhost:22", 404),
        ("OPTIONS *", 404),
        ("OPTIONS /v1/completions", 405),
        ("TRACE /v1/completions", 405),
        ("BREW /v1/completions", 405),
        ("GET http://elsewhere/v1/nothing", 404),
    ] {
        let text = raw(&server, format!("{ask} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{ask}: {text}"));
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")), "{ask}: {text}");
        let error: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{ask}: {text}"));
        assert!(error["error"]["code"].is_string() && error["error"]["message"].is_string(), "{ask}: {text}");
    }
    // An answer to HEAD is that to GET, without its body.
    for (path, status) in [("/health/live", 200), ("/v1/models", 200), ("/nowhere", 404), (COMPLETION, 405)] {
        let head =
            raw(&server, format!("HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await;
        assert!(head.starts_with(&format!("HTTP/1.1 {status} ")) && head.ends_with("\r\n\r\n"), "{path}: {head}");
    }
    // A page that lost its stream comes back so.
    let again = "GET /v1/chat/completions HTTP/1.1\r\nhost: x\r\naccept: text/event-stream\r\nlast-event-id: 7\r\n\
                 connection: close\r\n\r\n";
    assert!(raw(&server, again.as_bytes()).await.starts_with("HTTP/1.1 405 "));
}

#[tokio::test]
async fn values_that_no_field_can_have_are_refused_by_name() {
    let (server, mut script) = Server::start(options()).await;
    let nested = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
    let stops = vec!["x".repeat(1 << 20); 100].join("\", \"");
    let digits = "1".repeat(5000);
    let deep_schema = format!(
        "{{\"type\": \"json_schema\", \"json_schema\": {{\"name\": \"x\", \"schema\": {}1{}}}}}",
        "{\"not\": ".repeat(100),
        "}".repeat(100)
    );
    for (fields, status) in [
        ("\"n\": 1e400", 400),
        ("\"n\": -0", 400),
        ("\"n\": 1e2", 400),
        ("\"seed\": -0.0", 400),
        ("\"max_tokens\": -9223372036854775809", 400),
        (&format!("\"max_tokens\": {digits}"), 400),
        (&format!("\"temperature\": 0.{digits}e{digits}"), 400),
        ("\"logprobs\": 18446744073709551615", 400),
        ("\"best_of\": 1000000000", 400),
        ("\"logit_bias\": {\"-0\": 1}", 400),
        ("\"logit_bias\": {\"5\": -1e308}", 400),
        ("\"top_p\": 1e-400", 400),
        ("\"user\": \"\\ud83d\"", 400),
        ("\"user\": \"\\udc00\\ud83d\"", 400),
        ("\"user\": \"a\", \"\\u0075ser\": \"b\"", 400),
        (&format!("\"metadata\": {}", nested(50_000)), 400),
        (&format!("\"metadata\": {}", nested(100)), 400),
        (&format!("\"response_format\": {deep_schema}"), 400),
        (&format!("\"stop\": [\"{stops}\"]"), 413),
        (&format!("\"guided_regex\": \"{}a{}\"", "(".repeat(5000), ")".repeat(5000)), 400),
        (&format!("\"guided_grammar\": \"start: {}x{}\"", "(".repeat(5000), ")".repeat(5000)), 400),
        (&format!("\"guided_grammar\": \"root ::= {}x{}\"", "(".repeat(5000), ")".repeat(5000)), 400),
        (&format!("\"cache_salt\": \"{}\", \"n\": 0", "x".repeat(500_000)), 400),
    ] {
        let body = format!("{{\"prompt\": [5], {fields}}}");
        let response = request(server.address, "POST", COMPLETION, "application/json", body.as_bytes()).await;
        assert_eq!(response.status, status, "{fields:.80}: {}", response.body);
        assert!(response.json()["error"]["code"].is_string(), "{fields:.80}: {}", response.body);
    }
    calm(&server).await;
    script.nothing_more();
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The head of a POST in HPACK, without its tables.
fn http2_head() -> Vec<u8> {
    let literal = |name: &str, value: &str| {
        [&[0, name.len() as u8], name.as_bytes(), &[value.len() as u8], value.as_bytes()].concat()
    };
    let fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", COMPLETION),
        (":authority", "x"),
        ("content-type", "application/json"),
    ];
    fields.map(|(name, value)| literal(name, value)).concat()
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// Sends what a client of HTTP/2 begins with, then these frames again and again, up to so many times. Whether the
/// server closed the connection before.
async fn flood(server: &Server, first: &[u8], times: u32, next: impl Fn(u32) -> Vec<u8>) -> bool {
    let stream = TcpStream::connect(server.address).await.unwrap();
    let (mut read, mut write) = stream.into_split();
    let sending = async move {
        let begin = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &*frame(SETTINGS, 0, 0, &[]), first].concat();
        write.write_all(&begin).await.unwrap();
        for number in 0..times {
            if write.write_all(&next(number)).await.is_err() {
                return true;
            }
        }
        false
    };
    let reading = async move {
        let mut sink = vec![0; 1 << 16];
        while read.read(&mut sink).await.is_ok_and(|bytes| bytes > 0) {}
    };
    let flooding = async {
        tokio::select! {
            closed = sending => closed,
            () = reading => true,
        }
    };
    timeout(SOON, flooding).await.expect("the flood ends")
}

/// The server answers others meanwhile, and has nothing left of it.
async fn survives(server: &Server) {
    assert_eq!(get(server.address, "/health/live").await.status, 200);
    calm(server).await;
}

#[tokio::test]
async fn streams_that_are_opened_and_reset_at_once_close_their_connection() {
    let (server, _script) = Server::start(options()).await;
    let head = http2_head();
    let closed = flood(&server, &[], 100_000, |number| {
        let stream = 2 * number + 1;
        let opened = frame(HEADERS, END_HEADERS, stream, &head);
        let body = frame(DATA, END_STREAM, stream, br#"{"prompt": [5]}"#);
        [opened, body, frame(RST_STREAM, 0, stream, &8u32.to_be_bytes())].concat()
    })
    .await;
    assert!(closed, "it may go on for ever");
    survives(&server).await;
}

#[tokio::test]
async fn a_head_without_end_closes_its_connection() {
    let (server, _script) = Server::start(options()).await;
    let junk = [&[0, 1, b'x', 127, 0x81, 0x7f], &*vec![b'y'; 254]].concat();
    let closed =
        flood(&server, &frame(HEADERS, 0, 1, &http2_head()), 100_000, |_| frame(CONTINUATION, 0, 1, &junk)).await;
    assert!(closed, "it may go on for ever");
    survives(&server).await;
}

#[tokio::test]
async fn frames_that_say_nothing_hold_nobody_up() {
    let (server, _script) = Server::start(options()).await;
    for (first, empty) in [
        (frame(HEADERS, END_HEADERS, 1, &http2_head()), frame(DATA, 0, 1, &[])),
        (Vec::new(), frame(PING, 0, 0, &[0; 8])),
        (Vec::new(), frame(SETTINGS, 0, 0, &[])),
    ] {
        let flooding = flood(&server, &first, 30_000, |_| empty.clone());
        let (_, alive) = tokio::join!(flooding, get(server.address, "/health/live"));
        assert_eq!(alive.status, 200);
        survives(&server).await;
    }
}

#[tokio::test]
async fn a_message_is_read_up_to_its_limit_and_one_that_lies_of_its_length_is_refused() {
    const LIMIT: usize = 100_000;
    let (server, mut script) = Server::start(ServeOptions { max_body_bytes: LIMIT, ..options() }).await;
    let message = |prompt: usize| {
        let input = Some(Input::Prompt("x".repeat(prompt)));
        GenerateRequest { input, ..GenerateRequest::default() }.encode_to_vec()
    };
    let framed = |flag: u8, length: u32, message: &[u8]| [&[flag], &length.to_be_bytes()[..], message].concat();
    let whole = |message: &[u8]| framed(0, message.len() as u32, message);
    let largest = message(LIMIT - 9);
    assert_eq!(whole(&largest).len(), LIMIT);
    let mut connection = Connection::open(server.address, None).await;
    for (what, body, codes) in [
        // What is in it is no prompt that has room.
        ("the largest", whole(&largest), [Code::InvalidArgument; 2]),
        ("one byte more", whole(&message(LIMIT - 8)), [Code::OutOfRange; 2]),
        ("announces 4 GiB", framed(0, u32::MAX, b"x"), [Code::OutOfRange; 2]),
        ("breaks off", framed(0, 100, b"x"), [Code::InvalidArgument, Code::Internal]),
        ("is compressed", framed(1, 1, b"x"), [Code::Unimplemented, Code::Internal]),
        ("is nothing", Vec::new(), [Code::InvalidArgument, Code::Internal]),
    ] {
        let status = grpc_status(connection.send(GENERATE, "application/grpc", body).await).await;
        assert!(codes.iter().any(|code| *code as i32 == status), "{what}: {status}");
    }
    drop(connection);
    calm(&server).await;
    script.nothing_more();
}
