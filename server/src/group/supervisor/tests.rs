//! A burst of reports that is longer than what the supervisor takes at once.

use looplane_proto::worker::v1::Finish;

use super::super::fake::{FakeLauncher, Script};
use super::super::start::{GroupFacts, RankEvent, Traffic};
use super::*;
use crate::engine::{EngineHandle, FinishReason, SequenceEvent, Standing};
use crate::metrics::EngineMetrics;
use crate::sched::fake_worker::{FakeWorker, Shape, expected, request};
use crate::sched::{Event, Limits, Scheduler};

const SHAPE: Shape = Shape { max_slots: 4, max_batch_tokens: 8, kv_pages: 256, page_positions: 4 };

/// A supervisor, what the front end holds of it, and the streams of a group of one rank, whose ends the test holds.
struct Bench {
    supervisor: Supervisor,
    handle: EngineHandle,
    link: Link,
    workers: Workers,
    plans: mpsc::Receiver<looplane_proto::worker::v1::Plan>,
    events: mpsc::Sender<RankEvent>,
}

fn bench() -> Bench {
    // One plan covers all the steps, so that no plan waits for a report.
    let limits = Limits {
        max_slots: SHAPE.max_slots,
        max_batch_tokens: SHAPE.max_batch_tokens,
        steps_per_plan: 1000,
        ..Limits::default()
    };
    let config = GroupConfig { limits, ..GroupConfig::new("/models/fake".into(), 1) };
    let launcher = FakeLauncher::new(1, |_, _| Script::default());
    let (alive, _) = mpsc::channel(1);
    let workers = Workers::launch(&*launcher, 1, &alive).unwrap();
    let (commands_back, commands) = mpsc::unbounded_channel();
    let (state, state_receiver) = watch::channel(EngineState::Loading(String::new()));
    let (model, model_receiver) = watch::channel(None);
    let metrics = Arc::new(EngineMetrics::default());
    let handle = EngineHandle::new(commands_back.clone(), state_receiver, model_receiver, metrics.clone());
    let channels = Channels { commands, state, model, stop: CancellationToken::new(), alive };
    let (plan_sender, plans) = mpsc::channel(4);
    let (event_sender, events) = mpsc::channel(4 * BURST);
    let model = ModelInfo {
        model_digest: "digest".into(),
        architecture: "FakeForCausalLM".into(),
        vocab_size: 1000,
        max_context: 1024,
        tensor_parallel: 1,
        bit_domain: "fake".into(),
    };
    let traffic = vec![Traffic::default()];
    let Event::GroupReady(shape) = SHAPE.ready() else { unreachable!("that is what it says") };
    let facts = GroupFacts { model, shape, traffic };
    let link = Link {
        facts,
        timed: Vec::new(),
        plans: vec![plan_sender],
        events,
        health: Vec::new(),
        _readers: tokio::task::JoinSet::new(),
    };
    let scheduler = Scheduler::new(config.limits.clone()).unwrap();
    let common = Arc::new(Common::new(config.timeouts.quarantine));
    let delivery = Delivery::new(scheduler, commands_back, metrics, common.clone());
    let mut supervisor = Supervisor::new(config, launcher, delivery, common, channels);
    supervisor.announce(&link).unwrap();
    Bench { supervisor, handle, link, workers, plans, events: event_sender }
}

#[tokio::test]
async fn every_report_of_a_burst_is_handled() {
    let Bench { mut supervisor, handle, mut link, mut workers, mut plans, events } = bench();
    let request = request(1, 5, 2 * BURST as u32 + 100, vec![]);
    let work = async {
        let mut stream = handle.submit(vec![request.clone()], Standing::default()).await.unwrap().remove(0);
        let mut worker = FakeWorker::new(SHAPE);
        worker.receive(plans.recv().await.unwrap());
        let mut reports = 0;
        while !worker.rests() {
            if let Some(outcome) = worker.run(worker.last_version()) {
                // On one thread, and without waiting: the supervisor finds all of them at once.
                events.try_send(RankEvent::Outcome { rank: 0, outcome }).unwrap();
                reports += 1;
            }
        }
        assert!(reports > 2 * BURST, "{reports} reports are no burst");
        let mut tokens = Vec::new();
        loop {
            match stream.next().await.unwrap() {
                SequenceEvent::Token(token) => tokens.push(token.id),
                end => break (tokens, end),
            }
        }
    };
    let (tokens, end) = tokio::select! {
        output = work => output,
        ended = supervisor.feed(&mut link, &mut workers) => {
            panic!("the group is lost: {:?}", ended.err().map(|fault| fault.words))
        }
    };
    let (wanted, finish) = expected(&request);
    assert_eq!((tokens, finish), (wanted, Finish::Length));
    assert_eq!(end, SequenceEvent::Finished(FinishReason::Length));
}
