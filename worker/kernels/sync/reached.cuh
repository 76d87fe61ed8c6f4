// Aids for measuring and for breaking things.
#pragma once

/// A warp is at stage `stage` of a layer. With LP_TRACE it notes the clock, in the last step: Launch::trace is [block][warp][layer][16]. With
/// LP_DELAYS, a seed, it is held up now and then, which must change nothing but time.
LP_DEVICE void reached(const Launch& launch, u32 step, u32 warp, u32 layer, u32 stage) {
#ifdef LP_TRACE
  if (step + 1 == launch.steps && (threadIdx.x & 31) == 0)
    launch.trace[(((u64)blockIdx.x * (kThreads / 32) + warp) * (kLayers + 1) + layer) * 16 + stage] = clock64();
#endif
#ifdef LP_DELAYS
  u32 hash = (((blockIdx.x * 32 + warp) * 64 + layer) * 16 + stage) * 64 + step + LP_DELAYS * 0x9e3779b9u;
  hash = (hash ^ hash >> 16) * 0x85ebca6bu;
  hash = (hash ^ hash >> 13) * 0xc2b2ae35u;
  hash ^= hash >> 16;
  // One in 16 is held up for up to 30 us, and one in 4096 for 2 ms.
  const long long until = clock64() + (hash % 4096 == 0 ? 4000000 : hash % 16 == 0 ? hash >> 16 : 0);
  while (clock64() < until) {}
  __syncwarp();
#endif
}
