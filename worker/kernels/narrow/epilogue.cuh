// Epilogue: adds the leaves of a row tile in the product's order, applies what follows the product (norm, bias, rope,
// silu, residual) and publishes the result as a k block of the next product. Lane = (tile of the set, row).
#pragma once

namespace narrow {

/// The default of `add_residual`: notes nothing.
struct Unnoted {
  LP_DEVICE void operator()(u32) const {}
};

struct Epilogue {
  static constexpr int kSets = (O::most_tiles + 1) / 2;  // sets of hidden tiles of a block
  /// In a group, with one column, the warps take these sets in turns: their messages to and from other ranks travel at
  /// the same time.
  static constexpr bool kSharedSets = kRanks > 1 && kColumns == 1 && kSets > 1;
  static constexpr int kOwnSets = kSharedSets ? (kSets + 1) / 2 : kSets;
  const Launch& launch;
  u32 shared;
  int warp;                                                // 0 or 1
  u32 set = 0;
  float y[kEpilogueColumns], inverse[kEpilogueColumns];    // sums of a set; 1 / rms
  // Of the block's rows in the sets that this warp takes; see `hidden`.
  float residual[kOwnSets][kEpilogueColumns];

  LP_DEVICE Epilogue(const Launch& launch, u32 shared, int warp) : launch(launch), shared(shared), warp(warp) {}

  LP_DEVICE static int half() { return lane_index() >> 4; }
  LP_DEVICE static int row() { return threadIdx.x & 15; }
  LP_DEVICE int column(int c) const { return (kColumns == 1 ? 0 : warp * kEpilogueColumns) + c; }
  /// With one column the second warp takes the odd sets of qkv, so that the last set does not wait for the first. Of
  /// other products it takes only the sets that it shares.
  LP_DEVICE bool second() const { return kColumns == 1 && warp == 1; }
  /// Whether this warp takes set `s` of the hidden tiles, if it takes any; the residual stream of its rows.
  LP_DEVICE bool mine(int s) const { return !kSharedSets || (s & 1) == warp; }
  LP_DEVICE float* hidden(int s) { return residual[kSharedSets ? s / 2 : s]; }
  template <class P> LP_DEVICE static int sets() {
    return (P::first_tile(rank_block() + 1) - P::first_tile(rank_block()) + 1) / 2;
  }

  /// Sums of the next set into y; with `squares` 0 or 1 also 1 / rms from that buffer of sums of squares.
  template <class P> LP_DEVICE void take(int squares) {
    static_assert(P::told == 1, "its leaves are added");
    take<P>(squares, y);
  }
  /// The same, into `to`: of a rank that has less than a group its leaves, [P::told][kEpilogueColumns].
  template <class P> LP_DEVICE void take(int squares, float* to) {
    const u32 buffer = set & 1;
    wait_barrier(launch, shared + Shared::partials_full + 8 * buffer, set >> 1 & 1, kSitePartialsFull);
    __syncwarp();
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) {
      const u32 from = shared + Shared::partials + buffer * kSetBytes +
                       ((half() * kWarps * kColumns + column(c)) * 16 + row()) * 4;
      float leaf[P::leaves];
#pragma unroll
      for (int w = 0; w < P::leaves; w++) leaf[w] = load_shared_f32(from + w * kColumns * 64);
#pragma unroll
      for (int i = 0; i < P::told; i++)
        to[i * kEpilogueColumns + c] = leaf_sum<P::leaves / P::told, P::group>(leaf + i * (P::leaves / P::told));
      if (squares >= 0) {
        float q = row() < kHiddenLeaves ? load_shared_f32(shared + Shared::squares +
                                                          ((squares * kMaxLeaves + row()) * kColumns + column(c)) * 4)
                                        : 0;
#pragma unroll
        for (int d = 1; d < 16; d *= 2) q += shuffle_xor(q, d);
        inverse[c] = inverse_rms<kHidden>(q);
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
  /// Rows of a tile, one a lane, turned into B fragments: of all columns at once, this lane has word `word()` of column
  /// `word_column()`, if it `has_word()`.
  struct Pairs {
    u32 low, high;
  };
  LP_DEVICE static int word() { return row() >> 1 & 3; }
  LP_DEVICE int word_column() const { return column(kColumns == 1 ? 0 : row() >> 3 << 1 | (row() & 1)); }
  LP_DEVICE static bool has_word() { return kColumns == 8 || (row() < 8 && row() % 2 == 0); }
  LP_DEVICE static Pairs fragment_words(const float* v) {
    const bool odd = row() & 1, lower = row() >= 8;
    u32 pair[(kEpilogueColumns + 1) / 2];
    if constexpr (kColumns == 1) {
      const u32 mine = bf16_pair(v[0], shuffle_xor(v[0], 1));
      return Pairs{mine, shuffle_xor(mine, 8)};
    } else {
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c += 2) {
        const float mine = odd ? v[c + 1] : v[c], other = shuffle_xor(odd ? v[c] : v[c + 1], 1);
        pair[c / 2] = odd ? bf16_pair(other, mine) : bf16_pair(mine, other);
      }
      const u32 mine = lower ? pair[1] : pair[0], other = shuffle_xor(lower ? pair[0] : pair[1], 8);
      return Pairs{lower ? other : mine, lower ? mine : other};
    }
  }
  /// A k block of a vector.
  template <class V> LP_DEVICE void publish(u32 vector, int k_block, const float* v, u32 active, u32 tag, bool on,
                                            u32 extra = 0) const {
    const Pairs pairs = fragment_words(v);
    if (on && has_word() && active >> word_column() & 1)
      put_word(launch.words + vector + V::word(k_block, word_column(), word()), pairs.low, pairs.high, tag,
               word() == 0 ? extra : 0);
  }
  LP_DEVICE static float half_sum(float v) {
#pragma unroll
    for (int d = 1; d < 16; d *= 2) v += shuffle_xor(v, d);
    return v;
  }
  /// half_sum for all columns: this lane has that of column `row() % kEpilogueColumns`.
  LP_DEVICE static float half_sum_columns(const float* v) {
    if constexpr (kColumns == 1) {
      return half_sum(v[0]);
    } else {
      const bool one = row() & 1, two = row() & 2;
      const float a = (one ? v[1] : v[0]) + shuffle_xor(one ? v[0] : v[1], 1),
                  b = (one ? v[3] : v[2]) + shuffle_xor(one ? v[2] : v[3], 1);
      float sum = (two ? b : a) + shuffle_xor(two ? a : b, 2);
      sum += shuffle_xor(sum, 4);
      return sum + shuffle_xor(sum, 8);
    }
  }
  /// Sends this rank's parts of a set of hidden tiles, [PARTS][kEpilogueColumns], to the other ranks: this lane's word
  /// of each.
  template <int PARTS> LP_DEVICE void tell(u32 told, int s, const float* v, u32 active, u32 tag) const {
    if constexpr (kRanks == 1) return;
    const int tile = O::first_tile(rank_block()) + 2 * s + half();
    const bool on = tile < O::first_tile(rank_block() + 1);
    Quad word[PARTS];
#pragma unroll
    for (int p = 0; p < PARTS; p++, v += kEpilogueColumns)
      if constexpr (kTaggedVectors)
        word[p] = Quad{__float_as_uint(v[0]), __float_as_uint(shuffle_xor(v[0], 1)), tag, 0};
      else word[p] = Quad{told_bits(v[0]), told_bits(v[1]), told_bits(v[2]), told_bits(v[3])};
#pragma unroll
    for (u32 i = 1; i < kRanks; i++) {
      u8* to = launch.inbox[(own_rank(launch) + i) % kRanks] + Inbox::tile<PARTS>(told, tile, own_rank(launch)) +
               told_word();
#pragma unroll
      for (int p = 0; p < PARTS; p++)
        if (on && has_told(active))
          store_system_16(to + p * Inbox::tile_bytes, word[p].x, word[p].y, word[p].z, word[p].w);
    }
  }
  /// Reads the lane's words of COUNT parts, from FIRST on of those of all ranks, and combines them in the order of
  /// leaf_sum<COUNT, GROUP>. `own`: this rank's parts, [PARTS][kToldValues].
  template <u32 FIRST, u32 COUNT, u32 PARTS, int GROUP, class ADD>
  LP_DEVICE void hear_parts(const u8* word, bool on, const float* own, float* sum, u32 active, u32 tag, u32 site,
                            const ADD& add) const {
    if constexpr (COUNT > 4) {  // words that there are registers for
      static_assert(GROUP <= 4, "halves have whole groups");
      float rest[kToldValues];
      hear_parts<FIRST, COUNT / 2, PARTS, GROUP>(word, on, own, sum, active, tag, site, add);
      hear_parts<FIRST + COUNT / 2, COUNT / 2, PARTS, GROUP>(word, on, own, rest, active, tag, site, add);
#pragma unroll
      for (int i = 0; i < kToldValues; i++) sum[i] = add(sum[i], rest[i]);
    } else {
      Quad words[COUNT] = {};
      const auto there = [&](u32 seen) { return kTaggedVectors ? seen == tag : seen != 0; };
      const auto missing = [&](int j) {
        const u32 part = FIRST + j;
        return on && has_told(active) && part / PARTS != own_rank(launch) &&
                       !there(kTaggedVectors ? words[j].z : words[j].x)
                   ? part * Inbox::tile_bytes + (kTaggedVectors ? 8 : 0)
                   : kThere;
      };
      const auto fetch = [&](int j) {
        if (missing(j) != kThere) words[j] = load_system_16(word + (FIRST + j) * Inbox::tile_bytes);
      };
      poll<COUNT, false>(launch, word, kTaggedVectors ? tag : ~0u, fetch, missing, there, site,
                         [](u32 at) { return at / Inbox::tile_bytes / PARTS; });
#pragma unroll
      for (int i = 0; i < kToldValues; i++) {
        float of[COUNT];
#pragma unroll
        for (u32 j = 0; j < COUNT; j++) {
          const u32 bits = i == 0 ? words[j].x : i == 1 ? words[j].y : i == 2 ? words[j].z : words[j].w;
          of[j] = (FIRST + j) / PARTS == own_rank(launch) ? own[(FIRST + j) % PARTS * kToldValues + i]
                                                          : __uint_as_float(kTaggedVectors ? bits : ~bits);
        }
        sum[i] = leaf_sum<COUNT, GROUP>(of, add);
      }
    }
  }
  /// Combines all ranks' parts of a set of hidden tiles, of which GROUP are a group. `v` holds this rank's, as `tell`
  /// was given them; then its first kEpilogueColumns the result.
  template <int PARTS, int GROUP, class ADD = Plus> LP_DEVICE void hear(u32 told, int s, float* v, u32 active, u32 tag,
                                                                       u32 site, const ADD& add = {}) const {
    if constexpr (kRanks == 1) return;
    const int tile = O::first_tile(rank_block()) + 2 * s + half();
    const bool on = tile < O::first_tile(rank_block() + 1);
    float own[PARTS * kToldValues], sum[kToldValues];
#pragma unroll
    for (int p = 0; p < PARTS; p++) {
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) own[p * kToldValues + c] = v[p * kEpilogueColumns + c];
      if (kColumns == 1) own[p * kToldValues + 1] = shuffle_xor(v[p * kEpilogueColumns], 1);
    }
    hear_parts<0, kRanks * PARTS, PARTS, GROUP>(
        launch.inbox[own_rank(launch)] + Inbox::tile<PARTS>(told, on ? tile : 0, 0) + told_word(), on, own, sum, active,
        tag, site, add);
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++) v[c] = sum[c];
    if constexpr (kColumns == 1) {
      const float odd = shuffle_xor(sum[1], 1);
      if (row() & 1) v[0] = odd;
    }
  }
  /// Clears the words that this lane has read from other ranks, where they have no tags. Orders the reads and the zeros
  /// before all that the lane sends next (lanes of this place in all ranks; system): see inbox.cuh. There is time for
  /// the fence while x is on its way to the consumers.
  template <int PARTS> LP_DEVICE void forget(u32 told, u32 active) const {
    if constexpr (kRanks == 1 || kTaggedVectors) return;
#ifndef LP_KEEP_WORDS  // negative control
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      const int tile = O::first_tile(rank_block()) + 2 * s + half();
      if (tile >= O::first_tile(rank_block() + 1) || !has_told(active)) continue;
#pragma unroll
      for (u32 i = 1; i < kRanks; i++)
#pragma unroll
        for (int p = 0; p < PARTS; p++)
          store_system_16(launch.inbox[own_rank(launch)] +
                              Inbox::tile<PARTS>(told, tile, (own_rank(launch) + i) % kRanks) + told_word() +
                              p * Inbox::tile_bytes,
                          0, 0, 0, 0);
    }
#endif
    fence_system();
  }
  /// A row of the embedding, and the first layer's input.
  LP_DEVICE void embed(const u32* token, u32 active, u32 vectors, u32 tag) {
    const int first = O::first_tile(rank_block()), end = O::first_tile(rank_block() + 1);
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      if (!mine(s)) continue;
      const int tile = first + 2 * s + half(), k = tile * 16 + row();
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) {
        hidden(s)[c] = 0;
        const u32 within = token[c] - own_rank(launch) * (kHeadTiles * 16);  // of this rank's shard
        if (tile < end && active >> column(c) & 1 && (kRanks == 1 || within < kHeadTiles * 16))
          hidden(s)[c] = from_bf16(load_constant_u16(kTied ? launch.weights + kHeadOffset + head_byte(within, k)
                                                           : launch.embedding + ((u64)within * kHidden + k) * 2));
      }
      tell<1>(kToldEmbedding, s, hidden(s), active, tag);
    }
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      if (!mine(s)) continue;
      // One rank has sent the row, the others zeros. Their bits are combined by or, since -0 + 0 would be 0.
      hear<1, 1>(kToldEmbedding, s, hidden(s), active, tag, kSiteEmbedding,
                 [](float a, float b) { return __uint_as_float(__float_as_uint(a) | __float_as_uint(b)); });
      publish_hidden(vectors + Vectors::attention_x, s, gamma_of(0, s), active, tag);
    }
    forget<1>(kToldEmbedding, active);
  }
  LP_DEVICE float gamma_of(int gamma, int s) const {
    const int first = O::first_tile(rank_block()), tile = first + 2 * s + half();
    return tile < O::first_tile(rank_block() + 1)
               ? from_bf16(load_constant_u16(launch.gamma + ((u64)gamma * kHidden + tile * 16 + row()) * 2))
               : 0;
  }
  /// Scale of this lane's row of the product in front of norm `gamma`.
  LP_DEVICE float scale_of_hidden(int gamma, int s) const {
    const int first = O::first_tile(rank_block()), tile = first + 2 * s + half();
    return tile < O::first_tile(rank_block() + 1) ? scale_before(launch, gamma, tile * 16 + row()) : 0;
  }
  /// The scaled residual with its sums of squares: the input of a norm, whose 1 / rms its readers apply after their
  /// product.
  LP_DEVICE void publish_hidden(u32 vector, int s, float gamma, u32 active, u32 tag) {
    const int tile = O::first_tile(rank_block()) + 2 * s + half(), of = row() % kEpilogueColumns;
    const bool on = tile < O::first_tile(rank_block() + 1);
    float scaled[kEpilogueColumns], square[kEpilogueColumns];
#pragma unroll
    for (int c = 0; c < kEpilogueColumns; c++)
      scaled[c] = hidden(s)[c] * gamma, square[c] = hidden(s)[c] * hidden(s)[c];
    const auto sum = [&] { return __float_as_uint(half_sum_columns(square)); };
    if constexpr (kTaggedVectors) {
      publish<HiddenVector>(vector, tile, scaled, active, tag, on, sum());
    } else {
      publish<HiddenVector>(vector, tile, scaled, active, tag, on);
      const u32 word = ~sum();
      if (on && row() < kEpilogueColumns && active >> column(of) & 1)
        store_relaxed_u32(launch.words + vector + HiddenVector::square(tile, column(of)), word);
    }
  }
  /// q, k and v: norm, bias, rope; k and v go into their page and, with q, to this step's attention.
  LP_DEVICE void query_key_value(const Rows& rows, u32 layer, u32 active, u32 tag) {
    const int first = Qkv::first_tile(rank_block()), end = Qkv::first_tile(rank_block() + 1),
              sets = Epilogue::sets<Qkv>();
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
        if (head <= kQueriesPerKv)
          cosine[c] = __uint_as_float(load_constant_u32((const u32*)turn)),
          sine[c] = __uint_as_float(load_constant_u32((const u32*)turn + 1));
        if (head >= kQueriesPerKv)
          page[c] = load_constant_u32(launch.page_table + rows.rows[column(c)].slot * launch.page_stride + p / kPage);
      }
      const float bias = kQkvBias && on ? launch.bias[(u64)layer * (Qkv::tiles * 16) + tile * 16 + row()] : 0;
      const float scale = kQkNorm && on && head <= kQueriesPerKv
                              ? launch.qk_norm[(layer * 2 + (head == kQueriesPerKv)) * kHeadDim + piece * 16 + row()]
                              : 1;
      const float weight_scale = on ? scale_of(launch, layer, Scales::qkv, tile * 16 + row()) : 1;
      take<Qkv>(begun ? -1 : 0);
      begun = true;
      u32 square = 0;
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) {
        float& v = y[c];
        v = scaled(v, weight_scale) * inverse[c];
        if constexpr (kQkvBias) v += bias;
        if constexpr (kQkNorm) {
          const float sum = half_sum(v * v);
          if (column(c) == word_column()) square = __float_as_uint(sum);
          v *= scale;
        }
        const float other = shuffle_xor(v, 8);
        if (head <= kQueriesPerKv) v = turned(row(), v, other, cosine[c], sine[c]);
        const bool mine = on && active >> column(c) & 1;
        if (mine && head >= kQueriesPerKv) {
          const u32 at = rows.position(column(c)) % kPage, dim = piece * 16 + row();
          store_u16(launch.kv + page_byte(layer, launch.kv_pages, page[c], kv_head) +
                        (head == kQueriesPerKv ? k_byte(at, dim) : v_byte(at, dim)),
                    bf16_pair(v, 0));
        }
      }
      const Pairs pairs = fragment_words(y);
      if (on && has_word() && active >> word_column() & 1)
        store_relaxed_16(launch.words + qkv_word(kv_head, word_column(), within) + word() * 16, pairs.low, pairs.high,
                         tag, word() == 0 ? square : 0);
    }
  }
  /// Residual after o or down, and the next norm's input. In a group this warp calls `note(0)` when it has sent its
  /// sums of a set, and `note(1)` when it has read those of all ranks, before it publishes. Its last calls are those of
  /// its last set. A warp that sends nothing calls neither.
  template <class P, class NOTE = Unnoted> LP_DEVICE void add_residual(u32 told, u32 vector, int gamma, u32 active,
                                                                       u32 tag, const NOTE& note = {}) {
    const int sets = Epilogue::sets<P>();
    float sums[kOwnSets][P::told * kEpilogueColumns];
    const auto sum = [&](int s) { return sums[kSharedSets ? s / 2 : s]; };
    const auto settle = [&](int s, float scale, float weight_scale) {
      hear<P::told, P::told_group>(told, s, sum(s), active, tag, kSiteSums);
      if (kRanks > 1 && has_columns(active)) note(1);
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) hidden(s)[c] += scaled(sum(s)[c], weight_scale);
      publish_hidden(vector, s, scale, active, tag);
    };
#pragma unroll
    for (int s = 0; s < kSets; s++) {
      if (s >= sets) break;
      if (!mine(s)) {
        skip(1);
        continue;
      }
      const float scale = gamma_of(gamma, s), weight_scale = kRanks == 1 ? scale_of_hidden(gamma, s) : 1;
      take<P>(-1, sum(s));
      tell<P::told>(told, s, sum(s), active, tag);
      if (kRanks > 1 && has_columns(active)) note(0);
      if (kRanks == 1) settle(s, scale, weight_scale);
    }
#pragma unroll
    for (int s = 0; s < (kRanks == 1 ? 0 : kSets); s++)  // all sets are on their way before the first is waited for
      if (s < sets && mine(s)) settle(s, gamma_of(gamma, s), scale_of_hidden(gamma, s));
    forget<P::told>(told, active);
  }
  /// silu(gate) * up: of a tile two words of a k block of down's input. Lanes 0 to 7 of a tile have gate, lanes 8 to 15
  /// up; they meet in the former for the lower half of the columns, in the latter for the upper half.
  LP_DEVICE void gate_up(u32 layer, u32 active, u32 vectors, u32 tag) {
    constexpr int EACH = (kEpilogueColumns + 1) / 2;  // columns
    const int first = GateUp::first_tile(rank_block()), end = GateUp::first_tile(rank_block() + 1),
              sets = Epilogue::sets<GateUp>();
    for (int s = 0; s < sets; s++) {
      const int tile = first + 2 * s + half();
      const float weight_scale = tile < end ? scale_of(launch, layer, Scales::gate_up, tile * 16 + row()) : 1;
      take<GateUp>(s == 0 ? 1 : -1);
      const bool upper = kColumns > 1 && row() >= 8, odd = row() & 1;
      float v[EACH];
#pragma unroll
      for (int c = 0; c < kEpilogueColumns; c++) y[c] = scaled(y[c], weight_scale) * inverse[c];
#pragma unroll
      for (int c = 0; c < EACH; c++) {
        const int high = kEpilogueColumns - EACH + c;
        const float own = upper ? y[high] : y[c], other = shuffle_xor(upper ? y[c] : y[high], 8);
        const float gate = upper ? other : own, up = upper ? own : other;
        v[c] = silu(gate, up);
      }
      // Of two rows and one column a lane, then of the two rows that are four further: a word of k 2t, 2t + 1 | 2t + 8,
      // 2t + 9.
      static_assert(gate_up_k(0, 1) == 1 && gate_up_k(0, 2) == 2 && gate_up_k(0, 4) == 8 && gate_up_k(1, 0) == 4,
                    "words 0 and 1 are of an even tile, 2 and 3 of an odd one");
      u32 low;
      if constexpr (kColumns == 1) {
        low = bf16_pair(v[0], shuffle_xor(v[0], 1));
      } else {
        const float mine = odd ? v[1] : v[0], other = shuffle_xor(odd ? v[0] : v[1], 1);
        low = odd ? bf16_pair(other, mine) : bf16_pair(mine, other);
      }
      const u32 high = shuffle_xor(low, 4);
      const bool on = tile < end && row() % 8 < 4 && (kColumns == 8 || (row() < 4 && row() % 2 == 0));
      if (on && active >> word_column() & 1)
        put_word(launch.words + vectors + Vectors::activation +
                     ActivationVector::word(tile / 2, word_column(), tile % 2 * 2 + row() % 4 / 2),
                 low, high, tag, 0);
    }
  }
  /// Clears this warp's share of a turn's vectors: 0 means "not written yet".
  LP_DEVICE void clear(u32 turn) const {
#ifndef LP_KEEP_WORDS  // negative control
    constexpr u32 THREADS = kBlocks * kEpilogueWarps * 32;
    const u32 thread = (rank_block() * kEpilogueWarps + warp) * 32 + lane_index();
#pragma unroll 1
    for (u32 at = thread * 16; at < Vectors::bytes; at += THREADS * 16)
      store_16(launch.words + vectors_of(turn) + at, Quad{});
#endif
  }

 private:
  /// A lane sends one word of a tile to each rank, and reads one from each. With one column the word has two rows, and
  /// every other lane has one; otherwise it has the lane's row in its warp's columns.
  static constexpr int kToldValues = kColumns == 1 ? 2 : kEpilogueColumns;
  static_assert(kColumns == 1 || kEpilogueColumns == 4, "the columns of a warp fill a word");
  LP_DEVICE u32 told_word() const { return (kColumns == 1 ? row() / 2 : warp * 16 + row()) * 16; }
  LP_DEVICE bool has_told(u32 active) const { return kColumns == 1 ? row() % 2 == 0 : has_columns(active); }
  /// Whether one of this warp's columns is active.
  LP_DEVICE bool has_columns(u32 active) const {
    return kColumns == 1 || active >> column(0) & ((1 << kEpilogueColumns) - 1);
  }
  /// Complement of a value, never 0: a NaN may be any.
  LP_DEVICE static u32 told_bits(float v) { return v == v ? ~__float_as_uint(v) : ~0x7fffffffu; }
  LP_DEVICE void given_back(u32 buffer) {
    __syncwarp();
    if (lane_index() == 0) mbarrier_arrive(shared + Shared::partials_empty + 8 * buffer);
    set++;
  }
};

}  // namespace narrow
