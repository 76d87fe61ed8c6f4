// What the memory can do: every byte read once, by plain loads or by bulk copies. `looplane bench` sets its figures
// beside it.
#include "ptx/ptx.cuh"

constexpr u32 kChunk = 16384, kSlots = 12;
extern __shared__ __align__(1024) u8 read_memory[];

LP_DEVICE Quad load_streaming(const Quad* from) {
  Quad v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}

/// Eight 16-byte loads of a thread are under way at a time. `quads` is a multiple of eight times the grid's threads.
extern "C" __global__ void __launch_bounds__(512) read_plain(const Quad* from, u64 quads, u32* out) {
  u32 all = 0;
  const u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i + 7 * stride < quads; i += 8 * stride) {
    Quad v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = load_streaming(from + i + k * stride);
#pragma unroll
    for (int k = 0; k < 8; k++) all ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (all == 0x12345) out[0] = 1;  // so that the loads are needed
}

/// One thread a block copies 16 KiB chunks, interleaved over the blocks, `window` of them under way at a time.
extern "C" __global__ void __launch_bounds__(32, 1) read_bulk(const u8* from, u32 chunks, u32 window) {
  __shared__ u64 landed[kSlots];
  const u32 ring = shared_address(read_memory), barriers = shared_address(landed);
  if (threadIdx.x) return;
  for (u32 i = 0; i < kSlots; i++) mbarrier_init(barriers + 8 * i, 1);
  fence_mbarrier_init();
  const u64 policy = policy_evict_first();
  const u32 mine = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  for (u32 i = 0; i < mine + window; i++) {
    if (i >= window)
      while (!mbarrier_try_wait(barriers + 8 * ((i - window) % kSlots), (i - window) / kSlots & 1)) {}
    if (i >= mine) continue;
    const u32 slot = i % kSlots;
    mbarrier_expect(barriers + 8 * slot, kChunk);
    bulk_load(ring + slot * kChunk, from + ((u64)i * gridDim.x + blockIdx.x) * kChunk, kChunk, barriers + 8 * slot,
              policy);
  }
}
