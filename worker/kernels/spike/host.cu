// Host side of the spike: launches for run.py (ctypes), and what the memory can do, measured in the same run.
#include <cuda_runtime.h>
#include <cstdio>
#include <algorithm>
#include <vector>
#include "looped_decoder.cu"

// ---- what the memory can do, measured in the same run ----
__global__ void read_plain(const uint4* w, u64 n, u32* out) {
  uint4 a{0, 0, 0, 0}; u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, st = (u64)gridDim.x * blockDim.x;
  for (; i + 7 * st < n; i += 8 * st) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = __ldcs(w + i + k * st);
#pragma unroll
    for (int k = 0; k < 8; k++) { a.x ^= v[k].x; a.y ^= v[k].y; a.z ^= v[k].z; a.w ^= v[k].w; }
  }
  if ((a.x ^ a.y ^ a.z ^ a.w) == 0x12345) out[0] = 1;
}
__global__ void __launch_bounds__(64, 1) read_bulk(const u8* w, u32 chunks, int nslot, int window) {
  extern __shared__ __align__(1024) u8 smem[]; __shared__ u64 bar[32]; const u32 ring = s32(smem), full = s32(bar);
  if (threadIdx.x) return;
  for (int i = 0; i < nslot; i++) mbar_init(full + 8 * i, 1);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  const u64 policy = evict_first(); const u32 n = (chunks - blockIdx.x + gridDim.x - 1) / gridDim.x;
  for (u32 i = 0; i < n + window; i++) {
    if (i >= (u32)window) { u32 j = i - window; while (!mbar_try(full + 8 * (j % nslot), j / nslot & 1)); }
    if (i < n) { mbar_expect(full + 8 * (i % nslot), 16384); bulk_load(ring + (i % nslot) * 16384, w + ((u64)i * gridDim.x + blockIdx.x) * 16384, 16384, full + 8 * (i % nslot), policy); }
  }
}

// ---- launches ----
static u32* g_report = nullptr;
static int check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return 0;
  printf("CUDA error at %s: %s\n", what, cudaGetErrorString(e));
  if (g_report && g_report[0]) printf("  wait limit: block %u thread %u site %u expected %u seen %u\n", g_report[1], g_report[2], g_report[3], g_report[4], g_report[5]);
  fflush(stdout); return 1;
}
#define CK(x) if (check((x), #x)) return -1.0f
template <class F> static float median_ms(F f, int warm, int n) {
  cudaEvent_t a, b; CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b)); std::vector<float> v;
  for (int i = 0; i < warm + n; i++) { CK(cudaEventRecord(a)); if (f()) return -1.0f; CK(cudaEventRecord(b)); CK(cudaEventSynchronize(b)); float ms; CK(cudaEventElapsedTime(&ms, a, b)); if (i >= warm) v.push_back(ms); }
  cudaEventDestroy(a); cudaEventDestroy(b); std::sort(v.begin(), v.end()); return v[v.size() / 2];
}
template <int NB, Wait WAIT, bool TRACE> static float launch(Params p, int warm, int reps) {
  auto k = looped_decoder<NB, WAIT, TRACE>; int threads = (kWarps + 3) * 32;
  int bytes = p.nslot * kSlotBytes + 2 * (2 * kWarps * NB * 16 * 4) + 2 * kWarps * NB * 4 + 512 + (NB == 1 ? 8192 : 0);
  CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  void* args[] = {&p};
  float ms = median_ms([&]() -> int { int r = check(cudaLaunchCooperativeKernel((void*)k, kBlocks, threads, args, bytes, 0), "launch"); p.epoch0 += p.ntok * (kLayers + 1); return r; }, warm, reps);
  CK(cudaDeviceSynchronize()); return ms < 0 ? ms : ms / p.ntok;
}
extern "C" {
unsigned long long spike_words_bytes(int nb) { return nb == 1 ? Words<1>::end : Words<8>::end; }
int spike_params_size() { return sizeof(Params); }
void* spike_report() { if (!g_report) { if (cudaHostAlloc((void**)&g_report, 64, cudaHostAllocMapped) != cudaSuccess) return nullptr; } for (int i = 0; i < 16; i++) g_report[i] = 0; return g_report; }
// ms a token (median over reps launches); negative on failure. The caller advances epoch0 by (warm + reps) launches.
float spike_run(const Params* p, int nb, int wait, int trace, int warm, int reps) {
#define V(n, e) if (nb == n && wait == e) return trace ? launch<n, e, true>(*p, warm, reps) : launch<n, e, false>(*p, warm, reps);
  V(1, kScout) V(1, kAll) V(1, kNone) V(8, kScout) V(8, kAll) V(8, kNone)
  return -2.0f;
}
float spike_read_plain(const void* w, unsigned long long n, void* out, int per_sm, int threads) { return n / 1e6f / median_ms([&]() -> int { read_plain<<<132 * per_sm, threads>>>((const uint4*)w, n / 16, (u32*)out); return check(cudaGetLastError(), "read"); }, 2, 7); }
float spike_read_bulk(const void* w, unsigned long long n, int blocks, int nslot, int window) {
  CK(cudaFuncSetAttribute(read_bulk, cudaFuncAttributeMaxDynamicSharedMemorySize, nslot * 16384));
  return n / 1e6f / median_ms([&]() -> int { read_bulk<<<blocks, 64, nslot * 16384>>>((const u8*)w, (u32)(n / 16384), nslot, window); return check(cudaGetLastError(), "bulk"); }, 2, 7);
}
}
