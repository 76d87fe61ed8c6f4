// Buffers and launches of products, for the measurements' hosts.
#pragma once
#include "tests/matrix/fill.cuh"
#include "tests/matrix/products.cuh"

static u8 *weights, *tokens_;
static float *raw, *expected, *residual, *stash, *factors, *squares;
static u8* next_;
static u64* count;
#ifndef WEIGHTS
#define WEIGHTS (1ull << 30)
#endif
constexpr u64 kWeights = WEIGHTS;

template <int N, int ORDER, int EPILOGUE, int PAIR> void launch(Product p, u64 offset, cudaStream_t stream = 0) {
  p.a = weights + offset;
  const auto kernel = product<N, ORDER, EPILOGUE, PAIR>;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring<N, ORDER>::shared));
  cudaLaunchConfig_t config = {};
  config.gridDim = 132, config.blockDim = 384, config.dynamicSmemBytes = Ring<N, ORDER>::shared;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = PAIR == kAlone ? 1 : 2, cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.stream = stream, config.attrs = &cluster, config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, kernel, (const Product)p));
}
static Product shape(int rows, int k, int tokens, int n) {
  Product p = {};
  p.b = tokens_, p.raw = raw, p.residual = residual, p.stash = stash, p.next = next_,
  p.inverse = p.norm = p.turns = factors, p.squares = squares;
  p.k16 = k / 16, p.leaf = k / 256, p.row_tiles = rows / 128, p.token_tiles = (tokens + n - 1) / n;
  return p;
}
static void allocate() {
  CHECK(cudaMalloc(&weights, kWeights));
  CHECK(cudaMalloc(&tokens_, 128 << 20));
  CHECK(cudaMalloc(&next_, 192 << 20));
  CHECK(cudaMalloc(&raw, 128 << 20));
  CHECK(cudaMalloc(&expected, 16 << 20));
  CHECK(cudaMalloc(&residual, 128 << 20));
  CHECK(cudaMalloc(&stash, 132ull * 3 * 128 * 256 * 4));
  CHECK(cudaMalloc(&factors, 16 << 20));
  CHECK(cudaMalloc(&squares, 16 << 20));
  CHECK(cudaMalloc(&count, 8));
}
