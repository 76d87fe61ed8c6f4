//! A client by hand, of HTTP/1.1: it can be as slow, careless or wrong as any.

use std::{collections::BTreeMap, io, net::SocketAddr};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};

use super::scene::Route;

/// What came, without its framing; status 0: nothing that is HTTP.
#[derive(Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
    /// It came to the end that its framing says.
    pub whole: bool,
}

/// A connection whose receive buffer is as small as can be, if it is to be slow.
pub async fn connect(address: SocketAddr, slow: bool) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    if slow {
        socket.set_recv_buffer_size(2048)?;
    }
    socket.connect(address).await
}

/// The head of a POST.
pub fn head(path: &str, key: &str, request_id: &str, framing: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\nauthorization: Bearer {key}\r\n\
         x-request-id: {request_id}\r\nconnection: close\r\n{framing}\r\n\r\n"
    )
}

/// Reads to the end of the connection, however it comes.
pub async fn read(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    // Where the server closes before it has read everything, a reset may follow the answer.
    let _ = stream.read_to_end(&mut bytes).await;
    Answer::parse(&bytes)
}

/// Reads a byte at a time, so many of them, and then the rest.
pub async fn read_slowly(stream: &mut TcpStream, count: usize) -> Answer {
    let mut bytes = Vec::new();
    while bytes.len() < count
        && let Ok(byte) = stream.read_u8().await
    {
        bytes.push(byte);
        tokio::task::yield_now().await;
    }
    let _ = stream.read_to_end(&mut bytes).await;
    Answer::parse(&bytes)
}

/// Reads until `text` has come; false: it never did.
pub async fn read_until(stream: &mut TcpStream, text: &[u8], bytes: &mut Vec<u8>) -> bool {
    while !bytes.windows(text.len()).any(|window| window == text) {
        match stream.read_buf(bytes).await {
            Ok(0) | Err(_) => return false,
            Ok(_) => {}
        }
    }
    true
}

pub async fn get(address: SocketAddr, path: &str) -> Answer {
    let mut stream = connect(address, false).await.expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n");
    // It may have been closed for another.
    let _ = stream.write_all(request.as_bytes()).await;
    read(&mut stream).await
}

impl Answer {
    pub fn parse(bytes: &[u8]) -> Self {
        let mut answer = Self::default();
        let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") else { return answer };
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let rest = &bytes[end + 4..];
        answer.status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        if head.contains("transfer-encoding: chunked") {
            (answer.body, answer.whole) = dechunk(rest);
        } else {
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            answer.whole = length.is_none_or(|length| length == rest.len());
            answer.body = rest.to_vec();
        }
        answer
    }

    /// The code of an error, or else its type: Anthropic's have no codes.
    pub fn error(&self) -> Option<String> {
        let text = String::from_utf8_lossy(&self.body);
        let last = text.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap_or(&text);
        let error = serde_json::from_str::<Value>(last).ok()?;
        let error = error["response"].get("error").or(error.get("error")).filter(|error| error.is_object())?;
        Some(error["code"].as_str().or(error["type"].as_str())?.to_owned())
    }

    /// The texts of its choices, of a stream as of a whole answer; empty: it has not come to its end.
    pub fn texts(&self, route: Route) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.body);
        if let Ok(whole) = serde_json::from_str::<Value>(&text) {
            return texts_of(&whole, route);
        }
        let events: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
        let (mut texts, mut ended) = (BTreeMap::<u64, String>::new(), events.last() == Some(&"[DONE]"));
        for event in events.iter().filter_map(|event| serde_json::from_str::<Value>(event).ok()) {
            ended |= matches!(event["type"].as_str(), Some("message_stop"));
            if matches!(event["type"].as_str(), Some("response.completed" | "response.incomplete")) {
                return texts_of(&event["response"], route);
            }
            if route == Route::Messages {
                texts.entry(0).or_default().push_str(event["delta"]["text"].as_str().unwrap_or_default());
            }
            for choice in event["choices"].as_array().into_iter().flatten() {
                let text = choice["delta"]["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
                texts.entry(choice["index"].as_u64().unwrap_or(0)).or_default().push_str(text);
            }
        }
        if ended { texts.into_values().collect() } else { Vec::new() }
    }
}

fn texts_of(whole: &Value, route: Route) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let joined = |parts: Vec<Value>| parts.iter().map(|part| text(&part["text"])).collect::<String>();
    match route {
        Route::Chat => list(&whole["choices"]).iter().map(|choice| text(&choice["message"]["content"])).collect(),
        Route::Completions => list(&whole["choices"]).iter().map(|choice| text(&choice["text"])).collect(),
        Route::Messages => vec![joined(list(&whole["content"]))],
        Route::Responses => vec![list(&whole["output"]).iter().map(|item| joined(list(&item["content"]))).collect()],
    }
}

/// What chunks hold, and whether the last came.
fn dechunk(mut rest: &[u8]) -> (Vec<u8>, bool) {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|pair| pair == b"\r\n") {
        let size = std::str::from_utf8(&rest[..end]).ok().and_then(|size| usize::from_str_radix(size, 16).ok());
        let Some(size) = size else { break };
        rest = &rest[end + 2..];
        if size == 0 {
            return (body, true);
        }
        let Some(chunk) = rest.get(..size + 2) else { break };
        body.extend(&chunk[..size]);
        rest = &rest[size + 2..];
    }
    (body, false)
}
