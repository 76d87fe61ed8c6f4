//! What the replicas of one model have in common: what the model is, and which requests are not to be tried again.

use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::quarantine::Quarantine;
use crate::engine::{ModelInfo, SequenceRequest, SubmitError};

/// Shared by all replicas of a front end.
#[derive(Debug)]
pub struct Common {
    /// Of the first that was up.
    model: OnceLock<ModelInfo>,
    quarantine: Mutex<Quarantine>,
    /// What the quarantine counts time from.
    born: Instant,
}

impl Common {
    /// No group was up yet. Requests that lost one will be refused for `quarantine`.
    pub fn new(quarantine: Duration) -> Self {
        Self { model: OnceLock::new(), quarantine: Mutex::new(Quarantine::new(quarantine)), born: Instant::now() }
    }

    /// Refuses a group that would continue streams with other bits than they began with. The bound on the context is no
    /// part of that: it follows from the pages that the group got, and the scheduler fails what does not fit.
    pub(super) fn agree(&self, now: &ModelInfo) -> Result<(), String> {
        let known = self.model_or(now);
        if known.model_digest != now.model_digest {
            return Err("the files of the model have changed since it was loaded, and running requests cannot go on \
                        with another one: start the server again to serve it"
                .into());
        }
        let bits = |model: &ModelInfo| {
            let ModelInfo { architecture, vocab_size, bit_domain, .. } = model;
            format!("{architecture}, vocabulary {vocab_size}, bits {bit_domain}")
        };
        match bits(known) == bits(now) {
            true => Ok(()),
            false => Err(format!(
                "the workers came up as another model than those before: {} instead of {}",
                bits(now),
                bits(known)
            )),
        }
    }

    /// A request like this one lost a group, alone.
    pub(super) fn quarantine(&self, fingerprint: u64) {
        self.locked(|quarantine, now| quarantine.add(fingerprint, now));
    }

    /// The model of the first that was up.
    pub fn model(&self) -> Option<&ModelInfo> {
        self.model.get()
    }

    /// What all replicas have to be; `now`, if it is the first.
    pub fn model_or(&self, now: &ModelInfo) -> &ModelInfo {
        self.model.get_or_init(|| now.clone())
    }

    /// Refuses a request that lost a group not long ago.
    ///
    /// # Errors
    /// For how long it is refused.
    pub fn admit(&self, requests: &[SequenceRequest]) -> Result<(), SubmitError> {
        self.locked(|quarantine, now| {
            // Long prompts take their time to hash.
            let suspected = if quarantine.is_empty() { &[][..] } else { requests };
            match suspected.iter().find_map(|request| quarantine.left(request.fingerprint(), now)) {
                Some(left) => Err(SubmitError::Quarantined { seconds_left: left.as_secs() + 1 }),
                None => Ok(()),
            }
        })
    }

    fn locked<T>(&self, of: impl FnOnce(&mut Quarantine, Duration) -> T) -> T {
        of(&mut self.quarantine.lock().unwrap_or_else(PoisonError::into_inner), self.born.elapsed())
    }
}
