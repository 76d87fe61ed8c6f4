// The kernels of matrix_decoder.cu but attention's: every bit that they write against plain arithmetic, and their
// times; with --energy what products draw. The model is that of the compiler's LP_ defines, or Llama 3.1 8B; weights
// are random.
//
// Products are checked on the inputs that the kernels themselves have written, sums by chains of mma.sync.
#ifndef LP_LAYERS
#define LP_LAYERS 32
#define LP_COLUMNS 2048
#endif
#include "tests/matrix/shape.cuh"
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_runtime.h>
#include <vector>
#include "matrix_decoder.cu"
#include "tests/matrix/energy.cuh"
#include "tests/matrix/fill.cuh"
#include "tests/matrix/timing.cuh"

using namespace matrix;
enum What { kHiddenState, kX, kSquares, kInverse, kQueries, kPages, kRest, kHeadSquares, kActivation, kLogits,
            kBestWords, kChosen, kNextRows, kWhat };
static const char* const kNames[] = {"residual", "x", "squares", "1 / rms", "queries", "pages", "rest of V",
                                     "squares of heads", "activation", "logits", "best of 16 logits", "tokens",
                                     "rows of the next step"};
__device__ u64 wrong[kWhat], checked[kWhat];
LP_DEVICE void expect(What what, u32 found, u32 expected) {
  atomicAdd(&checked[what], 1);
  if (found != expected) atomicAdd(&wrong[what], 1);
}
LP_DEVICE u32 at_u32(const u8* p) { return *(const u32*)p; }
LP_DEVICE u32 at_u16(const u8* p) { return *(const u16*)p; }
LP_DEVICE u32 bf16(float v) { return bf16_pair(v, 0) & 0xffff; }
template <class F> LP_DEVICE void each(u64 count, const F& f) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) f(i);
}

/// Where tiles lie: units of two in the share of a block, as weights are packed.
template <class P> __global__ void deal(u32* tiles) {
  for (int block = 0; block < kBlocks; block++) {
    const int begin = P::first_tile(block), end = P::first_tile(block + 1);
    for (int tile = begin; tile < end; tile++) {
      const int unit = begin + (tile - begin) / 2 * 2, pair = unit + 1 < end;
      tiles[tile] = (unit * P::steps + tile - unit) << 1 | pair;
    }
  }
}
/// sums [token][row] f32, a warp a row tile by 8 tokens.
template <class P> __global__ void reference(const u8* weights, const u32* tiles, const u8* vectors, float* sums,
                                             u32 tokens) {
  const u32 lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  for (u32 i = (blockIdx.x * blockDim.x + threadIdx.x) / 32; i < P::tiles * (tokens / 8);
       i += gridDim.x * blockDim.x / 32) {
    const u32 tile = i % P::tiles, token = i / P::tiles * 8, word = tiles[tile];
    float leaf[4][P::leaves];
#pragma unroll
    for (int n = 0; n < P::leaves; n++) {
      float c[4] = {};
#pragma unroll 1
      for (int s = n * P::leaf_steps; s < (n + 1) * P::leaf_steps; s++) {
        const Quad a = *(const Quad*)(weights + ((u64)(word >> 1) + (u64)s * (1 + (word & 1))) * 512 + lane * 16);
        const u8* b = vectors + vector_byte(P::steps, s, token + g, 0) + t * 4;
        mma_m16n8k16(c, a, at_u32(b), at_u32(b + 128));
      }
      for (int k = 0; k < 4; k++) leaf[k][n] = c[k];
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
      sums[(u64)(token + 2 * t + k % 2) * (P::tiles * 16) + tile * 16 + g + k / 2 * 8] =
          leaf_sum<P::leaves, P::group>(leaf[k]);
  }
}

LP_DEVICE u64 residual_of(u32 tile, u32 row, u32 token) {
  return Memory::residual + residual_byte(tile, token) + (row % 8 * 4 + token % 8 / 2) * 16 +
         (row / 8 * 2 + token % 2) * 4;
}
/// After embed (`before` null) or a product that is added to the residual.
__global__ void check_hidden(Launch launch, const u8* before, const float* sums, u32 norm) {
  each((u64)launch.row_count * kHiddenTiles, [&](u64 i) {
    const u32 token = i / kHiddenTiles, tile = i % kHiddenTiles;
    float squares[16];
    for (u32 row = 0; row < 16; row++) {
      const u32 k = tile * 16 + row, id = launch.rows[token].token;
      float h;
      if (before) h = *(const float*)(before + residual_of(tile, row, token)) + sums[(u64)token * kHidden + k];
      else h = from_bf16(kTied ? at_u16(launch.weights + kHeadOffset + head_byte(id, k))
                               : at_u16(launch.embedding + ((u64)id * kHidden + k) * 2));
      expect(kHiddenState, at_u32(launch.words + residual_of(tile, row, token)), __float_as_uint(h));
      expect(kX, at_u16(launch.words + Memory::x + vector_byte(kHiddenTiles, tile, token, row / 8) + row % 8 * 2),
             bf16(h * from_bf16(at_u16(launch.gamma + ((u64)norm * kHidden + k) * 2))));
      squares[row] = h * h;
    }
    expect(kSquares, at_u32(launch.words + matrix::squares_byte(tile, token)),
           __float_as_uint(tree_sum<16>(squares)));
  });
}
__global__ void check_norms(Launch launch) {
  each(launch.row_count, [&](u64 token) {
    const float* squares = (const float*)(launch.words + matrix::squares_byte(0, token));
    float leaves[16] = {};
    for (int leaf = 0; leaf < kHiddenLeaves; leaf++) {
      constexpr int EIGHTS = (kHiddenSteps + 7) / 8;
      float eights[EIGHTS];
      for (int e = 0; e < EIGHTS; e++) {
        float v[8] = {};
        for (int k = 8 * e; k < 8 * e + 8 && k < kHiddenSteps; k++)
          v[k % 8] = squares[(leaf * kHiddenSteps + k) * matrix::kTokens];
        eights[e] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
      }
      if ((EIGHTS & (EIGHTS - 1)) == 0) {
        for (int d = 1; d < EIGHTS; d *= 2)
          for (int e = 0; e < EIGHTS; e += 2 * d) eights[e] += eights[e + d];
      } else {
        for (int e = 1; e < EIGHTS; e++) eights[0] += eights[e];
      }
      leaves[leaf] = eights[0];
    }
    const float sum = tree_sum<16>(leaves);
    expect(kInverse, at_u32(launch.words + Memory::inverse + token * 4),
           __float_as_uint(rsqrt_approx(sum * (1.0f / kHidden) + __uint_as_float(LP_EPS))));
  });
}
__global__ void check_qkv(Launch launch, const float* sums, u32 layer) {
  constexpr u32 GROUP = (kQueriesPerKv + 2) * kDimTiles;
  each((u64)launch.row_count * Qkv::tiles, [&](u64 i) {
    const u32 token = i / Qkv::tiles, tile = i % Qkv::tiles, kv_head = tile / GROUP, head = tile % GROUP / kDimTiles,
              piece = tile % kDimTiles;
    const Row& row = launch.rows[token];
    const u32 at = row.position % kPage, page = launch.page_table[row.slot * launch.page_stride + row.position / kPage];
    const bool key = head == kQueriesPerKv, value = head > kQueriesPerKv;
    const float inverse = *(const float*)(launch.words + Memory::inverse + token * 4);
    float v[16], squares[16];
    for (int r = 0; r < 16; r++) {
      v[r] = sums[(u64)token * (Qkv::tiles * 16) + tile * 16 + r] * inverse;
      if (kQkvBias) v[r] += launch.bias[(u64)layer * (Qkv::tiles * 16) + tile * 16 + r];
      squares[r] = v[r] * v[r];
      if (kQkNorm && !value) v[r] *= launch.qk_norm[(layer * 2 + key) * kHeadDim + piece * 16 + r];
    }
    const u32 of = key ? kHeads + kv_head : kv_head * kQueriesPerKv + head;
    if (kQkNorm && !value)
      expect(kHeadSquares,
             at_u32(launch.words + Memory::head_squares +
                    (((u64)token * (kHeads + kKvHeads) + of) * kDimTiles + piece) * 4),
             __float_as_uint(tree_sum<16>(squares)));
    for (int r = 0; r < 8 && !value; r++) {
      const float* turn = launch.rope + ((u64)row.position * (kHeadDim / 2) + piece * 8 + r) * 2;
      const float low = v[r], high = v[r + 8];
      v[r] = fmaf(low, turn[0], -(high * turn[1]));
      v[r + 8] = fmaf(high, turn[0], low * turn[1]);
    }
    const u8* in = launch.kv + page_byte(layer, launch.kv_pages, page, kv_head);
    for (int r = 0; r < 16; r++) {
      const u32 dim = piece * 16 + r;
      if (key) expect(kPages, at_u16(in + k_byte(at, dim)), bf16(v[r]));
      else if (value) expect(kPages, at_u16(in + v_byte(at, dim)), bf16(v[r]));
      else
        expect(kQueries, at_u16(launch.words + Memory::queries + (((u64)token * kHeads + of) * kHeadDim + dim) * 2),
               bf16(v[r]));
    }
    const bool last = row.first_row != token &&
                      (token + 1 == launch.row_count || launch.rows[token + 1].first_row != row.first_row);
    for (u32 p = at + 1; p < kPage && value && last; p++)
      for (int r = 0; r < 16; r++) expect(kRest, at_u16(in + v_byte(p, piece * 16 + r)), 0);
  });
}
__global__ void check_activation(Launch launch, const float* sums) {
  each((u64)launch.row_count * GateUp::tiles * 8, [&](u64 i) {
    const u32 token = i / (GateUp::tiles * 8), tile = i / 8 % GateUp::tiles, row = i % 8, k = gate_up_k(tile, row);
    const float inverse = *(const float*)(launch.words + Memory::inverse + token * 4);
    const float* of = sums + (u64)token * (GateUp::tiles * 16) + tile * 16 + row;
    const float gate = of[0] * inverse, up = of[8] * inverse;
    expect(kActivation,
           at_u16(launch.words + Memory::activation + vector_byte(Down::steps, tile / 2, token, k / 8) + k % 8 * 2),
           bf16(gate * reciprocal_approx(1.0f + exp2_approx(gate * -1.44269504f)) * up));
  });
}
__global__ void check_logits(Launch launch, Pass pass, const float* sums) {
  each((u64)pass.sample_count * kVocab, [&](u64 i) {
    const u32 column = i / kVocab, id = i % kVocab;
    const float inverse = *(const float*)(launch.words + Memory::inverse + pass.samples[column] * 4);
    expect(kLogits, __float_as_uint(launch.logits[(u64)column * ((kVocab + 15) / 16 * 16) + id]),
           __float_as_uint(sums[(u64)column * (Head::tiles * 16) + id] * inverse));
  });
}
/// 1 / rms of some columns so that all their logits are NaN, or equal (both zeros), or infinite.
__global__ void make_odd(Launch launch, Pass pass) {
  float* inverse = reinterpret_cast<float*>(launch.words + Memory::head_inverse);
  const u32 odd[3] = {0x7fc00000, 0, 0x7f800000};
  each(pass.sample_count, [&](u64 column) {
    if (column % 5 > 1) inverse[column] = __uint_as_float(odd[column % 5 - 2]);
  });
}
LP_DEVICE void expect_u64(What what, u64 found, u64 expected) {
  expect(what, (u32)found, (u32)expected);
  expect(what, (u32)(found >> 32), (u32)(expected >> 32));
}
LP_DEVICE u64 word_at(const Launch& launch, u32 column, u32 tile) {
  return *(const u64*)(launch.words + best_byte(column, tile));
}
__global__ void check_words(Launch launch, Pass pass, const float* sums) {
  each((u64)pass.sample_count * kVocabTiles, [&](u64 i) {
    const u32 column = i / kVocabTiles, tile = i % kVocabTiles;
    const float inverse = *(const float*)(launch.words + Memory::head_inverse + column * 4);
    Best best;
    for (u32 id = tile * 16; id < tile * 16 + 16 && id < kVocab; id++)
      best.offer(sums[(u64)column * (Head::tiles * 16) + id] * inverse, id);
    const u32 bits = __float_as_uint(best.value == 0 ? 0.0f : best.value), key = bits >> 31 ? ~bits : bits | 1u << 31;
    expect_u64(kBestWords, word_at(launch, column, tile), (u64)key << 32 | (0xffffffffu - best.id));
  });
}
/// The tokens, and the rows of the next step, out of `launch.rows`.
__global__ void check_tokens(Launch launch, Pass pass) {
  each(pass.sample_count, [&](u64 column) {
    u64 best = 0;
    for (u32 tile = 0; tile < kVocabTiles; tile++) best = max(best, word_at(launch, column, tile));
    const u32 token = 0xffffffffu - (u32)best;
    expect_u64(kChosen, launch.tokens[column], (u64)launch.epoch << 32 | token);
    const Row &before = launch.rows[pass.samples[column]], &row = pass.next[pass.samples[column]];
    const u32 found[] = {row.token, row.position, row.slot, row.first_row, row.first_position, row.last_position},
              expected[] = {token,      before.position + 1, before.slot, before.first_row, before.position + 1,
                            before.last_position};
    for (int i = 0; i < 6; i++) expect(kNextRows, found[i], expected[i]);
  });
}
__global__ void random_floats(float* to, u64 count, u32 seed) {
  each(count, [&](u64 i) { to[i] = from_bf16(value_of(i, seed, 0)); });
}

static Launch launch;
static Pass pass;
static u8* before;
static float* sums;
static u32 multiprocessors;
using Kernel = void (*)(Launch, Pass, u32);
template <class K> static void start(K kernel, u32 layer, bool product = true) {
  if (product) CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kProductBytes));
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors / 4 * 4, config.blockDim = product ? kThreads : kVectorThreads;
  config.dynamicSmemBytes = product ? kProductBytes : 0;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, kernel, launch, pass, layer));
}
template <class T> static T* allocate(u64 count) {
  T* p;
  CHECK(cudaMalloc(&p, count * sizeof(T)));
  return p;
}
template <class T> static T* upload(const std::vector<T>& v) {
  T* p = allocate<T>(v.size());
  CHECK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
constexpr u32 kSlots = 512, kStride = 64;
/// Half of the rows a prompt from position 0 on, a quarter one from 37 on, the rest decode.
static void make_rows(u32 count) {
  std::vector<Row> rows;
  const auto sequence = [&](u32 slot, u32 position, u32 length) {
    const u32 first = rows.size();
    for (u32 i = 0; i < length; i++)
      rows.push_back(Row{(u32)(rows.size() * 7919 % kVocab), position + i, slot, first, position, kRowSample, ~0u, 0});
  };
  sequence(0, 0, count / 2);
  sequence(1, 37, count / 4);
  for (u32 slot = 2; rows.size() < count; slot++) sequence(slot % kSlots, slot * 53 % 4000, 1);
  std::vector<u32> samples;
  for (u32 row = 0; row < count && samples.size() < kMostSamples; row += 3) samples.push_back(row);
  launch.rows = upload(rows), launch.row_count = count, pass.blocks = ~0u >> (32 - token_blocks(count));
  pass.next = upload(rows);
  pass.samples = upload(samples), pass.sample_count = samples.size();
}
template <class P> static void multiply_plainly(u64 weights, u32 tiles, u64 vectors, u32 tokens) {
  reference<P><<<1024, 256>>>(launch.weights + weights, pass.tiles + tiles, launch.words + vectors, sums,
                              (tokens + 7) / 8 * 8);
}
static void keep() {
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(before, launch.words, Memory::bytes, cudaMemcpyDeviceToDevice));
}
/// A product's kernels, by how they cut tiles.
struct Kernels {
  Kernel by[3];
  bool quads;
  Kernel of(Cut cut) const { return by[quads ? (int)cut : 0]; }
};
static const Kernels kQkvKernels{{matrix_qkv, matrix_qkv_halves, matrix_qkv_quads}, kInQuads<Qkv>},
    kOutKernels{{matrix_out, matrix_out_halves, matrix_out_quads}, kInQuads<O>},
    kDownKernels{{matrix_down, matrix_down_halves, matrix_down_quads}, kInQuads<Down>};
static const char* const kCuts[] = {"", ", halves", ", quads"};
/// The last launch of a pass in a chain: whether the host wants it to end, and what is told of that before and after.
/// True: as expected, and tokens only of steps that the chain has.
static bool check_end(u32 step, u32 wish, u32 stopped, u32 stopped_after, u32 told, bool chooses) {
  const u64 none = ~0ull;
  const u32 control[2] = {wish, 0};
  CHECK(cudaMemcpy(launch.tokens, &none, sizeof none, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(launch.control, control, sizeof control, cudaMemcpyHostToDevice));
  CHECK(cudaMemcpy(pass.stopped, &stopped, sizeof stopped, cudaMemcpyHostToDevice));
  pass.step = step;
  start(matrix_choose, 0, false);
  pass.step = 0;
  u64 token;
  u32 found[3];
  CHECK(cudaMemcpy(&token, launch.tokens, sizeof token, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(found, pass.stopped, sizeof stopped, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(found + 1, launch.control, sizeof control, cudaMemcpyDeviceToHost));
  const bool good = found[0] == stopped_after && found[2] == told && (token != none) == chooses;
  if (!good) printf("step %u, wish %u, stopped %u: now %u, told %u\n", step, wish, stopped, found[0], found[2]);
  return good;
}
static bool check_ends() {
  make_rows(8);
  // What an earlier chain left is of no meaning to a first step.
  return check_end(0, 0, 5, 0, 0, true) & check_end(0, 1, 5, 1, 1, true) & check_end(3, 0, 0, 0, 0, true) &
         check_end(3, 1, 0, 4, 4, true) & check_end(3, 0, 3, 3, 0, false) & check_end(3, 1, 1, 1, 0, false);
}
static bool check(u32 rows, Cut cut) {
  make_rows(rows);
  const u32 layer = kLayers - 1;
  const u64 weights = layer * kLayerBytes;
  CHECK(cudaMemset(launch.kv, 0xff, (u64)kLayers * launch.kv_pages * kKvHeads * kPageBytes));
  CHECK(cudaMemset(launch.words, 0xff, Memory::bytes));
  fill<<<1024, 256>>>((u16*)(launch.words + Memory::attention_out), (u64)kTokenBlocks * O::steps * kStepBytes / 2, 9,
                      0);
  const u64 none[kWhat] = {};
  CHECK(cudaMemcpyToSymbol(wrong, none, sizeof none));
  CHECK(cudaMemcpyToSymbol(checked, none, sizeof none));
  CHECK(cudaDeviceSynchronize());
  start(matrix_embed, 0, false);
  check_hidden<<<1024, 256>>>(launch, nullptr, nullptr, 0);
  start(matrix_norms, 0, false);
  start(kQkvKernels.of(cut), layer);
  check_norms<<<1024, 256>>>(launch);
  multiply_plainly<Qkv>(weights, Tiles::qkv, Memory::x, rows);
  check_qkv<<<1024, 256>>>(launch, sums, layer);
  keep();
  start(kOutKernels.of(cut), layer);
  multiply_plainly<O>(weights + kOOffset, Tiles::out, Memory::attention_out, rows);
  check_hidden<<<1024, 256>>>(launch, before, sums, 2 * layer + 1);
  start(matrix_norms, 0, false);
  start(matrix_gate_up, layer);
  check_norms<<<1024, 256>>>(launch);
  multiply_plainly<GateUp>(weights + kGateUpOffset, Tiles::gate_up, Memory::x, rows);
  check_activation<<<1024, 256>>>(launch, sums);
  keep();
  start(kDownKernels.of(cut), layer);
  multiply_plainly<Down>(weights + kDownOffset, Tiles::down, Memory::activation, rows);
  check_hidden<<<1024, 256>>>(launch, before, sums, 2 * layer + 2);
  start(matrix_norms, 0, false);
  start(matrix_gather, 0, false);
  start(matrix_head, 0);
  check_norms<<<1024, 256>>>(launch);
  multiply_plainly<Head>(kHeadOffset, Tiles::head, Memory::head_x, pass.sample_count);
  check_logits<<<1024, 256>>>(launch, pass, sums);
  make_odd<<<1, 256>>>(launch, pass);
  CHECK(cudaDeviceSynchronize());
  start(matrix_head_choose, 0);
  start(matrix_choose, 0, false);
  check_words<<<1024, 256>>>(launch, pass, sums);
  // A slot that is given back too early is overwritten seldom, and on some machines only.
  for (int again = 0; again < 30; again++) {
    start(matrix_head_choose, 0);
    check_words<<<1024, 256>>>(launch, pass, sums);
  }
  check_tokens<<<1024, 256>>>(launch, pass);
  CHECK(cudaDeviceSynchronize());
  u64 bad[kWhat], all[kWhat];
  CHECK(cudaMemcpyFromSymbol(bad, wrong, sizeof bad));
  CHECK(cudaMemcpyFromSymbol(all, checked, sizeof all));
  bool good = true;
  for (int i = 0; i < kWhat; i++) {
    if (bad[i]) printf("%u rows%s: %llu of %llu wrong: %s\n", rows, kCuts[(int)cut], bad[i], all[i], kNames[i]);
    good &= !bad[i];
  }
  if (good) printf("%u rows%s: all bits as expected\n", rows, kCuts[(int)cut]);
  return good;
}
template <class P> static void time_product(const char* name, Kernel kernel, u32 columns) {
  const float ms = milliseconds<7>([&] {
    for (u32 layer = 0; layer < kLayers; layer++) start(kernel, layer);
  });
  printf("  %-12s %8.3f ms of %d layers, %5.0f TFLOP/s\n", name, ms, kLayers,
         2.0 * P::tiles * 16 * P::steps * 16 * columns * kLayers / ms * 1e-9);
}
static void time_all(u32 rows, Cut cut) {
  make_rows(rows);
  printf("%u rows%s\n", rows, kCuts[(int)cut]);
  const float ms = milliseconds<7>([&] {
    start(matrix_embed, 0, false);
    for (u32 layer = 0; layer < kLayers; layer++) {
      start(matrix_norms, 0, false);
      start(kQkvKernels.of(cut), layer);
      start(kOutKernels.of(cut), layer);
      start(matrix_norms, 0, false);
      start(matrix_gate_up, layer);
      start(kDownKernels.of(cut), layer);
    }
  });
  printf("  %-12s %8.3f ms\n", "all", ms);
  time_product<Qkv>("qkv", kQkvKernels.of(cut), rows);
  time_product<O>("o", kOutKernels.of(cut), rows);
  if (cut == Cut::kPair) time_product<GateUp>("gate/up", matrix_gate_up, rows);
  time_product<Down>("down", kDownKernels.of(cut), rows);
}
/// Products of passes of so many rows, which read what the layers' first products have written.
static void print_energies(u32 rows) {
  make_rows(rows);
  printf("%u rows\n", rows);
  // As products.rs cuts K of such passes of 8b.
  const Cut qkv = rows > 512 || rows == 256 ? Cut::kPair : Cut::kHalves,
            out = rows == 640 ? Cut::kHalves : rows > 256 ? Cut::kPair : rows > 128 ? Cut::kHalves : Cut::kQuads,
            down = rows == 384 || rows == 640 ? Cut::kQuads : rows == 512 ? Cut::kHalves : out;
  fill<<<1024, 256>>>((u16*)(launch.words + Memory::attention_out), (u64)kTokenBlocks * O::steps * kStepBytes / 2, 9,
                      0);
  start(matrix_embed, 0, false);
  start(matrix_norms, 0, false);
  start(matrix_qkv, 0);
  start(matrix_out, 0);
  start(matrix_norms, 0, false);
  start(matrix_gate_up, 0);
  const auto print = [](const char* name, Kernel kernel) {
    print_energy(name, kLayers, [&] {
      for (u32 layer = 0; layer < kLayers; layer++) start(kernel, layer);
    });
  };
  print("qkv", kQkvKernels.of(qkv));
  print("o", kOutKernels.of(out));
  print("gate/up", matrix_gate_up);
  print("down", kDownKernels.of(down));
}
/// The LM head of so many rows, with logits for the sampler or with the choice of tokens.
static void time_head(u32 samples) {
  make_rows(std::min<u32>(3 * samples, kColumns));
  std::vector<u32> all(samples);
  for (u32 i = 0; i < samples; i++) all[i] = i % launch.row_count;
  pass.samples = upload(all), pass.sample_count = samples, pass.next = nullptr;
  const float logits = milliseconds<7>([] { start(matrix_head, 0); });
  const float chosen = milliseconds<7>([] {
    start(matrix_head_choose, 0);
    start(matrix_choose, 0, false);
  });
  printf("head of %3u rows: %8.3f ms with logits, %8.3f ms with tokens\n", samples, logits, chosen);
}

int main(int arguments, char** argument) {
  int count;
  CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, 0));
  multiprocessors = count;
  const u64 weights = kHeadOffset + Head::bytes, gamma = (2 * kLayers + 1) * (u64)kHidden,
            embedding = kTied ? 8 : (u64)kVocab * kHidden, head_rows = (kVocab + 15) / 16 * 16;
  u8 *packed = allocate<u8>(weights), *gammas = allocate<u8>(gamma * 2), *table = allocate<u8>(embedding * 2);
  fill<<<4096, 256>>>((u16*)packed, weights / 2, 5, 0);
  fill<<<1024, 256>>>((u16*)gammas, gamma, 6, 0);
  fill<<<1024, 256>>>((u16*)table, embedding, 7, 0);
  launch.weights = packed, launch.gamma = gammas, launch.embedding = table;
  const auto floats = [](u64 count, u32 seed) {
    float* p = allocate<float>(count);
    random_floats<<<1024, 256>>>(p, count, seed);
    return p;
  };
  launch.bias = floats((u64)kLayers * Qkv::tiles * 16, 10), launch.qk_norm = floats(2ull * kLayers * kHeadDim, 11);
  launch.rope = floats(8192ull * kHeadDim, 12);
  launch.page_stride = kStride, launch.kv_pages = 2048;
  std::vector<u32> pages(kSlots * kStride, 0);
  u32 next = 0;  // slots 0 and 1 have prompts, the others a page where they decode
  for (u32 slot = 0; slot < kSlots; slot++)
    for (u32 i = 0; i < kStride; i++)
      if (slot < 2 || i == slot * 53 % 4000 / kPage) pages[slot * kStride + i] = next++ * 5 % launch.kv_pages;
  launch.page_table = upload(pages);
  launch.kv = allocate<u8>((u64)kLayers * launch.kv_pages * kKvHeads * kPageBytes);
  launch.words = allocate<u8>(Memory::bytes), before = allocate<u8>(Memory::bytes);
  launch.logits = allocate<float>(kMostSamples * head_rows);
  launch.tokens = allocate<u64>(kMostSamples), launch.control = allocate<u32>(2), launch.epoch = 77;
  pass.stopped = allocate<u32>(1);
  CHECK(cudaMemset(launch.control, 0, 8));
  const u64 widest = std::max<u64>(std::max<u64>(Qkv::tiles, GateUp::tiles) * 16 * kColumns, kMostSamples * head_rows);
  sums = allocate<float>(widest);
  u32* tiles = allocate<u32>(Tiles::count);
  pass.tiles = tiles;
  deal<Qkv><<<1, 1>>>(tiles + Tiles::qkv);
  deal<O><<<1, 1>>>(tiles + Tiles::out);
  deal<GateUp><<<1, 1>>>(tiles + Tiles::gate_up);
  deal<Down><<<1, 1>>>(tiles + Tiles::down);
  deal<Head><<<1, 1>>>(tiles + Tiles::head);
  CHECK(cudaDeviceSynchronize());
  if (arguments > 1 && !strcmp(argument[1], "--energy")) {
    for (u32 rows : {128, 256, 384, 512, 640, 896, 2048})
      if (rows <= kColumns) print_energies(rows);
    return 0;
  }
  bool good = true;
  const auto check_all = [&](std::initializer_list<u32> of, Cut cut) {
    for (u32 rows : of)
      if (rows <= kColumns) good &= check(rows, cut);
  };
  check_all({1, 20, 64, 128, 200, 300, 640}, Cut::kPair);
  check_all({1, 100, 128, 200, 256, 300, 384, 512}, Cut::kHalves);
  check_all({1, 20, 64, 100, 128, 200, 384, 640}, Cut::kQuads);
  good &= check_ends();
  if (!good) return 1;
  for (u32 samples : {32, 64, 128, 256, 512})
    if (samples <= kMostSamples) time_head(samples);
  for (u32 rows : {32, 64, 128, 256, 384, 512, 640, 1024, 2048}) {
    if (rows > kColumns) break;
    time_all(rows, Cut::kPair);
    if (rows > 640) continue;
    time_all(rows, Cut::kHalves);
    time_all(rows, Cut::kQuads);
  }
}
