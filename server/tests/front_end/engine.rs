//! An engine played by the test.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use looplane_server::engine::{
    Command, EngineHandle, EngineState, FinishReason, GeneratedToken, ModelInfo, SequenceEvent, SequenceRequest,
    SequenceStream, Submission, SubmitError, Times, Unwanted,
};
use looplane_server::metrics::EngineMetrics;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};

use crate::SOON;

/// The engine's end of the seam.
pub struct Script {
    commands: mpsc::UnboundedReceiver<Command>,
    commands_back: mpsc::UnboundedSender<Command>,
    pub state: watch::Sender<EngineState>,
    pub model: watch::Sender<Option<Arc<ModelInfo>>>,
    /// What the engine counts.
    pub metrics: Arc<EngineMetrics>,
    next_id: u64,
    /// Of a request of several sequences: those that the test is yet to take.
    taken: VecDeque<Sequence>,
}

/// A sequence that the test generates.
pub struct Sequence {
    pub id: u64,
    pub request: SequenceRequest,
    pub events: mpsc::Sender<SequenceEvent>,
}

pub fn model() -> ModelInfo {
    ModelInfo {
        model_digest: String::new(),
        architecture: "LlamaForCausalLM".into(),
        vocab_size: 768,
        max_context: 512,
        tensor_parallel: 2,
        bit_domain: "cpu-test".into(),
    }
}

pub fn script() -> (EngineHandle, Script) {
    let (commands_back, commands) = mpsc::unbounded_channel();
    let (state, state_receiver) = watch::channel(EngineState::Ready);
    let (model_sender, model_receiver) = watch::channel(Some(Arc::new(model())));
    let metrics = Arc::<EngineMetrics>::default();
    let handle = EngineHandle::new(commands_back.clone(), state_receiver, model_receiver, metrics.clone());
    (
        handle,
        Script { commands, commands_back, state, model: model_sender, metrics, next_id: 1, taken: VecDeque::new() },
    )
}

pub fn token(id: u32) -> SequenceEvent {
    SequenceEvent::Token(GeneratedToken { id, logprob: None, top: Vec::new() })
}

/// What the engine says of a prompt that it has just computed: it came 50 ms ago, and waited for 30 of them.
pub fn prompt(cached_tokens: u32, logprobs: Vec<GeneratedToken>) -> SequenceEvent {
    let before = |ms| Instant::now() - Duration::from_millis(ms);
    let times = Times { submitted: before(50), admitted: before(20), computed: before(0) };
    SequenceEvent::Prompt { cached_tokens, times: Box::new(times), logprobs }
}

/// The tokens of `text` and the stop token.
pub fn answer(text: &str) -> Vec<SequenceEvent> {
    let mut events: Vec<_> = crate::spell(text).into_iter().chain([4]).map(token).collect();
    events.push(SequenceEvent::Finished(FinishReason::Stop));
    events
}

impl Script {
    /// What the engine is asked next.
    pub async fn command(&mut self) -> Command {
        timeout(SOON, self.commands.recv()).await.expect("a command arrives").expect("the script holds a sender")
    }

    pub async fn submission(&mut self) -> Submission {
        match self.command().await {
            Command::Submit(submission) => submission,
            other => panic!("a submission was expected, not {other:?}"),
        }
    }

    pub async fn cancelled(&mut self) -> u64 {
        self.unwanted().await.0
    }

    /// The sequence that is cancelled next, and why.
    pub async fn unwanted(&mut self) -> (u64, Unwanted) {
        match self.command().await {
            Command::Cancel { sequence, because, .. } => (sequence, because),
            other => panic!("a cancel was expected, not {other:?}"),
        }
    }

    pub fn nothing_more(&mut self) {
        if let Ok(command) = self.commands.try_recv() {
            panic!("no command was expected, but {command:?}");
        }
    }

    /// Takes the next sequence: of the request at hand, or else the first of the next.
    pub async fn accept(&mut self) -> Sequence {
        if self.taken.is_empty() {
            let Submission { requests, reply, .. } = self.submission().await;
            let mut streams = Vec::new();
            for request in requests {
                let (events, receiver) = mpsc::channel(request.max_tokens as usize + 2);
                streams.push(SequenceStream::new(self.next_id, receiver, self.commands_back.clone()));
                self.taken.push_back(Sequence { id: self.next_id, request, events });
                self.next_id += 1;
            }
            let _ = reply.send(Ok(streams));
        }
        self.taken.pop_front().expect("a request has a sequence")
    }

    /// The model has room for so many tokens.
    pub fn set_context(&self, max_context: u32) {
        self.model.send_replace(Some(Arc::new(ModelInfo { max_context, ..model() })));
    }

    /// Takes the next submission, and sends all of `events` once it is as old as [`prompt`] says.
    pub async fn play_late(&mut self, events: Vec<SequenceEvent>) -> SequenceRequest {
        let sequence = self.accept().await;
        sleep(Duration::from_millis(60)).await;
        // What is told of times counts from now.
        let prompt = |event| match event {
            SequenceEvent::Prompt { cached_tokens, logprobs, .. } => prompt(cached_tokens, logprobs),
            event => event,
        };
        for event in events.into_iter().map(prompt) {
            sequence.send(event).await;
        }
        sequence.request
    }

    /// Refuses the next submission.
    pub async fn refuse(&mut self, error: SubmitError) {
        let _ = self.submission().await.reply.send(Err(error));
    }

    /// Takes the next submission and sends all of `events` at once.
    pub async fn play(&mut self, events: Vec<SequenceEvent>) -> SequenceRequest {
        let sequence = self.accept().await;
        for event in events {
            sequence.send(event).await;
        }
        sequence.request
    }
}

impl Sequence {
    /// A front end that has gone away is not an error of the engine.
    pub async fn send(&self, event: SequenceEvent) {
        let _ = self.events.send(event).await;
    }
}
