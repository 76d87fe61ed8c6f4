//! Who may be connected: so many connections, of which idle ones give way to new ones, and a few beyond for probes.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tokio_util::sync::CancellationToken;

/// Connections beyond the limit, where only probes are answered.
const RESERVED: usize = 64;

/// A connection, as others see it.
#[derive(Debug)]
pub(super) struct Connection {
    /// It was taken beyond the limit: only probes are answered.
    pub(super) reserved: bool,
    /// Set: give way.
    pub(super) close: CancellationToken,
    opened: Instant,
    requests: watch::Sender<Requests>,
    /// Whether a request has ever come.
    used: AtomicBool,
    /// When it opened, or its last request came or ended: in ms after `opened`.
    last_use_ms: AtomicU64,
}

/// Requests being served.
#[derive(Debug, Clone, Copy, Default)]
struct Requests {
    all: usize,
    /// Of these, probes: they do not keep their connection from giving way.
    probes: usize,
}

/// A request that is being served; dropped at its end.
#[derive(Debug)]
pub(super) struct InProgress {
    connection: Arc<Connection>,
    probe: bool,
}

impl Connection {
    fn new(reserved: bool) -> Self {
        Self {
            reserved,
            close: CancellationToken::new(),
            opened: Instant::now(),
            requests: watch::Sender::default(),
            used: AtomicBool::new(false),
            last_use_ms: AtomicU64::new(0),
        }
    }

    /// A request has come.
    pub(super) fn begin(self: &Arc<Self>, probe: bool) -> InProgress {
        self.used.store(true, Relaxed);
        self.touch();
        self.requests.send_modify(|requests| {
            requests.all += 1;
            requests.probes += usize::from(probe);
        });
        InProgress { connection: self.clone(), probe }
    }

    /// Whether no request is being served.
    pub(super) fn is_idle(&self) -> bool {
        self.requests.borrow().all == 0
    }

    /// Returns when it must close: it has to give way, and no request but probes is being served.
    pub(super) async fn gave_way(&self) {
        self.close.cancelled().await;
        // A request that came in the same moment is served.
        self.no_requests(Requests::only_probes).await;
    }

    /// Returns when it has been idle for `idle`, or, if no request has ever come, for `first_request`.
    pub(super) async fn idle_for(&self, first_request: Duration, idle: Duration) {
        loop {
            self.no_requests(|requests| requests.all == 0).await;
            let limit = if self.used.load(Relaxed) { idle } else { first_request };
            let left = limit.saturating_sub(self.last_use().elapsed());
            if left.is_zero() {
                return;
            }
            sleep(left).await;
        }
    }

    async fn no_requests(&self, wanted: impl Fn(&Requests) -> bool) {
        // The sender is `self`, so there is no error.
        let _ = self.requests.subscribe().wait_for(wanted).await;
    }

    fn last_use(&self) -> Instant {
        self.opened + Duration::from_millis(self.last_use_ms.load(Relaxed))
    }

    fn touch(&self) {
        self.last_use_ms.store(self.opened.elapsed().as_millis() as u64, Relaxed);
    }
}

impl Requests {
    fn only_probes(&self) -> bool {
        self.all == self.probes
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        self.connection.touch();
        self.connection.requests.send_modify(|requests| {
            requests.all -= 1;
            requests.probes -= usize::from(self.probe);
        });
    }
}

/// All places.
#[derive(Debug)]
pub(super) struct Places {
    max_open: usize,
    open: Mutex<Open>,
}

/// By number, which ascends with arrival.
#[derive(Debug, Default)]
struct Open {
    regular: BTreeMap<u64, Arc<Connection>>,
    reserved: BTreeMap<u64, Arc<Connection>>,
    next_id: u64,
}

/// A place that is taken; dropped when its connection is closed.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    id: u64,
    pub(super) connection: Arc<Connection>,
}

impl Places {
    /// `max_open` connections and a few for probes.
    pub(super) fn new(max_open: usize) -> Self {
        Self { max_open, open: Mutex::default() }
    }

    /// A place for a new connection. Where all are taken, an idle connection gives way: one that never sent a request
    /// before others, then the one that is idle for longest. Where none is idle, the new one may only probe, and the
    /// oldest that may only probe gives way.
    pub(super) fn take(self: &Arc<Self>) -> Place {
        let mut open = self.lock();
        let reserved = open.regular.len() >= self.max_open && !open.give_way();
        if reserved
            && open.reserved.len() >= RESERVED
            && let Some((_, oldest)) = open.reserved.pop_first()
        {
            oldest.close.cancel();
        }
        let (id, connection) = (open.next_id, Arc::new(Connection::new(reserved)));
        open.next_id += 1;
        let places = if reserved { &mut open.reserved } else { &mut open.regular };
        places.insert(id, connection.clone());
        Place { places: self.clone(), id, connection }
    }

    /// Closes an idle connection, for want of something else that each connection takes. `false`: there is none.
    pub(super) fn give_way(&self) -> bool {
        self.lock().give_way()
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        // No code that may panic runs under the lock.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn give_way(&mut self) -> bool {
        let idle = self.regular.iter().filter(|(_, connection)| connection.requests.borrow().only_probes());
        let Some((&id, _)) = idle.min_by_key(|(_, it)| (it.used.load(Relaxed), it.last_use())) else { return false };
        if let Some(connection) = self.regular.remove(&id) {
            connection.close.cancel();
        }
        true
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.places.lock();
        // It is in neither if it gave way.
        open.regular.remove(&self.id);
        open.reserved.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gave_way(place: &Place) -> bool {
        place.connection.close.is_cancelled()
    }

    #[test]
    fn the_connection_that_is_idle_for_longest_gives_way_and_unused_ones_before_it() {
        let places = Arc::new(Places::new(4));
        let [busy, used, first, second] = [(); 4].map(|()| places.take());
        let _request = busy.connection.begin(false);
        drop(used.connection.begin(false));
        for (gives_way, stays) in [(&first, &second), (&second, &used), (&used, &busy)] {
            std::thread::sleep(Duration::from_millis(2));
            let new = places.take();
            assert!(gave_way(gives_way) && !gave_way(stays) && !new.connection.reserved);
            // The new one is not idle, as those that remain are.
            std::mem::forget(new.connection.begin(false));
            std::mem::forget(new);
        }
        assert!(!gave_way(&busy));
    }

    #[test]
    fn where_nobody_is_idle_there_are_places_for_probes_of_which_the_newest_stay() {
        let places = Arc::new(Places::new(1));
        let place = places.take();
        let request = place.connection.begin(false);
        let probes: Vec<Place> = (0..=RESERVED).map(|_| places.take()).collect();
        assert!(probes.iter().all(|probe| probe.connection.reserved));
        assert_eq!(probes.iter().map(gave_way).filter(|gave_way| *gave_way).count(), 1);
        assert!(gave_way(&probes[0]));
        // Places beyond the limit are none for others, and free again at their end.
        drop((probes, request, place));
        assert!(!places.take().connection.reserved);
        let open = places.lock();
        assert_eq!((open.regular.len(), open.reserved.len()), (0, 0));
    }

    #[test]
    fn a_probe_keeps_nobody_from_giving_way() {
        let places = Arc::new(Places::new(1));
        let place = places.take();
        let _probe = place.connection.begin(true);
        assert!(!places.take().connection.reserved);
        assert!(gave_way(&place));
    }

    #[tokio::test]
    async fn idle_time_counts_from_the_last_request_and_has_a_shorter_limit_before_the_first() {
        let connection = Arc::new(Connection::new(false));
        let (short, long) = (Duration::from_millis(20), Duration::from_millis(100));
        let start = Instant::now();
        connection.idle_for(short, long).await;
        assert!(start.elapsed() >= short);
        let request = connection.begin(false);
        let ended = async {
            sleep(2 * long).await;
            drop(request);
            Instant::now()
        };
        let ((), ended) = tokio::join!(connection.idle_for(short, long), ended);
        // To the millisecond.
        assert!(ended.elapsed() + Duration::from_millis(1) >= long);
    }
}
