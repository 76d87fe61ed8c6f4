//! Inputs of a product: fp32 values as bf16, rounded once, or split in a high and a low part.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use half::bf16;

use super::kernels::LINE;
use super::kernels::isa::Isa;
use super::kernels::product::{Columns, MAX_COLUMNS, Panel, product, sums_of_inputs};
use super::memory::{Buffer, Disjoint, OutOfMemory};
use super::team::Team;
use crate::plan::Runs;
use crate::plan::rounding::RoundingPoint;

/// `[rows][parts]` vectors of `len` bf16, a cache line apart: widths are powers of two, and the vectors of eight rows
/// would fall into the same few sets of the first cache. What nobody writes, such as the padding of leaves, is zero.
#[derive(Debug)]
pub struct Inputs {
    values: Buffer<u16>,
    len: usize,
    parts: usize,
    /// [`sums_of_inputs`] of each block of rows that a product takes, once they are asked for.
    sums: Box<[OnceLock<Sums>]>,
}

/// Of a block of rows, and of runs that all tiles of a product have in common.
type Sums = (Runs, Box<[f32]>);

/// Lets the units of one job write disjoint parts of the rows.
#[derive(Debug)]
pub struct Writer<'a> {
    values: Disjoint<'a, u16>,
    len: usize,
    parts: usize,
}

impl Inputs {
    /// Zeros for `rows` rows of `len` values that round as `point` says.
    ///
    /// # Errors
    /// There is not so much memory.
    pub fn zeroed(point: RoundingPoint, rows: usize, len: usize) -> Result<Self, OutOfMemory> {
        let parts = point.parts();
        let values = Buffer::zeroed(rows * parts * (len + LINE), "the activations")?;
        let sums = (0..rows.div_ceil(MAX_COLUMNS)).map(|_| OnceLock::new()).collect();
        Ok(Self { values, len, parts, sums })
    }

    /// Bytes of a row.
    pub fn row_bytes(point: RoundingPoint, len: usize) -> usize {
        point.parts() * (len + LINE) * size_of::<u16>()
    }

    /// Opens the rows for the duration of a job.
    pub fn writer(&mut self) -> Writer<'_> {
        self.sums.iter_mut().for_each(|sums| drop(sums.take()));
        Writer { values: Disjoint::new(&mut self.values), len: self.len, parts: self.parts }
    }

    /// Row `first` of `rows`, and as many after it as a product takes.
    pub fn columns(&self, first: usize, rows: usize) -> Columns<'_> {
        let stride = self.len + LINE;
        let data = &self.values[first * self.parts * stride..];
        Columns { data, stride, count: MAX_COLUMNS.min(rows - first), parts: self.parts }
    }

    /// Sums what products with a panel take off, where there are several blocks of rows: in parallel, because each
    /// thread would want the same block at the same time.
    pub fn sum(&self, isa: Isa, team: &Team, panel: &Panel<'_>, rows: usize) {
        if panel.is_raised() && rows > MAX_COLUMNS {
            team.for_each(rows.div_ceil(MAX_COLUMNS), |block| {
                self.sums(isa, panel, (block * MAX_COLUMNS, rows));
            });
        }
    }

    /// Writes the product of a panel and [`Inputs::columns`] of `block`: its first row, a multiple of [`MAX_COLUMNS`],
    /// and the rows of the step.
    pub fn product(&self, isa: Isa, panel: Panel<'_>, block: (usize, usize), out: &mut [f32]) {
        let sums = if panel.is_raised() { self.sums(isa, &panel, block) } else { &[] };
        product(isa, panel, self.columns(block.0, block.1), sums, out);
    }

    fn sums(&self, isa: Isa, panel: &Panel<'_>, (first, rows): (usize, usize)) -> &[f32] {
        assert!(first.is_multiple_of(MAX_COLUMNS), "row {first} begins no block");
        let known = &self.sums[first / MAX_COLUMNS];
        let (runs, sums) = known.get().unwrap_or_else(|| {
            // Nobody waits for another: who comes at the same time finds the same.
            let _ = known.set((panel.runs(), sums_of_inputs(isa, panel, &self.columns(first, rows))));
            known.get().expect("sums, because they were set now or before")
        });
        assert_eq!(*runs, panel.runs(), "one product has these inputs");
        sums
    }
}

impl Writer<'_> {
    /// Rounds values `at` and on of a row to bf16 (to nearest, ties to even); the low part takes what that leaves off,
    /// rounded alike.
    ///
    /// # Safety
    /// Nobody else writes these values of this row meanwhile.
    pub unsafe fn write(&self, row: usize, at: usize, values: &[f32]) {
        assert!(at + values.len() <= self.len, "values {at} to {} of {}", at + values.len(), self.len);
        let stride = self.len + LINE;
        let start = row * self.parts * stride + at;
        // SAFETY: the caller's; the high and the low part do not overlap.
        let high = unsafe { self.values.part(start..start + values.len()) };
        high.iter_mut().zip(values).for_each(|(high, value)| *high = bf16::from_f32(*value).to_bits());
        if self.parts == 2 {
            // SAFETY: as above.
            let low = unsafe { self.values.part(start + stride..start + stride + values.len()) };
            for ((low, high), value) in low.iter_mut().zip(high).zip(values) {
                *low = bf16::from_f32(value - bf16::from_bits(*high).to_f32()).to_bits();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::team::Placement;
    use crate::model::WeightFormat;
    use crate::plan::Leaves;
    use crate::plan::rounding::ROUNDING;

    #[test]
    fn parts_add_up_to_the_value_and_neighbours_stay() {
        let value = |bits: u16| f64::from(bf16::from_bits(bits).to_f32());
        for point in ROUNDING {
            let mut inputs = Inputs::zeroed(point, 11, 32).unwrap();
            let values: Vec<f32> = (0..24).map(|i| (i as f32 * 0.37 - 3.0).exp() * [1.0, -1.0][i % 2]).collect();
            // SAFETY: one thread.
            unsafe { inputs.writer().write(9, 8, &values) };
            let columns = inputs.columns(8, 11);
            assert_eq!((columns.count, columns.parts), (3, point.parts()));
            let (before, rest) = columns.data.split_at(columns.stride * columns.parts);
            let (row, after) = rest.split_at(columns.stride * columns.parts);
            assert!(before.iter().chain(after).chain(&row[..8]).all(|bits| *bits == 0));
            let error = 2f64.powi(-8 * columns.parts as i32);
            for (i, expected) in values.into_iter().map(f64::from).enumerate() {
                let got: f64 = row.chunks_exact(columns.stride).map(|part| value(part[8 + i])).sum();
                assert!((got - expected).abs() <= expected.abs() * error, "{point:?} {i}: {got} {expected}");
            }
        }
    }

    #[test]
    fn sums_are_those_of_what_was_written_last() {
        let format = WeightFormat::Int4 { columns: 32, zeros: false };
        let runs = Runs::new(format, Leaves { count: 1, len: 64, padded: 64 }, 0).unwrap();
        let data = vec![0; runs.bytes(format, 1)];
        let panel = Panel::new(&data, format, &[], 1, (1, 32, runs));
        let team = Team::new(2, Placement::Floating, true).unwrap();
        let rows = MAX_COLUMNS + 3;
        let mut inputs = Inputs::zeroed(RoundingPoint::MlpInput, rows, 64).unwrap();
        for value in [1.0, 2.0] {
            let writer = inputs.writer();
            // SAFETY: one thread.
            (0..rows).for_each(|row| unsafe { writer.write(row, 0, &[value * row as f32; 64]) });
            inputs.sum(Isa::Portable, &team, &panel, rows);
            for (first, count) in [(0, MAX_COLUMNS), (MAX_COLUMNS, 3)] {
                let sums = inputs.sums(Isa::Portable, &panel, (first, rows));
                let expected = (first..first + count).flat_map(|row| [32.0 * value * row as f32; 2]);
                assert_eq!(sums, expected.collect::<Vec<_>>());
            }
        }
    }

    #[test]
    #[should_panic(expected = "values 8 to 33 of 32")]
    fn a_write_past_the_row_is_refused() {
        let mut inputs = Inputs::zeroed(RoundingPoint::MlpInput, 2, 32).unwrap();
        // SAFETY: one thread.
        unsafe { inputs.writer().write(0, 8, &[0.0; 25]) };
    }
}
