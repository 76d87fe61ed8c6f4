//! Threads for work that would delay the async ones: reading large bodies, templates, tokenising.
//!
//! They are the front end's own: what the engine runs on the runtime's blocking threads, such as a start of its
//! workers, never waits behind a stranger's prompt. The queue needs no bound of its own: each piece of work holds the
//! place of a request (`Frontend::enter`), and work whose caller has gone leaves the queue at once, with all that it
//! holds.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use tokio::sync::oneshot;

/// Work on more bytes than these is large: one thread alone does it, so that the others are free for the small.
const LARGE_BYTES: usize = 256 << 10;
/// Fewest threads: one takes large work, too, the other never.
const MIN_THREADS: usize = 2;
const MAX_THREADS: usize = 8;
/// By so much the threads give way to others: beside prompts of 118 000 tokens, 2000 streams on two cores have their
/// tokens within 1.5 ms at the 99th percentile, without it 10.4 (docs/benchmarks.md). 10 was no better, and would leave
/// the threads little beside CPU workers, which never rest.
const NICE: i32 = 5;

/// The work panicked; the panic is in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a thread that worked for the request panicked")]
pub(super) struct Panicked;

type Work = Box<dyn FnOnce() + Send>;

/// The threads end when the pool is dropped and the queue is empty.
#[derive(Debug)]
pub(super) struct Pool {
    queue: Arc<Queue>,
}

impl Pool {
    /// A quarter of this machine's cores, within bounds: the others are the workers'.
    ///
    /// # Panics
    /// If the operating system gives no threads: the process is just starting then, and could not serve.
    pub(super) fn new() -> Self {
        let cores = thread::available_parallelism().map_or(1, |count| count.get());
        let queue = Arc::new(Queue::default());
        for index in 0..(cores / 4).clamp(MIN_THREADS, MAX_THREADS) {
            let queue = queue.clone();
            let name = format!("front-end-{index}");
            let run = move || {
                // Where cores are few, a stream's next token goes before a stranger's prompt. (On Linux the calling
                // thread's alone.) A system that forbids it serves all the same.
                let _ = rustix::process::nice(NICE);
                while let Some(work) = queue.next(index == 0) {
                    // A panic has dropped the sender of the result, which tells the caller.
                    let _ = catch_unwind(AssertUnwindSafe(work));
                }
            };
            thread::Builder::new().name(name).spawn(run).expect("a process that starts can have a few threads");
        }
        Self { queue }
    }

    /// Runs `work` on `bytes` bytes and waits for its result. If this future is dropped, work that has not begun is
    /// dropped, too; work that has begun goes on, and its result is dropped.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        bytes: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Panicked> {
        let (sender, result) = oneshot::channel();
        let work = Box::new(move || {
            // The caller has gone away, and its result is dropped here.
            let _ = sender.send(work());
        });
        let _queued = Queued { queue: self.queue.clone(), id: self.queue.push(bytes > LARGE_BYTES, work) };
        result.await.map_err(|_| Panicked)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

/// Takes work that has not begun out of the queue.
struct Queued {
    queue: Arc<Queue>,
    id: u64,
}

impl Drop for Queued {
    fn drop(&mut self) {
        let removed = {
            let mut waiting = self.queue.lock();
            waiting.small.remove(&self.id).or_else(|| waiting.large.remove(&self.id))
        };
        // Outside the lock: what the work holds is dropped with it.
        drop(removed);
    }
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

/// By number, which ascends with arrival.
#[derive(Default)]
struct Waiting {
    small: BTreeMap<u64, Work>,
    large: BTreeMap<u64, Work>,
    next_id: u64,
    closed: bool,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Waiting {{ small: {}, large: {}, closed: {} }}", self.small.len(), self.large.len(), self.closed)
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No code that may panic runs under the lock.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, large: bool, work: Work) -> u64 {
        let mut waiting = self.lock();
        let id = waiting.next_id;
        waiting.next_id += 1;
        if large { &mut waiting.large } else { &mut waiting.small }.insert(id, work);
        drop(waiting);
        // All: the one that is woken may not be the one that takes large work.
        self.changed.notify_all();
        id
    }

    /// The oldest work; of a thread that takes large work, that first, as nobody else does it. `None`: the pool has
    /// ended.
    fn next(&self, takes_large: bool) -> Option<Work> {
        let mut waiting = self.lock();
        loop {
            let large = if takes_large { waiting.large.pop_first() } else { None };
            if let Some((_, work)) = large.or_else(|| waiting.small.pop_first()) {
                return Some(work);
            }
            if waiting.closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use futures::FutureExt;

    use super::*;

    const LARGE: usize = LARGE_BYTES + 1;
    const LIMIT: Duration = Duration::from_secs(20);

    /// Occupies the thread of large work until the sender is dropped.
    async fn occupied(pool: &Arc<Pool>) -> mpsc::Sender<()> {
        let (release, released) = mpsc::channel::<()>();
        let (begun_sender, begun) = oneshot::channel();
        let work = move || {
            let _ = begun_sender.send(());
            let _ = released.recv();
        };
        let pool = pool.clone();
        tokio::spawn(async move { pool.run(LARGE, work).await });
        begun.await.expect("the work begins");
        release
    }

    #[tokio::test]
    async fn small_work_does_not_wait_for_large() {
        let pool = Arc::new(Pool::new());
        let release = occupied(&pool).await;
        assert_eq!(tokio::time::timeout(LIMIT, pool.run(1, || 7)).await.expect("a thread is free"), Ok(7));
        drop(release);
        assert_eq!(pool.run(LARGE, || 8).await, Ok(8));
    }

    #[tokio::test]
    async fn work_whose_caller_has_gone_leaves_the_queue_with_what_it_holds() {
        let pool = Arc::new(Pool::new());
        let release = occupied(&pool).await;
        let held = Arc::new(());
        let work = {
            let held = held.clone();
            move || drop(held)
        };
        let mut waiting = Box::pin(pool.run(LARGE, work));
        assert!((&mut waiting).now_or_never().is_none());
        assert_eq!((Arc::strong_count(&held), pool.queue.lock().large.len()), (2, 1));
        drop(waiting);
        assert_eq!((Arc::strong_count(&held), pool.queue.lock().large.len()), (1, 0));
        drop(release);
    }

    #[tokio::test]
    async fn a_panic_is_told_and_the_thread_goes_on() {
        let pool = Pool::new();
        for _ in 0..2 {
            assert_eq!(pool.run(LARGE, || panic!("as the test wants")).await, Err::<(), _>(Panicked));
        }
        assert_eq!(pool.run(LARGE, || 1).await, Ok(1));
    }

    #[tokio::test]
    async fn threads_end_with_the_pool() {
        let pool = Pool::new();
        let queue = Arc::downgrade(&pool.queue);
        drop(pool);
        let ended = async {
            while queue.strong_count() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(LIMIT, ended).await.expect("no thread holds the queue");
    }
}
