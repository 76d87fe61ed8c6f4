//! Connections that send half of a request and then nothing, and stay open for as long as the server lets them.

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use tokio::io::{self, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::client::http::Client;

const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// Most bytes looked at of what a server says to half a request: its status line is among them.
const ANSWER_BYTES: usize = 256;

pub struct HalfOpen {
    opened: Instant,
    over: CancellationToken,
    watchers: Vec<JoinHandle<End>>,
    not_opened: Vec<String>,
}

/// What became of them.
#[derive(Debug, Default)]
pub struct HalfOpenEnds {
    pub asked: u32,
    /// Those that could not be made, and why the first could not.
    pub not_opened: (u64, Option<String>),
    /// From when all had been opened until the server closed each, ascending.
    pub closed_after: Vec<Duration>,
    /// HTTP statuses that the server gave before it closed.
    pub statuses: BTreeMap<u16, u64>,
    /// Those that were open when the run ended.
    pub open: u64,
    pub watched: Duration,
}

enum End {
    Closed { after: Duration, status: Option<u16> },
    Open,
}

impl HalfOpen {
    /// Opens `count` connections to `client`'s server. Each second one stops within the head of a request for `path`,
    /// the others within its body.
    pub async fn open(count: u32, client: &Client, path: &str) -> Self {
        let body = br#"{"model":"half of a request"}"#;
        let head = client.head_bytes(path, body.len());
        let within_head = &head[..head.len() / 2];
        let within_body = [&head, &body[..body.len() / 2]].concat();
        let connecting = (0..count).map(|number| {
            let sent = if number % 2 == 0 { within_head } else { &within_body };
            async move {
                let connect = async {
                    let mut socket = TcpStream::connect(client.address()).await?;
                    socket.write_all(sent).await.map(|()| socket)
                };
                let timeout = |_| Err(io::ErrorKind::TimedOut.into());
                tokio::time::timeout(CONNECT_LIMIT, connect).await.unwrap_or_else(timeout)
            }
        });
        let sockets: Vec<io::Result<TcpStream>> = join_all(connecting).await;
        let (opened, over) = (Instant::now(), CancellationToken::new());
        let (mut watchers, mut not_opened) = (Vec::new(), Vec::new());
        for socket in sockets {
            match socket {
                Ok(socket) => watchers.push(tokio::spawn(watch(socket, opened, over.clone()))),
                Err(error) => not_opened.push(error.to_string()),
            }
        }
        Self { opened, over, watchers, not_opened }
    }

    /// Ends the watch and closes what is still open.
    pub async fn close(self) -> HalfOpenEnds {
        self.over.cancel();
        let mut ends = HalfOpenEnds {
            asked: (self.watchers.len() + self.not_opened.len()) as u32,
            not_opened: (self.not_opened.len() as u64, self.not_opened.into_iter().next()),
            watched: self.opened.elapsed(),
            ..HalfOpenEnds::default()
        };
        for end in join_all(self.watchers).await {
            match end.expect("a watcher does not panic") {
                End::Closed { after, status } => {
                    ends.closed_after.push(after);
                    if let Some(status) = status {
                        *ends.statuses.entry(status).or_default() += 1;
                    }
                }
                End::Open => ends.open += 1,
            }
        }
        ends.closed_after.sort();
        ends
    }
}

/// Waits for the server to close `socket`, and reads what it says before.
async fn watch(mut socket: TcpStream, opened: Instant, over: CancellationToken) -> End {
    let (mut answer, mut part) = (Vec::new(), [0; ANSWER_BYTES]);
    loop {
        let read = tokio::select! {
            read = socket.read(&mut part) => read,
            () = over.cancelled() => return End::Open,
        };
        match read {
            Ok(bytes) if bytes > 0 => answer.extend_from_slice(&part[..bytes.min(ANSWER_BYTES - answer.len())]),
            // The end of what the server sends, or a reset.
            Ok(_) | Err(_) => return End::Closed { after: opened.elapsed(), status: status_of(&answer) },
        }
    }
}

/// The status of an answer that begins `HTTP/1.1 408 `.
fn status_of(answer: &[u8]) -> Option<u16> {
    let line = std::str::from_utf8(answer.split(|&byte| byte == b'\r').next()?).ok()?;
    line.strip_prefix("HTTP/1.")?.split(' ').nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::TcpListener;

    /// A server that closes each connection 100 ms after it was opened, those whose head is whole with an answer.
    async fn impatient(listener: TcpListener) {
        loop {
            let (mut socket, _) = listener.accept().await.expect("a listener of this test");
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(100)).await;
                let mut request = vec![0; 4096];
                let bytes = socket.read(&mut request).await.expect("half a request");
                if request[..bytes].windows(4).any(|end| end == b"\r\n\r\n") {
                    let answer = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n";
                    socket.write_all(answer).await.expect("the client reads");
                }
            });
        }
    }

    #[tokio::test]
    async fn the_server_is_seen_to_close_and_to_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        tokio::spawn(impatient(listener));
        let client = Client::new(&base, Some("sesame"), CONNECT_LIMIT).expect("valid");
        let half_open = HalfOpen::open(5, &client, "/v1/completions").await;
        tokio::time::sleep(Duration::from_millis(600)).await;
        let ends = half_open.close().await;
        assert_eq!((ends.asked, ends.closed_after.len(), ends.open, ends.not_opened.0), (5, 5, 0, 0));
        assert_eq!(ends.statuses, BTreeMap::from([(408, 2)]), "two of five had sent a whole head");
        assert!(ends.closed_after[0] >= Duration::from_millis(60), "{:?}", ends.closed_after);
    }

    #[tokio::test]
    async fn a_server_that_is_not_there_and_one_that_waits_are_told_apart() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let base = format!("http://{}", listener.local_addr().expect("bound"));
        let client = Client::new(&base, None, CONNECT_LIMIT).expect("valid");
        let ends = HalfOpen::open(3, &client, "/").await.close().await;
        assert_eq!((ends.open, ends.closed_after.len(), ends.not_opened.0), (3, 0, 0));
        drop(listener);
        let ends = HalfOpen::open(3, &client, "/").await.close().await;
        assert_eq!((ends.asked, ends.open, ends.not_opened.0), (3, 0, 3));
        assert!(ends.not_opened.1.is_some_and(|why| why.contains("refused")));
    }

    #[test]
    fn status_lines_are_read() {
        assert_eq!(status_of(b"HTTP/1.1 408 Request Timeout\r\n"), Some(408));
        assert_eq!((status_of(b"HTTP/1.0 400\r\n"), status_of(b"SSH-2.0"), status_of(b"")), (Some(400), None, None));
    }
}
