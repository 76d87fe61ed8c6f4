//! The binary tree over leaves: plain fp32 adds, left plus right, neighbours first.
//!
//! With `n` leaves (a power of two), level by level: leaf 2i + leaf 2i+1, until one sum is left. A rank that owns
//! leaves `[r n/tp, (r+1) n/tp)` owns a whole subtree, so summing a rank's leaves and then the ranks' sums is the same
//! tree: the same bits for every group size.

/// Sums leaves of one value each, in tree order.
///
/// # Panics
/// If the number of leaves is not a power of two.
pub fn tree_sum(leaves: &[f32]) -> f32 {
    assert!(leaves.len().is_power_of_two(), "{} leaves", leaves.len());
    match leaves {
        [only] => *only,
        _ => {
            let (left, right) = leaves.split_at(leaves.len() / 2);
            tree_sum(left) + tree_sum(right)
        }
    }
}

/// Sums leaves of `width` values each, in tree order: `leaves` is `[count, width]` f32; the sums end up in its first
/// `width` values and the rest is overwritten.
///
/// # Panics
/// If `leaves` is not a power of two of leaves.
pub fn tree_sum_rows(leaves: &mut [f32], width: usize) {
    let count = leaves.len() / width;
    assert!(count.is_power_of_two() && count * width == leaves.len(), "{} values of width {width}", leaves.len());
    let mut stride = 1;
    while stride < count {
        for pair in leaves.chunks_exact_mut(2 * stride * width) {
            let (left, right) = pair.split_at_mut(stride * width);
            for (left, right) in left[..width].iter_mut().zip(&right[..width]) {
                *left += *right;
            }
        }
        stride *= 2;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        // Values whose sum depends on the order: a wrong tree shows in the bits.
        #[test]
        fn rank_subtrees_combine_to_the_whole_tree(
            values in prop::collection::vec(prop_oneof![-1e8f32..1e8, -1.0f32..1.0], 16 * 3),
            log_count in 0usize..=4,
            log_tp in 0usize..=4,
        ) {
            let width = 3;
            let (count, tp) = (1 << log_count, 1 << log_tp.min(log_count));
            let leaves = &values[..count * width];
            let mut whole = leaves.to_vec();
            tree_sum_rows(&mut whole, width);

            let mut by_rank = Vec::new();
            for rank in leaves.chunks_exact(count / tp * width) {
                let mut rank = rank.to_vec();
                tree_sum_rows(&mut rank, width);
                by_rank.extend_from_slice(&rank[..width]);
            }
            tree_sum_rows(&mut by_rank, width);
            for column in 0..width {
                let column_leaves: Vec<f32> = leaves.iter().skip(column).step_by(width).copied().collect();
                prop_assert_eq!(whole[column].to_bits(), tree_sum(&column_leaves).to_bits());
                prop_assert_eq!(whole[column].to_bits(), by_rank[column].to_bits());
            }
        }
    }

    #[test]
    fn a_swap_of_leaves_across_subtrees_shows() {
        let mut leaves = [1.0, 1e8, -1e8, 1.0];
        let right = tree_sum(&leaves);
        leaves.swap(1, 3);
        assert_ne!(tree_sum(&leaves).to_bits(), right.to_bits());
    }
}
