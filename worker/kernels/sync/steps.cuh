// The steps of a launch within a block. Shared::sampled completes a phase when a step's tokens are known; all roles
// wait for it before they begin the next step.
//
// A phase is told from others by its parity, so nobody may be two behind; and item_ends, which steps use by turns, must
// not be counted anew while somebody reads it. Where a block has tiles the epilogue needs all consumers, and their
// stream, in every step, so it cannot complete a phase that they are not waiting for. In a block without (kIdleBlocks)
// the other roles say that they have begun a step, so are through with the one before, at Shared::stepped, and the
// epilogue waits for all of them before it ends it.
#pragma once

/// The barriers of a launch's steps; one thread calls it before the block's first barrier. `waiting`: warps that say
/// that they have begun a step.
LP_DEVICE void begin_steps(u32 shared, u32 waiting) {
  mbarrier_init(shared + Shared::sampled, kColumns == 1 ? 1 : kEpilogueWarps);
  if (kIdleBlocks) mbarrier_init(shared + Shared::stepped, waiting);
}
/// Waits until the tokens of the step before are known: orders their sampling, K and V of that step and a stop before
/// this step (grid, by the token words and the fences on both sides of them).
LP_DEVICE void wait_sampled(const Launch& launch, u32 shared, u32 step) {
  if (step > 0) wait_barrier(launch, shared + Shared::sampled, (step - 1) & 1, kSiteToken);
}
/// A warp but the epilogue's has waited for the tokens before this step.
LP_DEVICE void begin_step(u32 shared) {
#ifndef LP_FALL_BEHIND  // negative control
  if (!kIdleBlocks) return;
  __syncwarp();
  if (lane_index() == 0) mbarrier_arrive(shared + Shared::stepped);
#endif
}
/// The epilogue warp that counts the next step's items waits until all of those have begun this one. Orders their reads
/// of the step before's items before it (block).
LP_DEVICE void wait_begun(const Launch& launch, u32 shared, u32 step) {
#ifndef LP_FALL_BEHIND
  if (kIdleBlocks) wait_barrier(launch, shared + Shared::stepped, step & 1, kSiteStepped);
#endif
}
