//! Clients that say nothing, read nothing, or come in crowds: each limit, and what it gives back.

use std::time::Duration;

use looplane_server::{
    engine::{GeneratedToken, SequenceEvent, Unwanted},
    listener::{ClientLimits, ServeOptions},
};
use prost::Message;
use rustix::net::sockopt;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
    time::{sleep, timeout},
};

use crate::{
    SOON, Server,
    client::{get, head, post, read, read_until},
    engine::{Script, Sequence, answer},
    http2::Connection,
    options, spell,
};

const COMPLETION: &str = "/v1/completions";
const GENERATE: &str = "/looplane.inference.v1.Inference/Generate";
const SHORT: Duration = Duration::from_millis(500);

fn short_limits() -> ServeOptions {
    let client_limits = ClientLimits { head: SHORT, body: SHORT, progress: SHORT, idle: SHORT };
    ServeOptions { client_limits, ..options() }
}

/// Waits until the server closes the connection; what it sends before does not count.
async fn closed(mut stream: TcpStream) {
    let mut sink = Vec::new();
    let _ = timeout(SOON, stream.read_to_end(&mut sink)).await.expect("the server closes the connection");
}

async fn connect(server: &Server, first: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(server.address).await.unwrap();
    stream.write_all(first).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_does_not_come_to_its_first_request_is_closed() {
    let (server, _script) = Server::start(short_limits()).await;
    for first in [
        "",
        "P",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        // And an empty SETTINGS frame.
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\u{4}\0\0\0\0\0",
        "GET /health/live HTTP/1.1\r\n",
        "GET /health/live HTTP/1.1\r\nhost: x\r\nx: ",
    ] {
        closed(connect(&server, first.as_bytes()).await).await;
    }
}

#[tokio::test]
async fn a_client_has_the_whole_limit_for_its_first_byte() {
    let (server, _script) = Server::start(short_limits()).await;
    let mut late = connect(&server, b"").await;
    sleep(SHORT / 5).await;
    late.write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await.unwrap();
    assert_eq!(read(late).await.status, 200);
}

#[tokio::test]
async fn an_http2_connection_that_asks_for_nothing_any_more_is_closed() {
    let (server, mut script) = Server::start(short_limits()).await;
    let mut connection = Connection::open(server.address, None).await;
    let request = json!({"prompt": [5]}).to_string();
    let (response, _) =
        tokio::join!(connection.send(COMPLETION, "application/json", request), script.play(answer("x")));
    assert_eq!(response.status(), 200);
    drop(response);
    timeout(SOON, connection.closed()).await.expect("it is idle");
}

#[tokio::test]
async fn idle_connections_give_way_to_new_ones() {
    let (server, _script) = Server::start(ServeOptions { max_connections: 3, ..options() }).await;
    let mut used = connect(&server, b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n").await;
    read_until(&mut used, "live\"}").await;
    let unused = [connect(&server, b"").await, connect(&server, b"GET / HTT").await];
    for first in unused {
        sleep(Duration::from_millis(5)).await;
        assert_eq!(get(server.address, "/v1/models").await.status, 200);
        closed(first).await;
        // Takes the place of the one before, and asks for something.
        std::mem::forget(connect(&server, b"").await);
    }
    used.write_all(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    read_until(&mut used, "live\"}").await;
}

async fn streams(server: &Server, script: &mut Script, count: usize) -> Vec<(TcpStream, Sequence)> {
    let body = json!({"prompt": [5], "stream": true}).to_string();
    let request = format!("{}{body}", head("POST", COMPLETION, "application/json", body.len()));
    let mut streams = Vec::new();
    for _ in 0..count {
        let client = connect(server, request.as_bytes()).await;
        streams.push((client, script.accept().await));
    }
    streams
}

#[tokio::test]
async fn where_nobody_is_idle_probes_are_answered_and_others_told_to_come_back() {
    let (server, mut script) = Server::start(ServeOptions { max_connections: 2, ..options() }).await;
    let running = streams(&server, &mut script, 2).await;
    // Places for probes are few: silent clients in them do not keep a probe from being answered.
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(connect(&server, b"").await);
    }
    for path in ["/health/live", "/health/ready", "/metrics"] {
        assert_eq!(get(server.address, path).await.status, 200, "{path}");
    }
    for refused in [get(server.address, "/v1/models").await, post(server.address, COMPLETION, json!({})).await] {
        assert_eq!((refused.status, refused.header("retry-after")), (503, Some("1")));
        assert_eq!(refused.json()["error"]["code"], "too_many_connections");
    }
    // Those that are served go on.
    for (mut client, sequence) in running {
        for event in answer("x") {
            sequence.send(event).await;
        }
        read_until(&mut client, "[DONE]").await;
    }
    let again = async {
        while get(server.address, "/v1/models").await.status != 200 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, again).await.expect("a place is free again");
}

/// A request over HTTP, or gRPC, that streams.
fn streaming(grpc: bool) -> (&'static str, &'static str, Vec<u8>) {
    if !grpc {
        return (COMPLETION, "application/json", json!({"prompt": [5], "stream": true}).to_string().into_bytes());
    }
    use looplane_proto::inference::v1::{GenerateRequest, TokenIds, generate_request::Input};
    let input = Some(Input::TokenIds(TokenIds { ids: vec![5] }));
    let message = GenerateRequest { input, ..GenerateRequest::default() }.encode_to_vec();
    let mut body = vec![0];
    body.extend((message.len() as u32).to_be_bytes());
    body.extend(message);
    (GENERATE, "application/grpc", body)
}

/// Its client gives the response no window at all, so not a byte can be sent.
#[tokio::test]
async fn a_sequence_that_has_ended_holds_no_place_whether_its_client_reads_or_not() {
    let (server, mut script) = Server::start(ServeOptions { max_concurrent_requests: 1, ..options() }).await;
    for grpc in [false, true] {
        let mut connection = Connection::open(server.address, Some(0)).await;
        let (path, content_type, body) = streaming(grpc);
        let (response, _) = tokio::join!(connection.send(path, content_type, body), script.play(answer("short")));
        assert_eq!(response.status(), 200);
        place_is_free(&server).await;
        // A response that does not stream, of the same client.
        let whole = json!({"prompt": [5]}).to_string();
        let whole = connection.send(COMPLETION, "application/json", whole);
        let (response, _) = tokio::join!(whole, script.play(answer("x")));
        assert_eq!(response.status(), 200);
        place_is_free(&server).await;
    }
}

/// Waits until a request has a place: what is wrong with this one is found only then.
async fn place_is_free(server: &Server) {
    let free = async {
        while post(server.address, COMPLETION, json!({"prompt": ""})).await.status != 400 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, free).await.expect("the place is free");
}

/// Generates until nobody wants any more, and returns how many tokens were taken.
async fn generate_until_unwanted(sequence: &Sequence) -> usize {
    let id = spell("x")[0];
    let token = SequenceEvent::Token(GeneratedToken { id, logprob: Some(-1.0), top: vec![(id, -1.0); 20] });
    let mut taken = 0;
    while sequence.events.send(token.clone()).await.is_ok() {
        taken += 1;
    }
    taken
}

#[tokio::test]
async fn a_client_that_reads_nothing_for_too_long_loses_its_response() {
    let options = ServeOptions {
        client_limits: ClientLimits { progress: SHORT, ..ClientLimits::default() },
        max_concurrent_requests: 1,
        ..options()
    };
    let (server, mut script) = Server::start(options).await;
    for grpc in [false, true] {
        let mut connection = Connection::open(server.address, Some(0)).await;
        let (path, content_type, body) = streaming(grpc);
        let (response, sequence) = tokio::join!(connection.send(path, content_type, body), script.accept());
        let taken = timeout(SOON, generate_until_unwanted(&sequence)).await.expect("the limit holds");
        // The channel of the sequence holds its tokens and its end; few more were drawn from it, some to a frame.
        let drawn = taken.saturating_sub(sequence.events.max_capacity());
        assert!((1..=96).contains(&drawn), "{drawn} of {taken}");
        assert_eq!(script.unwanted().await, (sequence.id, Unwanted::Abandoned));
        timeout(SOON, connection.closed()).await.expect("nothing else runs on the connection");
        drop(response);
    }
}

#[tokio::test]
async fn a_client_of_http1_that_reads_nothing_for_too_long_is_closed() {
    let (server, mut script) = Server::start(short_limits()).await;
    let socket = TcpSocket::new_v4().unwrap();
    sockopt::set_socket_recv_buffer_size(&socket, 4096).unwrap();
    let mut client = socket.connect(server.address).await.unwrap();
    let body = json!({"prompt": [5], "stream": true, "logprobs": 20}).to_string();
    let request = format!("{}{body}", head("POST", COMPLETION, "application/json", body.len()));
    client.write_all(request.as_bytes()).await.unwrap();
    let sequence = script.accept().await;
    timeout(SOON, generate_until_unwanted(&sequence)).await.expect("the limit holds");
    assert_eq!(script.unwanted().await, (sequence.id, Unwanted::Abandoned));
    closed(client).await;
}

#[tokio::test]
async fn a_body_that_does_not_come_gives_its_place_back() {
    let (server, mut script) = Server::start(ServeOptions { max_concurrent_requests: 1, ..short_limits() }).await;
    let slow = connect(&server, head("POST", COMPLETION, "application/json", 100).as_bytes()).await;
    assert_eq!(read(slow).await.status, 408);
    let request = json!({"prompt": [5]});
    let (response, _) = tokio::join!(post(server.address, COMPLETION, &request), script.play(answer("x")));
    assert_eq!(response.status, 200);
}
