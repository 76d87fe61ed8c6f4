// What the tests share: data of six kinds, checks of calls.
#pragma once
#include "ptx/ptx.cuh"

#define CHECK(call)                                                                                          \
  do {                                                                                                       \
    const cudaError_t error = call;                                                                          \
    if (error != cudaSuccess) printf("%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(error)), exit(1); \
  } while (0)

LP_DEVICE u32 scrambled(u64 x) {
  x ^= x >> 31, x *= 0x7fb5d329728ea185ull, x ^= x >> 27, x *= 0x81dadef4bc2dd44dull, x ^= x >> 33;
  return (u32)x;
}
/// A bf16 of one of six kinds: about normal; exponents over 2^+-30; few bits, which cancel; products among the
/// subnormals; 90 % zeros and 2^+-60; any finite bits.
LP_DEVICE u16 value_of(u64 index, u32 seed, int kind) {
  const u32 r = scrambled(index * 2654435761ull + seed * 0x9e3779b97f4a7c15ull + 1),
            q = scrambled(index + ((u64)seed << 40) + 77);
  if (kind == 1) return (u16)((r & 0x807f) | ((127 - 30 + q % 61) << 7));
  if (kind == 2) return (u16)((r & 0x8000) | ((127 + q % 3) << 7) | (r & 0x60));
  if (kind == 3) return (u16)((r & 0x807f) | ((127 - 72 + q % 12) << 7));
  if (kind == 4) return q % 10 ? 0 : (u16)((r & 0x807f) | ((127 + (q >> 8 & 1 ? 60 : -60)) << 7));
  if (kind == 5) return (u16)((r & 0x7f80) > 0x5f00 ? r & 0xbfff : r);
  float sum = 0;
  for (int i = 0; i < 4; i++) sum += (float)(r >> 8 * i & 255) - 127.5f;
  return (u16)(__float_as_uint(sum * 0.0068f) >> 16);
}
__global__ void fill(u16* to, u64 values, u32 seed, int kind) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < values; i += (u64)gridDim.x * blockDim.x)
    to[i] = value_of(i, seed, kind);
}
