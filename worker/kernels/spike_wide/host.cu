// Host side of the wide spike: launches for run.py (ctypes).
#include <cuda_runtime.h>
#include <cstdio>
#include <algorithm>
#include <vector>
#include "prompt.cu"
#include "rates.cu"
static u32* g_report = nullptr;
static int check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return 0;
  printf("CUDA error at %s: %s\n", what, cudaGetErrorString(e));
  if (g_report && g_report[0]) printf("  wait limit: block %u thread %u site %u expected %u seen %u\n", g_report[1], g_report[2], g_report[3], g_report[4], g_report[5]);
  fflush(stdout); return 1;
}
#define CK(x) if (check((x), #x)) return -1.0f
template <int NC, int SK, bool WG, bool TRACE> static float launch(Params p, int warm, int reps) {
  auto k = wide<NC, SK, WG, TRACE>; const int bytes = Smem<NC, SK>::bytes(p.nslot, p.nact);
  CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchConfig_t c = {}; c.gridDim = kBlocks; c.blockDim = 384; c.dynamicSmemBytes = bytes;
  cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeCooperative; at[0].val.cooperative = 1; c.attrs = at; c.numAttrs = 1;
  cudaEvent_t a, b; CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b)); std::vector<float> v; void* args[] = {&p};
  for (int i = 0; i < warm + reps; i++) {
    CK(cudaEventRecord(a)); CK(cudaLaunchKernelExC(&c, (const void*)k, args)); CK(cudaEventRecord(b)); CK(cudaEventSynchronize(b));
    float ms; CK(cudaEventElapsedTime(&ms, a, b)); if (i >= warm) v.push_back(ms);
    p.epoch_x += p.ntok * (kLayers + 1); p.epoch_l += p.ntok * kLayers; p.epoch_t += p.ntok;
  }
  CK(cudaDeviceSynchronize()); cudaEventDestroy(a); cudaEventDestroy(b); std::sort(v.begin(), v.end()); return v[v.size() / 2] / p.ntok;
}
template <bool TRACE> static float launch_prompt(Params p, int warm, int reps) {
  auto k = prompt<TRACE>; const int bytes = p.nslot * 32768 + p.nact * 16384 + 32768 + 1024 + 1024;
  CK(cudaFuncSetAttribute(k, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  cudaLaunchConfig_t c = {}; c.gridDim = kBlocks; c.blockDim = 384; c.dynamicSmemBytes = bytes;
  cudaLaunchAttribute at[1]; at[0].id = cudaLaunchAttributeCooperative; at[0].val.cooperative = 1; c.attrs = at; c.numAttrs = 1;
  cudaEvent_t a, b; CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b)); std::vector<float> v; void* args[] = {&p};
  for (int i = 0; i < warm + reps; i++) {
    CK(cudaEventRecord(a)); CK(cudaLaunchKernelExC(&c, (const void*)k, args)); CK(cudaEventRecord(b)); CK(cudaEventSynchronize(b));
    float ms; CK(cudaEventElapsedTime(&ms, a, b)); if (i >= warm) v.push_back(ms);
    p.epoch_l += p.ntok * kLayers;
  }
  CK(cudaDeviceSynchronize()); cudaEventDestroy(a); cudaEventDestroy(b); std::sort(v.begin(), v.end()); return v[v.size() / 2];
}
extern "C" {
// ms a launch of ntok passes of 128 rows of one prompt
float prompt_run(const Params* p, int trace, int warm, int reps) { return trace ? launch_prompt<true>(*p, warm, reps) : launch_prompt<false>(*p, warm, reps); }
int wide_params_size() { return sizeof(Params); }
void* wide_report() { if (!g_report) { if (cudaHostAlloc((void**)&g_report, 64, cudaHostAllocMapped) != cudaSuccess) return nullptr; } for (int i = 0; i < 16; i++) g_report[i] = 0; return g_report; }
float wide_run(const Params* p, int nc, int sk, int wg, int trace, int warm, int reps) {
#define V(n, k, w, t) if (nc == n && sk == k && wg == w && trace == t) return launch<n, k, w, t>(*p, warm, reps);
  V(32, 2, true, false) V(64, 2, true, false) V(32, 2, false, false) V(64, 2, false, false) V(32, 2, true, true) V(64, 2, true, true)
  return -2.0f;
}
int wide_compare(int nc, const void* a, const void* b, int blocks, int steps, void* o1, void* o2) {
  const int bytes = steps * nc * 32;
  if (nc == 64) { if (check(cudaFuncSetAttribute(compare<64>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attr")) return 1; compare<64><<<blocks, 128, bytes>>>((const Word*)a, (const u8*)b, steps, (float*)o1, (float*)o2); }
  else { if (check(cudaFuncSetAttribute(compare<32>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "attr")) return 1; compare<32><<<blocks, 128, bytes>>>((const Word*)a, (const u8*)b, steps, (float*)o1, (float*)o2); }
  return check(cudaDeviceSynchronize(), "compare");
}
}
