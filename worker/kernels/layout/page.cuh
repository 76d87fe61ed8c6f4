// A page of the KV pool: 64 positions of a KV head, [layer][page][kv head][group of 8 positions].
//
// A group is K [d / 8][position][8 d], then V [d / 8][d][8 positions], bf16: core matrices of 8 rows of 16 bytes, which
// ldmatrix and wgmma read as they lie. A leaf of 16 positions is two groups.
#pragma once

constexpr u32 kGroupV = kHeadDim * 16, kGroupBytes = 2 * kGroupV, kPageBytes = kPage / 8 * kGroupBytes;
/// Byte of a page.
LP_DEVICE u64 page_byte(u32 layer, u32 pages, u32 page, u32 kv_head) {
  return (((u64)layer * pages + page) * kKvHeads + kv_head) * kPageBytes;
}
/// Byte within a page of (position of the page, dimension).
LP_DEVICE u32 k_byte(u32 at, u32 dim) { return at / 8 * kGroupBytes + dim / 8 * 128 + at % 8 * 16 + dim % 8 * 2; }
LP_DEVICE u32 v_byte(u32 at, u32 dim) {
  return at / 8 * kGroupBytes + kGroupV + dim / 8 * 128 + dim % 8 * 16 + at % 8 * 2;
}
