//! `looplane serve`'s options: from the command line, `LOOPLANE_` variables and a TOML file, once, into a checked
//! [`Config`].

use std::{
    env,
    path::{Path, PathBuf},
};

use clap::Args;

use crate::{
    drafts::DraftReport,
    fleet::ListenConfig,
    group::GroupConfig,
    listener::ServeOptions,
    reply::{Parsers, ReasoningParser, ToolCallParser},
};

mod access;
mod engine;
mod error;
mod file;
mod join;
mod model;
mod trace;

pub use access::AccessArgs;
use engine::Engine;
pub use engine::{Device, EngineArgs, LogFormat, LoopMode, PrefixCache, Quantization};
pub use error::ConfigError;
pub use file::{file_arguments, without_empty_variables};
pub use join::{HostArgs, HostConfig, JoinListenArgs};
pub use model::demo_model;
pub use trace::TraceArgs;

/// Options of `looplane serve`. The command line wins over variables, and those over the file.
#[derive(Debug, Clone, Args)]
#[command(args_override_self = true)]
pub struct ServeArgs {
    /// TOML file with any of these options, such as `max-slots = 32`
    #[arg(long, value_name = "FILE", env = "LOOPLANE_CONFIG")]
    pub config: Option<PathBuf>,

    /// What computes, and its bounds.
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Name of the model in requests [default: the directory's name, or ORG/NAME]
    #[arg(long, value_name = "NAME", env = "LOOPLANE_SERVED_MODEL_NAME")]
    pub served_model_name: Option<String>,

    /// Address to listen on; 0.0.0.0 for all
    #[arg(long, default_value = "127.0.0.1", env = "LOOPLANE_HOST")]
    pub host: String,

    /// Port for HTTP and gRPC; 0 for any free one
    #[arg(long, default_value_t = 8000, env = "LOOPLANE_PORT")]
    pub port: u16,

    /// Who may ask, and how safely.
    #[command(flatten)]
    pub access: AccessArgs,

    /// Where traces go.
    #[command(flatten)]
    pub trace: TraceArgs,

    /// What answers to requests for one sequence tell of its drafts, in metrics.speculative_decoding, as vLLM does
    #[arg(
        long,
        value_enum,
        value_name = "LEVEL",
        default_value_t = DraftReport::None,
        env = "LOOPLANE_PER_REQUEST_SPEC_DECODE_METRICS"
    )]
    pub per_request_spec_decode_metrics: DraftReport,

    /// How tool calls are found in answers to chats with tools: auto goes by what the chat template has the model
    /// write, none refuses tools
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t = ToolCallParser::Auto,
        env = "LOOPLANE_TOOL_CALL_PARSER"
    )]
    pub tool_call_parser: ToolCallParser,

    /// How thinking is told apart from answers to chats: auto does it where chat template or tokenizer know the tags
    /// <think> and </think>, none leaves it in the content
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        default_value_t = ReasoningParser::Auto,
        env = "LOOPLANE_REASONING_PARSER"
    )]
    pub reasoning_parser: ReasoningParser,

    /// Requests for text served at one time, waiting ones included; more are answered with 429
    #[arg(long, value_name = "N", default_value_t = 1024, env = "LOOPLANE_MAX_CONCURRENT_REQUESTS")]
    pub max_concurrent_requests: u32,

    /// Connections open at one time; for a new one beyond them, the one that has been idle longest is closed
    #[arg(long, value_name = "N", default_value_t = 4096, env = "LOOPLANE_MAX_CONNECTIONS")]
    pub max_connections: u32,

    /// Bytes of one request's body; more are answered with 413
    #[arg(long, value_name = "BYTES", default_value_t = 8 << 20, env = "LOOPLANE_MAX_BODY_BYTES")]
    pub max_body_bytes: u32,

    /// Answers of /v1/responses that are kept in memory, the last, of 64 MiB at most; 0 keeps none
    #[arg(long, value_name = "N", default_value_t = 1000, env = "LOOPLANE_RESPONSE_STORE")]
    pub response_store: u32,

    /// Hosts that may join.
    #[command(flatten)]
    pub join: JoinListenArgs,

    /// Stop when standard input ends: with the process that started this one
    #[arg(long, hide = true)]
    pub until_stdin_closes: bool,
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
    /// How answers are read.
    pub parsers: Parsers,
    /// The workers and their bounds.
    pub group: GroupConfig,
    /// Where hosts may join, if they may.
    pub join: Option<ListenConfig>,
}

impl ServeArgs {
    /// Checks the options and fills in what was left out. `group_size` says by how many workers the model of a
    /// directory is computed where `--tp` does not.
    ///
    /// # Errors
    /// Names the option to change.
    pub fn check(self, group_size: impl FnOnce(&Path, Device) -> u32) -> Result<Config, ConfigError> {
        let value = ConfigError::value;
        let join = self.join.check(self.engine.replicas)?;
        let Engine { group, model_id, drafts } = self.engine.check(u32::from(join.is_none()), group_size)?;
        for (option, count) in [
            ("--max-concurrent-requests", self.max_concurrent_requests),
            ("--max-connections", self.max_connections),
            ("--max-body-bytes", self.max_body_bytes),
        ] {
            if count == 0 {
                return value(option, &0, "at least 1");
            }
        }
        let model_id = self.served_model_name.unwrap_or(model_id);
        if model_id.is_empty() || model_id.len() > 256 || model_id.chars().any(char::is_control) {
            let given = if model_id.is_empty() { "empty" } else { &model_id };
            return value("--served-model-name", &given, "1 to 256 printable characters");
        }
        let (access, tls) = self.access.check()?;
        let otlp = self.trace.check(|name| env::var(name).ok())?;
        Ok(Config {
            until_stdin_closes: self.until_stdin_closes,
            host: self.host,
            port: self.port,
            serve: ServeOptions {
                model_id,
                access,
                tls,
                otlp,
                draft_report: (self.per_request_spec_decode_metrics, drafts),
                max_connections: self.max_connections as usize,
                max_concurrent_requests: self.max_concurrent_requests as usize,
                max_body_bytes: self.max_body_bytes as usize,
                response_store: self.response_store as usize,
                drain: group.timeouts.drain,
                ..ServeOptions::default()
            },
            parsers: Parsers { tool_calls: self.tool_call_parser, reasoning: self.reasoning_parser },
            group,
            join,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::{Command, FromArgMatches};
    use looplane_proto::worker::v1::load_request;

    use super::*;
    use crate::sched::Limits;

    fn fixture() -> String {
        format!("{}/../worker/tests/fixtures/llama-gqa", env!("CARGO_MANIFEST_DIR"))
    }

    pub(super) fn parse(arguments: &[&str]) -> ServeArgs {
        let command = ServeArgs::augment_args(Command::new("serve"));
        let matches = command.try_get_matches_from([&["serve"], arguments].concat()).unwrap();
        ServeArgs::from_arg_matches(&matches).unwrap()
    }

    fn check(arguments: &[&str]) -> Result<Config, ConfigError> {
        parse(&[&["--model", &fixture()], arguments].concat()).check(|_, _| 8)
    }

    #[test]
    fn the_name_is_the_directorys_unless_another_is_given() {
        let config = check(&[]).unwrap();
        assert_eq!((config.serve.model_id.as_str(), config.port), ("llama-gqa", 8000));
        let config = check(&["--served-model-name", "x/y"]).unwrap();
        assert_eq!(config.serve.model_id, "x/y");
    }

    #[test]
    fn the_group_is_as_large_as_its_model_and_device_say_unless_its_size_is_given() {
        let asked = |model: &Path, device| match (model.ends_with("llama-gqa"), device) {
            (true, Device::Cuda) => 1,
            (is_model, _) => 8 * u32::from(is_model),
        };
        let ranks = |options: &[&str]| {
            let args = parse(&[&["--model", &fixture()], options].concat());
            args.check(asked).unwrap().group.tensor_parallel
        };
        assert_eq!((ranks(&[]), ranks(&["--device", "cuda"]), ranks(&["--tp", "4"])), (8, 1, 4));
    }

    #[test]
    fn what_the_workers_are_told() {
        let group = |options: &[&str]| check(options).unwrap().group;
        assert_eq!(group(&["--device", "cuda"]).device, load_request::Device::Cuda);
        let unlooped = |options: &[&str]| group(options).unlooped;
        assert!(unlooped(&["--loop", "off"]) && !unlooped(&["--loop", "on"]) && !unlooped(&[]));
        let limits = |options: &[&str]| {
            let Limits { max_slots, max_batch_tokens, .. } = group(options).limits;
            (max_slots, max_batch_tokens)
        };
        assert_eq!((limits(&[]), limits(&["--max-slots", "9", "--max-batch-tokens", "20"])), ((0, 0), (9, 20)));
        let contradiction = check(&["--max-slots", "513", "--max-batch-tokens", "512"]).unwrap_err().to_string();
        let says = "--max-batch-tokens is 512, but must be at least --max-slots, which is 513";
        assert!(contradiction.contains(says), "{contradiction}");
        let target = group(&["--itl-target-ms", "20"]).itl_target;
        assert_eq!((target, group(&[]).itl_target), (Some(Duration::from_millis(20)), None));
        assert_eq!((group(&[]).kv_bytes_limit, group(&["--kv-memory-mib", "3"]).kv_bytes_limit), (0, 3 << 20));
    }

    #[test]
    fn how_answers_are_read() {
        let parsers = |options: &[&str]| check(options).unwrap().parsers;
        assert_eq!(parsers(&[]), Parsers::default());
        let given = parsers(&["--tool-call-parser", "llama3_json", "--reasoning-parser", "none"]);
        assert_eq!(given, Parsers { tool_calls: ToolCallParser::Llama3Json, reasoning: ReasoningParser::None });
    }

    #[test]
    fn what_cannot_work_is_said_in_one_sentence() {
        for (arguments, says) in [
            (["--tp", "3"], "--tp is 3, but must be 1, 2, 4, 8 or 16"),
            (["--threads", "0"], "--threads is 0, but must be at least 1"),
            (["--max-slots", "0"], "--max-slots is 0"),
            (["--max-batch-tokens", "0"], "--max-batch-tokens is 0"),
            (["--itl-target-ms", "0"], "--itl-target-ms is 0"),
            (["--max-connections", "0"], "--max-connections is 0"),
            (["--step-limit-seconds", "0"], "--step-limit-seconds is 0"),
            (["--served-model-name", ""], "--served-model-name"),
            (["--model", "/nowhere"], "--model /nowhere: there is no such directory"),
            (["--model", "/"], "--model /: there is no config.json in this directory"),
        ] {
            let error = check(&arguments).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
            assert_eq!(error.lines().count(), 1);
        }
    }
}
