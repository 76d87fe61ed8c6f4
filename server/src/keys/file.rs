//! The file of keys: a line for each, `ID SHA256 [LIMIT=N]... [admin]`, and `#` before a comment.

use std::{collections::HashSet, fs, path::Path};

use uuid::Uuid;

use super::{FILE_OPTION, Hash, KeyLimits, hash};
use crate::{
    engine::{MAX_WEIGHT, PRIORITIES},
    reload::FileError,
};

/// What each new key begins with, so that one that has leaked is recognised.
const PREFIX: &str = "sk-looplane-";
/// Longest id: it stands in every line of the log.
const MAX_ID_BYTES: usize = 64;

const LIMITS: &str =
    "concurrent=N, requests_per_minute=N, tokens_per_minute=N, tokens_per_day=N, weight=N, priority=N and admin";

/// A line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) id: String,
    pub(super) hash: Hash,
    pub(super) limits: KeyLimits,
}

/// Draws a key. Returns it, and the line that lets it in.
///
/// # Errors
/// The id cannot stand in a line.
pub fn new_key(id: &str, limits: KeyLimits) -> Result<(String, String), String> {
    check_id(id)?;
    // Of the 256 bits, 244 are drawn.
    let key = format!("{PREFIX}{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple());
    let hex: String = hash(key.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((key, format!("{id} {hex}{limits}")))
}

/// Reads the file.
///
/// # Errors
/// Names the line that is wrong. A file without keys is wrong, too: it may be one that is being written.
pub(super) fn read(path: &Path) -> Result<Vec<Entry>, FileError> {
    let wrong = |what: String| FileError::new(FILE_OPTION, path, what);
    parse(&fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?).map_err(wrong)
}

fn parse(text: &str) -> Result<Vec<Entry>, String> {
    let mut entries = Vec::new();
    let (mut ids, mut hashes) = (HashSet::new(), HashSet::new());
    for (line, number) in text.lines().zip(1..) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        // The line itself is not told: by mistake it may have a key in it.
        let entry = parse_line(line).map_err(|what| format!("line {number}: {what}"))?;
        if !ids.insert(entry.id.clone()) || !hashes.insert(entry.hash) {
            return Err(format!("line {number}: an earlier line has the same id or the same hash"));
        }
        entries.push(entry);
    }
    match entries.is_empty() {
        true => Err("there is no key in it; `looplane key ID` makes a line".into()),
        false => Ok(entries),
    }
}

fn parse_line(line: &str) -> Result<Entry, String> {
    let mut words = line.split_whitespace();
    let (id, hex) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    check_id(id)?;
    let hash = parse_hash(hex).ok_or("after the id stands the SHA-256 of the key, 64 hexadecimal digits")?;
    let mut limits = KeyLimits::default();
    for word in words {
        if word == "admin" {
            limits.admin = true;
            continue;
        }
        let (limit, number) = word.split_once('=').unwrap_or((word, ""));
        let (limit, most) = match limit {
            "priority" => {
                let number = number.parse().ok().filter(|number| PRIORITIES.contains(number));
                let (first, last) = (PRIORITIES.start(), PRIORITIES.end());
                limits.priority = Some(number.ok_or_else(|| format!("priority is one of {first} to {last}"))?);
                continue;
            }
            "concurrent" => (&mut limits.concurrent, u32::MAX),
            "requests_per_minute" => (&mut limits.requests_per_minute, u32::MAX),
            "tokens_per_minute" => (&mut limits.tokens_per_minute, u32::MAX),
            "tokens_per_day" => (&mut limits.tokens_per_day, u32::MAX),
            "weight" => (&mut limits.weight, MAX_WEIGHT),
            _ => return Err(format!("limits are {LIMITS}")),
        };
        let number = number.parse().ok().filter(|number| (1..=most).contains(number));
        *limit = Some(number.ok_or_else(|| format!("this limit is a whole number of 1 to {most}"))?);
    }
    Ok(Entry { id: id.into(), hash, limits })
}

fn check_id(id: &str) -> Result<(), String> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._@-".contains(&byte);
    match (1..=MAX_ID_BYTES).contains(&id.len()) && id.bytes().all(allowed) {
        true => Ok(()),
        false => Err(format!("an id is 1 to {MAX_ID_BYTES} letters, digits, or any of ._@-")),
    }
}

fn parse_hash(hex: &str) -> Option<Hash> {
    let digits: Option<Vec<u8>> = hex.chars().map(|digit| digit.to_digit(16).map(|value| value as u8)).collect();
    let bytes: Vec<u8> = digits?.chunks(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect();
    bytes.try_into().ok().filter(|_| hex.len() == 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_keys_line_lets_it_in() {
        let limits = KeyLimits {
            concurrent: Some(8),
            requests_per_minute: Some(60),
            tokens_per_minute: Some(60_000),
            tokens_per_day: Some(1_000_000),
            weight: Some(3),
            priority: Some(-2),
            admin: true,
        };
        let (key, line) = new_key("alice@example.org", limits).unwrap();
        assert!(key.starts_with(PREFIX) && key.len() == PREFIX.len() + 64 && !line.contains(&key));
        let hash = hash(key.as_bytes());
        assert_eq!(parse(&line).unwrap(), [Entry { id: "alice@example.org".into(), hash, limits }]);
        assert_ne!(new_key("a", limits).unwrap().0, new_key("a", limits).unwrap().0);
        assert!(new_key("a b", limits).is_err() && new_key("", limits).is_err());
    }

    #[test]
    fn lines_have_comments_and_limits() {
        let (digest, other) = ("ab".repeat(32), "CD".repeat(32));
        let text = format!("# who\n\n alice  {digest} # first\nbob\t{other} concurrent=2\r\n");
        let entries = parse(&text).unwrap();
        assert_eq!(
            (entries[0].id.as_str(), entries[0].hash, entries[0].limits),
            ("alice", [0xab; 32], KeyLimits::default())
        );
        assert_eq!((entries[1].hash, entries[1].limits.concurrent), ([0xcd; 32], Some(2)));
    }

    #[test]
    fn a_wrong_line_is_named_and_not_told() {
        let hash = "ab".repeat(32);
        for (text, says) in [
            (String::new(), "no key"),
            ("# nobody".into(), "no key"),
            ("alice".into(), "line 1: after the id"),
            ("\nalice secret".into(), "line 2: after the id"),
            (format!("alice {hash}00"), "64 hexadecimal"),
            (format!("alice {}é", &hash[2..]), "64 hexadecimal"),
            (format!("al/ice {hash}"), "line 1: an id"),
            (format!("alice {hash} concurrent=0"), "1 to"),
            (format!("alice {hash} concurrent"), "1 to"),
            (format!("alice {hash} tokens_per_day=4294967296"), "1 to 4294967295"),
            (format!("alice {hash} weight=1001"), "1 to 1000"),
            (format!("alice {hash} priority=101"), "one of -100 to 100"),
            (format!("alice {hash} priority"), "one of"),
            (format!("alice {hash} places=3"), "limits are"),
            (format!("alice {hash}\nalice {}", "cd".repeat(32)), "line 2: an earlier line"),
            (format!("alice {hash}\nbob {hash}"), "line 2: an earlier line"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(says) && !error.contains("secret"), "{text:?}: {error}");
        }
    }
}
