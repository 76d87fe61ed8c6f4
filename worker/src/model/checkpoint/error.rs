//! What is wrong with the weights of a model.

use std::path::PathBuf;

use half::bf16;

use crate::model::WeightFormat;

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
    #[error(
        "{}: holds no model.safetensors, no model.safetensors.index.json and no other .safetensors file; {found}",
        dir.display()
    )]
    NoWeights {
        /// The directory.
        dir: PathBuf,
        /// What it holds, and what to do.
        found: String,
    },
    /// Weights without model.safetensors or an index lack one of their files.
    #[error("{}: holds {present}, but not {missing}: download it again", dir.display())]
    MissingFile {
        /// The directory.
        dir: PathBuf,
        /// A file that is there.
        present: String,
        /// The first one that is not.
        missing: String,
    },
    /// A file stands for the weights, as `git clone` without Git LFS leaves it.
    #[error(
        "{}: is a Git LFS pointer, not the weights: run `git lfs pull` in its directory, or download it",
        path.display()
    )]
    Pointer {
        /// The file.
        path: PathBuf,
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
    /// There are more layers than config.json says.
    #[error(
        "{}: tensor {tensor} is of layer {layer} (from 0), but by config.json there are {layers}: take the \
         config.json of these weights, or set num_hidden_layers to {found}",
        path.display()
    )]
    Layers {
        /// The file.
        path: PathBuf,
        /// A tensor of the first layer that is too many.
        tensor: String,
        /// That layer.
        layer: usize,
        /// Layers by config.json.
        layers: usize,
        /// Layers in the files.
        found: usize,
    },
    /// A weight is no number, or none that bf16 holds.
    #[error(
        "{}: tensor {tensor} is {value} in row {row}, column {column} (from 0, as BF16): download the file again, and \
         if that does not help, ask whoever made it",
        path.display()
    )]
    NotFinite {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Of the first such weight that was read; 0 in a vector.
        row: usize,
        /// As `row`.
        column: usize,
        /// NaN, inf or -inf.
        value: bf16,
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
    #[error(
        "{}: tensor {tensor} is {dtype}, but by config.json (quantization_config) it is {expected}",
        path.display()
    )]
    Dtype {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its dtype.
        dtype: String,
        /// Those that it may have.
        expected: &'static str,
    },
    /// A scale cannot be one.
    #[error(
        "{}: tensor {tensor} is {value} in row {row}, column {column} (from 0); scales are finite, those of rows not \
         negative, and those of groups at most 2^100",
        path.display()
    )]
    Scale {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Of the first such scale.
        row: usize,
        /// As `row`.
        column: usize,
        /// What it holds, as it is read.
        value: f32,
    },
    /// A symmetric group has a zero point of its own.
    #[error(
        "{}: tensor {tensor} has the zero point {value} for row {row} of the matrix, group {group} (from 0), but by \
         config.json (quantization_config: sym or zero_point) all are 8: is checkpoint_format right?",
        path.display()
    )]
    Zero {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Of the first such group.
        row: usize,
        /// As `row`.
        group: usize,
        /// What it is.
        value: u8,
    },
    /// A column is of a group that there is not.
    #[error(
        "{}: tensor {tensor} says that column {column} (from 0) is of group {value}, but by config.json there are \
         {groups}",
        path.display()
    )]
    Group {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// The first such column.
        column: usize,
        /// Its group.
        value: i32,
        /// How many there are.
        groups: usize,
    },
    /// The matrices of the layers are not all stored alike.
    #[error(
        "{}: not all matrices of the layers are in {format} with groups of columns that lie together, as config.json \
         (quantization_config) has it: this device does not compute such a model, CPUs do (--device cpu)",
        dir.display()
    )]
    Mixed {
        /// The directory.
        dir: PathBuf,
        /// The format by config.json.
        format: WeightFormat,
    },
}
