// What follows the products of matrix passes. A warp has 16 rows by RUNS runs of 32 tokens: sum[4 j + c] is of row g
// or, c over 1, g + 8, and token 8 j + 2 t + (c & 1).
//
// An epilogue has stages of B's ring behind those of a tile. `fetch` fills stage `stage` at address `to` with what
// `finish` needs for `token`, a tile's first, and those behind it; `full` counts the bytes.
//
// What depends on a warp's row tile is asked of any_lane. Its lanes agree, but movmatrix under a condition that the
// compiler cannot tell to be uniform costs even the products' loop its uniform registers.
#pragma once

namespace matrix {

constexpr int kQkvTiles = (kQueriesPerKv + 2) * kDimTiles;  // of a KV head

/// What no value is, and no word of places: for Consumer::done.
constexpr u32 kNever = 0x7fedcba9;
LP_DEVICE bool is_never(float v) { return __float_as_uint(v) == kNever; }

/// Applies 1 / rms of the tokens, [token] f32 at `at`. Never true, as other functions here that return a bool.
template <int RUNS> LP_DEVICE bool normalize(u32 at, float* sum) {
  const u32 t = lane_index() & 3;
  bool never = false;
#pragma unroll
  for (int j = 0; j < RUNS * kRunGroups; j++) {
    const float even = load_shared_f32(at + (8 * j + 2 * t) * 4), odd = load_shared_f32(at + (8 * j + 2 * t) * 4 + 4);
    sum[4 * j] *= even, sum[4 * j + 1] *= odd, sum[4 * j + 2] *= even, sum[4 * j + 3] *= odd;
    never |= is_never(sum[4 * j]) || is_never(sum[4 * j + 1]);
  }
  return never;
}
/// Applies the scales of a layer's product, whose scales begin at `first`, to RUNS runs of a row tile.
template <int RUNS> LP_DEVICE void scale_rows(const Launch& launch, u32 layer, int first, u32 tile, float* sum) {
  const int row = tile * 16 + (lane_index() >> 2);
  const float low = scale_of(launch, layer, first, row), high = scale_of(launch, layer, first, row + 8);
#pragma unroll
  for (int i = 0; i < RUNS * kRunValues; i++) sum[i] = scaled(sum[i], i & 2 ? high : low);
}
LP_DEVICE const float* inverse_of(const Launch& launch) {
  return reinterpret_cast<const float*>(launch.words + Memory::inverse);
}

/// Row tile `tile` of the hidden state by 32 tokens from `token` on: the residual `h`, kept, and the input of the next
/// product with the norm's weights of this lane's two rows, for this rank or for RANKS; where copy engines carry x to
/// the others, only its squares.
template <u32 RANKS = 1>
LP_DEVICE void publish_hidden(const Launch& launch, u32 tile, u32 token, float low, float high, const float* h,
                              bool carried = false) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
  float4* residual = reinterpret_cast<float4*>(launch.words + Memory::residual + residual_byte(tile, token)) + lane;
  const u64 x = Memory::x + vector_byte(kHiddenTiles, tile, token + g, 0) + t * 4;
  // Ranks begin with themselves, so that not all of them write to the same one.
  const auto put = [&](u64 at, u32 v, bool own_alone) {
#pragma unroll
    for (u32 i = 0; i < RANKS; i++)
      if (i == 0 || !own_alone)
        store_u32((RANKS == 1 ? launch.words : launch.inbox[(own_rank(launch) + i) % RANKS]) + at, v);
  };
#pragma unroll
  for (int j = 0; j < kRunGroups; j++) {
    const float* v = h + 4 * j;
    residual[j * kConsumerThreads] = make_float4(v[0], v[1], v[2], v[3]);
    put(x + j * 256, transpose_8x8(bf16_pair(v[0] * low, v[1] * low)), carried);
    put(x + j * 256 + 128, transpose_8x8(bf16_pair(v[2] * high, v[3] * high)), carried);
  }
  const float square = sum_squares(h);
  put(squares_byte(tile, token + token_of_square()), __float_as_uint(square), false);
}
/// The lane's weights of norm `norm` for a row tile: row g, row g + 8 above it.
LP_DEVICE u32 gamma_of(const Launch& launch, u32 norm, u32 tile) {
  const u8* gamma = launch.gamma + ((u64)norm * kHidden + tile * 16 + (lane_index() >> 2)) * 2;
  return tile < kHiddenTiles ? load_constant_u16(gamma) | load_constant_u16(gamma + 16) << 16 : 0;
}

/// Adds the residual of a run, as a stage has it, to what o or down has summed.
LP_DEVICE bool add_residual(u32 at, float* sum) {
  bool never = false;
#pragma unroll
  for (int j = 0; j < kRunGroups; j++) {
    const Quad q = load_shared_16(at + j * (kConsumerThreads * 16));
    sum[4 * j] += __uint_as_float(q.x), sum[4 * j + 1] += __uint_as_float(q.y), sum[4 * j + 2] += __uint_as_float(q.z),
        sum[4 * j + 3] += __uint_as_float(q.w);
    never |= is_never(sum[4 * j]);
  }
  return never;
}
/// After o and down: the residual with the product's sums, for norm `norm`.
template <int RUNS> struct Join {
  static constexpr int stages = RUNS;
  const Launch& launch;
  u32 norm;

  LP_DEVICE void fetch(int stage, u32 group, u32 token, u32 to, u32 full) const {
    mbarrier_expect(full, kRunBytes);
    bulk_load(to, launch.words + Memory::residual + residual_byte(group * kGroupTiles, token) + stage * kRunBytes,
              kRunBytes, full);
  }
  template <class CONSUMER> LP_DEVICE void finish(CONSUMER& consumer, u32 tile, u32 token, float* sum) const {
    const u32 gamma = gamma_of(launch, norm, tile);
    if (kScaled && any_lane(tile < kHiddenTiles))
      scale_rows<RUNS>(launch, (norm - 1) / 2, norm & 1 ? Scales::out : Scales::down, tile, sum);
#pragma unroll
    for (int run = 0; run < RUNS; run++) {
      const u32 at = consumer.wait() + thread_index() * 16;
      bool never = false;
      if (any_lane(tile < kHiddenTiles)) {
        never = add_residual(at, sum + run * kRunValues);
        publish_hidden(launch, tile, token + run * kRunTokens, from_bf16(gamma & 0xffff), from_bf16(gamma >> 16),
                       sum + run * kRunValues);
      }
      consumer.done(never);
    }
  }
};

/// After P, o or down, of one of several ranks: part `part` of its sums, each run to the rank whose `join` adds it up.
/// A warp keeps them in shared memory, from where they go while it computes the next tile.
template <class P> struct Tell {
  static constexpr int stages = 0;
  const Launch& launch;
  const Pass& pass;

  LP_DEVICE void fetch(int, u32, u32, u32, u32) const {}
  template <class CONSUMER>
  LP_DEVICE void finish(CONSUMER& consumer, u32 tile, u32 token, const float* sum, u32 part = 0) const {
    if (!any_lane(tile < kHiddenTiles)) return;
    const u32 lane = lane_index(), kept = consumer.shared + CONSUMER::R::partial + warp_index() * (kRuns * kSentBytes),
              run = token / kRunTokens + lane;
    bulk_wait_read();  // of the tile before
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) store_shared_16(kept + j * 512 + lane * 16, sum + 4 * j);
    fence_async_shared();
    __syncwarp();
    if (lane < kRuns && run * kRunTokens < launch.row_count) {
      const u32 own = own_rank(launch), owner = owner_of(pass, run), place = place_of_run(pass, run);
      const bool waits = pass.carried && owner != own;  // until copy engines come
      u8* to = waits ? launch.words + Memory::outgoing : launch.inbox[owner] + Memory::partial;
      bulk_store(to + sums_byte<P::told>(waits ? owner : own, part, tile, place), kept + lane * kSentBytes, kSentBytes);
    }
    bulk_commit();
  }
};

/// After gate and up.
struct Activate {
  static constexpr int stages = 1;
  const Launch& launch;
  u32 layer;

  LP_DEVICE void fetch(int, u32, u32 token, u32 to, u32 full) const {
    mbarrier_expect(full, kTokens * 4);
    bulk_load(to, inverse_of(launch) + token, kTokens * 4, full);
  }
  template <class CONSUMER> LP_DEVICE void finish(CONSUMER& consumer, u32 tile, u32 token, float* sum) const {
    if (kScaled && any_lane(tile < GateUp::tiles)) scale_rows<kRuns>(launch, layer, Scales::gate_up, tile, sum);
    consumer.done(normalize<kRuns>(consumer.wait(), sum));
    if (!any_lane(tile < GateUp::tiles)) return;
    const u32 lane = lane_index(), k = gate_up_k(tile, (lane & 3) * 2);
    u8* to = launch.words + Memory::activation +
             vector_byte(Down::steps, tile / 2, token + (lane >> 2), k / 8) + k % 8 * 2;
#pragma unroll
    for (int j = 0; j < kTokens / 8; j++) {
      const float* v = sum + 4 * j;
      store_u32(to + j * 256, transpose_8x8(bf16_pair(silu(v[0], v[2]), silu(v[1], v[3]))));
    }
  }
};

/// What follows the LM head is given.
struct HeadEpilogue {
  static constexpr int stages = 1;
  const Launch& launch;
  const Pass& pass;

  LP_DEVICE void fetch(int, u32, u32 token, u32 to, u32 full) const {
    mbarrier_expect(full, kTokens * 4);
    bulk_load(to, launch.words + Memory::head_inverse + token * 4, kTokens * 4, full);
  }
};
/// After the LM head, for the sampler.
struct Logits : HeadEpilogue {
  template <class CONSUMER> LP_DEVICE void finish(CONSUMER& consumer, u32 tile, u32 token, float* sum) const {
    consumer.done(normalize<kRuns>(consumer.wait(), sum));
    if (tile >= Head::tiles) return;
    const u32 lane = lane_index(), id = (own_rank(launch) * kHeadTiles + tile) * 16 + (lane >> 2);
#pragma unroll 1
    for (u32 rank = 0; rank < kRanks; rank++) {
      float* logits = logits_of(launch, rank);
#pragma unroll
      for (int i = 0; i < kAccumulators; i++) {
        const u32 column = token + i / 4 * 8 + (lane & 3) * 2 + (i & 1), row = id + (i >> 1 & 1) * 8;
        if (column < pass.sample_count && row < kVocab)
          logits[(u64)column * ((kVocab + 15) / 16 * 16) + row] = sum[i];
      }
    }
    if constexpr (kRanks > 1) fence_system();  // ranks.cuh
  }
};

/// After q, k and v: norm, bias, rope; q to the pass's attention, k and v into their pages.
template <int RUNS> struct Project {
  static constexpr int stages = 1, tokens = RUNS * kRunTokens, groups = RUNS * kRunGroups;
  static constexpr u32 kPlaces = tokens * 4;  // byte in its stage
  const Launch& launch;
  u32 layer;

  LP_DEVICE void fetch(int, u32, u32 token, u32 to, u32 full) const {
    mbarrier_expect(full, tokens * (4 + 8));
    bulk_load(to, inverse_of(launch) + token, tokens * 4, full);
    bulk_load(to + kPlaces, launch.words + Memory::places + token * 8, tokens * 8, full);
  }
  template <class CONSUMER> LP_DEVICE void finish(CONSUMER& consumer, u32 tile, u32 token, float* sum) const {
    if (kScaled && any_lane(tile < Qkv::tiles)) scale_rows<RUNS>(launch, layer, Scales::qkv, tile, sum);
    const u32 at = consumer.wait();
    bool never = normalize<RUNS>(at, sum);
    if (any_lane(tile < Qkv::tiles)) {
      const u32 head = tile % kQkvTiles / kDimTiles, piece = tile % kDimTiles, kv_head = tile / kQkvTiles;
      if constexpr (kQkvBias) add_bias(tile, sum);
      if (any_lane(head <= kQueriesPerKv)) {
        const u32 query_head = head < kQueriesPerKv ? kv_head * kQueriesPerKv + head : kHeads + kv_head;
        if constexpr (kQkNorm) weigh(head == kQueriesPerKv, query_head, piece, token, sum);
        never |= turn_tile(at, piece, sum);
        if (any_lane(head < kQueriesPerKv)) write_queries(query_head, piece, token, sum);
        else never |= write_keys(at, kv_head, piece, sum);
      } else {
        never |= write_values(at, kv_head, piece, sum);
      }
    }
    consumer.done(never);
  }

 private:
  /// Of two neighbouring tokens: {position, place} each.
  LP_DEVICE static Quad places(u32 at, int j) {
    return load_shared_16(at + kPlaces + (8 * j + 2 * (lane_index() & 3)) * 8);
  }
  LP_DEVICE u8* page(u32 place, u32 kv_head) const {
    return launch.kv + page_byte(layer, launch.kv_pages, place / kPage, kv_head);
  }
  LP_DEVICE void add_bias(u32 tile, float* sum) const {
    const float* bias = launch.bias + (u64)layer * (Qkv::tiles * 16) + tile * 16 + (lane_index() >> 2);
    const float low = __ldg(bias), high = __ldg(bias + 8);
#pragma unroll
    for (int i = 0; i < 4 * groups; i++) sum[i] += i & 2 ? high : low;
  }
  /// A head's squares, and the weights of its norm.
  LP_DEVICE void weigh(bool key, u32 head, u32 piece, u32 token, float* sum) const {
    const float* weights = launch.qk_norm + (layer * 2 + key) * kHeadDim + piece * 16 + (lane_index() >> 2);
    const float low = __ldg(weights), high = __ldg(weights + 8);
    float* squares = reinterpret_cast<float*>(launch.words + Memory::head_squares) + head * kDimTiles + piece;
#pragma unroll
    for (int run = 0; run < RUNS; run++)
      squares[(u64)(token + run * kRunTokens + token_of_square()) * ((kHeads + kKvHeads) * kDimTiles)] =
          sum_squares(sum + run * kRunValues);
#pragma unroll
    for (int i = 0; i < 4 * groups; i++) sum[i] *= i & 2 ? high : low;
  }
  LP_DEVICE bool turn_tile(u32 at, u32 piece, float* sum) const {
    bool never = false;
    const float2* turns = reinterpret_cast<const float2*>(launch.rope) + piece * 8 + (lane_index() >> 2);
#pragma unroll
    for (int j = 0; j < groups; j++) {
      const Quad of = places(at, j);
      const float2 even = __ldg(turns + (u64)of.x * (kHeadDim / 2)), odd = __ldg(turns + (u64)of.z * (kHeadDim / 2));
      turn(sum[4 * j], sum[4 * j + 2], even.x, even.y);
      turn(sum[4 * j + 1], sum[4 * j + 3], odd.x, odd.y);
      never |= of.x == kNever;
    }
    return never;
  }
  LP_DEVICE void write_queries(u32 head, u32 piece, u32 first_token, const float* sum) const {
    const u32 lane = lane_index(), t = lane & 3, token = first_token + (lane >> 2);
    const bool upper = t & 1;
    u8* to = launch.words + Memory::queries + (((u64)token * kHeads + head) * kHeadDim + piece * 16) * 2 +
             upper * 16 + (t >> 1) * 8;
#pragma unroll
    for (int j = 0; j < groups; j++) {
      const float* v = sum + 4 * j;
      const u32 low = transpose_8x8(bf16_pair(v[0], v[1])), high = transpose_8x8(bf16_pair(v[2], v[3]));
      // Of a token, rows 2 t, 2 t + 1 and 8 more: lanes of even t get four rows of the lower half, the others four of
      // the upper one.
      const u32 other = shuffle_xor(upper ? low : high, 1);
      if (token + 8 * j < launch.row_count)
        *reinterpret_cast<uint2*>(to + (u64)j * (8 * kHeads * kHeadDim * 2)) =
            upper ? make_uint2(other, high) : make_uint2(low, other);
    }
  }
  LP_DEVICE bool write_keys(u32 at, u32 kv_head, u32 piece, const float* sum) const {
    const u32 lane = lane_index(), g = lane >> 2, t = lane & 3;
    bool never = false;
#pragma unroll
    for (int j = 0; j < groups; j++) {
      const float* v = sum + 4 * j;
      const u32 low = transpose_8x8(bf16_pair(v[0], v[1])), high = transpose_8x8(bf16_pair(v[2], v[3]));
      const u32 word = load_shared_u32(at + kPlaces + (8 * j + g) * 8 + 4), place = word >> 1;
      if (word != kNoPlace) {
        u8* to = page(place, kv_head) + k_byte(place % kPage, piece * 16 + 2 * t);
        store_u32(to, low);
        store_u32(to + 128, high);
      }
      never |= word == kNever;
    }
    return never;
  }
  LP_DEVICE bool write_values(u32 at, u32 kv_head, u32 piece, const float* sum) const {
    const u32 dim = piece * 16 + (lane_index() >> 2);
    bool never = false;
#pragma unroll
    for (int j = 0; j < groups; j++) {
      const Quad of = places(at, j);
      const u32 low = bf16_pair(sum[4 * j], sum[4 * j + 1]), high = bf16_pair(sum[4 * j + 2], sum[4 * j + 3]),
                even = of.y >> 1, odd = of.w >> 1;
      never |= of.x == kNever;
      u8* to = page(even, kv_head) + v_byte(even % kPage, dim);
      if (of.w != kNoPlace && even % 2 == 0 && odd == even + 1) {
        store_u32(to, low);
        store_u32(to + 128, high);
        continue;
      }
      if (of.y != kNoPlace) store_u16(to, low), store_u16(to + 128, high);
      to = page(odd, kv_head) + v_byte(odd % kPage, dim);
      if (of.w != kNoPlace) store_u16(to, low >> 16), store_u16(to + 128, high >> 16);
    }
    return clear_rest(at, kv_head, piece) || never;
  }
  /// The rest of the page behind the last row of a sequence: attention multiplies it by weights of 0, so it must not be
  /// NaN.
  LP_DEVICE bool clear_rest(u32 at, u32 kv_head, u32 piece) const {
    const u32 lane = lane_index();
    bool never = false;
#pragma unroll 1
    for (u32 token = 0; token < tokens; token += 32) {
      const u32 word = load_shared_u32(at + kPlaces + (token + lane) * 8 + 4);
#pragma unroll 1
      for (u32 last = __ballot_sync(kAllLanes, word != kNoPlace && word & 1); last; last &= last - 1) {
        const u32 place = shuffle(word, __ffs(last) - 1) >> 1, position = place % kPage;
        u8* values = page(place, kv_head) + v_byte(0, piece * 16);
        for (u32 i = position / 8 + 1 + lane / 16; i < kPage / 8; i += 2)
          store_16(values + i * kGroupBytes + lane % 16 * 16, Quad{0, 0, 0, 0});
        if (lane < 16)
          for (u32 i = position + 1; i % 8; i++) store_u16(values + v_byte(i, lane) - kGroupV, 0);
      }
      never |= word == kNever;
    }
    return never;
  }
};

}  // namespace matrix
