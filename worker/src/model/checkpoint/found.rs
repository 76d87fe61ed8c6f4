//! What the tensors that were found make of a model, and the user should know.

use std::collections::BTreeMap;

use safetensors::tensor::Dtype;

use super::files::MappedFile;
use super::place::{Groups, Place};
use crate::model::{Tensor, WeightFormat};

/// What is rounded to bf16: a sentence a dtype.
pub(super) fn rounded(files: &[MappedFile], tensors: &BTreeMap<Tensor, Place>) -> Vec<String> {
    let mut notes = Vec::new();
    for dtype in [Dtype::F16, Dtype::F32] {
        let parts = tensors.values().flat_map(|place| place.parts(0..place.rows).map(|(part, _)| part));
        let mut rounded = parts.filter(|part| part.dtype == dtype);
        if let Some(first) = rounded.next() {
            let (more, file) = (rounded.count(), files[first.file].path.display());
            let others = if more > 0 { format!(" and {more} more tensors") } else { String::new() };
            notes.push(format!("{file}: {}{others} rounded from {dtype} to BF16", first.name));
        }
    }
    notes
}

/// The format that the layers' matrices are read in, `stored` by config.json: the one that they have in common, else
/// bf16, and then each is expanded. A sentence says why.
pub(super) fn one_format(
    stored: WeightFormat,
    tensors: &mut BTreeMap<Tensor, Place>,
    notes: &mut Vec<String>,
) -> WeightFormat {
    let of_layers = tensors.iter_mut().filter(|(tensor, _)| tensor.is_streamed_in_layers());
    let mut matrices: Vec<&mut Place> = of_layers.map(|(_, place)| place).collect();
    let of = |is: &dyn Fn(&Place) -> bool| {
        let mut names = matrices.iter().filter(|place| is(place)).map(|place| place.values.part().name.as_ref());
        let first: &str = names.next()?;
        Some(format!("{first} and {} more of {} matrices of the layers", names.count(), matrices.len()))
    };
    const COSTS: &str = "all are expanded to bf16 at load, and a pass reads the bytes of a bf16 model";
    if let Some(some) = of(&|place| matches!(place.groups, Groups::Listed(_))) {
        notes.push(format!("{some} have groups of columns that do not lie together (act order): {COSTS}"));
    }
    let format = matrices.first().map_or(stored, |place| place.read_format());
    if matrices.iter().all(|place| place.read_format() == format) {
        return format;
    }
    if let Some(some) = of(&|place| place.format == WeightFormat::Bf16) {
        notes.push(format!("{some} are not in {stored}: {COSTS}"));
    }
    for place in &mut matrices {
        place.expanded = place.format != WeightFormat::Bf16;
    }
    WeightFormat::Bf16
}
