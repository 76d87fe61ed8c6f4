//! The files of a model's directory.

use std::{fs, path::Path};

use half::bf16;
use looplane_server::text::{Text, Tokenizer};
use looplane_worker::{
    model::{Checkpoint, ModelConfig, Tensor},
    plan::{MAX_LEAVES, ModelPlan},
};
use serde_json::Value;
use tempfile::TempDir;

/// Of 768 tokens.
const SMALL_TOKENIZER: &str = include_str!("../../../worker/tests/fixtures/llama-gqa/tokenizer.json");
/// Values of all tensors that are read.
const MOST_VALUES: usize = 1 << 18;
/// Bytes of tensors that a file is made to have.
const MOST_BYTES: u64 = 1 << 20;

/// tokenizer.json. What it makes of a text are tokens that it has.
pub fn tokenizer(bytes: &[u8]) {
    let tokenizer = match Tokenizer::from_json(bytes, 1000) {
        Ok(tokenizer) => tokenizer,
        Err(problem) => return assert!(!problem.is_empty()),
    };
    let text = "Hello  w\u{f6}rld,\n\u{65e5}\u{672c} <|eot_id|> </s>";
    tokenizer.special_spans(text);
    if let Ok(ids) = tokenizer.encode(text, true, "") {
        assert!(ids.iter().all(|id| *id < tokenizer.tokens()), "{ids:?}");
        let known = |id: &u32| *id < tokenizer.tokens();
        assert!(tokenizer.special_tokens_in(text).iter().all(known));
        // Not all decoders of the library take all tokens.
        let _ = tokenizer.decode(&ids, false);
    }
}

/// Lines: config.json, tokenizer_config.json, generation_config.json; what follows is chat_template.jinja.
pub fn text_config(bytes: &[u8]) {
    let mut parts = bytes.splitn(4, |byte| *byte == b'\n');
    let dir = TempDir::new().expect("a directory");
    let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).expect("it can be written");
    write("tokenizer.json", SMALL_TOKENIZER.as_bytes());
    let names = ["config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"];
    for (name, part) in names.into_iter().zip(&mut parts).filter(|(_, part)| !part.is_empty()) {
        write(name, part);
    }
    match Text::load(dir.path()) {
        Ok(text) => {
            let defaults = &text.defaults;
            assert!((0.0..=2.0).contains(&defaults.temperature) && defaults.top_k >= 0, "{defaults:?}");
            assert!(defaults.top_p > 0.0 && defaults.top_p <= 1.0 && (0.0..=1.0).contains(&defaults.min_p));
            assert!(text.defaults.eos_tokens.is_sorted());
        }
        Err(error) => {
            let error = error.to_string();
            assert!(error.contains("tokenizer.json") || names.iter().any(|name| error.contains(name)), "{error}");
        }
    }
}

/// config.json. One that is taken has dimensions within bounds, and can be cut for groups; of another the field is
/// named.
pub fn model_config(bytes: &[u8]) {
    let path = Path::new("DIR/config.json");
    let config = match ModelConfig::from_json(bytes, path) {
        Ok(config) => config,
        Err(error) => {
            let error = error.to_string();
            return assert!(error.contains("DIR/config.json") && error.len() < 1000, "{error}");
        }
    };
    let counts = [
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.vocab_size,
        config.max_positions,
    ];
    assert!(counts.iter().all(|count| (1..1 << 24).contains(count)), "{config:?}");
    assert!(config.num_heads % config.num_kv_heads == 0 && config.head_dim % 16 == 0, "{config:?}");
    for ranks in [0, 1, 2, 3, MAX_LEAVES, 2 * MAX_LEAVES] {
        if let Err(error) = ModelPlan::new(&config, ranks) {
            assert!(!error.to_string().is_empty());
        }
    }
}

/// Lines: config.json, the header of a file of weights, and perhaps the index that names the file. The file is as long
/// as the header says, of zeros; what does not begin as a header is the file as it is.
pub fn safetensors(bytes: &[u8]) {
    let mut lines = bytes.splitn(3, |byte| *byte == b'\n');
    let mut line = || lines.next().unwrap_or_default();
    let (config, weights, index) = (line(), line(), line());
    let Ok(config) = ModelConfig::from_json(config, Path::new("config.json")) else { return };
    let dir = TempDir::new().expect("a directory");
    let name = if index.is_empty() { "model.safetensors" } else { "a.safetensors" };
    let path = dir.path().join(name);
    let whole = match weights.starts_with(b"{") {
        true => [&(weights.len() as u64).to_le_bytes(), weights].concat(),
        false => weights.to_vec(),
    };
    fs::write(&path, &whole).expect("it can be written");
    if weights.starts_with(b"{") {
        let length = whole.len() as u64 + described(weights).min(MOST_BYTES);
        fs::File::options().write(true).open(&path).and_then(|file| file.set_len(length)).expect("it can be longer");
    }
    if !index.is_empty() {
        fs::write(dir.path().join("model.safetensors.index.json"), index).expect("it can be written");
    }
    let values = |tensor: &Tensor| tensor.shape(&config).iter().product::<usize>();
    if config.num_layers > 2 || Tensor::all(&config).iter().map(values).sum::<usize>() > MOST_VALUES {
        return;
    }
    let checkpoint = match Checkpoint::open_as_found(dir.path(), &config) {
        Ok(checkpoint) => checkpoint,
        Err(error) => {
            let error = error.to_string();
            return assert!(error.contains("tensors") && error.len() < 4 * bytes.len() + 2000, "{error}");
        }
    };
    for tensor in Tensor::all(&config) {
        let shape = tensor.shape(&config);
        let (rows, columns) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
        let mut read = vec![bf16::NAN; rows * columns];
        checkpoint.read(tensor, 0..rows, 0..columns, &mut read);
        checkpoint.release(tensor, 0..rows);
    }
}

/// The end of the last tensor that a header describes.
fn described(header: &[u8]) -> u64 {
    let Ok(Value::Object(tensors)) = serde_json::from_slice(header) else { return 0 };
    tensors.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max().unwrap_or(0)
}
