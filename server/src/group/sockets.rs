//! The directory in which the workers of a group open their sockets, until all are connected.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::process::geteuid;

use super::fault::StartError;

/// Of the names of the sockets' directories; the server's process id follows.
const SOCKET_DIR_PREFIX: &str = "looplane-";
/// Longest path of a Unix socket, in bytes (Linux: 108 with the final zero).
const SOCKET_PATH_LIMIT: usize = 107;

/// A directory for the sockets of one group, for this user alone; removed when dropped, or as soon as all are
/// connected.
#[derive(Debug)]
pub(super) struct SocketDir(PathBuf);

impl SocketDir {
    pub(super) fn create(temp: &Path) -> Result<Self, StartError> {
        remove_socket_dirs_of_the_dead(temp);
        let name = format!("{SOCKET_DIR_PREFIX}{}-{}", std::process::id(), uuid::Uuid::new_v4().simple());
        let path = temp.join(name);
        let made = DirBuilder::new().mode(0o700).create(&path);
        made.map(|()| Self(path)).map_err(|error| {
            StartError::refusal(format!(
                "the workers' sockets need a directory in {}, which cannot be made ({error}): set TMPDIR to \
                 another place",
                temp.display()
            ))
        })
    }

    pub(super) fn socket(&self, rank: u32) -> Result<PathBuf, StartError> {
        let path = self.0.join(format!("rank-{rank}.sock"));
        if path.as_os_str().len() > SOCKET_PATH_LIMIT {
            return Err(StartError::refusal(format!(
                "the socket path {} is longer than {SOCKET_PATH_LIMIT} bytes: set TMPDIR to a shorter one",
                path.display()
            )));
        }
        Ok(path)
    }
}

/// Removes what servers left behind that were killed while their workers started: directories of this user, named after
/// a process that is no more. A link is left alone, whatever it is called.
fn remove_socket_dirs_of_the_dead(temp: &Path) {
    let Ok(entries) = fs::read_dir(temp) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let after_prefix = name.to_str().and_then(|name| name.strip_prefix(SOCKET_DIR_PREFIX));
        let Some((pid, _)) = after_prefix.and_then(|rest| rest.split_once('-')) else { continue };
        let is_dead = pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists();
        // Of the entry itself: a link is none.
        let is_ours = entry.metadata().is_ok_and(|entry| entry.is_dir() && entry.uid() == geteuid().as_raw());
        if is_dead
            && is_ours
            && let Err(error) = fs::remove_dir_all(entry.path())
        {
            tracing::debug!("cannot remove {}: {error}", entry.path().display());
        }
    }
}

/// Removes the sockets' directory once every worker is connected: a server that is killed later leaves nothing behind.
pub(super) fn remove_socket_dir(sockets: &[PathBuf]) {
    let Some(dir) = sockets.first().and_then(|socket| socket.parent()) else { return };
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!("cannot remove {}: {error}", dir.display());
    }
}

impl Drop for SocketDir {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!("cannot remove {}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_directory_that_cannot_be_used_is_named() {
        let error = SocketDir::create(Path::new("/nowhere")).unwrap_err();
        assert!(error.is_final && error.reason.contains("/nowhere,") && error.reason.contains("TMPDIR"), "{error:?}");
        let temp = tempfile::tempdir().unwrap();
        let long = temp.path().join("x".repeat(80));
        fs::create_dir(&long).unwrap();
        let error = SocketDir::create(&long).unwrap().socket(0).unwrap_err();
        assert!(error.is_final && error.reason.contains("TMPDIR"), "{error:?}");
    }

    #[test]
    fn what_killed_servers_left_is_removed_and_nothing_else() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str| temp.path().join(name);
        // No process has an id over 2^22.
        let (dead, alive) = (at("looplane-99999999-a"), at(&format!("looplane-{}-a", std::process::id())));
        let (other, link) = (at("looplane-notes"), at("looplane-99999999-link"));
        for dir in [&dead, &alive, &other] {
            fs::create_dir(dir).unwrap();
            fs::write(dir.join("rank-0.sock"), "").unwrap();
        }
        std::os::unix::fs::symlink(&other, &link).unwrap();
        remove_socket_dirs_of_the_dead(temp.path());
        assert!(!dead.exists());
        assert!(alive.exists() && link.is_symlink() && other.join("rank-0.sock").exists());
    }
}
