// Attention of a wide pass, the plain way: a warp walks the pages of a row and a KV head by loads of its own.
#pragma once

constexpr double square_root(double x) {
  double r = x;
  for (int i = 0; i < 40; i++) r = 0.5 * (r + x / r);
  return r;
}
constexpr float kScoreScale = (float)(1.4426950408889634 / square_root(kHeadWidth));  // scores in powers of two
constexpr u64 kAttentionItemBytes = 0;
constexpr u32 kAttentionItemPages = 1, kSpanPages = 16;

LP_DEVICE float rescale(float from, float to) {
  constexpr float kInteger = 12582912.0f;  // 1.5 * 2^23: the low bits of a float are its integer part
  return __uint_as_float(__float_as_uint(fmaxf(from - to, -127.0f) + (kInteger + 127.0f)) << 23);
}
/// Weighted values of some positions: of queries 2 t and 2 t + 1.
struct Weighted {
  float reference[2] = {kMinusInfinity, kMinusInfinity}, total[2] = {0, 0}, out[kDimTiles][4] = {};
  LP_DEVICE void add(const Weighted& o) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const float now = fmaxf(reference[c], o.reference[c]);
      if (now == kMinusInfinity) continue;
      const float mine = rescale(reference[c], now), others = rescale(o.reference[c], now);
      total[c] = total[c] * mine + o.total[c] * others;
#pragma unroll
      for (int j = 0; j < kDimTiles; j++)
#pragma unroll
        for (int e = c; e < 4; e += 2) out[j][e] = out[j][e] * mine + o.out[j][e] * others;
      reference[c] = now;
    }
  }
};
LP_DEVICE void stream_attention(Producer&, const Rows&, u32, u32) {}

LP_DEVICE Weighted attend_leaf(const Launch& launch, const Rows& rows, u32 row, u32 kv_head, u32 layer, u32 base, const u32* x, const u32* y, float inverse_q) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const u32 p = rows.position(row), low = rows.first_visible(row);
  const auto visible = [&](u32 at) { return base + at <= p && base + at >= low; };
  Weighted leaf;
  if (base > p || base + kLeafPositions <= low) return leaf;
  const u32 page = launch.page_table[rows.rows[row].slot * launch.page_stride + base / kPage];
  const u8* from = launch.kv + page_byte(layer, launch.kv_pages, page, kv_head) + base % kPage / kLeafPositions * kLeafBytes + lane * 16;
  float scale[4] = {kScoreScale, kScoreScale, kScoreScale, kScoreScale};
  if constexpr (kQkNorm) {
    float* stored = launch.k_scale + (((u64)layer * launch.kv_pages + page) * kKvHeads + kv_head) * kPage + base % kPage;
    const u32 fresh = rows.rows[row].first_position + rows.step;
    float k[2];
    for (int r = 0; r < 2; r++) {
      const u32 at = g + 8 * r, position = base + at;
      k[r] = 0;
      if (position > p) continue;
      if (position >= fresh) {
        const u32 source = rows.rows[row].first_row + (position - fresh);
        float squares[kDimTiles];
        for (int j = 0; j < kDimTiles; j++) squares[j] = __uint_as_float(load_relaxed_u32(launch.words + Words::squares + square_byte(kv_head, kQueriesPerKv * kDimTiles + j, source)));
        k[r] = rsqrt_approx(tree_sum<kDimTiles>(squares) * (1.0f / kHeadWidth) + __uint_as_float(LP_EPS));
        if (t == 0) stored[at] = k[r];
      } else {
        k[r] = load_relaxed_f32(stored + at);
      }
    }
    const float first = shuffle(inverse_q, 8 * t), second = shuffle(inverse_q, 8 * t + 4);
    scale[0] = kScoreScale * first * k[0];
    scale[1] = kScoreScale * second * k[0];
    scale[2] = kScoreScale * first * k[1];
    scale[3] = kScoreScale * second * k[1];
  }
  float score[4] = {}, weight[4];
  for (int j = 0; j < kDimTiles; j++) {
    const Quad k = load_relaxed_16(from + j * kFragment);
    mma_m16n8k16(score, k, x[j], y[j]);
  }
  for (int i = 0; i < 4; i++) {
    score[i] = visible(g + 8 * (i / 2)) ? score[i] * scale[i] : kMinusInfinity;
    leaf.reference[i & 1] = fmaxf(leaf.reference[i & 1], score[i]);
  }
  for (int c = 0; c < 2; c++) {
    for (int d = 4; d < 32; d *= 2) leaf.reference[c] = fmaxf(leaf.reference[c], shuffle_xor(leaf.reference[c], d));
    leaf.reference[c] = ceilf(leaf.reference[c]);
  }
  for (int i = 0; i < 4; i++) weight[i] = visible(g + 8 * (i / 2)) ? exp2_approx(score[i] - leaf.reference[i & 1]) : 0;
  for (int c = 0; c < 2; c++) {
    leaf.total[c] = weight[c] + weight[2 + c];
    for (int d = 4; d < 32; d *= 2) leaf.total[c] += shuffle_xor(leaf.total[c], d);
  }
  const u32 b0 = transpose_8x8(bf16_pair(weight[0], weight[1])), b1 = transpose_8x8(bf16_pair(weight[2], weight[3]));
  const u32 early = (visible(2 * t) ? 0xffffu : 0) | (visible(2 * t + 1) ? 0xffff0000u : 0);
  const u32 late = (visible(2 * t + 8) ? 0xffffu : 0) | (visible(2 * t + 9) ? 0xffff0000u : 0);
  for (int j = 0; j < kDimTiles; j++) {
    Quad v = load_relaxed_16(from + kLeafV + j * kFragment);
    v.x &= early, v.y &= early, v.z &= late, v.w &= late;
    mma_m16n8k16(leaf.out[j], v, b0, b1);
  }
  return leaf;
}
LP_DEVICE void attend(Consumer& consumer, const Rows& rows, u32 layer, u32 tag, u32 generation) {
  const Launch& launch = consumer.launch;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (u32 item = blockIdx.x * kConsumers + consumer.warp; item < rows.count * kKvHeads; item += kBlocks * kConsumers) {
    const u32 row = item / kKvHeads, kv_head = item % kKvHeads;
    if (!rows.active(row)) continue;
    wait_queries(launch, kv_head, generation);
    u32 x[kDimTiles], y[kDimTiles];
    float squares[kDimTiles];
    for (int j = 0; j < kDimTiles; j++) {
      x[j] = y[j] = 0, squares[j] = 0;
      if (g >= kQueriesPerKv) continue;
      x[j] = load_relaxed_u32(launch.words + Words::queries + query_byte(kv_head, g * kDimTiles + j, 0, row) + t * 4);
      y[j] = load_relaxed_u32(launch.words + Words::queries + query_byte(kv_head, g * kDimTiles + j, 1, row) + t * 4);
      if (kQkNorm) squares[j] = __uint_as_float(load_relaxed_u32(launch.words + Words::squares + square_byte(kv_head, g * kDimTiles + j, row)));
    }
    const float inverse_q = rsqrt_approx(tree_sum<kDimTiles>(squares) * (1.0f / kHeadWidth) + __uint_as_float(LP_EPS));
    Weighted all;
#pragma unroll 1
    for (u32 begin = 0; begin < rows.pages(row); begin += kSpanPages) {
      const auto share = [&](u32 which) {
        Weighted sum;
#pragma unroll 1
        for (u32 i = begin + which; i < begin + kSpanPages && i < rows.pages(row); i += 4) {
          Weighted page;
#pragma unroll 1
          for (u32 l = 0; l < 4; l++) page.add(attend_leaf(launch, rows, row, kv_head, layer, (rows.first_page(row) + i) * kPage + l * kLeafPositions, x, y, inverse_q));
          sum.add(page);
        }
        return sum;
      };
      Weighted a = share(0);
      a.add(share(1));
      Weighted b = share(2);
      b.add(share(3));
      a.add(b);
      all.add(a);
    }
    for (int c = 0; c < 2; c++) {
      const u32 query = 2 * t + c;
      if (query >= (u32)kQueriesPerKv) continue;
      const float inverse = reciprocal_approx(all.total[c]);
      for (int j = 0; j < kDimTiles; j++)
        for (int h = 0; h < 2; h++)
          store_u16(launch.words + Words::attention_out + vector_byte((kv_head * kQueriesPerKv + query) * kDimTiles + j, row, h) + g * 2, bf16_pair(all.out[j][c + 2 * h] * inverse, 0));
    }
  }
  publish(launch, Words::outputs_ready);
}
