// The rows of a step.
#pragma once

struct Rows {
  const Row* rows;
  u32 count, step;

  LP_DEVICE u32 position(u32 row) const { return rows[row].position + step; }
  LP_DEVICE bool active(u32 row) const { return row < count && position(row) <= rows[row].last_position; }
  LP_DEVICE u32 mask() const {
    u32 mask = 0;
#pragma unroll
    for (u32 r = 0; r < kColumns; r++) mask |= active(r) ? 1u << r : 0;
    return mask;
  }
  LP_DEVICE u32 first_visible(u32 row) const {
    const u32 p = position(row);
    return kWindow && p + 1 > kWindow ? p + 1 - kWindow : 0;
  }
  LP_DEVICE u32 first_page(u32 row) const { return first_visible(row) / kPage; }
  LP_DEVICE u32 pages(u32 row) const { return position(row) / kPage - first_page(row) + 1; }
};
