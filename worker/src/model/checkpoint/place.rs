//! Where a tensor of the model lies in the files, and what its values are.

use std::ops::Range;

use half::{bf16, f16};
use safetensors::tensor::Dtype;

use super::words::Words;
use crate::model::WeightFormat;
use crate::model::format::{from_e4m3, group_scale, to_bf16};

/// A tensor of a file: a matrix, or a vector as its one row.
#[derive(Debug, Clone)]
pub(super) struct Part {
    pub name: Box<str>,
    pub file: usize,
    /// Bytes of the file.
    pub bytes: Range<usize>,
    pub dtype: Dtype,
    pub rows: usize,
    pub columns: usize,
}

/// Where a tensor of the model lies.
#[derive(Debug, Clone)]
pub(super) struct Place {
    /// 1 for a vector.
    pub rows: usize,
    pub columns: usize,
    /// As it is stored.
    pub format: WeightFormat,
    pub values: Values,
    pub scales: Scales,
    pub zeros: Option<Words>,
    pub groups: Groups,
    /// Values are read times their scales, in bf16.
    pub expanded: bool,
}

#[derive(Debug, Clone)]
pub(super) enum Values {
    /// Each for itself, in the part's dtype, row by row.
    Single(Part),
    Words(Words),
}

#[derive(Debug, Clone)]
pub(super) enum Scales {
    None,
    /// One a row, or one of all.
    Rows(Box<[f32]>),
    Groups(GroupScales),
}

/// A scale for each group of columns, of each row or block of rows.
#[derive(Debug, Clone)]
pub(super) struct GroupScales {
    pub part: Part,
    /// Rows that have the same.
    pub block: usize,
    /// `[groups, rows]`; else `[rows, groups]`.
    pub across: bool,
}

/// Which columns are of which group.
#[derive(Debug, Clone)]
pub(super) enum Groups {
    /// So many after each other.
    Runs(usize),
    /// The group of each.
    Listed(Box<[u32]>),
}

impl Values {
    pub fn part(&self) -> &Part {
        match self {
            Self::Single(part) => part,
            Self::Words(words) => &words.part,
        }
    }
}

impl GroupScales {
    /// Row and column of the part that has the scale.
    pub fn at(&self, row: usize, group: usize) -> (usize, usize) {
        let row = row / self.block;
        if self.across { (group, row) } else { (row, group) }
    }

    /// The scale of a row's group.
    pub fn value(&self, data: &[u8], row: usize, group: usize) -> bf16 {
        let (row, column) = self.at(row, group);
        group_scale(float(data, self.part.dtype, row * self.part.columns + column))
    }
}

impl Place {
    /// The format of what is read.
    pub fn read_format(&self) -> WeightFormat {
        if self.expanded { WeightFormat::Bf16 } else { self.format }
    }

    /// How many groups a row has.
    pub fn groups(&self) -> usize {
        match &self.groups {
            Groups::Runs(columns) => self.columns.div_ceil(*columns),
            Groups::Listed(groups) => groups.iter().max().map_or(0, |last| *last as usize + 1),
        }
    }

    /// The group of a column.
    pub fn group(&self, column: usize) -> usize {
        match &self.groups {
            Groups::Runs(columns) => column / columns,
            Groups::Listed(groups) => groups[column] as usize,
        }
    }

    /// The parts that are mapped, and the rows of each that `rows` lie in; `None`: in all.
    pub fn parts(&self, rows: Range<usize>) -> impl Iterator<Item = (&Part, Option<Range<usize>>)> {
        let values = match &self.values {
            Values::Single(part) => (part, Some(rows.clone())),
            Values::Words(words) => (&words.part, words.stored_rows(&rows)),
        };
        let scales = match &self.scales {
            Scales::Groups(scales) => {
                let block = rows.start / scales.block..rows.end.div_ceil(scales.block);
                Some((&scales.part, (!scales.across).then_some(block)))
            }
            Scales::None | Scales::Rows(_) => None,
        };
        let zeros = self.zeros.as_ref().map(|zeros| (&zeros.part, zeros.stored_rows(&rows)));
        [Some(values), scales, zeros].into_iter().flatten()
    }
}

/// What stored values become: `stored` is a bf16, or 0 to 15 in its place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Finish {
    /// Of values of 4 bits.
    pub zero: Option<u8>,
    /// Of those that are expanded.
    pub scale: Option<f32>,
}

impl Finish {
    /// Finishes values that have zero point and scale in common.
    pub fn all(self, values: &mut [bf16]) {
        match (self.zero, self.scale) {
            (None, None) => {}
            // Whole numbers up to 15 in size: cutting their bits off rounds nothing.
            (Some(zero), None) => values.iter_mut().for_each(|value| {
                *value = bf16::from_bits((whole(*value, zero).to_bits() >> 16) as u16);
            }),
            (Some(zero), Some(scale)) => {
                values.iter_mut().for_each(|value| *value = to_bf16(whole(*value, zero) * scale));
            }
            (None, Some(scale)) => {
                values.iter_mut().for_each(|value| *value = to_bf16(value.to_f32() * scale));
            }
        }
    }
}

fn whole(stored: bf16, zero: u8) -> f32 {
    f32::from(stored.to_bits() as i16 - i16::from(zero))
}

/// A number of bf16, f16 or f32.
pub(super) fn float(data: &[u8], dtype: Dtype, index: usize) -> f32 {
    const WHOLE: &str = "the part holds whole numbers";
    match dtype {
        Dtype::F32 => f32::from_le_bytes(*data[index * 4..].first_chunk().expect(WHOLE)),
        Dtype::BF16 => bf16::from_le_bytes(*data[index * 2..].first_chunk().expect(WHOLE)).to_f32(),
        Dtype::F16 => f16::from_le_bytes(*data[index * 2..].first_chunk().expect(WHOLE)).to_f32(),
        other => unreachable!("{other} was refused when the file was opened"),
    }
}

/// Little-endian values of `dtype` to bf16, and whether all of these are finite. The bytes need not be aligned.
pub(super) fn convert(bytes: &[u8], dtype: Dtype, out: &mut [bf16]) -> bool {
    match dtype {
        Dtype::BF16 => convert_with(bytes, out, bf16::from_le_bytes),
        Dtype::F16 => convert_with(bytes, out, |bytes| bf16::from_f32(f16::from_le_bytes(bytes).to_f32())),
        Dtype::F32 => convert_with(bytes, out, |bytes| bf16::from_f32(f32::from_le_bytes(bytes))),
        Dtype::F8_E4M3 => convert_with(bytes, out, |[bits]| from_e4m3(bits)),
        other => unreachable!("{other} was refused when the file was opened"),
    }
}

/// One loop for both, without a branch, so that it vectorises and takes as long as the conversion alone.
#[inline(always)]
fn convert_with<const N: usize>(bytes: &[u8], out: &mut [bf16], value: impl Fn([u8; N]) -> bf16) -> bool {
    let mut not_finite = 0;
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = value(*bytes);
        not_finite |= not_finite_bit(*out);
    }
    not_finite == 0
}

/// Whether all values are finite.
pub(super) fn are_finite(values: &[bf16]) -> bool {
    values.iter().fold(0, |not_finite, value| not_finite | not_finite_bit(*value)) == 0
}

fn not_finite_bit(value: bf16) -> u16 {
    const EXPONENT: u16 = 0x7f80;
    u16::from(value.to_bits() & EXPONENT == EXPONENT)
}
