// Waits: every one is bounded; past its limit it writes a report to host memory and traps.
#pragma once

#ifndef LP_PATIENCE
#define LP_PATIENCE 1  // under tools that slow a kernel down
#endif
/// Clocks a wait may take, about 0.6 s. Waits within a block get twice that, so that the exchange that is at fault reports first.
constexpr long long kWaitLimit = 1000000000ll * LP_PATIENCE;

/// Where a wait is; named in worker/src/cuda/launch.rs.
enum Site : u32 {
  kSiteSlotEmpty = 1, kSiteLanded, kSiteFull, kSitePartialsEmpty, kSitePartialsFull, kSiteToken,
  kSiteAttentionX = 10, kSiteQuery, kSiteFresh, kSitePage, kSiteAttentionOut, kSiteMlpX, kSiteActivation, kSiteHeadX, kSiteSampled,
};

LP_DEVICE void wait_failed(const Launch& launch, u32 site, u32 expected, u32 seen) {
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
