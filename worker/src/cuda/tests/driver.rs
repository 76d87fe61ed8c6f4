//! The host's side of launches on a driver without a GPU (`driver.c`), which checks what it is given and computes
//! nothing: whole tests of this module, whose kernels all answer alike. And the kernels of tests that need a GPU,
//! compiled where there is none.
//!
//! Needs NVRTC and a C compiler (CC, else cc). What these tests prove on a GPU they do not prove here.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::gpu::REQUIRE_GPU;
use crate::cuda::kernels::cache::CACHE_VARIABLE;
use crate::cuda::kernels::compile::{Compiler, NVRTC_VARIABLE};

/// Tests that pass on it, and of the kernels that they launch those that no other has: every family, a group's ranks,
/// launches of phases in graphs, steps that the host feeds.
const RUNS: [(&str, &[&str]); 4] = [
    (
        "matrix_passes::plans::plans_of_a_crowd_yield_what_each_request_yields_alone",
        &["looped_decoder", "wide_decoder", "matrix_gate_up", "matrix_attend_tiles", "matrix_attend_spans", "sampler"],
    ),
    (
        "ranks::delays_on_every_rank_change_nothing_but_time",
        &["matrix_tell_embeddings", "matrix_join_out", "matrix_meet_logits"],
    ),
    ("gpu::plans_without_the_loop_yield_the_same_tokens", &["query_key_value", "attend_pages", "down"]),
    ("fed::a_launch_waits_for_a_late_host", &["looped_decoder"]),
];
/// Those of which kernels are compiled ahead, by the begin of their names behind `cuda::tests::`; without it, these.
const FILTER_VARIABLE: &str = "LOOPLANE_TESTS";
const NEED_KERNELS: [&str; 6] = ["fed::", "formats::", "gpu::", "matrix_passes::", "ranks::", "wide::"];

/// The driver, in a folder for the loader's path; `None` where nothing can be compiled for it.
fn driver() -> Option<tempfile::TempDir> {
    if let Err(missing) = Compiler::find() {
        assert!(std::env::var_os(NVRTC_VARIABLE).is_none(), "{missing}");
        eprintln!("skipped: {missing}");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda/tests/driver.c");
    let compiler = std::env::var_os("CC").unwrap_or("cc".into());
    let flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread", "-o"];
    let library = folder.path().join("libcuda.so.1");
    let built = Command::new(&compiler).args(flags).arg(&library).arg(source).status();
    assert!(built.is_ok_and(|status| status.success()), "{} does not compile the driver", compiler.display());
    std::fs::copy(&library, library.with_extension("")).unwrap();
    Some(folder)
}

/// Runs a test of `cuda::tests` in a process that has the driver.
fn run(test: &str, driver: &Path, cache: &Path, more: &[(&str, &Path)]) -> Output {
    let paths = std::env::var_os("LD_LIBRARY_PATH");
    let paths = std::iter::once(PathBuf::from(driver)).chain(paths.iter().flat_map(std::env::split_paths));
    let test = format!("cuda::tests::{test}");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", &test, "--test-threads", "1"]);
    command.env("LD_LIBRARY_PATH", std::env::join_paths(paths).unwrap());
    command
        .env("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        .env(CACHE_VARIABLE, cache)
        .env(REQUIRE_GPU, "1")
        .envs(more.iter().copied());
    command.output().unwrap()
}

fn text(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)).concat()
}

#[test]
fn the_hosts_side_runs_on_a_driver_without_a_gpu() {
    let Some(driver) = driver() else { return };
    let cache = driver.path().join("kernels");
    for (test, kernels) in RUNS {
        let file = driver.path().join("launched");
        let output = run(test, driver.path(), &cache, &[("LOOPLANE_DRIVER_LAUNCHED", &file)]);
        assert!(output.status.success() && text(&output).contains("1 passed"), "{test}: {}", text(&output));
        let launched = std::fs::read_to_string(&file).unwrap_or_default();
        let launched: BTreeSet<&str> = launched.lines().collect();
        assert!(kernels.iter().all(|kernel| launched.contains(kernel)), "{test} launched {launched:?}");
        std::fs::remove_file(&file).unwrap();
        // Each allocation counts a byte less: the negative control.
        let output = run(test, driver.path(), &cache, &[("LOOPLANE_DRIVER_SHORT", Path::new("1"))]);
        assert!(!output.status.success() && text(&output).contains("driver: "), "{test}: {}", text(&output));
    }
}

/// `just kernel-cache`
#[test]
#[ignore = "compiles for many minutes, into the folder that LOOPLANE_KERNEL_CACHE names"]
fn kernels_of_tests_that_need_a_gpu() {
    let Some(driver) = driver() else { return };
    let cache = PathBuf::from(std::env::var_os(CACHE_VARIABLE).expect("a folder for kernels"));
    let filter = std::env::var(FILTER_VARIABLE).unwrap_or_default();
    let wanted: Vec<&str> = if filter.is_empty() { NEED_KERNELS.to_vec() } else { filter.split_whitespace().collect() };
    let listed = Command::new(std::env::current_exe().unwrap()).arg("--list").output().unwrap();
    let listed = text(&listed);
    let tests = listed.lines().filter_map(|line| line.strip_prefix("cuda::tests::")?.strip_suffix(": test"));
    let count = || std::fs::read_dir(&cache).map_or(0, |files| files.flatten().count());
    for test in tests.filter(|test| wanted.iter().any(|wanted| test.starts_with(wanted))) {
        // What needs results fails, but its kernels are loaded before.
        let before = count();
        run(test, driver.path(), &cache, &[]);
        println!("{test}: {} more kernels", count() - before);
    }
}
