// The start of a launch of several ranks, or of a step whose rows their hosts give: one may be late.
#pragma once

/// A warp of a block waits until all ranks have begun the launch, or the step, of a tag. Only then does anybody wait
/// with the short limits of wait.cuh. A rank that has ended it may have begun the next one, so a newer tag will do.
/// This is a call, not inlined: within the kernel it would take registers from the loop (20 bytes more are spilled on
/// four ranks). Orders nothing. Writer: block 0 of each rank, to all ranks. Readers: all blocks, of a step block 0,
/// which tells the others. Scope: system.
static __device__ __noinline__ void await_ranks(const Launch& launch, u32 tag) {
  const u32 lane = lane_index();
  if (lane >= kRanks) return;
#ifdef LP_LATE  // rank 1 begins so many clocks late
  for (const long long begun = clock64(); launch.rank == 1 && clock64() - begun < LP_LATE;) {}
#endif
  if (rank_block() == 0)
    store_system_u32((u32*)(launch.inbox[lane] + InboxHead::begun) + own_rank(launch), tag);
#ifndef LP_HASTY  // negative control
  const u32* begun = (const u32*)(launch.inbox[own_rank(launch)] + InboxHead::begun) + lane;
  const long long since = clock64();
  for (u32 seen; (seen = load_system_u32(begun)) < tag;)
    if (clock64() - since > kStartLimit) wait_failed(launch, kSiteRanksBegun, tag, seen, lane);
#endif
}
