//! A request's place among those served at one time.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::record::Record;

/// Goes with the work wherever it is done, and is free again when the last of it has ended: also where the client has
/// gone before.
#[derive(Debug)]
pub struct Place {
    /// What the log says of the request.
    pub record: Arc<Record>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    pub(super) fn new(record: Arc<Record>, permit: OwnedSemaphorePermit) -> Self {
        Self { record, _permit: permit }
    }
}
