//! Tests of samples against the law that they are drawn from.

/// Kolmogorov's critical value for rejecting one true hypothesis in a thousand, to be divided by sqrt(n).
pub const KS_CRITICAL: f64 = 1.95;

pub fn mean_and_variance(samples: &[f64]) -> (f64, f64) {
    let mean = samples.iter().sum::<f64>() / samples.len() as f64;
    let variance = samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (samples.len() - 1) as f64;
    (mean, variance)
}

/// Largest distance between the samples' distribution and `cdf`, times sqrt(n).
pub fn ks_statistic(samples: &[f64], cdf: impl Fn(f64) -> f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len() as f64;
    let distance = sorted.iter().enumerate().fold(0.0f64, |worst, (i, &x)| {
        let expected = cdf(x);
        worst.max((expected - i as f64 / n).abs()).max(((i + 1) as f64 / n - expected).abs())
    });
    distance * n.sqrt()
}
