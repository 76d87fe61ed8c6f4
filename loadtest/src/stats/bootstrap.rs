//! Intervals of a ratio between two sets of measured times, by the percentile bootstrap (Efron and Tibshirani, An
//! Introduction to the Bootstrap, 1993, chapter 13).

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Share of the resampled ratios that an interval holds.
pub const CONFIDENCE: f64 = 0.95;
/// Times that both sets are drawn again.
const RESAMPLES: usize = 1000;
/// Fewest times on either side of a percentile for its interval to mean something: with fewer, a resample holds hardly
/// any but the very same extremes.
pub const MIN_BEYOND: f64 = 10.0;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Statistic {
    Mean,
    /// The least time that this many percent of the times do not exceed.
    Percentile(f64),
}

impl Statistic {
    /// Whether `count` times say enough of this figure for an interval.
    pub fn is_told_by(self, count: usize) -> bool {
        let rarer = match self {
            Statistic::Mean => 1.0,
            Statistic::Percentile(percent) => (percent / 100.0).min(1.0 - percent / 100.0),
        };
        // The product of a share such as 0.01 may miss a whole number by a rounding.
        count as f64 * rarer >= MIN_BEYOND - 1e-9
    }

    /// The figure of the times `sorted`, of which there are `counts` each.
    fn of(self, sorted: &[f64], counts: &[u32]) -> f64 {
        let total: u32 = counts.iter().sum();
        match self {
            Statistic::Mean => {
                sorted.iter().zip(counts).map(|(time, &count)| time * f64::from(count)).sum::<f64>() / f64::from(total)
            }
            Statistic::Percentile(percent) => {
                let rank = (percent / 100.0 * f64::from(total)).ceil() as u32;
                let mut reached = 0;
                let at = counts.iter().position(|count| {
                    reached += count;
                    reached >= rank.max(1)
                });
                at.map_or(f64::NAN, |at| sorted[at])
            }
        }
    }
}

/// For each of `statistics` the interval that holds [`CONFIDENCE`] of its ratios B over A, were the times drawn again
/// from those that were seen; none where there are too few times or a ratio is no number. The same times give the same
/// interval.
pub fn intervals_of_ratio<const N: usize>(a: &[f64], b: &[f64], statistics: [Statistic; N]) -> [Option<(f64, f64)>; N] {
    let sorted = |times: &[f64]| {
        let mut times = times.to_vec();
        times.sort_by(f64::total_cmp);
        times
    };
    let is_told = statistics.map(|statistic| statistic.is_told_by(a.len()) && statistic.is_told_by(b.len()));
    let mut ratios = [const { Vec::new() }; N];
    if is_told.contains(&true) {
        let (a, b) = (sorted(a), sorted(b));
        let mut rng = StdRng::seed_from_u64(0);
        let mut draw = |times: &[f64]| {
            let mut counts = vec![0; times.len()];
            times.iter().for_each(|_| counts[rng.random_range(0..times.len())] += 1);
            statistics.map(|statistic| statistic.of(times, &counts))
        };
        for _ in 0..RESAMPLES {
            let (of_b, of_a) = (draw(&b), draw(&a));
            ratios.iter_mut().enumerate().for_each(|(place, ratios)| ratios.push(of_b[place] / of_a[place]));
        }
    }
    let left_out = ((1.0 - CONFIDENCE) / 2.0 * RESAMPLES as f64) as usize;
    let mut told = is_told.into_iter();
    ratios.map(|mut ratios| {
        let is_told = told.next().unwrap_or(false) && ratios.iter().all(|ratio: &f64| ratio.is_finite());
        ratios.sort_by(f64::total_cmp);
        is_told.then(|| (ratios[left_out], ratios[RESAMPLES - 1 - left_out]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_distr::{Distribution, Exp1};

    fn times(seed: u64, count: usize, scale: f64) -> Vec<f64> {
        let mut rng = StdRng::seed_from_u64(seed);
        (0..count).map(|_| scale * <Exp1 as Distribution<f64>>::sample(&Exp1, &mut rng)).collect()
    }

    #[test]
    fn figures_are_those_of_the_times_drawn() {
        let (sorted, counts) = ([1.0, 2.0, 10.0], [2, 0, 2]);
        assert_eq!(Statistic::Mean.of(&sorted, &counts), 5.5);
        assert_eq!(Statistic::Percentile(50.0).of(&sorted, &counts), 1.0);
        assert_eq!(Statistic::Percentile(51.0).of(&sorted, &counts), 10.0);
    }

    fn interval(a: &[f64], b: &[f64], statistic: Statistic) -> Option<(f64, f64)> {
        intervals_of_ratio(a, b, [statistic])[0]
    }

    /// The mean of n exponential times has a relative standard error of 1 / sqrt(n); that of a ratio of two such means
    /// is sqrt(2 / n), and 1.96 of those either way is the interval.
    #[test]
    fn a_mean_has_the_interval_that_theory_gives_it() {
        let (a, b) = (times(1, 400, 1.0), times(2, 400, 1.5));
        let (low, high) = interval(&a, &b, Statistic::Mean).expect("enough times");
        let want = 2.0 * 1.96 * 1.5 * (2.0f64 / 400.0).sqrt();
        assert!(((high - low) / want - 1.0).abs() < 0.2, "{} for {want}", high - low);
    }

    /// Of 40 pairs of sets whose true ratio is 2, about 38 intervals hold it: fewer than 34 would be rare chance, and
    /// the seeds are fixed.
    #[test]
    fn intervals_hold_the_true_ratio_as_often_as_they_say() {
        let mut held = [0; 2];
        for seed in 0..40 {
            let (a, b) = (times(2 * seed, 40, 1.0), times(2 * seed + 1, 40, 2.0));
            let intervals = intervals_of_ratio(&a, &b, [Statistic::Mean, Statistic::Percentile(50.0)]);
            for (held, interval) in held.iter_mut().zip(intervals) {
                let (low, high) = interval.expect("enough times");
                *held += u32::from((low..=high).contains(&2.0));
            }
        }
        assert!(held.iter().all(|&held| held >= 34), "{held:?} of 40, mean and median");
    }

    #[test]
    fn too_few_times_have_no_interval() {
        let (a, b) = (times(1, 99, 1.0), times(2, 100, 1.0));
        assert_eq!(interval(&a, &b, Statistic::Percentile(90.0)), None);
        assert!(interval(&b, &b, Statistic::Percentile(90.0)).is_some());
        assert_eq!(interval(&[], &b, Statistic::Mean), None);
        assert_eq!(interval(&[0.0; 20], &b, Statistic::Mean), None, "a ratio to nothing");
    }
}
