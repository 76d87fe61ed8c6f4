//! One client of the storm: what it asks, how it behaves, and what it may find.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, time::Duration};

use bytes::Bytes;
use futures::{
    StreamExt,
    channel::mpsc,
    future::{Either, join_all, select},
};
use http_body_util::{BodyExt, StreamBody};
use hyper::{Request, body::Frame, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use looplane_proto::inference::v1::{
    AbortRequest, Chat, ChatMessage, ChatRequest, GenerateRequest, GenerateResponse, SamplingParams,
    generate_request::Input, generate_response::Event, inference_client::InferenceClient,
};
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, time::sleep};
use tonic::{Code, Status, Streaming, transport::Channel};

use super::client::{Answer, connect, head, read, read_slowly, read_until};
use crate::common::Rng;

/// What texts can be asked for over HTTP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Route {
    Chat,
    Completions,
    Messages,
    Responses,
}

const ROUTES: [Route; 4] = [Route::Chat, Route::Completions, Route::Messages, Route::Responses];
const QUESTIONS: [&str; 3] = ["What is 12 + 30?", "What is the capital of France?", "Spell the word garden."];

impl Route {
    fn path(self) -> &'static str {
        match self {
            Route::Chat => "/v1/chat/completions",
            Route::Completions => "/v1/completions",
            Route::Messages => "/v1/messages",
            Route::Responses => "/v1/responses",
        }
    }
}

/// A request whose answer is known.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ask {
    pub route: Route,
    question: usize,
    /// Several choices, or an answer that is held to a form, where the route has it.
    fancy: bool,
}

impl Ask {
    pub fn all() -> impl Iterator<Item = Self> {
        let asks = ROUTES.into_iter().flat_map(|route| (0..QUESTIONS.len()).map(move |question| (route, question)));
        asks.flat_map(|(route, question)| [false, true].map(|fancy| Self { route, question, fancy }))
    }

    fn draw(rng: &mut Rng) -> Self {
        let question = rng.below(QUESTIONS.len() as u64) as usize;
        Self { route: ROUTES[rng.below(4) as usize], question, fancy: rng.below(2) == 0 }
    }

    fn body(&self) -> Value {
        let question = QUESTIONS[self.question];
        let schema = json!({
            "type": "object",
            "properties": {"answer": {"type": "string", "maxLength": 12}},
            "required": ["answer"],
            "additionalProperties": false,
        });
        let messages = json!([{"role": "user", "content": question}]);
        let (mut body, more) = match self.route {
            Route::Chat => {
                let form = json!({"type": "json_schema", "json_schema": {"name": "a", "schema": schema}});
                (json!({"messages": messages, "max_tokens": 40, "seed": 7}), json!({"n": 3, "response_format": form}))
            }
            Route::Completions => (
                json!({"prompt": question, "max_tokens": 40, "seed": 7, "ignore_eos": true}),
                json!({"n": 2, "structured_outputs": {"regex": "[a-z ]{3,20}"}, "ignore_eos": false}),
            ),
            Route::Messages => (
                json!({"messages": messages, "max_tokens": 40, "temperature": 0, "model": "looplane-demo"}),
                json!({"stop_sequences": ["a"]}),
            ),
            Route::Responses => (
                json!({"input": question, "max_output_tokens": 40, "temperature": 0}),
                json!({"text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}}),
            ),
        };
        if let (true, Value::Object(body), Value::Object(more)) = (self.fancy, &mut body, more) {
            body.extend(more);
        }
        body
    }

    /// The same, as long as it can be.
    fn long_body(&self) -> Value {
        let mut body = Self { fancy: false, ..self.clone() }.body();
        for name in ["max_tokens", "max_output_tokens"] {
            if let Some(tokens) = body.get_mut(name) {
                *tokens = json!(1500);
            }
        }
        body
    }
}

/// How a client behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Manner {
    /// Takes everything at once.
    Polite,
    /// Takes it byte by byte.
    Slow,
    /// Sends its body in pieces, with pauses.
    Pieces,
    /// Goes away within its body.
    LeavesBody,
    /// Goes away with the request sent.
    LeavesAnswer,
    /// Goes away within the answer.
    LeavesStream,
    /// Reads nothing for a while, and goes away.
    Deaf,
    /// Closes its sending side.
    HalfCloses,
    BadBody,
    BadHead,
    WrongKey,
    /// Gives the server too little time.
    Hurried,
    /// Has its request ended by its id.
    Aborts,
    /// Opens connections and says nothing, or half a head.
    Crowds,
    /// Several requests over one HTTP/2 connection: some reset, of some the body never ends.
    Resets,
    Generates,
    Chats,
}

const MANNERS: [Manner; 20] = [
    Manner::Polite,
    Manner::Polite,
    Manner::Polite,
    Manner::Slow,
    Manner::Pieces,
    Manner::LeavesBody,
    Manner::LeavesAnswer,
    Manner::LeavesStream,
    Manner::LeavesStream,
    Manner::Deaf,
    Manner::HalfCloses,
    Manner::BadBody,
    Manner::BadHead,
    Manner::WrongKey,
    Manner::Hurried,
    Manner::Aborts,
    Manner::Crowds,
    Manner::Resets,
    Manner::Generates,
    Manner::Chats,
];

/// What a client does: the same of the same seed and number.
#[derive(Debug)]
pub struct Scene {
    manner: Manner,
    ask: Ask,
    stream: bool,
    key: usize,
}

impl Scene {
    pub fn draw(rng: &mut Rng) -> Self {
        let manner = MANNERS[rng.below(MANNERS.len() as u64) as usize];
        Self { manner, ask: Ask::draw(rng), stream: rng.below(2) == 0, key: rng.below(2) as usize }
    }
}

/// The server, and what it answers when it is calm.
pub struct Storm {
    address: SocketAddr,
    keys: [String; 2],
    pub calm: BTreeMap<Ask, Vec<String>>,
}

type Played = Result<&'static str, String>;

impl Storm {
    pub fn new(address: SocketAddr, keys: [String; 2]) -> Self {
        Self { address, keys, calm: BTreeMap::new() }
    }

    /// A whole answer.
    pub async fn ask(&self, ask: &Ask) -> Answer {
        let request = self.request(ask.route, 0, "calm", ask.body().to_string().as_bytes());
        self.exchange(&request).await
    }

    fn request(&self, route: Route, key: usize, id: &str, body: &[u8]) -> Vec<u8> {
        let framing = format!("content-length: {}", body.len());
        [head(route.path(), &self.keys[key], id, &framing).as_bytes(), body].concat()
    }

    async fn exchange(&self, request: &[u8]) -> Answer {
        let mut stream = connect(self.address, false).await.expect("it listens");
        // The server may answer, and close, before it has read everything.
        let _ = stream.write_all(request).await;
        read(&mut stream).await
    }

    /// Plays a scene; in a word, how it ended, or why that is wrong.
    pub async fn play(&self, scene: &Scene, rng: &mut Rng, number: u64) -> Played {
        let Scene { manner, ask, stream, key } = scene;
        let (id, route) = (format!("scene-{number}"), ask.route);
        let with_stream = |mut body: Value, stream: bool| {
            body["stream"] = json!(stream);
            body
        };
        let body = with_stream(ask.body(), *stream);
        let request = self.request(route, *key, &id, body.to_string().as_bytes());
        let long = with_stream(ask.long_body(), *stream);
        match manner {
            Manner::Polite => {
                // It comes back when it is told to.
                for _ in 0..40 {
                    match self.judge(ask, &self.exchange(&request).await)? {
                        "told to come back" | "closed" => sleep(Duration::from_millis(50)).await,
                        end => return Ok(end),
                    }
                }
                Ok("told to come back")
            }
            Manner::Slow => {
                let mut client = connect(self.address, true).await.map_err(|error| error.to_string())?;
                let _ = client.write_all(&request).await;
                self.judge(ask, &read_slowly(&mut client, 300).await)
            }
            Manner::Pieces => {
                let mut client = connect(self.address, false).await.map_err(|error| error.to_string())?;
                let head = head(route.path(), &self.keys[*key], &id, "transfer-encoding: chunked");
                let _ = client.write_all(head.as_bytes()).await;
                let body = padded(&body, rng);
                for piece in body.as_bytes().chunks(body.len() / 12 + 1) {
                    let chunk = [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat();
                    let _ = client.write_all(&chunk).await;
                    pause(rng).await;
                }
                let _ = client.write_all(b"0\r\nx-trailer: of the body\r\n\r\n").await;
                self.judge(ask, &read(&mut client).await)
            }
            Manner::LeavesBody => {
                let body = padded(&body, rng);
                let request = self.request(route, *key, &id, body.as_bytes());
                let missing = 1 + rng.below(body.len() as u64 / 2) as usize;
                self.leave(&request[..request.len() - missing], rng, false).await
            }
            Manner::LeavesAnswer => {
                self.leave(&self.request(route, *key, &id, long.to_string().as_bytes()), rng, false).await
            }
            Manner::Deaf => {
                let long = with_stream(ask.long_body(), true).to_string();
                self.leave(&self.request(route, *key, &id, long.as_bytes()), rng, true).await
            }
            Manner::LeavesStream => {
                let mut client = connect(self.address, false).await.map_err(|error| error.to_string())?;
                let long = with_stream(ask.long_body(), true).to_string();
                let _ = client.write_all(&self.request(route, *key, &id, long.as_bytes())).await;
                read_until(&mut client, b"data: ", &mut Vec::new()).await;
                pause(rng).await;
                Ok("left")
            }
            Manner::HalfCloses => {
                let mut client = connect(self.address, false).await.map_err(|error| error.to_string())?;
                let long = self.request(route, *key, &id, long.to_string().as_bytes());
                let _ = client.write_all(&long).await;
                let _ = client.shutdown().await;
                read(&mut client).await;
                Ok("left")
            }
            Manner::BadBody => {
                let body = spoilt(body.to_string().into_bytes(), rng);
                let answer = self.exchange(&self.request(route, *key, &id, &body)).await;
                match answer.status {
                    400 => Ok("refused"),
                    404 if answer.error().is_some() => Ok("refused"),
                    // What was spoilt was no more than a text or a number.
                    200 => Ok("answered as spoilt"),
                    429 | 503 => Ok("told to come back"),
                    0 => Ok("closed"),
                    _ => Err(format!("{answer:?}")),
                }
            }
            Manner::BadHead => {
                let answer = self.exchange(&bad_head(&request, rng)).await;
                match answer.status {
                    // Closed without a word, or told what is wrong.
                    0 | 400..=499 | 503 => Ok("refused"),
                    _ => Err(format!("{answer:?}")),
                }
            }
            Manner::WrongKey => {
                let request = String::from_utf8(request).expect("it is ASCII").replace("Bearer ", "Bearer of-nobody-");
                let answer = self.exchange(request.as_bytes()).await;
                match answer.status {
                    401 => Ok("refused"),
                    503 => Ok("told to come back"),
                    0 => Ok("closed"),
                    _ => Err(format!("{answer:?}")),
                }
            }
            Manner::Hurried => {
                let mut long = long;
                long["timeout_ms"] = json!(1 + rng.below(40));
                let answer = self.exchange(&self.request(route, *key, &id, long.to_string().as_bytes())).await;
                match (answer.status, answer.error().as_deref()) {
                    (429 | 503, _) => Ok("told to come back"),
                    (0, _) => Ok("closed"),
                    (504, _) | (200, Some("deadline_exceeded" | "timeout_error" | "server_error")) => Ok("too late"),
                    // It came in time.
                    (200, None) if answer.whole => Ok("answered in time"),
                    _ => Err(format!("{answer:?}")),
                }
            }
            Manner::Aborts => self.abort(route, &long, *key, &id).await,
            Manner::Crowds => {
                let mut crowd = Vec::new();
                for number in 0..30 {
                    let mut client = connect(self.address, false).await.map_err(|error| error.to_string())?;
                    let some: &[u8] = if number % 2 == 0 { b"" } else { b"POST /v1/chat/completions HTTP/1.1\r\nho" };
                    let _ = client.write_all(some).await;
                    crowd.push(client);
                }
                pause(rng).await;
                Ok("left")
            }
            Manner::Resets => self.resets(scene, &long, rng).await,
            Manner::Generates => {
                let prompt = QUESTIONS[ask.question].to_owned();
                let sampling = sampling(rng, ask.fancy);
                let request =
                    GenerateRequest { input: Some(Input::Prompt(prompt)), sampling, ..GenerateRequest::default() };
                let request = self.call(request, *key, rng);
                let mut client = InferenceClient::new(self.channel().await?);
                follow(client.generate(request).await, rng).await
            }
            Manner::Chats => {
                let content = QUESTIONS[ask.question].to_owned();
                let messages = vec![ChatMessage { role: "user".into(), content, ..ChatMessage::default() }];
                let chat = Some(Chat { messages, ..Chat::default() });
                let sampling = sampling(rng, ask.fancy);
                let request = self.call(ChatRequest { chat, sampling, ..ChatRequest::default() }, *key, rng);
                let mut client = InferenceClient::new(self.channel().await?);
                follow(client.chat(request).await, rng).await
            }
        }
    }

    /// Of a request that is right: its answer is the one that it always has, or it is told to come back.
    fn judge(&self, ask: &Ask, answer: &Answer) -> Played {
        match (answer.status, answer.error()) {
            (200, None) if answer.whole && answer.texts(ask.route) == self.calm[ask] => Ok("answered"),
            (429 | 503, Some(_)) => Ok("told to come back"),
            // An idle connection that gives way to another is closed, also where its request is just on its way.
            (0, _) => Ok("closed"),
            _ => Err(format!("{answer:?}, but calm it is {:?}", self.calm[ask])),
        }
    }

    /// Sends so much, waits, and goes away; of what comes it reads nothing.
    async fn leave(&self, request: &[u8], rng: &mut Rng, deaf: bool) -> Played {
        let mut client = connect(self.address, deaf).await.map_err(|error| error.to_string())?;
        let _ = client.write_all(request).await;
        for _ in 0..if deaf { 20 } else { 1 } {
            pause(rng).await;
        }
        Ok("left")
    }

    async fn channel(&self) -> Result<Channel, String> {
        let endpoint = Channel::from_shared(format!("http://{}", self.address)).expect("an address");
        endpoint.connect().await.map_err(|error| error.to_string())
    }

    /// A call of a key, some with too little time.
    fn call<T>(&self, message: T, key: usize, rng: &mut Rng) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        let key = self.keys[key].parse().expect("a key is ASCII");
        request.metadata_mut().insert("x-api-key", key);
        if rng.below(4) == 0 {
            request.set_timeout(Duration::from_millis(1 + rng.below(60)));
        }
        request
    }

    /// Asks for much, and has it ended by its id once it runs; another key cannot.
    async fn abort(&self, route: Route, body: &Value, key: usize, id: &str) -> Played {
        let request = self.request(route, key, id, body.to_string().as_bytes());
        let mut client = InferenceClient::new(self.channel().await?);
        let mut abort = async |key: usize| {
            let mut request = tonic::Request::new(AbortRequest { request_id: id.to_owned() });
            request.metadata_mut().insert("x-api-key", self.keys[key].parse().expect("a key is ASCII"));
            client.abort(request).await.map_err(|status| status.code())
        };
        let exchange = std::pin::pin!(self.exchange(&request));
        let aborting = std::pin::pin!(async {
            loop {
                if let Ok(foreign) = abort(1 - key).await {
                    return Err(format!("ended by another key: {foreign:?}"));
                }
                match abort(key).await {
                    Ok(_) => return Ok(()),
                    Err(Code::NotFound | Code::Unavailable) => sleep(Duration::from_millis(2)).await,
                    Err(code) => return Err(format!("Abort: {code:?}")),
                }
            }
        });
        let answer = match select(exchange, aborting).await {
            // It ended, or was refused, before it was found.
            Either::Left((answer, _)) => answer,
            Either::Right((aborted, exchange)) => {
                aborted?;
                exchange.await
            }
        };
        match (answer.status, answer.error()) {
            (499, _) | (200, Some(_)) => Ok("ended by its id"),
            (200, None) if answer.whole => Ok("answered before it was ended"),
            (429 | 503, _) => Ok("told to come back"),
            (0, _) => Ok("closed"),
            _ => Err(format!("{answer:?}")),
        }
    }

    /// Five requests over one connection, of which the server hears no end: of the body, or of the interest in it.
    async fn resets(&self, scene: &Scene, long: &Value, rng: &mut Rng) -> Played {
        let stream = connect(self.address, false).await.map_err(|error| error.to_string())?;
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.initial_stream_window_size([None, Some(0), Some(500)][rng.below(3) as usize]);
        // The connection may give way to another while it is opened.
        let Ok((requests, connection)) = builder.handshake(TokioIo::new(stream)).await else { return Ok("left") };
        let connection = tokio::spawn(connection);
        let ways: Vec<(u64, u64)> = (0..5).map(|_| (rng.below(4), rng.below(30))).collect();
        let running = ways.into_iter().map(|(way, wait_ms)| {
            let (mut requests, key) = (requests.clone(), &self.keys[scene.key]);
            let (frames, body) = mpsc::unbounded::<Result<Frame<Bytes>, Infallible>>();
            let request = Request::post(format!("http://{}{}", self.address, scene.ask.route.path()))
                .header("content-type", "application/json")
                .header("x-api-key", key)
                .body(StreamBody::new(body))
                .expect("a request");
            let bytes = Bytes::from(long.to_string());
            async move {
                let wait = || sleep(Duration::from_millis(wait_ms));
                let sent = if way == 0 { bytes.slice(..bytes.len() / 2) } else { bytes };
                let _ = frames.unbounded_send(Ok(Frame::data(sent)));
                // Of one the body never ends, and the others half-close.
                let open = (way == 0).then_some(frames);
                let response = requests.send_request(request);
                tokio::select! {
                    biased;
                    () = wait(), if way < 2 => {}
                    response = response => if let Ok(mut response) = response {
                        response.body_mut().frame().await;
                        wait().await;
                    },
                    () = sleep(Duration::from_millis(400)) => {}
                }
                drop(open);
            }
        });
        tokio::select! {
            _ = join_all(running) => {}
            () = sleep(Duration::from_millis(500)) => {}
        }
        if rng.below(2) == 0 {
            // Without a word of farewell.
            connection.abort();
        }
        drop(requests);
        // An error says that the connection broke, or was cut off.
        let _ = connection.await;
        Ok("left")
    }
}

/// Some are large enough for their memory to count.
fn padded(body: &Value, rng: &mut Rng) -> String {
    format!("{body}{}", " ".repeat(rng.below(2) as usize * 98_000))
}

async fn pause(rng: &mut Rng) {
    sleep(Duration::from_millis(rng.below(15))).await;
}

fn sampling(rng: &mut Rng, fancy: bool) -> Option<SamplingParams> {
    let max_tokens = Some([20, 400][rng.below(2) as usize]);
    let n = fancy.then_some(2);
    Some(SamplingParams { max_tokens, n, ignore_eos: true, seed: Some(7), ..SamplingParams::default() })
}

/// Follows a call to its end, or goes away within it.
async fn follow(call: Result<tonic::Response<Streaming<GenerateResponse>>, Status>, rng: &mut Rng) -> Played {
    let leaves_after = (rng.below(3) == 0).then(|| rng.below(20));
    let refused = |status: Status| match status.code() {
        Code::ResourceExhausted | Code::Unavailable => Ok("told to come back"),
        // The client's own clock says so in one word, the server's in the other.
        Code::DeadlineExceeded | Code::Cancelled => Ok("too late"),
        // A connection that gave way, or broke.
        Code::Unknown | Code::Internal if std::error::Error::source(&status).is_some() => Ok("closed"),
        _ => Err(format!("{status:?}")),
    };
    let mut stream = match call {
        Ok(response) => response.into_inner(),
        Err(status) => return refused(status),
    };
    let (mut events, mut open) = (0, 0);
    while let Some(message) = stream.next().await {
        match message.map(|message| message.event) {
            Ok(Some(Event::Finished(_))) => open += 1,
            Ok(_) => {}
            Err(status) => return refused(status),
        }
        events += 1;
        if leaves_after.is_some_and(|after| events > after) {
            return Ok("left");
        }
    }
    if open == 0 { Err("a stream of no end".into()) } else { Ok("answered over gRPC") }
}

/// A body that is no longer what it was: cut, or with other bytes.
fn spoilt(mut body: Vec<u8>, rng: &mut Rng) -> Vec<u8> {
    match rng.below(4) {
        0 => body.truncate(rng.below(body.len() as u64) as usize),
        1 => {
            for _ in 0..1 + rng.below(4) {
                let at = rng.below(body.len() as u64) as usize;
                body[at] = rng.below(256) as u8;
            }
        }
        2 => body = [b"{\"messages\": [".repeat(2000), body].concat(),
        _ => body = [&body[..body.len() - 1], b", \"n\": 1e400}"].concat(),
    }
    body
}

/// What is no head, or one that no server should take.
fn bad_head(request: &[u8], rng: &mut Rng) -> Vec<u8> {
    let text = String::from_utf8_lossy(request).into_owned();
    match rng.below(7) {
        0 => (0..200).map(|_| rng.below(256) as u8).chain(*b"\r\n\r\n").collect(),
        1 => text.replacen("host: test", &format!("x: {}", "y".repeat(200_000)), 1).into_bytes(),
        2 => text.replacen("host: test", &"x: y\r\n".repeat(500), 1).into_bytes(),
        3 => text.replacen("content-length", "content-length: 1\r\ncontent-length", 1).into_bytes(),
        4 => text.replacen("HTTP/1.1", "HTTP/9.9", 1).into_bytes(),
        5 => text.replacen("application/json", "text/html", 1).into_bytes(),
        _ => text.replacen("content-length: ", "content-length: 99999999999999999999", 1).into_bytes(),
    }
}
