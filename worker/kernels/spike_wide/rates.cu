// How fast are wgmma with A from registers, and mma.sync, on one SM: clocks a product for 1 and 2 warpgroups.
#pragma once
#include "wide.cu"
template <int N, int BATCH, bool LOADS> __global__ void __launch_bounds__(256, 1) rate_wgmma(float* out, long long* clocks) {
  extern __shared__ __align__(1024) u8 smem[]; const u32 base = s32(smem); constexpr int R = N / 2;
  for (int i = threadIdx.x; i < 65536 / 4; i += blockDim.x) ((u32*)smem)[i] = 0x3c003c00u + (i * 2654435761u & 0x03ff03ffu);
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads();
  float c[2][R];
#pragma unroll
  for (int i = 0; i < R; i++) c[0][i] = c[1][i] = 0;
  Word f[2][BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; b++) { f[0][b] = lds128(base + 32768 + b * 1024 + threadIdx.x * 16); f[1][b] = lds128(base + 32768 + b * 1024 + 512 + threadIdx.x * 16); }
  const long long t0 = clock64();
  for (int it = 0; it < 512; it++) {
    if (LOADS) {
#pragma unroll
      for (int b = 0; b < BATCH; b++) { f[0][b] = lds128(base + 32768 + b * 1024 + threadIdx.x * 16); f[1][b] = lds128(base + 32768 + b * 1024 + 512 + threadIdx.x * 16); }
    }
    pin<R>(c[0]); pin<R>(c[1]); wgmma_fence();
#pragma unroll
    for (int b = 0; b < BATCH; b++) { product<N, true>(c[0], f[0][b], base + b * N * 32); product<N, true>(c[1], f[1][b], base + b * N * 32); }
    wgmma_commit(); wgmma_wait<0>(); pin<R>(c[0]); pin<R>(c[1]);
  }
  if (threadIdx.x == 0) *clocks = clock64() - t0;
  float x = 0;
#pragma unroll
  for (int i = 0; i < R; i++) x += c[0][i] + c[1][i];
  out[threadIdx.x] = x;
}
template <int N, bool LOADS> __global__ void __launch_bounds__(512, 1) rate_mma(float* out, long long* clocks) {
  extern __shared__ __align__(1024) u8 smem[]; const u32 base = s32(smem); constexpr int R = N / 2; const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  for (int i = threadIdx.x; i < 65536 / 4; i += blockDim.x) ((u32*)smem)[i] = 0x3c003c00u + (i * 2654435761u & 0x03ff03ffu);
  __syncthreads(); float c[2][R]; u32 r[N / 16][4];
#pragma unroll
  for (int i = 0; i < R; i++) c[0][i] = c[1][i] = 0;
  Word f0 = lds128(base + 32768 + warp * 1024 + lane * 16), f1 = lds128(base + 32768 + warp * 1024 + 512 + lane * 16);
#pragma unroll
  for (int j = 0; j < N / 16; j++) ldsm(base + j * 512 + lane * 16, r[j]);
  const long long t0 = clock64();
  for (int it = 0; it < 512; it++) {
    if (LOADS) {
      f0 = lds128(base + 32768 + warp * 1024 + lane * 16), f1 = lds128(base + 32768 + warp * 1024 + 512 + lane * 16);
#pragma unroll
      for (int j = 0; j < N / 16; j++) ldsm(base + j * 512 + lane * 16, r[j]);
    }
#pragma unroll
    for (int j = 0; j < N / 16; j++) { mma(c[0] + 8 * j, f0, r[j][0], r[j][1]); mma(c[0] + 8 * j + 4, f0, r[j][2], r[j][3]); mma(c[1] + 8 * j, f1, r[j][0], r[j][1]); mma(c[1] + 8 * j + 4, f1, r[j][2], r[j][3]); }
  }
  if (threadIdx.x == 0) *clocks = clock64() - t0;
  float x = 0;
#pragma unroll
  for (int i = 0; i < R; i++) x += c[0][i] + c[1][i];
  out[threadIdx.x] = x;
}
template <class K> static void rate_line(K k, const char* what, int threads, int n, int products, int rows) {
  float* o; long long* c; cudaMalloc(&o, 4096); cudaMalloc(&c, 8); long long v = 0; cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  for (int i = 0; i < 2; i++) k<<<132, threads, 65536>>>(o, c);
  cudaMemcpy(&v, c, 8, cudaMemcpyDeviceToHost); const double per = (double)v / 512; const double fma = (double)rows * 16 * n * products;
  printf("%-46s N=%3d, %3d threads: %7.1f clocks a round, %5.0f FMA a clock and SM (%s)\n", what, n, threads, per, fma / per, cudaGetErrorString(cudaGetLastError())); cudaFree(o); cudaFree(c);
}
extern "C" void wide_rates() {
#define RW(n, b, l, w) rate_line(rate_wgmma<n, b, l>, "wgmma, A in registers, " #b " k16 x 2 tiles" " loads " #l, 128 * w, n, 2 * b * w, 64);
  RW(32, 4, false, 1) RW(32, 4, false, 2) RW(64, 2, false, 1) RW(64, 2, false, 2) RW(64, 4, false, 1) RW(64, 4, false, 2) RW(128, 2, false, 1) RW(128, 2, false, 2)
  RW(32, 4, true, 2) RW(64, 2, true, 1) RW(64, 2, true, 2) RW(64, 4, true, 2) RW(128, 2, true, 2)
#define RM(n, l, w) rate_line(rate_mma<n, l>, "mma.sync, 2 tiles a warp, loads " #l, 32 * w, n, 2 * w, 16);
  RM(32, false, 8) RM(64, false, 8) RM(32, false, 16) RM(32, true, 16) RM(64, true, 8)
  fflush(stdout);
}
