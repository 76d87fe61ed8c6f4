// Where what lies in shared memory.
#pragma once

namespace narrow {

constexpr int kWarps = 16;                                    // consumers
constexpr int kEpilogueWarps = 2, kThreads = (kWarps + 1 + kEpilogueWarps) * 32;
constexpr int kProducer = kWarps, kEpilogue = kWarps + 1;     // warps
/// Columns that one epilogue warp owns. At one column the second warp takes every other set of qkv instead.
constexpr int kEpilogueColumns = kColumns == 1 ? 1 : kColumns / kEpilogueWarps;
static_assert(kColumns == 1 || kColumns == 8, "1 or 8 columns");

/// Rings of the stream. Where every product of the model has 16 leaves two warps share a ring, and chunks are twice as
/// long: memory likes that better.
constexpr bool kSharedRings = kHiddenLeaves == 16 && kHeadLeaves * kShards == 16 && kDownLeaves * kShards == 16;
constexpr u32 kRings = kSharedRings ? 8 : 16, kRingWarps = kWarps / kRings;
/// A chunk of the stream: some k16 steps of a unit's leaf, or a leaf of positions, or one of its groups. Of groups four
/// runs of 4 bits and two of E4M3, which are shorter.
constexpr u32 kSlotBytes = !kSharedRings ? 4096 : is_grouped(kLayerFormat) ? 4608 : 8192;
/// k16 steps of a chunk of `width` tiles.
template <class P> constexpr int chunk_steps(int width) {
  const int most = (int)kSlotBytes / (width * P::run) * P::run_steps;
  return most < kPartSteps ? most : kPartSteps;
}
/// Chunks of a ring in flight: so many that all rings have enough bytes of them to keep memory busy.
constexpr u32 kInFlight =
    kRings * (chunk_steps<GateUp>(2) / GateUp::run_steps * 2 * GateUp::run) < 48 * 1024 ? 2 : 1;
constexpr u32 kLeafChunks = kLeafBytes <= kSlotBytes ? 1 : 2;
static_assert(kGroupBytes <= kSlotBytes, "a group of positions fits a slot");
// Partials of a set of two tiles: [tile][leaf][column][row] f32.
constexpr u32 kSetBytes = 2 * kWarps * kColumns * 16 * 4;

/// Whether rows of a sequence read its pages together. Kernels of four ranks and more have no registers for it: 450
/// bytes more of them would be spilled.
constexpr bool kTogether = kColumns > 1 && kRanks <= 2;
/// Whether they leave the outputs of shares where they have many pages.
constexpr bool kShares = kTogether && kWindow == 0;
constexpr u32 kCountBytes = kTogether ? 12 : 4, kCountsBytes = kColumns * kCountBytes + (kTogether ? 16 : 0);
/// The barrier of all consumer warps; those of the quads come before it.
constexpr u32 kAllQuads = 6;

struct Shared {
  static constexpr u32 slots = 192 * 1024 / kRings / kSlotBytes;
  static_assert(slots >= kLeafChunks, "a leaf of positions is in the ring as a whole");
  static constexpr u32 ring = 0;                                               // [ring][slots]
  static constexpr u32 partials = ring + kRings * slots * kSlotBytes;          // [2 sets]
  static constexpr u32 squares = partials + 2 * kSetBytes;                     // [2][leaf][column] f32 sums of squares
  static constexpr u32 full = squares + 2 * kMaxLeaves * kColumns * 4;         // [ring][slots][2] mbarriers
  static constexpr u32 empty = full + kRings * slots * 16;                     // [ring][slots]
  static constexpr u32 partials_full = empty + kRings * slots * 8;             // [2]
  static constexpr u32 partials_empty = partials_full + 16;
  // [quad][2 groups][warp] addresses of the warps' attention leaves.
  static constexpr u32 leaves = partials_empty + 16;
  // Completes a phase once a step's tokens are known, and the next step's rows.
  static constexpr u32 sampled = leaves + kWarps * 8;
  static constexpr u32 begun = sampled + 8, opened = begun + 8;               // turns, see turns.cuh
  // Completes a phase once all warps but the epilogue's have left the rows of a step (kIdleBlocks).
  static constexpr u32 stepped = opened + 8;
  static constexpr u32 last_step = stepped + (kIdleBlocks ? 8 : 0);            // steps to run
  // Turns of all launches before this one, less its epoch.
  static constexpr u32 turns_before = last_step + 4;
  // The token of one column, for the epilogue warp that did not choose it.
  static constexpr u32 token = turns_before + 4;
  static constexpr u32 rows = last_step + 16;                                  // [columns] Row
  static constexpr u32 counts = rows + kColumns * sizeof(Row);                 // [2], see CountedRows; used in turns
  static constexpr u32 bytes = counts + 2 * kCountsBytes;
};

}  // namespace narrow
