// Waits: every one is bounded; past its limit it writes a report to host memory and traps.
#pragma once

#ifndef LP_PATIENCE
#define LP_PATIENCE 1  // under tools that slow a kernel down
#endif
/// Clocks a wait may take, about 0.6 s. Waits within a block get twice that, so that the exchange that is at fault reports first.
constexpr long long kWaitLimit = 1000000000ll * LP_PATIENCE;

/// Where a wait is; named in worker/src/cuda/launch.rs. The sampler's: in the order of sampling::Kind.
enum Site : u32 {
  kSiteSlotEmpty = 1, kSiteLanded, kSiteFull, kSitePartialsEmpty, kSitePartialsFull, kSiteToken, kSiteInputEmpty, kSiteInputFull, kSiteNorm,
  kSiteAttentionX = 10, kSiteQuery, kSiteFresh, kSitePage, kSiteAttentionOut, kSiteMlpX, kSiteActivation, kSiteHeadX, kSiteSampled, kSiteInverse,
  kSiteSamplerBest = 20, kSiteSamplerOther, kSiteSamplerBefore, kSiteSamplerAll, kSiteSamplerRaw, kSiteSamplerDrawList, kSiteSamplerTopList,
};

/// `launch`: of any kernel.
template <class L> LP_DEVICE void wait_failed(const L& launch, u32 site, u32 expected, u32 seen) {
  volatile u32* report = launch.report;
  report[1] = blockIdx.x;
  report[2] = threadIdx.x;
  report[3] = site;
  report[4] = expected;
  report[5] = seen;
  fence_system();
  report[0] = 1;
  fence_system();
  trap();
}
LP_DEVICE void wait_barrier(const Launch& launch, u32 barrier, u32 parity, u32 site) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const long long begun = clock64();
  while (!mbarrier_try_wait(barrier, parity))
    if (clock64() - begun > 2 * kWaitLimit) wait_failed(launch, site, parity, barrier);
}

#ifdef LP_ABLATE_WAITS
constexpr bool kAblateWaits = true;  // what do the exchanges cost? wrong results
#else
constexpr bool kAblateWaits = false;
#endif

/// Calls `get(j)` for j < N until nothing is missing. It loads what it does not have yet and returns kThere, or, if that has not been written, its offset from `base`.
/// While something is missing, a word that one lane misses, the last of its words, stands for all (polling them all slows the stream).
constexpr u32 kThere = ~0u;
template <int N, class Get> LP_DEVICE void poll(const Launch& launch, const u8* base, Get get, u32 site) {
  long long begun = 0;
  while (true) {
    u32 missing = kThere;
#pragma unroll
    for (int j = 0; j < N; j++) {
      const u32 at = get(j);
      if (at != kThere) missing = at;
    }
    const u32 waiting = __ballot_sync(kAllLanes, missing != kThere);
    if (kAblateWaits || waiting == 0) break;
    if (begun == 0) begun = clock64();
    if ((int)(threadIdx.x & 31) == __ffs(waiting) - 1)
      while (load_relaxed_u32(base + missing) == 0)
        if (clock64() - begun > kWaitLimit) wait_failed(launch, site, (u32)(base + missing - launch.words), 0);
    __syncwarp();
  }
}

/// Loads N words at `base + j * stride` into x, y and extra until all have the tag. While some are missing, one lane's missing word
/// stands for all (polling them all slows the stream). Lanes that are not `active` get zeros.
template <int N> LP_DEVICE void poll_words(const Launch& launch, const u8* base, u32 stride, u32 tag, bool active, u32* x, u32* y, u32* extra, u32 site) {
  long long begun = 0;
  while (true) {
    u32 missing = ~0u, seen = 0;
#pragma unroll
    for (int j = N - 1; j >= 0; j--) {
      Quad v{0, 0, tag, 0};
      if (active) v = load_relaxed_16(base + j * stride);
      x[j] = v.x;
      y[j] = v.y;
      extra[j] = v.w;
      if (!kAblateWaits && v.z != tag) missing = j, seen = v.z;
    }
    if (!any_lane(missing != ~0u)) break;
    if (begun == 0) begun = clock64();
    if (missing != ~0u && clock64() - begun > kWaitLimit) wait_failed(launch, site, tag, seen);
    const u32 scout = __ballot_sync(kAllLanes, missing != ~0u);
    if ((int)(threadIdx.x & 31) == __ffs(scout) - 1) {
      const u8* word = base + missing * stride;
      while ((seen = load_relaxed_16(word).z) != tag)
        if (clock64() - begun > kWaitLimit) wait_failed(launch, site, tag, seen);
    }
    __syncwarp();
  }
  __syncwarp();
}
