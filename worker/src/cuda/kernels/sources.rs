//! The text of the decoder's kernels, which is compiled at load.

/// The kernels' sources: narrow, wide, matrix.
pub const SOURCES: [&str; 3] = [
    include_str!("../../../kernels/looped_decoder.cu"),
    include_str!("../../../kernels/wide_decoder.cu"),
    include_str!("../../../kernels/matrix_decoder.cu"),
];
/// The kernels that run a phase each.
pub const UNLOOPED_SOURCE: &str = include_str!("../../../kernels/unlooped_decoder.cu");
/// What the sources include, by the names they have for it.
pub const HEADERS: [(&str, &str); 41] = [
    ("ptx/ptx.cuh", include_str!("../../../kernels/ptx/ptx.cuh")),
    ("ptx/wgmma.cuh", include_str!("../../../kernels/ptx/wgmma.cuh")),
    ("layout/shape.cuh", include_str!("../../../kernels/layout/shape.cuh")),
    ("layout/page.cuh", include_str!("../../../kernels/layout/page.cuh")),
    ("layout/launch.cuh", include_str!("../../../kernels/layout/launch.cuh")),
    ("layout/rows.cuh", include_str!("../../../kernels/layout/rows.cuh")),
    ("layout/words.cuh", include_str!("../../../kernels/layout/words.cuh")),
    ("layout/inbox.cuh", include_str!("../../../kernels/layout/inbox.cuh")),
    ("layout/shared_memory.cuh", include_str!("../../../kernels/layout/shared_memory.cuh")),
    ("sync/wait.cuh", include_str!("../../../kernels/sync/wait.cuh")),
    ("sync/start.cuh", include_str!("../../../kernels/sync/start.cuh")),
    ("sync/reached.cuh", include_str!("../../../kernels/sync/reached.cuh")),
    ("sync/ring.cuh", include_str!("../../../kernels/sync/ring.cuh")),
    ("sync/steps.cuh", include_str!("../../../kernels/sync/steps.cuh")),
    ("sync/turns.cuh", include_str!("../../../kernels/sync/turns.cuh")),
    ("ops/ranks.cuh", include_str!("../../../kernels/ops/ranks.cuh")),
    ("ops/tree_sum.cuh", include_str!("../../../kernels/ops/tree_sum.cuh")),
    ("ops/values.cuh", include_str!("../../../kernels/ops/values.cuh")),
    ("ops/softmax.cuh", include_str!("../../../kernels/ops/softmax.cuh")),
    ("ops/best.cuh", include_str!("../../../kernels/ops/best.cuh")),
    ("ops/product.cuh", include_str!("../../../kernels/ops/product.cuh")),
    ("ops/attention.cuh", include_str!("../../../kernels/ops/attention.cuh")),
    ("ops/epilogue.cuh", include_str!("../../../kernels/ops/epilogue.cuh")),
    ("ops/phases.cuh", include_str!("../../../kernels/ops/phases.cuh")),
    ("wide/geometry.cuh", include_str!("../../../kernels/wide/geometry.cuh")),
    ("wide/stream.cuh", include_str!("../../../kernels/wide/stream.cuh")),
    ("wide/product.cuh", include_str!("../../../kernels/wide/product.cuh")),
    ("wide/exchange.cuh", include_str!("../../../kernels/wide/exchange.cuh")),
    ("wide/ranks.cuh", include_str!("../../../kernels/wide/ranks.cuh")),
    ("wide/attention_items.cuh", include_str!("../../../kernels/wide/attention_items.cuh")),
    ("wide/attention_share.cuh", include_str!("../../../kernels/wide/attention_share.cuh")),
    ("wide/attention.cuh", include_str!("../../../kernels/wide/attention.cuh")),
    ("wide/epilogue.cuh", include_str!("../../../kernels/wide/epilogue.cuh")),
    ("wide/head.cuh", include_str!("../../../kernels/wide/head.cuh")),
    ("matrix/layout.cuh", include_str!("../../../kernels/matrix/layout.cuh")),
    ("matrix/product.cuh", include_str!("../../../kernels/matrix/product.cuh")),
    ("matrix/epilogue.cuh", include_str!("../../../kernels/matrix/epilogue.cuh")),
    ("matrix/vectors.cuh", include_str!("../../../kernels/matrix/vectors.cuh")),
    ("matrix/attend_tiles.cuh", include_str!("../../../kernels/matrix/attend_tiles.cuh")),
    ("matrix/attend_spans.cuh", include_str!("../../../kernels/matrix/attend_spans.cuh")),
    ("matrix/head_norms.cuh", include_str!("../../../kernels/matrix/head_norms.cuh")),
];
