//! Attention of one token over its pages: for a group of query heads that share a KV head,
//! `o = sum_j softmax_j(q . k_j / sqrt(head_dim)) v_j` over the positions that the token sees.
//!
//! A page of 64 positions is a leaf: its scores, their maximum m, `p_j = e^(s_j - m)`, the sum l and the output o are
//! computed by themselves, and pages merge in index order. All of it is fp32: a score ascends the dimensions, an output
//! the positions, each in one accumulator, with a rounding after every product and sum, so that all instruction sets
//! agree. Positions outside the token's view weigh exactly nothing: their scores are replaced before anything looks at
//! them, and their values are never read, so that memory nobody has written may hold NaN. One token's arithmetic does
//! not depend on which tokens are computed beside it.
#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop, reason = "kernels name tile and column by index, like the arithmetic they state")]

use super::isa::Isa;
#[cfg(target_arch = "x86_64")]
use super::lanes::{Avx2, Avx512Bf16};
use super::lanes::{LANES, Lanes, Portable};
use crate::math::exp;
use crate::plan::PAGE_POSITIONS;

/// Most queries that share a pass over the pages.
const MAX_QUERIES: usize = 8;
/// Tiles of [`LANES`] positions in a page.
const PAGE_TILES: usize = PAGE_POSITIONS / LANES;
/// Widest head: bounds the outputs kept on the stack.
pub const MAX_HEAD_DIM: usize = 256;

/// The K and V blocks of a page for one layer and KV head, as [`crate::plan::KvLayout`] lays them out.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// `[head_dim][64]` fp32
    pub keys: &'a [f32],
    /// `[64][head_dim]` fp32
    pub values: &'a [f32],
}

/// Outputs of queries, each in the first `head_dim` elements of its row.
type Outputs = [[f32; MAX_HEAD_DIM]; MAX_QUERIES];

/// What one token sees.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// First position it sees.
    pub first: usize,
    /// Its own position, the last one it sees.
    pub last: usize,
}

impl View {
    /// The view of the token at `position` under a sliding window (of that many positions, its own included).
    pub fn new(position: usize, window: Option<usize>) -> Self {
        Self { first: window.map_or(0, |window| (position + 1).saturating_sub(window)), last: position }
    }
}

/// Attends with `queries`, `[group][head_dim]` fp32, and hands each one's output to `write`, with the place of its
/// first element in `[group][head_dim]`. `page(i)` is the page of positions `64 i` and up.
///
/// # Panics
/// If lengths do not fit, or the head is wider than [`MAX_HEAD_DIM`].
pub fn attend<'a>(
    isa: Isa,
    head_dim: usize,
    view: View,
    page: impl Fn(usize) -> Page<'a>,
    queries: &[f32],
    mut write: impl FnMut(usize, &[f32]),
) {
    assert!(head_dim.is_multiple_of(LANES) && head_dim <= MAX_HEAD_DIM, "heads of {head_dim}");
    assert!(
        isa.available() && !queries.is_empty() && queries.len().is_multiple_of(head_dim),
        "{isa}, {}",
        queries.len()
    );
    let page = |index: usize| {
        let page = page(index);
        assert!(page.keys.len() == head_dim * PAGE_POSITIONS && page.values.len() == page.keys.len());
        page
    };
    let mut outputs = [[0.0; MAX_HEAD_DIM]; MAX_QUERIES];
    for (block, queries) in queries.chunks(MAX_QUERIES * head_dim).enumerate() {
        match isa {
            // SAFETY: the processor has `isa`, and lengths were checked above.
            #[cfg(target_arch = "x86_64")]
            Isa::Amx | Isa::Avx512Bf16 => unsafe { attend_avx512(head_dim, view, &page, queries, &mut outputs) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { attend_avx2(head_dim, view, &page, queries, &mut outputs) },
            // SAFETY: as above; plain Rust runs anywhere.
            _ => unsafe { attend_any::<Portable>(head_dim, view, &page, queries, &mut outputs) },
        }
        for (query, output) in outputs.iter().enumerate().take(queries.len() / head_dim) {
            write((block * MAX_QUERIES + query) * head_dim, &output[..head_dim]);
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn attend_avx512<'a>(
    d: usize,
    view: View,
    page: &impl Fn(usize) -> Page<'a>,
    queries: &[f32],
    outputs: &mut Outputs,
) {
    // SAFETY: the caller's.
    unsafe { attend_any::<Avx512Bf16>(d, view, page, queries, outputs) }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn attend_avx2<'a>(
    d: usize,
    view: View,
    page: &impl Fn(usize) -> Page<'a>,
    queries: &[f32],
    outputs: &mut Outputs,
) {
    // SAFETY: the caller's.
    unsafe { attend_any::<Avx2>(d, view, page, queries, outputs) }
}

/// # Safety
/// The processor has the set `L`; at most [`MAX_QUERIES`] queries; lengths as [`attend`] says.
#[inline(always)]
unsafe fn attend_any<'a, L: Lanes>(
    d: usize,
    view: View,
    page: &impl Fn(usize) -> Page<'a>,
    queries: &[f32],
    outputs: &mut Outputs,
) {
    // SAFETY: the caller's.
    unsafe {
        match (queries.len() / d).next_power_of_two() {
            1 => attend_block::<L, PAGE_TILES, 1>(d, view, page, queries, outputs),
            2 => attend_block::<L, PAGE_TILES, 2>(d, view, page, queries, outputs),
            4 => attend_block::<L, PAGE_TILES, 4>(d, view, page, queries, outputs),
            _ => attend_block::<L, { PAGE_TILES / 2 }, MAX_QUERIES>(d, view, page, queries, outputs),
        }
    }
}

/// The running softmax of one query.
#[derive(Clone, Copy)]
struct State {
    max: f32,
    sum: f32,
}

/// Up to `C` queries over all pages in view, scored `T` tiles of positions at a time.
///
/// # Safety
/// As [`attend_any`].
#[inline(always)]
unsafe fn attend_block<'a, L: Lanes, const T: usize, const C: usize>(
    d: usize,
    view: View,
    page: &impl Fn(usize) -> Page<'a>,
    queries: &[f32],
    outputs: &mut Outputs,
) {
    let count = queries.len() / d;
    let scale = 1.0 / (d as f32).sqrt();
    let mut states = [State { max: f32::NEG_INFINITY, sum: 0.0 }; C];
    for index in view.first / PAGE_POSITIONS..=view.last / PAGE_POSITIONS {
        let start = index * PAGE_POSITIONS;
        let seen = view.first.max(start) - start..(view.last + 1).min(start + PAGE_POSITIONS) - start;
        let page = page(index);
        let mut weights = [[0.0f32; PAGE_POSITIONS]; C];
        // SAFETY: the caller's.
        unsafe { score::<L, T, C>(d, page.keys, queries, &mut weights) };
        let mut leaf = [State { max: f32::NEG_INFINITY, sum: 0.0 }; C];
        for c in 0..count {
            leaf[c] = weigh(&mut weights[c], scale, seen.start, seen.end);
        }
        let first = index == view.first / PAGE_POSITIONS;
        let mut old = [0.0; C];
        let mut new = [1.0; C];
        for c in 0..count {
            if first {
                states[c] = leaf[c];
            } else {
                let max = states[c].max.max(leaf[c].max);
                (old[c], new[c]) = (exp(states[c].max - max), exp(leaf[c].max - max));
                states[c] = State { max, sum: states[c].sum * old[c] + leaf[c].sum * new[c] };
            }
        }
        for chunk in (0..d).step_by(LANES) {
            let mut partial = [[0.0f32; LANES]; C];
            // SAFETY: the caller's; positions are under 64 and the chunk ends within the row of values.
            unsafe {
                let mut acc = [L::zero(); C];
                for position in seen.clone() {
                    let row = page.values.as_ptr().add(position * d + chunk);
                    for c in 0..C {
                        acc[c] = L::axpy(acc[c], weights[c][position], row);
                    }
                }
                for c in 0..C {
                    L::store(acc[c], partial[c].as_mut_ptr());
                }
            }
            for c in 0..count {
                for (output, partial) in outputs[c][chunk..chunk + LANES].iter_mut().zip(&partial[c]) {
                    *output = if first { *partial } else { *output * old[c] + *partial * new[c] };
                }
            }
        }
    }
    for (output, state) in outputs.iter_mut().zip(states).take(count) {
        let inverse = 1.0 / state.sum;
        output[..d].iter_mut().for_each(|output| *output *= inverse);
    }
}

/// The products of up to `C` queries with all keys of a page. Queries past the last repeat it.
///
/// # Safety
/// As [`attend_any`]; `keys` is `[d][64]`, and `T` divides [`PAGE_TILES`].
#[inline(always)]
unsafe fn score<L: Lanes, const T: usize, const C: usize>(
    d: usize,
    keys: &[f32],
    queries: &[f32],
    scores: &mut [[f32; PAGE_POSITIONS]; C],
) {
    let last = queries.len() / d - 1;
    for first in (0..PAGE_POSITIONS).step_by(T * LANES) {
        // SAFETY: the caller's; tiles from `first` end within a row of 64 keys, and within a row of scores.
        unsafe {
            let mut acc = [[L::zero(); T]; C];
            for dim in 0..d {
                let row = keys.as_ptr().add(dim * PAGE_POSITIONS + first);
                for c in 0..C {
                    let query = queries[c.min(last) * d + dim];
                    for t in 0..T {
                        acc[c][t] = L::axpy(acc[c][t], query, row.add(t * LANES));
                    }
                }
            }
            for c in 0..C {
                for t in 0..T {
                    L::store(acc[c][t], scores[c][first + t * LANES..].as_mut_ptr());
                }
            }
        }
    }
}

/// Turns raw scores into weights `e^(scale s - max)`; positions outside `first..end` weigh 0.
#[inline(always)]
fn weigh(scores: &mut [f32; PAGE_POSITIONS], scale: f32, first: usize, end: usize) -> State {
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for (position, score) in scores.iter_mut().enumerate() {
        let seen = position >= first && position < end;
        *score = if seen { *score * scale } else { f32::NEG_INFINITY };
        let lane = &mut maxima[position % LANES];
        *lane = if *score > *lane { *score } else { *lane };
    }
    let max = maxima.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let mut sums = [0.0; LANES];
    for (position, score) in scores.iter_mut().enumerate() {
        // e^(-inf) is exactly 0.
        *score = exp(*score - max);
        sums[position % LANES] += *score;
    }
    State { max, sum: super::norm::sum_lanes(sums) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const D: usize = 48;

    fn noise(i: usize) -> f32 {
        ((i * 7919 + i * i % 811) % 1999) as f32 / 1000.0 - 1.0
    }

    /// Keys and values of `positions`; NaN everywhere else in their pages.
    fn pages(positions: std::ops::Range<usize>) -> (Vec<f32>, Vec<f32>) {
        let pages = positions.end.div_ceil(PAGE_POSITIONS);
        let mut keys = vec![f32::NAN; pages * D * PAGE_POSITIONS];
        let mut values = keys.clone();
        for position in positions {
            let block = position / PAGE_POSITIONS * D * PAGE_POSITIONS;
            let in_page = position % PAGE_POSITIONS;
            for dim in 0..D {
                keys[block + dim * PAGE_POSITIONS + in_page] = noise(position * D + dim) * 2.0;
                values[block + in_page * D + dim] = noise(position * D + dim + 5_000_000);
            }
        }
        (keys, values)
    }

    fn queries(count: usize) -> Vec<f32> {
        (0..count * D).map(|i| noise(i + 77) * 3.0).collect()
    }

    fn run(isa: Isa, view: View, (keys, values): &(Vec<f32>, Vec<f32>), queries: &[f32]) -> Vec<f32> {
        let block = D * PAGE_POSITIONS;
        let page = |i: usize| Page { keys: &keys[i * block..][..block], values: &values[i * block..][..block] };
        let mut out = vec![f32::NAN; queries.len()];
        attend(isa, D, view, page, queries, |at, values| out[at..at + D].copy_from_slice(values));
        out
    }

    fn isas() -> impl Iterator<Item = Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.available())
    }

    #[test]
    fn agrees_with_double_precision_over_unwritten_memory() {
        let queries = queries(11);
        for (last, window) in
            [(0, None), (5, None), (63, None), (64, None), (200, None), (200, Some(32)), (129, Some(66))]
        {
            let view = View::new(last, window);
            // Nothing outside the view is written: it must not count.
            let pages = pages(view.first..last + 1);
            for isa in isas() {
                let out = run(isa, view, &pages, &queries);
                for (query, out) in queries.chunks(D).zip(out.chunks(D)) {
                    let score = |position: usize| {
                        let at = position / PAGE_POSITIONS * D * PAGE_POSITIONS;
                        let key =
                            |dim: usize| f64::from(pages.0[at + dim * PAGE_POSITIONS + position % PAGE_POSITIONS]);
                        (0..D).map(|dim| f64::from(query[dim]) * key(dim)).sum::<f64>() / (D as f64).sqrt()
                    };
                    let weights: Vec<f64> = (view.first..=last).map(|position| score(position).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for (dim, out) in out.iter().enumerate() {
                        let of = |position: usize| f64::from(pages.1[position * D + dim]);
                        let expected = (view.first..=last).zip(&weights).map(|(p, w)| w * of(p)).sum::<f64>() / sum;
                        assert!(
                            (f64::from(*out) - expected).abs() <= 1e-5,
                            "{isa} {last} {window:?}: {out} {expected}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn instruction_sets_agree_in_every_bit() {
        let _mode = crate::cpu::kernels::isa::FlushDenormals::enter();
        let (pages, queries) = (pages(0..150), queries(7));
        for isa in isas() {
            let of = |isa| run(isa, View { first: 3, last: 149 }, &pages, &queries);
            assert_eq!(of(isa), of(Isa::Portable), "{isa}");
        }
    }

    #[test]
    fn a_query_does_not_depend_on_its_group() {
        let (pages, queries) = (pages(0..150), queries(8));
        for isa in isas() {
            for first in [0, 40] {
                let view = View { first, last: 149 };
                let together = run(isa, view, &pages, &queries);
                for count in [1, 3, 5] {
                    assert_eq!(
                        run(isa, view, &pages, &queries[2 * D..(2 + count) * D]),
                        together[2 * D..(2 + count) * D]
                    );
                }
            }
        }
    }
}
