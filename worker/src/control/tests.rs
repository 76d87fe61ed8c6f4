use std::path::PathBuf;
use std::sync::atomic::AtomicUsize;

use looplane_proto::worker::v1::worker_client::WorkerClient;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use super::*;
use crate::batch::{Batch, Boundary, Drafting, Limits};
use crate::decoder::{LoadRequest, Loaded, OUTCOMES_AHEAD, OutcomeSink, PLANS_AHEAD, Phase, PlanSource, Progress};
use crate::sampling::Sampled;

const LIMITS: Limits = Limits {
    max_slots: 4,
    max_batch_tokens: 64,
    kv_pages: 8,
    max_context: 64 * 200,
    vocab_size: 100,
    drafting: Drafting { whole_sizes: false, extra_us: 0 },
    draft_corpus_tokens: 1 << 12,
    window: None,
};

/// A decoder whose tokens count up from the last one: the whole loop of a rank, without arithmetic.
struct Scripted {
    loaded: Loaded,
    script: Script,
    newest_seen: Arc<AtomicUsize>,
}

#[derive(Clone, Copy, PartialEq)]
enum Script {
    Run,
    PanicInStep(u64),
    /// Waits until this many plans are there before the first step.
    WaitForPlans(u64),
    FailJoin,
    /// The first step takes so long.
    LongStep(Duration),
}

impl Decoder for Scripted {
    fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    fn fabric_handle(&self) -> String {
        "scripted:0".into()
    }

    fn join(&mut self, handles: &[String]) -> Result<(), Fault> {
        match self.script {
            Script::FailJoin => Err(Fault::Join { rank: 0, problem: format!("cannot map {handles:?}") }),
            _ => Ok(()),
        }
    }

    fn run(self: Box<Self>, mut plans: PlanSource, outcomes: OutcomeSink) -> Result<(), Fault> {
        let mut batch = Batch::new(LIMITS);
        let (mut agreed, mut steps) = (0, 0);
        if let Script::WaitForPlans(count) = self.script {
            while plans.newest() < count {
                std::thread::yield_now();
            }
        }
        loop {
            match batch.boundary(agreed) {
                Boundary::Idle => match plans.wait_next()? {
                    Some(version) => agreed = version,
                    None => return Ok(()),
                },
                Boundary::Apply(version) => {
                    batch.apply(&plans.take(version)?)?;
                    if batch.step().rows.is_empty() {
                        outcomes.send(Outcome { version, ..Outcome::default() })?;
                    }
                }
                Boundary::Step => {
                    if self.script == Script::PanicInStep(steps) {
                        panic!("scripted panic");
                    }
                    if let (Script::LongStep(time), 0) = (self.script, steps) {
                        std::thread::sleep(time);
                    }
                    outcomes.send(step(&mut batch))?;
                    steps += 1;
                    agreed = plans.newest();
                    self.newest_seen.fetch_max(agreed as usize, Ordering::Relaxed);
                }
            }
        }
    }
}

fn step(batch: &mut Batch) -> Outcome {
    let step = batch.step().clone();
    let next = |row: usize| (step.rows[row].token + 1) % LIMITS.vocab_size as u32;
    let sampled =
        step.samples.iter().map(|&row| Sampled { token: next(row), logprob: Some(-0.5), top: vec![(1, -0.5)] });
    let sampled: Vec<Sampled> = sampled.collect();
    let (rows, drafted) = (batch.sampled_rows(), batch.drafted());
    let mut outcome = Outcome {
        version: step.version,
        step: step.number,
        ran_step: true,
        rows: step.rows.len(),
        positions: step.positions,
        drafted,
        step_time: Duration::from_nanos(5),
        wait_time: Some(Duration::from_nanos(3)),
        ..Outcome::default()
    };
    outcome.take_samples(&rows, sampled.clone(), batch.complete(&sampled));
    outcome
}

/// A worker on a real socket, and a client of it.
struct Worked {
    _dir: TempDir,
    socket: PathBuf,
    served: JoinHandle<Result<(), Fault>>,
    newest_seen: Arc<AtomicUsize>,
}

impl Worked {
    fn start(script: Script) -> Self {
        let newest_seen = Arc::new(AtomicUsize::new(0));
        let seen = newest_seen.clone();
        let load = move |request: &LoadRequest, report: &mut dyn FnMut(Progress)| {
            if request.model_dir.ends_with("huge") {
                return Err(LoadError::TooLarge { what: "weights", needed: 10, available: "5 are free".into() });
            }
            if request.model_dir.ends_with("broken") {
                return Err(LoadError::Request("no such model".into()));
            }
            report(Progress { phase: Phase::PackingWeights, bytes_done: 1, bytes_total: 2 });
            let loaded = Loaded {
                architecture: "Scripted".into(),
                vocab_size: LIMITS.vocab_size,
                max_context: LIMITS.max_context,
                num_layers: 1,
                hidden_size: 16,
                kv_pages: LIMITS.kv_pages,
                weight_bytes: 1,
                stream_bytes: 1,
                head_bytes: 0,
                read_limit: None,
                kv_bytes: 2,
                bit_domain: "scripted".into(),
                notes: vec!["a note".into()],
                model_digest: "digest".into(),
                max_slots: LIMITS.max_slots,
                max_batch_tokens: LIMITS.max_batch_tokens,
            };
            Ok(Box::new(Scripted { loaded, script, newest_seen: seen.clone() }) as Box<dyn Decoder>)
        };
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("rank-0.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let served = tokio::spawn(serve(listener, 0, Arc::new(load)));
        Self { _dir: dir, socket, served, newest_seen }
    }

    async fn client(&self) -> WorkerClient<Channel> {
        let endpoint = Endpoint::from_shared(format!("unix://{}", self.socket.display())).unwrap();
        WorkerClient::new(endpoint.connect().await.unwrap())
    }

    async fn joined(script: Script) -> (Self, WorkerClient<Channel>) {
        let worked = Self::start(script);
        let mut client = worked.client().await;
        let events = load(&mut client, "model").await.unwrap();
        assert!(matches!(events.last().unwrap().event, Some(v1::load_event::Event::Loaded(_))));
        client.join(v1::JoinRequest { fabric_handles: vec!["scripted:0".into()] }).await.unwrap();
        (worked, client)
    }

    /// Well before `FLUSH_TIMEOUT`: whatever the client still holds open, the process must end.
    async fn end(self) -> Result<(), Fault> {
        tokio::time::timeout(FLUSH_TIMEOUT / 2, self.served).await.expect("the worker ends").unwrap()
    }
}

async fn load(client: &mut WorkerClient<Channel>, model: &str) -> Result<Vec<v1::LoadEvent>, Status> {
    let request = v1::LoadRequest {
        model_dir: model.into(),
        tensor_parallel: 1,
        threads: 1,
        max_slots: 4,
        max_batch_tokens: 64,
        kv_pages: 8,
        wait_limit_ms: 1000,
        ..Default::default()
    };
    let mut stream = client.load(request).await?.into_inner();
    let mut events = Vec::new();
    while let Some(event) = stream.message().await? {
        events.push(event);
    }
    Ok(events)
}

fn admit_plan(steps: u32, max_tokens: u32) -> v1::Plan {
    let sampling = v1::Sampling { top_p: 1.0, repetition_penalty: 1.0, ..Default::default() };
    let admit = v1::Admit {
        sequence: 9,
        tokens: vec![10, 11],
        prompt_tokens: 2,
        max_tokens,
        sampling: Some(sampling),
        ..Default::default()
    };
    v1::Plan {
        version: 1,
        steps,
        admit: vec![admit],
        grants: vec![v1::PageGrant { slot: 0, first: 0, pages: (0..8).collect() }],
        prefill: vec![v1::PrefillChunk { slot: 0, start: 0, len: 2 }],
        decode: vec![0],
        ..Default::default()
    }
}

fn decode_plan(version: u64, steps: u32) -> v1::Plan {
    v1::Plan { version, steps, decode: vec![0], ..Default::default() }
}

#[tokio::test]
async fn a_worker_loads_joins_runs_and_drains() {
    let worked = Worked::start(Script::Run);
    let mut client = worked.client().await;
    let health = |mut client: WorkerClient<Channel>| async move {
        client.health(v1::HealthRequest {}).await.unwrap().into_inner()
    };
    assert_eq!(health(client.clone()).await.state(), State::Empty);
    let early = client.join(v1::JoinRequest::default()).await.unwrap_err();
    assert_eq!((early.code(), early.message()), (Code::FailedPrecondition, "Join: rank 0 has not loaded"));

    let events = load(&mut client, "model").await.unwrap();
    let [first, .., last] = &events[..] else { panic!("{events:?}") };
    let progress = v1::LoadProgress { phase: "packing weights".into(), bytes_done: 1, bytes_total: 2 };
    assert_eq!(first.event, Some(v1::load_event::Event::Progress(progress)));
    let Some(v1::load_event::Event::Loaded(loaded)) = &last.event else { panic!("{last:?}") };
    assert_eq!((loaded.page_positions, loaded.kv_pages, &loaded.fabric_handle[..]), (64, 8, "scripted:0"));
    assert_eq!(load(&mut client, "model").await.unwrap_err().code(), Code::FailedPrecondition);
    assert_eq!(health(client.clone()).await.state(), State::Loaded);
    let early = client.run(tokio_stream::empty()).await.unwrap_err();
    assert_eq!(early.message(), "Run: rank 0 has loaded but not joined");
    client.join(v1::JoinRequest { fabric_handles: vec!["scripted:0".into()] }).await.unwrap();

    let (plans, stream) = mpsc::channel(4);
    let mut outcomes = client.run(ReceiverStream::new(stream)).await.unwrap().into_inner();
    assert_eq!(health(client.clone()).await.state(), State::Running);
    plans.send(admit_plan(3, 100)).await.unwrap();
    for step in 0..3 {
        let outcome = outcomes.message().await.unwrap().unwrap();
        assert_eq!((outcome.version, outcome.step, outcome.ran_step), (1, step, true));
        assert_eq!(outcome.positions, u64::from(step) + 2);
        assert_eq!((outcome.rows, outcome.step_ns, outcome.wait_ns), (if step == 0 { 2 } else { 1 }, 5, Some(3)));
        assert_eq!((outcome.tokens[0].sequence, outcome.tokens[0].token), (9, 12 + step));
        assert_eq!((outcome.tokens[0].logprob, outcome.tokens[0].top.len()), (Some(-0.5), 1));
    }
    plans.send(v1::Plan { version: 2, steps: 1, ..Default::default() }).await.unwrap();
    let empty = outcomes.message().await.unwrap().unwrap();
    assert_eq!((empty.version, empty.ran_step), (2, false));
    let vitals = health(client.clone()).await;
    assert_eq!((vitals.version, vitals.steps), (2, 3));

    // What was sent before the end of the stream is still run.
    plans.send(decode_plan(3, 2)).await.unwrap();
    drop(plans);
    let mut drained = Vec::new();
    while let Some(outcome) = outcomes.message().await.unwrap() {
        drained.push((outcome.version, outcome.tokens[0].token));
    }
    assert_eq!(drained, [(3, 15), (3, 16)]);
    worked.end().await.unwrap();
}

#[tokio::test]
async fn pings_and_health_are_answered_while_a_step_runs_and_while_nothing_does() {
    const STEP: Duration = Duration::from_secs(2);
    const PING_INTERVAL: Duration = Duration::from_millis(20);
    // A ping that has no answer for so long breaks the connection, and with it every call on it.
    const TIMEOUT: Duration = Duration::from_millis(500);
    let worked = Worked::start(Script::LongStep(STEP));
    let endpoint = Endpoint::from_shared(format!("unix://{}", worked.socket.display())).unwrap();
    let pinging =
        endpoint.http2_keep_alive_interval(PING_INTERVAL).keep_alive_timeout(TIMEOUT).keep_alive_while_idle(true);
    let mut client = WorkerClient::new(pinging.connect().await.unwrap());
    // Nothing but pings for a while.
    tokio::time::sleep(2 * TIMEOUT).await;
    load(&mut client, "model").await.unwrap();
    client.join(v1::JoinRequest { fabric_handles: vec!["scripted:0".into()] }).await.unwrap();
    let (plans, stream) = mpsc::channel(4);
    let mut outcomes = client.run(ReceiverStream::new(stream)).await.unwrap().into_inner();
    plans.send(admit_plan(1, 100)).await.unwrap();
    let begun = std::time::Instant::now();
    while begun.elapsed() < STEP / 2 {
        let health =
            tokio::time::timeout(TIMEOUT, client.health(v1::HealthRequest {})).await.expect("an answer at once");
        assert_eq!(health.unwrap().into_inner().steps, 0, "the step is under way");
        tokio::time::sleep(PING_INTERVAL).await;
    }
    assert!(outcomes.message().await.unwrap().unwrap().ran_step);
    drop(plans);
    assert!(outcomes.message().await.unwrap().is_none());
    worked.end().await.unwrap();
}

#[tokio::test]
async fn plans_run_ahead_of_outcomes_that_nobody_reads() {
    let count = PLANS_AHEAD as u64 * 3;
    let (worked, mut client) = Worked::joined(Script::WaitForPlans(PLANS_AHEAD as u64)).await;
    let mut plans = vec![admit_plan(1, 10_000)];
    plans.extend((2..=count).map(|version| decode_plan(version, 1)));
    // Plans are taken and run although no outcome is read.
    let (end, ended) = oneshot::channel::<()>();
    let open = futures::stream::once(async { drop(ended.await) });
    let open = futures::StreamExt::filter_map(open, |()| async { None });
    let plans = futures::StreamExt::chain(tokio_stream::iter(plans), open);
    let mut outcomes = client.run(plans).await.unwrap().into_inner();
    while client.health(v1::HealthRequest {}).await.unwrap().into_inner().steps < count {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    drop(end);
    assert!(worked.newest_seen.load(Ordering::Relaxed) as u64 >= PLANS_AHEAD as u64);
    for version in 1..=count {
        assert_eq!(outcomes.message().await.unwrap().unwrap().version, version);
    }
    assert!(outcomes.message().await.unwrap().is_none());
    worked.end().await.unwrap();
}

#[tokio::test]
async fn a_full_outcome_channel_holds_the_decoder_and_loses_nothing() {
    let (worked, mut client) = Worked::joined(Script::Run).await;
    let (plans, stream) = mpsc::channel(4);
    let mut outcomes = client.run(ReceiverStream::new(stream)).await.unwrap().into_inner();
    // Plans without rows: each yields an outcome, whatever pages there are.
    let count = OUTCOMES_AHEAD as u64 * 2;
    let sent = tokio::spawn(async move {
        for version in 1..=count {
            plans.send(v1::Plan { version, steps: 1, ..Default::default() }).await.unwrap();
        }
    });
    while client.health(v1::HealthRequest {}).await.unwrap().into_inner().version < OUTCOMES_AHEAD as u64 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    for version in 1..=count {
        assert_eq!(outcomes.message().await.unwrap().unwrap().version, version);
    }
    assert!(outcomes.message().await.unwrap().is_none());
    sent.await.unwrap();
    worked.end().await.unwrap();
}

#[tokio::test]
async fn a_wrong_plan_ends_the_worker_with_its_reason() {
    let mut bad_page = decode_plan(2, 1);
    bad_page.grants = vec![v1::PageGrant { slot: 0, first: 0, pages: vec![9] }];
    let mut no_sampling = admit_plan(1, 4);
    no_sampling.admit[0].sampling = None;
    for (plans, says) in [
        (vec![admit_plan(1, 9), decode_plan(3, 1)], "plan 3 came where plan 2 follows"),
        (vec![admit_plan(1, 9), bad_page], "page 9 of 8"),
        (vec![no_sampling], "sampling is missing"),
    ] {
        let (worked, mut client) = Worked::joined(Script::Run).await;
        let endless = futures::StreamExt::chain(tokio_stream::iter(plans), tokio_stream::pending());
        let mut outcomes = client.run(endless).await.unwrap().into_inner();
        let status = loop {
            match outcomes.message().await {
                Ok(outcome) => assert!(outcome.is_some(), "the stream ended without a status"),
                Err(status) => break status,
            }
        };
        assert_eq!(status.code(), Code::InvalidArgument);
        assert!(status.message().contains(says), "{status}");
        assert!(worked.end().await.unwrap_err().to_string().contains(says));
    }
}

#[tokio::test]
async fn load_errors_have_their_codes_and_end_the_worker() {
    for (model, code) in [("broken", Code::InvalidArgument), ("huge", Code::ResourceExhausted)] {
        let worked = Worked::start(Script::Run);
        let mut client = worked.client().await;
        assert_eq!(load(&mut client, model).await.unwrap_err().code(), code);
        assert!(matches!(worked.end().await, Err(Fault::Load(_))));
    }
    let worked = Worked::start(Script::Run);
    let mut client = worked.client().await;
    let request = v1::LoadRequest { model_dir: "m".into(), tensor_parallel: 1, rank: 1, ..Default::default() };
    assert_eq!(client.load(request).await.unwrap_err().code(), Code::InvalidArgument);
    // A request that was refused is not a load.
    assert!(load(&mut client, "model").await.is_ok());
}

#[tokio::test]
async fn a_failed_join_ends_the_worker() {
    let worked = Worked::start(Script::FailJoin);
    let mut client = worked.client().await;
    load(&mut client, "model").await.unwrap();
    let status = client.join(v1::JoinRequest { fabric_handles: vec!["x".into()] }).await.unwrap_err();
    assert!(status.message().contains("rank 0: joining the group: cannot map [\"x\"]"), "{status}");
    assert!(matches!(worked.end().await, Err(Fault::Join { .. })));
}

#[tokio::test]
async fn a_panic_in_the_decoder_is_reported_and_ends_the_worker() {
    let (worked, mut client) = Worked::joined(Script::PanicInStep(1)).await;
    let endless = futures::StreamExt::chain(tokio_stream::iter([admit_plan(9, 9)]), tokio_stream::pending());
    let mut outcomes = client.run(endless).await.unwrap().into_inner();
    assert!(outcomes.message().await.unwrap().is_some());
    let status = outcomes.message().await.unwrap_err();
    assert_eq!(status.code(), Code::Internal);
    assert!(status.message().contains("rank 0: the decoder broke: scripted panic"), "{status}");
    assert!(matches!(worked.end().await, Err(Fault::Broken { .. })));
}

#[tokio::test]
async fn a_server_that_vanishes_is_a_fault_not_a_drain() {
    // The client lives on a runtime of its own, whose end closes its connection as the end of a process would.
    let worked = Worked::start(Script::Run);
    let socket = worked.socket.clone();
    let gone = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let endpoint = Endpoint::from_shared(format!("unix://{}", socket.display())).unwrap();
            let mut client = WorkerClient::new(endpoint.connect().await.unwrap());
            load(&mut client, "model").await.unwrap();
            client.join(v1::JoinRequest::default()).await.unwrap();
            let endless = futures::StreamExt::chain(tokio_stream::iter([admit_plan(2, 9)]), tokio_stream::pending());
            let mut outcomes = client.run(endless).await.unwrap().into_inner();
            outcomes.message().await.unwrap().unwrap();
        });
    });
    gone.await.unwrap();
    let fault = worked.end().await.unwrap_err();
    assert!(matches!(fault, Fault::PlanStream(_) | Fault::ServerGone), "{fault}");
}
