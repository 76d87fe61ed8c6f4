//! The threads that follow grammars. They begin with the first job and end with their owner.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::{Answer, Job, Masks, Vocabulary};

/// Answers come in any order.
pub(super) struct Threads {
    vocabulary: Option<Arc<Vocabulary>>,
    vocab_size: usize,
    count: usize,
    running: Option<Running>,
}

struct Running {
    jobs: Sender<Job>,
    answers: Receiver<Answer>,
}

impl Threads {
    pub(super) fn new(vocabulary: Option<Arc<Vocabulary>>, vocab_size: usize, count: usize) -> Self {
        Self { vocabulary, vocab_size, count, running: None }
    }

    pub(super) fn put(&mut self, job: Job) {
        let running =
            self.running.get_or_insert_with(|| Running::start(self.vocabulary.take(), self.vocab_size, self.count));
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
    fn start(vocabulary: Option<Arc<Vocabulary>>, vocab_size: usize, count: usize) -> Self {
        let (jobs, to_do) = channel::<Job>();
        let (done, answers) = channel();
        let to_do = Arc::new(Mutex::new(to_do));
        // The first thread makes it, the others wait.
        let factory = Arc::new(std::sync::OnceLock::new());
        for _ in 0..count {
            let (to_do, done, factory, vocabulary) = (to_do.clone(), done.clone(), factory.clone(), vocabulary.clone());
            let work = move || {
                let factory = factory.get_or_init(|| parser_factory(vocabulary.as_deref(), vocab_size));
                loop {
                    // A poisoned receiver is a whole one: nothing but `recv` happens under the lock.
                    let job = to_do.lock().unwrap_or_else(PoisonError::into_inner).recv();
                    let Ok(Job { slot, sequence, mut follower, ask }) = job else { return };
                    // A panic of the library is that sequence's end, not a mask that never comes.
                    let answer = || follower.answer(&ask, factory, vocab_size.div_ceil(32));
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

/// What makes parsers for the vocabulary: a tree of its words.
pub(super) fn parser_factory(vocabulary: Option<&Vocabulary>, vocab_size: usize) -> Result<ParserFactory, String> {
    let vocabulary = vocabulary.ok_or("the server has sent no vocabulary")?;
    if vocabulary.end as usize >= vocab_size {
        return Err(format!("token {} ends answers, of {vocab_size} that the model has", vocabulary.end));
    }
    let mut words = vocabulary.words.clone();
    words.resize(vocab_size, Vec::new());
    let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, vocabulary.end), &words);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).map_err(|error| error.to_string())?;
    // Errors are for the log; grammar and text of a client are not.
    factory.quiet().limits_mut().verbose_errors = false;
    Ok(factory)
}
