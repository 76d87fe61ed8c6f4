// What follows the products: norm, bias, rope, residual, silu, choice of a token; each result goes out as the next product's input. Results of a product lie
// as a warp's registers hold them: of columns 8 j .., sum[4 j + c] is (row g + 8 (c >> 1), column 2 t + (c & 1)).
#pragma once

LP_DEVICE float inverse_of(u32 shared, int norm, u32 column) { return load_shared_f32(shared + Shared::inverse + (norm * kColumns + column) * 4); }
/// Position of a column's new K and V in the pool; ~0 if the column idles.
LP_DEVICE u32 place_in_pool(u32 shared, u32 column) { return load_shared_u32(shared + Shared::place + column * 4); }

/// Which values of q, k or v a warp has after qkv.
struct Projection {
  static constexpr int kColumnGroups = QkvCut::columns / 8;
  int tile, kv_head, head, piece;  // head: queries, then k, then v; piece: tile of the head
  u32 first_column;
  float angles[kColumnGroups][2][2];  // of columns 2 t and 2 t + 1: cosine, sine; fetched while the pair exchanges partial sums

  LP_DEVICE Projection(const Place& place, u32 warp)
      : tile(QkvCut::first_tile() + place.tile), first_column(QkvCut::split == Split::kColumns ? (warp >> 2) * QkvCut::columns : 0) {
    const int within = tile % kQkvTiles;
    kv_head = tile / kQkvTiles;
    head = within / kDimTiles;
    piece = within % kDimTiles;
  }
  LP_DEVICE void fetch_angles(const Launch& launch, const Rows& rows, u32 shared) {
    if (head > kQueriesPerKv) return;
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const u8* turn = (const u8*)launch.rope + (piece * 8 + g) * 8;
#pragma unroll
    for (int j = 0; j < kColumnGroups; j++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const u32 column = first_column + 8 * j + 2 * t + c, position = place_in_pool(shared, column) == ~0u ? 0 : rows.position(column);
        load_constant_8(turn + (u64)position * (kHeadDim * 4), angles[j][c]);
      }
  }
  /// Norm, bias and rope; q to this step's attention, k and v into their pages.
  LP_DEVICE void write(const Launch& launch, u32 shared, u32 layer, const float* sum) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u8* pool = launch.kv + page_byte(layer, launch.kv_pages, 0, kv_head) + piece * kFragment;
    const auto leaf = [&](u32 place) { return pool + (u64)(place / kPage) * (kKvHeads * 4 * kLeafBytes) + place % kPage / kLeafPositions * kLeafBytes; };
    float bias[2] = {0, 0}, scale[2] = {1, 1};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (kQkvBias) bias[r] = launch.bias[(u64)layer * (Qkv::tiles * 16) + tile * 16 + g + 8 * r];
      if (kQkNorm && head <= kQueriesPerKv) scale[r] = launch.qk_norm[(layer * 2 + (head == kQueriesPerKv)) * kHeadDim + piece * 16 + g + 8 * r];
    }
#pragma unroll
    for (int j = 0; j < kColumnGroups; j++) {
      const u32 column = first_column + 8 * j;
      float v[4];
#pragma unroll
      for (int c = 0; c < 4; c++) {
        v[c] = sum[4 * j + c] * inverse_of(shared, 0, column + 2 * t + (c & 1));
        if (kQkvBias) v[c] += bias[c >> 1];
      }
      if (kQkNorm && head <= kQueriesPerKv) {
        float squares[4];
#pragma unroll
        for (int c = 0; c < 4; c++) {
          squares[c] = v[c] * v[c];
#pragma unroll
          for (int d = 4; d < 32; d *= 2) squares[c] += shuffle_xor(squares[c], d);
          v[c] *= scale[c >> 1];
        }
        if (g < 2) store_u32(launch.words + Words::squares + square_byte(kv_head, head * kDimTiles + piece, column + 2 * t + g), __float_as_uint(g ? squares[1] + squares[3] : squares[0] + squares[2]));
      }
      if (head <= kQueriesPerKv) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const float cosine = angles[j][c][0], sine = angles[j][c][1], low = v[c], high = v[c + 2];
          v[c] = fmaf(low, cosine, -(high * sine));
          v[c + 2] = fmaf(high, cosine, low * sine);
        }
      }
      const u32 low = bf16_pair(v[0], v[1]), high = bf16_pair(v[2], v[3]);  // rows g and g + 8
      if (head < kQueriesPerKv) {
        u8* to = launch.words + Words::queries + query_byte(kv_head, head * kDimTiles + piece, 0, column) + lane * 4;
        store_u32(to, transpose_8x8(low));
        store_u32(to + kColumns * 16, transpose_8x8(high));
      } else if (head == kQueriesPerKv) {
        const u32 place = place_in_pool(shared, column + g), turned_low = transpose_8x8(low), turned_high = transpose_8x8(high);
        if (place != ~0u) {
          u8* to = leaf(place) + fragment_byte(place % kLeafPositions, 2 * t);
          store_u32(to, turned_low);
          store_u32(to + 8, turned_high);
        }
      } else {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const u32 place = place_in_pool(shared, column + 2 * t + c);
          if (place == ~0u) continue;
          u8* to = leaf(place) + kLeafV + fragment_byte(g, place % kLeafPositions);
          store_u16(to, low >> 16 * c);
          store_u16(to + 4, high >> 16 * c);
        }
      }
    }
  }
};

/// The residual stream of the block's rows, in registers: 8 rows of a column a lane, in fp32.
struct Hidden {
  static constexpr int kChunks = kBlockHiddenTiles * 2, kWarpColumns = 32 / kChunks;  // chunks of 8 rows; columns of a warp
  static constexpr int kRounds = kConsumers * kWarpColumns < kColumns ? kColumns / (kConsumers * kWarpColumns) : 1;
  const Launch& launch;
  u32 warp;
  float h[kRounds][8];
  Quad gamma;

  LP_DEVICE Hidden(const Launch& launch, u32 warp) : launch(launch), warp(warp) {}
  LP_DEVICE static int chunk() { return (threadIdx.x & 31) / kWarpColumns; }
  LP_DEVICE int column(int round) const { return (round * kConsumers + warp) * kWarpColumns + (threadIdx.x & 31) % kWarpColumns; }
  LP_DEVICE bool on(int round) const { return column(round) < kColumns; }
  LP_DEVICE static u32 first_row() { return blockIdx.x * (kBlockHiddenTiles * 16) + chunk() * 8; }
  /// Weights of the norm that is applied next, ahead of time.
  LP_DEVICE void fetch_gamma(int norm) { gamma = load_constant_16(launch.gamma + ((u64)norm * kHidden + first_row()) * 2); }

  LP_DEVICE void embed(int round, u32 token) {
    u32 pairs[4];
    if (kTied) {
#pragma unroll
      for (int i = 0; i < 4; i++) pairs[i] = load_constant_u32((const u32*)(launch.weights + kHeadOffset + head_byte(token, first_row() + 2 * i)));
    } else {
      const Quad row = load_constant_16(launch.embedding + ((u64)token * kHidden + first_row()) * 2);
      pairs[0] = row.x, pairs[1] = row.y, pairs[2] = row.z, pairs[3] = row.w;
    }
#pragma unroll
    for (int i = 0; i < 8; i++) h[round][i] = from_bf16(i & 1 ? pairs[i / 2] >> 16 : pairs[i / 2] & 0xffff);
  }
  /// Adds what the pair has summed in o or down.
  template <class C> LP_DEVICE void add(const Receive& receive) {
#pragma unroll
    for (int r = 0; r < kRounds; r++)
      if (on(r)) receive.template add_rows8<C>(chunk(), column(r), h[r]);
  }
  /// The scaled residual with its sum of squares: the input of norm 0 (attention's or the head's) or 1 (the MLP's), whose 1 / rms its readers apply after their product.
  LP_DEVICE void publish_x(int norm) {
    const u32 scales[4] = {gamma.x, gamma.y, gamma.z, gamma.w};
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
      if (!on(r)) continue;
      u32 x[4];
      float squares[8];
#pragma unroll
      for (int i = 0; i < 8; i++) squares[i] = h[r][i] * h[r][i];
#pragma unroll
      for (int i = 0; i < 4; i++) x[i] = bf16_pair(h[r][2 * i] * from_bf16(scales[i] & 0xffff), h[r][2 * i + 1] * from_bf16(scales[i] >> 16));
      store_16(launch.words + (norm ? Words::mlp_x : Words::attention_x) + vector_byte(blockIdx.x * kBlockHiddenTiles + (chunk() >> 1), column(r), chunk() & 1), Quad{x[0], x[1], x[2], x[3]});
      float sum = tree_sum<8>(squares);
#pragma unroll
      for (int d = kWarpColumns; d < 32; d *= 2) sum += shuffle_xor(sum, d);
      if (chunk() == 0) store_u32(launch.words + Words::sums + ((u64)(norm * kBlocks + blockIdx.x) * kColumns + column(r)) * 4, __float_as_uint(sum));
    }
    publish(launch, (norm ? Words::mlp_x_ready : Words::x_ready) + blockIdx.x / kLeafBlocks * Words::counter);
  }
};

/// The warp that finds 1 / rms of each column once all blocks have published their rows: block c adds column c's sums of squares as a binary tree
/// and tells all blocks.
LP_DEVICE void find_norm(const Launch& launch, u32 shared, int norm, u32 target, u32 tag) {
  const u32 lane = threadIdx.x & 31;
  u8* inverse = launch.words + Words::inverse + norm * kColumns * 8;
  if (blockIdx.x < kColumns) {
    if (lane < kMaxLeaves) wait_count(launch, (norm ? Words::mlp_x_ready : Words::x_ready) + lane * Words::counter, target, kSiteNorm);
    __syncwarp();
  }
  for (u32 column = blockIdx.x; column < kColumns; column += kBlocks) {
    float part[kBlocks / 32];
#pragma unroll
    for (int i = 0; i < kBlocks / 32; i++)
      part[i] = __uint_as_float(load_relaxed_u32(launch.words + Words::sums + ((u64)(norm * kBlocks + lane * (kBlocks / 32) + i) * kColumns + column) * 4));
    float sum = tree_sum<kBlocks / 32>(part);
#pragma unroll
    for (int d = 1; d < 32; d *= 2) sum += shuffle_xor(sum, d);
    if (lane == 0) store_relaxed_u64(inverse + column * 8, (u64)tag << 32 | __float_as_uint(rsqrt_approx(sum * (1.0f / kHidden) + __uint_as_float(LP_EPS))));
  }
  for (u32 column = lane; column < kColumns; column += 32) {
    u64 word = load_relaxed_u64(inverse + column * 8);
    const long long begun = clock64();
    while (!kAblateWaits && (u32)(word >> 32) != tag) {
      if (clock64() - begun > kWaitLimit) wait_failed(launch, kSiteInverse, tag, (u32)(word >> 32));
      word = load_relaxed_u64(inverse + column * 8);
    }
    store_shared_f32(shared + Shared::inverse + (norm * kColumns + column) * 4, __uint_as_float((u32)word));
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared + Shared::norms + 8 * norm);
}

using GateUpOwn = Own<GateUp>;
/// silu(gate) * up of a warp's unit, as a k block of down's input.
LP_DEVICE void write_activation(const Launch& launch, u32 shared, u32 pair_index, u32 first_column, const float (*sum)[GateUpOwn::columns / 2]) {
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll
  for (int j = 0; j < GateUpOwn::columns / 8; j++) {
    const u32 column = first_column + 8 * j;
    float v[4];
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float inverse = inverse_of(shared, 1, column + 2 * t + (c & 1)), gate = sum[0][4 * j + c] * inverse, up = sum[1][4 * j + c] * inverse;
      v[c] = gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.44269504f)) * up;
    }
    u8* to = launch.words + Words::activation + vector_byte(pair_index, column, 0) + lane * 4;
    store_u32(to, transpose_8x8(bf16_pair(v[0], v[1])));
    store_u32(to + 128, transpose_8x8(bf16_pair(v[2], v[3])));
  }
}
