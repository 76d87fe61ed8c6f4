//! A distribution of times in fixed memory: HDR histogram for the quantiles, exact mean and deviation beside it.

use hdrhistogram::Histogram;

/// Shortest time told apart from none, in nanoseconds.
const LOWEST_NS: u64 = 1_000;
/// Longest time told apart, in nanoseconds (one day, the longest run there is); longer ones count as this.
const HIGHEST_NS: u64 = 86_400_000_000_000;
/// Decimal digits to which a quantile is right: 0.1 %.
const SIGNIFICANT_DIGITS: u8 = 3;

#[derive(Debug, Clone)]
pub struct Distribution {
    histogram: Histogram<u64>,
    mean_ns: f64,
    /// Sum of squared distances from the mean (Welford, Technometrics 4(3), 1962).
    squares_ns2: f64,
}

impl Default for Distribution {
    fn default() -> Self {
        Self::with_digits(SIGNIFICANT_DIGITS)
    }
}

impl Distribution {
    /// Quantiles right to 1 % only, in an eighth of the memory.
    pub fn coarse() -> Self {
        Self::with_digits(SIGNIFICANT_DIGITS - 1)
    }

    fn with_digits(digits: u8) -> Self {
        let histogram = Histogram::new_with_bounds(LOWEST_NS, HIGHEST_NS, digits)
            .expect("the bounds are constants that the histogram's documentation allows");
        Self { histogram, mean_ns: 0.0, squares_ns2: 0.0 }
    }

    pub fn record_ns(&mut self, time_ns: u64) {
        self.histogram.saturating_record(time_ns);
        let distance = time_ns as f64 - self.mean_ns;
        self.mean_ns += distance / self.histogram.len() as f64;
        self.squares_ns2 += distance * (time_ns as f64 - self.mean_ns);
    }

    /// Counts the times of `other`, too (Chan, Golub and LeVeque, 1979, for the mean and the deviation).
    pub fn add(&mut self, other: &Self) {
        let (here, there) = (self.count() as f64, other.count() as f64);
        self.histogram.add(&other.histogram).expect("all distributions have the same bounds");
        if there > 0.0 {
            let distance = other.mean_ns - self.mean_ns;
            self.mean_ns += distance * there / (here + there);
            self.squares_ns2 += other.squares_ns2 + distance * distance * here * there / (here + there);
        }
    }

    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// Mean in milliseconds; none for no times.
    pub fn mean_ms(&self) -> Option<f64> {
        self.in_ms(self.mean_ns)
    }

    /// Standard deviation of the times (not of a sample of them) in milliseconds; none for no times.
    pub fn std_ms(&self) -> Option<f64> {
        self.in_ms((self.squares_ns2 / self.histogram.len() as f64).sqrt())
    }

    /// The time that `percentile` percent of the times do not exceed, in milliseconds, right to 0.1 %; none for no
    /// times.
    pub fn percentile_ms(&self, percentile: f64) -> Option<f64> {
        self.in_ms(self.histogram.value_at_quantile(percentile / 100.0) as f64)
    }

    /// The longest time in milliseconds, right to 0.1 %; none for no times.
    pub fn max_ms(&self) -> Option<f64> {
        self.in_ms(self.histogram.max() as f64)
    }

    fn in_ms(&self, ns: f64) -> Option<f64> {
        (self.count() > 0).then_some(ns / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand::rngs::StdRng;
    use rand_distr::{Distribution as _, LogNormal};

    #[test]
    fn agrees_with_exact_quantiles_mean_and_deviation() {
        let mut rng = StdRng::seed_from_u64(11);
        let times = LogNormal::new(16.0, 1.5).expect("a valid shape");
        let mut exact: Vec<u64> = (0..50_000).map(|_| times.sample(&mut rng) as u64).collect();
        let mut distribution = Distribution::default();
        exact.iter().for_each(|&ns| distribution.record_ns(ns));
        exact.sort_unstable();

        let near = |got: Option<f64>, want: f64, tolerance: f64, what: &str| {
            let got = got.expect("times were counted");
            assert!((got / want - 1.0).abs() <= tolerance, "{what}: {got} for {want}");
        };
        for percentile in [1.0, 50.0, 90.0, 95.0, 99.0, 99.9] {
            let rank = (percentile / 100.0 * exact.len() as f64).ceil() as usize;
            near(distribution.percentile_ms(percentile), exact[rank - 1] as f64 / 1e6, 2e-3, &format!("p{percentile}"));
        }
        let mean = exact.iter().map(|&ns| ns as f64).sum::<f64>() / exact.len() as f64;
        let variance = exact.iter().map(|&ns| (ns as f64 - mean).powi(2)).sum::<f64>() / exact.len() as f64;
        near(distribution.mean_ms(), mean / 1e6, 1e-9, "mean");
        near(distribution.std_ms(), variance.sqrt() / 1e6, 1e-9, "deviation");
        near(distribution.max_ms(), exact[exact.len() - 1] as f64 / 1e6, 2e-3, "max");
    }

    #[test]
    fn an_empty_distribution_has_no_figures() {
        let empty = Distribution::default();
        assert_eq!(
            (empty.mean_ms(), empty.std_ms(), empty.percentile_ms(99.0), empty.max_ms()),
            (None, None, None, None)
        );
    }

    #[test]
    fn extremes_are_counted_and_not_lost() {
        let mut distribution = Distribution::default();
        distribution.record_ns(0);
        distribution.record_ns(u64::MAX);
        assert_eq!(distribution.count(), 2);
        assert!(distribution.percentile_ms(50.0).expect("two times") <= 0.002);
        assert!(distribution.max_ms().expect("two times") >= 86_400_000.0);
    }
}
