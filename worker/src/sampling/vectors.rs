//! The vectors of this processor.

/// Whether the processor has what wide versions of functions are compiled for. The answer is cached: asking costs a
/// load.
#[cfg(target_arch = "x86_64")]
pub(super) fn wide_vectors() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}
