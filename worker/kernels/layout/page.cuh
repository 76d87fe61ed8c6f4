// A page of the KV pool: 64 positions of a KV head, [layer][page][kv head][group of 8 positions].
//
// A group is K [d / 8][position][8 d], then V [d / 8][d][8 positions], bf16: core matrices of 8 rows of 16 bytes, which
// ldmatrix and wgmma read as they lie. A leaf of 16 positions is two groups.
#pragma once

constexpr u32 kGroupV = kHeadDim * 16, kGroupBytes = 2 * kGroupV, kPageBytes = kPage / 8 * kGroupBytes;
constexpr u32 kLeafBytes = 2 * kGroupBytes, kPageLeaves = kPage / kLeafPositions;
/// Byte of a page.
LP_DEVICE u64 page_byte(u32 layer, u32 pages, u32 page, u32 kv_head) {
  return (((u64)layer * pages + page) * kKvHeads + kv_head) * kPageBytes;
}
/// Which of Launch::k_scale is 1 / rms of K at a page's first position (kQkNorm); the others follow.
LP_DEVICE u64 first_scale(u32 layer, u32 pages, u32 page, u32 kv_head) {
  return (((u64)layer * pages + page) * kKvHeads + kv_head) * kPage;
}
/// Byte within a page of (position of the page, dimension).
LP_DEVICE u32 k_byte(u32 at, u32 dim) { return at / 8 * kGroupBytes + dim / 8 * 128 + at % 8 * 16 + dim % 8 * 2; }
LP_DEVICE u32 v_byte(u32 at, u32 dim) {
  return at / 8 * kGroupBytes + kGroupV + dim / 8 * 128 + dim % 8 * 16 + at % 8 * 2;
}

/// What this lane gives to ldmatrix_x4 for A fragments of a leaf whose groups lie at `first` and `second`: of K, 16
/// positions by the first 16 dimensions; of V, these dimensions by 16 positions. Those of 16 dimensions on lie
/// kFragmentDims further.
constexpr u32 kFragmentDims = 256;
LP_DEVICE u32 k_rows(u32 first, u32 second) {
  const u32 lane = lane_index();
  return (lane & 8 ? second : first) + lane / 16 * 128 + lane % 8 * 16;
}
LP_DEVICE u32 v_rows(u32 first, u32 second) {
  const u32 lane = lane_index();
  return (lane & 16 ? second : first) + kGroupV + lane / 8 % 2 * 128 + lane % 8 * 16;
}
