// A leaf of 16 positions of an item in shared memory: what this step appends to it, a tile's scores with it, and where
// a tile's outputs go. Columns of a tile are (row, query head).
#pragma once

namespace narrow {

/// A leaf of positions in shared memory: the addresses of its groups.
struct Leaf {
  u32 first, second;
};

/// Words of K and V that one lane fetches of a new position.
constexpr int kFreshWords = kDimTiles / 4;

/// Puts K and V of a position of this step into a leaf in shared memory: `row` computed them, `at` is the position
/// within the leaf. Returns 1 / rms of k (kQkNorm).
LP_DEVICE float patch_position(const Launch& launch, const Leaf& leaf, int kv_head, u32 row, u32 at, u32 tag) {
  const int lane = lane_index();
  const u32 group = at < 8 ? leaf.first : leaf.second;
  u32 x[kFreshWords], y[kFreshWords], squares[kFreshWords];
  const u8* words = launch.words + qkv_word(kv_head, row, kQueriesPerKv * kDimTiles);
  poll_words<kFreshWords>(launch, words + lane * 16, 32 * 16, tag, kFreshWords, x, y, squares, kSiteFresh);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kFreshWords; i++) {
    // Of dimensions d and d + 1, d + 8 and d + 9 of a tile.
    const int word = i * 32 + lane, dim = word / 4 % kDimTiles * 16 + 2 * (word & 3);
    if (word < kDimTiles * 4) {
      const u32 to = group + k_byte(at & 7, dim);
      store_shared_u32(to, x[i]);
      store_shared_u32(to + 128, y[i]);
      sum += __uint_as_float(squares[i]);
    } else {
      const u32 to = group + v_byte(at & 7, dim);
      store_shared_u16(to, x[i]);
      store_shared_u16(to + 16, x[i] >> 16);
      store_shared_u16(to + 128, y[i]);
      store_shared_u16(to + 144, y[i] >> 16);
    }
  }
  if constexpr (!kQkNorm) return 1;
  if (kDimTiles == 4 && lane >= 16) sum = 0;
#pragma unroll
  for (int d = 4; d < 32; d *= 2) sum += shuffle_xor(sum, d);
  return inverse_rms<kHeadWidth>(shuffle(sum, 0));
}

/// Some rows of a sequence.
struct Tile {
  u32 first, rows;  // columns of more rows hold nothing

  LP_DEVICE bool has(u32 column) const { return column < rows * kQueriesPerKv; }
  LP_DEVICE u32 row(u32 column) const { return first + (kTileRows > 1 && has(column) ? column / kQueriesPerKv : 0); }
};

/// The queries of a tile's columns, as B fragments, and what their scores are multiplied by: of columns 2t, 2t + 1.
struct Queries {
  u32 x[kDimTiles], y[kDimTiles];
  float scale[2];

  LP_DEVICE Queries(const Launch& launch, const Item& item, const Tile& tile, u32 tag)
      : scale{kScoreScale, kScoreScale} {
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
    u32 squares[kDimTiles];
    poll_words<kDimTiles>(launch,
                          launch.words + qkv_word(item.kv_head, tile.row(g), g % kQueriesPerKv * kDimTiles) + t * 16,
                          64, tag, tile.has(g) ? kDimTiles : 0, x, y, squares, kSiteQuery);
    if constexpr (kQkNorm) {
      float q[kDimTiles];
#pragma unroll
      for (int j = 0; j < kDimTiles; j++) q[j] = __uint_as_float(squares[j]);
      const float mine = inverse_rms<kHeadWidth>(tree_sum<kDimTiles>(q));
      scale[0] *= shuffle(mine, 8 * t), scale[1] *= shuffle(mine, 8 * t + 4);
    }
  }
};

/// Leaf `number` of an item's page, for rows up to `last`: zeroes V that none of them sees, and puts in K and V that
/// this step appends.
struct LeafOfItem {
  const Item& item;
  u32 page, number, last;

  LP_DEVICE u32 base() const { return page * kPage + number * kLeafPositions; }
  LP_DEVICE bool is_seen(const CountedRows& rows) const {
    return base() <= rows.position(last) && base() + kLeafPositions > rows.first_visible(item.row);
  }
  LP_DEVICE void clear(const CountedRows& rows, const Leaf& leaf) const {
    const u32 p = rows.position(last), low = rows.first_visible(item.row), base = this->base();
    const auto seen = [&](u32 at) { return base + at <= p && base + at >= low; };
    clear_unseen(leaf.first, seen);
    clear_unseen(leaf.second, [&](u32 at) { return seen(8 + at); });
  }
  /// 1 / rms of k of the leaf's positions (kQkNorm).
  LP_DEVICE float* key_scales(const Launch& launch, const CountedRows& rows, u32 layer) const {
    const u32 table = rows.rows[item.row].slot * launch.page_stride + page,
              of_pool = load_constant_u32(launch.page_table + table);
    return launch.k_scale + first_scale(layer, launch.kv_pages, of_pool, item.kv_head) + number * kLeafPositions;
  }
  /// `scale`: of positions g, g + 8; it is kept for steps to come, too.
  LP_DEVICE void patch(const Launch& launch, const CountedRows& rows, const Leaf& leaf, float* stored, u32 tag,
                       float* scale) const {
    const u32 g = lane_index() / 4, base = this->base();
    const Row& row = rows.rows[item.row];
    const u32 fresh = row.first_position + rows.step;
    for (u32 at = fresh > base ? fresh - base : 0; at < kLeafPositions && base + at <= rows.position(last); at++) {
      const float k = patch_position(launch, leaf, item.kv_head, row.first_row + (base + at - fresh), at, tag);
      if constexpr (kQkNorm) {
        if (at == g) scale[0] = k;
        if (at == g + 8) scale[1] = k;
        if (lane_index() == 0) stored[at] = k;
      }
    }
    __syncwarp();
  }
  /// Scores of positions g and g + 8, columns 2t and 2t + 1. Minus infinity where a row does not see the position.
  /// `scale`: of k.
  LP_DEVICE void scores(const CountedRows& rows, const Leaf& leaf, const Tile& tile, const Queries& queries,
                        const float* scale, float* score) const {
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
    float sum[4] = {};
    const u32 from = k_rows(leaf.first, leaf.second);
#pragma unroll
    for (int j = 0; j < kDimTiles; j++)
      mma_m16n8k16(sum, ldmatrix_x4(from + j * kFragmentDims), queries.x[j], queries.y[j]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 at = base() + g + i / 2 * 8, row = tile.row(2 * t + (i & 1));
      const bool seen = at <= rows.position(row) && at >= rows.first_visible(row);
      score[i] = seen ? sum[i] * (queries.scale[i & 1] * scale[i / 2]) : kMinusInfinity;
    }
  }
};

/// A warp's part in an item: its leaf of the page that its quad has.
struct QuadWarp {
  u32 quad, number, leaves;  // leaves: shared address of those of all quads
  Leaf leaf;

  LP_DEVICE u32 of_quad() const { return leaves + quad * 32; }
  /// Tells the others where the leaf lies.
  LP_DEVICE void tell() const {
    if (lane_index() != 0) return;
    store_shared_u32(of_quad() + number * 4, leaf.first);
    store_shared_u32(of_quad() + 16 + number * 4, leaf.second);
  }
  LP_DEVICE void meet() const { barrier_sync(1 + quad, 128); }
};

/// A quad's leaves, as its warps have told where theirs lie.
struct Leaves {
  u32 first[4], second[4];

  LP_DEVICE Leaves(u32 addresses) {
    const Quad a = load_shared_16(addresses), b = load_shared_16(addresses + 16);
    first[0] = a.x, first[1] = a.y, first[2] = a.z, first[3] = a.w;
    second[0] = b.x, second[1] = b.y, second[2] = b.z, second[3] = b.w;
  }
};

/// A warp's quarter of a tile's output, of columns 2t and 2t + 1: [tile of 16 dimensions][of g, g + 8][column]; a
/// page's or a share's.
constexpr int kQuarterTiles = kDimTiles / 4;
struct Quarter {
  float out[kQuarterTiles][4], most[2], total[2];

  /// Of column 2t + c, as words of an output.
  LP_DEVICE void put(const Launch& launch, u32 output, u32 quarter, int c, u32 tag) const {
    const int lane = lane_index(), g = lane >> 2, t = lane & 3;
    u8* words = launch.words + Words::page + output * Words::page_bytes + (quarter * kQuarterTiles * 8 + g) * 16 +
                (2 * t + c) % kQueriesPerKv * (kDimTiles * 128);
#pragma unroll
    for (int d = 0; d < kQuarterTiles; d++)
      // Even words carry the reference, odd ones the sum.
      store_relaxed_16(words + d * 128, __float_as_uint(out[d][c]), __float_as_uint(out[d][2 + c]), tag,
                       __float_as_uint(g % 2 ? total[c] : most[c]));
  }
};

}  // namespace narrow
