// The steps of a launch within a block. Shared::sampled completes a phase when a step's tokens are known; all roles
// wait for it before they begin the next step.
//
// A role must not be two phases behind, since it tells phases by their parity. Nobody may count the items anew, whose
// two buffers steps use in turns, while a role still reads them. Where a block has tiles both follow: the epilogue
// needs all consumers and their stream in every step, so it cannot complete a phase that they do not wait for. In a
// block without tiles (kIdleBlocks) the other roles arrive at Shared::stepped when they have begun a step, so have left
// the one before. The epilogue waits for all of them before it ends the step.
#pragma once

namespace narrow {

/// The barriers of a launch's steps; one thread calls it before the block's first barrier. `waiting`: warps that arrive
/// when they have begun a step.
LP_DEVICE void begin_steps(u32 shared, u32 waiting) {
  mbarrier_init(shared + Shared::sampled, kColumns == 1 ? 1 : kEpilogueWarps);
  if (kIdleBlocks) mbarrier_init(shared + Shared::stepped, waiting);
}
/// Waits until the tokens of the step before are known: orders their sampling, K and V of that step and a stop before
/// this step (grid, by the token words and the fences on both sides of them).
LP_DEVICE void wait_sampled(const Launch& launch, u32 shared, u32 step) {
  if (step > 0) wait_barrier(launch, shared + Shared::sampled, (step - 1) & 1, kSiteToken);
}
/// A warp, not the epilogue's, begins this step: it has waited for the tokens of the step before.
LP_DEVICE void begin_step(u32 shared) {
#ifndef LP_FALL_BEHIND  // negative control
  if (!kIdleBlocks) return;
  __syncwarp();
  if (lane_index() == 0) mbarrier_arrive(shared + Shared::stepped);
#endif
}
/// The epilogue warp that counts the next step's items waits until all those warps have begun this step. Orders their
/// reads of the items of the step before, before the count (block).
LP_DEVICE void wait_begun(const Launch& launch, u32 shared, u32 step) {
#ifndef LP_FALL_BEHIND
  if (kIdleBlocks) wait_barrier(launch, shared + Shared::stepped, step & 1, kSiteStepped);
#endif
}

}  // namespace narrow
