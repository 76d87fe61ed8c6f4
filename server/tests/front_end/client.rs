//! HTTP/1.1 by hand, so that tests see the bytes.

use std::{borrow::Borrow, net::SocketAddr};

use serde_json::Value;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use crate::{SOON, conform};

/// A response as it came, without its framing.
#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    head: String,
    pub body: String,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().skip(1).find_map(|line| {
            let (key, value) = line.split_once(": ")?;
            key.eq_ignore_ascii_case(name).then_some(value)
        })
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.body))
    }

    /// The body with what differs from run to run replaced: the request's id and the time.
    pub fn normalised(&self) -> String {
        let mut out = self.body.clone();
        for (start, end, with) in [("\"id\":\"", "\"", "ID"), ("\"created\":", ",", "0")] {
            let mut at = 0;
            while let Some(found) = out[at..].find(start) {
                let from = at + found + start.len();
                let to = from + out[from..].find(end).expect("the value ends");
                out.replace_range(from..to, with);
                at = from;
            }
        }
        out
    }
}

pub fn head(method: &str, path: &str, content_type: &str, length: usize) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\
         connection: close\r\n\r\n"
    )
}

/// Sends a request and leaves the connection open for reading.
pub async fn open(address: SocketAddr, path: &str, body: &str) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(head("POST", path, "application/json", body.len()).as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

pub async fn post(address: SocketAddr, path: &str, body: impl Borrow<Value>) -> Response {
    let response = read(open(address, path, &body.borrow().to_string()).await).await;
    conform::check("POST", path, &response);
    response
}

pub async fn get(address: SocketAddr, path: &str) -> Response {
    request(address, "GET", path, "application/json", b"").await
}

pub async fn request(address: SocketAddr, method: &str, path: &str, content_type: &str, body: &[u8]) -> Response {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(head(method, path, content_type, body.len()).as_bytes()).await.unwrap();
    // The server may answer, and close, before it has read everything.
    let _ = stream.write_all(body).await;
    let response = read(stream).await;
    conform::check(method, path, &response);
    response
}

/// Reads to the end of the connection.
pub async fn read(mut stream: TcpStream) -> Response {
    let mut bytes = Vec::new();
    let result = timeout(SOON, stream.read_to_end(&mut bytes)).await.expect("the response ends");
    assert!(result.is_ok() || !bytes.is_empty(), "{result:?}");
    let text = String::from_utf8(bytes).expect("every response is UTF-8");
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no head in {text:?}"));
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status line");
    let chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let body = if chunked { dechunk(body) } else { body.to_owned() };
    Response { status, head: head.to_owned(), body }
}

/// Reads until the bytes so far contain `text`.
pub async fn read_until(stream: &mut TcpStream, text: &str) -> String {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains(text) {
        let count = timeout(SOON, stream.read(&mut buffer)).await.expect("more bytes arrive").unwrap();
        assert!(count > 0, "{text:?} never came: {:?}", String::from_utf8_lossy(&seen));
        seen.extend(&buffer[..count]);
    }
    String::from_utf8(seen).unwrap()
}

fn dechunk(mut rest: &str) -> String {
    let mut body = String::new();
    loop {
        let (size, after) = rest.split_once("\r\n").expect("a chunk size");
        let size = usize::from_str_radix(size, 16).expect("hexadecimal");
        if size == 0 {
            return body;
        }
        body.push_str(&after[..size]);
        rest = &after[size + 2..];
    }
}
