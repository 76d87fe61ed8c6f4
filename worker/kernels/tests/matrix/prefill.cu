// All products and the attention of Llama 3.1 8B's 32 layers over a chunk of tokens, a launch each, in a graph: what a chunk takes, apart from what one launch would save.
// Bursts begin on an idle GPU, as a lone prompt does; sustained runs follow each other, and power holds their clock down.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <functional>
#include <string>
#include <unistd.h>
#include <vector>
#define WEIGHTS (32 * kLayer + (1ull << 20))
constexpr unsigned long long kQkv = 6144ull * 4096 * 2, kO = 4096ull * 4096 * 2, kGateUp = 28672ull * 4096 * 2, kDown = 4096ull * 14336 * 2, kLayer = kQkv + kO + kGateUp + kDown;
#include "tests/matrix/attention.cuh"
#include "tests/matrix/host.cuh"

using Step = std::function<void(int, cudaStream_t)>;
template <int N, int ORDER, int EPILOGUE, int PAIR> Step step(unsigned long long offset, int rows, int k, int tokens, int leaf = 0) {
  Product p = shape(rows, k, tokens, N);
  if (leaf) p.leaf = leaf;
  return [=](int layer, cudaStream_t stream) { launch<N, ORDER, EPILOGUE, PAIR>(p, layer * kLayer + offset, stream); };
}
static AttentionChunk chunk;
template <int LEAF> Step attend(int tokens, int first) {
  AttentionChunk c = chunk;
  c.tokens = tokens, c.first = first;
  return [=](int, cudaStream_t stream) {
    CHECK(cudaFuncSetAttribute(attention<LEAF>, cudaFuncAttributeMaxDynamicSharedMemorySize, kAttentionShared));
    attention<LEAF><<<132, 384, kAttentionShared, stream>>>(c);
  };
}
struct Chain {
  std::string name;
  cudaGraphExec_t graph;
  float estimate;
  std::vector<float> burst, sustained;
};
static std::vector<Chain> chains;
static cudaStream_t stream;
static void chain(const char* name, const std::vector<Step>& steps) {
  cudaGraph_t graph;
  Chain c{name};
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int layer = 0; layer < 32; layer++)
    for (const Step& s : steps) s(layer, stream);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&c.graph, graph, 0));
  chains.push_back(c);
}
int main() {
  CHECK(cudaStreamCreate(&stream));
  allocate();
  u8 *queries, *pages;
  CHECK(cudaMalloc(&queries, 64 << 20));
  CHECK(cudaMalloc(&pages, 8ull * 128 * kPageBytes));
  fill<<<4096, 256>>>((u16*)weights, kWeights / 2, 5, 0);
  fill<<<4096, 256>>>((u16*)tokens_, 64ull << 20, 6, 0);
  fill<<<4096, 256>>>((u16*)queries, 32ull << 20, 7, 0);
  fill<<<4096, 256>>>((u16*)pages, 8ull * 128 * kPageBytes / 2, 8, 0);
  ones<<<1024, 256>>>(factors, 4 << 20);
  CHECK(cudaMemset(residual, 0, 128 << 20));
  CHECK(cudaDeviceSynchronize());
  chunk.queries = queries, chunk.pages = pages, chunk.out = next_, chunk.kv_heads = 8, chunk.pages_a_head = 128, chunk.scale = 1.4426950408889634f / std::sqrt(128.0f);
  CHAINS
  cudaEvent_t begun, ended;
  CHECK(cudaEventCreate(&begun));
  CHECK(cudaEventCreate(&ended));
  const auto run = [&](Chain& c, int times) {
    CHECK(cudaEventRecord(begun, stream));
    for (int i = 0; i < times; i++) CHECK(cudaGraphLaunch(c.graph, stream));
    CHECK(cudaEventRecord(ended, stream));
    CHECK(cudaEventSynchronize(ended));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begun, ended));
    return ms / times;
  };
  for (Chain& c : chains) run(c, 1), c.estimate = run(c, 1);
  for (int round = 0; round < 5; round++)
    for (Chain& c : chains) {
      usleep(150000);
      c.burst.push_back(run(c, 1));
      const int times = (int)(150 / c.estimate) + 1;
      run(c, times);
      c.sustained.push_back(run(c, times));
    }
  for (Chain& c : chains) {
    std::sort(c.burst.begin(), c.burst.end());
    std::sort(c.sustained.begin(), c.sustained.end());
    printf("%-70s burst %7.3f ms (%.2f to %.2f), sustained %7.3f ms (%.2f to %.2f)\n", c.name.c_str(), c.burst[2], c.burst[0], c.burst[4], c.sustained[2], c.sustained[0], c.sustained[4]);
  }
}
