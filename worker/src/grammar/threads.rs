//! The threads that follow grammars. They begin with the first job and end with their owner.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::compiled::Library;
use super::{Answer, Job, Masks};

/// Answers come in any order.
pub(super) struct Threads {
    library: Arc<Library>,
    count: usize,
    running: Option<Running>,
}

struct Running {
    jobs: Sender<Job>,
    answers: Receiver<Answer>,
}

impl Threads {
    pub(super) fn new(library: Library, count: usize) -> Self {
        Self { library: Arc::new(library), count, running: None }
    }

    pub(super) fn put(&mut self, job: Job) {
        let running = self.running.get_or_insert_with(|| Running::start(&self.library, self.count));
        running.jobs.send(job).expect("threads live as long as their owner");
    }

    /// The next answer; `None` once the deadline has passed.
    pub(super) fn next(&mut self, deadline: Instant) -> Option<Answer> {
        let running = self.running.as_ref()?;
        match running.answers.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(answer) => Some(answer),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("threads live as long as their owner"),
        }
    }
}

impl Running {
    fn start(library: &Arc<Library>, count: usize) -> Self {
        let (jobs, to_do) = channel::<Job>();
        let (done, answers) = channel();
        let to_do = Arc::new(Mutex::new(to_do));
        for _ in 0..count {
            let (to_do, done, library) = (to_do.clone(), done.clone(), library.clone());
            let work = move || {
                loop {
                    // A poisoned receiver is a whole one: nothing but `recv` happens under the lock.
                    let job = to_do.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Job { slot, sequence, mut follower, ask }) = job else { return };
                    // A panic of the library is that sequence's end, not a mask that never comes.
                    let answer = || follower.answer(&ask, &library);
                    let masks = catch_unwind(AssertUnwindSafe(answer))
                        .unwrap_or_else(|_| Masks { position: ask.position, words: Err("its parser panicked".into()) });
                    if done.send(Answer { slot, sequence, follower, masks }).is_err() {
                        return;
                    }
                }
            };
            std::thread::Builder::new().name("grammar".into()).spawn(work).expect("a thread for grammars");
        }
        Self { jobs, answers }
    }
}
