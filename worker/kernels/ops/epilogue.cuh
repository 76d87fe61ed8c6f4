// Epilogue: adds the leaves of a row tile in the product's order, applies what follows the product (norm, bias, rope, silu, residual) and publishes the result
// as a k block of the next product. Lane = (tile of the set, row).
#pragma once

struct Epilogue {
  static constexpr int kSets = (O::most_tiles + 1) / 2;  // sets of hidden tiles of a block
  const Launch& launch;
  u32 shared;
  int warp;                                                // 0 or 1
  u32 set = 0;
  float y[kEpilogueColumns], inverse[kEpilogueColumns];    // sums of a set; 1 / rms
  float hidden[kSets][kEpilogueColumns];                   // the residual stream of the block's rows

  LP_DEVICE Epilogue(const Launch& launch, u32 shared, int warp) : launch(launch), shared(shared), warp(warp) {}

  LP_DEVICE static int half() { return (threadIdx.x & 31) >> 4; }
  LP_DEVICE static int row() { return threadIdx.x & 15; }
  LP_DEVICE int column(int c) const { return (kColumns == 1 ? 0 : warp * kEpilogueColumns) + c; }
  /// With one column the second warp takes the odd sets of qkv, so that the last set does not wait for the first, and nothing else.
  LP_DEVICE bool second() const { return kColumns == 1 && warp == 1; }
  template <class P> LP_DEVICE static int sets() { return (P::first_tile(blockIdx.x + 1) - P::first_tile(blockIdx.x) + 1) / 2; }

  /// Sums of the next set into y; with `squares` 0 or 1 also 1 / rms from that buffer of sums of squares.
  template <class P> LP_DEVICE void take(int squares) {
    const u32 buffer = set & 1;
    wait_barrier(launch, shared + Shared::partials_full + 8 * buffer, set >> 1 & 1, kSitePartialsFull);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) {
      const u32 from = shared + Shared::partials + buffer * kSetBytes + ((half() * kWarps * kColumns + column(c)) * 16 + row()) * 4;
      float leaf[P::leaves];
#pragma unroll
      for (int w = 0; w < P::leaves; w++) leaf[w] = load_shared_f32(from + w * kColumns * 64);
      if constexpr (P::ascending) {
        y[c] = leaf[0];
#pragma unroll
        for (int w = 1; w < P::leaves; w++) y[c] += leaf[w];
      } else {
        y[c] = tree_sum<P::leaves>(leaf);
      }
      if (squares >= 0) {
        float q = row() < kHiddenLeaves ? load_shared_f32(shared + Shared::squares + ((squares * kMaxLeaves + row()) * kColumns + column(c)) * 4) : 0;
#pragma unroll
        for (int d = 1; d < 16; d *= 2) q += shuffle_xor(q, d);
        inverse[c] = rsqrt_approx(q * (1.0f / kHidden) + __uint_as_float(LP_EPS));
      }
    }
    given_back(buffer);
  }
  /// Sets that the other warp takes: every phase of the barriers is followed by both, or parities would alias.
  LP_DEVICE void skip(int sets) {
    for (; sets > 0; sets--) {
      wait_barrier(launch, shared + Shared::partials_full + 8 * (set & 1), set >> 1 & 1, kSitePartialsFull);
      given_back(set & 1);
    }
  }
  /// Rows of a tile, one a lane, as a k block of B fragments.
  LP_DEVICE void publish(u8* words, float v, u32 tag, u32 extra, bool on) const {
    const int from = threadIdx.x & 16, t = threadIdx.x & 3;
    const float a = shuffle(v, from + 2 * t), b = shuffle(v, from + 2 * t + 1), c = shuffle(v, from + 2 * t + 8), d = shuffle(v, from + 2 * t + 9);
    if (on && row() < 4) store_relaxed_16(words + t * 16, bf16_pair(a, b), bf16_pair(c, d), tag, t == 0 ? extra : 0);
  }
  LP_DEVICE static float half_sum(float v) {
#pragma unroll
    for (int d = 1; d < 16; d *= 2) v += shuffle_xor(v, d);
    return v;
  }
  /// A row of the embedding, and the first layer's input.
  LP_DEVICE void embed(const u32* token, u32 active, u32 tag) {
    const int first = O::first_tile(blockIdx.x), end = O::first_tile(blockIdx.x + 1);
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      const int tile = first + 2 * s + half(), k = tile * 16 + row();
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) {
        hidden[s][c] = 0;
        if (tile < end && active >> column(c) & 1)
          hidden[s][c] = from_bf16(load_constant_u16(kTied ? launch.weights + kHeadOffset + head_byte(token[c], k) : launch.embedding + ((u64)token[c] * kHidden + k) * 2));
      }
    }
    publish_hidden(Words::attention_x, 0, active, tag);
  }
  /// The scaled residual with its sum of squares: the input of a norm, whose 1 / rms its readers apply after their product.
  LP_DEVICE void publish_hidden(u64 vector, int gamma, u32 active, u32 tag) {
#pragma unroll
    for (int s = 0; s < kSets; s++) publish_hidden_set(vector, s, gamma_of(gamma, s), active, tag);
  }
  LP_DEVICE float gamma_of(int gamma, int s) const {
    const int first = O::first_tile(blockIdx.x), tile = first + 2 * s + half();
    return tile < O::first_tile(blockIdx.x + 1) ? from_bf16(load_constant_u16(launch.gamma + ((u64)gamma * kHidden + tile * 16 + row()) * 2)) : 0;
  }
  LP_DEVICE void publish_hidden_set(u64 vector, int s, float gamma, u32 active, u32 tag) {
    const int tile = O::first_tile(blockIdx.x) + 2 * s + half();
    const bool on = tile < O::first_tile(blockIdx.x + 1);
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) {
      const float q = half_sum(hidden[s][c] * hidden[s][c]);
      publish(launch.words + vector + vector_word(tile, column(c)), hidden[s][c] * gamma, tag, __float_as_uint(q), on && active >> column(c) & 1);
    }
  }
  /// q, k and v: norm, bias, rope; k and v go into their page and, with q, to this step's attention.
  LP_DEVICE void query_key_value(const Rows& rows, u32 layer, u32 active, u32 tag) {
    const int first = Qkv::first_tile(blockIdx.x), end = Qkv::first_tile(blockIdx.x + 1), sets = Epilogue::sets<Qkv>();
    bool begun = false;
    for (int s = 0; s < sets; s++) {
      if (kColumns == 1 && (s & 1) != warp) {
        skip(1);
        continue;
      }
      const int tile = first + 2 * s + half(), within = tile % Words::qkv_tiles, kv_head = tile / Words::qkv_tiles;
      const int head = within / kDimTiles, piece = within % kDimTiles;  // head: queries, then k, then v
      const bool on = tile < end;
      float cosine[kEpilogueColumns], sine[kEpilogueColumns];
      u32 page[kEpilogueColumns];
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) {
        cosine[c] = 1, sine[c] = 0, page[c] = 0;
        if (!on || !(active >> column(c) & 1)) continue;
        const u32 p = rows.position(column(c));
        const float* turn = launch.rope + ((u64)p * (kHeadDim / 2) + piece * 8 + (row() & 7)) * 2;
        if (head <= kQueriesPerKv) cosine[c] = __uint_as_float(load_constant_u32((const u32*)turn)), sine[c] = __uint_as_float(load_constant_u32((const u32*)turn + 1));
        if (head >= kQueriesPerKv) page[c] = load_constant_u32(launch.page_table + rows.rows[column(c)].slot * launch.page_stride + p / kPage);
      }
      const float bias = kQkvBias && on ? launch.bias[(u64)layer * (Qkv::tiles * 16) + tile * 16 + row()] : 0;
      const float scale = kQkNorm && on && head <= kQueriesPerKv ? launch.qk_norm[(layer * 2 + (head == kQueriesPerKv)) * kHeadDim + piece * 16 + row()] : 1;
      take<Qkv>(begun ? -1 : 0);
      begun = true;
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) {
        float v = y[c] * inverse[c];
        if constexpr (kQkvBias) v += bias;
        u32 square = 0;
        if constexpr (kQkNorm) {
          square = __float_as_uint(half_sum(v * v));
          v *= scale;
        }
        const float other = shuffle_xor(v, 8);
        if (head <= kQueriesPerKv) v = row() < 8 ? fmaf(v, cosine[c], -(other * sine[c])) : fmaf(v, cosine[c], other * sine[c]);
        const bool mine = on && active >> column(c) & 1;
        if (mine && head >= kQueriesPerKv) {
          const u32 at = rows.position(column(c)) % kPage, leaf = at / kLeafPositions, in = at % kLeafPositions;
          u8* to = launch.kv + page_byte(layer, launch.kv_pages, page[c], kv_head) + leaf * kLeafBytes + piece * kFragment;
          store_u16(head == kQueriesPerKv ? to + fragment_byte(in, row()) : to + kLeafV + fragment_byte(row(), in), bf16_pair(v, 0));
        }
        publish(launch.words + qkv_word(kv_head, column(c), within), v, tag, square, mine);
      }
    }
  }
  /// Residual after o or down, and the next norm's input.
  template <class P> LP_DEVICE void add_residual(u64 vector, int gamma, u32 active, u32 tag) {
    const int sets = Epilogue::sets<P>();
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      if (s >= sets) break;
      const float scale = gamma_of(gamma, s);
      take<P>(-1);
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) hidden[s][c] += y[c];
      publish_hidden_set(vector, s, scale, active, tag);
    }
  }
  LP_DEVICE void gate_up(u32 active, u32 tag) {
    const int first = GateUp::first_tile(blockIdx.x) / 2, sets = Epilogue::sets<GateUp>();
    for (int s = 0; s < sets; s++) {
      take<GateUp>(s == 0 ? 1 : -1);
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) {
        const float gate = y[c] * inverse[c], up = shuffle_xor(gate, 16);
        const float v = gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.44269504f)) * up;
        publish(launch.words + Words::activation + vector_word(first + s, column(c)), v, tag, 0, half() == 0 && active >> column(c) & 1);
      }
    }
  }

 private:
  LP_DEVICE void given_back(u32 buffer) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) mbarrier_arrive(shared + Shared::partials_empty + 8 * buffer);
    set++;
  }
};
