// Times the products of Llama 3.1 8B's layers in several ways, after comparing their bits with chains of mma.sync.
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <algorithm>
#include <functional>
#include <string>
#include <vector>
#include "tests/matrix/fill.cuh"
#include "tests/matrix/host.cuh"

/// The same sums by mma.sync: a warp has a row tile and 8 columns.
__global__ void reference(const u8* a, const u8* b, float* out, int k16, int leaf, int order, int row_tiles,
                          int columns, int block) {
  const int w = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if (w >= row_tiles * (columns / 8)) return;
  const int tile = w / (columns / 8), column = w % (columns / 8) * 8;
  a += (u64)(tile / 2) * k16 * 1024 + (tile & 1) * 512 + lane * 16;
  b += (u64)(column / block) * k16 * (block * 32) + column % block / 8 * 256 + g * 16 + t * 4;
  float open[5][4], sum[4] = {}, quad[4] = {};
  for (int n = 0; n < k16 / leaf; n++) {
    float s[4] = {};
    for (int k = n * leaf; k < (n + 1) * leaf; k++)
      mma_m16n8k16(s, *(const Quad*)(a + (u64)k * 1024), *(const u32*)(b + (u64)k * block * 32),
                   *(const u32*)(b + (u64)k * block * 32 + 128));
    if (order == kAscending || order == kChain)
      for (int i = 0; i < 4; i++) sum[i] += s[i];
    else if (order == kTree || n % 4 == 3) {
      int l = 0, m = order == kTree ? n : n / 4;
      if (order == kQuads)
        for (int i = 0; i < 4; i++) s[i] = quad[i] + s[i], quad[i] = 0;
      for (; m >> l & 1; l++)
        for (int i = 0; i < 4; i++) s[i] = open[l][i] + s[i];
      for (int i = 0; i < 4; i++) open[l][i] = s[i], sum[i] = s[i];
    } else
      for (int i = 0; i < 4; i++) quad[i] += s[i];
  }
  for (int c = 0; c < 4; c++) out[(u64)(tile * 16 + g + (c >> 1) * 8) * columns + column + 2 * t + (c & 1)] = sum[c];
}
template <int N, int ORDER, int PAIR> void bits(int k) {
  const Product p = shape(512, k, 2 * N, N);
  const u64 all = 512ull * 2 * N;
  printf("bits N %d order %d pair %d K %d:", N, ORDER, PAIR, k);
  for (int kind = 0; kind < 3; kind++) {
    fill<<<1024, 256>>>((u16*)weights, 512ull * k, 1, kind);
    fill<<<1024, 256>>>((u16*)tokens_, 2ull * N * k, 2, kind);
    CHECK(cudaMemset(raw, 0xff, all * 4));
    launch<N, ORDER, kRaw, PAIR>(p, 0);
    reference<<<(512 / 16 * 2 * N / 8 + 3) / 4, 128>>>(weights, tokens_, expected, p.k16,
                                                       ORDER == kChain ? p.k16 : p.leaf, ORDER, 32, 2 * N, N);
    CHECK(cudaMemset(count, 0, 8));
    differ<<<256, 256>>>((u32*)raw, (u32*)expected, all, count);
    u64 different;
    CHECK(cudaMemcpy(&different, count, 8, cudaMemcpyDeviceToHost));
    printf(" %llu/%llu", different, all);
  }
  printf("\n");
}
struct Variant {
  std::function<void(u64)> launch;
  std::string name;
  u64 bytes;
  double flops;
  std::vector<float> ms;
};
static std::vector<Variant> variants;
template <int N, int ORDER, int EPILOGUE, int PAIR>
void speed(const char* what, int rows, int k, int tokens, int leaf = 0) {
  Product p = shape(rows, k, tokens, N);
  if (leaf) p.leaf = leaf;
  char name[100];
  snprintf(name, sizeof name, "%-8s T %4d N %3d order %d epilogue %d pair %d stages %d", what, tokens, N, ORDER,
           EPILOGUE, PAIR, Ring<N, ORDER>::stages);
  variants.push_back({[p](u64 offset) { launch<N, ORDER, EPILOGUE, PAIR>(p, offset); },
                      name,
                      (u64)rows * k * 2,
                      2.0 * rows * k * tokens,
                      {}});
}
/// Variants take turns. Each runs 60 ms before it is timed for 30 ms: power holds the clock down, and who comes behind
/// a lighter one would be faster.
static void time_all(int rounds) {
  cudaEvent_t begun, ended;
  CHECK(cudaEventCreate(&begun));
  CHECK(cudaEventCreate(&ended));
  for (int r = -1; r < rounds; r++)
    for (Variant& v : variants) {
      const auto run = [&](float wanted) {
        const int launches = r < 0 ? 20 : (int)(wanted / v.ms[0]) + 1, copies = (int)(kWeights / v.bytes);
        CHECK(cudaEventRecord(begun));
        for (int i = 0; i < launches; i++) v.launch(v.bytes * (i % copies));
        CHECK(cudaEventRecord(ended));
        CHECK(cudaEventSynchronize(ended));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begun, ended));
        return ms / launches;
      };
      run(60);
      v.ms.push_back(run(30));
    }
  for (Variant& v : variants) {
    std::sort(v.ms.begin() + 1, v.ms.end());
    const float ms = v.ms[1 + rounds / 2];
    printf("%s: %8.4f ms %4.0f TFLOP/s, %5.0f GB/s of weights (%.4f to %.4f)\n", v.name.c_str(), ms,
           v.flops / ms * 1e-9, v.bytes / ms * 1e-6, v.ms[1], v.ms.back());
  }
}

int main() {
  allocate();
  bits<192, kAscending, kSameTokens>(4096);
  bits<128, kQuads, kSameTokens>(4096);
  bits<128, kQuads, kSameRows>(14336);
  bits<256, kChain, kSameTokens>(4096);
  fill<<<4096, 256>>>((u16*)weights, kWeights / 2, 5, 0);
  fill<<<4096, 256>>>((u16*)tokens_, 64ull << 20, 6, 0);
  ones<<<1024, 256>>>(factors, 4 << 20);
  CHECK(cudaMemset(residual, 0, 128 << 20));
  speed<256, kChain, kSilu, kSameTokens>("gate/up", 28672, 4096, 2048);
  speed<192, kAscending, kSilu, kSameTokens>("gate/up", 28672, 4096, 2112);
  speed<128, kAscending, kSilu, kAlone>("gate/up", 28672, 4096, 2048);
  speed<128, kAscending, kSilu, kSameTokens>("gate/up", 28672, 4096, 2048);
  speed<128, kAscending, kSilu, kSameRows>("gate/up", 28672, 4096, 2048);
  speed<192, kAscending, kRope, kSameTokens>("qkv", 6144, 4096, 2112);
  speed<128, kAscending, kRope, kSameRows>("qkv", 6144, 4096, 2048);
  speed<128, kTree, kResidual, kSameRows>("o", 4096, 4096, 2048);
  speed<128, kQuads, kResidual, kSameRows>("o", 4096, 4096, 2048);
  speed<128, kTree, kResidual, kSameRows>("down", 4096, 14336, 2048);
  speed<128, kQuads, kResidual, kSameRows>("down", 4096, 14336, 2048);
  speed<128, kAscending, kResidual, kSameRows>("down", 4096, 14336, 2048);
  time_all(5);
  CHECK(cudaDeviceSynchronize());
  printf("done\n");
}
