//! The files of a checkpoint: which there are, and their maps.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::{Mmap, UncheckedAdvice};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

use super::CheckpointError;
use super::header::explain;

/// What the files that Git LFS puts in the place of others begin with.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";

/// A file of the checkpoint.
#[derive(Debug)]
pub(super) struct MappedFile {
    pub path: PathBuf,
    pub map: Mmap,
    pub header: Metadata,
    /// First byte after the header.
    pub data_start: usize,
}

/// Which file holds which tensor, by index or by looking.
pub(super) enum Lookup {
    Index { path: PathBuf, files: HashMap<String, usize> },
    Search { dir: PathBuf },
}

/// Maps the files with weights of a directory.
pub(super) fn open_files(dir: &Path) -> Result<(Vec<MappedFile>, Lookup), CheckpointError> {
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
        let names: Vec<_> = paths.iter().filter_map(|path| path.file_name()?.to_str()).collect();
        if let Some((present, missing)) = first_missing(&names) {
            return Err(CheckpointError::MissingFile { dir: dir.into(), present, missing });
        }
    }
    if paths.is_empty() {
        return Err(CheckpointError::NoWeights { dir: dir.into(), found: found(dir) });
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

/// Of files that are numbered like `model-00002-of-00004.safetensors`: one that is there, and the first that is not.
fn first_missing(names: &[&str]) -> Option<(String, String)> {
    names.iter().find_map(|present| {
        let (stem, count) = present.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (prefix, number) = stem.rsplit_once('-')?;
        let (width, count) = (number.len(), count.parse::<usize>().ok().filter(|_| number.parse::<usize>().is_ok())?);
        let all = (1..=count).map(|number| format!("{prefix}-{number:0width$}-of-{count:0width$}.safetensors"));
        // A count of no meaning names files that nobody has: the first of them is missing.
        let missing = all.into_iter().find(|name| !names.contains(&name.as_str()))?;
        Some(((*present).to_owned(), missing))
    })
}

/// What a directory without weights holds, and what to do.
fn found(dir: &Path) -> String {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    let of_other_formats = |name: &&String| [".bin", ".pt", ".pth", ".gguf"].iter().any(|end| name.ends_with(end));
    match (names.iter().find(of_other_formats), names.len()) {
        (_, 0) => "it is empty: is it the directory of the model?".into(),
        (Some(weights), _) => format!("it holds {weights}: convert that to safetensors"),
        (None, count) => {
            const NAMED: usize = 5;
            let more = if count > NAMED { format!(" and {} more", count - NAMED) } else { String::new() };
            let first = names[..count.min(NAMED)].join(", ");
            format!("it holds {first}{more}: download the weights to it")
        }
    }
}

fn open_file(path: PathBuf) -> Result<MappedFile, CheckpointError> {
    let (map, file_bytes) = map_file(&path).map_err(|source| CheckpointError::Read { path: path.clone(), source })?;
    if map.starts_with(LFS_POINTER) {
        return Err(CheckpointError::Pointer { path });
    }
    match SafeTensors::read_metadata(&map) {
        Ok((header_len, header)) => Ok(MappedFile { path, map, header, data_start: 8 + header_len }),
        Err(error) => Err(CheckpointError::Header { path, problem: explain(&map, &error), file_bytes }),
    }
}

#[allow(unsafe_code)]
pub(super) fn map_file(path: &Path) -> std::io::Result<(Mmap, u64)> {
    let file = File::open(path)?;
    let bytes = file.metadata()?.len();
    // SAFETY: a read-only map of a file that nobody is expected to write while it is loaded. Should someone do so, the
    // worst is a changed weight, or a SIGBUS that ends this process as any other fault does: no Rust reference to the
    // bytes is kept beyond a call of `read`, and every bit pattern is a valid value.
    let map = unsafe { Mmap::map(&file)? };
    Ok((map, bytes))
}

/// Takes the pages of a range out of memory.
#[allow(unsafe_code)]
pub(super) fn release(map: &Mmap, bytes: Range<usize>) {
    // SAFETY: MADV_DONTNEED on a shared read-only map of a file drops nothing but the residency of its pages: the next
    // read finds the same bytes in the file.
    let released = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, bytes.start, bytes.len()) };
    // Advice that the system does not take costs memory, not correctness.
    if let Err(error) = released {
        tracing::debug!(%error, "mapped weights were not given back");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_bytes_leave_memory() {
        const BYTES: usize = 64 << 20;
        let resident = || {
            let status = std::fs::read_to_string("/proc/self/status").unwrap();
            let line = status.lines().find_map(|line| line.strip_prefix("RssFile:")).unwrap();
            line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
        };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, vec![1; BYTES]).unwrap();
        let (map, bytes) = map_file(&path).unwrap();
        assert_eq!(bytes, BYTES as u64);
        let before = resident();
        assert_eq!(map.iter().map(|b| usize::from(*b)).sum::<usize>(), BYTES);
        let read = resident();
        assert!(read > before + BYTES / 2, "{before} {read}");
        release(&map, 0..BYTES);
        // Other tests map a few megabytes at the same time.
        assert!(resident() < read - BYTES / 2, "{read} {}", resident());
        assert_eq!(map[BYTES - 1], 1);
    }
}
