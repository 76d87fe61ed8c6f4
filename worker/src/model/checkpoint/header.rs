//! What is wrong with a safetensors header, in words.

use std::collections::HashMap;

use safetensors::SafeTensorError;
use safetensors::tensor::TensorInfo;

/// What is wrong with a header, with the numbers that the library's error leaves out.
pub(super) fn explain(file: &[u8], error: &SafeTensorError) -> String {
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return "too short to hold a safetensors header".into();
    };
    let length = u64::from_le_bytes(*length);
    let header = usize::try_from(length).ok().and_then(|length| rest.get(..length));
    let Some(header) = header else {
        return format!("its header is said to be {length} bytes long, past the end of the file");
    };
    let tensors = || {
        let mut all: HashMap<String, serde_json::Value> = serde_json::from_slice(header).ok()?;
        all.remove("__metadata__");
        let parse = |(name, value)| Some((name, serde_json::from_value::<TensorInfo>(value).ok()?));
        let mut tensors: Vec<(String, TensorInfo)> = all.into_iter().map(parse).collect::<Option<_>>()?;
        tensors.sort_by(|a, b| (a.1.data_offsets, &a.0).cmp(&(b.1.data_offsets, &b.0)));
        Some(tensors)
    };
    let detail = match error {
        SafeTensorError::MetadataIncompleteBuffer => {
            let described = tensors().and_then(|t| t.last().map(|(_, info)| info.data_offsets.1)).unwrap_or(0);
            let held = file.len() - 8 - header.len();
            Some(format!(
                "its header describes {described} bytes of tensors, but {held} bytes follow it: is the file complete?"
            ))
        }
        _ => tensors().and_then(|tensors| first_lie(&tensors)),
    };
    detail.unwrap_or_else(|| error.to_string().chars().take(200).collect())
}

/// The first tensor whose offsets do not follow the one before, or do not hold its shape.
fn first_lie(tensors: &[(String, TensorInfo)]) -> Option<String> {
    let mut end = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (from, to) }) in tensors {
        let name: String = name.chars().take(200).collect();
        let bits = shape.iter().try_fold(dtype.bitsize(), |bits, n| bits.checked_mul(*n));
        let shape = &shape[..shape.len().min(8)];
        if *from != end || to < from {
            return Some(format!(
                "tensor {name:?} has data_offsets [{from}, {to}], but the tensor before it ends at {end}"
            ));
        }
        match bits {
            None => return Some(format!("tensor {name:?} has shape {shape:?}, more values than can be counted")),
            Some(bits) if bits.div_ceil(8) != to - from => {
                let (needs, has) = (bits.div_ceil(8), to - from);
                return Some(format!(
                    "tensor {name:?} {dtype} {shape:?} needs {needs} bytes, but data_offsets give it {has}"
                ));
            }
            Some(_) => end = *to,
        }
    }
    None
}
