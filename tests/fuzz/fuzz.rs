//! Every place where bytes from outside enter, held to what it promises for any bytes.
//!
//! `targets` has the bodies, one table of them all. `just fuzz` looks for bytes for which a body panics, guided by the
//! code that they reach; `cargo test` runs those that are kept in `corpus`, one directory a target. By hand,
//! `cargo run --example fuzz -- TARGET FILE...` runs files. A finding is kept with the change that mends it, under a
//! name that says what it was.
#![cfg_attr(fuzzing, no_main)]

mod client;
#[path = "../../server/tests/front_end/conform.rs"]
mod conform;
mod pick;
mod targets;

use targets::{TARGETS, Target};

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(init: std::sync::LazyLock::force(&CHOSEN), |bytes: &[u8]| (CHOSEN.run)(bytes));

/// libFuzzer's own `main` takes no other arguments than its own.
#[cfg(fuzzing)]
static CHOSEN: std::sync::LazyLock<&Target> = std::sync::LazyLock::new(|| {
    // libFuzzer's hook ends the process at any panic. One that is caught counts by what is answered then.
    drop(std::panic::take_hook());
    target(&std::env::var("LOOPLANE_FUZZ_TARGET").unwrap_or_default())
});

#[cfg(not(any(fuzzing, test)))]
fn main() {
    let mut words = std::env::args().skip(1);
    let target = target(&words.next().unwrap_or_default());
    for file in words {
        println!("{file}");
        (target.run)(&std::fs::read(&file).unwrap_or_else(|error| panic!("{file}: {error}")));
    }
}

#[cfg(any(not(test), fuzzing))]
fn target(name: &str) -> &'static Target {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    let found = TARGETS.iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("no target {name:?}: it is one of {}", names.join(", ")))
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        fs,
        panic::catch_unwind,
        path::{Path, PathBuf},
        time::{Duration, Instant},
    };

    use super::*;

    /// An input takes milliseconds, and several times that without optimisation and beside other tests.
    const LONGEST: Duration = Duration::from_secs(20);
    /// Peak of memory that one input may add to that of all before it.
    const MOST_KIB: u64 = 512 << 10;

    fn corpus() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus")
    }

    fn entries(dir: &Path) -> BTreeSet<PathBuf> {
        let entries = fs::read_dir(dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()));
        entries.map(|entry| entry.expect("the directory can be read").path()).collect()
    }

    /// The highest resident set so far. Linux sums it over cores without locks, so a later answer may be the smaller one.
    fn peak_kib() -> u64 {
        let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("it says the peak");
        peak.trim().trim_end_matches(" kB").parse().expect("a number")
    }

    /// Runs each file in the directory of a target; what is wrong, with the file.
    fn replay(target: &Target, dir: &Path) -> Result<(), String> {
        for path in entries(dir) {
            let bytes = fs::read(&path).expect("a file");
            let (started, before) = (Instant::now(), peak_kib());
            let wrong = |what: String| Err(format!("{}: {}: {what}", target.name, path.display()));
            if let Err(panic) = catch_unwind(|| (target.run)(&bytes)) {
                let text = panic.downcast_ref::<String>().cloned();
                return wrong(text.or(panic.downcast_ref::<&str>().map(|text| (*text).into())).unwrap_or_default());
            }
            let (took, more) = (started.elapsed(), peak_kib().saturating_sub(before));
            if took > LONGEST || more > MOST_KIB {
                return wrong(format!("took {took:?} and {more} KiB"));
            }
        }
        Ok(())
    }

    #[test]
    fn what_is_kept_holds() {
        let dirs: BTreeSet<PathBuf> = TARGETS.iter().map(|target| corpus().join(target.name)).collect();
        assert_eq!(entries(&corpus()), dirs, "each target has a directory, and each directory a target");
        for target in TARGETS {
            replay(target, &corpus().join(target.name)).unwrap();
        }
    }

    /// If it did not, nothing of the other test would mean anything.
    #[test]
    fn a_promise_that_is_broken_is_noticed() {
        fn forgets_what_is_held(bytes: &[u8]) {
            targets::stops_hold(bytes, |stops, shown, pieces| {
                let mut matcher = looplane_server::text::StopMatcher::new(stops.to_vec(), shown);
                pieces.iter().map(|piece| matcher.push(piece).text).collect()
            });
        }
        let target = Target { name: "stops", run: forgets_what_is_held };
        let wrong = replay(&target, &corpus().join("stops")).unwrap_err();
        assert!(wrong.contains("corpus/stops/"), "{wrong}");
        let slow = Target { name: "stops", run: |_| panic!("at once") };
        assert!(replay(&slow, &corpus().join("stops")).unwrap_err().ends_with("at once"));
    }
}
