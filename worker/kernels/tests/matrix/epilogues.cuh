// What follows the sums of a tile in the measurements: as much work and as many bytes as a layer has, on values that
// mean nothing.
#pragma once
#include "tests/matrix/product_tile.cuh"

/// Sums over the 8 lanes of the same t of 2 HALF values each: every lane keeps two of the sums.
template <int HALF> LP_DEVICE void halve(float* v, u32 lane) {
  const bool upper = lane & 2 * HALF;
#pragma unroll
  for (int i = 0; i < HALF; i++) {
    const float mine = upper ? v[HALF + i] : v[i], other = upper ? v[i] : v[HALF + i];
    v[i] = mine + shuffle_xor(other, 2 * HALF);
  }
  if constexpr (HALF > 2) halve<HALF / 2>(v, lane);
}

/// Byte of the next product's B, in blocks of BLOCK tokens: 16 bytes of (k16 step, half, token).
template <int BLOCK> LP_DEVICE u64 next_byte(int k16, int step, int token, int half) {
  return ((u64)(token / BLOCK) * k16 + step) * (BLOCK * 32) + (token % BLOCK / 8 * 2 + half) * 128 + token % 8 * 16;
}

template <int N, int ORDER, int EPILOGUE, int PAIR>
LP_DEVICE void finish_tile(Consumer<N, ORDER, PAIR>& consumer, const Product& p, int rows128, int block, float* sum) {
  constexpr int J = N / 8;
  using Shape = Ring<N, ORDER>;
  const int lane = consumer.lane, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5, step = rows128 * 8 + warp,
            token0 = block * N, tokens = p.token_tiles * N;
  if constexpr (EPILOGUE == kRaw) {
#pragma unroll
    for (int j = 0; j < J; j++)
#pragma unroll
      for (int c = 0; c < 4; c++)
        p.raw[(u64)(step * 16 + g + (c >> 1) * 8) * tokens + token0 + 8 * j + 2 * t + (c & 1)] = sum[4 * j + c];
  } else if constexpr (EPILOGUE == kPartial) {
    store_memory<N>(reinterpret_cast<float4*>(p.raw) + (u64)(rows128 * p.token_tiles + block) * (J * 256) + threadIdx.x,
                    sum);
  } else if constexpr (EPILOGUE == kSilu) {
    const float2* inverse = reinterpret_cast<const float2*>(p.inverse + token0) + t;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float2 scale = __ldg(inverse + 4 * j);
      float v[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float s = c ? scale.y : scale.x, gate = sum[4 * j + c] * s, up = sum[4 * j + 2 + c] * s;
        v[c] = gate * up * reciprocal_approx(1.0f + exp2_approx(gate * -1.4426950408889634f));
      }
      const u32 word = transpose_8x8(bf16_pair(v[0], v[1]));
      store_u32(
          p.next + next_byte<128>(p.row_tiles * 4, step / 2, token0 + 8 * j + g, t >> 1) + (step & 1) * 8 + (t & 1) * 4,
          word);
    }
  } else if constexpr (EPILOGUE == kResidual) {
    constexpr int PER = Shape::bytes / 4096;  // groups of 8 tokens a stage
    const float low = p.norm[step * 16 + g], high = p.norm[step * 16 + g + 8];
    float4* residual =
        reinterpret_cast<float4*>(p.residual) + (u64)(rows128 * p.token_tiles + block) * (J * 256) + threadIdx.x;
#pragma unroll
    for (int first = 0; first < J; first += PER) {
      const u32 at = consumer.wait() + threadIdx.x * 16;
#pragma unroll
      for (int j = first; j < first + PER && j < J; j++) {
        const Quad q = load_shared_16(at + (j - first) * 4096);
        float* x = sum + 4 * j;
        x[0] += __uint_as_float(q.x), x[1] += __uint_as_float(q.y), x[2] += __uint_as_float(q.z),
            x[3] += __uint_as_float(q.w);
        residual[j * 256] = make_float4(x[0], x[1], x[2], x[3]);
        const u32 upper = transpose_8x8(bf16_pair(x[0] * low, x[1] * low)),
                  lower = transpose_8x8(bf16_pair(x[2] * high, x[3] * high));
        u8* to = p.next + next_byte<128>(p.row_tiles * 8, step, token0 + 8 * j + g, 0) + t * 4;
        store_u32(to, upper);
        store_u32(to + 128, lower);
        x[0] = fmaf(x[0], x[0], x[2] * x[2]), x[1] = fmaf(x[1], x[1], x[3] * x[3]);
      }
      consumer.release(consumer.turn.slot);
      consumer.turn.next();
    }
    // Sums of squares over the warp's rows: the lanes of a token halve what they hold three times.
#pragma unroll
    for (int j = 0; j < J; j += 8) {
      float v[16];
#pragma unroll
      for (int i = 0; i < 16; i++) v[i] = sum[4 * (j + i / 2) + i % 2];
      halve<8>(v, lane);
      const int group = j + (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
      reinterpret_cast<float2*>(p.squares + (u64)step * tokens + token0 + 8 * group)[t] = make_float2(v[0], v[1]);
    }
  } else if constexpr (EPILOGUE == kRope) {
    const float2* inverse = reinterpret_cast<const float2*>(p.inverse + token0) + t;
    const float2* turns = reinterpret_cast<const float2*>(p.turns) + (u64)(token0 + 2 * t) * 64 + step % 8 * 8 + g;
#pragma unroll
    for (int j = 0; j < J; j++) {
      const float2 scale = __ldg(inverse + 4 * j), turn[2] = {__ldg(turns + 512 * j), __ldg(turns + 512 * j + 64)};
      float low[2], high[2];
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const float s = c ? scale.y : scale.x, x = sum[4 * j + c] * s, y = sum[4 * j + 2 + c] * s;
        low[c] = fmaf(x, turn[c].x, -(y * turn[c].y)), high[c] = fmaf(y, turn[c].x, x * turn[c].y);
      }
      u8* to = p.next + next_byte<128>(p.row_tiles * 8, step, token0 + 8 * j + g, 0) + t * 4;
      store_u32(to, transpose_8x8(bf16_pair(low[0], low[1])));
      store_u32(to + 128, transpose_8x8(bf16_pair(high[0], high[1])));
    }
  } else {
#pragma unroll
    for (int j = 0; j < J; j++) {
      u8* to = p.next + next_byte<N>(p.row_tiles * 8, step, token0 + 8 * j + g, 0) + t * 4;
      store_u32(to, transpose_8x8(bf16_pair(sum[4 * j], sum[4 * j + 1])));
      store_u32(to + 128, transpose_8x8(bf16_pair(sum[4 * j + 2], sum[4 * j + 3])));
    }
  }
}
