//! Options from elsewhere than the command line: a TOML file, and variables that are set to nothing.

use std::{env, ffi::OsStr, fs, path::Path};

use clap::{Arg, Command, builder::Resettable};

use super::error::ConfigError;

/// The options of a TOML file as arguments of `command`, but for those (by id) that are `given` by the command line or
/// a variable, which win over the file.
///
/// # Errors
/// Names the file and the key or line that is wrong.
pub fn file_arguments(
    command: &Command,
    given: impl Fn(&str) -> bool,
    path: &Path,
) -> Result<Vec<String>, ConfigError> {
    let wrong = |what: String| ConfigError::File { path: path.into(), what };
    let text = fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| wrong(error.to_string().trim().into()))?;
    let mut arguments = Vec::new();
    for (key, value) in &table {
        let id = key.replace('-', "_");
        let option = command.get_arguments().find(|option| option.get_id() == id.as_str() && id != "config");
        let Some(option) = option else { return Err(wrong(format!("there is no option {key:?}"))) };
        let value = match value {
            toml::Value::String(text) => text.clone(),
            toml::Value::Integer(number) => number.to_string(),
            toml::Value::Boolean(truth) => truth.to_string(),
            other => {
                return Err(wrong(format!(
                    "{key} is of type {}, but must be a text, a whole number, true or false",
                    other.type_str()
                )));
            }
        };
        if !given(&id) {
            let long = option.get_long().expect("every option of this program has a long name");
            arguments.push(format!("--{long}={value}"));
        }
    }
    Ok(arguments)
}

/// `command` and its subcommands without the variables that are set to nothing: as in `LOOPLANE_TP=` of a service file,
/// that means the default.
pub fn without_empty_variables(command: Command) -> Command {
    let is_empty = |name: &OsStr| env::var_os(name).is_some_and(|value| value.is_empty());
    let forget = |option: Arg| match option.get_env().is_some_and(is_empty) {
        true => option.env(Resettable::Reset),
        false => option,
    };
    command.mut_args(forget).mut_subcommands(without_empty_variables)
}

#[cfg(test)]
mod tests {
    use clap::Args;

    use super::*;
    use crate::config::{ServeArgs, tests::parse};

    #[test]
    fn the_file_loses_to_the_command_line_and_its_mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("looplane.toml");
        let command = ServeArgs::augment_args(Command::new("serve"));
        let with_file = |contents: &str| {
            fs::write(&path, contents).unwrap();
            file_arguments(&command, |id| id == "port", &path).map_err(|error| error.to_string())
        };
        let arguments = with_file("max-slots = 32\nmax_batch_tokens = 64\nhost = \"0.0.0.0\"\nport = 1").unwrap();
        let mut all: Vec<&str> = arguments.iter().map(String::as_str).collect();
        all.extend(["--max-slots", "16"]);
        let parsed = parse(&all);
        let bounds = (parsed.engine.max_slots, parsed.engine.max_batch_tokens);
        assert_eq!((bounds, parsed.host.as_str(), parsed.port), ((Some(16), Some(64)), "0.0.0.0", 8000));
        let access = with_file("metrics-without-key = true\ncors-allow-origin = \"http://a,http://b\"").unwrap();
        let access = parse(&access.iter().map(String::as_str).collect::<Vec<_>>()).access;
        assert!(access.metrics_without_key && access.cors_allow_origin == ["http://a", "http://b"]);
        assert!(with_file("max-slot = 1").unwrap_err().contains("\"max-slot\""));
        assert!(with_file("config = \"x\"").unwrap_err().contains("\"config\""));
        assert!(with_file("port = [1]").unwrap_err().contains("port"));
        assert!(with_file("port = ").unwrap_err().contains("looplane.toml"));
        fs::remove_file(&path).unwrap();
        assert!(file_arguments(&command, |_| false, &path).unwrap_err().to_string().contains("looplane.toml"));
    }
}
