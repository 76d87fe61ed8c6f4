//! Values made from files, and made anew when the files change.

use std::{
    fmt, fs,
    future::pending,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::{Duration, SystemTime},
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};

/// Between two looks at the files.
const LOOK_PERIOD: Duration = Duration::from_secs(1);

/// A file that an option names and that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{option} {}: {what}", path.display())]
pub struct FileError {
    /// With its dashes.
    pub option: &'static str,
    /// The file.
    pub path: PathBuf,
    /// What is wrong in it, and what to do.
    pub what: String,
}

impl FileError {
    /// What is wrong with the file of an option.
    pub fn new(option: &'static str, path: &Path, what: impl ToString) -> Self {
        Self { option, path: path.into(), what: what.to_string() }
    }
}

/// Makes a value from files; it is given the one that it is to replace.
type Make<T> = dyn Fn(Option<&T>) -> Result<T, FileError> + Send + Sync;

/// A value made from files. While the files are wrong, the last value that could be made holds.
pub struct Reloaded<T> {
    files: Vec<PathBuf>,
    make: Box<Make<T>>,
    current: RwLock<Arc<T>>,
    seen: Mutex<Vec<Option<Stamp>>>,
}

/// What differs between two versions of a file: when it was written, its size, and its number (of one that was renamed
/// to the name).
type Stamp = (SystemTime, u64, u64);

impl<T: Send + Sync + 'static> Reloaded<T> {
    /// Makes the value for the first time. `make` reads `files`, and nothing else that changes.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn new(
        files: Vec<PathBuf>,
        make: impl Fn(Option<&T>) -> Result<T, FileError> + Send + Sync + 'static,
    ) -> Result<Self, FileError> {
        // Before they are read, so that a change in between is seen later.
        let seen = stamps(&files).into();
        let current = RwLock::new(Arc::new(make(None)?));
        Ok(Self { files, make: Box::new(make), current, seen })
    }

    /// The value of now.
    pub fn current(&self) -> Arc<T> {
        // Nobody panics under the lock: there is only a pointer to move.
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Keeps the value true to its files, for ever: they are looked at every second, and read at SIGHUP.
    pub async fn follow(self: Arc<Self>) {
        if self.files.is_empty() {
            return;
        }
        let mut hangups = signal(SignalKind::hangup())
            .inspect_err(|error| tracing::warn!("files are not read anew at SIGHUP: {error}"))
            .ok();
        let mut looks = interval(LOOK_PERIOD);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let asked = tokio::select! {
                () = next(&mut hangups) => true,
                _ = looks.tick() => false,
            };
            let this = self.clone();
            // An error would say that it panicked, which the log has then.
            let _ = spawn_blocking(move || this.look(asked)).await;
        }
    }

    /// Makes the value anew if the files have changed, or if that is asked for.
    fn look(&self, asked: bool) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let now = stamps(&self.files);
        if *seen == now && !asked {
            return;
        }
        *seen = now;
        match (self.make)(Some(&self.current())) {
            Ok(value) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(value);
                tracing::info!("read anew: {:?}", self.files);
            }
            Err(error) => tracing::error!("{error}; what was read before still holds"),
        }
    }
}

impl<T> fmt::Debug for Reloaded<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Reloaded").field("files", &self.files).finish_non_exhaustive()
    }
}

async fn next(signals: &mut Option<Signal>) {
    match signals {
        Some(signals) => drop(signals.recv().await),
        None => pending().await,
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Option<Stamp>> {
    let stamp = |path: &PathBuf| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len(), metadata.ino()))
    };
    files.iter().map(stamp).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_that_could_be_made_holds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("number");
        let make = {
            let path = path.clone();
            move |before: Option<&(u32, u32)>| {
                let text = fs::read_to_string(&path).map_err(|error| FileError::new("--number", &path, error))?;
                let number = text.parse().map_err(|error| FileError::new("--number", &path, error))?;
                Ok((number, before.map_or(0, |before| before.0)))
            }
        };
        assert!(Reloaded::new(vec![path.clone()], make.clone()).unwrap_err().to_string().starts_with("--number /"));
        fs::write(&path, "1").unwrap();
        let reloaded = Reloaded::new(vec![path.clone()], make).unwrap();
        for (content, holds) in [("22", (22, 1)), ("none", (22, 1)), ("333", (333, 22))] {
            fs::write(&path, content).unwrap();
            reloaded.look(false);
            assert_eq!(*reloaded.current(), holds);
            // Nothing has changed.
            reloaded.look(false);
            assert_eq!(*reloaded.current(), holds);
        }
        reloaded.look(true);
        assert_eq!(*reloaded.current(), (333, 333));
        fs::remove_file(&path).unwrap();
        reloaded.look(false);
        assert_eq!(*reloaded.current(), (333, 333));
    }
}
