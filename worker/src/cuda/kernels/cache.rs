//! Compiled kernels on disk, so that a worker starts without the compiler's second.
//!
//! A file an entry, named by the SHA-256 of all that decides the binary. It carries a checksum: one that is cut off or
//! altered counts as absent and is written again. Files are written under another name and renamed, so that workers
//! that start together never read half of one.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use sha2::{Digest, Sha256};

/// Names the folder to use; empty: none.
pub const CACHE_VARIABLE: &str = "LOOPLANE_KERNEL_CACHE";
/// First bytes of a file.
const MAGIC: &[u8; 16] = b"looplane kernel\x01";
const CHECKSUM: usize = 32;

/// A kernel as it was compiled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Binary {
    /// Machine code, as the driver loads it.
    pub cubin: Vec<u8>,
    /// What the compiler said: registers, shared memory, spills.
    pub log: String,
}

/// A folder of compiled kernels.
#[derive(Debug, Clone)]
pub struct Cache {
    folder: Option<PathBuf>,
}

impl Cache {
    /// The folder that the environment names: [`CACHE_VARIABLE`], else `looplane/kernels` in the user's cache.
    pub fn from_environment() -> Self {
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty()).map(PathBuf::from);
        let user = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
        match std::env::var_os(CACHE_VARIABLE) {
            Some(folder) if folder.is_empty() => Self { folder: None },
            Some(folder) => Self { folder: Some(folder.into()) },
            None => {
                Self { folder: user.or_else(|| Some(home?.join(".cache"))).map(|cache| cache.join("looplane/kernels")) }
            }
        }
    }

    /// This folder.
    pub fn at(folder: &Path) -> Self {
        Self { folder: Some(folder.into()) }
    }

    /// The entry of a key, or what `build` makes, which is then kept. A folder that cannot be written costs the next
    /// start a second, so it is logged and nothing more.
    ///
    /// # Errors
    /// What `build` reports.
    pub fn get_or_build<E>(
        &self,
        key: &[u8; 32],
        build: impl FnOnce() -> Result<Binary, E>,
    ) -> Result<(Binary, bool), E> {
        let name: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = self.folder.as_ref().map(|folder| folder.join(name + ".kernel"));
        if let Some(found) = path.as_deref().and_then(read) {
            return Ok((found, true));
        }
        let binary = build()?;
        if let Some(path) = &path
            && let Err(error) = write(path, &binary)
        {
            tracing::info!("the compiled kernel is not kept: {}: {error} ({CACHE_VARIABLE})", path.display());
        }
        Ok((binary, false))
    }
}

/// The entry, if it is whole.
fn read(path: &Path) -> Option<Binary> {
    let bytes = fs::read(path).ok()?;
    let binary = decode(&bytes);
    if binary.is_none() {
        tracing::info!("{} is damaged: the kernel is compiled again", path.display());
    }
    binary
}

fn decode(bytes: &[u8]) -> Option<Binary> {
    let rest = bytes.strip_prefix(MAGIC)?;
    let (checksum, rest) = rest.split_first_chunk::<CHECKSUM>()?;
    if Sha256::digest(rest)[..] != checksum[..] {
        return None;
    }
    let (log_len, rest) = rest.split_first_chunk::<8>()?;
    let (log, cubin) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*log_len)).ok()?)?;
    Some(Binary { cubin: cubin.to_vec(), log: String::from_utf8(log.to_vec()).ok()? })
}

fn encode(binary: &Binary) -> Vec<u8> {
    let log = binary.log.as_bytes();
    let body = [&(log.len() as u64).to_le_bytes(), log, &binary.cubin].concat();
    [&MAGIC[..], &Sha256::digest(&body)[..], &body].concat()
}

fn write(path: &Path, binary: &Binary) -> io::Result<()> {
    static WRITES: AtomicU32 = AtomicU32::new(0);
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let number = WRITES.fetch_add(1, Ordering::Relaxed);
    let draft = path.with_extension(format!("{}-{number}.draft", std::process::id()));
    let written = fs::File::create(&draft)
        .and_then(|mut file| file.write_all(&encode(binary)))
        .and_then(|()| fs::rename(&draft, path));
    if written.is_err() {
        // Whatever is left of the draft is of no use to anybody.
        let _ = fs::remove_file(&draft);
    }
    written
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn binary() -> Binary {
        Binary { cubin: (0..=255).collect(), log: "ptxas info: used 96 registers".into() }
    }

    fn get(cache: &Cache, key: u8) -> (Binary, bool) {
        cache.get_or_build::<Infallible>(&[key; 32], || Ok(binary())).unwrap_or_else(|never| match never {})
    }

    #[test]
    fn an_entry_is_built_once_and_whatever_happens_to_its_file_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(&folder.path().join("not/yet"));
        assert_eq!(get(&cache, 1), (binary(), false));
        assert_eq!(get(&cache, 1), (binary(), true));
        assert_eq!(get(&cache, 2), (binary(), false));
        let files: Vec<_> = fs::read_dir(folder.path().join("not/yet")).unwrap().flatten().collect();
        assert_eq!(files.len(), 2, "{files:?}");
        let path = files[0].path();
        let key = if path.file_name().unwrap().to_string_lossy().starts_with("01") { 1 } else { 2 };
        let whole = fs::read(&path).unwrap();
        for place in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[place] ^= 0x10;
            assert_eq!(decode(&damaged), None, "byte {place}");
            assert_eq!(decode(&whole[..place]), None, "{place} bytes");
        }
        fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(get(&cache, key), (binary(), false));
        assert_eq!(fs::read(&path).unwrap(), whole);
        assert_eq!(get(&cache, key), (binary(), true));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_no_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let cache = Cache::at(&file.path().join("below-a-file"));
        assert_eq!(get(&cache, 1), (binary(), false));
        assert_eq!(get(&cache, 1), (binary(), false));
        assert_eq!(get(&Cache { folder: None }, 1), (binary(), false));
    }
}
