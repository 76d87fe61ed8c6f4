//! Which tensors of the files make up a tensor of the model: found, and checked against config.json.

use std::path::Path;

use safetensors::tensor::{Dtype, TensorInfo};

use super::CheckpointError;
use super::files::{Lookup, MappedFile};
use super::place::{GroupScales, Groups, Part, Place, Scales, Values, float};
use super::words::Words;
use crate::model::storage::{Packing, Storage};
use crate::model::{ModelConfig, Tensor, WeightFormat};

/// Dtypes of weights without scales, and of scales.
const FLOATS: (&[Dtype], &str) = (&[Dtype::BF16, Dtype::F16, Dtype::F32], "BF16, F16 or F32");
const E4M3: (&[Dtype], &str) = (&[Dtype::F8_E4M3], "F8_E4M3");
const I32: (&[Dtype], &str) = (&[Dtype::I32], "I32");
const I64: (&[Dtype], &str) = (&[Dtype::I64], "I64");

/// The tensors of a directory.
pub(super) struct Finder<'a> {
    pub files: &'a [MappedFile],
    pub lookup: &'a Lookup,
    pub config: &'a ModelConfig,
}

impl Finder<'_> {
    /// Where a tensor of the model lies.
    pub fn place(&self, tensor: Tensor) -> Result<Place, CheckpointError> {
        let (name, shape) = (tensor.name(self.config), tensor.shape(self.config));
        let [rows, columns] = match shape[..] {
            [rows, columns] => [rows, columns],
            _ => [1, shape[0]],
        };
        let storage = if tensor.is_streamed_in_layers() { self.config.storage } else { Storage::Plain };
        let place = |values, scales, zeros, groups| {
            let format = storage.format();
            Place { rows, columns, format, values, scales, zeros, groups, expanded: false }
        };
        let whole = Groups::Runs(columns);
        match storage {
            _ if self.is_plain(&name, storage)? => {
                let part = self.part(&name, &shape, FLOATS)?;
                let plain = place(Values::Single(part), Scales::None, None, whole);
                Ok(Place { format: WeightFormat::Bf16, ..plain })
            }
            Storage::Plain => unreachable!("plain tensors are plain"),
            Storage::E4m3 => {
                let values = Values::Single(self.part(&name, &shape, E4M3)?);
                Ok(place(values, Scales::Rows(self.row_scales(&name, rows)?), None, whole))
            }
            Storage::E4m3Blocks { rows: block, columns: group, scales } => {
                let values = Values::Single(self.part(&name, &shape, E4M3)?);
                let blocks = [rows.div_ceil(block), columns.div_ceil(group)];
                let part = self.part(&beside(&name, scales), &blocks, FLOATS)?;
                let scales = Scales::Groups(GroupScales { part, block, across: false });
                Ok(place(values, scales, None, Groups::Runs(group)))
            }
            Storage::Int4 { packing, group, zeros, ordered } => {
                let group = group.unwrap_or(columns);
                let groups = columns.div_ceil(group);
                let words = |suffix, shape: [usize; 2]| self.part(&beside(&name, suffix), &shape, I32);
                let floats = |suffix, shape: [usize; 2]| self.part(&beside(&name, suffix), &shape, FLOATS);
                let [eight_rows, eight_columns] = [rows.div_ceil(8), columns.div_ceil(8)];
                let (values, scales, zeros, order) = match packing {
                    Packing::CompressedTensors => {
                        self.check_weight_shape(&name, &shape)?;
                        let values = Words::along_rows(words("weight_packed", [rows, eight_columns])?);
                        let zero = zeros.then(|| words("weight_zero_point", [eight_rows, groups])).transpose()?;
                        let scales = floats("weight_scale", [rows, groups])?;
                        (values, scales, zero.map(Words::of_rows), "weight_g_idx")
                    }
                    Packing::Awq => {
                        let values = Words::of_rows_across(words("qweight", [columns, eight_rows])?, true);
                        let zeros = Words::of_rows_across(words("qzeros", [groups, eight_rows])?, true);
                        (values, floats("scales", [groups, rows])?, Some(zeros), "")
                    }
                    Packing::Gptq { less_one } => {
                        let values = Words::along_columns_across(words("qweight", [eight_columns, rows])?);
                        let zeros = Words::of_rows_across(words("qzeros", [groups, eight_rows])?, false);
                        let zeros = if less_one { zeros.less_one() } else { zeros };
                        (values, floats("scales", [groups, rows])?, Some(zeros), "g_idx")
                    }
                };
                let listed = self.listed(&beside(&name, order), columns, group, ordered)?;
                let across = packing != Packing::CompressedTensors;
                let scales = Scales::Groups(GroupScales { part: scales, block: 1, across });
                // Groups that are no runs of columns have no format but that of their weights.
                let expanded = listed.is_some();
                let groups = listed.map_or(Groups::Runs(group), Groups::Listed);
                Ok(Place { expanded, ..place(Values::Words(values), scales, zeros, groups) })
            }
        }
    }

    /// Whether a matrix is stored in full, though others may not be: it has a weight, and nothing that scales it.
    fn is_plain(&self, name: &str, storage: Storage) -> Result<bool, CheckpointError> {
        let of_fewer_bits = match storage {
            Storage::Plain => return Ok(true),
            Storage::E4m3 => beside(name, "weight_scale"),
            Storage::E4m3Blocks { scales, .. } => beside(name, scales),
            Storage::Int4 { packing: Packing::CompressedTensors, .. } => beside(name, "weight_packed"),
            Storage::Int4 { .. } => beside(name, "qweight"),
        };
        let info = |name: &str| Ok(self.file(name)?.ok().and_then(|file| self.files[file].header.info(name)));
        let is_float = |info: &TensorInfo| FLOATS.0.contains(&info.dtype);
        Ok(info(&of_fewer_bits)?.is_none() && info(name)?.is_some_and(is_float))
    }

    /// A tensor of a shape and one of some dtypes.
    fn part(
        &self,
        name: &str,
        shape: &[usize],
        (dtypes, expected): (&[Dtype], &'static str),
    ) -> Result<Part, CheckpointError> {
        let missing =
            |path: &Path| CheckpointError::Missing { path: path.into(), tensor: name.into(), shape: shape.into() };
        let file = self.file(name)?.map_err(missing)?;
        let MappedFile { path, header, data_start, .. } = &self.files[file];
        let info = header.info(name).ok_or_else(|| missing(path))?;
        if info.shape != shape {
            let (path, got, expected) = (path.clone(), info.shape.clone(), shape.into());
            return Err(CheckpointError::Shape { path, tensor: name.into(), got, expected });
        }
        if !dtypes.contains(&info.dtype) {
            let (path, dtype) = (path.clone(), info.dtype.to_string());
            return Err(CheckpointError::Dtype { path, tensor: name.into(), dtype, expected });
        }
        let [rows, columns] = match *shape {
            [rows, columns] => [rows, columns],
            _ => [1, shape.iter().product()],
        };
        // The header was checked against the length of the file and the shape, so this range is in the map.
        let bytes = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
        Ok(Part { name: name.into(), file, bytes, dtype: info.dtype, rows, columns })
    }

    /// The file that has a tensor, or what was looked into where none has.
    fn file(&self, name: &str) -> Result<Result<usize, &Path>, CheckpointError> {
        match self.lookup {
            Lookup::Index { path, files } => Ok(files.get(name).copied().ok_or(path)),
            Lookup::Search { dir } => {
                let mut holders = (0..self.files.len()).filter(|f| self.files[*f].header.info(name).is_some());
                let whole = if self.files.len() == 1 { &self.files[0].path } else { dir };
                let Some(first) = holders.next() else { return Ok(Err(whole)) };
                if let Some(second) = holders.next() {
                    let [first, second] = [first, second].map(|f| self.files[f].path.clone());
                    return Err(CheckpointError::Twice { tensor: name.into(), first, second });
                }
                Ok(Ok(first))
            }
        }
    }

    fn bytes(&self, part: &Part) -> &[u8] {
        &self.files[part.file].map[part.bytes.clone()]
    }

    /// The scales of the matrix `name` of so many rows: one a row or one of all.
    fn row_scales(&self, name: &str, rows: usize) -> Result<Box<[f32]>, CheckpointError> {
        let name = beside(name, "weight_scale");
        let missing =
            |path: &Path| CheckpointError::Missing { path: path.into(), tensor: name.clone(), shape: vec![rows, 1] };
        let MappedFile { path, header, .. } = &self.files[self.file(&name)?.map_err(missing)?];
        let shape = &header.info(&name).ok_or_else(|| missing(path))?.shape;
        let count = shape.iter().product::<usize>();
        if (count != rows && count != 1) || shape.iter().skip(1).any(|n| *n != 1) {
            let (path, got) = (path.clone(), shape.clone());
            return Err(CheckpointError::Shape { path, tensor: name, got, expected: vec![rows, 1] });
        }
        let part = self.part(&name, shape, FLOATS)?;
        let scales: Box<[f32]> = (0..count).map(|row| float(self.bytes(&part), part.dtype, row)).collect();
        match scales.iter().position(|scale| !(scale.is_finite() && *scale >= 0.0)) {
            None => Ok(scales),
            Some(row) => {
                let (path, value) = (path.clone(), scales[row]);
                Err(CheckpointError::Scale { path, tensor: name, row, column: 0, value })
            }
        }
    }

    /// The group of each column, where these are not what `group` columns after each other make; `required`: a tensor
    /// has to say so.
    fn listed(
        &self,
        name: &str,
        columns: usize,
        group: usize,
        required: bool,
    ) -> Result<Option<Box<[u32]>>, CheckpointError> {
        if !required && self.file(name)?.is_err() {
            return Ok(None);
        }
        let part = self.part(name, &[columns], I32)?;
        let listed: Vec<i32> = self.bytes(&part).as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        // compressed-tensors leaves it so where columns are in order.
        if listed.contains(&-1)
            || listed.iter().enumerate().all(|(column, of)| usize::try_from(*of) == Ok(column / group))
        {
            return Ok(None);
        }
        let groups = columns.div_ceil(group);
        match listed.iter().position(|of| usize::try_from(*of).map_or(true, |of| of >= groups)) {
            None => Ok(Some(listed.into_iter().map(|of| of as u32).collect())),
            Some(column) => Err(CheckpointError::Group {
                path: self.files[part.file].path.clone(),
                tensor: name.into(),
                column,
                value: listed[column],
                groups,
            }),
        }
    }

    /// Holds `weight_shape`, which says what the packed words do not, to what config.json says.
    fn check_weight_shape(&self, name: &str, expected: &[usize]) -> Result<(), CheckpointError> {
        let name = beside(name, "weight_shape");
        if self.file(&name)?.is_err() {
            return Ok(());
        }
        let part = self.part(&name, &[expected.len()], I64)?;
        let got = self.bytes(&part).as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes));
        let got: Vec<usize> = got.map(|size| usize::try_from(size).unwrap_or(0)).collect();
        if got == expected {
            return Ok(());
        }
        let path = self.files[part.file].path.clone();
        Err(CheckpointError::Shape { path, tensor: name, got, expected: expected.into() })
    }

    /// Refuses layers that config.json does not count: the model would run without them, and say nothing of sense.
    pub fn check_layers(&self) -> Result<(), CheckpointError> {
        let layer_of = |name: &str| name.strip_prefix("model.layers.")?.split_once('.')?.0.parse::<usize>().ok();
        let all = self.files.iter().flat_map(|file| file.header.tensors().into_keys().map(move |name| (file, name)));
        let more = all.filter_map(|(file, name)| Some((layer_of(&name)?, name, file)));
        let more: Vec<_> = more.filter(|(layer, ..)| *layer >= self.config.num_layers).collect();
        let Some((layer, tensor, file)) = more.iter().min_by_key(|(layer, name, _)| (*layer, name)) else {
            return Ok(());
        };
        Err(CheckpointError::Layers {
            path: file.path.clone(),
            tensor: tensor.clone(),
            layer: *layer,
            layers: self.config.num_layers,
            found: more.iter().map(|(layer, ..)| layer + 1).max().unwrap_or(0),
        })
    }
}

/// The name of a tensor beside `....weight`.
fn beside(name: &str, suffix: &str) -> String {
    name.strip_suffix("weight").unwrap_or(name).to_owned() + suffix
}
