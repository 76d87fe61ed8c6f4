//! What operators write.

use std::fs;

use clap::{Args, Command, FromArgMatches};
use looplane_server::{
    config::{ServeArgs, file_arguments},
    keys::{KeyLimits, Keys, new_key},
};
use tempfile::TempDir;

/// A file of API keys. One that is taken still is with one more line, whose key is found then; of one that is not, the
/// line is told but for what it says, since that may be a key.
pub fn keys(bytes: &[u8]) {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("keys");
    fs::write(&path, bytes).expect("it can be written");
    let load = || Keys::load(Some(path.clone()), None).map(|keys| keys.expect("there is a file").current());
    match load() {
        Ok(keys) => {
            let ids: Vec<&str> = keys.iter().map(|key| &*key.id).collect();
            let (key, line) = new_key("one-more.of-this@target", KeyLimits::default()).expect("a valid id");
            fs::write(&path, [bytes, b"\n", line.as_bytes(), b"\n"].concat()).expect("it can be written");
            let more = load().expect("one more line is no harm");
            assert!(more.iter().map(|key| &*key.id).eq(ids.iter().copied().chain(["one-more.of-this@target"])));
            assert_eq!(&*more.find(key.as_bytes()).expect("it is there").id, "one-more.of-this@target");
        }
        Err(error) => {
            let text = String::from_utf8_lossy(bytes);
            let mut words = text.split_whitespace().filter(|word| word.len() > 20);
            assert!(words.all(|word| !error.what.contains(word)), "{error}");
            assert!(error.what.contains("line ") || error.what.contains("no key") || error.what.contains("UTF-8"));
        }
    }
}

/// A TOML file of options, up to the checks of their values. What is wrong in it is said with the file.
pub fn options(bytes: &[u8]) {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("looplane.toml");
    fs::write(&path, bytes).expect("it can be written");
    let command = ServeArgs::augment_args(Command::new("serve"));
    let arguments = match file_arguments(&command, |_| false, &path) {
        Ok(arguments) => arguments,
        Err(error) => return assert!(error.to_string().contains("looplane.toml"), "{error}"),
    };
    // Nothing but files that the options name is read from here on.
    if arguments.iter().any(|argument| argument.contains('/')) {
        return;
    }
    match command.try_get_matches_from(["serve".into()].into_iter().chain(arguments)) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(matches) => {
            let args = ServeArgs::from_arg_matches(&matches).expect("clap has checked them");
            if let Err(error) = args.check(|_, _| 1) {
                assert!(!error.to_string().is_empty());
            }
        }
    }
}
