//! Straight lines through measured points.

#[derive(Debug)]
pub struct Line {
    pub mean: f64,
    pub slope: f64,
    pub slope_error: f64,
}

impl Line {
    /// None for points that do not spread along the first axis, or fewer than eight.
    pub fn through(points: &[(f64, f64)]) -> Option<Self> {
        if points.len() < 8 {
            return None;
        }
        let n = points.len() as f64;
        let (mean_x, mean) = (points.iter().map(|p| p.0).sum::<f64>() / n, points.iter().map(|p| p.1).sum::<f64>() / n);
        let spread: f64 = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
        if spread <= 0.0 {
            return None;
        }
        let slope = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean)).sum::<f64>() / spread;
        let residue: f64 = points.iter().map(|p| (p.1 - mean - slope * (p.0 - mean_x)).powi(2)).sum();
        Some(Self { mean, slope, slope_error: (residue / (n - 2.0) / spread).sqrt() })
    }
}
