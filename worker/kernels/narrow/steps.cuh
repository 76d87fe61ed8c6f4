// The steps of a launch within a block. Shared::sampled completes a phase when a step's tokens are known, and of a fed
// launch the rows of the next; all roles wait for it before they begin that.
//
// A role must not be two phases behind, since it tells phases by their parity. Nobody may count the items anew, whose
// two buffers steps use in turns, nor put other rows in place of a step's, while a role still reads them. Where a block
// has tiles of a layer both follow: the epilogue needs all consumers and their stream in every step, so it cannot
// complete a phase that they do not wait for; and behind the pages of the last layer, which o and gate and up follow in
// the stream, nobody but the epilogue reads rows. In a block without such tiles (kIdleBlocks) the other roles arrive at
// Shared::stepped when they have left a step's rows. The epilogue waits for all of them before it ends the step.
#pragma once

namespace narrow {

/// The barriers of a launch's steps; one thread calls it before the block's first barrier. `waiting`: warps that arrive
/// when they have left the rows of a step.
LP_DEVICE void begin_steps(u32 shared, u32 waiting) {
  mbarrier_init(shared + Shared::sampled, kColumns == 1 ? 1 : kEpilogueWarps);
  if (kIdleBlocks) mbarrier_init(shared + Shared::stepped, waiting);
}
/// Of a fed launch a step may begin as late as its host. This is a call for the sake of registers, as await_ranks is.
static __device__ __noinline__ void await_sampled(const Launch& launch, u32 barrier, u32 parity) {
  const long long since = clock64();
  while (!mbarrier_try_wait(barrier, parity))
    if (clock64() - since > 2 * kStartLimit + kWithinWaitLimit) wait_failed(launch, kSiteToken, 1, 0);
}
/// Waits until the tokens of the step before are known: orders their sampling, K and V of that step and a stop before
/// this step (grid, by the token words and the fences on both sides of them), and this step's rows (block).
LP_DEVICE void wait_sampled(const Launch& launch, u32 shared, u32 step) {
  if (step == 0) return;
  if constexpr (kFed) await_sampled(launch, shared + Shared::sampled, (step - 1) & 1);
  else wait_barrier(launch, shared + Shared::sampled, (step - 1) & 1, kSiteToken);
}
/// A warp, not the epilogue's, reads no more of this step's rows and items.
LP_DEVICE void leave_rows(u32 shared) {
#ifndef LP_FALL_BEHIND  // negative control
  if (!kIdleBlocks) return;
  __syncwarp();
  if (lane_index() == 0) mbarrier_arrive(shared + Shared::stepped);
#endif
}
/// The epilogue warp that puts the next step's rows in place and counts their items waits until all those warps have
/// left this step's. Orders their reads before its writes (block).
LP_DEVICE void wait_left(const Launch& launch, u32 shared, u32 step) {
#ifndef LP_FALL_BEHIND
  if (kIdleBlocks) wait_barrier(launch, shared + Shared::stepped, step & 1, kSiteStepped);
#endif
}

/// Waits until the host has given the rows of the step with this tag. Orders its writes of them before the reads
/// (system, by the acquire). A call, as above; so is the next.
static __device__ __noinline__ void await_host(const Launch& launch, u32 tag) {
  const u32* given = launch.control + 2;
  const long long since = clock64();
  for (u32 seen; (seen = load_acquire_system_u32(given)) != tag; nap(kNap))
    if (clock64() - since > kStartLimit) wait_failed(launch, kSiteFed, tag, seen);
}
/// A word of those rows, which block 0 publishes once the host has given them, on all ranks.
static __device__ __noinline__ Quad await_row(const Launch& launch, const u8* word, u32 tag) {
  const long long since = clock64();
  for (;; nap(kNap)) {
    const Quad seen = load_relaxed_16(word);
    if (seen.z == tag) return seen;
    if (clock64() - since > 2 * kStartLimit + kWaitLimit) wait_failed(launch, kSiteFed, tag, seen.z);
  }
}
/// Of a fed launch: puts the rows of a step that the host gives in place of those of the step before, which nobody
/// reads any more. A warp of each block calls it. Of several ranks the step begins once all have their rows.
static __device__ __noinline__ void take_rows(const Launch& launch, u32 shared, u32 step, u32 tag) {
  const u32 lane = lane_index(), of = lane / 2;
  const bool first = lane % 2 == 0, on = of < kColumns;
  u8* word = launch.words + Words::rows + lane * 16;
  // One block alone reads the host's memory: all of them hold each other up (NOTES.md, "Fed launches").
  if (rank_block() == 0) {
    await_host(launch, tag);
    if (kRanks > 1) await_ranks(launch, tag);
    __syncwarp();  // lanes have waited for a rank each
    const Row* row = launch.fed + step * kColumns + of;
    if (on) {
      // Positions are those of the launch's first step (layout/rows.cuh).
      const Quad half = load_relaxed_4x4((const u8*)row + (first ? 0 : 16));
      if (first) store_relaxed_16(word, half.x, half.y - step, tag, half.z);
      else store_relaxed_16(word, half.x - step, load_relaxed_u32((const u8*)&row->first_row), tag, half.z);
    }
  }
  if (on) {
    const Quad told = await_row(launch, word, tag);
    const auto put = [&](u32 field, u32 value) {
      store_shared_u32(shared + Shared::rows + of * sizeof(Row) + field * 4, value);
    };
    if (first) put(0, told.x), put(1, told.y), put(2, told.w);        // token, position, slot
    else put(4, told.x), put(3, told.y), put(6, told.w);              // first_position, first_row, last_position
  }
  __syncwarp();
}

}  // namespace narrow
