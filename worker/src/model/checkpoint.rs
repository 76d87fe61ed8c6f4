//! The weights of a checkpoint: safetensors files, mapped, checked up front and read by slice.
//!
//! A rank reads its own slices alone. The files are mapped, not read: what stays in memory beside the rank's shard is
//! the headers, and the pages just read, until [`Checkpoint::release`] gives them back.

mod error;
mod files;
mod header;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use half::{bf16, f16};
use safetensors::tensor::Dtype;
use sha2::{Digest, Sha256};

use super::format::{WeightFormat, from_e4m3};
use super::{ModelConfig, Tensor};
use files::{Lookup, MappedFile, open_files, release};

pub use error::CheckpointError;

/// The system maps pages on both sides of the one that is read, while it is at it: those of one huge page at most.
const MAPPED_AROUND: usize = 2 << 20;

/// Dtypes of weights without scales, and of scales.
const FLOATS: &str = "BF16, F16 or F32";

/// The weights of a model: every tensor of the architecture is there, with its shape, and can be read.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    files: Vec<MappedFile>,
    tensors: BTreeMap<Tensor, Place>,
    /// The first weight of those read that is not finite.
    not_finite: Mutex<Option<Weight>>,
}

/// A weight: tensor, row, column, and what it is.
type Weight = (Tensor, usize, usize, bf16);

/// Where a tensor lies.
#[derive(Debug, Clone)]
struct Place {
    file: usize,
    /// Bytes of the file.
    bytes: Range<usize>,
    dtype: Dtype,
    /// 1 for a vector.
    rows: usize,
    columns: usize,
    /// One a row, or one of all; empty where the tensor has none.
    scales: Box<[f32]>,
}

impl Checkpoint {
    /// Maps the weights in `dir` and checks that every tensor of the model is there with its shape, and no more layers.
    /// Other tensors that the model does not use are not looked at.
    ///
    /// # Errors
    /// Names file, tensor and numbers.
    pub fn open(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let (files, lookup) = open_files(dir)?;
        let mut tensors = BTreeMap::new();
        for tensor in Tensor::all(config) {
            tensors.insert(tensor, find(&files, &lookup, tensor, config)?);
        }
        check_layers(&files, config)?;
        Ok(Self { config: config.clone(), files, tensors, not_finite: Mutex::default() })
    }

    /// The dimensions that the tensors were checked against.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the user should know: dtypes that are rounded to bf16. One sentence a dtype.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        for dtype in [Dtype::F16, Dtype::F32] {
            let mut rounded = self.tensors.iter().filter(|(_, place)| place.dtype == dtype);
            if let Some((first, place)) = rounded.next() {
                let (more, name) = (rounded.count(), first.name(&self.config));
                let file = self.files[place.file].path.display();
                let others = if more > 0 { format!(" and {more} more tensors") } else { String::new() };
                notes.push(format!("{file}: {name}{others} rounded from {dtype} to BF16"));
            }
        }
        notes
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
        let data = &self.files[place.file].map[place.bytes.clone()];
        let value_bytes = place.dtype.bitsize() / 8;
        for (row, out) in rows.zip(out.chunks_exact_mut(columns.len())) {
            let start = row * place.columns;
            let bytes = &data[(start + columns.start) * value_bytes..(start + columns.end) * value_bytes];
            if !convert(bytes, place.dtype, out) {
                self.note_not_finite(tensor, row, columns.start, out);
            }
        }
    }

    /// Writes the scales of `rows` of a tensor; 1 where it has none.
    ///
    /// # Panics
    /// If the model has no such tensor, the rows leave it, or `out` has another size.
    pub fn scales(&self, tensor: Tensor, rows: Range<usize>, out: &mut [f32]) {
        let place = self.place(tensor);
        assert!(rows.start <= rows.end && rows.end <= place.rows, "rows {rows:?} of {tensor:?}");
        match &*place.scales {
            [] => out.fill(1.0),
            [of_all] => out.fill(*of_all),
            of_rows => out.copy_from_slice(&of_rows[rows]),
        }
    }

    #[cold]
    fn note_not_finite(&self, tensor: Tensor, row: usize, first_column: usize, values: &[bf16]) {
        let Some((place, value)) = values.iter().enumerate().find(|(_, value)| !value.is_finite()) else { return };
        let weight = (tensor, row, first_column + place, *value);
        let mut first = self.not_finite.lock().unwrap_or_else(PoisonError::into_inner);
        if first.as_ref().is_none_or(|first| (weight.0, weight.1, weight.2) < (first.0, first.1, first.2)) {
            *first = Some(weight);
        }
    }

    /// Whether all weights that were read are finite: asked once a rank has its own.
    ///
    /// # Errors
    /// Names the first that is not, in the order of tensors, rows and columns.
    pub fn check_finite(&self) -> Result<(), CheckpointError> {
        let first = *self.not_finite.lock().unwrap_or_else(PoisonError::into_inner);
        first.map_or(Ok(()), |(tensor, row, column, value)| {
            let path = self.files[self.place(tensor).file].path.clone();
            Err(CheckpointError::NotFinite { path, tensor: tensor.name(&self.config), row, column, value })
        })
    }

    /// Gives the memory that reading `rows` of a tensor has mapped back to the system; they can be read again. Called
    /// for each piece that is read, so that a thread never holds more of the files than one piece.
    ///
    /// # Panics
    /// If the model has no such tensor, or the rows leave it.
    pub fn release(&self, tensor: Tensor, rows: Range<usize>) {
        let place = self.place(tensor);
        assert!(rows.start <= rows.end && rows.end <= place.rows, "rows {rows:?} of {tensor:?}");
        let row_bytes = place.columns * place.dtype.bitsize() / 8;
        let [start, end] = [rows.start, rows.end].map(|row| place.bytes.start + row * row_bytes);
        let map = &self.files[place.file].map;
        release(map, start.saturating_sub(MAPPED_AROUND)..end.saturating_add(MAPPED_AROUND).min(map.len()));
    }

    fn place(&self, tensor: Tensor) -> &Place {
        // Tied: the head's tensor is the embedding's.
        let tensor = if tensor == Tensor::LmHead && self.config.tied_embeddings { Tensor::Embedding } else { tensor };
        self.tensors.get(&tensor).unwrap_or_else(|| panic!("a {} has no {tensor:?}", self.config.architecture.name()))
    }
}

fn find(files: &[MappedFile], lookup: &Lookup, tensor: Tensor, config: &ModelConfig) -> Result<Place, CheckpointError> {
    let (name, expected) = (tensor.name(config), tensor.shape(config));
    let missing =
        |path: &Path| CheckpointError::Missing { path: path.into(), tensor: name.clone(), shape: expected.clone() };
    let file = find_file(files, lookup, &name, missing)?;
    let MappedFile { path, header, data_start, .. } = &files[file];
    let info = header.info(&name).ok_or_else(|| missing(path))?;
    if info.shape != expected {
        return Err(CheckpointError::Shape { path: path.clone(), tensor: name, got: info.shape.clone(), expected });
    }
    let format = if tensor.is_streamed_in_layers() { config.layer_weights } else { WeightFormat::Bf16 };
    let (readable, expected_dtype) = match format {
        WeightFormat::Bf16 => (matches!(info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32), FLOATS),
        WeightFormat::E4m3 => (info.dtype == Dtype::F8_E4M3, "F8_E4M3"),
        WeightFormat::E4m3Groups { .. } | WeightFormat::Int4 { .. } => unreachable!("no config.json says so"),
    };
    if !readable {
        let (path, dtype) = (path.clone(), info.dtype.to_string());
        return Err(CheckpointError::Dtype { path, tensor: name, dtype, expected: expected_dtype });
    }
    let scales = if format.has_row_scales() { find_scales(files, lookup, &name, expected[0])? } else { Box::default() };
    let [rows, columns] = match expected[..] {
        [rows, columns] => [rows, columns],
        _ => [1, expected[0]],
    };
    // The header was checked against the length of the file and the shape, so this range is in the map.
    let bytes = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
    Ok(Place { file, bytes, dtype: info.dtype, rows, columns, scales })
}

/// The file that has a tensor; `missing` is what is wrong where none has, of the file or directory that was looked
/// into.
fn find_file(
    files: &[MappedFile],
    lookup: &Lookup,
    name: &str,
    missing: impl Fn(&Path) -> CheckpointError,
) -> Result<usize, CheckpointError> {
    match lookup {
        Lookup::Index { path, files } => files.get(name).copied().ok_or_else(|| missing(path)),
        Lookup::Search { dir } => {
            let mut holders = (0..files.len()).filter(|f| files[*f].header.info(name).is_some());
            let whole = if files.len() == 1 { &files[0].path } else { dir };
            let first = holders.next().ok_or_else(|| missing(whole))?;
            if let Some(second) = holders.next() {
                let [first, second] = [first, second].map(|f| files[f].path.clone());
                return Err(CheckpointError::Twice { tensor: name.into(), first, second });
            }
            Ok(first)
        }
    }
}

/// The scales of the matrix `name` of so many rows: `.weight_scale` beside `.weight`, one a row or one of all.
fn find_scales(files: &[MappedFile], lookup: &Lookup, name: &str, rows: usize) -> Result<Box<[f32]>, CheckpointError> {
    let (tensor, shape) = (format!("{name}_scale"), vec![rows, 1]);
    let missing =
        |path: &Path| CheckpointError::Missing { path: path.into(), tensor: tensor.clone(), shape: shape.clone() };
    let MappedFile { path, header, data_start, map } = &files[find_file(files, lookup, &tensor, missing)?];
    let info = header.info(&tensor).ok_or_else(|| missing(path))?;
    let count = info.shape.iter().product::<usize>();
    if (count != rows && count != 1) || info.shape.iter().skip(1).any(|n| *n != 1) {
        let (path, got) = (path.clone(), info.shape.clone());
        return Err(CheckpointError::Shape { path, tensor, got, expected: shape });
    }
    let bytes = &map[data_start + info.data_offsets.0..data_start + info.data_offsets.1];
    let scales: Box<[f32]> = match info.dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        Dtype::BF16 => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
        Dtype::F16 => bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
        other => {
            let (path, dtype) = (path.clone(), other.to_string());
            return Err(CheckpointError::Dtype { path, tensor, dtype, expected: FLOATS });
        }
    };
    match scales.iter().position(|scale| !(scale.is_finite() && *scale >= 0.0)) {
        None => Ok(scales),
        Some(row) => Err(CheckpointError::Scale { path: path.clone(), tensor, row, value: scales[row] }),
    }
}

/// Refuses layers that config.json does not count: the model would run without them, and say nothing of sense.
fn check_layers(files: &[MappedFile], config: &ModelConfig) -> Result<(), CheckpointError> {
    let layer_of = |name: &str| name.strip_prefix("model.layers.")?.split_once('.')?.0.parse::<usize>().ok();
    let all = files.iter().flat_map(|file| file.header.tensors().into_keys().map(move |name| (file, name)));
    let more = all.filter_map(|(file, name)| Some((layer_of(&name)?, name, file)));
    let more: Vec<_> = more.filter(|(layer, ..)| *layer >= config.num_layers).collect();
    let Some((layer, tensor, file)) = more.iter().min_by_key(|(layer, name, _)| (*layer, name)) else { return Ok(()) };
    Err(CheckpointError::Layers {
        path: file.path.clone(),
        tensor: tensor.clone(),
        layer: *layer,
        layers: config.num_layers,
        found: more.iter().map(|(layer, ..)| layer + 1).max().unwrap_or(0),
    })
}

/// Little-endian values of `dtype` to bf16, and whether all of these are finite. The bytes need not be aligned.
fn convert(bytes: &[u8], dtype: Dtype, out: &mut [bf16]) -> bool {
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
    const EXPONENT: u16 = 0x7f80;
    let mut not_finite = 0;
    for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<N>().0) {
        *out = value(*bytes);
        not_finite |= u16::from(out.to_bits() & EXPONENT == EXPONENT);
    }
    not_finite == 0
}
