//! Where the model lies: a directory, Hugging Face's cache on this machine, or the demo model.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use super::error::ConfigError;

/// Where the demo model lies, from the root of the source tree or from the folder of the binary.
const DEMO_MODEL: &str = "deploy/demo/model";
/// The demo model's name in requests.
const DEMO_ID: &str = "looplane-demo";

/// A model to serve.
pub(super) struct Model {
    /// Its directory.
    pub(super) dir: PathBuf,
    /// Its name in requests where none is given.
    pub(super) id: String,
}

/// The model that `--model` gives: a directory, or a name such as `org/name` of one in Hugging Face's cache.
///
/// # Errors
/// There is none; where it can be downloaded, by which command.
pub(super) fn find(given: Option<PathBuf>) -> Result<Model, ConfigError> {
    let Some(path) = given else {
        return demo_model().map(|dir| Model { dir, id: DEMO_ID.into() });
    };
    let cache = hub_cache(|name| env::var_os(name));
    let wrong = |what: String| Err(ConfigError::Model { path: path.clone(), what });
    let Ok(dir) = path.canonicalize() else {
        let Some((organisation, name)) = hub_name(&path) else { return wrong("there is no such directory".into()) };
        return match cache.as_deref().and_then(|cache| cached(cache, organisation, name)) {
            Some(dir) => Ok(Model { dir, id: format!("{organisation}/{name}") }),
            None => wrong(how_to_download(organisation, name, cache.as_deref())),
        };
    };
    if !dir.is_dir() {
        return wrong("this is not a directory".into());
    }
    if !dir.join("config.json").is_file() {
        return wrong("there is no config.json in this directory".into());
    }
    let id = dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    Ok(Model { dir, id })
}

/// The demo model: in the source tree that this binary was built from, or else beside the binary.
///
/// # Errors
/// It is in neither.
pub fn demo_model() -> Result<PathBuf, ConfigError> {
    let in_sources = Path::new(env!("CARGO_MANIFEST_DIR")).parent().map(|root| root.join(DEMO_MODEL));
    let beside_binary = env::current_exe().ok().and_then(|exe| Some(exe.parent()?.join(DEMO_MODEL)));
    let places: Vec<PathBuf> = [in_sources, beside_binary].into_iter().flatten().collect();
    let found = places.iter().find(|place| place.join("config.json").is_file()).cloned();
    found.ok_or_else(|| ConfigError::NoDemoModel(places.into_iter().next().unwrap_or_else(|| DEMO_MODEL.into())))
}

/// The organisation and the name, where `path` may be a model's name on the Hugging Face Hub.
fn hub_name(path: &Path) -> Option<(&str, &str)> {
    let is_name = |part: &str| {
        let usual = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        part.bytes().all(usual) && part.starts_with(|first: char| first.is_ascii_alphanumeric())
    };
    path.to_str()?.split_once('/').filter(|(organisation, name)| is_name(organisation) && is_name(name))
}

/// Where Hugging Face's tools keep what they downloaded, by the variables that move it.
fn hub_cache(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name: &str| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let hugging_face = || path("HF_HOME").or_else(|| Some(user_cache(path)?.join("huggingface")));
    path("HF_HUB_CACHE").or_else(|| Some(hugging_face()?.join("hub")))
}

fn user_cache(path: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")))
}

/// The snapshot of a model that `refs/main` names, or else any; with config.json and weights, since tools that ask for
/// a file alone leave snapshots without the others.
fn cached(cache: &Path, organisation: &str, name: &str) -> Option<PathBuf> {
    let model = cache.join(format!("models--{organisation}--{name}"));
    let snapshots = model.join("snapshots");
    let main = fs::read_to_string(model.join("refs/main")).ok().map(|commit| snapshots.join(commit.trim()));
    let others = fs::read_dir(&snapshots).into_iter().flatten().flatten().map(|entry| entry.path());
    main.into_iter().chain(others).find(|snapshot| is_whole(snapshot))
}

fn is_whole(snapshot: &Path) -> bool {
    let is_weights = |path: &Path| path.extension().is_some_and(|extension| extension == "safetensors");
    let has_weights = || fs::read_dir(snapshot).into_iter().flatten().flatten().any(|entry| is_weights(&entry.path()));
    snapshot.join("config.json").is_file() && has_weights()
}

fn how_to_download(organisation: &str, name: &str, cache: Option<&Path>) -> String {
    let nor_cached = cache.map(|cache| format!(", nor such a model in {}", cache.display())).unwrap_or_default();
    format!(
        "there is no such directory{nor_cached}; `hf download {organisation}/{name} --local-dir {name}` downloads it, \
         then serve it with --model {name}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_a_name_on_the_hub_and_what_is_a_path() {
        let name = |path: &'static str| hub_name(Path::new(path));
        assert_eq!(name("HuggingFaceTB/SmolLM2-135M"), Some(("HuggingFaceTB", "SmolLM2-135M")));
        for path in ["/srv/models", "./model", "../model", "model", "a/b/c", "a/", "a/b c", "a/.."] {
            assert_eq!(name(path), None, "{path}");
        }
    }

    #[test]
    fn the_cache_is_where_hugging_faces_variables_say() {
        let cache = |set: &[(&str, &str)]| {
            let of = |name: &str| set.iter().find(|(set, _)| *set == name).map(|(_, value)| OsString::from(value));
            hub_cache(of).map(|path| path.to_str().unwrap().to_owned())
        };
        let home = ("HOME", "/home/user");
        assert_eq!(cache(&[home]).as_deref(), Some("/home/user/.cache/huggingface/hub"));
        assert_eq!(cache(&[home, ("HF_HOME", "")]).as_deref(), Some("/home/user/.cache/huggingface/hub"));
        assert_eq!(cache(&[home, ("XDG_CACHE_HOME", "/cache")]).as_deref(), Some("/cache/huggingface/hub"));
        assert_eq!(cache(&[home, ("HF_HOME", "/hf")]).as_deref(), Some("/hf/hub"));
        assert_eq!(cache(&[home, ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/hub")]).as_deref(), Some("/hub"));
        assert_eq!(cache(&[]), None);
    }

    #[test]
    fn a_snapshot_is_taken_once_it_is_whole_and_mains_first() {
        let cache = tempfile::tempdir().unwrap();
        let model = cache.path().join("models--org--name");
        let found = || cached(cache.path(), "org", "name").map(|dir| dir.strip_prefix(&model).unwrap().to_owned());
        let write = |file: &str, contents: &str| {
            let path = model.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, contents).unwrap();
        };
        assert_eq!(found(), None);
        write("snapshots/older/config.json", "{}");
        assert_eq!(found(), None, "without weights");
        write("snapshots/older/model.safetensors", "");
        assert_eq!(found(), Some("snapshots/older".into()));
        write("refs/main", "newer\n");
        write("snapshots/newer/config.json", "{}");
        assert_eq!(found(), Some("snapshots/older".into()), "the newer one is not whole yet");
        write("snapshots/newer/model.safetensors", "");
        assert_eq!(found(), Some("snapshots/newer".into()));
    }
}
