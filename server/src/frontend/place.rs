//! A request's place among those served at one time.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::{record::Record, served::Listed};
use crate::keys::Running;

/// Goes with the work wherever it is done, and is free again when the last of it has ended: also where the client has
/// gone before.
#[derive(Debug)]
pub struct Place {
    /// What the log says of the request.
    pub record: Arc<Record>,
    _permit: OwnedSemaphorePermit,
    /// Among those of its key.
    _running: Option<Running>,
    /// Among those that can be ended.
    pub(super) listed: Listed,
}

impl Place {
    pub(super) fn new(
        record: Arc<Record>,
        permit: OwnedSemaphorePermit,
        running: Option<Running>,
        listed: Listed,
    ) -> Self {
        Self { record, _permit: permit, _running: running, listed }
    }
}
