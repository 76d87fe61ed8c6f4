//! `looplane serve`'s options: from the command line, `LOOPLANE_` variables and a TOML file, once, into a checked [`Config`].

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use clap::{Arg, Args, Command, ValueEnum, builder::Resettable};
use looplane_proto::worker::v1::load_request;

use crate::{
    group::{GroupConfig, Waits},
    listener::ServeOptions,
    sched::Limits,
};

/// Where the demo model lies, from the root of the source tree or from the folder of the binary.
const DEMO_MODEL: &str = "deploy/demo/model";
/// The demo model's name in requests.
const DEMO_ID: &str = "looplane-demo";

/// Options of `looplane serve`. The command line wins over variables, and those over the file.
#[derive(Debug, Clone, Args)]
#[command(args_override_self = true)]
pub struct ServeArgs {
    /// TOML file with any of these options, such as `max-slots = 32`
    #[arg(long, value_name = "FILE", env = "LOOPLANE_CONFIG")]
    pub config: Option<PathBuf>,

    /// Model directory as Hugging Face lays it out [default: the demo model that comes with Looplane]
    #[arg(long, value_name = "DIR", env = "LOOPLANE_MODEL")]
    pub model: Option<PathBuf>,

    /// Name of the model in requests [default: the directory's name]
    #[arg(long, value_name = "NAME", env = "LOOPLANE_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,

    /// Tensor parallelism: worker processes that share the model (1, 2, 4, 8 or 16) [default: 2 on CPUs, 1 on a GPU]
    #[arg(long, value_name = "N", env = "LOOPLANE_TP")]
    pub tp: Option<u32>,

    /// Where the workers compute
    #[arg(long, value_enum, default_value_t = Device::Auto, env = "LOOPLANE_DEVICE")]
    pub device: Device,

    /// How a GPU runs the phases of a step: off is there to be measured against; the tokens are the same
    #[arg(long = "loop", value_enum, value_name = "MODE", default_value_t = LoopMode::On, env = "LOOPLANE_LOOP")]
    pub loop_mode: LoopMode,

    /// Compute threads of each worker [default: the machine's cores divided by --tp]
    #[arg(long, value_name = "N", env = "LOOPLANE_THREADS")]
    pub threads: Option<u32>,

    /// Address to listen on; 0.0.0.0 for all
    #[arg(long, default_value = "127.0.0.1", env = "LOOPLANE_HOST")]
    pub host: String,

    /// Port for HTTP and gRPC; 0 for any free one
    #[arg(long, default_value_t = 8000, env = "LOOPLANE_PORT")]
    pub port: u16,

    /// Sequences computed at one time
    #[arg(long, value_name = "N", default_value_t = 64, env = "LOOPLANE_MAX_SLOTS")]
    pub max_slots: u32,

    /// Rows (prompt tokens and decoding sequences) of one step; at least --max-slots
    #[arg(long, value_name = "N", default_value_t = 512, env = "LOOPLANE_MAX_BATCH_TOKENS")]
    pub max_batch_tokens: u32,

    /// Steps that the workers run on their own before they need a new plan
    #[arg(long, value_name = "N", default_value_t = 16, env = "LOOPLANE_STEPS_PER_PLAN")]
    pub steps_per_plan: u32,

    /// Pages of the KV cache; 0: as many as --max-slots full contexts need, within --kv-memory-mib
    #[arg(long, value_name = "N", default_value_t = 0, env = "LOOPLANE_KV_PAGES")]
    pub kv_pages: u32,

    /// Bound on the KV cache of each worker in MiB, where --kv-pages is 0 [default: 4096 on CPUs, what is left on a GPU]
    #[arg(long, value_name = "MIB", env = "LOOPLANE_KV_MEMORY_MIB")]
    pub kv_memory_mib: Option<u32>,

    /// Bound on prompt and output of one sequence in tokens; 0: the model's own
    #[arg(long, value_name = "N", default_value_t = 0, env = "LOOPLANE_MAX_CONTEXT")]
    pub max_context: u32,

    /// Sequences that may wait for a place; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1024, env = "LOOPLANE_MAX_QUEUED_REQUESTS")]
    pub max_queued_requests: u64,

    /// Prompt tokens that may wait for a place; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1 << 20, env = "LOOPLANE_MAX_QUEUED_TOKENS")]
    pub max_queued_tokens: u64,

    /// Requests for text served at one time, waiting ones included; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1024, env = "LOOPLANE_MAX_CONCURRENT_REQUESTS")]
    pub max_concurrent_requests: u32,

    /// Connections open at one time
    #[arg(long, value_name = "N", default_value_t = 4096, env = "LOOPLANE_MAX_CONNECTIONS")]
    pub max_connections: u32,

    /// Bytes of one request's body; more are answered with 413
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20, env = "LOOPLANE_MAX_BODY_BYTES")]
    pub max_body_bytes: u32,

    /// Longest that one step may take; a worker that takes longer counts as hung, and all are started again. A big model on
    /// few cores may need more, or a lower --max-batch-tokens
    #[arg(long, value_name = "S", default_value_t = 120, env = "LOOPLANE_STEP_LIMIT_SECONDS")]
    pub step_limit_seconds: u32,

    /// Time for running requests to end after SIGTERM or Ctrl-C; a second signal ends them at once
    #[arg(long, value_name = "S", default_value_t = 30, env = "LOOPLANE_DRAIN_SECONDS")]
    pub drain_seconds: u32,

    /// Stop when standard input ends: with the process that started this one
    #[arg(long, hide = true)]
    pub until_stdin_closes: bool,
}

/// Where the workers compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Device {
    /// The best that this machine has.
    Auto,
    /// CPU sockets.
    Cpu,
    /// GPUs.
    Cuda,
}

/// How a GPU runs the phases of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LoopMode {
    /// One launch walks all phases of many steps.
    On,
    /// A launch for each phase of each layer, in a CUDA graph, for passes of up to 8 rows; wider ones have none and keep their loop.
    Off,
}

/// Options that can work, as far as can be known before anything is started.
#[derive(Debug, Clone)]
pub struct Config {
    /// Host name or address to listen on.
    pub host: String,
    /// Port to listen on; 0 for any free one.
    pub port: u16,
    /// Whether the end of standard input stops the server as the first signal does.
    pub until_stdin_closes: bool,
    /// The front end's bounds.
    pub serve: ServeOptions,
    /// The workers and their bounds.
    pub group: GroupConfig,
}

/// Why options cannot work; one sentence that says what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The configuration file cannot be used.
    #[error("the configuration file {}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong in it.
        what: String,
    },
    /// No model is given and there is no demo model.
    #[error("the demo model is not at {}; name a model directory with --model DIR", .0.display())]
    NoDemoModel(PathBuf),
    /// The model directory is none.
    #[error("--model {}: {what}", path.display())]
    Model {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        what: &'static str,
    },
    /// An option has a value that cannot work.
    #[error("{option} is {value}, but must be {rule}")]
    Value {
        /// With its dashes.
        option: &'static str,
        /// As given.
        value: String,
        /// What it must be.
        rule: String,
    },
}

impl ServeArgs {
    /// Checks the options and fills in what was left out.
    ///
    /// # Errors
    /// Names the option to change.
    pub fn check(self) -> Result<Config, ConfigError> {
        let value = |option, value: &dyn ToString, rule: &str| {
            Err(ConfigError::Value { option, value: value.to_string(), rule: rule.into() })
        };
        let tp = self.tp.unwrap_or(if self.device == Device::Cuda { 1 } else { 2 });
        if !matches!(tp, 1 | 2 | 4 | 8 | 16) {
            return value("--tp", &tp, "1, 2, 4, 8 or 16");
        }
        let cores = thread::available_parallelism().map_or(1, |count| count.get() as u32);
        let threads = self.threads.unwrap_or((cores / tp).max(1));
        for (option, count) in [
            ("--threads", u64::from(threads)),
            ("--max-slots", self.max_slots.into()),
            ("--steps-per-plan", self.steps_per_plan.into()),
            ("--kv-memory-mib", self.kv_memory_mib.unwrap_or(1).into()),
            ("--max-queued-requests", self.max_queued_requests),
            ("--max-queued-tokens", self.max_queued_tokens),
            ("--max-concurrent-requests", self.max_concurrent_requests.into()),
            ("--max-connections", self.max_connections.into()),
            ("--max-body-bytes", self.max_body_bytes.into()),
            ("--step-limit-seconds", self.step_limit_seconds.into()),
        ] {
            if count == 0 {
                return value(option, &0, "at least 1");
            }
        }
        if self.max_batch_tokens < self.max_slots {
            let rule = format!("at least --max-slots, which is {}: raise the one or lower the other", self.max_slots);
            return value("--max-batch-tokens", &self.max_batch_tokens, &rule);
        }
        let (model_dir, directory_name) = find_model(self.model)?;
        let model_id = self.served_model_name.unwrap_or(directory_name);
        if model_id.is_empty() || model_id.len() > 256 || model_id.chars().any(char::is_control) {
            let given = if model_id.is_empty() { "empty" } else { &model_id };
            return value("--served-model-name", &given, "1 to 256 printable characters");
        }
        Ok(Config {
            until_stdin_closes: self.until_stdin_closes,
            host: self.host,
            port: self.port,
            serve: ServeOptions {
                model_id,
                max_connections: self.max_connections as usize,
                max_concurrent_requests: self.max_concurrent_requests as usize,
                max_body_bytes: self.max_body_bytes as usize,
                drain: Duration::from_secs(self.drain_seconds.into()),
                ..ServeOptions::default()
            },
            group: GroupConfig {
                threads,
                limits: Limits {
                    max_slots: self.max_slots,
                    max_batch_tokens: self.max_batch_tokens,
                    steps_per_plan: self.steps_per_plan,
                    max_waiting_requests: self.max_queued_requests,
                    max_waiting_tokens: self.max_queued_tokens,
                    ..Limits::default()
                },
                kv_pages: self.kv_pages,
                kv_bytes_limit: u64::from(self.kv_memory_mib.unwrap_or(0)) << 20,
                device: match self.device {
                    Device::Auto => load_request::Device::Auto,
                    Device::Cpu => load_request::Device::Cpu,
                    Device::Cuda => load_request::Device::Cuda,
                },
                unlooped: self.loop_mode == LoopMode::Off,
                max_context: self.max_context,
                waits: Waits {
                    step: Duration::from_secs(self.step_limit_seconds.into()),
                    drain: Duration::from_secs(self.drain_seconds.into()),
                    ..Waits::default()
                },
                ..GroupConfig::new(model_dir, tp)
            },
        })
    }
}

/// The options of a TOML file as arguments of `command`, those left out that a variable sets: variables win over the file.
///
/// # Errors
/// Names the file and the key or line that is wrong.
pub fn file_arguments(command: &Command, path: &Path) -> Result<Vec<String>, ConfigError> {
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
            other => {
                return Err(wrong(format!(
                    "{key} is of type {}, but must be a text or a whole number",
                    other.type_str()
                )));
            }
        };
        if option.get_env().is_none_or(|name| env::var_os(name).is_none_or(|value| value.is_empty())) {
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

/// The model directory and its name.
fn find_model(given: Option<PathBuf>) -> Result<(PathBuf, String), ConfigError> {
    let Some(path) = given else {
        return demo_model().map(|path| (path, DEMO_ID.into()));
    };
    let wrong = |what| Err(ConfigError::Model { path: path.clone(), what });
    let Ok(dir) = path.canonicalize() else { return wrong("there is no such directory") };
    if !dir.is_dir() {
        return wrong("this is not a directory");
    }
    if !dir.join("config.json").is_file() {
        return wrong("there is no config.json in this directory");
    }
    let name = dir.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
    Ok((dir, name))
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

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    fn fixture() -> String {
        format!("{}/../worker/tests/fixtures/llama-gqa", env!("CARGO_MANIFEST_DIR"))
    }

    fn parse(arguments: &[&str]) -> ServeArgs {
        let command = ServeArgs::augment_args(Command::new("serve"));
        let matches = command.try_get_matches_from([&["serve"], arguments].concat()).unwrap();
        ServeArgs::from_arg_matches(&matches).unwrap()
    }

    #[test]
    fn the_name_is_the_directorys_unless_another_is_given() {
        let config = parse(&["--model", &fixture()]).check().unwrap();
        assert_eq!((config.serve.model_id.as_str(), config.port), ("llama-gqa", 8000));
        let config = parse(&["--model", &fixture(), "--served-model-name", "x/y"]).check().unwrap();
        assert_eq!(config.serve.model_id, "x/y");
    }

    #[test]
    fn a_gpu_computes_alone_unless_asked_and_keeps_what_memory_is_left() {
        let group = |options: &[&str]| parse(&[&["--model", &fixture()], options].concat()).check().unwrap().group;
        let ranks = |options: &[&str]| group(options).tensor_parallel;
        assert_eq!((ranks(&[]), ranks(&["--device", "cuda"]), ranks(&["--device", "cuda", "--tp", "4"])), (2, 1, 4));
        assert_eq!(group(&["--device", "cuda"]).device, load_request::Device::Cuda);
        let unlooped = |options: &[&str]| group(options).unlooped;
        assert!(unlooped(&["--loop", "off"]) && !unlooped(&["--loop", "on"]) && !unlooped(&[]));
        assert_eq!((group(&[]).kv_bytes_limit, group(&["--kv-memory-mib", "3"]).kv_bytes_limit), (0, 3 << 20));
    }

    #[test]
    fn what_cannot_work_is_said_in_one_sentence() {
        for (arguments, says) in [
            (["--tp", "3"], "--tp is 3, but must be 1, 2, 4, 8 or 16"),
            (["--threads", "0"], "--threads is 0, but must be at least 1"),
            (["--max-slots", "513"], "--max-batch-tokens is 512, but must be at least --max-slots, which is 513"),
            (["--max-connections", "0"], "--max-connections is 0"),
            (["--step-limit-seconds", "0"], "--step-limit-seconds is 0"),
            (["--served-model-name", ""], "--served-model-name"),
            (["--model", "/nowhere"], "--model /nowhere: there is no such directory"),
            (["--model", "/"], "--model /: there is no config.json in this directory"),
        ] {
            let model = fixture();
            let error = parse(&[&["--model", &model], &arguments[..]].concat()).check().unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }

    #[test]
    fn the_file_loses_to_the_command_line_and_its_mistakes_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("looplane.toml");
        let command = ServeArgs::augment_args(Command::new("serve"));
        let with_file = |contents: &str| {
            fs::write(&path, contents).unwrap();
            file_arguments(&command, &path).map_err(|error| error.to_string())
        };
        let arguments = with_file("max-slots = 32\nmax_batch_tokens = 64\nhost = \"0.0.0.0\"").unwrap();
        let mut all: Vec<&str> = arguments.iter().map(String::as_str).collect();
        all.extend(["--max-slots", "16"]);
        let parsed = parse(&all);
        assert_eq!((parsed.max_slots, parsed.max_batch_tokens, parsed.host.as_str()), (16, 64, "0.0.0.0"));
        assert!(with_file("max-slot = 1").unwrap_err().contains("\"max-slot\""));
        assert!(with_file("config = \"x\"").unwrap_err().contains("\"config\""));
        assert!(with_file("port = [1]").unwrap_err().contains("port"));
        assert!(with_file("port = ").unwrap_err().contains("looplane.toml"));
        fs::remove_file(&path).unwrap();
        assert!(file_arguments(&command, &path).unwrap_err().to_string().contains("looplane.toml"));
    }
}
