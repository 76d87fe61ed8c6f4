//! The requests being served, by the names that their clients know: so that they can be ended.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use tokio_util::sync::CancellationToken;

use super::{error::GenerateError, record::RequestId};
use crate::engine::Unwanted;

/// The id of a key, where keys are asked for, and a request's.
type Name = (Option<Arc<str>>, RequestId);

/// Clients choose the ids, so several requests may have one. There are as many as have a place.
#[derive(Debug, Default)]
pub(super) struct Served(Mutex<HashMap<Name, Vec<GivenUp>>>);

impl Served {
    fn by_name(&self) -> MutexGuard<'_, HashMap<Name, Vec<GivenUp>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the requests of a name, and returns how many there are.
    pub(super) fn abort(&self, name: &Name) -> usize {
        let requests = self.by_name().get(name).cloned().unwrap_or_default();
        requests.iter().for_each(GivenUp::abort);
        requests.len()
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
    pub(super) fn new(served: &Arc<Served>, name: Name, closing: &CancellationToken) -> Self {
        let given_up = GivenUp { token: closing.child_token(), aborted: Arc::default() };
        served.by_name().entry(name.clone()).or_default().push(given_up.clone());
        Self { served: served.clone(), name, given_up }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut served = self.served.by_name();
        let Some(requests) = served.get_mut(&self.name) else { return };
        requests.retain(|request| !Arc::ptr_eq(&request.aborted, &self.given_up.aborted));
        if requests.is_empty() {
            served.remove(&self.name);
        }
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

    #[test]
    fn requests_are_ended_by_the_names_that_their_owner_gave_them() {
        let (served, closing) = (Arc::new(Served::default()), CancellationToken::new());
        let name = |key: Option<&str>, id: &str| (key.map(Arc::from), RequestId::from(id));
        let [first, second, others] = [name(Some("alice"), "1"), name(Some("alice"), "1"), name(Some("bob"), "1")]
            .map(|name| Listed::new(&served, name, &closing));
        assert_eq!(served.abort(&name(None, "1")) + served.abort(&name(Some("alice"), "2")), 0);
        drop(first);
        assert_eq!(served.abort(&name(Some("alice"), "1")), 1);
        assert!(second.given_up.token.is_cancelled() && !others.given_up.token.is_cancelled());
        assert!(matches!(second.given_up.error(), GenerateError::Aborted));
        closing.cancel();
        assert!(others.given_up.token.is_cancelled());
        assert!(matches!(others.given_up.error(), GenerateError::ShuttingDown));
        drop((second, others));
        assert!(served.by_name().is_empty());
    }
}
