//! From a request to running sequences: what HTTP and gRPC share between parsing and writing.

use std::{
    error::Error,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::http::HeaderMap;
use bytes::Bytes;
use hyper::body::Body;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

mod error;
mod generation;
mod place;
mod pool;
mod record;
mod reply;
mod served;

pub use error::GenerateError;
pub use generation::{Choice, ChoiceEvent, Generation};
use generation::{Deadline, Echo};
pub use place::Place;
pub use record::{Progress, Record, RequestId};
pub use reply::{Choices, Replies, ReplyChoice, ReplyEnd, ReplyEvent, Told};
pub use served::OfKey;

pub use pool::LargeWork;
use pool::Pool;
use served::{Listed, Served};

use crate::{
    drafts::DraftReport,
    engine::{EngineHandle, EngineState, ModelInfo, Replica, Standing, leaves_room},
    keys::{Key, KeyLimitError, Running},
    metrics::FrontMetrics,
    request::{FieldError, RequestError, ValidRequest},
    text::{OutputText, Text},
    trace::{self, Traces},
    upload::{Upload, UploadError, Uploads},
};

/// Bytes of a request or an answer up to which work is done where it is asked for; more would delay others' tokens.
pub const INLINE_BYTES: usize = 4096;

/// What every connection of the front end shares.
#[derive(Debug)]
pub struct Frontend {
    /// The scheduler and its workers.
    pub engine: EngineHandle,
    /// The model's text side.
    pub text: Arc<Text>,
    /// The name that requests call the model by.
    pub model_id: String,
    /// What answers tell of drafts, of which a step has so many at most.
    pub draft_report: (DraftReport, u32),
    /// When the front end started, in seconds since 1970.
    pub started: u64,
    /// What it counts.
    pub metrics: FrontMetrics,
    /// Where traces go, if anywhere.
    pub traces: Option<Traces>,
    /// Set: no new requests.
    pub draining: CancellationToken,
    /// Set: requests that still run end now, with an error.
    pub closing: CancellationToken,
    /// Reads the bodies of requests.
    pub uploads: Uploads,
    permits: Arc<Semaphore>,
    max_concurrent_requests: usize,
    served: Arc<Served>,
    pool: Arc<Pool>,
}

/// What a request became before it is queued.
#[derive(Debug)]
pub struct Prepared<T> {
    /// What the work made of it.
    pub prepared: T,
    /// The model that it was made for.
    pub model: Arc<ModelInfo>,
    /// Its place among the requests served at one time.
    pub place: Place,
}

impl Frontend {
    /// A front end that serves at most `max_concurrent_requests` (at least 1) at a time.
    pub fn new(
        engine: EngineHandle,
        text: Arc<Text>,
        model_id: String,
        draft_report: (DraftReport, u32),
        max_concurrent_requests: usize,
        uploads: Uploads,
        large_work: LargeWork,
    ) -> Self {
        Self {
            uploads,
            pool: Arc::new(Pool::new(large_work)),
            engine,
            text,
            model_id,
            draft_report,
            started: unix_seconds(),
            metrics: FrontMetrics::default(),
            traces: None,
            draining: CancellationToken::new(),
            closing: CancellationToken::new(),
            permits: Arc::new(Semaphore::new(max_concurrent_requests)),
            max_concurrent_requests,
            served: Arc::default(),
        }
    }

    /// What is written of a request that has just arrived: its own trace goes on, or one begins where traces are
    /// exported.
    pub fn arrive(&self, request_id: RequestId, headers: &HeaderMap) -> Record {
        let begun = || self.traces.as_ref().map(|_| trace::Context::root());
        Record::new(request_id, trace::Context::continued(headers).or_else(begun), self.traces.clone())
    }

    /// Takes a place among the requests served at one time, for the request of a key where keys are asked for. `route`
    /// is one of the server's own.
    ///
    /// # Errors
    /// [`GenerateError::Busy`] if there is none, [`GenerateError::Key`] if the key's limits allow no more,
    /// [`GenerateError::ShuttingDown`] while draining.
    pub fn enter(
        &self,
        record: &Arc<Record>,
        key: Option<&Arc<Key>>,
        route: &'static str,
    ) -> Result<Place, GenerateError> {
        record.enters(route, key.cloned());
        self.take_place(key, record).inspect_err(|error| record.failed(error.code()))
    }

    fn take_place(&self, key: Option<&Arc<Key>>, record: &Arc<Record>) -> Result<Place, GenerateError> {
        if self.draining.is_cancelled() {
            return Err(GenerateError::ShuttingDown);
        }
        let running = key.map(|key| key.begin()).transpose()?;
        let busy = |_| GenerateError::Busy { limit: self.max_concurrent_requests };
        let permit = self.permits.clone().try_acquire_owned().map_err(busy)?;
        if let (Some(key), Some(running)) = (key, &running) {
            self.leave_places(key, running)?;
        }
        let listed = Listed::new(&self.served, record.clone(), &self.closing);
        Ok(Place::new(record.clone(), permit, running, listed))
    }

    /// Reads the body of a request of a key, where keys are asked for. Of several keys none may hold all the memory
    /// that there is for bodies.
    ///
    /// # Errors
    /// [`GenerateError::Upload`].
    pub async fn read<B>(&self, key: Option<&Arc<Key>>, body: B) -> Result<Upload, GenerateError>
    where
        B: Body<Data = Bytes>,
        B::Error: Into<Box<dyn Error + Send + Sync>>,
    {
        let owner = key.and_then(|key| key.owner.as_ref());
        let upload = self.uploads.read(owner, body).await;
        if let (Err(UploadError::Share { .. }), Some(key)) = (&upload, key) {
            key.refused();
        }
        Ok(upload?)
    }

    /// Ends the requests of a key that have this id, and returns how many there are.
    pub fn abort(&self, key: Option<&Arc<Key>>, request_id: &str) -> usize {
        self.served.abort(&(key.map(|key| key.id.clone()), request_id.into()))
    }

    /// The requests of a key, at most so many that run, and as many that ended.
    pub fn of_key(&self, key: Option<&Arc<Key>>, most: usize) -> OfKey {
        self.served.of_key(key.map(|key| &key.id), most)
    }

    /// Requests being served, and how many can be.
    pub fn requests(&self) -> (usize, usize) {
        let most = self.max_concurrent_requests;
        (most - self.permits.available_permits().min(most), most)
    }

    /// Of several keys none may take all places: a request of it that has one leaves enough to others.
    fn leave_places(&self, key: &Key, running: &Running) -> Result<(), KeyLimitError> {
        let (running, limit) = (running.of_its_key(), self.max_concurrent_requests);
        // As they were before this one came.
        let free = self.permits.available_permits() as u64 + 1;
        if key.owner.is_none() || leaves_room(u64::from(running).saturating_sub(1), 1, free) {
            return Ok(());
        }
        key.refused();
        Err(KeyLimitError::Share { id: key.id.clone(), running: running.saturating_sub(1), limit })
    }

    /// The engine's state, or that no new requests are taken.
    pub fn state(&self) -> EngineState {
        match self.draining.is_cancelled() {
            true => EngineState::Draining,
            false => self.engine.state(),
        }
    }

    /// The state of a replica. All are shut down together, and the front end is the first to know.
    pub fn state_of(&self, replica: &Replica) -> EngineState {
        match self.draining.is_cancelled() {
            true => EngineState::Draining,
            false => replica.state.borrow().clone(),
        }
    }

    /// Waits until no request is being served.
    pub async fn idle(&self) {
        let all = self.max_concurrent_requests as u32;
        // An error would say that the semaphore is closed, which nobody does.
        let _ = self.permits.acquire_many(all).await;
    }

    /// What the served model is.
    ///
    /// # Errors
    /// [`GenerateError::NotReady`] before it has loaded for the first time.
    pub fn model(&self) -> Result<Arc<ModelInfo>, GenerateError> {
        self.engine.model().ok_or_else(|| GenerateError::NotReady(in_words(&self.engine.state())))
    }

    /// Checks that `asked` names the served model; empty does.
    ///
    /// # Errors
    /// [`RequestError::ModelNotFound`].
    pub fn check_model(&self, asked: &str) -> Result<(), RequestError> {
        if asked.is_empty() || asked == self.model_id {
            return Ok(());
        }
        Err(RequestError::ModelNotFound { asked: asked.into(), served: self.model_id.clone() })
    }

    /// Does the work between a request's body and its tokens: `work` on `bytes` bytes, with the model and its text
    /// side. Much of it is done by the front end's own threads, and not at all if this future is dropped before it
    /// begins. The place goes with the work.
    ///
    /// # Errors
    /// Those of `work`; [`GenerateError::NotReady`] before the model has loaded; [`GenerateError::Internal`] if it
    /// panics.
    pub async fn prepare<T, E>(
        &self,
        place: Place,
        bytes: usize,
        work: impl FnOnce(&ModelInfo, &Text) -> Result<T, E> + Send + 'static,
    ) -> Result<Prepared<T>, E>
    where
        T: Send + 'static,
        E: From<GenerateError> + Send + 'static,
    {
        let (model, text) = (self.model()?, self.text.clone());
        let prepare = move || work(&model, &text).map(|prepared| Prepared { prepared, model, place });
        self.compute(bytes, prepare).await.unwrap_or_else(|error| Err(error.into()))
    }

    /// Does `work` on `bytes` bytes: here if it is little, or else on the front end's own threads.
    ///
    /// # Errors
    /// [`GenerateError::Internal`] if it panics there.
    pub async fn compute<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, GenerateError> {
        compute(&self.pool, bytes, work).await
    }

    /// Compiles what a request is held to, if it is, on the front end's own threads.
    ///
    /// # Errors
    /// It cannot be followed.
    pub async fn compile(&self, valid: &mut ValidRequest) -> Result<(), GenerateError> {
        let Some((field, form)) = valid.form.take() else { return Ok(()) };
        let text = self.text.clone();
        let grammar = self.compute(INLINE_BYTES + 1, move || text.grammars.compile(&form)).await?;
        let grammar = grammar.map_err(|problem| RequestError::field(field, FieldError::Value, problem))?;
        valid.grammar = Some(grammar);
        Ok(())
    }

    /// Queues the sequences of a valid request, which keeps its place until the generation ends or is dropped.
    ///
    /// # Errors
    /// The key may not ask for such a priority; what the output is held to cannot be followed; its time is over; as the
    /// engine's bounds and the engine's state have it. Then no sequence stays queued.
    pub async fn admit(
        &self,
        mut valid: ValidRequest,
        model: Arc<ModelInfo>,
        place: Place,
    ) -> Result<Generation, GenerateError> {
        let standing = standing(valid.priority, place.record.key())?;
        self.compile(&mut valid).await?;
        let (record, given_up) = (place.record.clone(), place.listed.given_up.clone());
        if given_up.token.is_cancelled() {
            return Err(given_up.error());
        }
        let deadline = valid.timeout.map(|timeout| Deadline::new(record.arrived(), timeout));
        if let Some(late) = deadline.and_then(|deadline| deadline.is_over()) {
            return Err(late);
        }
        let (requests, prompts): (Vec<_>, Vec<_>) = valid.sequences().unzip();
        let stop_tokens: Vec<Vec<u32>> = requests.iter().map(|request| request.stop_tokens.clone()).collect();
        let streams = self.engine.submit(requests, standing).await?;
        let markers = valid.format.markers();
        let shown: Vec<u32> = match valid.show_special {
            true => self.text.tokenizer.special().collect(),
            false => markers.iter().filter_map(|marker| self.text.tokenizer.id(marker)).collect(),
        };
        let parts = streams.into_iter().zip(prompts).zip(stop_tokens).zip(0..);
        let choices = parts.map(|(((stream, prompt), stop_tokens), index)| {
            let tokenizer = &self.text.tokenizer;
            let output = OutputText::new(tokenizer.clone(), prompt.start, valid.stop.clone()).showing(shown.clone());
            let pool = self.pool.clone();
            let echo = valid.echo.then(|| Echo { tokens: prompt.tokens.clone(), text: prompt.text.clone(), pool });
            let told = (echo, valid.prompt_alone);
            let text = (output, tokenizer.clone());
            let index = (index, index % valid.choices == 0);
            Choice::new(index, stream, text, stop_tokens, told, record.clone(), (given_up.clone(), deadline))
        });
        let choices: Vec<Choice> = choices.collect();
        record.accepted(valid.prompt_tokens(), choices.len() as u32);
        Ok(Generation { request: valid, model, choices, place })
    }
}

/// As [`Frontend::compute`] does it.
async fn compute<T: Send + 'static>(
    pool: &Pool,
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, GenerateError> {
    match bytes {
        0..=INLINE_BYTES => Ok(work()),
        _ => pool.run(bytes, work).await.map_err(|panicked| GenerateError::Internal(panicked.to_string())),
    }
}

/// Whose a request is and how urgent: no key goes before others unless its limits say so.
fn standing(priority: i32, key: Option<&Arc<Key>>) -> Result<Standing, RequestError> {
    let Some(key) = key else { return Ok(Standing { priority, ..Standing::default() }) };
    let first = key.first_priority();
    if priority < first {
        let message = format!("{priority} is before {first}, the first that the API key {} may ask for", key.id);
        return Err(RequestError::field("priority", FieldError::Value, message));
    }
    Ok(Standing { priority, owner: key.owner.clone(), weight: key.weight() })
}

/// A state as part of a sentence: "the server is ...".
pub fn in_words(state: &EngineState) -> String {
    match state {
        EngineState::Loading(phase) if phase.is_empty() => "loading the model".into(),
        EngineState::Loading(phase) => format!("loading the model ({phase})"),
        EngineState::Ready => "ready".into(),
        EngineState::Recovering(what) => format!("recovering ({what})"),
        EngineState::Draining => "shutting down".into(),
        EngineState::Failed(why) => format!("failed ({why})"),
    }
}

/// Seconds since 1970.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::mpsc as blocking, time::Duration};

    use tokio::{
        sync::{mpsc, oneshot, watch},
        time::{sleep, timeout},
    };

    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// With one place.
    fn frontend() -> Frontend {
        let model = ModelInfo { vocab_size: 768, max_context: 512, ..ModelInfo::default() };
        let (commands, _) = mpsc::unbounded_channel();
        let (_, state) = watch::channel(EngineState::Ready);
        let (_, model) = watch::channel(Some(Arc::new(model)));
        let engine = EngineHandle::new(commands, state, model, Arc::default());
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
        let text = Arc::new(Text::load(&fixture).unwrap());
        Frontend::new(engine, text, "tiny".into(), (DraftReport::None, 0), 1, Uploads::new(1, LIMIT), LargeWork::Shares)
    }

    fn enter(frontend: &Frontend) -> Result<Place, GenerateError> {
        frontend.enter(&Arc::new(Record::new("id".into(), None, None)), None, "/")
    }

    async fn free_again(frontend: &Frontend) {
        let free = async {
            while enter(frontend).is_err() {
                sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(LIMIT, free).await.expect("the place is free again");
    }

    #[tokio::test]
    async fn a_place_is_taken_for_as_long_as_work_for_it_runs() {
        let frontend = Arc::new(frontend());
        let place = enter(&frontend).unwrap();
        let (release, released) = blocking::channel::<()>();
        let (begun_sender, begun) = oneshot::channel();
        let preparing = tokio::spawn({
            let frontend = frontend.clone();
            let work = move |_: &ModelInfo, _: &Text| -> Result<(), GenerateError> {
                let _ = begun_sender.send(());
                let _ = released.recv();
                Ok(())
            };
            async move { frontend.prepare(place, INLINE_BYTES + 1, work).await.map(|_| ()) }
        });
        begun.await.unwrap();
        // The client goes away.
        preparing.abort();
        assert!(preparing.await.unwrap_err().is_cancelled());
        assert!(matches!(enter(&frontend), Err(GenerateError::Busy { limit: 1 })));
        drop(release);
        free_again(&frontend).await;
    }

    #[tokio::test]
    async fn work_that_fails_or_panics_gives_its_place_back() {
        let frontend = frontend();
        let refused = frontend.prepare(enter(&frontend).unwrap(), INLINE_BYTES + 1, |_, _| -> Result<(), _> {
            Err(GenerateError::ShuttingDown)
        });
        assert!(matches!(refused.await, Err(GenerateError::ShuttingDown)));
        free_again(&frontend).await;
        let panics =
            frontend.prepare(enter(&frontend).unwrap(), INLINE_BYTES + 1, |_, _| -> Result<(), GenerateError> {
                panic!("as the test wants")
            });
        assert!(matches!(panics.await, Err(GenerateError::Internal(_))));
        free_again(&frontend).await;
    }

    #[tokio::test]
    async fn little_work_is_done_where_it_is_asked_for() {
        let frontend = frontend();
        let here = std::thread::current().id();
        for (bytes, elsewhere) in [(INLINE_BYTES, false), (INLINE_BYTES + 1, true)] {
            free_again(&frontend).await;
            let work = move |_: &ModelInfo, _: &Text| Ok::<_, GenerateError>(std::thread::current().id());
            let prepared = frontend.prepare(enter(&frontend).unwrap(), bytes, work).await.unwrap();
            assert_eq!(prepared.prepared != here, elsewhere);
        }
    }
}
