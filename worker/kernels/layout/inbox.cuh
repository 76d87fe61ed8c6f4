// The head of a rank's inbox, which kernels of all ranks write: alike in narrow and wide passes. The messages of a pass
// follow it (narrow/inbox.cuh, wide/ranks.cuh).
#pragma once

struct InboxHead {
  // u32, written by its own rank for the sampler behind the launch: whether all hosts want the launch to end.
  static constexpr u64 stop = 0;
  static constexpr u64 begun = 64;  // [rank] u32: tag of the last start that it has come to (sync/start.cuh)
  static constexpr u64 head_bytes = 128;
  static_assert(begun + kRanks * 4 <= head_bytes, "a word a rank");
};
