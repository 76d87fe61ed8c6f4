//! API keys: who may ask, and how much at a time.

use std::{fmt, path::PathBuf, sync::Arc};

use sha2::{Digest, Sha256};
use subtle::{Choice, ConditionallySelectable, ConstantTimeEq};

mod file;
mod usage;

pub use file::new_key;
pub use usage::{KeyLimitError, KeyLimits, Quota, Running, Totals};

use crate::{
    engine::PRIORITIES,
    reload::{FileError, Reloaded},
};
use file::Entry;
use usage::Usage;

/// Name in the log of the key that an option gives.
const OPTION_ID: &str = "api-key";
const FILE_OPTION: &str = "--api-key-file";

/// What the server keeps of a key.
type Hash = [u8; 32];

/// A key as its user has it, on its way to its hash. It is never shown.
#[derive(Clone)]
pub struct PlainKey(String);

impl PlainKey {
    /// Whether a header can carry it.
    pub fn is_usable(&self) -> bool {
        !self.0.is_empty() && self.0.bytes().all(|byte| byte.is_ascii_graphic())
    }
}

impl From<String> for PlainKey {
    fn from(key: String) -> Self {
        Self(key)
    }
}

impl fmt::Debug for PlainKey {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("PlainKey")
    }
}

/// Whose key a request has, and what it may use.
#[derive(Debug)]
pub struct Key {
    /// Its name in the log.
    pub id: Arc<str>,
    /// Among whom the server is shared; `None`: there is no other key.
    pub owner: Option<Arc<str>>,
    limits: KeyLimits,
    /// Goes on when the file is read anew.
    usage: Arc<Usage>,
}

/// All keys that are taken.
#[derive(Debug)]
pub struct Keys(Vec<(Hash, Arc<Key>)>);

impl Keys {
    /// The keys of a file, which is followed, and that of an option. `None`: there are neither, and no key is needed.
    ///
    /// # Errors
    /// The file cannot be read, or a line of it is wrong.
    pub fn load(file: Option<PathBuf>, option: Option<PlainKey>) -> Result<Option<Arc<Reloaded<Self>>>, FileError> {
        if file.is_none() && option.is_none() {
            return Ok(None);
        }
        let option = option.map(|key| hash(key.0.as_bytes()));
        let files = file.iter().cloned().collect();
        let make = move |before: Option<&Self>| {
            let entries = file.as_deref().map_or(Ok(Vec::new()), file::read)?;
            Ok(Self::new(entries, option, before))
        };
        Ok(Some(Arc::new(Reloaded::new(files, make)?)))
    }

    fn new(mut entries: Vec<Entry>, option: Option<Hash>, before: Option<&Self>) -> Self {
        // Who starts the server may ask for everything.
        let limits = KeyLimits { priority: Some(*PRIORITIES.start()), admin: true, ..KeyLimits::default() };
        entries.extend(option.map(|hash| Entry { id: OPTION_ID.into(), hash, limits }));
        let is_alone = entries.len() == 1;
        let usage = |id: &str| {
            let known = before.and_then(|before| before.0.iter().find(|(_, key)| *key.id == *id));
            known.map_or_else(Arc::default, |(_, key)| key.usage.clone())
        };
        let key = |Entry { id, hash, limits }| {
            let (usage, id) = (usage(&id), Arc::<str>::from(id));
            let owner = (!is_alone).then(|| id.clone());
            (hash, Arc::new(Key { id, owner, limits, usage }))
        };
        Self(entries.into_iter().map(key).collect())
    }

    /// Whose key this is. How long that takes says nothing of the keys: all hashes are compared, whole.
    pub fn find(&self, presented: &[u8]) -> Option<Arc<Key>> {
        let presented = hash(presented);
        let (mut found, mut at) = (Choice::from(0), 0);
        for (index, (hash, _)) in (0..).zip(&self.0) {
            let same = hash.ct_eq(&presented);
            found |= same;
            at = u32::conditional_select(&at, &index, same);
        }
        bool::from(found).then(|| self.0[at as usize].1.clone())
    }
}

impl Keys {
    /// All of them, as they stand in the file.
    pub fn iter(&self) -> impl Iterator<Item = &Key> {
        self.0.iter().map(|(_, key)| &**key)
    }
}

impl Key {
    /// Of a test.
    #[cfg(test)]
    pub(crate) fn unlimited(id: &str) -> Self {
        Self { id: id.into(), owner: None, limits: KeyLimits::default(), usage: Arc::default() }
    }

    /// Its share where keys want more than there is.
    pub fn weight(&self) -> u32 {
        self.limits.weight.unwrap_or(1)
    }

    /// Whether it may change how the server runs.
    pub fn is_admin(&self) -> bool {
        self.limits.admin
    }

    /// The first priority that its requests may ask for.
    pub fn first_priority(&self) -> i32 {
        self.limits.priority.unwrap_or(0)
    }
}

fn hash(key: &[u8]) -> Hash {
    Sha256::digest(key).into()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn ids(keys: &Keys, presented: &[&str]) -> Vec<Option<String>> {
        presented.iter().map(|key| keys.find(key.as_bytes()).map(|key| key.id.to_string())).collect()
    }

    #[test]
    fn keys_of_the_file_and_of_the_option_are_found_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let (alice, alices_line) = new_key("alice", KeyLimits::default()).unwrap();
        let (bob, bobs_line) = new_key("bob", KeyLimits::default()).unwrap();
        fs::write(&path, format!("{alices_line}\n{bobs_line}\n")).unwrap();
        let keys = Keys::load(Some(path), Some(PlainKey::from("simple".to_owned()))).unwrap().unwrap().current();
        let found = ids(&keys, &[&alice, &bob, "simple", "", "simpl", "simple ", "alice", &alices_line]);
        let id = |id: &str| Some(id.to_owned());
        assert_eq!(found, [id("alice"), id("bob"), id("api-key"), None, None, None, None, None]);
        assert!(Keys::load(None, None).unwrap().is_none());
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", PlainKey::from("secret".to_owned())), "PlainKey");
        assert!(!PlainKey::from(String::new()).is_usable() && !PlainKey::from("a b".to_owned()).is_usable());
    }

    #[test]
    fn what_a_key_uses_goes_on_when_its_file_is_read_anew() {
        let entries = |concurrent| {
            let limits = KeyLimits { concurrent: Some(concurrent), ..KeyLimits::default() };
            vec![Entry { id: "alice".into(), hash: hash(b"a"), limits }]
        };
        let before = Keys::new(entries(1), None, None);
        let running = before.find(b"a").unwrap().begin().unwrap();
        let same = Keys::new(entries(1), None, Some(&before));
        assert!(same.find(b"a").unwrap().begin().is_err());
        let more = Keys::new(entries(2), None, Some(&same));
        more.find(b"a").unwrap().begin().unwrap();
        drop(running);
        same.find(b"a").unwrap().begin().unwrap();
    }
}
