//! Requests that lost the group, remembered for a while: who sends one again, as clients do after a 500, is refused.

use std::collections::VecDeque;
use std::time::Duration;

/// Requests remembered at one time; the oldest is forgotten for a new one.
const REMEMBERED: usize = 256;

/// Fingerprints of requests that are not to be computed, and until when. Times are since any fixed moment.
#[derive(Debug)]
pub(super) struct Quarantine {
    length: Duration,
    /// In the order of their ends.
    requests: VecDeque<(u64, Duration)>,
}

impl Quarantine {
    /// Nothing is remembered yet; what is will be for `length`.
    pub(super) fn new(length: Duration) -> Self {
        Self { length, requests: VecDeque::new() }
    }

    /// Remembers a request.
    pub(super) fn add(&mut self, fingerprint: u64, now: Duration) {
        if self.requests.len() == REMEMBERED {
            self.requests.pop_front();
        }
        self.requests.push_back((fingerprint, now + self.length));
    }

    /// Nobody is refused.
    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// How much longer a request is refused; `None` if it is not.
    pub(super) fn left(&mut self, fingerprint: u64, now: Duration) -> Option<Duration> {
        while self.requests.pop_front_if(|(_, end)| *end <= now).is_some() {}
        let until = self.requests.iter().rfind(|(known, _)| *known == fingerprint);
        until.map(|(_, end)| *end - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lost_the_group_is_refused_for_a_while_and_memory_is_bounded() {
        let second = Duration::from_secs;
        let mut quarantine = Quarantine::new(second(10));
        quarantine.add(7, second(1));
        assert_eq!([quarantine.left(7, second(4)), quarantine.left(8, second(4))], [Some(second(7)), None]);
        quarantine.add(7, second(5));
        assert_eq!(quarantine.left(7, second(12)), Some(second(3)));
        assert_eq!(quarantine.left(7, second(15)), None);
        assert!(quarantine.requests.is_empty());
        (0..1000).for_each(|fingerprint| quarantine.add(fingerprint, second(20)));
        assert_eq!(quarantine.requests.len(), REMEMBERED);
        assert_eq!([quarantine.left(700, second(20)), quarantine.left(999, second(20))], [None, Some(second(10))]);
    }
}
