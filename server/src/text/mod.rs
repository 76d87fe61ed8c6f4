//! Text in and out of the model: tokenizer, chat template, defaults of generation, incremental output.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use serde::Deserialize;
use serde_json::Value;

use crate::reply::{Parsers, ToolFormat};

mod defaults;
mod detokenizer;
mod grammar;
mod output;
mod parts;
mod segments;
mod stops;
mod template;
mod time;
mod tokenizer;
mod tools;

pub use defaults::GenerationDefaults;
pub use detokenizer::{Detokenizer, Start};
pub use grammar::{Body, Constraint, Form, Grammars, Thinking};
pub use output::{OutputText, OutputToken, Piece};
pub use stops::{Match, StopMatcher, Stops};
pub use template::{ChatMessage, ChatTemplate, TEMPLATE_NAMES, TemplateOptions};
pub use tokenizer::Tokenizer;
pub use tools::{Call, Function, Tool, ToolCall};

/// Why a model directory's text files cannot be served, or a text cannot be processed.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// A file of the model directory cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
    /// A file is not what it should be.
    #[error("{}: {what}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        what: String,
    },
    /// A text cannot be tokenised.
    #[error("the text cannot be tokenised: {0}")]
    Encode(String),
    /// The chat template writes more than a prompt may have.
    #[error("the prompt that the model's chat template writes has more than {max_bytes} bytes")]
    TooLong {
        /// The bound.
        max_bytes: usize,
    },
    /// The chat template refuses the messages, or fails on them.
    #[error("the model's chat template refuses these messages: {0}")]
    Template(String),
}

/// All that turns requests into token ids and token ids into text, for one model.
#[derive(Debug)]
pub struct Text {
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// How messages become a prompt; `None`: the model has no chat template.
    pub template: Option<ChatTemplate>,
    /// What a request gets for the fields that it leaves out.
    pub defaults: GenerationDefaults,
    /// What answers may be held to.
    pub grammars: Grammars,
    /// The chat template tells the model of tools.
    pub takes_tools: bool,
    /// How the model writes tool calls; `None`: that is not known.
    pub tool_format: Option<ToolFormat>,
    /// The model's thinking is told apart from its answer.
    pub thinks: bool,
}

/// The part of config.json that the text side needs.
#[derive(Debug, Deserialize)]
struct ModelConfig {
    vocab_size: u32,
    #[serde(default)]
    eos_token_id: Value,
}

impl Text {
    /// Reads config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json of a
    /// Hugging Face model directory; the last three may be absent.
    ///
    /// # Errors
    /// Names the file and what is wrong in it, or that tokenizer and model do not belong together.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let config_path = dir.join("config.json");
        let config: ModelConfig = parse(&config_path, &read(&config_path)?)?;
        let tokenizer_path = dir.join("tokenizer.json");
        let tokenizer = Tokenizer::from_json(&read(&tokenizer_path)?, config.vocab_size)
            .map_err(|what| TextError::Malformed { path: tokenizer_path, what })?;

        let tokenizer_config_path = dir.join("tokenizer_config.json");
        let tokenizer_config: Value = match read_optional(&tokenizer_config_path)? {
            Some(bytes) => parse(&tokenizer_config_path, &bytes)?,
            None => Value::Null,
        };
        let bos_token = special_token(&tokenizer_config["bos_token"]);
        let eos_token = special_token(&tokenizer_config["eos_token"]);
        let template = load_template(dir, &tokenizer_config, bos_token.unwrap_or(""), eos_token.unwrap_or(""))?;

        let generation_path = dir.join("generation_config.json");
        let generation: Value = match read_optional(&generation_path)? {
            Some(bytes) => parse(&generation_path, &bytes)?,
            None => Value::Null,
        };
        let mut defaults = GenerationDefaults::from_json(&generation, config.vocab_size)
            .map_err(|what| TextError::Malformed { path: generation_path, what })?;
        let config_eos = defaults::token_ids(&config.eos_token_id, "eos_token_id", config.vocab_size)
            .map_err(|what| TextError::Malformed { path: config_path, what })?;
        defaults.add_eos_tokens(config_eos);
        defaults.add_eos_tokens(eos_token.and_then(|token| tokenizer.id(token)));

        let takes_tools = template.as_ref().is_some_and(ChatTemplate::takes_tools);
        let tokenizer = Arc::new(tokenizer);
        let grammars = Grammars::new(tokenizer.clone(), defaults.eos_tokens.first().copied());
        let text = Self { tokenizer, template, defaults, grammars, takes_tools, tool_format: None, thinks: false };
        Ok(text.with_parsers(Parsers::default()))
    }

    /// Replies are read as the operator says.
    pub fn with_parsers(self, parsers: Parsers) -> Self {
        let template = self.template.as_ref().map_or("", ChatTemplate::source);
        let tool_format = parsers.tool_format(template);
        let thinks = parsers.thinks(template, |text| self.tokenizer.id(text).is_some());
        Self { tool_format, thinks, ..self }
    }
}

/// chat_template.jinja, or else the `chat_template` of tokenizer_config.json: a text, or a list of named ones, of which
/// chats with tools have one of their own.
fn load_template(
    dir: &Path,
    tokenizer_config: &Value,
    bos_token: &str,
    eos_token: &str,
) -> Result<Option<ChatTemplate>, TextError> {
    let file = dir.join("chat_template.jinja");
    let (path, source, tool_use) = match read_optional(&file)? {
        Some(bytes) => match String::from_utf8(bytes) {
            Ok(source) => (file, source, None),
            Err(_) => return Err(TextError::Malformed { path: file, what: "not UTF-8".into() }),
        },
        None => {
            let path = dir.join("tokenizer_config.json");
            match &tokenizer_config["chat_template"] {
                Value::Null => return Ok(None),
                Value::String(source) => (path, source.clone(), None),
                Value::Array(named) => {
                    let named = |name: &str| {
                        let template = named.iter().find(|entry| entry["name"] == name)?["template"].as_str();
                        template.map(str::to_owned)
                    };
                    match named("default") {
                        Some(source) => (path, source, named("tool_use")),
                        None => return Ok(None),
                    }
                }
                _ => {
                    return Err(TextError::Malformed { path, what: "chat_template is neither text nor a list".into() });
                }
            }
        }
    };
    let parse = |source: &str| {
        ChatTemplate::new(source, bos_token, eos_token).map_err(|what| {
            let what = format!("the chat template does not parse: {what}");
            TextError::Malformed { path: path.clone(), what }
        })
    };
    let template = parse(&source)?;
    match tool_use {
        Some(source) => Ok(Some(template.with_tool_use(parse(&source)?))),
        None => Ok(Some(template)),
    }
}

/// A special token of tokenizer_config.json: its text, or an object with its text as `content`.
fn special_token(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value["content"].as_str())
}

fn read(path: &Path) -> Result<Vec<u8>, TextError> {
    fs::read(path).map_err(|source| TextError::Read { path: path.into(), source })
}

fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, TextError> {
    match fs::read(path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(TextError::Read { path: path.into(), source }),
    }
}

fn parse<T: for<'de> Deserialize<'de>>(path: &Path, bytes: &[u8]) -> Result<T, TextError> {
    serde_json::from_slice(bytes).map_err(|error| TextError::Malformed { path: path.into(), what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")
    }

    fn copy_fixture() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
            fs::copy(fixture().join(file), dir.path().join(file)).unwrap();
        }
        dir
    }

    #[test]
    fn a_model_directory_loads() {
        let text = Text::load(&fixture()).unwrap();
        assert_eq!(text.defaults.eos_tokens, [1, 4]);
        let options = TemplateOptions::default();
        let prompt = text.template.unwrap().render(&[ChatMessage::new("user", " Hi ")], &options, 1 << 16).unwrap();
        assert_eq!(
            prompt,
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
             <|start_header_id|>assistant<|end_header_id|>\n\n"
        );
        let ids = text.tokenizer.encode(&prompt, false, "").unwrap();
        assert_eq!(ids.iter().filter(|id| **id == 0).count(), 1, "one BOS, the template's: {ids:?}");
        assert_eq!(text.tokenizer.encode("Hi", true, "").unwrap()[0], 0);
    }

    #[test]
    fn a_tokenizer_of_another_model_is_refused() {
        let dir = copy_fixture();
        fs::write(dir.path().join("config.json"), r#"{"vocab_size": 700}"#).unwrap();
        let error = Text::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("tokenizer.json") && error.contains("767") && error.contains("700"), "{error}");
    }

    #[test]
    fn the_template_file_wins_over_the_configuration_and_named_templates_are_found() {
        let dir = copy_fixture();
        let configured = |chat_template: Value| {
            let config = serde_json::json!({
                "bos_token": {"content": "<s>", "special": true}, "eos_token": null, "chat_template": chat_template,
            });
            fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
            Text::load(dir.path())
                .unwrap()
                .template
                .map(|t| t.render(&[ChatMessage::new("user", "x")], &TemplateOptions::default(), 1 << 16).unwrap())
        };
        assert_eq!(configured(Value::Null), None);
        let named = serde_json::json!([
            {"name": "tool_use", "template": "{{ tools[0].function.name }}<tool_call>{\"arguments\""},
            {"name": "default", "template": "{{ bos_token }}named"},
        ]);
        assert_eq!(configured(named).as_deref(), Some("<s>named"));
        let text = Text::load(dir.path()).unwrap();
        assert_eq!((text.takes_tools, text.tool_format), (true, Some(ToolFormat::Hermes)), "by the one for tools");
        fs::write(dir.path().join("chat_template.jinja"), "file {{ messages[0].content }}").unwrap();
        assert_eq!(configured("config".into()).as_deref(), Some("file x"));
    }

    #[test]
    fn a_missing_or_broken_file_is_named() {
        let dir = copy_fixture();
        fs::write(dir.path().join("generation_config.json"), r#"{"temperature": "hot"}"#).unwrap();
        let error = Text::load(dir.path()).unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains("temperature"), "{error}");
        fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
        assert!(Text::load(dir.path()).unwrap_err().to_string().contains("tokenizer.json"));
        fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
        assert!(Text::load(dir.path()).unwrap_err().to_string().contains("tokenizer.json"));
    }
}
