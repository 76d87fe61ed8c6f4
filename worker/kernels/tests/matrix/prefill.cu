// All products and the attention of Llama 3.1 8B's 32 layers over a chunk of tokens, a launch each, in a graph: what a
// chunk takes, apart from what one launch would save. Bursts begin on an idle GPU, as a lone prompt does; sustained
// runs follow each other, and power holds their clock down.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <functional>
#include <string>
#include <unistd.h>
#include <vector>
#define WEIGHTS (34 * kLayer)
constexpr unsigned long long kQkv = 6144ull * 4096 * 2, kO = 4096ull * 4096 * 2, kGateUp = 28672ull * 4096 * 2,
                             kDown = 4096ull * 14336 * 2, kLayer = kQkv + kO + kGateUp + kDown;
#include "tests/matrix/attention.cuh"
#include "tests/matrix/host.cuh"

using Step = std::function<void(int, cudaStream_t)>;
template <int N, int ORDER, int EPILOGUE, int PAIR>
Step step(unsigned long long offset, int rows, int k, int tokens, int leaf = 0) {
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
  std::vector<float> burst, sustained;  // ms
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
  chunk.queries = queries, chunk.pages = pages, chunk.out = next_, chunk.kv_heads = 8, chunk.pages_a_head = 128,
  chunk.scale = 1.4426950408889634f / std::sqrt(128.0f);
  const auto qkv = [&](int t) { return step<128, kAscending, kRope, kSameRows>(0, 6144, 4096, t); };
  const auto out = [&](int t) { return step<128, kQuads, kResidual, kSameRows>(kQkv, 4096, 4096, t); };
  const auto gate_up = [&](int t) { return step<128, kAscending, kSilu, kSameRows>(kQkv + kO, 28672, 4096, t); };
  const auto down = [&](int t) { return step<128, kQuads, kResidual, kSameRows>(kQkv + kO + kGateUp, 4096, 14336, t); };
  const auto qkv192 = step<192, kAscending, kRope, kSameTokens>(0, 6144, 4096, 2048);
  const auto gate_up192 = step<192, kAscending, kSilu, kSameTokens>(kQkv + kO, 28672, 4096, 2048);
  for (int t : {256, 512, 1024, 2048, 4096}) {
    const std::string name = std::to_string(t) + " tokens";
    chain(name.c_str(), {qkv(t), attend<kPage64>(t, 0), out(t), gate_up(t), down(t)});
  }
  const Step page = attend<kPage64>(2048, 0);
  chain("2048, qkv and gate/up in blocks of 192 tokens", {qkv192, page, out(2048), gate_up192, down(2048)});
  chain("2048, no pairs", {step<128, kAscending, kRope, kAlone>(0, 6144, 4096, 2048), page,
                           step<128, kQuads, kResidual, kAlone>(kQkv, 4096, 4096, 2048),
                           step<128, kAscending, kSilu, kAlone>(kQkv + kO, 28672, 4096, 2048),
                           step<128, kQuads, kResidual, kAlone>(kQkv + kO + kGateUp, 4096, 14336, 2048)});
  chain("2048, o and down ascending",
        {qkv(2048), page, step<128, kAscending, kResidual, kSameRows>(kQkv, 4096, 4096, 2048), gate_up(2048),
         step<128, kAscending, kResidual, kSameRows>(kQkv + kO + kGateUp, 4096, 14336, 2048)});
  chain("2048, o and down as trees",
        {qkv(2048), page, step<128, kTree, kResidual, kSameRows>(kQkv, 4096, 4096, 2048), gate_up(2048),
         step<128, kTree, kResidual, kSameRows>(kQkv + kO + kGateUp, 4096, 14336, 2048)});
  chain("2048, all products in quads", {step<128, kQuads, kRope, kSameRows>(0, 6144, 4096, 2048), page, out(2048),
                                        step<128, kQuads, kSilu, kSameRows>(kQkv + kO, 28672, 4096, 2048), down(2048)});
  chain("2048, attention in leaves of 16", {qkv(2048), attend<kLeaf16>(2048, 0), out(2048), gate_up(2048), down(2048)});
  chain("2048, no leaves, blocks of 256",
        {step<256, kChain, kRope, kSameTokens>(0, 6144, 4096, 2048), page,
         step<256, kChain, kPlain, kSameTokens>(kQkv, 4096, 4096, 2048),
         step<256, kChain, kSilu, kSameTokens>(kQkv + kO, 28672, 4096, 2048),
         step<256, kChain, kPlain, kSameTokens>(kQkv + kO + kGateUp, 4096, 14336, 2048)});
  std::vector<Step> all;
  for (int first = 0; first < 8192; first += 2048)
    for (const Step& s : {qkv(2048), attend<kPage64>(2048, first), out(2048), gate_up(2048), down(2048)})
      all.push_back(s);
  chain("8192, chunks of 2048", all);
  all.clear();
  chunk.kv_heads = 2;
  for (int first = 0; first < 8192; first += 2048)
    for (const Step& s : {step<128, kAscending, kRope, kSameRows>(0, 1536, 4096, 2048), attend<kPage64>(2048, first),
                          step<128, kAscending, kPartial, kSameRows>(kQkv, 4096, 1024, 2048, 16),
                          step<128, kAscending, kSilu, kSameRows>(kQkv + kO, 7168, 4096, 2048),
                          step<128, kAscending, kPartial, kSameRows>(kQkv + kO + kGateUp, 4096, 3584, 2048, 56)})
      all.push_back(s);
  chain("8192, one of 4 ranks, without exchanges", all);
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
    printf("%-70s burst %7.3f ms (%.2f to %.2f), sustained %7.3f ms (%.2f to %.2f)\n", c.name.c_str(), c.burst[2],
           c.burst[0], c.burst[4], c.sustained[2], c.sustained[0], c.sustained[4]);
  }
}
