//! What went on over the time of a run, in memory that does not grow with it.

/// Most intervals kept. When a run outlasts them each two become one, so a long run has at least half as many.
const MAX_BINS: usize = 240;
/// Length of an interval before the first merge.
const FIRST_BIN_NS: u64 = 100_000_000;

/// Requests in flight and tokens arriving, in intervals of equal length from the start of the run.
#[derive(Debug, Clone)]
pub struct Timeline {
    bin_ns: u64,
    bins: Vec<Bin>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Bin {
    /// Sum over requests of the time that they were in flight within the interval.
    in_flight_ns: u64,
    tokens: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moment {
    pub from_s: f64,
    pub to_s: f64,
    pub in_flight: f64,
    /// Output tokens a second.
    pub tokens_per_s: f64,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { bin_ns: FIRST_BIN_NS, bins: Vec::new() }
    }
}

impl Timeline {
    /// Counts a request that was in flight from `sent_ns` to `ended_ns`.
    pub fn add_request(&mut self, sent_ns: u64, ended_ns: u64) {
        let mut from_ns = sent_ns;
        let last = self.bin_at(ended_ns);
        for index in self.bin_at(sent_ns)..=last {
            let to_ns = ended_ns.min((index as u64 + 1) * self.bin_ns);
            self.bins[index].in_flight_ns += to_ns.saturating_sub(from_ns);
            from_ns = to_ns;
        }
    }

    /// Counts `tokens` that arrived at `time_ns`.
    pub fn add_tokens(&mut self, time_ns: u64, tokens: f64) {
        let index = self.bin_at(time_ns);
        self.bins[index].tokens += tokens;
    }

    /// The intervals of a run that ended at `end_ns`. A last interval that the run filled by less than half belongs to
    /// the one before, as a rate over a sliver of time says nothing.
    pub fn moments(&self, end_ns: u64) -> Vec<Moment> {
        let whole = (end_ns + self.bin_ns / 2) / self.bin_ns;
        let count = (whole.max(1) as usize).min(self.bins.len());
        let moment = |index: usize| {
            let is_last = index + 1 == count;
            let bins = if is_last { &self.bins[index..] } else { &self.bins[index..=index] };
            let from_ns = index as u64 * self.bin_ns;
            let to_ns = if is_last { end_ns.max(from_ns + 1) } else { from_ns + self.bin_ns };
            let length_ns = (to_ns - from_ns) as f64;
            Moment {
                from_s: from_ns as f64 / 1e9,
                to_s: to_ns as f64 / 1e9,
                in_flight: bins.iter().map(|bin| bin.in_flight_ns as f64).sum::<f64>() / length_ns,
                tokens_per_s: bins.iter().map(|bin| bin.tokens).sum::<f64>() / length_ns * 1e9,
            }
        };
        (0..count).map(moment).collect()
    }

    /// Index of the interval that `time_ns` is in, which exists from then on.
    fn bin_at(&mut self, time_ns: u64) -> usize {
        while time_ns / self.bin_ns >= MAX_BINS as u64 {
            let merged = self.bins.chunks(2).map(|pair| Bin {
                in_flight_ns: pair.iter().map(|bin| bin.in_flight_ns).sum(),
                tokens: pair.iter().map(|bin| bin.tokens).sum(),
            });
            self.bins = merged.collect();
            self.bin_ns *= 2;
        }
        let index = (time_ns / self.bin_ns) as usize;
        if self.bins.len() <= index {
            self.bins.resize(index + 1, Bin::default());
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn intervals_hold_the_share_of_each_request() {
        let mut timeline = Timeline::default();
        timeline.add_request(50 * MS, 200 * MS);
        timeline.add_request(0, 100 * MS);
        timeline.add_tokens(150 * MS, 3.0);
        let moments = timeline.moments(200 * MS);
        let want = [(0.0, 0.1, 1.5, 0.0), (0.1, 0.2, 1.0, 30.0)];
        assert_eq!(moments.len(), 2);
        for (moment, want) in moments.iter().zip(want) {
            let got = [moment.from_s, moment.to_s, moment.in_flight, moment.tokens_per_s];
            let want = [want.0, want.1, want.2, want.3];
            assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-9), "{got:?} for {want:?}");
        }
    }

    #[test]
    fn a_sliver_at_the_end_joins_the_interval_before() {
        let mut timeline = Timeline::default();
        timeline.add_request(0, 201 * MS);
        timeline.add_tokens(201 * MS, 1.0);
        let moments = timeline.moments(201 * MS);
        assert_eq!(moments.len(), 2);
        assert!((moments[1].to_s - 0.201).abs() < 1e-9 && (moments[1].in_flight - 1.0).abs() < 1e-9);
        assert!((moments[1].tokens_per_s - 1.0 / 0.101).abs() < 1e-6);
    }

    #[test]
    fn a_long_run_keeps_its_sums_in_few_intervals() {
        let mut timeline = Timeline::default();
        let end_ns = 3_600_000 * MS;
        for second in 0..3600 {
            timeline.add_request(second * 1000 * MS, (second * 1000 + 500) * MS);
            timeline.add_tokens(second * 1000 * MS, 7.0);
        }
        let moments = timeline.moments(end_ns);
        assert!((MAX_BINS / 2..=MAX_BINS).contains(&moments.len()), "{}", moments.len());
        let sum = |of: fn(&Moment) -> f64| moments.iter().map(|m| of(m) * (m.to_s - m.from_s)).sum::<f64>();
        assert!((sum(|m| m.in_flight) - 1800.0).abs() < 1e-6 && (sum(|m| m.tokens_per_s) - 25_200.0).abs() < 1e-6);
        assert!(Timeline::default().moments(0).is_empty());
    }
}
