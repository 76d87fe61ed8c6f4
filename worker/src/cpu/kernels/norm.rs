//! RMSNorm in fp32: `x * weight / sqrt(mean(x^2) + eps)`, its sum in sixteen lanes and one fixed tree.

use super::lanes::LANES;
use crate::plan::Leaves;

/// Sums sixteen lanes as a tree, neighbours first.
#[inline(always)]
pub fn sum_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES;
    while width > 1 {
        width /= 2;
        for i in 0..width {
            lanes[i] = lanes[2 * i] + lanes[2 * i + 1];
        }
    }
    lanes[0]
}

/// `1 / sqrt(mean(x^2) + eps)`.
fn inverse_rms(values: &[f32], eps: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let mut chunks = values.chunks_exact(LANES);
    for chunk in &mut chunks {
        for (sum, value) in sums.iter_mut().zip(chunk) {
            *sum += value * value;
        }
    }
    for (sum, value) in sums.iter_mut().zip(chunks.remainder()) {
        *sum += value * value;
    }
    1.0 / (sum_lanes(sums) / values.len() as f32 + eps).sqrt()
}

/// Normalises a row and hands it to `write` in runs, each with its place among `leaves` as a product over it reads
/// them.
pub fn rms_norm(row: &[f32], weight: &[f32], eps: f32, leaves: Leaves, mut write: impl FnMut(usize, &[f32])) {
    let inverse = inverse_rms(row, eps);
    for (leaf, (row, weight)) in row.chunks(leaves.len).zip(weight.chunks(leaves.len)).enumerate() {
        for (run, (row, weight)) in row.chunks(LANES).zip(weight.chunks(LANES)).enumerate() {
            let mut values = [0.0; LANES];
            for ((out, value), weight) in values.iter_mut().zip(row).zip(weight) {
                *out = weight * (value * inverse);
            }
            write(leaf * leaves.padded + run * LANES, &values[..row.len()]);
        }
    }
}

/// Normalises a head in place.
pub fn head_norm(head: &mut [f32], weight: &[f32], eps: f32) {
    let inverse = inverse_rms(head, eps);
    for (value, weight) in head.iter_mut().zip(weight) {
        *value = weight * (*value * inverse);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_double_precision_and_keeps_padding() {
        let row: Vec<f32> = (0..90).map(|i| ((i * 37 % 101) as f32 - 50.0) / 7.0).collect();
        let weight: Vec<f32> = (0..90).map(|i| 0.5 + i as f32 / 90.0).collect();
        let leaves = Leaves { count: 3, len: 30, padded: 32 };
        let mut out = [7.0; 96];
        rms_norm(&row, &weight, 1e-5, leaves, |at, values| out[at..at + values.len()].copy_from_slice(values));
        let mean = row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 90.0;
        for (i, (x, w)) in row.iter().zip(&weight).enumerate() {
            let expected = f64::from(*x) * f64::from(*w) / (mean + 1e-5).sqrt();
            let got = f64::from(out[leaves.padded_column(i)]);
            assert!((got - expected).abs() <= expected.abs() * 1e-6, "{i}: {got} {expected}");
        }
        assert!([30, 31, 62, 63, 94, 95].into_iter().all(|i| out[i] == 7.0));
    }

    #[test]
    fn lanes_sum_neighbours_first() {
        let lanes: [f32; LANES] = std::array::from_fn(|i| [1e8, 1.0, -1e8, 3.0][i % 4]);
        assert_eq!(sum_lanes(lanes).to_bits(), crate::plan::tree::tree_sum(&lanes).to_bits());
    }
}
