// Bits of wgmma, A in registers, against chains of mma.sync: K is 16 leaves of kLeafSteps k16 steps, whose sums join in
// one of four orders.
//
// Launch: any number of blocks of one warpgroup; each has 64 rows by COLUMNS columns of its own data. Shared memory: B
// of a leaf, [k16 step][8 columns][2 halves of k] [column][8 k] bf16. Scratch: [block][engine][kLevels][COLUMNS /
// 2][thread] f32: of a thread's results the pending sums, then the leaf and, in the end, the result. With `swapped`
// wgmma takes leaves 7 and 8 in each other's place: the negative control.
#include "ptx/ptx.cuh"
#include "tests/matrix/fill.cuh"
#include "tests/matrix/wgmma.cuh"

enum LeafOrder { kOneChain, kInOrder, kBinaryTree, kFourQuads };
constexpr u32 kLeafSteps = 8, kLeaves = 16, kThreads = 128, kLevels = 6, kResult = 5;
struct Counts {
  u64 different, finite;  // results with other bits; results that are finite and not zero
};
extern __shared__ __align__(1024) u8 bits_memory[];

/// Adds leaf `n` of result `i`; `open` are its pending sums. Returns the sum of all so far, which after the last leaf
/// is the result.
LP_DEVICE float join_leaf(float* open, u32 stride, u32 order, u32 n, float leaf) {
  const auto tree = [&](float* levels, u32 index, float sum) {
    for (u32 level = 0; index >> level & 1; level++) sum = levels[level * stride] + sum;
    u32 level = 0;
    while (index >> level & 1) level++;
    levels[level * stride] = sum;
    return sum;
  };
  if (order == kOneChain) return leaf;
  if (order == kInOrder) return open[0] = (n ? open[0] : 0.0f) + leaf;
  if (order == kBinaryTree) return tree(open, n, leaf);
  const float quad = (n % 4 ? open[0] : 0.0f) + leaf;
  open[0] = quad;
  return n % 4 == 3 ? tree(open + stride, n / 4, quad) : quad;
}

template <int COLUMNS>
LP_DEVICE void compare_bits(float* scratch, Counts* counts, u32 order, u32 kind, u32 seed, u32 swapped) {
  constexpr u32 R = COLUMNS / 2, STRIDE = R * kThreads;
  const u32 thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3,
            b = shared_address(bits_memory);
  float* pending = scratch + (u64)blockIdx.x * 2 * kLevels * STRIDE + thread;
  // Values of a block: [leaf][step][64 rows, then COLUMNS columns][16 k].
  const auto value = [&](u32 leaf, u32 step, u32 row, u32 k) -> u32 {
    return value_of((((u64)blockIdx.x * kLeaves + leaf) * kLeafSteps + step) * ((64 + COLUMNS) * 16) + row * 16 + k,
                    seed, kind);
  };
  const auto two = [&](u32 leaf, u32 step, u32 row, u32 k) {
    return value(leaf, step, row, k) | value(leaf, step, row, k + 1) << 16;
  };
  Quad a[kLeafSteps];
  const auto fetch = [&](u32 leaf) {
    __syncthreads();
    for (u32 i = thread; i < kLeafSteps * COLUMNS * 16; i += kThreads) {
      const u32 step = i / (COLUMNS * 16), column = i / 16 % COLUMNS, k = i % 16;
      store_shared_u16(b + step * (COLUMNS * 32) + column / 8 * 256 + k / 8 * 128 + column % 8 * 16 + k % 8 * 2,
                       value(leaf, step, 64 + column, k));
    }
#pragma unroll
    for (u32 s = 0; s < kLeafSteps; s++) {
      const u32 row = warp * 16 + g, k = 2 * t;
      a[s] =
          Quad{two(leaf, s, row, k), two(leaf, s, row + 8, k), two(leaf, s, row, k + 8), two(leaf, s, row + 8, k + 8)};
    }
    fence_async_shared();  // orders these stores before the products that read B
    __syncthreads();
  };

  float sum[R];
#pragma unroll
  for (u32 i = 0; i < R; i++) sum[i] = 0;
#pragma unroll 1
  for (u32 n = 0; n < kLeaves; n++) {
    fetch(swapped && (n == 7 || n == 8) ? 15 - n : n);
    pin<R>(sum);
    wgmma_fence();
#pragma unroll
    for (u32 s = 0; s < kLeafSteps; s++)
      wgmma<COLUMNS>(sum, a[s], wgmma_operand(b + s * (COLUMNS * 32)), s > 0 || (order == kOneChain && n > 0));
    wgmma_commit();
    wgmma_wait<0>();
    pin<R>(sum);
    if (order == kOneChain && n + 1 < kLeaves) continue;
    float* result = pending + kResult * STRIDE;
#pragma unroll
    for (u32 i = 0; i < R; i++) result[i * kThreads] = sum[i];
#pragma unroll 1
    for (u32 i = 0; i < R; i++)
      result[i * kThreads] = join_leaf(pending + i * kThreads, STRIDE, order, n, result[i * kThreads]);
  }
  // The same by mma.sync. A chain that goes on over leaves waits in the scratch.
  float* other = pending + kLevels * STRIDE;
  u32 different = 0, finite = 0;
#pragma unroll 1
  for (u32 n = 0; n < kLeaves; n++) {
    fetch(n);
#pragma unroll 1
    for (u32 j = 0; j < COLUMNS / 8; j++) {
      float chain[4] = {};
      if (order == kOneChain && n > 0)
        for (u32 c = 0; c < 4; c++) chain[c] = other[(4 * j + c) * kThreads];
#pragma unroll
      for (u32 s = 0; s < kLeafSteps; s++) {
        const u32 from = b + s * (COLUMNS * 32) + j * 256 + g * 16 + t * 4;
        mma_m16n8k16(chain, a[s], load_shared_u32(from), load_shared_u32(from + 128));
      }
#pragma unroll
      for (u32 c = 0; c < 4; c++) {
        float* open = other + (4 * j + c) * kThreads;
        const float joined = order == kOneChain ? (*open = chain[c]) : join_leaf(open, STRIDE, order, n, chain[c]);
        if (n + 1 < kLeaves) continue;
        different += __float_as_uint(joined) != __float_as_uint(pending[kResult * STRIDE + (4 * j + c) * kThreads]);
        finite += joined != 0 && joined - joined == 0;
      }
    }
  }
  atomicAdd(&counts->different, (u64)different);
  atomicAdd(&counts->finite, (u64)finite);
}

#define LP_BITS(COLUMNS)                                                                           \
  extern "C" __global__ void __launch_bounds__(128, 1)                                             \
      bits_##COLUMNS(float* scratch, Counts* counts, u32 order, u32 kind, u32 seed, u32 swapped) { \
    compare_bits<COLUMNS>(scratch, counts, order, kind, seed, swapped);                            \
  }
LP_BITS(64)
LP_BITS(128)
LP_BITS(160)
LP_BITS(192)
LP_BITS(256)

/// K and queries may change places: adds to `counts` the results of m16n8k16, chains of 16, that differ when A and B
/// do. A warp has 8 rows of either.
extern "C" __global__ void swapped_operands(Counts* counts, u32 kind, u32 seed) {
  constexpr u32 kSteps = 16;
  const u32 warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  float one[4] = {}, other[4] = {};
  for (u32 s = 0; s < kSteps; s++) {
    const auto word = [&](u32 which, u32 k) {
      const u64 at = (((u64)warp * kSteps + s) * 2 + which) * 128 + g * 16 + k;
      return (u32)value_of(at, seed, kind) | (u32)value_of(at + 1, seed, kind) << 16;
    };
    const u32 a0 = word(0, 2 * t), a1 = word(0, 2 * t + 8), b0 = word(1, 2 * t), b1 = word(1, 2 * t + 8);
    mma_m16n8k16(one, Quad{a0, 0, a1, 0}, b0, b1);
    mma_m16n8k16(other, Quad{b0, 0, b1, 0}, a0, a1);
  }
  // one[c] is (row g of a, row 2t + c of b), which `other` has in lane 4 (2t + c) + g / 2, place g % 2.
  u32 different = 0, finite = 0;
  for (u32 c = 0; c < 2; c++) {
    const float even = shuffle(other[0], (2 * t + c) * 4 + g / 2), odd = shuffle(other[1], (2 * t + c) * 4 + g / 2);
    different += __float_as_uint(one[c]) != __float_as_uint(g & 1 ? odd : even);
    finite += one[c] != 0 && one[c] - one[c] == 0;
  }
  atomicAdd(&counts->different, (u64)different);
  atomicAdd(&counts->finite, (u64)finite);
}

/// Weights of a softmax may be taken against any integer not under the largest score: adds to `counts` the x = f - n, f
/// in (-1, 0] in steps of 2^-12, n to 120, for which 2^x is not 2^f 2^-n to the bit.
extern "C" __global__ void shifted_powers(Counts* counts) {
  const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  const float f = -(float)(i % 4096) / 4096, n = (float)(i / 4096);
  if (n > 120) return;
  atomicAdd(&counts->different,
            (u64)(__float_as_uint(exp2_approx(f - n)) != __float_as_uint(exp2_approx(f) * exp2_approx(-n))));
  atomicAdd(&counts->finite, 1ull);
}
