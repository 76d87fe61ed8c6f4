// Times attention of a chunk of 2048 tokens of Llama 3.1 8B, and compares it with a reference in double precision.
#include <cstdio>
#include <cstdlib>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>
#include <cuda_runtime.h>
#include "tests/matrix/fill.cuh"
#include "tests/matrix/attention.cuh"

static float value(u16 bits) {
  const u32 word = (u32)bits << 16;
  float f;
  memcpy(&f, &word, 4);
  return f;
}
constexpr int kKvHeads = 8, kHeads = kKvHeads * kQueries;
static u8 *queries, *pages, *out;
template <int LEAF> float run(const AttentionChunk& c, int launches) {
  CHECK(cudaFuncSetAttribute(attention<LEAF>, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionShared));
  cudaEvent_t begun, ended;
  CHECK(cudaEventCreate(&begun));
  CHECK(cudaEventCreate(&ended));
  CHECK(cudaEventRecord(begun));
  for (int i = 0; i < launches; i++) attention<LEAF><<<132, 384, kAttentionShared>>>(c);
  CHECK(cudaGetLastError());
  CHECK(cudaEventRecord(ended));
  CHECK(cudaEventSynchronize(ended));
  float ms;
  CHECK(cudaEventElapsedTime(&ms, begun, ended));
  return ms / launches;
}
/// Largest and mean error of some rows, relative to the row's norm.
static void check(const AttentionChunk& c) {
  std::vector<u16> q((u64)c.tokens * kHeads * kDim), kv((u64)kKvHeads * c.pages_a_head * kPageBytes / 2),
      result(q.size());
  CHECK(cudaMemcpy(q.data(), queries, q.size() * 2, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(kv.data(), pages, kv.size() * 2, cudaMemcpyDeviceToHost));
  CHECK(cudaMemcpy(result.data(), out, result.size() * 2, cudaMemcpyDeviceToHost));
  double worst = 0;
  for (int sample = 0; sample < 200; sample++) {
    const int token = (int)((sample * 7919ll + 13) % c.tokens), head = sample * 5 % kHeads, kv_head = head / kQueries,
              seen = c.first + token + 1;
    const auto query = [&](int d) {
      const int row = token % 16, g = row % 8, lane = g * 4 + d % 8 / 2, word = row / 8 + d % 16 / 8 * 2;
      return value(
          q[((((u64)(kv_head * (c.tokens / 16) + token / 16) * kQueries + head % kQueries) * 8 + d / 16) * 32 + lane) *
                8 +
            word * 2 + d % 2]);
    };
    std::vector<double> s(seen), o(kDim, 0.0);
    double most = -1e300, total = 0;
    for (int p = 0; p < seen; p++) {
      const u16* page = kv.data() + ((u64)kv_head * c.pages_a_head + p / 64) * (kPageBytes / 2);
      double dot = 0;
      for (int d = 0; d < kDim; d++)
        dot += (double)query(d) * value(page[d / 16 * 1024 + p % 64 / 8 * 128 + d % 16 / 8 * 64 + p % 8 * 8 + d % 8]);
      most = std::max(most, s[p] = dot * c.scale);
    }
    for (int p = 0; p < seen; p++) {
      const u16* page = kv.data() + ((u64)kv_head * c.pages_a_head + p / 64) * (kPageBytes / 2) + 8192;
      const double w = std::exp2(s[p] - most);
      total += w;
      for (int d = 0; d < kDim; d++)
        o[d] += w * value(page[p % 64 / 16 * 2048 + d / 8 * 128 + p % 16 / 8 * 64 + d % 8 * 8 + p % 8]);
    }
    double norm = 0, error = 0;
    for (int d = 0; d < kDim; d++) {
      const double expected = o[d] / total;
      const u64 at = ((u64)(token / 128) * kHeads * 8 + head * 8 + d / 16) * 2048 + token % 128 / 8 * 128 +
                     d % 16 / 8 * 64 + token % 8 * 8 + d % 8;
      norm += expected * expected, error += (value(result[at]) - expected) * (value(result[at]) - expected);
    }
    worst = std::max(worst, std::sqrt(error / norm));
    if (!(error == error)) worst = 1e9;
  }
  printf("largest error of 200 rows %.2e; ", worst);
}
template <int LEAF> void time_leaf(const char* what, AttentionChunk c) {
  CHECK(cudaMemset(out, 0xff, (u64)c.tokens * kHeads * kDim * 2));
  run<LEAF>(c, 3);
  check(c);
  float ms[9];
  for (float& m : ms) m = run<LEAF>(c, 40);
  std::sort(ms, ms + 9);
  double pairs = 0;
  for (int i = 0; i < c.tokens; i++) pairs += c.first + i + 1;
  printf("%s, %d tokens from %d on: %.4f ms, %.0f TFLOP/s (%.4f to %.4f); 32 layers %.2f ms\n", what, c.tokens, c.first,
         ms[4], 4 * pairs * kDim * kHeads / ms[4] * 1e-9, ms[0], ms[8], 32 * ms[4]);
  fflush(stdout);
}
int main() {
  AttentionChunk c = {};
  c.tokens = 2048, c.kv_heads = kKvHeads, c.pages_a_head = 128, c.scale = 1.4426950408889634f / std::sqrt(128.0f);
  CHECK(cudaMalloc(&queries, 64 << 20));
  CHECK(cudaMalloc(&pages, (u64)kKvHeads * 128 * kPageBytes));
  CHECK(cudaMalloc(&out, 64 << 20));
  fill<<<1024, 256>>>((u16*)queries, 2048ull * kHeads * kDim, 11, 0);
  fill<<<1024, 256>>>((u16*)pages, (u64)kKvHeads * 128 * kPageBytes / 2, 12, 0);
  c.queries = queries, c.pages = pages, c.out = out;
  for (int first : {0, 6144}) {
    c.first = first;
    time_leaf<kRow>("one chain a row", c);
    time_leaf<kPage64>("leaves of a page", c);
    time_leaf<kLeaf16>("leaves of 16", c);
  }
  CHECK(cudaDeviceSynchronize());
}
