//! What a streamed token costs the front end, and how long it takes from the engine to its client.
//!
//! An engine that is played emits tokens to many streams at a fixed rate; clients in a process of their own take down
//! when each arrives, by the kernel's clock: whatever keeps the clients off their cores has no part in it. `cargo bench
//! --workspace --bench streams -- --help` has the options.

use std::{
    collections::{BTreeSet, HashMap},
    io::{self, IoSliceMut, Read, Write},
    net::SocketAddr,
    os::fd::AsRawFd,
    path::Path,
    process::{Command as Process, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use clap::Parser;
use looplane_server::{
    engine::{
        Command, EngineHandle, EngineState, FinishReason, GeneratedToken, ModelInfo, SequenceEvent, SequenceStream,
        Submission,
    },
    frontend::LargeWork,
    listener::{self, ServeOptions, StopSignal},
    text::Text,
    trace::Otlp,
};
use nix::sys::{
    socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt},
    time::TimeSpec,
};
use rustix::time::{ClockId, clock_gettime};
use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy, thread_native_id,
};
use tokio::{
    io::{AsyncWriteExt, Interest},
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, timeout},
};

/// The engine looks so often for streams whose next token is due.
const TICK: Duration = Duration::from_millis(1);
/// Streams have so long to begin.
const WARM_UP: Duration = Duration::from_secs(3);
/// Of a prompt of the model that is played.
const MAX_TOKENS: u32 = 400_000;

#[derive(Parser, Clone)]
struct Options {
    /// Streams at one time.
    #[arg(long, default_value_t = 2000)]
    streams: usize,
    /// Tokens a second of each stream.
    #[arg(long, default_value_t = 50)]
    rate: u32,
    /// Seconds that are measured.
    #[arg(long, default_value_t = 10)]
    seconds: u32,
    /// Threads of the server.
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// CPUs of the server, such as "0,1"; the clients then run on the others (taskset).
    #[arg(long)]
    cpus: Option<String>,
    /// CPUs of the clients.
    #[arg(long)]
    client_cpus: Option<String>,
    /// So many streams get their tokens at the same moment, as those of a step do.
    #[arg(long, default_value_t = 1)]
    together: usize,
    /// "chat/completions" or "completions".
    #[arg(long, default_value = "chat/completions")]
    route: String,
    /// Traces of the streams go to this collector.
    #[arg(long)]
    otlp_endpoint: Option<String>,
    /// Prompts of so many bytes are sent beside the streams, one after the other. (By default of 118 000 tokens. Those
    /// that are too long for the model are refused once they are read.)
    #[arg(long, value_name = "BYTES", num_args = 0..=1, default_missing_value = "200000")]
    large: Option<usize>,
    /// Only the clients, of the server at this address; times count from this one of the monotonic clock, in us.
    #[arg(long, hide = true, num_args = 2)]
    clients: Option<Vec<String>>,
    /// As Cargo calls benches.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() {
    let options = Options::parse();
    match &options.clients {
        Some(clients) => {
            let address = clients[0].parse().expect("an address");
            clients_alone(&options, address, clients[1].parse().expect("microseconds"));
        }
        None => server(&options),
    }
}

fn clock(id: ClockId) -> Duration {
    let time = clock_gettime(id);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Microseconds of the clock that all processes share, from `base` on.
fn micros_since(base: u64) -> u32 {
    (clock(ClockId::Monotonic).as_micros() as u64 - base) as u32
}

/// Bytes of memory that are this process's own.
fn memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find(|line| line.starts_with("RssAnon:")).expect("Linux has it");
    let kilobytes: u64 = line.split_whitespace().nth(1).expect("a number").parse().expect("a number");
    kilobytes << 10
}

fn model() -> ModelInfo {
    ModelInfo {
        model_digest: String::new(),
        architecture: "LlamaForCausalLM".into(),
        vocab_size: 768,
        max_context: MAX_TOKENS,
        tensor_parallel: 1,
        bit_domain: "cpu-bench-0123456789abcdef".into(),
    }
}

/// When each token of each stream was emitted, in microseconds.
type Emitted = Arc<Mutex<Vec<Vec<u32>>>>;

struct Sequence {
    /// The request's seed says which stream it is; that of a large prompt is none.
    stream: Option<usize>,
    events: mpsc::Sender<SequenceEvent>,
}

/// Tokens of one letter each: a chunk that carries several has as many letters.
fn letters(text: &Text) -> Vec<u32> {
    let tokenizer = &text.tokenizer;
    (0..tokenizer.tokens())
        .filter(|id| matches!(tokenizer.token_bytes(*id), [byte] if byte.is_ascii_alphabetic()))
        .collect()
}

/// Emits tokens until the server ends.
async fn engine(
    options: Options,
    text: Arc<Text>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    back: mpsc::UnboundedSender<Command>,
    emitted: Emitted,
    base: u64,
) {
    let period = Duration::from_secs(1) / options.rate;
    let begin = Instant::now();
    let words = letters(&text);
    // By number, and by when the next token is due: all have the same period.
    let (mut sequences, mut turns, mut next, mut word) = (HashMap::new(), BTreeSet::new(), 1, 0);
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        tokio::select! {
            command = commands.recv() => match command {
                Some(Command::Submit(Submission { requests, reply, .. })) => {
                    let streams = requests.into_iter().map(|request| {
                        let stream = Some(request.sampling.seed as usize).filter(|seed| *seed < options.streams);
                        let (events, receiver) = mpsc::channel(2 * request.max_tokens as usize + 3);
                        let group = (stream.unwrap_or(0) / options.together) as u32;
                        let groups = options.streams.div_ceil(options.together) as u32;
                        let turn = (begin.elapsed().as_nanos() / period.as_nanos()) as u32 + 1;
                        let due = begin + period * turn + period * group / groups;
                        sequences.insert(next, Sequence { stream, events });
                        turns.insert((due, next));
                        next += 1;
                        SequenceStream::new(next - 1, receiver, back.clone())
                    });
                    let _ = reply.send(Ok(streams.collect()));
                }
                Some(Command::Cancel { sequence, .. }) => drop(sequences.remove(&sequence)),
                Some(Command::Ping(reply)) => drop(reply.send(())),
                // An engine that is alone gets no other.
                Some(Command::HandOver(_) | Command::Adopt(_) | Command::Restart(_)) | None => return,
            },
            _ = ticks.tick() => {
                let now = Instant::now();
                let mut emitted = emitted.lock().expect("nobody panics with it");
                while let Some((due, number)) = turns.first().copied().filter(|(due, _)| *due <= now) {
                    turns.pop_first();
                    let Some(Sequence { stream, events }) = sequences.get(&number) else { continue };
                    word += 1;
                    let id = words[word % words.len()];
                    if let Some(stream) = *stream {
                        emitted[stream].push(micros_since(base));
                        turns.insert((due + period, number));
                    }
                    let ends = stream.is_none();
                    let token = GeneratedToken { id, logprob: None, top: Vec::new() };
                    let _ = events.try_send(SequenceEvent::Token(token));
                    if ends {
                        let _ = events.try_send(SequenceEvent::Finished(FinishReason::Length));
                        sequences.remove(&number);
                    }
                }
            }
        }
    }
}

fn server(options: &Options) {
    let base = clock(ClockId::Monotonic).as_micros() as u64;
    if let Some(cpus) = &options.cpus {
        pin(std::process::id(), cpus);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = { runtime }.worker_threads(options.threads).enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
        let text = Arc::new(Text::load(&fixture).expect("the fixture is a whole model directory"));
        let (back, commands) = mpsc::unbounded_channel();
        let (_state, state) = watch::channel(EngineState::Ready);
        let (_model, model) = watch::channel(Some(Arc::new(model())));
        let handle = EngineHandle::new(back.clone(), state, model, Arc::default());
        let tokens = (options.rate * (options.seconds + 60)) as usize;
        // Written once, so that they count as memory from the start.
        let times = (0..options.streams).map(|_| {
            let mut times = vec![1u32; tokens];
            times.clear();
            times
        });
        let emitted = Arc::new(Mutex::new(times.collect()));
        tokio::spawn(engine(options.clone(), Arc::clone(&text), commands, back, Arc::clone(&emitted), base));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let most = options.streams + 100;
        let serve = ServeOptions {
            large_work: LargeWork::GivesWay,
            model_id: "looplane-demo".into(),
            max_connections: most,
            max_concurrent_requests: most,
            max_body_bytes: 64 << 20,
            otlp: options
                .otlp_endpoint
                .as_deref()
                .map(|endpoint| Otlp::new(endpoint, "bench".into()).expect("the address of a collector")),
            ..ServeOptions::default()
        };
        let stop = StopSignal::default();
        tokio::spawn(listener::run(listener, handle, text, serve, stop));

        let before = memory();
        let mut clients = Process::new(std::env::current_exe().expect("it runs"));
        clients.args(std::env::args().skip(1)).args(["--clients", &address.to_string(), &base.to_string()]);
        let mut clients = clients.stdout(Stdio::piped()).spawn().expect("it starts");
        if let Some(cpus) = &options.client_cpus {
            pin(clients.id(), cpus);
        }
        let mut out = clients.stdout.take().expect("it is piped");
        let arrived = tokio::task::spawn_blocking(move || {
            let mut bytes = Vec::new();
            out.read_to_end(&mut bytes).expect("the clients write");
            bytes
        });
        sleep(WARM_UP).await;
        let counted = || emitted.lock().expect("nobody panics with it").iter().map(Vec::len).sum::<usize>();
        let (cpu, tokens, from) = (clock(ClockId::ProcessCPUTime), counted(), micros_since(base));
        let of_stream = (memory() - before) / options.streams as u64;
        sleep(Duration::from_secs(options.seconds.into())).await;
        let (cpu, tokens, to) = (clock(ClockId::ProcessCPUTime) - cpu, counted() - tokens, micros_since(base));
        let arrived = arrived.await.expect("it ends");
        clients.wait().expect("it is a child");

        let times: Vec<u32> =
            arrived.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap())).collect();
        let emitted = emitted.lock().expect("nobody panics with it");
        let (mut latencies, mut rest, mut missing) = (Vec::new(), &times[..], 0);
        for emitted in emitted.iter() {
            let (count, words) = rest.split_first().expect("there is a list for each stream");
            let (arrivals, words) = words.split_at(*count as usize);
            rest = words;
            missing += emitted.iter().filter(|at| **at < to).count().saturating_sub(arrivals.len());
            let pairs = emitted.iter().zip(arrivals).filter(|(at, _)| (from..to).contains(at));
            latencies.extend(pairs.map(|(at, arrived)| arrived.saturating_sub(*at)));
        }
        latencies.sort_unstable();
        let at = |share: f64| f64::from(latencies[((latencies.len() - 1) as f64 * share) as usize]) / 1e3;
        println!(
            "| streams | tokens/s | us of CPU a token | cores | ms: p50 | p99 | p99.9 | most | KiB a stream | behind |"
        );
        println!("|---|---|---|---|---|---|---|---|---|---|");
        println!(
            "| {} | {:.0} | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.1} | {missing} |",
            options.streams,
            tokens as f64 / f64::from(options.seconds),
            cpu.as_secs_f64() * 1e6 / tokens as f64,
            cpu.as_secs_f64() / f64::from(options.seconds),
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0),
            of_stream as f64 / 1024.0,
        );
    });
    // Connections need not be seen off.
    runtime.shutdown_background();
}

fn pin(process: u32, cpus: &str) {
    let status = Process::new("taskset").args(["-acp", cpus, &process.to_string()]).stdout(Stdio::null()).status();
    assert!(status.expect("taskset is there").success(), "the process is pinned");
}

/// Opens all streams, notes when tokens arrive, and writes for each stream how many and when.
fn clients_alone(options: &Options, address: SocketAddr, base: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let ended = Arc::new(AtomicBool::new(false));
    // In a thread of its own: what it writes at a time must not delay those who note times.
    let large = options.large.map(|bytes| {
        let (ended, beside) = (Arc::clone(&ended), options.streams);
        std::thread::spawn(move || large_prompts(address, &ended, bytes, beside))
    });
    let times = runtime.block_on(async {
        let mut streams = JoinSet::new();
        for stream in 0..options.streams {
            let (options, ended) = (options.clone(), Arc::clone(&ended));
            streams.spawn(async move { (stream, client(&options, address, base, stream, &ended).await) });
            if stream % 100 == 99 {
                sleep(Duration::from_millis(20)).await;
            }
        }
        sleep(WARM_UP + Duration::from_secs(options.seconds.into())).await;
        ended.store(true, Ordering::Relaxed);
        let mut times = streams.join_all().await;
        times.sort_by_key(|(stream, _)| *stream);
        times
    });
    if let Some(large) = large {
        large.join().expect("the server answers");
    }
    let mut out = Vec::new();
    for (_, times) in times {
        out.extend((times.len() as u32).to_le_bytes());
        out.extend(times.into_iter().flat_map(u32::to_le_bytes));
    }
    std::io::stdout().write_all(&out).expect("the server reads");
}

fn head(route: &str, body: &str) -> String {
    let bytes = body.len();
    format!(
        "POST /v1/{route} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {bytes}\r\n\r\n"
    )
}

async fn client(options: &Options, address: SocketAddr, base: u64, stream: usize, ended: &AtomicBool) -> Vec<u32> {
    let messages = r#""messages": [{"role": "user", "content": "hello"}]"#;
    let (asked, first) = match options.route.as_str() {
        "completions" => (r#""prompt": "hello""#, "\"text\":\""),
        _ => (messages, "\"delta\":{\"content\":\""),
    };
    let tokens = options.rate * (options.seconds + 60);
    let body =
        format!(r#"{{"model": "looplane-demo", {asked}, "stream": true, "max_tokens": {tokens}, "seed": {stream}}}"#);
    let mut socket = TcpStream::connect(address).await.expect("the server listens");
    socket.set_nodelay(true).expect("it is a TCP socket");
    setsockopt(&socket, sockopt::ReceiveTimestampns, &true).expect("Linux has it");
    let (shared, own) = (clock(ClockId::Realtime), clock(ClockId::Monotonic));
    let skew = shared.saturating_sub(own);
    socket.write_all((head(&options.route, &body) + &body).as_bytes()).await.expect("the server reads");
    let (mut times, mut buffer, mut held) = (Vec::new(), vec![0; 64 << 10], 0);
    while !ended.load(Ordering::Relaxed) {
        let arrived = timeout(Duration::from_millis(500), receive(&socket, &mut buffer[held..])).await;
        let Ok(arrived) = arrived else { continue };
        let (read, at) = arrived.expect("the stream goes on");
        let end = held + read;
        assert!(end > held, "the server ended stream {stream}: {}", String::from_utf8_lossy(&buffer[..end]));
        let now = (at.saturating_sub(skew).as_micros() as u64).saturating_sub(base) as u32;
        // Whole events; the rest is kept.
        let whole = buffer[..end].windows(2).rposition(|pair| pair == b"\n\n").map_or(0, |at| at + 2);
        let text = String::from_utf8_lossy(&buffer[..whole]);
        let chunks = text.split(first).skip(1).map(|chunk| chunk.bytes().take_while(u8::is_ascii_alphabetic).count());
        times.extend(std::iter::repeat_n(now, chunks.sum()));
        assert!(!text.starts_with("HTTP/1.1 4"), "{text}");
        buffer.copy_within(whole..end, 0);
        held = end - whole;
    }
    times
}

/// Reads what has arrived: how many bytes, and when the kernel had the last of them, by the clock of the day.
async fn receive(socket: &TcpStream, buffer: &mut [u8]) -> io::Result<(usize, Duration)> {
    let message = || {
        let (mut parts, mut space) = ([IoSliceMut::new(buffer)], nix::cmsg_space!(TimeSpec));
        let message = recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::empty())?;
        let noted = message.cmsgs()?.find_map(|part| match part {
            ControlMessageOwned::ScmTimestampns(at) => Some(Duration::from(at)),
            _ => None,
        });
        // It begins to take them down a moment after the first socket that asks for it.
        Ok((message.bytes, noted.unwrap_or_else(|| clock(ClockId::Realtime))))
    };
    socket.async_io(Interest::READABLE, message).await
}

/// Prompts of `bytes` bytes, one after the other.
fn large_prompts(address: SocketAddr, ended: &AtomicBool, bytes: usize, beside: usize) {
    const NO_STREAM: u32 = u32::MAX;
    const WORDS: &str = "lorem ipsum dolor sit amet ";
    let prompt = WORDS.repeat(bytes / WORDS.len());
    let (mut sent, mut answer) = (0, Vec::new());
    // Where it shares a core with those who note times, what it writes must not delay them.
    let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, idle);
    std::thread::sleep(WARM_UP);
    while !ended.load(Ordering::Relaxed) {
        // No two are equal: the server keeps the tokens of texts that come again.
        let body = format!(
            r#"{{"model": "looplane-demo", "prompt": "{sent} {prompt}", "max_tokens": 1, "seed": {NO_STREAM}}}"#
        );
        let mut socket = std::net::TcpStream::connect(address).expect("the server listens");
        socket.write_all((head("completions", &body) + &body).as_bytes()).expect("the server reads");
        answer.clear();
        while !answer.ends_with(b"}") {
            let mut part = [0; 4096];
            let read = socket.read(&mut part).expect("the server answers");
            assert!(read > 0, "the answer is cut off: {}", String::from_utf8_lossy(&answer));
            answer.extend_from_slice(&part[..read]);
        }
        sent += 1;
        std::thread::sleep(Duration::from_millis(200));
    }
    let answer = String::from_utf8_lossy(&answer);
    let told =
        ["\"usage\"", "\"message\""].iter().find_map(|key| answer.find(key)).map_or(&*answer, |at| &answer[at..]);
    eprintln!("{sent} prompts of {bytes} bytes beside {beside} streams: {told}");
}
