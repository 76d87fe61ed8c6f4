//! NVRTC: kernel source to machine code for the model's exact dimensions.

use std::ffi::{CStr, CString, c_char};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use cudarc::nvrtc::result::NvrtcError;
use cudarc::nvrtc::{result, sys};
use libloading::Library;
use sha2::{Digest, Sha256};

use super::cache::{Binary, Cache};
use crate::cuda::error::CudaError;

/// Names the library to compile with.
pub const NVRTC_VARIABLE: &str = "LOOPLANE_NVRTC";
/// What kernels are compiled for.
pub const ARCHITECTURE: &str = "sm_90a";
/// Contraction is off: kernels write out their fused multiply-adds, or variants for other batch widths would differ.
const OPTIONS: [&str; 5] = [
    "--gpu-architecture=sm_90a",
    "-std=c++17",
    "--fmad=false",
    "--device-as-default-execution-space",
    "--ptxas-options=-v",
];
/// From this version on NVRTC keeps binaries in the driver's cache, and gives them back without the log that tells what
/// they spill.
const CACHING_VERSION: (i32, i32) = (12, 9);
/// Leaves that cache out: [`Cache`] keeps binaries with their logs.
const NO_CACHE: &str = "--no-cache";
/// Where CUDA's own installer puts the library.
const TOOLKIT_FOLDER: &str = "/usr/local/cuda/lib64";
/// Bytes of a compiler's log that a message carries.
const LOG_SHOWN: usize = 4000;

/// The compiler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compiler {
    /// Major and minor version.
    pub version: (i32, i32),
}

/// A kernel and the constants of its model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program<'a> {
    /// For messages.
    pub name: &'a str,
    /// CUDA C++.
    pub source: &'a str,
    /// What it includes, by name.
    pub headers: &'a [(&'a str, &'a str)],
    /// `#define`s in front of it.
    pub defines: Vec<(&'static str, u64)>,
}

/// What the compiler says a kernel takes of a multiprocessor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of a thread that did not fit in registers and are stored to local memory.
    pub spilled: u32,
    /// Bytes of local memory of a thread.
    pub stack: u32,
}

impl Compiler {
    /// Finds NVRTC: [`NVRTC_VARIABLE`], the system's search path, the toolkit's folder.
    ///
    /// # Errors
    /// It is not there, or the one that was named cannot be loaded.
    #[allow(unsafe_code)]
    pub fn find() -> Result<Self, CudaError> {
        static FOUND: Mutex<Option<Compiler>> = Mutex::new(None);
        let mut found = FOUND.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(found) = *found {
            return Ok(found);
        }
        if let Some(path) = std::env::var_os(NVRTC_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from) {
            let wrong = |problem: String| CudaError::Compiler { path: path.display().to_string(), problem };
            preload(&path).map_err(wrong)?;
        }
        // SAFETY: asks the loader whether the library is there; NVRTC's initialisers have no preconditions.
        let present = || unsafe { sys::is_culib_present() };
        if !present() {
            // Not in the search path: a failure here leaves the answer as it is.
            let names = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
            let _ = names.iter().find(|name| preload(&Path::new(TOOLKIT_FOLDER).join(name)).is_ok());
            if !present() {
                return Err(CudaError::NoCompiler);
            }
        }
        let mut version = (0, 0);
        // SAFETY: the library is present, and both pointers are to live integers.
        let asked = unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) }.result();
        asked.map_err(|error| CudaError::Compiler { path: "libnvrtc".into(), problem: error.to_string() })?;
        *found = Some(Self { version });
        Ok(Self { version })
    }

    /// Its version, as its maker writes it.
    pub fn version_text(&self) -> String {
        format!("{}.{}", self.version.0, self.version.1)
    }

    /// The binary of a program, out of the cache if it is there; and whether it was.
    ///
    /// # Errors
    /// The compiler refuses the program.
    pub fn build(&self, program: &Program<'_>, cache: &Cache) -> Result<(Binary, bool), CudaError> {
        cache.get_or_build(&self.key(program), || self.compile(program))
    }

    /// Eight hexadecimal digits of all but the model that decides what a source computes: for the bit domain.
    pub fn arithmetic(&self, source: &str, headers: &[(&str, &str)]) -> String {
        self.key(&Program { name: "", source, headers, defines: Vec::new() })[..4]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }

    fn options(&self) -> Vec<&'static str> {
        let no_cache = (self.version >= CACHING_VERSION).then_some(NO_CACHE);
        OPTIONS.into_iter().chain(no_cache).collect()
    }

    fn key(&self, program: &Program<'_>) -> [u8; 32] {
        let mut hasher = Sha256::new();
        let (version, options, text) = (self.version_text(), self.options().join("\n"), program.text());
        let headers = program.headers.iter().flat_map(|(name, text)| [*name, *text]);
        for part in [ARCHITECTURE, &version, &options, &text].into_iter().chain(headers) {
            hasher.update((part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize().into()
    }

    #[allow(unsafe_code)]
    fn compile(&self, program: &Program<'_>) -> Result<Binary, CudaError> {
        let failed = |problem: String, log: String| CudaError::Compile {
            kernel: program.name.into(),
            version: self.version_text(),
            problem,
            log: log.chars().take(LOG_SHOWN).collect(),
        };
        let without_log = |error: NvrtcError| failed(error.to_string(), String::new());
        let handle = Handle::create(program).map_err(without_log)?;
        // SAFETY: the handle is of a program that was created and is not yet destroyed.
        let compiled = unsafe { result::compile_program(handle.0, &self.options()) };
        // SAFETY: as above; a log is there whether or not the compilation went well.
        let log = unsafe { result::get_program_log(handle.0) }.map(|log| log_text(&log)).unwrap_or_default();
        compiled.map_err(|error| failed(error.to_string(), log.clone()))?;
        let mut size = 0;
        // SAFETY: as above, and the pointer is to a live integer.
        unsafe { sys::nvrtcGetCUBINSize(handle.0, &mut size) }.result().map_err(without_log)?;
        let mut cubin = vec![0u8; size];
        // SAFETY: as above, and the buffer has the size that the library asked for.
        unsafe { sys::nvrtcGetCUBIN(handle.0, cubin.as_mut_ptr().cast::<c_char>()) }.result().map_err(without_log)?;
        Ok(Binary { cubin, log })
    }
}

impl Program<'_> {
    fn text(&self) -> String {
        let defines = self.defines.iter().map(|(name, value)| format!("#define {name} {value}u\n"));
        defines.collect::<String>() + "#line 1\n" + self.source
    }
}

impl Resources {
    /// Reads them off a compiler's log: those of the entry function `kernel`.
    pub fn of(kernel: &str, log: &str) -> Option<Self> {
        let mut lines = log.lines().skip_while(|line| {
            let mut words = line.split(|c: char| !(c.is_alphanumeric() || c == '_'));
            !(line.contains("Function properties for") && words.any(|word| word == kernel))
        });
        lines.next()?;
        let (memory, registers) = (lines.next()?, lines.next()?);
        let before = |line: &str, what: &str| -> Option<u32> {
            line[..line.find(what)?].trim_end().rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
        };
        Some(Self {
            registers: before(registers, "registers")?,
            spilled: before(memory, "bytes spill stores")?.max(before(memory, "bytes spill loads")?),
            stack: before(memory, "bytes stack frame")?,
        })
    }
}

/// A program that is destroyed when it is done with.
struct Handle(sys::nvrtcProgram);

impl Handle {
    #[allow(unsafe_code)]
    fn create(program: &Program<'_>) -> Result<Self, NvrtcError> {
        // Sources are part of this build and hold no NUL.
        let c_text =
            |text: &str| CString::new(text.replace('\0', " ")).expect("a text without NUL, as they were replaced");
        let (text, name) = (c_text(&program.text()), c_text(&format!("{}.cu", program.name)));
        let headers: Vec<[CString; 2]> =
            program.headers.iter().map(|(name, text)| [c_text(name), c_text(text)]).collect();
        let (names, texts): (Vec<_>, Vec<_>) =
            headers.iter().map(|[name, text]| (name.as_ptr(), text.as_ptr())).unzip();
        let mut handle = std::ptr::null_mut();
        // SAFETY: all strings end with NUL and live until the call returns, and there are as many names as texts.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                headers.len() as i32,
                texts.as_ptr(),
                names.as_ptr(),
            )
        }
        .result()?;
        Ok(Self(handle))
    }
}

impl Drop for Handle {
    #[allow(unsafe_code)]
    fn drop(&mut self) {
        // SAFETY: the handle is of a program that was created, and this is its only owner.
        let destroyed = unsafe { result::destroy_program(self.0) };
        if let Err(error) = destroyed {
            tracing::debug!("nvrtcDestroyProgram: {error}");
        }
    }
}

/// Loads the library at `path` for good, its builtins first: it does not find them beside itself.
#[allow(unsafe_code)]
fn preload(path: &Path) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("/"));
    let mut builtins: Vec<PathBuf> = match std::fs::read_dir(folder) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).filter(|path| is_builtins(path)).collect(),
        Err(error) => return Err(error.to_string()),
    };
    builtins.sort();
    for path in builtins.iter().map(PathBuf::as_path).chain([path]) {
        // SAFETY: NVIDIA's libraries, whose initialisers have no preconditions.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        // The loader finds it by its name from now on, for as long as it stays loaded.
        std::mem::forget(library);
    }
    Ok(())
}

fn is_builtins(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("libnvrtc-builtins.so")
}

fn log_text(log: &[c_char]) -> String {
    let bytes: Vec<u8> = log.iter().map(|c| *c as u8).collect();
    CStr::from_bytes_until_nul(&bytes).map(|text| text.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_are_read_off_a_log() {
        let log = "\
ptxas info    : 9 bytes gmem
ptxas info    : Compiling entry function 'looped_decoder' for 'sm_90a'
ptxas info    : Function properties for looped_decoder
    16 bytes stack frame, 120 bytes spill stores, 112 bytes spill loads
ptxas info    : Used 96 registers, used 3 barriers, 16 bytes cumulative stack size
ptxas info    : Function properties for read_plain
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers\n";
        let of = |kernel| Resources::of(kernel, log);
        assert_eq!(of("looped_decoder"), Some(Resources { registers: 96, spilled: 120, stack: 16 }));
        assert_eq!(of("read_plain"), Some(Resources { registers: 40, spilled: 0, stack: 0 }));
        assert_eq!((of("looped"), of("read_bulk"), Resources::of("x", "")), (None, None, None));
    }

    #[test]
    fn binaries_come_from_the_compiler_with_their_logs() {
        let asked = |version| Compiler { version }.options().contains(&"--no-cache");
        // Older ones know no such option, and refuse it.
        assert_eq!([(12, 8), (12, 9), (13, 0)].map(asked), [false, true, true]);
    }

    #[test]
    fn all_that_decides_the_binary_is_in_the_key() {
        let base = Program {
            name: "k",
            source: "a",
            headers: &[],
            defines: vec![("LP_HIDDEN", 4096), ("LP_EPS", 0x3727_c5ac)],
        };
        assert_eq!(base.text(), "#define LP_HIDDEN 4096u\n#define LP_EPS 925353388u\n#line 1\na");
        let (thirteen, twelve) = (Compiler { version: (13, 0) }, Compiler { version: (12, 9) });
        let other = Program { defines: vec![("LP_HIDDEN", 2048), ("LP_EPS", 0x3727_c5ac)], ..base.clone() };
        let key = thirteen.key(&base);
        assert!(key != twelve.key(&base) && key != thirteen.key(&other));
        assert!(key != thirteen.key(&Program { source: "b", ..base.clone() }));
        assert_eq!(key, thirteen.key(&Program { name: "other", ..base.clone() }));
        assert!(key != thirteen.key(&Program { headers: &[("h", "")], ..base.clone() }));
        assert_eq!(thirteen.arithmetic("a", &[]).len(), 8);
        assert_ne!(thirteen.arithmetic("a", &[]), thirteen.arithmetic("b", &[]));
    }
}
