//! Which replica takes a sequence: the one that has the fewest rows to compute with it.

use crate::engine::SequenceRequest;

/// Tokens of an answer that are counted on: most answers end before the bound that their requests set.
const ANSWER: u64 = 256;

/// Rows that a sequence brings, of whose answer `generated` tokens are known: its tokens so far, and those to come.
pub(super) fn rows_to_come(request: &SequenceRequest, generated: usize) -> u64 {
    let left = u64::from(request.max_tokens).saturating_sub(generated as u64);
    (request.prompt.len() + generated) as u64 + left.min(ANSWER)
}

/// How soon a replica computes what it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Readiness {
    /// At once.
    Ready,
    /// Once its workers are back; it queues.
    Recovering,
    /// It has never had workers, or is shut down: it refuses.
    Loading,
}

/// A replica that may take a sequence.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offer {
    /// Its number.
    pub(super) replica: usize,
    /// Whether it computes now.
    pub(super) readiness: Readiness,
    /// Rows that it has yet to compute.
    pub(super) work: u64,
    /// Tokens of the sequence that it need not compute, as far as is known.
    pub(super) cached_tokens: u64,
}

/// The replica to send a sequence to; of equals the one from `turn` on, of `count`.
pub(super) fn best(offers: impl Iterator<Item = Offer>, turn: usize, count: usize) -> Option<usize> {
    let key = |offer: &Offer| {
        let rows = offer.work as i64 - offer.cached_tokens as i64;
        (offer.readiness, rows, (offer.replica + count - turn) % count)
    };
    offers.min_by_key(key).map(|offer| offer.replica)
}

#[cfg(test)]
mod tests {
    use super::Readiness::{Loading, Ready, Recovering};
    use super::*;

    fn offer(replica: usize, readiness: Readiness, work: u64, cached_tokens: u64) -> Offer {
        Offer { replica, readiness, work, cached_tokens }
    }

    fn best_of(offers: &[Offer], turn: usize) -> Option<usize> {
        best(offers.iter().copied(), turn, 3)
    }

    #[test]
    fn the_fewest_rows_decide_and_equals_take_turns() {
        let idle = [offer(0, Ready, 0, 0), offer(1, Ready, 0, 0), offer(2, Ready, 0, 0)];
        assert_eq!([0, 1, 2].map(|turn| best_of(&idle, turn)), [Some(0), Some(1), Some(2)]);
        assert_eq!(best_of(&[offer(0, Ready, 500, 0), offer(1, Ready, 400, 0), offer(2, Ready, 600, 0)], 0), Some(1));
        assert_eq!(best_of(&[], 0), None);
    }

    #[test]
    fn a_cached_prompt_is_worth_the_rows_that_it_saves() {
        assert_eq!(best_of(&[offer(0, Ready, 0, 0), offer(1, Ready, 900, 1000)], 0), Some(1));
        assert_eq!(best_of(&[offer(0, Ready, 0, 0), offer(1, Ready, 1100, 1000)], 1), Some(0));
    }

    #[test]
    fn who_is_not_ready_comes_last() {
        assert_eq!(best_of(&[offer(0, Recovering, 0, 4000), offer(1, Ready, 90_000, 0)], 0), Some(1));
        assert_eq!(best_of(&[offer(1, Loading, 0, 0), offer(2, Recovering, 900, 0)], 0), Some(2));
    }
}
