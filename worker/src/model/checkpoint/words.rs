//! Values of 4 bits, eight in a little-endian word.

use std::ops::Range;

use super::place::Part;

/// Where the bits of row 0 to 7 of a word lie in AWQ: fourth of a word by fourth.
const AWQ_PLACES: [u8; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
/// In order.
const PLACES: [u8; 8] = [0, 1, 2, 3, 4, 5, 6, 7];

/// Which values of a matrix share a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Eight {
    /// Of a column, eight rows, which lie at these fourths.
    Rows([u8; 8]),
    /// Of a row, eight columns, the first one lowest.
    Columns,
}

/// A matrix of 4 bits.
#[derive(Debug, Clone)]
pub(super) struct Words {
    pub part: Part,
    eight: Eight,
    /// Words from a row, or eight of them, to the next.
    row_stride: usize,
    /// Words from a column, or eight of them, to the next.
    column_stride: usize,
    /// What a word lacks.
    added: u32,
}

impl Words {
    /// `[rows, columns / 8]`.
    pub fn along_rows(part: Part) -> Self {
        let row_stride = part.columns;
        Self { part, eight: Eight::Columns, row_stride, column_stride: 1, added: 0 }
    }

    /// `[columns / 8, rows]`.
    pub fn along_columns_across(part: Part) -> Self {
        let column_stride = part.columns;
        Self { part, eight: Eight::Columns, row_stride: 1, column_stride, added: 0 }
    }

    /// `[rows / 8, columns]`.
    pub fn of_rows(part: Part) -> Self {
        let row_stride = part.columns;
        Self { part, eight: Eight::Rows(PLACES), row_stride, column_stride: 1, added: 0 }
    }

    /// `[columns, rows / 8]`; `awq`: in its order.
    pub fn of_rows_across(part: Part, awq: bool) -> Self {
        let column_stride = part.columns;
        let places = if awq { AWQ_PLACES } else { PLACES };
        Self { part, eight: Eight::Rows(places), row_stride: 1, column_stride, added: 0 }
    }

    /// These, of which 1 was taken from each of the eight of each word, as one number: a 0 borrowed from the next.
    /// (GPTQModel 7.7, `convert_gptq_v2_to_v1_format_module`. AutoGPTQ's words are the same, but for those of a 0.)
    pub fn less_one(self) -> Self {
        Self { added: 0x1111_1111, ..self }
    }

    /// Stored rows that a range of rows lies in; `None`: in all, if the matrix lies across.
    pub fn stored_rows(&self, rows: &Range<usize>) -> Option<Range<usize>> {
        let across = self.row_stride == 1;
        let each = if self.eight == Eight::Columns { 1 } else { 8 };
        (!across).then(|| rows.start / each..rows.end.div_ceil(each))
    }

    fn word(&self, data: &[u8], index: usize) -> u32 {
        let bytes = data[index * 4..].first_chunk().expect("the part holds whole words");
        u32::from_le_bytes(*bytes).wrapping_add(self.added)
    }

    /// The value in a row and column.
    pub fn at(&self, data: &[u8], row: usize, column: usize) -> u8 {
        let (word, place) = match self.eight {
            Eight::Rows(places) => (row / 8 * self.row_stride + column * self.column_stride, places[row % 8]),
            Eight::Columns => (row * self.row_stride + column / 8 * self.column_stride, (column % 8) as u8),
        };
        (self.word(data, word) >> (4 * place) & 15) as u8
    }

    /// Writes `rows` x `columns` to `out`, row-major; no column: nothing.
    pub fn read(&self, data: &[u8], rows: Range<usize>, columns: Range<usize>, out: &mut [u16]) {
        if columns.is_empty() {
            return;
        }
        let eights = columns.start / 8..columns.end.div_ceil(8);
        match self.eight {
            Eight::Rows(places) => self.read_rows(data, places, &rows, &columns, out),
            // Word after word of the file, as far as there are some.
            Eight::Columns if self.column_stride == 1 => {
                for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
                    for eight in eights.clone() {
                        write_eight(self.word(data, row * self.row_stride + eight), eight, &columns, out);
                    }
                }
            }
            Eight::Columns => {
                for eight in eights {
                    for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns.len())) {
                        write_eight(self.word(data, row + eight * self.column_stride), eight, &columns, out);
                    }
                }
            }
        }
    }

    fn read_rows(&self, data: &[u8], places: [u8; 8], rows: &Range<usize>, columns: &Range<usize>, out: &mut [u16]) {
        for eight in rows.start / 8..rows.end.div_ceil(8) {
            let within = (eight * 8).max(rows.start)..(eight * 8 + 8).min(rows.end);
            let out = &mut out[(within.start - rows.start) * columns.len()..][..within.len() * columns.len()];
            let places = &places[within.start % 8..][..within.len()];
            for (index, column) in columns.clone().enumerate() {
                let word = self.word(data, eight * self.row_stride + column * self.column_stride);
                for (out, place) in out.chunks_exact_mut(columns.len()).zip(places) {
                    out[index] = (word >> (4 * place) & 15) as u16;
                }
            }
        }
    }
}

/// Writes the eight columns of a word, as far as they are asked for, to a row.
#[inline]
fn write_eight(word: u32, eight: usize, columns: &Range<usize>, out: &mut [u16]) {
    let first = eight * 8;
    if columns.start <= first && first + 8 <= columns.end {
        let out: &mut [u16; 8] = (&mut out[first - columns.start..][..8]).try_into().expect("eight of them");
        for (place, out) in out.iter_mut().enumerate() {
            *out = (word >> (4 * place) & 15) as u16;
        }
        return;
    }
    for column in first.max(columns.start)..(first + 8).min(columns.end) {
        out[column - columns.start] = (word >> (4 * (column - first)) & 15) as u16;
    }
}
