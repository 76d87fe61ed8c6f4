//! The weights of a checkpoint: safetensors files, mapped, checked up front and read by slice.
//!
//! A rank reads its own slices alone. The files are mapped, not read: what stays in memory beside the rank's shard is
//! the headers, and the pages just read, until [`Checkpoint::release`] gives them back.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use memmap2::{Mmap, UncheckedAdvice};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};
use safetensors::{SafeTensorError, SafeTensors};
use sha2::{Digest, Sha256};

use super::{ModelConfig, Tensor};

/// The system maps pages on both sides of the one that is read, while it is at it: those of one huge page at most.
const MAPPED_AROUND: usize = 2 << 20;

/// Why the weights of a model are refused: one sentence with file, tensor and numbers.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The directory or a file could not be read.
    #[error("{}: cannot be read: {source}", path.display())]
    Read {
        /// File or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// No weights in the directory.
    #[error("{}: holds no model.safetensors, no model.safetensors.index.json and no other .safetensors file", dir.display())]
    NoWeights {
        /// The directory.
        dir: PathBuf,
    },
    /// The index is not one.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// A safetensors header that does not describe its file.
    #[error("{}: {problem} (the file is {file_bytes} bytes long)", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong, with tensor and numbers.
        problem: String,
        /// Length of the file.
        file_bytes: u64,
    },
    /// Two files hold the same tensor.
    #[error("tensor {tensor} is both in {} and in {}", first.display(), second.display())]
    Twice {
        /// The tensor.
        tensor: String,
        /// A file.
        first: PathBuf,
        /// Another.
        second: PathBuf,
    },
    /// A tensor that the architecture needs is not there.
    #[error("{}: tensor {tensor} {shape:?} is missing", path.display())]
    Missing {
        /// Where it should be: the file, or the directory if any file could hold it.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its shape by config.json.
        shape: Vec<usize>,
    },
    /// A tensor has other dimensions than config.json says.
    #[error("{}: tensor {tensor} has shape {got:?}, but by config.json it is {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// In the file.
        got: Vec<usize>,
        /// By config.json.
        expected: Vec<usize>,
    },
    /// A tensor has a dtype that is not read.
    #[error("{}: tensor {tensor} is {dtype}; weights are BF16, F16 or F32", path.display())]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
    },
}

/// The weights of a model: every tensor of the architecture is there, with its shape, and can be read.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    files: Vec<MappedFile>,
    tensors: BTreeMap<Tensor, Place>,
}

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
}

/// A file of the checkpoint.
#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    /// First byte after the header.
    data_start: usize,
}

/// Which file holds which tensor, by index or by looking.
enum Lookup {
    Index { path: PathBuf, files: HashMap<String, usize> },
    Search { dir: PathBuf },
}

impl Checkpoint {
    /// Maps the weights in `dir` and checks that every tensor of the model is there with its shape. Tensors that the
    /// model does not use are not looked at.
    ///
    /// # Errors
    /// Names file, tensor and numbers.
    pub fn open(dir: &Path, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let (files, lookup) = open_files(dir)?;
        let mut tensors = BTreeMap::new();
        for tensor in Tensor::all(config) {
            tensors.insert(tensor, find(&files, &lookup, tensor, config)?);
        }
        Ok(Self { config: config.clone(), files, tensors })
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
    /// length of every file that is read. The values of the weights are not in it: reading them all would take as long as
    /// the load itself.
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

    /// Reads `rows` x `columns` of a tensor into `out`, `[rows.len(), columns.len()]` bf16 row-major, rounding to nearest
    /// (ties to even) where the file has f16 or f32.
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
            convert(
                &data[(start + columns.start) * value_bytes..(start + columns.end) * value_bytes],
                place.dtype,
                out,
            );
        }
    }

    /// Reads part of a vector (a norm or a bias) into `out`, rounding as [`Checkpoint::read`] does.
    ///
    /// # Panics
    /// As [`Checkpoint::read`].
    pub fn read_vector(&self, tensor: Tensor, range: Range<usize>, out: &mut [bf16]) {
        self.read(tensor, 0..1, range, out);
    }

    /// Gives the memory that reading `rows` of a tensor has mapped back to the system; they can be read again. Called for
    /// each piece that is read, so that a thread never holds more of the files than one piece.
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

fn open_files(dir: &Path) -> Result<(Vec<MappedFile>, Lookup), CheckpointError> {
    let single = dir.join("model.safetensors");
    let index = dir.join("model.safetensors.index.json");
    // As transformers does: a single file goes before an index that may be left over.
    if index.is_file() && !single.is_file() {
        return open_indexed(dir, index);
    }
    let mut paths = Vec::new();
    if single.is_file() {
        paths.push(single);
    } else {
        let read_error = |source| CheckpointError::Read { path: dir.into(), source };
        for entry in std::fs::read_dir(dir).map_err(read_error)? {
            let path = entry.map_err(read_error)?.path();
            if path.extension().is_some_and(|e| e == "safetensors") && path.is_file() {
                paths.push(path);
            }
        }
        paths.sort();
    }
    if paths.is_empty() {
        return Err(CheckpointError::NoWeights { dir: dir.into() });
    }
    let files = paths.into_iter().map(open_file).collect::<Result<_, _>>()?;
    Ok((files, Lookup::Search { dir: dir.into() }))
}

fn open_indexed(dir: &Path, path: PathBuf) -> Result<(Vec<MappedFile>, Lookup), CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Index {
        // Sorted, so that of several mistakes the same one is always reported.
        weight_map: BTreeMap<String, String>,
    }
    let wrong = |problem: String| CheckpointError::Index { path: path.clone(), problem };
    let text = std::fs::read(&path).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| wrong(format!("is not an index: {e}")))?;
    let mut files: Vec<MappedFile> = Vec::new();
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    let mut by_tensor = HashMap::with_capacity(index.weight_map.len());
    for (tensor, name) in &index.weight_map {
        let file = match by_name.get(name.as_str()) {
            Some(file) => *file,
            None => {
                // A path would let an index read files outside its directory.
                if Path::new(name).file_name().is_none_or(|only| only != name.as_str()) {
                    return Err(wrong(format!(
                        "tensor {tensor:?} is said to be in {name:?}, which is not a file name"
                    )));
                }
                let shard = dir.join(name);
                if !shard.is_file() {
                    return Err(wrong(format!(
                        "tensor {tensor:?} is said to be in {name:?}, but there is no such file"
                    )));
                }
                files.push(open_file(shard)?);
                by_name.insert(name, files.len() - 1);
                files.len() - 1
            }
        };
        if files[file].header.info(tensor).is_none() {
            return Err(wrong(format!("tensor {tensor:?} is said to be in {name:?}, but is not")));
        }
        by_tensor.insert(tensor.clone(), file);
    }
    Ok((files, Lookup::Index { path, files: by_tensor }))
}

fn find(files: &[MappedFile], lookup: &Lookup, tensor: Tensor, config: &ModelConfig) -> Result<Place, CheckpointError> {
    let (name, expected) = (tensor.name(config), tensor.shape(config));
    let missing =
        |path: &Path| CheckpointError::Missing { path: path.into(), tensor: name.clone(), shape: expected.clone() };
    let file = match lookup {
        Lookup::Index { path, files } => *files.get(&name).ok_or_else(|| missing(path))?,
        Lookup::Search { dir } => {
            let mut holders = (0..files.len()).filter(|f| files[*f].header.info(&name).is_some());
            let whole = if files.len() == 1 { &files[0].path } else { dir };
            let first = holders.next().ok_or_else(|| missing(whole))?;
            if let Some(second) = holders.next() {
                let [first, second] = [first, second].map(|f| files[f].path.clone());
                return Err(CheckpointError::Twice { tensor: name, first, second });
            }
            first
        }
    };
    let MappedFile { path, header, data_start, .. } = &files[file];
    let info = header.info(&name).ok_or_else(|| missing(path))?;
    if info.shape != expected {
        return Err(CheckpointError::Shape { path: path.clone(), tensor: name, got: info.shape.clone(), expected });
    }
    if !matches!(info.dtype, Dtype::BF16 | Dtype::F16 | Dtype::F32) {
        return Err(CheckpointError::Dtype { path: path.clone(), tensor: name, dtype: info.dtype.to_string() });
    }
    let [rows, columns] = match expected[..] {
        [rows, columns] => [rows, columns],
        _ => [1, expected[0]],
    };
    // The header was checked against the length of the file and the shape, so this range is in the map.
    let bytes = data_start + info.data_offsets.0..data_start + info.data_offsets.1;
    Ok(Place { file, bytes, dtype: info.dtype, rows, columns })
}

fn open_file(path: PathBuf) -> Result<MappedFile, CheckpointError> {
    let (map, file_bytes) = map_file(&path).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
    match SafeTensors::read_metadata(&map) {
        Ok((header_len, header)) => Ok(MappedFile { path, map, header, data_start: 8 + header_len }),
        Err(error) => Err(CheckpointError::Header { path, problem: explain(&map, &error), file_bytes }),
    }
}

#[allow(unsafe_code)]
fn map_file(path: &Path) -> std::io::Result<(Mmap, u64)> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    // SAFETY: a read-only map of a file that nobody is expected to write while it is loaded. Should someone do so, the worst
    // is a changed weight, or a SIGBUS that ends this process as any other fault does: no Rust reference to the bytes
    // is kept beyond a call of `read`, and every bit pattern is a valid value.
    let map = unsafe { Mmap::map(&file)? };
    Ok((map, bytes))
}

#[allow(unsafe_code)]
fn release(map: &Mmap, bytes: Range<usize>) {
    // SAFETY: MADV_DONTNEED on a shared read-only map of a file drops nothing but the residency of its pages: the next read
    // finds the same bytes in the file.
    let released = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
    // Advice that the system does not take costs memory, not correctness.
    if let Err(error) = released {
        tracing::debug!(%error, "mapped weights were not given back");
    }
}

/// What is wrong with a header, with the numbers that the library's error leaves out.
fn explain(file: &[u8], error: &SafeTensorError) -> String {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return "too short to hold a safetensors header".into();
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let Some(header) = header else {
        return format!("its header is said to be {length} bytes long, past the end of the file");
    };
    let tensors = || {
        let mut all: HashMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
        all.remove("__metadata__");
        let parse = |(name, value)| Some((name, serde_json::from_value::<TensorInfo>(value).ok()?));
        let mut tensors: Vec<(String, TensorInfo)> = all.into_iter().map(parse).collect::<Option<_>>()?;
        tensors.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
        Some(tensors)
    };
    let detail = match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            let described = tensors().and_then(|t| t.last().map(|(_, info)| info.data_offsets.1)).unwrap_or(0);
            let held = file.len() - 8 - header.len();
            Some(format!(
                "its header describes {described} bytes of tensors, but {held} bytes follow it: is the file complete?"
            ))
        }
        _ => tensors().and_then(|tensors| first_lie(&tensors)),
    };
    detail.unwrap_or_else(|| error.to_string().chars().take(200).collect())
}

/// The first tensor whose offsets do not follow the one before, or do not hold its shape.
fn first_lie(tensors: &[(String, TensorInfo)]) -> Option<String> {
    let mut end = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (from, to) }) in tensors {
        let name: String = name.chars().take(200).collect();
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, n| bits.checked_mul(*n));
        let shape = &shape[..shape.len().min(8)];
        if *from != end || to < from {
            return Some(format!(
                "tensor {name:?} has data_offsets [{from}, {to}], but the tensor before it ends at {end}"
            ));
        }
        match bits {
            None => return Some(format!("tensor {name:?} has shape {shape:?}, more values than can be counted")),
            Some(bits) if bits.div_ceil(8) != to - from => {
                let (needs, has) = (bits.div_ceil(8), to - from);
                return Some(format!(
                    "tensor {name:?} {dtype} {shape:?} needs {needs} bytes, but data_offsets give it {has}"
                ));
            }
            Some(_) => end = *to,
        }
    }
    None
}

/// Little-endian values of `dtype` to bf16. The bytes need not be aligned.
fn convert(bytes: &[u8], dtype: Dtype, out: &mut [bf16]) {
    match dtype {
        Dtype::BF16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = bf16::from_le_bytes(*bytes);
            }
        }
        Dtype::F16 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *out = bf16::from_f32(f16::from_le_bytes(*bytes).to_f32());
            }
        }
        Dtype::F32 => {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *out = bf16::from_f32(f32::from_le_bytes(*bytes));
            }
        }
        other => unreachable!("{other} was refused when the file was opened"),
    }
}

#[cfg(test)]
mod tests;
