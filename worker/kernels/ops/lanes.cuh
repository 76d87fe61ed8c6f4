// IEEE arithmetic that no compiler flag contracts, bit casts and whole-warp sums, as the sampler wants them. The tests'
// emulate.h gives the same functions (and those of ptx.cuh and wait.cuh that the sampler uses) on a host's fibers.
#pragma once

namespace sampling {

LP_DEVICE u32 bits(float v) { return __float_as_uint(v); }
LP_DEVICE float float_of(u32 v) { return __uint_as_float(v); }
LP_DEVICE u64 bits(double v) { return (u64)__double_as_longlong(v); }
LP_DEVICE double double_of(u64 v) { return __longlong_as_double((long long)v); }
LP_DEVICE u32 popc(u64 v) { return __popcll(v); }
LP_DEVICE u32 lowest_bit(u64 v) { return __ffsll(v) - 1; }
LP_DEVICE u32 mul_hi(u32 a, u32 b) { return __umulhi(a, b); }

LP_DEVICE float add(float a, float b) { return __fadd_rn(a, b); }
LP_DEVICE float sub(float a, float b) { return __fsub_rn(a, b); }
LP_DEVICE float mul(float a, float b) { return __fmul_rn(a, b); }
LP_DEVICE float div(float a, float b) { return __fdiv_rn(a, b); }
LP_DEVICE double add(double a, double b) { return __dadd_rn(a, b); }
LP_DEVICE double sub(double a, double b) { return __dsub_rn(a, b); }
LP_DEVICE double mul(double a, double b) { return __dmul_rn(a, b); }
LP_DEVICE double div(double a, double b) { return __ddiv_rn(a, b); }
LP_DEVICE double round_up(double a) { return ceil(a); }
LP_DEVICE double to_double(u64 v) { return __ull2double_rn(v); }
LP_DEVICE u64 to_integer(double v) { return __double2ull_rz(v); }
LP_DEVICE u64 to_integer(float v) { return (u64)__float2ll_rz(v); }

// Whole warp.
LP_DEVICE void warp_sync() { __syncwarp(); }
LP_DEVICE u32 warp_max(u32 v) { return __reduce_max_sync(kAllLanes, v); }
LP_DEVICE u32 warp_add(u32 v) { return __reduce_add_sync(kAllLanes, v); }
LP_DEVICE u32 ballot(bool v) { return __ballot_sync(kAllLanes, v); }
LP_DEVICE u64 shuffle_up(u64 v, u32 by) { return __shfl_up_sync(kAllLanes, v, by); }

// Order-free updates.
LP_DEVICE void atomic_max(u64* p, u64 v) { atomicMax(p, v); }
LP_DEVICE void atomic_add(u64* p, u64 v) { atomicAdd(p, v); }
LP_DEVICE void atomic_add(u32* p, u32 v) { atomicAdd(p, v); }
LP_DEVICE void atomic_or(u32* p, u32 v) { atomicOr(p, v); }

}  // namespace sampling
