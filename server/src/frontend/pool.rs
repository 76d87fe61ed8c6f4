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

use crate::give_way::{LARGE_BYTES, give_way_a_little, let_be_helped, small_threads};

/// Two, so that one stranger's body of the greatest size is not waited for by all.
const LARGE_THREADS: usize = 2;

/// How the threads for large work share the cores with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LargeWork {
    /// As small work does, at nice 5. For cores that never rest, such as those of CPU workers: large work would wait
    /// without end for one that is free.
    Shares,
    /// It runs where a core is free, whoever wakes has the core at once (Linux's SCHED_IDLE), and long work is done in
    /// pieces (give_way.rs). docs/benchmarks.md has what it is worth.
    GivesWay,
}

impl LargeWork {
    /// For the calling thread, until it ends. Where the system forbids it, large work shares.
    fn enter(self) {
        use thread_priority::{
            NormalThreadSchedulePolicy::Idle, ThreadPriority, ThreadSchedulePolicy, set_thread_priority_and_policy,
            thread_native_id, thread_schedule_policy,
        };
        if self == Self::Shares {
            return give_way_a_little();
        }
        let idle = ThreadSchedulePolicy::Normal(Idle);
        // It may fail behind the change of policy, where the process was started with another niceness.
        if let Err(error) = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, idle)
            && thread_schedule_policy().ok() != Some(idle)
        {
            tracing::warn!(
                "the system lets no thread wait for a free core (SCHED_IDLE: {error}): long prompts may delay the \
                 tokens of streams by some 30 ms"
            );
            give_way_a_little();
        }
    }
}

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
    /// # Panics
    /// If the operating system gives no threads: the process is just starting then, and could not serve.
    pub(super) fn new(large_work: LargeWork) -> Self {
        let queue = Arc::new(Queue::default());
        let start = |name: String, size: Size| {
            let queue = queue.clone();
            let run = move || {
                match size {
                    Size::Small => {
                        give_way_a_little();
                        let_be_helped();
                    }
                    Size::Large => large_work.enter(),
                }
                while let Some(work) = queue.next(size) {
                    // A panic has dropped the sender of the result, which tells the caller.
                    let _ = catch_unwind(AssertUnwindSafe(work));
                }
            };
            thread::Builder::new().name(name).spawn(run).expect("a process that starts can have a few threads");
        };
        for index in 0..small_threads() {
            start(format!("front-end-{index}"), Size::Small);
        }
        for index in 0..LARGE_THREADS {
            start(format!("large-text-{index}"), Size::Large);
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
        let _queued = Queued { queue: self.queue.clone(), id: self.queue.push(Size::of(bytes), work) };
        result.await.map_err(|_| Panicked)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.queue.lock().closed = true;
        self.queue.small_came.notify_all();
        self.queue.large_came.notify_all();
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Size {
    Small,
    Large,
}

impl Size {
    fn of(bytes: usize) -> Self {
        if bytes > LARGE_BYTES { Self::Large } else { Self::Small }
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

/// Work wakes one thread, and one of its own size: each that wakes takes the core of an async thread for a moment, and
/// one of SCHED_IDLE may have that core next (give_way.rs).
#[derive(Debug, Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    small_came: Condvar,
    large_came: Condvar,
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

    fn push(&self, size: Size, work: Work) -> u64 {
        let mut waiting = self.lock();
        let id = waiting.next_id;
        waiting.next_id += 1;
        waiting.of(size).insert(id, work);
        drop(waiting);
        self.came(size).notify_one();
        id
    }

    fn came(&self, size: Size) -> &Condvar {
        match size {
            Size::Small => &self.small_came,
            Size::Large => &self.large_came,
        }
    }

    /// The oldest work of this size. `None`: the pool has ended.
    fn next(&self, size: Size) -> Option<Work> {
        let mut waiting = self.lock();
        loop {
            if let Some((_, work)) = waiting.of(size).pop_first() {
                return Some(work);
            }
            if waiting.closed {
                return None;
            }
            waiting = self.came(size).wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Waiting {
    fn of(&mut self, size: Size) -> &mut BTreeMap<u64, Work> {
        match size {
            Size::Small => &mut self.small,
            Size::Large => &mut self.large,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use futures::FutureExt;
    use thread_priority::{NormalThreadSchedulePolicy, ThreadSchedulePolicy};

    use super::*;
    use crate::give_way::{NICE, has_helpers};

    const LARGE: usize = LARGE_BYTES + 1;
    const LIMIT: Duration = Duration::from_secs(20);

    /// Occupies the threads of large work until the senders are dropped.
    async fn occupied(pool: &Arc<Pool>) -> [mpsc::Sender<()>; LARGE_THREADS] {
        [one_occupied(pool).await, one_occupied(pool).await]
    }

    async fn one_occupied(pool: &Arc<Pool>) -> mpsc::Sender<()> {
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
        let pool = Arc::new(Pool::new(LargeWork::GivesWay));
        let release = occupied(&pool).await;
        assert_eq!(tokio::time::timeout(LIMIT, pool.run(1, || 7)).await.expect("a thread is free"), Ok(7));
        drop(release);
        assert_eq!(pool.run(LARGE, || 8).await, Ok(8));
    }

    /// A thread that wakes takes a core from others, for nothing where the work is not its own.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn work_wakes_threads_of_its_size_alone() {
        // Of which all run that are awake.
        let pool = Arc::new(Pool::new(LargeWork::Shares));
        let waits = |thread: i32| {
            let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status")).expect("it lives");
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).expect("Linux has it");
            line.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number")
        };
        let large = pool.run(LARGE, || rustix::thread::gettid().as_raw_nonzero().get()).await.expect("it runs");
        let before = waits(large);
        for _ in 0..200 {
            pool.run(1, || ()).await.expect("it runs");
        }
        // It began to wait for its next work meanwhile.
        assert!(waits(large) - before < 20, "{before} {}", waits(large));
    }

    #[tokio::test]
    async fn work_whose_caller_has_gone_leaves_the_queue_with_what_it_holds() {
        let pool = Arc::new(Pool::new(LargeWork::GivesWay));
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
    async fn one_large_text_keeps_no_other_waiting() {
        let pool = Arc::new(Pool::new(LargeWork::Shares));
        let release = one_occupied(&pool).await;
        assert_eq!(tokio::time::timeout(LIMIT, pool.run(LARGE, || 9)).await.expect("a thread is free"), Ok(9));
        drop(release);
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn large_work_gives_way_where_cores_rest_and_small_work_never_waits_for_one_that_is_free() {
        let nice = || rustix::process::getpriority_process(None).ok();
        let own = nice().expect("a process has a priority");
        let policy = || thread_priority::thread_schedule_policy().ok();
        let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
        let usual = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Other);
        for (large_work, expected) in [(LargeWork::GivesWay, idle), (LargeWork::Shares, usual)] {
            let pool = Pool::new(large_work);
            assert_eq!(pool.run(LARGE, policy).await, Ok(Some(expected)));
            let small = pool.run(1, move || (policy(), nice())).await;
            assert_eq!(small, Ok((Some(usual), Some((own + NICE).min(19)))));
        }
    }

    /// Helpers do not give way.
    #[tokio::test]
    async fn small_work_alone_has_helpers() {
        for large_work in [LargeWork::GivesWay, LargeWork::Shares] {
            let pool = Pool::new(large_work);
            assert_eq!((pool.run(1, has_helpers).await, pool.run(LARGE, has_helpers).await), (Ok(true), Ok(false)));
        }
    }

    #[tokio::test]
    async fn a_panic_is_told_and_the_thread_goes_on() {
        let pool = Pool::new(LargeWork::GivesWay);
        for _ in 0..2 {
            assert_eq!(pool.run(LARGE, || panic!("as the test wants")).await, Err::<(), _>(Panicked));
        }
        assert_eq!(pool.run(LARGE, || 1).await, Ok(1));
    }

    #[tokio::test]
    async fn threads_end_with_the_pool() {
        let pool = Pool::new(LargeWork::GivesWay);
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
