//! Weights in groups: every kernel has the bits of bf16 with the same weights.

use half::bf16;

use super::*;
use crate::model::format::{GROUP_SCALE_MAX, GROUP_SCALE_MIN, to_bf16};
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

    fn pairs(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let (leaves, pairs) = (self.leaves, self.k.padded / 2);
        let tiles = (0..self.tiles).flat_map(move |tile| (0..leaves).map(move |leaf| (tile, leaf)));
        tiles.flat_map(move |(tile, leaf)| (0..pairs).map(move |pair| (tile, leaf, pair)))
    }

    /// What the format says that each is, rounded.
    fn plain(&self) -> Vec<u16> {
        let value = |row: usize, leaf: usize, column: usize| {
            let group = self.group_of((self.first_leaf + leaf) * self.k.len + column);
            let Some(stored) = self.stored(row, leaf, column) else { return 0 };
            let number = match self.four_bits() {
                true => f32::from(stored) - f32::from(self.zero(row, group)),
                false => from_e4m3(stored).to_f32(),
            };
            to_bf16(number * self.scale(row, group)).to_bits()
        };
        let line = |(tile, leaf, pair): (usize, usize, usize)| {
            (0..LINE).map(move |i| value(tile * ROWS + i / 2, leaf, 2 * pair + i % 2))
        };
        self.pairs().flat_map(line).collect()
    }

    /// As the kernels read it.
    fn packed(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let mut last = None;
        for (tile, leaf, pair) in self.pairs() {
            let column = (self.first_leaf + leaf) * self.k.len + 2 * pair;
            let rows = tile * ROWS..(tile + 1) * ROWS;
            let group = self.group_of(column);
            if last.replace((tile, leaf, group)) != Some((tile, leaf, group)) {
                out.extend(rows.clone().flat_map(|row| bf16::from_f32(self.scale(row, group)).to_le_bytes()));
                if self.format.has_zeros() {
                    let zero = |row: usize| self.zero(tile * ROWS + row, group) ^ 8;
                    out.extend((0..8).map(|row| zero(row) | zero(row + 8) << 4));
                }
            }
            for row in rows {
                // A weight of the padding is the zero point.
                let stored = |at| self.stored(row, leaf, 2 * pair + at).unwrap_or(self.padding(row, group));
                match self.four_bits() {
                    true => out.push((stored(0) ^ 8) | (stored(1) ^ 8) << 4),
                    false => out.extend([stored(0), stored(1)]),
                }
            }
        }
        out
    }

    fn padding(&self, row: usize, group: usize) -> u8 {
        if self.four_bits() { self.zero(row, group) } else { 0 }
    }

    fn panel<'a>(&self, data: &'a [u8]) -> Panel<'a> {
        Panel {
            data,
            format: self.format,
            scales: &[],
            tiles: self.tiles,
            leaves: self.leaves,
            leaf_pairs: self.k.padded / 2,
            runs: Runs::new(self.format, self.k, self.first_leaf).unwrap(),
        }
    }
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
fn groups_have_the_bits_of_bf16_with_the_same_weights() {
    let _mode = FlushDenormals::enter();
    let mut seed = 0;
    for ((k, first_leaf, leaves), group) in shapes().into_iter().flat_map(|shape| [(shape, 16), (shape, 128)]) {
        for (format, scale) in
            formats(group).into_iter().flat_map(|format| [(format, usual as fn(u64) -> f32), (format, extreme)])
        {
            seed += 1;
            let weights = Grouped { format, k, first_leaf, leaves, tiles: 7, seed, scale };
            let (plain, packed) = (weights.plain(), weights.packed());
            let length = leaves * k.padded;
            let x = random(seed, 8 * 2 * length);
            for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
                let grouped = weights.panel(&packed);
                let bf16 = panel(&plain, 7, leaves, k.padded / 2);
                let mut expanded = vec![0; plain.len()];
                let after = expand(isa, grouped, &mut expanded);
                assert_eq!((after.format, after.tiles, after.runs), (bf16.format, bf16.tiles, bf16.runs));
                assert!(same(&expanded, &plain), "{isa} {format} {k:?}");
                for count in 1..=8 {
                    let x = Columns { data: &x, stride: length, count, parts };
                    assert_eq!(run(isa, grouped, x), run(isa, bf16, x), "{isa} {format} {k:?} {parts} {count}");
                }
                let x = Columns { data: &x, stride: length, count: 3, parts };
                assert_eq!(run(isa, grouped.tiles(2, 3), x), run(isa, bf16.tiles(2, 3), x), "{isa} {format} {k:?}");
            }
        }
    }
}

/// A zero has either sign: no sum that begins with a zero knows which.
fn same(left: &[u16], right: &[u16]) -> bool {
    let value = |bits: &u16| if bits & 0x7fff == 0 { 0 } else { *bits };
    left.iter().map(value).eq(right.iter().map(value))
}

/// Every value times every scale of eight bits, at the ends of the range and in the middle.
#[test]
fn every_value_times_every_scale_rounds_as_bf16_do() {
    let _mode = FlushDenormals::enter();
    for (format, exponent) in
        formats(32).into_iter().flat_map(|format| [-100, -1, 0, 99].map(|exponent| (format, exponent)))
    {
        let four_bits = matches!(format, WeightFormat::Int4 { .. });
        let scale = |index: usize| (1.0 + (index % 128) as f32 / 128.0) * 2f32.powi(exponent);
        // A tile has sixteen of the scales; zero points come in turns, so that each meets each scale.
        for (tile, zero) in
            (0..8).flat_map(|tile| (0..if format.has_zeros() { 16 } else { 1 }).map(move |zero| (tile, zero)))
        {
            let zero_of = |row: usize| if format.has_zeros() { (zero + row as u8) % 16 } else { 8 };
            let mut packed: Vec<u8> =
                (0..ROWS).flat_map(|row| bf16::from_f32(scale(tile * ROWS + row)).to_le_bytes()).collect();
            let columns = if four_bits { 16 } else { 256 };
            if format.has_zeros() {
                packed.extend((0..8).map(|row| (zero_of(row) ^ 8) | (zero_of(row + 8) ^ 8) << 4));
            }
            let format = match format {
                WeightFormat::Int4 { zeros, .. } => WeightFormat::Int4 { columns, zeros },
                _ => WeightFormat::E4m3Groups { columns },
            };
            let mut expected = Vec::new();
            for (pair, row) in (0..columns / 2).flat_map(|pair| (0..ROWS).map(move |row| (pair, row))) {
                let two = [2 * pair, 2 * pair + 1].map(|value| value as u8);
                match four_bits {
                    true => packed.push((two[0] ^ 8) | (two[1] ^ 8) << 4),
                    false => packed.extend(two.map(|bits| if bits & 0x7f == 0x7f { 0 } else { bits })),
                }
                expected.extend(two.map(|value| {
                    let number = match four_bits {
                        true => f32::from(value) - f32::from(zero_of(row)),
                        false if value & 0x7f == 0x7f => 0.0,
                        false => from_e4m3(value).to_f32(),
                    };
                    to_bf16(number * scale(tile * ROWS + row)).to_bits()
                }));
            }
            let len = usize::from(columns);
            let runs = Runs::new(format, Leaves { count: 1, len, padded: len }, 0).unwrap();
            let panel = Panel { data: &packed, format, scales: &[], tiles: 1, leaves: 1, leaf_pairs: len / 2, runs };
            for isa in isas() {
                let mut out = vec![0; expected.len()];
                expand(isa, panel, &mut out);
                assert!(same(&out, &expected), "{isa} {format} 2^{exponent}, scales from {}", tile * ROWS);
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
        let (plain, packed) = (weights.plain(), weights.packed());
        let x = random(6, 2 * k.padded);
        let x = Columns { data: &x, stride: 2 * k.padded, count: 1, parts: 1 };
        let right = run(Isa::best(), panel(&plain, 1, 2, k.padded / 2), x);
        let grouped = weights.panel(&packed);
        assert_eq!(run(Isa::best(), grouped, x), right);
        // Begun one leaf later: as many runs, with other borders.
        let elsewhere = Runs::new(format, k, 3).unwrap();
        assert_eq!(elsewhere.count(2), grouped.runs.count(2));
        assert_ne!(run(Isa::best(), Panel { runs: elsewhere, ..grouped }, x), right, "{format}");
        if format.has_zeros() {
            let mut other = packed.clone();
            other[2 * ROWS + 3] ^= 1;
            let changed: Vec<_> =
                run(Isa::best(), weights.panel(&other), x).iter().zip(&right).map(|(is, was)| is != was).collect();
            assert_eq!(changed.iter().filter(|changed| **changed).count(), 1, "the row whose zero point is another");
        }
    }
}
