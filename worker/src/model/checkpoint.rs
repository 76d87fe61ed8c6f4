//! The weights of a checkpoint: safetensors files, mapped, checked up front and read by slice.
//!
//! A rank reads its own slices alone. The files are mapped, not read: what stays in memory beside the rank's shard is
//! the headers, and the pages just read, until [`Checkpoint::release`] gives them back.

mod error;
mod files;
mod find;
mod found;
mod header;
mod place;
#[cfg(test)]
pub(crate) mod tests;
mod words;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use half::bf16;
use sha2::{Digest, Sha256};

use super::format::{GROUP_SCALE_MAX, MIDDLE};
use super::{ModelConfig, Tensor};
use files::{MappedFile, open_files, release};
use find::Finder;
use found::{one_format, rounded};
use place::{Finish, GroupScales, Groups, Part, Place, Scales, Values, are_finite, convert};

pub use error::CheckpointError;

/// The system maps pages on both sides of the one that is read, while it is at it: those of one huge page at most.
const MAPPED_AROUND: usize = 2 << 20;

/// Matrices that lie across, of which a few rows are in all pages, stay mapped until so many others were read from: as
/// many as a product has.
const HELD: usize = 3;

/// The weights of a model: every tensor of the architecture is there, with its shape, and can be read.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    files: Vec<MappedFile>,
    tensors: BTreeMap<Tensor, Place>,
    /// Those that lie across and are mapped, first read first.
    held: Mutex<VecDeque<Tensor>>,
    /// The first of what was read and cannot be.
    fault: Mutex<Option<(At, Fault)>>,
    notes: Vec<String>,
}

/// Tensor of the model, row, column.
type At = (Tensor, usize, usize);

/// What cannot be there.
#[derive(Debug, Clone, Copy)]
enum Fault {
    /// A weight that is not finite.
    Weight(bf16),
    /// A scale that is not finite, or too large.
    Scale(bf16),
    /// A zero point where groups are symmetric.
    Zero(u8),
}

impl Checkpoint {
    /// Maps the weights in `dir` and checks that every tensor of the model is there with its shape, and no more layers.
    /// Other tensors that the model does not use are not looked at.
    ///
    /// # Errors
    /// Names file, tensor and numbers; or the layers' matrices are not all stored as config.json says.
    pub fn open(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_as_found(dir, config)?;
        if checkpoint.config.layer_weights == config.layer_weights {
            return Ok(checkpoint);
        }
        Err(CheckpointError::Mixed { dir: dir.into(), format: config.layer_weights })
    }

    /// As [`Self::open`], of a model whose matrices may be stored otherwise: some in fewer bits and others plain, or
    /// with groups that are not runs of columns. [`Self::config`] says what is read: of such a model bf16, times
    /// scales.
    ///
    /// # Errors
    /// Names file, tensor and numbers.
    pub fn open_as_found(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let (files, lookup) = open_files(dir)?;
        let finder = Finder { files: &files, lookup: &lookup, config };
        let places = Tensor::all(config).into_iter().map(|tensor| Ok((tensor, finder.place(tensor)?)));
        let mut tensors = places.collect::<Result<BTreeMap<_, _>, CheckpointError>>()?;
        finder.check_layers()?;
        let mut notes = rounded(&files, &tensors);
        let layer_weights = one_format(config.layer_weights, &mut tensors, &mut notes);
        let config = ModelConfig { layer_weights, ..config.clone() };
        Ok(Self { config, files, tensors, held: Mutex::default(), fault: Mutex::default(), notes })
    }

    /// The dimensions that the tensors were checked against, and the format that they are read in.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the user should know: dtypes that are rounded to bf16, and matrices that are expanded. One sentence each.
    pub fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    /// Names the checkpoint in sixteen hexadecimal digits: `config` (the bytes of its config.json), and the header and
    /// length of every file that is read. The values of the weights are not in it: reading them all would take as long
    /// as the load itself.
    pub fn digest(&self, config: &[u8]) -> String {
        let mut hasher = Sha256::new();
        let mut part = |bytes: &[u8]| {
            hasher.update((bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(config);
        for file in &self.files {
            part(&file.map[..file.data_start]);
            part(&(file.map.len() as u64).to_le_bytes());
        }
        hasher.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Reads `rows` x `columns` of a tensor (of a vector: its one row) into `out`, `[rows.len(), columns.len()]` bf16
    /// row-major, rounding to nearest (ties to even) where the file has f16 or f32.
    ///
    /// # Panics
    /// If the model has no such tensor, a range leaves it, or `out` has another size.
    pub fn read(&self, tensor: Tensor, rows: Range<usize>, columns: Range<usize>, out: &mut [bf16]) {
        let place = self.place(tensor);
        assert!(rows.start <= rows.end && rows.end <= place.rows, "rows {rows:?} of {tensor:?}");
        assert!(columns.start <= columns.end && columns.end <= place.columns, "columns {columns:?} of {tensor:?}");
        assert_eq!(out.len(), rows.len() * columns.len(), "values of {tensor:?}");
        if columns.is_empty() {
            return;
        }
        match &place.values {
            Values::Single(part) => {
                let data = self.bytes(part);
                let value_bytes = part.dtype.bitsize() / 8;
                for (row, out) in rows.clone().zip(out.chunks_exact_mut(columns.len())) {
                    let start = row * place.columns;
                    let bytes = &data[(start + columns.start) * value_bytes..(start + columns.end) * value_bytes];
                    if !convert(bytes, part.dtype, out) {
                        self.note_not_finite(tensor, row, columns.start, out);
                    }
                }
            }
            Values::Words(words) => {
                words.read(self.bytes(&words.part), rows.clone(), columns.clone(), bytemuck::cast_slice_mut(out));
            }
        }
        if place.expanded || matches!(place.values, Values::Words(_)) {
            for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
                self.finish(tensor, place, row, columns.clone(), out);
            }
        }
    }

    /// Makes weights of stored values of a row: less their zero points, times their scales.
    fn finish(&self, tensor: Tensor, place: &Place, row: usize, columns: Range<usize>, out: &mut [bf16]) {
        match &place.groups {
            Groups::Runs(group) => {
                let mut first = columns.start;
                let mut rest = &mut out[..];
                while first < columns.end {
                    let end = (first / group * group + group).min(columns.end);
                    let (run, after) = rest.split_at_mut(end - first);
                    self.finish_of(tensor, place, row, first).all(run);
                    (first, rest) = (end, after);
                }
            }
            Groups::Listed(groups) => {
                // The first column of each group stands for it.
                let mut known = vec![None; place.groups()];
                for (column, value) in columns.clone().zip(out.iter_mut()) {
                    let finish = known[groups[column] as usize]
                        .get_or_insert_with(|| self.finish_of(tensor, place, row, column));
                    finish.all(std::slice::from_mut(value));
                }
            }
        }
        if place.expanded && !are_finite(out) {
            self.note_not_finite(tensor, row, columns.start, out);
        }
    }

    /// What becomes of the values of a row that are of a column's group.
    fn finish_of(&self, tensor: Tensor, place: &Place, row: usize, column: usize) -> Finish {
        let zero = match &place.values {
            Values::Single(_) => None,
            Values::Words(_) => Some(self.zero(tensor, place, row, column)),
        };
        Finish { zero, scale: place.expanded.then(|| self.scale(tensor, place, row, column)) }
    }

    fn zero(&self, tensor: Tensor, place: &Place, row: usize, column: usize) -> u8 {
        let Some(zeros) = &place.zeros else { return MIDDLE };
        let zero = zeros.at(self.bytes(&zeros.part), row, place.group(column));
        if zero != MIDDLE && !place.format.has_zeros() {
            self.note((tensor, row, column), Fault::Zero(zero));
        }
        zero
    }

    fn scale(&self, tensor: Tensor, place: &Place, row: usize, column: usize) -> f32 {
        match &place.scales {
            Scales::None => 1.0,
            Scales::Rows(scales) => {
                if scales.len() == 1 {
                    scales[0]
                } else {
                    scales[row]
                }
            }
            Scales::Groups(scales) => {
                let scale = scales.value(self.bytes(&scales.part), row, place.group(column));
                // What is not a number is not in it either.
                if !(0.0..=GROUP_SCALE_MAX).contains(&scale.to_f32().abs()) {
                    self.note((tensor, row, column), Fault::Scale(scale));
                }
                scale.to_f32()
            }
        }
    }

    /// Writes the scales of `rows` of a tensor at `column`; 1 where it has none, or is read times its scales. Those of
    /// groups are rounded to bf16.
    ///
    /// # Panics
    /// If the model has no such tensor, rows or column leave it, or `out` has another size.
    pub fn scales(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [f32]) {
        let place = self.place(tensor);
        assert!(rows.start <= rows.end && rows.end <= place.rows, "rows {rows:?} of {tensor:?}");
        assert!(column < place.columns && rows.len() == out.len(), "column {column} of {tensor:?}");
        if place.expanded {
            return out.fill(1.0);
        }
        rows.zip(out).for_each(|(row, out)| *out = self.scale(tensor, place, row, column));
    }

    /// Writes the zero points of `rows` of a tensor at `column`; [`MIDDLE`] where it has none, or is read times its
    /// scales.
    ///
    /// # Panics
    /// As [`Self::scales`].
    pub fn zeros(&self, tensor: Tensor, rows: Range<usize>, column: usize, out: &mut [u8]) {
        let place = self.place(tensor);
        assert!(rows.start <= rows.end && rows.end <= place.rows, "rows {rows:?} of {tensor:?}");
        assert!(column < place.columns && rows.len() == out.len(), "column {column} of {tensor:?}");
        if place.expanded {
            return out.fill(MIDDLE);
        }
        rows.zip(out).for_each(|(row, out)| *out = self.zero(tensor, place, row, column));
    }

    fn bytes(&self, part: &Part) -> &[u8] {
        &self.files[part.file].map[part.bytes.clone()]
    }

    #[cold]
    fn note_not_finite(&self, tensor: Tensor, row: usize, first_column: usize, values: &[bf16]) {
        let Some((place, value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) else { return };
        self.note((tensor, row, first_column + place), Fault::Weight(*value));
    }

    #[cold]
    fn note(&self, at: At, fault: Fault) {
        let mut first = self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        if first.as_ref().is_none_or(|(first, _)| at < *first) {
            *first = Some((at, fault));
        }
    }

    /// Whether all weights that were read are finite, and scales and zero points what they can be: asked once a rank
    /// has its own.
    ///
    /// # Errors
    /// Names the first that is not, in the order of tensors, rows and columns.
    pub fn check_finite(&self) -> Result<(), CheckpointError> {
        let first = *self.fault.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(((tensor, row, column), fault)) = first else { return Ok(()) };
        let place = self.place(tensor);
        let (path, group) = (|part: &Part| self.files[part.file].path.clone(), place.group(column));
        Err(match (fault, &place.scales, &place.zeros) {
            (Fault::Scale(value), Scales::Groups(scales), _) => {
                let GroupScales { part, .. } = scales;
                let ((row, column), tensor) = (scales.at(row, group), part.name.to_string());
                CheckpointError::Scale { path: path(part), tensor, row, column, value: value.to_f32() }
            }
            (Fault::Zero(value), _, Some(zeros)) => {
                let tensor = zeros.part.name.to_string();
                CheckpointError::Zero { path: path(&zeros.part), tensor, row, group, value }
            }
            (Fault::Weight(value) | Fault::Scale(value), ..) => {
                let tensor = place.values.part().name.to_string();
                CheckpointError::NotFinite { path: path(place.values.part()), tensor, row, column, value }
            }
            (Fault::Zero(_), ..) => unreachable!("a zero point was read"),
        })
    }

    /// Gives the memory that reading `rows` of a tensor has mapped back to the system; they can be read again. Called
    /// for each piece that is read, so that a thread never holds more of the files than one piece.
    ///
    /// A matrix that lies across has some of each row in all pages: it stays mapped until [`HELD`] others were read,
    /// because each piece would read all of it from the system again.
    ///
    /// # Panics
    /// If the model has no such tensor, or the rows leave it.
    pub fn release(&self, tensor: Tensor, rows: Range<usize>) {
        let place = self.place(tensor);
        assert!(rows.start <= rows.end && rows.end <= place.rows, "rows {rows:?} of {tensor:?}");
        if place.parts(rows.clone()).all(|(_, stored)| stored.is_some()) {
            return self.release_parts(place, rows);
        }
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.contains(&tensor) {
            return;
        }
        held.push_back(tensor);
        let oldest = if held.len() > HELD { held.pop_front() } else { None };
        drop(held);
        if let Some(place) = oldest.map(|tensor| self.place(tensor)) {
            self.release_parts(place, 0..place.rows);
        }
    }

    fn release_parts(&self, place: &Place, rows: Range<usize>) {
        for (part, stored) in place.parts(rows) {
            let stored = stored.unwrap_or(0..part.rows);
            let row_bytes = part.columns * part.dtype.bitsize() / 8;
            let [start, end] = [stored.start, stored.end].map(|row| part.bytes.start + row * row_bytes);
            let map = &self.files[part.file].map;
            release(map, start.saturating_sub(MAPPED_AROUND)..end.saturating_add(MAPPED_AROUND).min(map.len()));
        }
    }

    fn place(&self, tensor: Tensor) -> &Place {
        // Tied: the head's tensor is the embedding's.
        let tensor = if tensor == Tensor::LmHead && self.config.tied_embeddings { Tensor::Embedding } else { tensor };
        self.tensors.get(&tensor).unwrap_or_else(|| panic!("a {} has no {tensor:?}", self.config.architecture.name()))
    }
}
