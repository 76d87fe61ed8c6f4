// Waits: every one is bounded; past its limit it writes a report to host memory and traps.
#pragma once

#ifndef LP_PATIENCE
#define LP_PATIENCE 1  // under tools that slow a kernel down
#endif
/// The clock of waits. Narrow passes have no register to spare, so they take its low half, which wraps after 2.4 s,
/// longer than any wait.
#if LP_COLUMNS > 8 || LP_PATIENCE > 1
using Clocks = long long;
#else
using Clocks = u32;
#endif
LP_DEVICE Clocks clocks() { return (Clocks)clock64(); }
/// Limit of a wait in clocks, about 0.6 s: of a wait for another rank or, without ranks, for another block. A wait for
/// what comes after an exchange has a longer limit, so that the exchange at fault reports first: waits of a group's
/// blocks for each other, waits within a block, and waits for turns.
constexpr Clocks kWaitLimit = (Clocks)1000000000 * LP_PATIENCE;
#if defined LP_RANKS && LP_RANKS > 1
constexpr Clocks kBlocksWaitLimit = 2 * kWaitLimit;
#else
constexpr Clocks kBlocksWaitLimit = kWaitLimit;
#endif
constexpr Clocks kWithinWaitLimit = kBlocksWaitLimit + kWaitLimit;
/// Clocks that a rank waits for the others to begin a launch, or for its host to give rows, about 10 s: a host may be
/// late.
constexpr long long kStartLimit = 20000000000 * LP_PATIENCE;

/// Where a wait is; named in worker/src/cuda/kernels/launch.rs. The sampler's: in the order of sampling::Kind.
enum Site : u32 {
  kSiteSlotEmpty = 1, kSiteLanded, kSiteFull, kSitePartialsEmpty, kSitePartialsFull, kSiteToken, kSiteInputEmpty,
  kSiteInputFull, kSiteNorm,
  kSiteAttentionX = 10, kSiteQuery, kSiteFresh, kSitePage, kSiteAttentionOut, kSiteMlpX, kSiteActivation, kSiteHeadX,
  kSiteSampled, kSiteInverse,
  kSiteSamplerBest = 20, kSiteSamplerOther, kSiteSamplerBefore, kSiteSamplerAll, kSiteSamplerRaw, kSiteSamplerDrawList,
  kSiteSamplerTopList,
  kSiteTurns = 27, kSiteBegun, kSiteOpened,
  kSiteSums = 30, kSiteEmbedding, kSiteRankTokens, kSiteRankX, kSiteRanksBegun, kSiteStepped, kSiteRanksMet,
  kSiteFed,
};

/// No rank is at fault.
constexpr u32 kNobody = ~0u;
struct Nobody {
  LP_DEVICE u32 operator()(u32) const { return kNobody; }
};
template <class WHO> constexpr bool kOfRanks = true;
template <> constexpr bool kOfRanks<Nobody> = false;

/// `launch`: of any kernel. `rank`: the one whose word is missing.
template <class L> LP_DEVICE void wait_failed(const L& launch, u32 site, u32 expected, u32 seen, u32 rank = kNobody) {
  volatile u32* report = launch.report;
  report[1] = blockIdx.x;
  report[2] = threadIdx.x;
  report[3] = site;
  report[4] = expected;
  report[5] = seen;
  report[6] = rank;
  fence_system();
  report[0] = 1;
  fence_system();
  trap();
}
/// Values that only a report needs would be kept in registers all along, and products need those. So the report says no
/// more of the barrier than that it has not completed. Wide passes ask the barrier for the parity that is waited for,
/// which is that of the phase that has not ended.
LP_DEVICE void wait_barrier(const Launch& launch, u32 barrier, u32 parity, u32 site) {
  if (mbarrier_try_wait(barrier, parity)) return;
  const Clocks begun = clocks();
  while (!mbarrier_try_wait(barrier, parity))
    if (clocks() - begun > kWithinWaitLimit)
      wait_failed(launch, site, LP_COLUMNS > 8 ? mbarrier_test_wait(barrier, 0) : 1, 0);
}

#ifdef LP_ABLATE_WAITS
constexpr bool kAblateWaits = true;  // what do the exchanges cost? wrong results
#else
constexpr bool kAblateWaits = false;
#endif

/// Pause between two polls of words of this GPU that have not arrived, in ns: polls take bandwidth from words and
/// weights. Words of other ranks are polled without a pause.
constexpr u32 kNap = 150;

constexpr u32 kThere = ~0u;
/// Polls until no word is missing. For j < N, `fetch(j)` loads what it does not have yet. `missing(j)` is kThere, or
/// the distance from `base` of the value that tells, by `there(value)`, that a word has been written. All loads of a
/// round are under way before the first is tested. With SCOUT, while words are missing, one lane polls its last missing
/// word for all lanes: polling them all slows the stream. Words of many writers are better polled all, each until it is
/// there. For words of other ranks, `who` gives the rank that writes the word at such a distance.
template <int N, bool SCOUT, class Fetch, class Missing, class There, class Who = Nobody>
LP_DEVICE void poll(const Launch& launch, const u8* base, u32 expected, Fetch fetch, Missing missing, There there,
                    u32 site, Who who = {}) {
  constexpr Clocks LIMIT = kOfRanks<Who> ? kWaitLimit : kBlocksWaitLimit;
  Clocks begun = 0;
  while (true) {
#pragma unroll
    for (int j = 0; j < N; j++) fetch(j);
    u32 at = kThere;
#pragma unroll
    for (int j = 0; j < N; j++) at = missing(j) != kThere ? missing(j) : at;
    const u32 waiting = __ballot_sync(kAllLanes, at != kThere);
    if (kAblateWaits || waiting == 0) break;
    if (begun == 0) begun = clocks();
    if constexpr (!SCOUT) {
      if (at != kThere && clocks() - begun > LIMIT)
        wait_failed(launch, site, expected, load_relaxed_u32(base + at), who(at));
      if (!kOfRanks<Who>) nap(kNap);
      continue;
    }
    if ((int)lane_index() == __ffs(waiting) - 1) {
      u32 seen;
      while (!there(seen = load_relaxed_u32(base + at))) {
        if (clocks() - begun > LIMIT) wait_failed(launch, site, expected, seen, who(at));
        nap(kNap);
      }
    }
    __syncwarp();
  }
}

/// Waits until the words at `base + j * stride`, j < `count` <= N, have the tag (not 0): their x, y and extra. Beyond
/// `count`, which may differ by lane, zeros.
template <int N, bool SCOUT = false> LP_DEVICE void poll_words(const Launch& launch, const u8* base, u32 stride,
                                                               u32 tag, u32 count, u32* x, u32* y, u32* extra,
                                                               u32 site) {
  Quad v[N] = {};
  const auto missing = [&](int j) { return (u32)j < count && v[j].z != tag ? j * stride + 8 : kThere; };
  const auto fetch = [&](int j) {
    if (missing(j) != kThere) v[j] = load_relaxed_16(base + j * stride);
  };
  poll<N, SCOUT>(launch, base, tag, fetch, missing, [&](u32 seen) { return seen == tag; }, site);
#pragma unroll
  for (int j = 0; j < N; j++) x[j] = v[j].x, y[j] = v[j].y, extra[j] = v[j].w;
}
