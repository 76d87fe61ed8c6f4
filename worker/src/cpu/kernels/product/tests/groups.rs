//! Weights in groups: every kernel has the bits of sums of bf16 without scales, each scaled once.

use std::ops::Range;

use half::bf16;

use super::*;
use crate::cpu::kernels::lanes::{INT4_RAISED, int4_place};
use crate::model::format::{GROUP_SCALE_MAX, GROUP_SCALE_MIN};
use crate::plan::Leaves;

const ROWS: usize = LANES;

/// Random weights of some leaves of a matrix, with a scale (and a zero point) of its own for each row and group.
struct Grouped {
    format: WeightFormat,
    k: Leaves,
    first_leaf: usize,
    leaves: usize,
    tiles: usize,
    seed: u64,
    scale: fn(u64) -> f32,
}

impl Grouped {
    fn random(&self, of: u64, row: usize, place: usize) -> u64 {
        u64::from(noise(self.seed * 7 + of, row << 20 | place).to_bits()) >> 2
    }

    /// Of a column of the matrix.
    fn group_of(&self, column: usize) -> usize {
        column / self.format.group().unwrap()
    }

    fn scale(&self, row: usize, group: usize) -> f32 {
        bf16::from_f32((self.scale)(self.random(1, row, group))).to_f32()
    }

    /// As it is stored, or in the middle.
    fn zero(&self, row: usize, group: usize) -> u8 {
        if self.format.has_zeros() { self.random(2, row, group) as u8 % 16 } else { 8 }
    }

    /// As it is stored; `None` for padding.
    fn stored(&self, row: usize, leaf: usize, column: usize) -> Option<u8> {
        let bits = self.random(3, row, (self.first_leaf + leaf) * self.k.len + column) as u8;
        let bits = if bits & 0x7f == 0x7f { bits ^ 1 } else { bits };
        (column < self.k.len).then_some(if self.four_bits() { bits % 16 } else { bits })
    }

    fn four_bits(&self) -> bool {
        matches!(self.format, WeightFormat::Int4 { .. })
    }

    /// What kernels multiply with: 4 bits and [`INT4_RAISED`], E4M3 over [`E4M3_RAISED`].
    fn number(&self, row: usize, leaf: usize, column: usize) -> f32 {
        let group = self.group_of((self.first_leaf + leaf) * self.k.len + column);
        let stored = self.stored(row, leaf, column).unwrap_or(self.padding(row, group));
        if self.four_bits() { INT4_RAISED + f32::from(stored) } else { from_e4m3(stored).to_f32() / E4M3_RAISED }
    }

    /// Each run of a leaf: its group, its first pair, and its pairs.
    fn runs(&self, leaf: usize) -> Vec<(usize, Range<usize>)> {
        let mut first = 0;
        let run = |pairs: usize| {
            let start = first;
            first += pairs;
            (self.group_of((self.first_leaf + leaf) * self.k.len + 2 * start), start..first)
        };
        Runs::new(self.format, self.k, self.first_leaf).unwrap().of(leaf).map(run).collect()
    }

    /// Numbers of a run of a tile, as lines of bf16.
    fn lines(&self, tile: usize, leaf: usize, pairs: Range<usize>) -> Vec<u16> {
        let line = |pair: usize| (0..LINE).map(move |i| (tile * ROWS + i / 2, 2 * pair + i % 2));
        pairs.flat_map(line).map(|(row, column)| bf16::from_f32(self.number(row, leaf, column)).to_bits()).collect()
    }

    /// As the kernels read it.
    fn packed(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (tile, leaf) in (0..self.tiles).flat_map(|tile| (0..self.leaves).map(move |leaf| (tile, leaf))) {
            let rows = tile * ROWS..(tile + 1) * ROWS;
            for (group, pairs) in self.runs(leaf) {
                let stored =
                    |row: usize, column: usize| self.stored(row, leaf, column).unwrap_or(self.padding(row, group));
                if self.four_bits() {
                    for first in pairs.clone().step_by(4) {
                        let mut lines = [0; 64];
                        for (line, i) in (0..4).flat_map(|line| (0..LINE).map(move |i| (line, i))) {
                            // What lies behind a run is not looked at.
                            let bits = match pairs.contains(&(first + line)) {
                                true => stored(tile * ROWS + i / 2, 2 * (first + line) + i % 2),
                                false => 5,
                            };
                            let (byte, high) = int4_place(line, i / 2, i % 2);
                            lines[byte] |= if high { bits << 4 } else { bits };
                        }
                        out.extend(lines);
                    }
                } else {
                    for pair in pairs {
                        out.extend((0..LINE).map(|i| stored(tile * ROWS + i / 2, 2 * pair + i % 2)));
                    }
                }
                out.extend(rows.clone().flat_map(|row| bf16::from_f32(self.scale(row, group)).to_le_bytes()));
                if self.format.has_zeros() {
                    let zero = |row: usize| self.zero(tile * ROWS + row, group);
                    out.extend((0..8).map(|row| zero(row) | zero(row + 8) << 4));
                }
            }
        }
        out
    }

    /// The bits of a product, from sums of runs that the kernel of bf16 computes.
    fn expected(&self, isa: Isa, x: Columns<'_>) -> Vec<u32> {
        let mut out = Vec::new();
        for (column, tile) in (0..x.count).flat_map(|column| (0..self.tiles).map(move |tile| (column, tile))) {
            let mut sums = Vec::new();
            for leaf in 0..self.leaves {
                let mut sum = [0.0f32; ROWS];
                for (group, pairs) in self.runs(leaf) {
                    let first = leaf * self.k.padded + 2 * pairs.start;
                    let x = Columns { data: &x.data[column * x.parts * x.stride + first..], count: 1, ..x };
                    let product = |lines: &[u16]| -> Vec<f32> {
                        run(isa, panel(lines, 1, 1, pairs.len()), x).into_iter().map(f32::from_bits).collect()
                    };
                    let of_weights = product(&self.lines(tile, leaf, pairs.clone()));
                    let of_inputs = sum_of_inputs(isa, x, pairs.len());
                    for (row, sum) in sum.iter_mut().enumerate() {
                        let of_row = tile * ROWS + row;
                        let raised = if self.four_bits() { 1.0 } else { E4M3_RAISED };
                        let too_much = INT4_RAISED + f32::from(self.zero(of_row, group));
                        let less = if self.four_bits() { too_much * of_inputs } else { 0.0 };
                        *sum += self.scale(of_row, group) * raised * (of_weights[row] - less);
                    }
                }
                sums.extend(sum);
            }
            crate::plan::tree::tree_sum_rows(&mut sums, ROWS);
            out.extend(sums[..ROWS].iter().map(|sum| sum.to_bits()));
        }
        out
    }

    /// A row's sum in double precision, and the bound of what rounding may change in it.
    fn exact(&self, row: usize, x: &[f64]) -> (f64, f64) {
        let (mut sum, mut size) = (0.0, 0.0);
        for leaf in 0..self.leaves {
            for (group, pairs) in self.runs(leaf) {
                let raised = if self.four_bits() { 1.0 } else { f64::from(E4M3_RAISED) };
                let scale = f64::from(self.scale(row, group)) * raised;
                let zero = f64::from(INT4_RAISED) + f64::from(self.zero(row, group));
                let zero = if self.four_bits() { zero } else { 0.0 };
                for column in 2 * pairs.start..2 * pairs.end {
                    let (number, x) = (f64::from(self.number(row, leaf, column)), x[leaf * self.k.padded + column]);
                    sum += (number - zero) * scale * x;
                    size += (number.abs() + zero.abs()) * scale.abs() * x.abs();
                }
            }
        }
        (sum, size)
    }

    fn padding(&self, row: usize, group: usize) -> u8 {
        if self.four_bits() { self.zero(row, group) } else { 0 }
    }

    fn panel<'a>(&self, data: &'a [u8]) -> Panel<'a> {
        let runs = Runs::new(self.format, self.k, self.first_leaf).unwrap();
        Panel::new(data, self.format, &[], self.tiles, (self.leaves, self.k.padded / 2, runs))
    }
}

/// The sum of the first pairs of a column, as a product of vector instructions: a tile whose rows are the pairs of
/// sixteen, high and low parts after each other, times ones.
fn sum_of_inputs(isa: Isa, x: Columns<'_>, pairs: usize) -> f32 {
    let isa = if isa == Isa::Amx { Isa::Avx512Bf16 } else { isa };
    let mut lines = Vec::new();
    for first in (0..2 * pairs).step_by(LINE) {
        for part in 0..x.parts {
            let of_part = &x.data[part * x.stride + first..part * x.stride + (first + LINE).min(2 * pairs)];
            lines.extend_from_slice(of_part);
            lines.resize(lines.len().next_multiple_of(LINE), 0);
        }
    }
    let (count, ones) = (lines.len() / LINE, vec![bf16::ONE.to_bits(); lines.len()]);
    let ones = Columns { data: &ones, stride: 2 * count, count: 1, parts: 1 };
    let mut lanes: Vec<f32> = run(isa, panel(&lines, 1, 1, count), ones).into_iter().map(f32::from_bits).collect();
    for half in [8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    lanes[0]
}

fn formats(columns: u16) -> [WeightFormat; 3] {
    let int4 = |zeros| WeightFormat::Int4 { columns, zeros };
    [int4(false), int4(true), WeightFormat::E4m3Groups { columns }]
}

/// Around 2^-8, of either sign.
fn usual(random: u64) -> f32 {
    let magnitude = (1.0 + (random % 256) as f32 / 256.0) / 256.0;
    if random & 0x1000 == 0 { magnitude } else { -magnitude }
}

/// The smallest, the largest, those next to them, zero, and powers of two all over the range.
fn extreme(random: u64) -> f32 {
    let edges = [0.0, GROUP_SCALE_MIN, GROUP_SCALE_MAX, GROUP_SCALE_MIN * 1.992_187_5, GROUP_SCALE_MAX / 1.992_187_5];
    let power = 2f32.powi((random % 201) as i32 - 100);
    *edges.get(random as usize / 256 % 10).unwrap_or(&power)
}

/// Leaves that groups lie across, that are padded, that begin within a group; and one of a whole matrix.
fn shapes() -> [(Leaves, usize, usize); 5] {
    let leaves = |count, len: usize| Leaves { count, len, padded: len.next_multiple_of(16) };
    [
        (leaves(1, 256), 0, 1),
        (leaves(16, 24), 4, 4),
        (leaves(16, 304), 2, 2),
        (leaves(8, 50), 1, 1),
        (leaves(1, 51), 0, 1),
    ]
}

#[test]
fn groups_have_the_bits_of_sums_of_bf16_that_are_scaled() {
    let _mode = FlushDenormals::enter();
    let mut seed = 0;
    for ((k, first_leaf, leaves), group) in shapes().into_iter().flat_map(|shape| [(shape, 16), (shape, 128)]) {
        for (format, scale) in
            formats(group).into_iter().flat_map(|format| [(format, usual as fn(u64) -> f32), (format, extreme)])
        {
            seed += 1;
            let weights = Grouped { format, k, first_leaf, leaves, tiles: 7, seed, scale };
            let packed = weights.packed();
            let grouped = weights.panel(&packed);
            assert_eq!(packed.len(), 7 * grouped.tile_bytes);
            let length = leaves * k.padded;
            let x = random(seed, 18 * 2 * length);
            for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
                let x = Columns { data: &x, stride: length, count: 18, parts };
                let expected = weights.expected(isa, x);
                let mut room = vec![0; 7 * grouped.runs.expanded_bytes(format, leaves) / 2];
                let expanded = expand(isa, grouped, &mut room);
                for count in (1..=8).chain([9, 16, 17, 18]) {
                    let (x, of_tile) = (Columns { count, ..x }, 7 * ROWS);
                    assert_eq!(
                        run(isa, grouped, x),
                        expected[..count * of_tile],
                        "{isa} {format} {k:?} {parts} {count}"
                    );
                    assert_eq!(
                        run(isa, expanded, x),
                        expected[..count * of_tile],
                        "{isa} {format} {k:?} {parts} {count}"
                    );
                }
                let some = run(isa, grouped.tiles(2, 3), Columns { count: 3, ..x });
                assert_eq!(run(isa, expanded.tiles(2, 3), Columns { count: 3, ..x }), some);
                for (column, some) in some.chunks_exact(3 * ROWS).enumerate() {
                    assert_eq!(some, &expected[column * 7 * ROWS + 2 * ROWS..][..3 * ROWS], "{isa} {format} {k:?}");
                }
            }
            if Isa::Avx2.available() {
                let x = Columns { data: &x, stride: length, count: 3, parts: 2 };
                assert_eq!(run(Isa::Avx2, grouped, x), run(Isa::Portable, grouped, x), "{format} {k:?}");
            }
        }
    }
}

#[test]
fn groups_agree_with_double_precision() {
    let _mode = FlushDenormals::enter();
    for ((k, first_leaf, leaves), group) in shapes().into_iter().flat_map(|shape| [(shape, 32), (shape, 128)]) {
        for format in formats(group) {
            let weights = Grouped { format, k, first_leaf, leaves, tiles: 2, seed: 3, scale: usual };
            let packed = weights.packed();
            let length = leaves * k.padded;
            let x = random(4, length);
            let values: Vec<f64> = x.iter().map(|bits| f64::from(bf16::from_bits(*bits).to_f32())).collect();
            for isa in isas() {
                let columns = Columns { data: &x, stride: length, count: 1, parts: 1 };
                for (row, got) in run(isa, weights.panel(&packed), columns).into_iter().enumerate() {
                    let (sum, size) = weights.exact(row, &values);
                    let got = f64::from(f32::from_bits(got));
                    // A rounding for each term and each run, of at most 2^-24 of what `size` bounds.
                    let bound = size * (2 * length) as f64 * 2f64.powi(-24);
                    assert!((got - sum).abs() <= bound, "{isa} {format} {k:?} {row}: {got} {sum}");
                }
            }
        }
    }
}

/// Every value, less every zero point, times every scale of eight bits, at the ends of the range and in the middle: a
/// sum of one term is exact.
#[test]
fn every_value_times_every_scale_is_exact() {
    let _mode = FlushDenormals::enter();
    for (format, exponent) in
        formats(32).into_iter().flat_map(|format| [-100, -1, 0, 99].map(|exponent| (format, exponent)))
    {
        let four_bits = matches!(format, WeightFormat::Int4 { .. });
        let scale = |index: usize| (1.0 + (index % 128) as f32 / 128.0) * 2f32.powi(exponent);
        let columns = if four_bits { 16 } else { 256 };
        let one_hot: Vec<u16> =
            (0..columns * columns).map(|i| if i % columns == i / columns { bf16::ONE.to_bits() } else { 0 }).collect();
        let format = match format {
            WeightFormat::Int4 { zeros, .. } => WeightFormat::Int4 { columns: 16, zeros },
            _ => WeightFormat::E4m3Groups { columns: 256 },
        };
        // A tile has sixteen of the scales; zero points come in turns, so that each meets each scale.
        for (tile, zero) in
            (0..8).flat_map(|tile| (0..if format.has_zeros() { 16 } else { 1 }).map(move |zero| (tile, zero)))
        {
            let zero_of = |row: usize| if format.has_zeros() { (zero + row as u8) % 16 } else { 8 };
            let mut packed = vec![0; columns * ROWS / if four_bits { 2 } else { 1 }];
            for (column, row) in (0..columns).flat_map(|column| (0..ROWS).map(move |row| (column, row))) {
                let bits = column as u8;
                if four_bits {
                    let (byte, high) = int4_place(column / 2 % 4, row, column % 2);
                    packed[column / 8 * 64 + byte] |= bits << if high { 4 } else { 0 };
                } else {
                    packed[column / 2 * LINE + row * 2 + column % 2] = if bits & 0x7f == 0x7f { 0 } else { bits };
                }
            }
            packed.extend((0..ROWS).flat_map(|row| bf16::from_f32(scale(tile * ROWS + row)).to_le_bytes()));
            if format.has_zeros() {
                packed.extend((0..8).map(|row| zero_of(row) | zero_of(row + 8) << 4));
            }
            let runs = Runs::new(format, Leaves { count: 1, len: columns, padded: columns }, 0).unwrap();
            let panel = Panel::new(&packed, format, &[], 1, (1, columns / 2, runs));
            for (isa, first) in
                isas().into_iter().flat_map(|isa| (0..columns).step_by(8).map(move |first| (isa, first)))
            {
                let x = Columns { data: &one_hot[first * columns..], stride: columns, count: 8, parts: 1 };
                for (i, got) in run(isa, panel, x).into_iter().map(f32::from_bits).enumerate() {
                    let (value, row) = ((first + i / ROWS) as u8, i % ROWS);
                    let number = match four_bits {
                        true => f32::from(value) - f32::from(zero_of(row)),
                        false if value & 0x7f == 0x7f => 0.0,
                        false => from_e4m3(value).to_f32(),
                    };
                    assert_eq!(got, number * scale(tile * ROWS + row), "{isa} {format} 2^{exponent} {value}");
                }
            }
        }
    }
}

/// A group whose scale is zero is left out, whatever its weights and zero points.
#[test]
fn a_scale_of_zero_leaves_a_group_out() {
    let _mode = FlushDenormals::enter();
    let k = Leaves { count: 1, len: 64, padded: 64 };
    let second = |random: u64| if random.is_multiple_of(2) { 0.0 } else { 0.5 };
    for format in formats(32) {
        let weights = Grouped { format, k, first_leaf: 0, leaves: 1, tiles: 1, seed: 8, scale: second };
        let packed = weights.packed();
        let x = random(9, 64);
        let mut expected = [0.0f64; ROWS];
        let values: Vec<f64> = x.iter().map(|bits| f64::from(bf16::from_bits(*bits).to_f32())).collect();
        expected.iter_mut().enumerate().for_each(|(row, sum)| *sum = weights.exact(row, &values).0);
        assert!((0..ROWS).any(|row| [0, 1].map(|group| weights.scale(row, group)) == [0.0; 2]));
        for isa in isas() {
            let x = Columns { data: &x, stride: 64, count: 1, parts: 1 };
            for (row, got) in run(isa, weights.panel(&packed), x).into_iter().map(f32::from_bits).enumerate() {
                let both_zero = (0..2).all(|group| weights.scale(row, group) == 0.0);
                assert!(!both_zero || got == 0.0, "{isa} {format} {row}: {got}");
                assert!((f64::from(got) - expected[row]).abs() < 1e-2, "{isa} {format} {row}: {got}");
            }
        }
    }
}

#[test]
fn another_zero_point_or_another_border_of_groups_is_noticed() {
    let _mode = FlushDenormals::enter();
    let k = Leaves { count: 16, len: 24, padded: 32 };
    for format in formats(16) {
        let weights = Grouped { format, k, first_leaf: 2, leaves: 2, tiles: 1, seed: 5, scale: usual };
        let packed = weights.packed();
        let x = random(6, 2 * k.padded);
        let x = Columns { data: &x, stride: 2 * k.padded, count: 1, parts: 1 };
        let grouped = weights.panel(&packed);
        let right = run(Isa::best(), grouped, x);
        assert_eq!(right, weights.expected(Isa::best(), x));
        // Begun one leaf later: as many bytes, with other borders.
        let elsewhere = Runs::new(format, k, 3).unwrap();
        let elsewhere = Panel::new(&packed, format, &[], 1, (2, k.padded / 2, elsewhere));
        assert_eq!(elsewhere.tile_bytes, grouped.tile_bytes);
        assert_ne!(run(Isa::best(), elsewhere, x), right, "{format}");
        if format.has_zeros() {
            let mut other = packed.clone();
            // Of the first run, of 8 pairs.
            other[format.bytes(8 * LINE) + 2 * ROWS + 3] ^= 1;
            let changed: Vec<_> =
                run(Isa::best(), weights.panel(&other), x).iter().zip(&right).map(|(is, was)| is != was).collect();
            assert_eq!(changed.iter().filter(|changed| **changed).count(), 1, "the row whose zero point is another");
        }
    }
}
