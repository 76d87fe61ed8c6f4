//! Peak memory of a rank: its shard, the KV pages that sequences came to and a stated constant, however large the
//! checkpoint's files and the KV cache are.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use half::bf16;
use looplane_proto::worker::v1::Loaded;
use looplane_worker::cpu::OVERHEAD_BYTES;
use looplane_worker::model::{Checkpoint, ModelConfig, Tensor};
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::command;
use super::group::{FEW_PAGES, Generated, generate, peak_bytes};

/// Untied embedding and LM head of 32 MiB each, layers of 24 MiB: neither hides in the constant.
const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 3072, "vocab_size": 16384, "hidden_act": "silu",
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": false
}"#;

#[tokio::test]
async fn a_rank_peaks_at_its_shard_and_a_stated_constant() {
    let dir = tempfile::tempdir().unwrap();
    let file_bytes = write_checkpoint(dir.path());
    assert!(file_bytes > 4 * OVERHEAD_BYTES, "a file of {file_bytes} bytes could hide in {OVERHEAD_BYTES}");
    let mut tokens = Vec::new();
    for ranks in [1, 2] {
        let Generated { tokens: generated, loaded, peaks } = generate(dir.path(), ranks, FEW_PAGES).await;
        assert_eq!(generated.len(), 8);
        tokens.push(generated);
        for (Loaded { weight_bytes, kv_bytes, .. }, peak) in loaded.into_iter().zip(peaks) {
            // Nothing is cut twice, and a cut loses nothing.
            assert!(
                (file_bytes / ranks as u64).abs_diff(weight_bytes) < 1 << 20,
                "{weight_bytes} of {file_bytes} bytes"
            );
            println!("{ranks} ranks: {weight_bytes} of weights, {kv_bytes} of KV cache, peak {peak}");
            assert!(peak > weight_bytes, "a peak of {peak} bytes is below what the rank holds");
            let limit = weight_bytes + kv_bytes + OVERHEAD_BYTES;
            assert!(peak <= limit, "one of {ranks} ranks had {peak} bytes at its peak, over {limit}");
        }
    }
    assert_eq!(tokens[0], tokens[1]);
    // What is measured does count mapped files: who reads the same tensors and gives nothing back has them all.
    let hoarder = Command::output(&mut command("hoarder", dir.path(), 0, std::process::id())).unwrap();
    let text = String::from_utf8(hoarder.stdout).unwrap();
    let peak = text.lines().find_map(|line| line.rsplit_once("peak ")?.1.parse::<u64>().ok());
    assert!(peak.is_some_and(|peak| peak > file_bytes), "{text}");
}

#[tokio::test]
async fn kv_pages_take_memory_once_a_sequence_comes_to_them() {
    const PAGES: u32 = 2048;
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path());
    let few = generate(dir.path(), 1, FEW_PAGES).await;
    let many = generate(dir.path(), 1, PAGES).await;
    assert_eq!(few.tokens, many.tokens);
    let Loaded { weight_bytes, kv_bytes, .. } = many.loaded[0];
    assert!(kv_bytes > 16 * OVERHEAD_BYTES, "{kv_bytes} bytes of KV cache");
    let limit = weight_bytes + few.loaded[0].kv_bytes + OVERHEAD_BYTES;
    assert!(many.peaks[0] <= limit, "a peak of {} bytes is over {limit}: pages were touched early", many.peaks[0]);
}

/// The part of a process that reads all of a checkpoint and releases nothing.
pub fn hoard(dir: &Path) {
    let config = ModelConfig::from_dir(dir).unwrap();
    let checkpoint = Checkpoint::open(dir, &config).unwrap();
    for tensor in Tensor::all(&config) {
        let shape = tensor.shape(&config);
        let columns = *shape.last().unwrap();
        let mut row = vec![bf16::ZERO; columns];
        for index in 0..shape.iter().product::<usize>() / columns {
            checkpoint.read(tensor, index..index + 1, 0..columns, &mut row);
        }
    }
    println!("peak {}", peak_bytes("self").unwrap());
}

/// Weights of no meaning in one file; its bytes.
fn write_checkpoint(dir: &Path) -> u64 {
    std::fs::write(dir.join("config.json"), CONFIG).unwrap();
    let config = ModelConfig::from_dir(dir).unwrap();
    let mut state = 1u32;
    let mut value = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Under 1/16 in size, of either sign.
        bf16::from_bits((state >> 16) as u16 & 0x80ff | 0x3c00)
    };
    let tensors = Tensor::all(&config).into_iter().map(|tensor| {
        let shape = tensor.shape(&config);
        let bytes: Vec<u8> = (0..shape.iter().product()).flat_map(|_| value().to_le_bytes()).collect();
        (tensor.name(&config), shape, bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors
        .iter()
        .map(|(name, shape, bytes)| (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), bytes).unwrap()));
    let path = dir.join("model.safetensors");
    safetensors::serialize_to_file(views.collect::<BTreeMap<_, _>>(), None, &path).unwrap();
    std::fs::metadata(path).unwrap().len()
}
