// Where what lies in shared memory.
#pragma once

constexpr int kWarps = 16;                                    // consumers
constexpr int kEpilogueWarps = 2, kThreads = (kWarps + 1 + kEpilogueWarps) * 32;
constexpr int kProducer = kWarps, kEpilogue = kWarps + 1;     // warps
/// Columns that one epilogue warp owns. At one column the second warp takes every other set of qkv instead.
constexpr int kEpilogueColumns = kColumns == 1 ? 1 : kColumns / kEpilogueWarps;
static_assert(kColumns == 1 || (kColumns % 2 == 0 && kColumns <= 8), "1, 2, 4 or 8 columns");

constexpr int max_of(int a, int b) { return a > b ? a : b; }
constexpr u32 kSlotBytes = max_of(kLeafBytes, max_of(max_of(Qkv::chunk_bytes, O::chunk_bytes), max_of(GateUp::chunk_bytes, max_of(Down::chunk_bytes, Head::chunk_bytes))));
constexpr u32 kSetBytes = 2 * kWarps * kColumns * 16 * 4;     // partials of a set of two tiles: [tile][leaf][column][row] f32

struct Shared {
#ifdef LP_RING_BYTES
  static constexpr u32 ring_bytes = LP_RING_BYTES;
#else
  // Up to 196 KiB of shared memory the first-level cache keeps 60 KiB, above it 28: at one column nobody misses them.
  static constexpr u32 ring_bytes = (kColumns == 1 ? 208u : 160u) * 1024;
#endif
  static constexpr u32 slots = ring_bytes / kSlotBytes < 32 ? ring_bytes / kSlotBytes : 32;
  static constexpr u32 ring = 0;
  static constexpr u32 partials = ring + slots * kSlotBytes;                   // [2 sets]
  static constexpr u32 squares = partials + 2 * kSetBytes;                     // [2][leaf][column] f32 sums of squares
  static constexpr u32 full = squares + 2 * kMaxLeaves * kColumns * 4;         // [warp][2] mbarriers
  static constexpr u32 empty = full + kWarps * 16;
  static constexpr u32 partials_full = empty + kWarps * 16;                    // [2]
  static constexpr u32 partials_empty = partials_full + 16;
  static constexpr u32 sampled = partials_empty + 16;                          // completes once a step's tokens are known
  static constexpr u32 slot_of = sampled + 16;                                 // [warp][2] slot of a warp's chunk
  static constexpr u32 slot_owner = slot_of + kWarps * 8;                      // [32] the chunk in a slot: its number within its warp << 8 | warp
  static constexpr u32 issued = slot_owner + 128;                              // [16] the same of the last chunks issued
  static constexpr u32 chunks = issued + 64;                                   // [warp] chunks issued
  static constexpr u32 quad_slot = chunks + 64;                                // [warp] slot of its attention leaf
  static constexpr u32 last_step = quad_slot + 64;                             // steps to run
  static constexpr u32 rows = last_step + 16;                                  // [columns] Row
  static constexpr u32 bytes = rows + kColumns * sizeof(Row);
};
