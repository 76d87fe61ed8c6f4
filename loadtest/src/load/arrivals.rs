//! When requests are due: a seeded sequence of intended send times for an open loop.
//!
//! The sequence never looks at the server: a request is due at its time whether or not earlier ones were answered,
//! which is what lets latency be measured without coordinated omission.

use std::time::Duration;

use clap::ValueEnum;
use rand::SeedableRng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Exp, Gamma};

/// Rates that are accepted, in requests a second.
pub const RATE_RANGE: std::ops::RangeInclusive<f64> = 1e-3..=1e5;
/// Burstiness that is accepted: the shape of the gamma distribution.
pub const BURSTINESS_RANGE: std::ops::RangeInclusive<f64> = 1e-2..=1e3;
/// Due times stop growing here (some 31 years), so that adding one to a clock cannot overflow.
const MAX_DUE_S: f64 = 1e9;

/// How many requests come in a second, over the time of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    /// At the start, in requests a second.
    pub from_per_s: f64,
    /// From [`Self::over`] on; between the two the rate changes evenly.
    pub to_per_s: f64,
    pub over: Duration,
}

impl Rate {
    /// The same rate at all times.
    pub fn constant(per_s: f64) -> Self {
        Self { from_per_s: per_s, to_per_s: per_s, over: Duration::ZERO }
    }

    /// When so many requests have come, on average: the inverse of the integral of the rate.
    fn time_s_of(self, count: f64) -> f64 {
        let (from, to, over_s) = (self.from_per_s, self.to_per_s, self.over.as_secs_f64());
        let in_ramp = (from + to) / 2.0 * over_s;
        if count >= in_ramp {
            return over_s + (count - in_ramp) / to;
        }
        // The root of from t + growth t^2 / 2 = count, in the form that also holds for no growth.
        let growth = (to - from) / over_s;
        2.0 * count / (from + (from * from + 2.0 * growth * count).max(0.0).sqrt())
    }
}

/// How the gaps between requests are distributed; the mean gap is 1/rate for all of them. Where the rate changes, gaps
/// are drawn for a rate of 1 and time is stretched to the rate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ArrivalProcess {
    /// Equal gaps
    Constant,
    /// Exponential gaps
    Poisson,
    /// Gamma-distributed gaps, see --burstiness
    Gamma,
}

/// A rate or burstiness that no schedule can be made from.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ArrivalError {
    #[error("a rate of {0} requests a second is not possible: give one from 0.001 to 100000")]
    Rate(f64),
    #[error("a burstiness of {0} is not possible: give one from 0.01 (bursty) to 1000 (nearly constant)")]
    Burstiness(f64),
}

/// Endless iterator over due times, counted from the start of the run and never decreasing.
#[derive(Debug, Clone)]
pub struct Arrivals {
    gaps: Gaps,
    rate: Rate,
    rng: StdRng,
    /// Sum of the gaps so far, at a rate of 1.
    count: f64,
    index: u64,
}

/// Gaps with a mean of 1.
#[derive(Debug, Clone)]
enum Gaps {
    Constant,
    Exponential(Exp<f64>),
    Gamma(Gamma<f64>),
}

impl Arrivals {
    /// A schedule of `rate`; the same seed gives the same schedule. `burstiness` is the shape of gamma-distributed
    /// gaps, whose coefficient of variation is `1 / sqrt(burstiness)`; other gaps have none.
    pub fn new(process: ArrivalProcess, burstiness: f64, rate: Rate, seed: u64) -> Result<Self, ArrivalError> {
        for per_s in [rate.from_per_s, rate.to_per_s] {
            if !RATE_RANGE.contains(&per_s) {
                return Err(ArrivalError::Rate(per_s));
            }
        }
        let gaps = match process {
            ArrivalProcess::Constant => Gaps::Constant,
            ArrivalProcess::Poisson => Gaps::Exponential(Exp::new(1.0).expect("1 is a rate")),
            ArrivalProcess::Gamma => {
                let error = ArrivalError::Burstiness(burstiness);
                if !BURSTINESS_RANGE.contains(&burstiness) {
                    return Err(error);
                }
                Gaps::Gamma(Gamma::new(burstiness, 1.0 / burstiness).map_err(|_| error)?)
            }
        };
        Ok(Self { gaps, rate, rng: StdRng::seed_from_u64(seed), count: 0.0, index: 0 })
    }
}

impl Iterator for Arrivals {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.count = match &self.gaps {
            Gaps::Constant => self.index as f64,
            Gaps::Exponential(gap) => self.count + gap.sample(&mut self.rng),
            Gaps::Gamma(gap) => self.count + gap.sample(&mut self.rng),
        };
        self.index += 1;
        Some(Duration::from_secs_f64(self.rate.time_s_of(self.count).min(MAX_DUE_S)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::samples::{KS_CRITICAL, ks_statistic, mean_and_variance};

    const SAMPLES: usize = 20_000;

    /// The first due times of gaps without burstiness, in seconds.
    fn due_s(process: ArrivalProcess, rate: Rate, seed: u64, count: usize) -> Vec<f64> {
        let arrivals = Arrivals::new(process, 1.0, rate, seed).expect("test rates are in range");
        arrivals.take(count).map(|due| due.as_secs_f64()).collect()
    }

    fn gaps(process: ArrivalProcess, burstiness: f64, rate_per_s: f64, seed: u64) -> Vec<f64> {
        let arrivals = Arrivals::new(process, burstiness, Rate::constant(rate_per_s), seed).expect("in range");
        let due: Vec<f64> = arrivals.take(SAMPLES + 1).map(|due| due.as_secs_f64()).collect();
        due.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    #[test]
    fn constant_arrivals_are_equally_spaced_without_drift() {
        let due = due_s(ArrivalProcess::Constant, Rate::constant(8.0), 1, 800_001);
        assert_eq!([due[0], due[1], due[800_000]], [0.0, 0.125, 100_000.0]);
    }

    #[test]
    fn poisson_gaps_have_the_mean_variance_and_shape_of_the_exponential() {
        let rate = 40.0;
        for seed in 0..5 {
            let gaps = gaps(ArrivalProcess::Poisson, 1.0, rate, seed);
            let (mean, variance) = mean_and_variance(&gaps);
            // Five standard errors: 1/sqrt(n) of the mean, sqrt(8/n) of the variance.
            assert!((mean * rate - 1.0).abs() < 5.0 / (SAMPLES as f64).sqrt(), "seed {seed}: mean {mean}");
            assert!((variance * rate * rate - 1.0).abs() < 5.0 * (8.0 / SAMPLES as f64).sqrt(), "seed {seed}");
            let ks = ks_statistic(&gaps, |x| 1.0 - (-rate * x).exp());
            assert!(ks < KS_CRITICAL, "seed {seed}: KS {ks}");
        }
    }

    /// From 10 to 30 a second over a minute and 30 from there: the integral of the rate to each due time is a Poisson
    /// process of rate 1.
    #[test]
    fn a_ramp_has_the_rate_that_it_says_at_every_time() {
        for (from_per_s, to_per_s) in [(10.0, 30.0), (30.0, 10.0)] {
            let rate = Rate { from_per_s, to_per_s, over: Duration::from_secs(60) };
            let due = due_s(ArrivalProcess::Poisson, rate, 3, SAMPLES);
            let integral = |t: f64| {
                let ramp = t.min(60.0);
                from_per_s * ramp + (to_per_s - from_per_s) * ramp * ramp / 120.0 + to_per_s * (t - ramp)
            };
            let gaps: Vec<f64> = due.windows(2).map(|pair| integral(pair[1]) - integral(pair[0])).collect();
            let ks = ks_statistic(&gaps, |x| 1.0 - (-x).exp());
            assert!(ks < KS_CRITICAL, "KS {ks}");
            // Exactly, without chance: 1200 in the ramp, and the middle where the integral has half of that.
            let due = due_s(ArrivalProcess::Constant, rate, 0, 1801);
            assert!((due[1200] - 60.0).abs() < 1e-6 && (due[1800] - 60.0 - 600.0 / to_per_s).abs() < 1e-6);
            assert!((integral(due[600]) - 600.0).abs() < 1e-6, "{}", due[600]);
        }
    }

    #[test]
    fn poisson_counts_in_disjoint_seconds_vary_like_their_mean() {
        let mut counts = vec![0.0f64; 500];
        for due in Arrivals::new(ArrivalProcess::Poisson, 1.0, Rate::constant(20.0), 9).expect("in range") {
            let Some(count) = counts.get_mut(due.as_secs() as usize) else { break };
            *count += 1.0;
        }
        let (mean, variance) = mean_and_variance(&counts);
        assert!((variance / mean - 1.0).abs() < 5.0 * (2.0 / 500.0f64).sqrt(), "mean {mean}, variance {variance}");
    }

    #[test]
    fn gamma_gaps_follow_their_burstiness() {
        let rate = 10.0;
        for burstiness in [0.25, 1.0, 2.0, 16.0] {
            let gaps = gaps(ArrivalProcess::Gamma, burstiness, rate, 3);
            let (mean, variance) = mean_and_variance(&gaps);
            let relative_error = 5.0 / (burstiness * SAMPLES as f64).sqrt();
            assert!((mean * rate - 1.0).abs() < relative_error, "burstiness {burstiness}: mean {mean}");
            let squared_cv = variance / (mean * mean);
            assert!((squared_cv * burstiness - 1.0).abs() < 0.15, "burstiness {burstiness}: CV² {squared_cv}");
        }
        // Shape 2 has a distribution function in closed form (Erlang).
        let erlang = |x: f64| 1.0 - (-2.0 * rate * x).exp() * (1.0 + 2.0 * rate * x);
        assert!(ks_statistic(&gaps(ArrivalProcess::Gamma, 2.0, rate, 4), erlang) < KS_CRITICAL);
    }

    #[test]
    fn the_shape_test_rejects_what_is_not_exponential() {
        let exponential = |x: f64| 1.0 - (-10.0 * x).exp();
        for (process, burstiness) in
            [(ArrivalProcess::Constant, 1.0), (ArrivalProcess::Gamma, 0.8), (ArrivalProcess::Gamma, 1.25)]
        {
            assert!(ks_statistic(&gaps(process, burstiness, 10.0, 5), exponential) > KS_CRITICAL, "{process:?} passed");
        }
    }

    #[test]
    fn the_seed_alone_decides_the_schedule() {
        let schedule = |seed| due_s(ArrivalProcess::Poisson, Rate::constant(5.0), seed, 50);
        assert_eq!(schedule(7), schedule(7));
        assert_ne!(schedule(7), schedule(8));
    }

    #[test]
    fn impossible_rates_and_burstiness_are_refused() {
        for rate in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e6] {
            let made = Arrivals::new(ArrivalProcess::Poisson, 1.0, Rate::constant(rate), 0);
            assert!(matches!(made, Err(ArrivalError::Rate(_))), "{rate}");
        }
        for burstiness in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let made = Arrivals::new(ArrivalProcess::Gamma, burstiness, Rate::constant(1.0), 0);
            assert!(matches!(made, Err(ArrivalError::Burstiness(_))), "{burstiness}");
        }
    }

    #[test]
    fn due_times_stay_finite_at_the_slowest_and_burstiest() {
        let mut arrivals = Arrivals::new(ArrivalProcess::Gamma, 0.01, Rate::constant(1e-3), 0).expect("in range");
        arrivals.count = 1e300;
        assert_eq!(arrivals.next(), Some(Duration::from_secs(1_000_000_000)));
    }
}
