pub(crate) mod formats;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::LazyLock;

use half::f16;
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use tempfile::TempDir;

use super::*;
use crate::model::conversion::Quantised;
use crate::model::format::bf16_to_e4m3;
use crate::model::source::Source;
use crate::model::{LayerTensor, WeightFormat};
use crate::plan::ModelPlan;
use crate::plan::stream::{LAYER_PRODUCTS, Product};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// A fixture and the group sizes that its dimensions allow.
const FIXTURES: [(&str, &[usize]); 7] = [
    ("llama-gqa", &[1, 2, 4, 8]),
    ("llama-mha16", &[1, 2, 4, 8, 16]),
    ("llama-tied", &[1, 2, 4]),
    ("llama31-scaled", &[1, 2, 4]),
    ("mistral-window", &[1, 2, 4]),
    ("qwen2-bias", &[1, 2, 4]),
    ("qwen3-qknorm", &[1, 2, 4]),
];

fn open(dir: &Path) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(dir, &ModelConfig::from_dir(dir).expect("the config of a fixture is valid"))
}

fn whole(checkpoint: &Checkpoint, tensor: Tensor) -> Vec<bf16> {
    let shape = tensor.shape(checkpoint.config());
    let (rows, columns) = if shape.len() == 2 { (shape[0], shape[1]) } else { (1, shape[0]) };
    let mut values = vec![bf16::ZERO; rows * columns];
    checkpoint.read(tensor, 0..rows, 0..columns, &mut values);
    values
}

#[test]
fn the_digest_names_config_headers_and_sizes() {
    let digest = |name: &str, config: &[u8]| open(&fixture(name)).unwrap().digest(config);
    let base = digest("llama-tied", b"{}");
    assert!(base.len() == 16 && base == digest("llama-tied", b"{}"), "{base}");
    assert_ne!(base, digest("llama-tied", b"{ }"));
    assert_ne!(base, digest("llama-mha16", b"{}"));
    let dir = TempDir::new().unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture("llama-tied").join(file), dir.path().join(file)).unwrap();
    }
    assert_eq!(base, open(dir.path()).unwrap().digest(b"{}"));
    // The same tensors under a header that says one thing more.
    let bytes = std::fs::read(dir.path().join("model.safetensors")).unwrap();
    let old = SafeTensors::deserialize(&bytes).unwrap();
    let more = HashMap::from([("step".to_owned(), "2".to_owned())]);
    safetensors::serialize_to_file(old.tensors(), Some(more), &dir.path().join("model.safetensors")).unwrap();
    assert_ne!(base, open(dir.path()).unwrap().digest(b"{}"));
}

#[test]
fn the_ranks_slices_of_every_fixture_make_up_the_whole_at_every_group_size() {
    for (name, sizes) in FIXTURES {
        let checkpoint = open(&fixture(name)).unwrap();
        assert!(checkpoint.notes().is_empty());
        let config = checkpoint.config().clone();
        for tp in [1, 2, 4, 8, 16] {
            let plan = ModelPlan::new(&config, tp);
            assert_eq!(plan.is_ok(), sizes.contains(&tp), "{name} at {tp}: {plan:?}");
            let Ok(plan) = plan else { continue };
            let mut joined: HashMap<Tensor, Vec<bf16>> = HashMap::new();
            for rank in (0..tp).map(|r| plan.rank(r)) {
                for product in LAYER_PRODUCTS.into_iter().chain([Product::LmHead]) {
                    for tile in (0..product.tiles(&plan, &rank)).map(|t| product.tile(&plan, &rank, 0, t)) {
                        let shape = tile.tensor.shape(&config);
                        let all = joined.entry(tile.tensor).or_insert_with(|| vec![bf16::NAN; shape[0] * shape[1]]);
                        for leaf in product.leaves(&plan, &rank) {
                            let columns = product.k(&plan).columns(leaf);
                            let mut slice = vec![bf16::ZERO; tile.rows.len() * columns.len()];
                            checkpoint.read(tile.tensor, tile.rows.clone(), columns.clone(), &mut slice);
                            for (row, values) in tile.rows.clone().zip(slice.chunks(columns.len())) {
                                all[row * shape[1]..][columns.clone()].copy_from_slice(values);
                            }
                        }
                    }
                }
            }
            for (tensor, values) in joined {
                let expected = whole(&checkpoint, tensor);
                assert!(
                    values.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits()),
                    "{name} {tensor:?} {tp}"
                );
                let shape = tensor.shape(checkpoint.config());
                checkpoint.release(tensor, 0..if shape.len() == 2 { shape[0] } else { 1 });
                assert_eq!(whole(&checkpoint, tensor), expected, "{name} {tensor:?}: after release");
            }
        }
    }
}

#[test]
fn vectors_and_biases_are_read() {
    let checkpoint = open(&fixture("qwen2-bias")).unwrap();
    let mut bias = [bf16::ZERO; 64];
    checkpoint.read(Tensor::Layer(1, LayerTensor::KeyBias), 0..1, 64..128, &mut bias);
    assert_eq!(bias, whole(&checkpoint, Tensor::Layer(1, LayerTensor::KeyBias))[64..128]);
    assert!(bias.iter().any(|v| *v != bf16::ZERO));
    let checkpoint = open(&fixture("qwen3-qknorm")).unwrap();
    assert_eq!(whole(&checkpoint, Tensor::Layer(0, LayerTensor::QueryNorm)).len(), 128);
    assert_eq!(whole(&checkpoint, Tensor::LmHead), whole(&checkpoint, Tensor::Embedding));
}

/// A copy of `llama-gqa` as one file, with its tensors changed by `edit`.
fn edited(edit: impl Fn(&str, &mut Dtype, &mut Vec<usize>, &mut Vec<u8>) -> bool) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let source = open(&fixture("llama-gqa")).unwrap();
    let mut tensors = BTreeMap::new();
    for tensor in Tensor::all(source.config()) {
        let name = tensor.name(source.config());
        let (mut dtype, mut shape) = (Dtype::BF16, tensor.shape(source.config()));
        let mut bytes: Vec<u8> = whole(&source, tensor).iter().flat_map(|v| v.to_le_bytes()).collect();
        if edit(&name, &mut dtype, &mut shape, &mut bytes) {
            tensors.insert(name, (dtype, shape, bytes));
        }
    }
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("the edit is consistent"))
    });
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    std::fs::copy(fixture("llama-gqa/config.json"), dir.path().join("config.json")).unwrap();
    dir
}

#[test]
fn wider_dtypes_are_rounded_to_nearest_even_and_noted_once() {
    let halves = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, -65504.0, 6e-8];
    let dir = edited(|name, dtype, _, bytes| {
        if name == "model.norm.weight" {
            *dtype = Dtype::F32;
            // 0x3f808000 lies half way between two bf16 and rounds down to even; 0x3f818000 rounds up.
            let mut values = vec![0x3f80_8000_u32, 0x3f81_8000, 0x3f80_8001, 0x7f80_0000];
            values.resize(256, 0);
            *bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        } else if name.ends_with("input_layernorm.weight") {
            *dtype = Dtype::F16;
            let mut values: Vec<f16> = halves.iter().map(|v| f16::from_f32(*v)).collect();
            values.resize(256, f16::ZERO);
            *bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        }
        true
    });
    let checkpoint = open(dir.path()).unwrap();
    let norm: Vec<u16> = whole(&checkpoint, Tensor::FinalNorm)[..4].iter().map(|v| v.to_bits()).collect();
    assert_eq!(norm, [0x3f80, 0x3f82, 0x3f81, 0x7f80]);
    let input = whole(&checkpoint, Tensor::Layer(1, LayerTensor::InputNorm));
    for (read, value) in input.iter().zip(halves) {
        assert_eq!(*read, bf16::from_f32(f16::from_f32(value).to_f32()));
    }
    let notes = checkpoint.notes();
    assert_eq!(notes.len(), 2);
    assert!(notes[0].contains("and 1 more tensors rounded from F16 to BF16"), "{notes:?}");
    assert!(notes[1].contains("model.norm.weight rounded from F32"), "{notes:?}");
}

#[test]
fn missing_and_wrong_tensors_are_refused_with_file_tensor_and_numbers() {
    let dir = edited(|name, _, _, _| name != "model.layers.1.mlp.up_proj.weight");
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(
        error.ends_with("model.safetensors: tensor model.layers.1.mlp.up_proj.weight [384, 256] is missing"),
        "{error}"
    );

    let dir = edited(|name, _, shape, bytes| {
        if name == "lm_head.weight" {
            *shape = vec![767, 256];
            bytes.truncate(767 * 256 * 2);
        }
        true
    });
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("lm_head.weight has shape [767, 256], but by config.json it is [768, 256]"), "{error}");

    let dir = edited(|name, dtype, _, bytes| {
        if name == "lm_head.weight" {
            *dtype = Dtype::F8_E4M3;
            bytes.truncate(768 * 256);
        }
        true
    });
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("tensor lm_head.weight is F8_E4M3, but by config.json (quantization_config) it is BF16"),
        "{error}"
    );
}

/// What changes a tensor: its name, dtype, shape and bytes. False: it is left out.
type Edit<'a> = &'a dyn Fn(&str, &mut Dtype, &mut Vec<usize>, &mut Vec<u8>) -> bool;

/// A copy of `llama-gqa` in FP8, quantised by [`Quantised`]; a scale a row or, `of_tensor`, one of all (and then the
/// values mean nothing). `edit` changes it further.
fn in_fp8(of_tensor: bool, edit: Edit<'_>) -> TempDir {
    let source = open(&fixture("llama-gqa")).unwrap();
    let config = ModelConfig { layer_weights: WeightFormat::E4m3, ..source.config().clone() };
    let quantised = Quantised::new(&source, &config);
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = BTreeMap::new();
    for tensor in Tensor::all(&config) {
        let (name, shape) = (tensor.name(&config), tensor.shape(&config));
        let mut values = vec![bf16::ZERO; shape.iter().product()];
        let rows = if shape.len() == 2 { shape[0] } else { 1 };
        Source::read(&quantised, tensor, 0..rows, 0..shape[shape.len() - 1], &mut values);
        let mut put = |name: String, mut dtype: Dtype, mut shape: Vec<usize>, mut bytes: Vec<u8>| {
            if edit(&name, &mut dtype, &mut shape, &mut bytes) {
                tensors.insert(name, (dtype, shape, bytes));
            }
        };
        if !tensor.is_streamed_in_layers() {
            put(name, Dtype::BF16, shape, bytemuck::cast_slice(&values).to_vec());
            continue;
        }
        let mut scales = vec![0f32; rows];
        quantised.scales(tensor, 0..rows, 0, &mut scales);
        scales.truncate(if of_tensor { 1 } else { rows });
        let of_scales = if of_tensor { Vec::new() } else { vec![rows, 1] };
        put(format!("{name}_scale"), Dtype::F32, of_scales, bytemuck::cast_slice(&scales).to_vec());
        put(name, Dtype::F8_E4M3, shape, values.into_iter().map(bf16_to_e4m3).collect());
    }
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("the edit is consistent"))
    });
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    let mut json: serde_json::Value =
        serde_json::from_slice(&std::fs::read(fixture("llama-gqa/config.json")).unwrap()).unwrap();
    json["quantization_config"] = serde_json::json!({"quant_method": "fp8", "activation_scheme": "static"});
    std::fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    dir
}

#[test]
fn fp8_is_read_as_it_was_quantised_with_its_scales() {
    let (dir, source) = (in_fp8(false, &|_, _, _, _| true), open(&fixture("llama-gqa")).unwrap());
    let checkpoint = open(dir.path()).unwrap();
    assert_eq!(checkpoint.config().layer_weights, WeightFormat::E4m3);
    let quantised = Quantised::new(&source, checkpoint.config());
    for tensor in Tensor::all(checkpoint.config()) {
        let shape = tensor.shape(checkpoint.config());
        let rows = if shape.len() == 2 { shape[0] } else { 1 };
        let mut expected = vec![bf16::ZERO; shape.iter().product()];
        Source::read(&quantised, tensor, 0..rows, 0..shape[shape.len() - 1], &mut expected);
        assert_eq!(whole(&checkpoint, tensor), expected, "{tensor:?}");
        if shape.len() == 2 {
            let [mut got, mut expected] = [vec![0.0; 5], vec![0.0; 5]];
            checkpoint.scales(tensor, 3..8, 0, &mut got);
            quantised.scales(tensor, 3..8, 0, &mut expected);
            assert_eq!(got, expected, "{tensor:?}");
        }
    }
    let dir = in_fp8(true, &|_, _, _, _| true);
    let checkpoint = open(dir.path()).unwrap();
    let (mut of_all, mut first) = ([0.0; 9], [0.0]);
    checkpoint.scales(Tensor::Layer(1, LayerTensor::Down), 100..109, 0, &mut of_all);
    quantised.scales(Tensor::Layer(1, LayerTensor::Down), 0..1, 0, &mut first);
    assert_eq!(of_all, [first[0]; 9]);
}

#[test]
fn scales_that_are_missing_or_wrong_are_refused_with_their_tensor() {
    const WEIGHT: &str = "model.layers.1.mlp.up_proj.weight";
    let error = |edit: Edit<'_>| open(in_fp8(false, edit).path()).unwrap_err().to_string();
    let of_scale = |name: &str| name == format!("{WEIGHT}_scale");
    let missing = error(&|name, _, _, _| !of_scale(name));
    assert!(missing.contains(&format!("{WEIGHT}_scale")) && missing.contains("[384, 1]"), "{missing}");
    let shape = error(&|name, _, shape, bytes| {
        if of_scale(name) {
            (*shape, *bytes) = (vec![192, 1], bytes[..192 * 4].to_vec());
        }
        true
    });
    assert!(shape.contains("has shape [192, 1]"), "{shape}");
    for (value, named) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-0.5, "-0.5")] {
        let wrong = error(&|name, _, _, bytes| {
            if of_scale(name) {
                bytes[7 * 4..8 * 4].copy_from_slice(&value.to_le_bytes());
            }
            true
        });
        assert!(wrong.contains(&format!("{WEIGHT}_scale is {named} in row 7")), "{wrong}");
    }
    let dtype = error(&|name, dtype, shape, bytes| {
        if name == WEIGHT {
            (*dtype, *bytes) = (Dtype::BF16, vec![0; shape[0] * shape[1] * 2]);
        }
        true
    });
    assert!(dtype.contains(&format!("{WEIGHT} is BF16, but by config.json (quantization_config) it is F8_E4M3")));
}

#[test]
fn tensors_that_the_model_does_not_use_are_tolerated() {
    let dir = edited(|_, _, _, _| true);
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    let tied = ModelConfig { tied_embeddings: true, ..config };
    let checkpoint = Checkpoint::open(dir.path(), &tied).unwrap();
    assert_eq!(whole(&checkpoint, Tensor::LmHead), whole(&checkpoint, Tensor::Embedding));
}

#[test]
fn shards_are_found_with_and_without_an_index() {
    let dir = copy_of("llama-gqa");
    let indexed = open(dir.path()).unwrap();
    let index = dir.path().join("model.safetensors.index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::remove_file(&index).unwrap();
    let found = open(dir.path()).unwrap();
    for tensor in Tensor::all(found.config()) {
        assert_eq!(whole(&found, tensor), whole(&indexed, tensor), "{tensor:?}");
    }

    let refused = |edit: &dyn Fn(&mut serde_json::Value)| {
        let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
        edit(&mut json);
        std::fs::write(&index, json.to_string()).unwrap();
        open(dir.path()).unwrap_err().to_string()
    };
    let error = refused(&|i| i["weight_map"]["lm_head.weight"] = "model-00009-of-00004.safetensors".into());
    assert!(
        error.contains("\"lm_head.weight\" is said to be in \"model-00009-of-00004.safetensors\", but there is no"),
        "{error}"
    );
    let error = refused(&|i| i["weight_map"]["lm_head.weight"] = "model-00001-of-00004.safetensors".into());
    assert!(error.contains("is said to be in \"model-00001-of-00004.safetensors\", but is not"), "{error}");
    let error = refused(&|i| i["weight_map"]["lm_head.weight"] = "../../etc/passwd".into());
    assert!(error.contains("which is not a file name"), "{error}");
    let error = refused(&|i| drop(i["weight_map"].as_object_mut().unwrap().remove("lm_head.weight")));
    assert!(error.contains("index.json: tensor lm_head.weight [768, 256] is missing"), "{error}");
    let error = refused(&|i| *i = serde_json::json!([]));
    assert!(error.contains("is not an index"), "{error}");

    std::fs::remove_file(&index).unwrap();
    std::fs::copy(dir.path().join("model-00004-of-00004.safetensors"), dir.path().join("other.safetensors")).unwrap();
    let error = open(dir.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Twice { .. }), "{error}");
}

#[test]
fn more_layers_than_config_json_counts_are_refused() {
    let config = ModelConfig::from_dir(&fixture("llama-gqa")).unwrap();
    let fewer = ModelConfig { num_layers: 1, ..config };
    let error = Checkpoint::open(&fixture("llama-gqa"), &fewer).unwrap_err().to_string();
    assert!(error.contains("tensor model.layers.1.input_layernorm.weight is of layer 1 (from 0)"), "{error}");
    assert!(error.contains("by config.json there are 1") && error.ends_with("set num_hidden_layers to 2"), "{error}");
}

#[test]
fn weights_that_are_not_finite_are_named_by_the_rank_that_reads_them() {
    let with = |dtype: Dtype, value: &[u8]| {
        let value = value.to_owned();
        edited(move |name, of, _, bytes| {
            if name == "model.layers.1.mlp.up_proj.weight" {
                let width = value.len();
                *of = dtype;
                *bytes = vec![0; 384 * 256 * width];
                bytes[(3 * 256 + 7) * width..][..width].copy_from_slice(&value);
                bytes[(9 * 256 + 1) * width..][..width].copy_from_slice(&value);
            }
            true
        })
    };
    let up = Tensor::Layer(1, LayerTensor::Up);
    for (dtype, value, says) in [
        (Dtype::BF16, &0x7fc0u16.to_le_bytes()[..], "NaN"),
        (Dtype::BF16, &0xff80u16.to_le_bytes(), "-inf"),
        (Dtype::F16, &0x7c00u16.to_le_bytes(), "inf"),
        (Dtype::F32, &f32::NAN.to_le_bytes(), "NaN"),
        // Finite in fp32, over the largest bf16.
        (Dtype::F32, &f32::MAX.to_le_bytes(), "inf"),
    ] {
        let dir = with(dtype, value);
        let checkpoint = open(dir.path()).unwrap();
        let read =
            |rows: Range<usize>| checkpoint.read(up, rows.clone(), 0..256, &mut vec![bf16::ZERO; rows.len() * 256]);
        read(0..3);
        checkpoint.check_finite().unwrap();
        read(9..20);
        read(0..9);
        let error = checkpoint.check_finite().unwrap_err().to_string();
        let place = format!("model.safetensors: tensor model.layers.1.mlp.up_proj.weight is {says} in row 3, column 7");
        assert!(error.contains(&place), "{dtype}: {error}");
    }
}

#[test]
fn a_pointer_of_git_lfs_is_named() {
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 2471645608\n";
    let error = open_bytes(pointer).unwrap_err().to_string();
    assert!(error.contains("model.safetensors: is a Git LFS pointer, not the weights: run `git lfs pull`"), "{error}");
}

#[test]
fn a_file_that_is_missing_beside_others_is_named() {
    let dir = copy_of("llama-gqa");
    std::fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    std::fs::remove_file(dir.path().join("model-00003-of-00004.safetensors")).unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    let says = "holds model-00001-of-00004.safetensors, but not model-00003-of-00004.safetensors: download it again";
    assert!(error.ends_with(says), "{error}");

    for entry in std::fs::read_dir(dir.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|end| end == "safetensors") {
            std::fs::remove_file(path).unwrap();
        }
    }
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("holds no model.safetensors, no model.safetensors.index.json"), "{error}");
    assert!(error.contains("it holds config.json, ") && error.ends_with(": download the weights to it"), "{error}");
    std::fs::write(dir.path().join("pytorch_model.bin"), b"").unwrap();
    let error = open(dir.path()).unwrap_err().to_string();
    assert!(error.ends_with("it holds pytorch_model.bin: convert that to safetensors"), "{error}");
}

#[test]
fn a_directory_without_weights_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = ModelConfig::from_dir(&fixture("llama-gqa")).unwrap();
    assert!(matches!(Checkpoint::open(dir.path(), &config), Err(CheckpointError::NoWeights { .. })));
    let absent = dir.path().join("absent");
    assert!(matches!(Checkpoint::open(&absent, &config), Err(CheckpointError::Read { .. })));
    std::fs::write(dir.path().join("model.safetensors"), b"").unwrap();
    assert!(Checkpoint::open(dir.path(), &config).is_err());
}

fn copy_of(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        if file != "expected.safetensors" {
            std::fs::copy(&path, dir.path().join(file)).unwrap();
        }
    }
    dir
}

/// Opens a directory whose only weights are `bytes`.
fn open_bytes(bytes: &[u8]) -> Result<Checkpoint, CheckpointError> {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    Checkpoint::open(dir.path(), &ModelConfig::from_dir(&fixture("llama-gqa")).unwrap())
}

fn file_with_header(header: &str, data_bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data_bytes, 0);
    file
}

#[test]
fn lying_headers_are_refused_with_tensor_and_numbers() {
    for (header, data_bytes, says) in [
        (
            r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#,
            7,
            "describes 8 bytes of tensors, but 7 bytes follow",
        ),
        (
            r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]}}"#,
            9,
            "describes 8 bytes of tensors, but 9 bytes follow",
        ),
        (
            r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[8,16]}}"#,
            16,
            "\"a\" has data_offsets [8, 16], but the tensor before it ends at 0",
        ),
        (
            r#"{"a":{"dtype":"BF16","shape":[5],"data_offsets":[0,8]}}"#,
            8,
            "\"a\" BF16 [5] needs 10 bytes, but data_offsets give it 8",
        ),
        (
            concat!(
                r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[0,8]},"#,
                r#""b":{"dtype":"BF16","shape":[4],"data_offsets":[4,12]}}"#
            ),
            12,
            "\"b\" has data_offsets [4, 12], but the tensor before it ends at 8",
        ),
        (
            r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}}"#,
            8,
            "\"a\" has shape [4294967296, 4294967296], more values than can be counted",
        ),
        (r#"{"a":{"dtype":"BF16","shape":[4],"data_offsets":[8,0]}}"#, 8, "[8, 0]"),
        (r#"{"a":{"dtype":"Q4","shape":[4],"data_offsets":[0,8]}}"#, 8, "Q4"),
        ("[]", 0, "JSON"),
    ] {
        let error = open_bytes(&file_with_header(header, data_bytes)).unwrap_err();
        assert!(matches!(error, CheckpointError::Header { .. }), "{error}");
        let error = error.to_string();
        assert!(error.contains(says) && error.contains("model.safetensors: "), "{error}");
        assert!(error.contains(&format!("the file is {} bytes long", 8 + header.len() + data_bytes)), "{error}");
    }
    let error = open_bytes(&[255; 100]).unwrap_err().to_string();
    assert!(error.contains("its header is said to be 18446744073709551615 bytes long"), "{error}");
    assert!(open_bytes(&[1, 2, 3]).unwrap_err().to_string().contains("too short"));
}

static WHOLE_FILE: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let dir = edited(|_, _, _, _| true);
    std::fs::read(dir.path().join("model.safetensors")).unwrap()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    // Whatever the bytes, opening answers, and what opens can be read to its last byte.
    #[test]
    fn damaged_files_never_panic(
        flips in prop::collection::vec((0usize..5000, any::<u8>()), 0..4),
        cut in prop_oneof![Just(None), (0usize..6000).prop_map(Some)],
    ) {
        let mut bytes = WHOLE_FILE.clone();
        for (at, value) in flips {
            bytes[at] = value;
        }
        bytes.truncate(cut.unwrap_or(bytes.len()));
        if let Ok(checkpoint) = open_bytes(&bytes) {
            for tensor in Tensor::all(checkpoint.config()) {
                whole(&checkpoint, tensor);
            }
        }
    }
}
