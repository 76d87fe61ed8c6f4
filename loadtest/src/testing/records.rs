//! Records by hand.

use crate::client::record::RequestRecord;

pub const MS: u64 = 1_000_000;

/// A request with these times in milliseconds, over with its last chunk.
pub fn record(due_ms: u64, sent_ms: u64, chunks_ms: &[u64]) -> RequestRecord {
    let mut record = RequestRecord::new(0, due_ms * MS, sent_ms * MS);
    record.chunks_ns = chunks_ms.iter().map(|ms| ms * MS).collect();
    record.ended_ns = chunks_ms.last().unwrap_or(&sent_ms) * MS;
    record
}
