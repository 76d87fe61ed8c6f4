//! A histogram that costs its one writer a few relaxed additions: the one of `prometheus-client` takes a lock for each.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;

/// Counts of values by upper bound, and their sum. Clones share them.
#[derive(Debug, Clone)]
pub struct Histogram(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    bounds: Bounds,
    /// One for each bound, and one for what is beyond the last.
    counts: Box<[AtomicU64]>,
    /// In the unit that is stored: 584 years of nanoseconds until it wraps.
    sum: AtomicU64,
}

/// Upper bounds of the buckets, ascending, and with them what is counted.
#[derive(Debug, Clone, Copy)]
pub enum Bounds {
    /// Of times, in microseconds; told in seconds.
    Micros(&'static [u64]),
    /// Of counts.
    Counts(&'static [u64]),
}

impl Histogram {
    /// Nothing counted yet.
    pub fn new(bounds: Bounds) -> Self {
        let (Bounds::Micros(of) | Bounds::Counts(of)) = bounds;
        debug_assert!(of.is_sorted_by(|a, b| a < b), "{of:?}");
        let counts = (0..=of.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Inner { bounds, counts, sum: AtomicU64::new(0) }))
    }

    /// Counts a time.
    pub fn observe(&self, time: Duration) {
        let Bounds::Micros(bounds) = self.0.bounds else { unreachable!("a time in a histogram of counts") };
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.add(bounds.partition_point(|bound| bound * 1000 < nanos), nanos);
    }

    /// Counts a count.
    pub fn observe_count(&self, count: u64) {
        let Bounds::Counts(bounds) = self.0.bounds else { unreachable!("a count in a histogram of times") };
        self.add(bounds.partition_point(|bound| *bound < count), count);
    }

    fn add(&self, bucket: usize, value: u64) {
        self.0.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.0.sum.fetch_add(value, Ordering::Relaxed);
    }

    /// How many values were counted.
    pub fn count(&self) -> u64 {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }

    /// Their sum: nanoseconds where they are times.
    pub fn sum(&self) -> u64 {
        self.0.sum.load(Ordering::Relaxed)
    }
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> Result<(), std::fmt::Error> {
        let (bounds, told, sum) = match self.0.bounds {
            Bounds::Micros(bounds) => (bounds, 1e6, self.sum() as f64 / 1e9),
            Bounds::Counts(bounds) => (bounds, 1.0, self.sum() as f64),
        };
        let counts: Vec<u64> = self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let bounds = bounds.iter().map(|bound| *bound as f64 / told).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        encoder.encode_histogram::<NoLabelSet>(sum, counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    #[test]
    fn values_fall_under_the_bound_that_they_reach() {
        let times = Histogram::new(Bounds::Micros(&[500, 1000]));
        for micros in [0, 500, 501, 1000, 1001, 2_000_000] {
            times.observe(Duration::from_micros(micros));
        }
        let counts = Histogram::new(Bounds::Counts(&[1, 8]));
        [1, 2, 8, 9].into_iter().for_each(|count| counts.observe_count(count));
        assert_eq!((times.count(), times.sum(), counts.count(), counts.sum()), (6, 2_003_002_000, 4, 20));
        let mut registry = Registry::default();
        registry.register("t", "Times", times);
        registry.register("c", "Counts", counts);
        let mut text = String::new();
        encode(&mut text, &registry).unwrap();
        for line in [
            "# TYPE t histogram",
            "t_sum 2.003002",
            "t_count 6",
            "t_bucket{le=\"0.0005\"} 2",
            "t_bucket{le=\"0.001\"} 4",
            "t_bucket{le=\"+Inf\"} 6",
            "c_sum 20.0",
            "c_bucket{le=\"1.0\"} 1",
            "c_bucket{le=\"8.0\"} 3",
            "c_bucket{le=\"+Inf\"} 4",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }

    /// What a scrape reads while the writer goes on may be behind, but is whole, and nothing is lost.
    #[test]
    fn scrapes_and_observations_do_not_disturb_each_other() {
        const TIMES: u64 = 200_000;
        let times = Histogram::new(Bounds::Micros(&[500, 1000]));
        let mut registry = Registry::default();
        registry.register("t", "Times", times.clone());
        let scraped = || {
            let mut text = String::new();
            encode(&mut text, &registry).unwrap();
            let count = |series: &str| -> u64 {
                let found = text.lines().find_map(|line| line.strip_prefix(series));
                found.unwrap_or_else(|| panic!("no {series}in {text}")).parse().unwrap()
            };
            assert_eq!(count("t_count "), count("t_bucket{le=\"+Inf\"} "), "{text}");
            [count("t_bucket{le=\"0.0005\"} "), count("t_bucket{le=\"0.001\"} "), count("t_count ")]
        };
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                (0..TIMES).for_each(|i| times.observe(Duration::from_micros(400 * (1 + i % 4))));
            });
            let mut last = [0; 3];
            while !writer.is_finished() {
                let now = scraped();
                assert!(now.is_sorted() && now.iter().zip(last).all(|(now, last)| *now >= last), "{last:?} {now:?}");
                last = now;
            }
        });
        // A quarter each of 400, 800, 1200 and 1600 microseconds.
        assert_eq!((scraped(), times.sum()), ([TIMES / 4, TIMES / 2, TIMES], TIMES * 1_000_000));
    }
}
