// Turns of the layers at the sets of vectors. The proof in words.cuh rests on the order that the two functions below
// make. They are a barrier over the grid. A block waits for the last round but one, while attention runs: so no block
// is held up, and none is more than a turn ahead of another.
//
// Within a block the roles wait for each other with two barriers, whose phases are the launch's turns: all consumers
// arrive at `begun`, all epilogue warps at `opened`. No warp gets two phases ahead of one that waits.
#pragma once

namespace narrow {

/// The turn of the layer that has this tag, counted over all launches.
LP_DEVICE u32 turn_of(u32 shared, u32 tag) { return load_shared_u32(shared + Shared::turns_before) + tag; }
/// Where the vectors of this layer are.
LP_DEVICE u32 vectors_at(u32 shared, u32 tag) { return kTaggedVectors ? 0 : vectors_of(turn_of(shared, tag)); }

/// Barriers of a launch's turns, whose first is open.
LP_DEVICE void begin_turns(u32 shared) {
  mbarrier_init(shared + Shared::begun, kWarps);
  mbarrier_init(shared + Shared::opened, kEpilogueWarps);
  mbarrier_arrive(shared + Shared::opened, kEpilogueWarps);
}

/// A consumer warp begins the turn of a tag. Orders the zeros of all blocks before its accesses to the turn's vectors
/// (grid, by Words::turns, and block), and those to the vectors of the turn before before its block passes this one
/// (block).
LP_DEVICE void begin_turn(const Launch& launch, u32 shared, u32 tag) {
  if constexpr (kTaggedVectors) return;
  wait_barrier(launch, shared + Shared::opened, (tag - launch.epoch) & 1, kSiteOpened);
  __syncwarp();
  if (lane_index() == 0) mbarrier_arrive(shared + Shared::begun);
}

/// An epilogue warp passes the turn of a tag. In between, `clear` makes the words of a turn "not there". Orders the
/// accesses of all blocks to the vectors of turns up to the last but one before the zeros, and zeros of the turn before
/// the words of the next one (grid, by Words::turns).
template <class F> LP_DEVICE void pass_turn(const Launch& launch, u32 shared, u32 tag, F&& clear) {
  if constexpr (kTaggedVectors) return;
  wait_barrier(launch, shared + Shared::begun, (tag - launch.epoch) & 1, kSiteBegun);
  u8* turns = launch.words + Words::turns;
  // all: the count when every epilogue warp has passed all turns before; may wrap.
  const u32 turn = turn_of(shared, tag), all = turn * (kBlocks * kEpilogueWarps);
  if (lane_index() == 0) {
    const Clocks begun = clocks();
    u32 seen;
    while ((int)((seen = load_acquire_u32((const u32*)turns)) - all) < 0)
      if (clocks() - begun > kWithinWaitLimit) wait_failed(launch, kSiteTurns, all, seen);
    mbarrier_arrive(shared + Shared::opened);
  }
  __syncwarp();
  clear(turn - 2);
  __syncwarp();
  if (lane_index() == 0) add_release_u32((u32*)turns, 1);
}

}  // namespace narrow
