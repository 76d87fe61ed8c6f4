//! Checkpoints in 4 bits and in blocks of FP8, as the public libraries write them (worker/tests/fixtures/tiny-*).

use serde_json::{Value, json};

use super::*;
use crate::model::conversion::Expanded;

/// Fixtures, and what their layers are read in.
pub(crate) const TINY: [(&str, WeightFormat); 6] = [
    ("tiny-packed", WeightFormat::Int4 { columns: 128, zeros: false }),
    ("tiny-packed-zeros", WeightFormat::Int4 { columns: 32, zeros: true }),
    ("tiny-awq", WeightFormat::Int4 { columns: 32, zeros: true }),
    ("tiny-gptq", WeightFormat::Int4 { columns: 32, zeros: false }),
    // Its columns are in no order.
    ("tiny-gptq-desc-act", WeightFormat::Bf16),
    ("tiny-fp8-blocks", WeightFormat::E4m3Groups { columns: 128 }),
];

type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

/// A copy of a fixture, with its tensors and its `quantization_config` changed.
pub(crate) fn changed(name: &str, change: impl FnOnce(&mut Tensors, &mut Value)) -> TempDir {
    copied(&fixture(name), change)
}

fn copied(source: &Path, change: impl FnOnce(&mut Tensors, &mut Value)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bytes = std::fs::read(source.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |(name, view): (String, TensorView)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec()));
    let mut tensors: Tensors = file.tensors().into_iter().map(of).collect();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    change(&mut tensors, &mut config["quantization_config"]);
    let views = tensors.iter().map(|(name, (dtype, shape, bytes))| {
        (name.clone(), TensorView::new(*dtype, shape.clone(), bytes).expect("the change is consistent"))
    });
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

fn as_found(dir: &Path) -> Checkpoint {
    Checkpoint::open_as_found(dir, &ModelConfig::from_dir(dir).unwrap()).unwrap()
}

fn matrices(checkpoint: &Checkpoint) -> impl Iterator<Item = Tensor> {
    Tensor::all(checkpoint.config()).into_iter().filter(|tensor| tensor.is_streamed_in_layers())
}

/// What a tensor's weights are, in bf16.
fn weights(checkpoint: &Checkpoint, tensor: Tensor) -> Vec<bf16> {
    let shape = tensor.shape(checkpoint.config());
    let mut values = vec![bf16::ZERO; shape.iter().product()];
    Source::read(&Expanded(checkpoint), tensor, 0..shape[0], 0..shape[1], &mut values);
    values
}

/// Puts a matrix in bf16 in the place of the tensors that it is stored in.
pub(crate) fn expand(tensors: &mut Tensors, checkpoint: &Checkpoint, tensor: Tensor) {
    let name = tensor.name(checkpoint.config());
    let before = name.strip_suffix("weight").unwrap();
    tensors.retain(|name, _| !name.starts_with(before));
    let bytes = bytemuck::cast_slice(&weights(checkpoint, tensor)).to_vec();
    tensors.insert(name, (Dtype::BF16, tensor.shape(checkpoint.config()), bytes));
}

/// A copy of a checkpoint in bf16: those of its matrices that `picked` says, or all of them and then without a
/// `quantization_config`.
pub(crate) fn in_bf16(dir: &Path, picked: Option<&dyn Fn(Tensor) -> bool>) -> TempDir {
    let checkpoint = as_found(dir);
    copied(dir, |tensors, config| {
        for tensor in matrices(&checkpoint).filter(|tensor| picked.is_none_or(|picked| picked(*tensor))) {
            expand(tensors, &checkpoint, tensor);
        }
        if picked.is_none() {
            *config = Value::Null;
        }
    })
}

/// A copy of a fixture whose scales are powers of two.
pub(crate) fn with_even_scales(name: &str) -> TempDir {
    changed(name, |tensors, _| {
        for (dtype, _, bytes) in tensors.iter_mut().filter(|(name, _)| name.contains("scale")).map(|(_, tensor)| tensor)
        {
            // Sign and exponent.
            let (width, mask) = match dtype {
                Dtype::BF16 => (2, 0xff80),
                Dtype::F16 => (2, 0xfc00),
                Dtype::F32 => (4, 0xff80_0000_u32),
                other => panic!("scales in {other:?}"),
            };
            for value in bytes.chunks_exact_mut(width) {
                value.iter_mut().zip(mask.to_le_bytes()).for_each(|(byte, mask)| *byte &= mask);
            }
        }
    })
}

#[test]
fn every_weight_is_what_the_public_libraries_dequantise() {
    for (name, format) in TINY {
        let checkpoint = as_found(&fixture(name));
        assert_eq!(checkpoint.config().layer_weights, format, "{name}");
        let sums = std::fs::read(fixture(name).join("dequantised.json")).unwrap();
        let sums: BTreeMap<String, String> = serde_json::from_slice(&sums).unwrap();
        let tensors: Vec<Tensor> = matrices(&checkpoint).collect();
        assert_eq!(tensors.len(), sums.len(), "{name}");
        for tensor in tensors {
            let sum = Sha256::digest(bytemuck::cast_slice::<_, u8>(&weights(&checkpoint, tensor)));
            let sum: String = sum.iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(sum, sums[&tensor.name(checkpoint.config())], "{name} {tensor:?}");
        }
        checkpoint.check_finite().unwrap();
    }
}

#[test]
fn values_scales_and_zero_points_are_what_the_format_holds() {
    for (name, format) in TINY.into_iter().filter(|(_, format)| *format != WeightFormat::Bf16) {
        let checkpoint = open(&fixture(name)).unwrap();
        let group = format.group().unwrap();
        let mut others = 0;
        for tensor in matrices(&checkpoint) {
            let [rows, columns] = tensor.shape(checkpoint.config())[..] else { unreachable!() };
            let values = whole(&checkpoint, tensor);
            let at = |column: usize| {
                let (mut scales, mut zeros) = (vec![0.0; rows], vec![0; rows]);
                Source::scales(&checkpoint, tensor, 0..rows, column, &mut scales);
                Source::zeros(&checkpoint, tensor, 0..rows, column, &mut zeros);
                (scales, zeros)
            };
            for first in (0..columns).step_by(group) {
                let run = first..(first + group).min(columns);
                let (scales, zeros) = at(first);
                assert_eq!((&scales, &zeros), (&at(run.end - 1).0, &at(run.end - 1).1), "{name} {tensor:?} {run:?}");
                assert!(scales.iter().all(|scale| bf16::from_f32(*scale).to_f32() == *scale && *scale > 0.0));
                others += zeros.iter().filter(|zero| **zero != MIDDLE).count();
                if matches!(format, WeightFormat::Int4 { .. }) {
                    for (row, zero) in zeros.into_iter().enumerate() {
                        let stored = |value: &bf16| value.to_f32() + f32::from(zero);
                        let run = &values[row * columns..][run.clone()];
                        assert!(run.iter().map(stored).all(|q| (0.0..16.0).contains(&q) && q.fract() == 0.0), "{name}");
                    }
                }
            }
        }
        assert_eq!(others > 0, format.has_zeros(), "{name}");
    }
}

#[test]
fn both_forms_of_gptq_say_the_same() {
    let first = as_found(&fixture("tiny-gptq-desc-act"));
    let dir = changed("tiny-gptq-desc-act", |tensors, config| {
        config["checkpoint_format"] = "gptq_v2".into();
        for (_, (.., bytes)) in tensors.iter_mut().filter(|(name, _)| name.ends_with("qzeros")) {
            for word in bytes.as_chunks_mut().0 {
                *word = u32::from_le_bytes(*word).wrapping_add(0x1111_1111).to_le_bytes();
            }
        }
    });
    let second = as_found(dir.path());
    for tensor in matrices(&first) {
        assert_eq!(weights(&first, tensor), weights(&second, tensor), "{tensor:?}");
    }
}

#[test]
fn matrices_that_are_stored_otherwise_make_a_model_of_bf16_with_the_same_weights() {
    use LayerTensor::{Down, Query};
    for (name, format) in TINY {
        let stored = as_found(&fixture(name));
        let picked = |tensor| matches!(tensor, Tensor::Layer(0, Query | Down));
        let dir = in_bf16(&fixture(name), Some(&picked));
        let checkpoint = as_found(dir.path());
        assert_eq!(checkpoint.config().layer_weights, WeightFormat::Bf16);
        for tensor in matrices(&stored) {
            assert_eq!(whole(&checkpoint, tensor), weights(&stored, tensor), "{name} {tensor:?}");
            let (mut scales, mut zeros) = ([0.0; 7], [0; 7]);
            Source::scales(&checkpoint, tensor, 3..10, 5, &mut scales);
            Source::zeros(&checkpoint, tensor, 3..10, 5, &mut zeros);
            assert_eq!((scales, zeros), ([1.0; 7], [MIDDLE; 7]));
        }
        let notes = checkpoint.notes().join("\n");
        let says = format!("model.layers.0.self_attn.q_proj.weight and 1 more of {}", matrices(&stored).count());
        // Where all are expanded anyway, the reason is another.
        assert_eq!(notes.contains(&says), format != WeightFormat::Bf16, "{name}: {notes}");
        assert_eq!(notes.contains("act order"), format == WeightFormat::Bf16, "{name}: {notes}");
        let error = open(dir.path()).unwrap_err();
        assert!(matches!(error, CheckpointError::Mixed { .. }), "{error}");
    }
    // None of fewer bits: a model in bf16, whatever config.json says.
    let dir = in_bf16(&fixture("tiny-gptq"), Some(&|_| true));
    assert_eq!(as_found(dir.path()).config().layer_weights, WeightFormat::Bf16);
}

#[test]
fn a_row_scaled_matrix_beside_plain_ones_is_expanded() {
    const UP: &str = "model.layers.1.mlp.up_proj.weight";
    let (dir, source) = (in_fp8(false, &|_, _, _, _| true), open(&fixture("llama-gqa")).unwrap());
    let stored = open(dir.path()).unwrap();
    let mixed = in_fp8(false, &|name, dtype, shape, bytes| {
        if name == UP {
            (*dtype, *bytes) = (Dtype::BF16, vec![0; shape[0] * shape[1] * 2]);
        }
        name != format!("{UP}_scale")
    });
    let checkpoint = as_found(mixed.path());
    let down = Tensor::Layer(0, LayerTensor::Down);
    assert_eq!(whole(&checkpoint, down), weights(&stored, down));
    assert_eq!(whole(&checkpoint, Tensor::Layer(1, LayerTensor::Up)), vec![bf16::ZERO; 384 * 256]);
    assert_eq!(whole(&checkpoint, Tensor::FinalNorm), whole(&source, Tensor::FinalNorm));
}

#[test]
fn what_is_released_is_read_again_and_few_that_lie_across_stay_mapped() {
    for (name, _) in TINY {
        let checkpoint = as_found(&fixture(name));
        for tensor in matrices(&checkpoint) {
            let before = whole(&checkpoint, tensor);
            let rows = tensor.shape(checkpoint.config())[0];
            for piece in (0..rows).step_by(16).map(|first| first..(first + 16).min(rows)) {
                checkpoint.release(tensor, piece);
            }
            assert!(checkpoint.held.lock().unwrap().len() <= HELD);
            assert_eq!(whole(&checkpoint, tensor), before, "{name} {tensor:?}");
        }
        let across = ["tiny-awq", "tiny-gptq", "tiny-gptq-desc-act"].contains(&name);
        assert_eq!(checkpoint.held.lock().unwrap().len(), if across { HELD } else { 0 }, "{name}");
    }
}

#[test]
fn tensors_that_are_missing_or_do_not_fit_are_refused_by_name() {
    const UP: &str = "model.layers.0.mlp.up_proj.";
    let refused = |name: &str, suffix: &str, change: &dyn Fn(&mut Tensors, &str)| {
        let suffix = format!("{UP}{suffix}");
        let dir = changed(name, |tensors, _| change(tensors, &suffix));
        let config = ModelConfig::from_dir(dir.path()).unwrap();
        let error = Checkpoint::open_as_found(dir.path(), &config).unwrap_err().to_string();
        assert!(error.contains("model.safetensors: tensor ") && error.contains(&suffix), "{name} {suffix}: {error}");
        error
    };
    for (name, suffix, shape) in [
        ("tiny-packed", "weight_packed", "[160, 16]"),
        ("tiny-packed", "weight_scale", "[160, 1]"),
        ("tiny-packed-zeros", "weight_zero_point", "[20, 4]"),
        ("tiny-awq", "qweight", "[128, 20]"),
        ("tiny-awq", "qzeros", "[4, 20]"),
        ("tiny-awq", "scales", "[4, 160]"),
        ("tiny-gptq", "qweight", "[16, 160]"),
        ("tiny-gptq", "qzeros", "[4, 20]"),
        ("tiny-gptq-desc-act", "g_idx", "[128]"),
        ("tiny-fp8-blocks", "weight_scale_inv", "[2, 1]"),
    ] {
        // Of one that has no weight at all, whatever stands for it is missed.
        let says = refused(name, suffix, &|tensors, suffix| drop(tensors.remove(suffix)));
        assert!(says.contains(&format!("{shape} is missing")), "{says}");
        let says = refused(name, suffix, &|tensors, suffix| {
            let (dtype, shape, bytes) = tensors.get_mut(suffix).unwrap();
            shape[0] -= 1;
            bytes.truncate(shape.iter().product::<usize>() * dtype.bitsize() / 8);
        });
        assert!(says.contains(&format!("but by config.json it is {shape}")), "{says}");
        let says = refused(name, suffix, &|tensors, suffix| {
            let (dtype, shape, bytes) = tensors.get_mut(suffix).unwrap();
            (*dtype, *bytes) = (Dtype::I8, vec![0; shape.iter().product()]);
        });
        assert!(says.contains("is I8, but by config.json (quantization_config) it is"), "{says}");
    }
    let says = refused("tiny-packed", "weight_shape", &|tensors, suffix| tensors.get_mut(suffix).unwrap().2[0] += 1);
    assert!(says.contains("has shape [161, 128], but by config.json it is [160, 128]"), "{says}");
    let says = refused("tiny-gptq-desc-act", "g_idx", &|tensors, suffix| tensors.get_mut(suffix).unwrap().2[20] = 4);
    assert!(says.contains("column 5 (from 0) is of group 4, but by config.json there are 4"), "{says}");
}

#[test]
fn scales_and_zero_points_that_cannot_be_are_named_by_the_rank_that_reads_them() {
    const UP: &str = "model.layers.0.mlp.up_proj.";
    let up = Tensor::Layer(0, LayerTensor::Up);
    let faulty = |name: &str, suffix: &str, at: usize, bytes: &[u8]| {
        let tensor = format!("{UP}{suffix}");
        let dir = changed(name, |tensors, _| {
            tensors.get_mut(&tensor).unwrap().2[at * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        });
        let checkpoint = as_found(dir.path());
        checkpoint.check_finite().unwrap();
        weights(&checkpoint, up);
        let error = checkpoint.check_finite().unwrap_err().to_string();
        assert!(error.contains(&tensor), "{name}: {error}");
        error
    };
    let says = faulty("tiny-packed-zeros", "weight_scale", 4 * 7 + 2, &0x7f80u16.to_le_bytes());
    assert!(says.contains("weight_scale is inf in row 7, column 2 (from 0); scales are finite"), "{says}");
    let says = faulty("tiny-awq", "scales", 160 * 3 + 9, &0x7e00u16.to_le_bytes());
    assert!(says.contains("scales is NaN in row 3, column 9"), "{says}");
    let says = faulty("tiny-fp8-blocks", "weight_scale_inv", 1, &f32::MAX.to_le_bytes());
    assert!(says.contains("weight_scale_inv is inf in row 1, column 0"), "{says}");
    let says = faulty("tiny-gptq-desc-act", "scales", 5, &0x7c00u16.to_le_bytes());
    assert!(says.contains("scales is inf in row 0, column 5"), "{says}");
    let says = faulty("tiny-gptq", "qzeros", 20 + 1, &0x7777_7787u32.to_le_bytes());
    assert!(says.contains("qzeros has the zero point 9 for row 9 of the matrix, group 1"), "{says}");
    let says = faulty("tiny-fp8-blocks", "weight", 128 * 4 + 6, &[0x7f]);
    assert!(says.contains("weight is NaN in row 4, column 6"), "{says}");
}

#[test]
fn what_compressed_tensors_wrote_before_is_read_too() {
    // Columns in order say so, or say nothing (-1); in another order they are those of GPTQ.
    let expected = as_found(&fixture("tiny-packed-zeros"));
    let with_order = |order: &dyn Fn(usize) -> i32| {
        let dir = changed("tiny-packed-zeros", |tensors, config| {
            config["config_groups"]["group_0"]["weights"]["actorder"] = json!("group");
            for tensor in matrices(&expected) {
                let name = tensor.name(expected.config()).replace("weight", "weight_g_idx");
                let columns = tensor.shape(expected.config())[1];
                let bytes = (0..columns).flat_map(|column| order(column).to_le_bytes()).collect();
                tensors.insert(name, (Dtype::I32, vec![columns], bytes));
            }
        });
        as_found(dir.path())
    };
    let (in_order, unsaid) = (with_order(&|column| column as i32 / 32), with_order(&|_| -1));
    let turned = with_order(&|column| 3 - (column as i32 / 32).min(3));
    assert_eq!(in_order.config().layer_weights, expected.config().layer_weights);
    assert_eq!(turned.config().layer_weights, WeightFormat::Bf16);
    for tensor in matrices(&expected) {
        assert_eq!(weights(&in_order, tensor), weights(&expected, tensor));
        assert_eq!(weights(&unsaid, tensor), weights(&expected, tensor));
        assert_ne!(weights(&turned, tensor), weights(&expected, tensor));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    // Whichever part of a matrix is read, it is the same, and so it is where it is expanded.
    #[test]
    fn a_matrix_is_the_same_in_any_slices(
        fixture_of in 0..TINY.len(),
        tensor in any::<prop::sample::Index>(),
        ends in prop::array::uniform4(any::<prop::sample::Index>()),
    ) {
        static ALL: LazyLock<Vec<[Checkpoint; 2]>> = LazyLock::new(|| {
            let mixed = |name| in_bf16(&fixture(name), Some(&|tensor| tensor == Tensor::Layer(0, LayerTensor::Key)));
            TINY.map(|(name, _)| [as_found(&fixture(name)), as_found(mixed(name).path())]).into()
        });
        for checkpoint in &ALL[fixture_of] {
            let tensor = *tensor.get(&matrices(checkpoint).collect::<Vec<_>>());
            let [rows, columns] = tensor.shape(checkpoint.config())[..] else { unreachable!() };
            let range = |[a, b]: [prop::sample::Index; 2], len: usize| {
                let [a, b] = [a, b].map(|end| end.index(len + 1));
                a.min(b)..a.max(b)
            };
            let [first, last, left, right] = ends;
            let (of_rows, of_columns) = (range([first, last], rows), range([left, right], columns));
            let all = whole(checkpoint, tensor);
            let mut part = vec![bf16::NAN; of_rows.len() * of_columns.len()];
            checkpoint.read(tensor, of_rows.clone(), of_columns.clone(), &mut part);
            for (row, part) in of_rows.zip(part.chunks(of_columns.len().max(1))) {
                prop_assert_eq!(part, &all[row * columns..][of_columns.clone()]);
            }
        }
    }

    // Whatever the bytes, opening answers, and what opens can be read, to whichever of its groups and zero points.
    #[test]
    fn damaged_files_of_few_bits_never_panic(
        fixture_of in 0..TINY.len(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>(), any::<u8>()), 1..4),
    ) {
        static FILES: LazyLock<Vec<(ModelConfig, Vec<u8>)>> = LazyLock::new(|| {
            let of = |name| std::fs::read(fixture(name).join("model.safetensors")).unwrap();
            TINY.map(|(name, _)| (ModelConfig::from_dir(&fixture(name)).unwrap(), of(name))).into()
        });
        let (config, bytes) = &FILES[fixture_of];
        let mut bytes = bytes.clone();
        let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        for (at, in_header, value) in flips {
            let at = at.index(if in_header { header } else { bytes.len() });
            bytes[at] = value;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open_as_found(dir.path(), config) {
            matrices(&checkpoint).for_each(|tensor| drop(weights(&checkpoint, tensor)));
            // Only that it answers.
            let _ = checkpoint.check_finite();
        }
    }
}
