//! The requests being served, by the names that their clients know: so that they can be ended.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use tokio_util::sync::CancellationToken;

use super::{
    error::GenerateError,
    record::{Progress, Record, RequestId},
};
use crate::engine::Unwanted;

/// Requests that are remembered when they have ended, of all keys together.
const ENDED: usize = 64;

/// The id of a key, where keys are asked for, and a request's.
type Name = (Option<Arc<str>>, RequestId);

/// Of a record.
fn name(record: &Record) -> Name {
    (record.key().map(|key| key.id.clone()), record.request_id().clone())
}

/// Clients choose the ids, so several requests may have one. There are as many as have a place.
#[derive(Debug, Default)]
pub(super) struct Served(Mutex<Requests>);

#[derive(Debug, Default)]
struct Requests {
    running: HashMap<Name, Vec<Running>>,
    /// The last that ended, the newest in front, with the ids of their keys.
    ended: VecDeque<(Option<Arc<str>>, Progress)>,
}

#[derive(Debug)]
struct Running {
    given_up: GivenUp,
    record: Arc<Record>,
}

/// The requests of a key.
#[derive(Debug)]
pub struct OfKey {
    /// How many run, those of all keys.
    pub of_all: usize,
    /// How many of its own do.
    pub running: usize,
    /// The newest of these, the newest first.
    pub newest: Vec<Progress>,
    /// Those that ended last, the newest first.
    pub ended: Vec<Progress>,
}

impl Served {
    fn locked(&self) -> MutexGuard<'_, Requests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the requests of a name, and returns how many there are.
    pub(super) fn abort(&self, name: &Name) -> usize {
        let locked = self.locked();
        let running = locked.running.get(name).map_or(&[][..], Vec::as_slice);
        let requests: Vec<GivenUp> = running.iter().map(|request| request.given_up.clone()).collect();
        drop(locked);
        requests.iter().for_each(GivenUp::abort);
        requests.len()
    }

    /// The requests of a key, at most so many that run, and as many that ended.
    pub(super) fn of_key(&self, key: Option<&Arc<str>>, most: usize) -> OfKey {
        let locked = self.locked();
        let of_all = locked.running.values().map(Vec::len).sum();
        let own = locked.running.iter().filter(|((owner, _), _)| owner.as_ref() == key);
        let mut newest: Vec<Arc<Record>> =
            own.flat_map(|(_, requests)| requests).map(|request| request.record.clone()).collect();
        let ended = locked.ended.iter().filter(|(owner, _)| owner.as_ref() == key);
        let ended = ended.take(most).map(|(_, progress)| progress.clone()).collect();
        drop(locked);
        let running = newest.len();
        newest.sort_unstable_by_key(|record| std::cmp::Reverse(record.arrived()));
        newest.truncate(most);
        OfKey { of_all, running, newest: newest.iter().map(|record| record.progress()).collect(), ended }
    }
}

/// A request among those being served, until it is dropped.
#[derive(Debug)]
pub(super) struct Listed {
    served: Arc<Served>,
    name: Name,
    pub(super) given_up: GivenUp,
}

impl Listed {
    /// `closing`: set where the server gives all requests up.
    pub(super) fn new(served: &Arc<Served>, record: Arc<Record>, closing: &CancellationToken) -> Self {
        let (name, given_up) = (name(&record), GivenUp { token: closing.child_token(), aborted: Arc::default() });
        let running = Running { given_up: given_up.clone(), record };
        served.locked().running.entry(name.clone()).or_default().push(running);
        Self { served: served.clone(), name, given_up }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut locked = self.served.locked();
        let Some(requests) = locked.running.get_mut(&self.name) else { return };
        let of_this = |request: &Running| Arc::ptr_eq(&request.given_up.aborted, &self.given_up.aborted);
        let Some(at) = requests.iter().position(of_this) else { return };
        let ended = requests.swap_remove(at);
        if requests.is_empty() {
            locked.running.remove(&self.name);
        }
        locked.ended.truncate(ENDED - 1);
        locked.ended.push_front((self.name.0.clone(), ended.record.ended()));
        // A record that is dropped writes its line: not while others wait.
        drop(locked);
    }
}

/// Set: a request is given up. What works for it shares it, so that choices that are dropped after an error of one are
/// not taken for the client's going away.
#[derive(Debug, Clone)]
pub(super) struct GivenUp {
    pub(super) token: CancellationToken,
    /// Its client wants that.
    aborted: Arc<AtomicBool>,
}

impl GivenUp {
    fn abort(&self) {
        self.aborted.store(true, Relaxed);
        self.token.cancel();
    }

    /// Of one that is given up.
    pub(super) fn error(&self) -> GenerateError {
        match self.aborted.load(Relaxed) {
            true => GenerateError::Aborted,
            false => GenerateError::ShuttingDown,
        }
    }

    /// What the engine is told of its sequences.
    pub(super) fn unwanted(&self) -> Unwanted {
        match self.aborted.load(Relaxed) {
            true => Unwanted::Abandoned,
            false => Unwanted::GivenUp,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::Key;

    fn record(key: Option<&str>, id: &str) -> Arc<Record> {
        let record = Record::new(RequestId::from(id), None, None);
        record.enters("/v1/completions", key.map(|id| Arc::new(Key::unlimited(id))));
        Arc::new(record)
    }

    #[test]
    fn requests_are_ended_by_the_names_that_their_owner_gave_them() {
        let (served, closing) = (Arc::new(Served::default()), CancellationToken::new());
        let name = |key: Option<&str>, id: &str| (key.map(Arc::from), RequestId::from(id));
        let listed = |key, id| Listed::new(&served, record(key, id), &closing);
        let [first, second, others] =
            [("alice", "1"), ("alice", "1"), ("bob", "1")].map(|(key, id)| listed(Some(key), id));
        assert_eq!(served.abort(&name(None, "1")) + served.abort(&name(Some("alice"), "2")), 0);
        drop(first);
        assert_eq!(served.abort(&name(Some("alice"), "1")), 1);
        assert!(second.given_up.token.is_cancelled() && !others.given_up.token.is_cancelled());
        assert!(matches!(second.given_up.error(), GenerateError::Aborted));
        closing.cancel();
        assert!(others.given_up.token.is_cancelled());
        assert!(matches!(others.given_up.error(), GenerateError::ShuttingDown));
        drop((second, others));
        assert!(served.locked().running.is_empty());
    }

    #[test]
    fn a_crowd_is_told_of_in_bounds_and_to_its_own_key_alone() {
        const CROWD: usize = 3000;
        let (served, closing) = (Arc::new(Served::default()), CancellationToken::new());
        let (alice, bob) = (Arc::from("alice"), Arc::from("bob"));
        let ids = |of: &[Progress]| of.iter().map(|request| request.id.as_str().to_owned()).collect::<Vec<_>>();
        let mut crowd: Vec<Listed> = (0..CROWD)
            .map(|number| Listed::new(&served, record(Some("alice"), &number.to_string()), &closing))
            .collect();
        let _bobs = Listed::new(&served, record(Some("bob"), "mine"), &closing);
        let told = served.of_key(Some(&alice), 3);
        assert_eq!((told.running, ids(&told.newest)), (CROWD, ["2999", "2998", "2997"].map(String::from).to_vec()));
        assert!(told.newest.iter().all(|request| request.reason.is_none()));
        let told = served.of_key(Some(&bob), 3);
        assert_eq!((told.running, ids(&told.newest), told.ended.len()), (1, vec!["mine".to_owned()], 0));
        assert_eq!((told.of_all, served.of_key(None, 3).running), (CROWD + 1, 0));
        // Those that ended are the last, however many there were.
        crowd.drain(..).for_each(drop);
        let told = served.of_key(Some(&alice), 3);
        assert_eq!((told.running, ids(&told.ended)), (0, ["2999", "2998", "2997"].map(String::from).to_vec()));
        assert!(told.ended.iter().all(|request| request.reason == Some("client_gone")));
        assert_eq!(served.of_key(Some(&alice), CROWD).ended.len(), ENDED);
        assert!(served.of_key(Some(&bob), CROWD).ended.is_empty());
    }
}
