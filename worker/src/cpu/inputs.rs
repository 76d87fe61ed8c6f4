//! Inputs of a product: fp32 values as bf16, rounded once, or split in a high and a low part.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use half::bf16;

use super::kernels::LINE;
use super::kernels::isa::Isa;
use super::kernels::product::{Columns, MAX_COLUMNS, Panel, product, sums_of_inputs};
use super::memory::{Buffer, Disjoint, OutOfMemory};
use crate::plan::rounding::RoundingPoint;

/// `[rows][parts]` vectors of `len` bf16, a cache line apart: widths are powers of two, and the vectors of eight rows
/// would fall into the same few sets of the first cache. What nobody writes, such as the padding of leaves, is zero.
#[derive(Debug)]
pub struct Inputs {
    values: Buffer<u16>,
    len: usize,
    parts: usize,
    /// [`sums_of_inputs`] of each block of rows that a product takes, once it is asked for.
    sums: Box<[OnceLock<Box<[f32]>>]>,
}

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

    /// Writes the product of a panel and those columns.
    pub fn product(&self, isa: Isa, panel: Panel<'_>, (first, rows): (usize, usize), out: &mut [f32]) {
        let columns = self.columns(first, rows);
        if !panel.is_raised() {
            return product(isa, panel, columns, &[], out);
        }
        let known = &self.sums[first / MAX_COLUMNS];
        let sums = known.get().unwrap_or_else(|| {
            // Nobody waits for another: who comes at the same time finds the same.
            let _ = known.set(sums_of_inputs(isa, &panel, &columns));
            known.get().expect("sums, because they were set now or before")
        });
        product(isa, panel, columns, sums, out);
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
    #[should_panic(expected = "values 8 to 33 of 32")]
    fn a_write_past_the_row_is_refused() {
        let mut inputs = Inputs::zeroed(RoundingPoint::MlpInput, 2, 32).unwrap();
        // SAFETY: one thread.
        unsafe { inputs.writer().write(0, 8, &[0.0; 25]) };
    }
}
