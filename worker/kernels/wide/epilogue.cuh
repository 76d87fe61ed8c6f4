// What follows the products: norm, bias, rope, residual, silu; each result goes out as the next product's input.
#pragma once

namespace wide {

LP_DEVICE float inverse_of(u32 shared, int norm, u32 column) {
  return load_shared_f32(shared + Shared::inverse + (norm * kColumns + column) * 4);
}

/// A (row tile, column) of q, k or v a thread and round.
struct Projection {
  static constexpr int kRounds = (QkvCut::odd_tiles * kColumns + (int)kConsumerThreads - 1) / (int)kConsumerThreads;
  const Launch& launch;
  u32 shared;

  // Which of the block's tiles.
  LP_DEVICE static int within(int round) { return (round * (int)kConsumerThreads + thread_index()) / kColumns; }
  LP_DEVICE static u32 column(int round) { return (round * kConsumerThreads + thread_index()) % kColumns; }
  LP_DEVICE static bool on(int round) { return within(round) < QkvCut::owned(half()); }
  LP_DEVICE static int tile(int round) { return Qkv::first_tile(rank_block()) + within(round); }
  /// Queries, then k, then v of a KV head.
  LP_DEVICE static int head(int round) { return tile(round) % kQkvTiles / kDimTiles; }
  LP_DEVICE static int piece(int round) { return tile(round) % kDimTiles; }

  /// Norm, bias and rope; q, k and v to this step's attention.
  LP_DEVICE void write(const Rows& rows, const Receive& receive, u32 layer, u32 tag) const {
#pragma unroll
    for (int r = 0; r < kRounds; r++) {
      if (!on(r) || !rows.active(column(r))) continue;
      const int head = Projection::head(r), piece = Projection::piece(r), kv_head = tile(r) / kQkvTiles;
      Quad turns[4] = {};  // of rows r and r + 8: cosine, sine
      if (head <= kQueriesPerKv) {
        const u8* turn = (const u8*)launch.rope + ((u64)rows.position(column(r)) * (kHeadDim / 2) + piece * 8) * 8;
#pragma unroll
        for (int i = 0; i < 4; i++) turns[i] = load_constant_16(turn + i * 16);
      }
      const float inverse = inverse_of(shared, 0, column(r));
      float v[16] = {}, square = 0;
      receive.add_rows8<QkvCut>(2 * within(r), column(r), v);
      receive.add_rows8<QkvCut>(2 * within(r) + 1, column(r), v + 8);
#pragma unroll
      for (int i = 0; i < 16; i++) {
        v[i] = scaled(v[i], scale_of(launch, layer, Scales::qkv, tile(r) * 16 + i)) * inverse;
        if (kQkvBias) v[i] += launch.bias[(u64)layer * (Qkv::tiles * 16) + tile(r) * 16 + i];
      }
      if (head <= kQueriesPerKv) {
        if (kQkNorm) {
          float squares[16];
#pragma unroll
          for (int i = 0; i < 16; i++) {
            squares[i] = v[i] * v[i];
            v[i] *= launch.qk_norm[(layer * 2 + (head == kQueriesPerKv)) * kHeadDim + piece * 16 + i];
          }
          square = tree_sum<16>(squares);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const Quad& two = turns[i / 2];
          turn(v[i], v[i + 8], __uint_as_float(i & 1 ? two.z : two.x), __uint_as_float(i & 1 ? two.w : two.y));
        }
      }
      u32 pairs[8];
#pragma unroll
      for (int i = 0; i < 8; i++) pairs[i] = bf16_pair(v[2 * i], v[2 * i + 1]);
      u8* words = launch.words + qkv_word(kv_head, tile(r) % kQkvTiles, column(r));
#pragma unroll
      for (int t = 0; t < 4; t++)
        store_relaxed_16(words + 16 * t, pairs[t], pairs[t + 4], tag, __float_as_uint(square));
    }
  }
};

/// The residual stream of the block's rows: 8 rows of a column a lane and round, in fp32. Products and attention need
/// its registers, so between its uses it lies in memory.
struct Hidden {
  static constexpr u32 kIdle = ~0u;
  const Launch& launch;
  const Ranks ranks;
  float h[kHiddenRounds][8];  // of several ranks of the columns that this one has; of others anything
  Quad gamma[kHiddenRounds];

  LP_DEVICE Hidden(const Launch& launch) : launch(launch), ranks{launch} {}
  /// A warp has a tile's rows of 16 columns, groups of 8 that are two apart (Receive); half of its lanes have the upper
  /// rows.
  LP_DEVICE static int place(int round) { return round * kConsumers + warp_index(); }
  LP_DEVICE static int tile(int round) { return place(round) / kTileWarps; }  // of the block's
  LP_DEVICE static int upper() { return lane_index() >> 4; }
  LP_DEVICE static int chunk(int round) { return 2 * tile(round) + upper(); }
  LP_DEVICE static int column(int round) {
    const int of = place(round) % kTileWarps, lane = lane_index();
    return (of / 2 * 4 + of % 2 + (lane >> 3 & 1) * 2) * 8 + (lane & 7);
  }
  LP_DEVICE static bool on(int round) { return tile(round) < hidden_tiles(); }
  LP_DEVICE static u32 first_row(int round) { return first_hidden_tile() * 16 + chunk(round) * 8; }
  /// The weights of the norm that is applied next.
  LP_DEVICE void fetch_gamma(int norm) {
#pragma unroll
    for (int r = 0; r < kHiddenRounds; r++)
      if (on(r)) gamma[r] = load_constant_16(launch.gamma + ((u64)norm * kHidden + first_row(r)) * 2);
  }
  /// The residual and gamma.
  LP_DEVICE void fetch(int norm) {
    fetch_gamma(norm);
#pragma unroll
    for (int i = 0; i < kHiddenRounds * 2; i++) {
      const Quad v = load_relaxed_16(residual() + i * (kConsumerThreads * 16));
      float* to = h[i / 2] + i % 2 * 4;
      to[0] = __uint_as_float(v.x), to[1] = __uint_as_float(v.y), to[2] = __uint_as_float(v.z),
      to[3] = __uint_as_float(v.w);
    }
  }

  /// The embedding of a token, which lies in this GPU's memory at row `token`: the lane's 8 rows of a round as pairs.
  LP_DEVICE void fetch_embedding(u32 token, int round, u32* pairs) const {
    if (kTied) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        pairs[i] = load_constant_u32(
            (const u32*)(launch.weights + kHeadOffset + head_byte(token, first_row(round) + 2 * i)));
    } else {
      const Quad row = load_constant_16(launch.embedding + ((u64)token * kHidden + first_row(round)) * 2);
      pairs[0] = row.x, pairs[1] = row.y, pairs[2] = row.z, pairs[3] = row.w;
    }
  }
  /// The residual begins with the embedding of `token(column)`, with zeros where that is kIdle.
  template <class TOKEN> LP_DEVICE void embed(const TOKEN& token, u32 tag) {
    constexpr u32 SHARD = kHeadTiles * 16;  // tokens of a rank
    u32 pairs[kHiddenRounds][4] = {};
    bool awaited[kHiddenRounds] = {};  // from another rank
#pragma unroll
    for (int r = 0; r < kHiddenRounds; r++) {
      const u32 id = on(r) ? token(column(r)) : kIdle;
      if constexpr (kRanks == 1) {
        if (id != kIdle) fetch_embedding(id, r, pairs[r]);
      } else if (id != kIdle) {
        const bool here = id / SHARD == ranks.own(), mine = ranks.has(column(r));
        awaited[r] = mine && !here;
        if (here) fetch_embedding(id % SHARD, r, pairs[r]);
        if (here && !mine) ranks.tell_embedding(chunk(r), column(r), pairs[r], tag);
      }
    }
#pragma unroll
    for (int r = 0; r < kHiddenRounds; r++) {
      if constexpr (kRanks > 1) ranks.hear_embedding(chunk(r), column(r), awaited[r], pairs[r], tag);
#pragma unroll
      for (int i = 0; i < 8; i++) h[r][i] = from_bf16(i & 1 ? pairs[r][i / 2] >> 16 : pairs[r][i / 2] & 0xffff);
    }
  }
  /// Adds what the pair has summed in o or down, in front of norm `norm`; of several ranks all pairs.
  template <class C> LP_DEVICE void add(const Receive& receive, int norm, u32 told, u32 tag) {
    if constexpr (kRanks == 1) {
#pragma unroll
      for (int r = 0; r < kHiddenRounds; r++)
        if (on(r)) {
          if constexpr (kScaled) {
            float sum[8] = {};
            receive.template add_rows8<C>(chunk(r), column(r), sum);
            add_scaled(r, norm, sum);
          } else {
            receive.template add_rows8<C>(chunk(r), column(r), h[r]);
          }
        }
    } else {
      float parts[kHiddenRounds][kParts][8] = {};
#pragma unroll
      for (int r = 0; r < kHiddenRounds; r++) {
        if (!on(r)) continue;
#pragma unroll
        for (u32 p = 0; p < kParts; p++) {
          receive.template add_rows8<C>(chunk(r), column(r), parts[r][p], p);
          ranks.tell_sums(told, p, chunk(r), column(r), parts[r][p], tag);
        }
      }
#pragma unroll
      for (int r = 0; r < kHiddenRounds; r++) {  // all are on their way before the first is waited for
        float sum[8];
        ranks.hear_sums(told, chunk(r), column(r), on(r), parts[r], sum, tag);
        if (on(r)) add_scaled(r, norm, sum);
      }
    }
  }
  /// The scaled residual with its sum of squares: the input of norm 0 (attention's or the head's) or 1 (the MLP's),
  /// whose 1 / rms its readers apply after their product.
  LP_DEVICE void publish_x(int norm, u32 tag) {
    u8 *vector = launch.words + (norm ? Words::mlp_x : Words::attention_x), *sums = launch.words + squares_byte(norm);
    const u32 told = norm ? kToldOut : kToldDown;
#pragma unroll
    for (int r = 0; r < kHiddenRounds; r++) {
      if (!on(r)) continue;
      const u32 scales[4] = {gamma[r].x, gamma[r].y, gamma[r].z, gamma[r].w};
      u32 x[4];
      float squares[8];
#pragma unroll
      for (int i = 0; i < 8; i++) squares[i] = h[r][i] * h[r][i];
#pragma unroll
      for (int i = 0; i < 4; i++)
        x[i] = bf16_pair(h[r][2 * i] * from_bf16(scales[i] & 0xffff), h[r][2 * i + 1] * from_bf16(scales[i] >> 16));
      if (ranks.has(column(r)))
        store_16(vector + vector_byte(first_hidden_tile() + tile(r), column(r), upper()), Quad{x[0], x[1], x[2], x[3]});
      float sum = tree_sum<8>(squares);
      sum += shuffle_xor(sum, 16);
      if (!ranks.has(column(r))) continue;
      if (upper() == 0) store_u32(sums + (tile(r) * kColumns + column(r)) * 4, __float_as_uint(sum));
      if constexpr (kRanks > 1) ranks.tell_x(told, chunk(r), column(r), x, sum, tag);
    }
    if constexpr (kRanks > 1) ranks.hear_x(told, vector, sums, tag);
    publish_tiles<O, (int)kLeafTiles>(launch, norm ? Words::mlp_x_ready : Words::x_ready);
#pragma unroll
    for (int i = 0; i < kHiddenRounds * 2; i++) {
      const float* from = h[i / 2] + i % 2 * 4;
      store_16(residual() + i * (kConsumerThreads * 16), Quad{__float_as_uint(from[0]), __float_as_uint(from[1]),
                                                              __float_as_uint(from[2]), __float_as_uint(from[3])});
    }
  }

 private:
  LP_DEVICE void add_scaled(int round, int norm, const float* sum) {
#pragma unroll
    for (int i = 0; i < 8; i++) h[round][i] += scaled(sum[i], scale_before(launch, norm, first_row(round) + i));
  }
  LP_DEVICE u8* residual() const {
    return launch.words + Words::hidden + (rank_block() * (kHiddenRounds * 2 * kConsumerThreads) + thread_index()) * 16;
  }
};

/// The warp that finds 1 / rms of each column once all blocks have published their rows: block c adds column c's sums
/// of squares, a lane a leaf, and publishes the result to all blocks.
LP_DEVICE void find_norm(const Launch& launch, u32 shared, int norm, u32 target, u32 tag) {
  const u32 lane = lane_index();
  u8* inverse = launch.words + Words::inverse + norm * kColumns * 8;
  if (rank_block() < kColumns) {
    if (lane < kHiddenLeaves)
      wait_count(launch, (norm ? Words::mlp_x_ready : Words::x_ready) + lane * Words::counter, target, kSiteNorm);
    __syncwarp();
  }
#pragma unroll 1
  for (u32 column = rank_block(); column < kColumns; column += kBlocks) {
    const u8* squares = launch.words + Words::sums +
                        ((u64)(norm * kHiddenTiles + lane % kHiddenLeaves * kHiddenSteps) * kColumns + column) * 4;
    float sum = leaf_squares(
        [&](int tile) { return __uint_as_float(load_relaxed_u32(squares + (u64)tile * (kColumns * 4))); });
#pragma unroll
    for (int d = 1; d < kHiddenLeaves; d *= 2) sum += shuffle_xor(sum, d);
    if (lane == 0)
      store_relaxed_u64(inverse + column * 8, (u64)tag << 32 | __float_as_uint(inverse_rms<kHidden>(sum)));
  }
  for (u32 column = lane; column < kColumns; column += 32) {
    u64 word = load_relaxed_u64(inverse + column * 8);
    const long long begun = clock64();
    while (!kAblateWaits && (u32)(word >> 32) != tag) {
      if (clock64() - begun > kBlocksWaitLimit) wait_failed(launch, kSiteInverse, tag, (u32)(word >> 32));
      word = load_relaxed_u64(inverse + column * 8);
    }
    store_shared_f32(shared + Shared::inverse + (norm * kColumns + column) * 4, __uint_as_float((u32)word));
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(shared + Shared::norms + 8 * norm);
}

/// silu(gate) * up of a tile, as 8 rows of a k block of down's input. Of columns 8 j .., sum[4 j + c] is column 2 t +
/// (c & 1) of gate's row g, or, c over 1, of up's.
LP_DEVICE void write_activation(const Launch& launch, u32 shared, u32 layer, int tile, u32 first_column,
                                const float* sum) {
  const int lane = lane_index(), t = lane & 3, row = tile * 16 + (lane >> 2);
  const float gate_scale = scale_of(launch, layer, Scales::gate_up, row),
              up_scale = scale_of(launch, layer, Scales::gate_up, row + 8);
#pragma unroll
  for (int j = 0; j < GateUpOwn::columns / 8; j++) {
    const u32 column = first_column + 8 * j;
    float v[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float inverse = inverse_of(shared, 1, column + 2 * t + c),
                  gate = scaled(sum[4 * j + c], gate_scale) * inverse,
                  up = scaled(sum[4 * j + 2 + c], up_scale) * inverse;
      v[c] = silu(gate, up);
    }
    // Of a column the lane has rows 2 t and 2 t + 1 then.
    const int k = gate_up_k(tile, 2 * t);
    store_u32(launch.words + Words::activation + vector_byte(tile / 2, column + (lane >> 2), k / 8) + k % 8 * 2,
              transpose_8x8(bf16_pair(v[0], v[1])));
  }
}

}  // namespace wide
