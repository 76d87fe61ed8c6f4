// Aids for measuring and for breaking things.
#pragma once

#ifndef LP_DELAYS_ONE_IN
#define LP_DELAYS_ONE_IN 16
#endif

/// With LP_DELAYS: waits, by a number that is as good as random, now and then (once in LP_DELAYS_ONE_IN).
LP_DEVICE void wait_by(u32 number) {
#ifdef LP_DELAYS
  number = (number ^ number >> 16) * 0x85ebca6bu;
  number = (number ^ number >> 13) * 0xc2b2ae35u;
  number ^= number >> 16;
  // Most delays are of up to 30 us, one in 256 is of 2 ms.
  const long long until = clock64() + (number % (256 * LP_DELAYS_ONE_IN) == 0 ? 4000000
                                       : number % LP_DELAYS_ONE_IN == 0       ? number >> 16
                                                                              : 0);
  while (clock64() < until) {}
#endif
}
/// The same of a lane, by when it comes: for kernels that are launched for each phase.
LP_DEVICE void hold_up_lane() {
#ifdef LP_DELAYS
  wait_by((u32)clock64() * 0x9e3779b9u + blockIdx.x * 32 + threadIdx.x / 32 + LP_DELAYS);
#endif
}
/// Of a whole warp.
LP_DEVICE void hold_up() {
#ifdef LP_DELAYS
  hold_up_lane();
  __syncwarp();
#endif
}

/// A warp is at stage `stage` of a layer. With LP_TRACE it notes the time, in the last step: Launch::trace is
/// [block][warp][layer][16]. That is the time that all multiprocessors share, which goes on in steps of 64 ns on an
/// H200: each cluster of multiprocessors has a clock of its own, whose rate moves while a launch runs. With LP_DELAYS,
/// a seed, it is held up now and then (once in LP_DELAYS_ONE_IN stages), which must change nothing but time.
LP_DEVICE void reached(const Launch& launch, u32 step, u32 warp, u32 layer, u32 stage) {
#ifdef LP_TRACE
  if (step + 1 == launch.steps && (threadIdx.x & 31) == 0)
    launch.trace[(((u64)blockIdx.x * (blockDim.x / 32) + warp) * (kLayers + 1) + layer) * 16 + stage] =
        (long long)global_nanoseconds();
#endif
#ifdef LP_DELAYS
  wait_by((((blockIdx.x * 32 + warp) * 64 + layer) * 16 + stage) * 64 + step + launch.epoch * 0xc2b2ae3du +
          (LP_DELAYS + launch.rank) * 0x9e3779b9u);
  __syncwarp();
#endif
}

/// With LP_POISON shared memory begins full of NaN: whoever uses what nobody has written shows it. All threads call it,
/// before anything is written there.
LP_DEVICE void poison(u8* memory, u32 bytes) {
#ifdef LP_POISON
  for (u32 i = threadIdx.x; i < bytes / 4; i += blockDim.x) reinterpret_cast<u32*>(memory)[i] = ~0u;
  fence_async_shared();  // orders it before what bulk copies write
  __syncthreads();
#endif
}

/// With LP_TRACE: this multiprocessor's clock beside the time that all of them share, when a launch begins (0) and when
/// it ends (1), which says its rate, and which multiprocessor it is: Launch::trace [block][warp][kLayers][8 + 2 end ..]
/// and [12], `warp` one that has no such stages. One thread a block calls it.
LP_DEVICE void note_time(const Launch& launch, u32 warp, u32 end) {
#ifdef LP_TRACE
  long long* notes = launch.trace + (((u64)blockIdx.x * (blockDim.x / 32) + warp) * (kLayers + 1) + kLayers) * 16;
  notes[8 + 2 * end] = clock64();
  notes[9 + 2 * end] = (long long)global_nanoseconds();
  notes[12] = multiprocessor();
#endif
}
