#pragma once
// Spike of the looped decoder for wide passes (COLUMNS = 32 or 64 rows): Llama-3.1-8B shape, one GPU, one cooperative launch.
//
// 64 clusters of 2 blocks. Weights packed in units as for the narrow kernel ([unit of 1 or 2 tiles][k16][tile] fragments).
//   qkv, o, down: a cluster owns 6, 4, 4 row tiles; each of its blocks sums half of K; partials meet through distributed
//     shared memory in the block that owns the row (so a block reads half of the activations, and no multicast is needed).
//   gate/up, LM head: a block owns its rows with all of K.
// Leaves: 16 of K in every product. qkv, o, down: binary tree. gate/up and LM head: leaves add in ascending order.
// 8 consumer warps (2 warpgroups); warps 8 and 11 stream weights, K and V, warp 9 activations, warp 10 the norms.
// Weights, K and V (ring of stages of up to 32 KiB, bounded in flight) and activations (second ring) come by bulk copies. A stage
// is some k16 steps of all tiles of the block, or one leaf of K or V of each warp; all 8 consumer warps wait for it and release it,
// so parities cannot alias (the window must not exceed the ring).
// Activations lie in memory as B operand: [k16][n8 group][k half][8 columns][8 k] bf16: wgmma's core matrices without swizzle,
// and what ldmatrix wants; bulk copies of any run of k16 steps are contiguous.
// Exchanges: counters (red.release, ld.acquire), one a K leaf; proxy fences on both sides as bulk copies read generic writes.
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16; typedef unsigned char u8;

constexpr int kLayers = 32, kHidden = 4096, kVocab = 128256, kBlocks = 128, kTilesHead = kVocab / 16;
constexpr u64 kQkvBytes = 6144ull * 4096 * 2, kOBytes = 4096ull * 4096 * 2, kGuBytes = 28672ull * 4096 * 2, kDownBytes = 4096ull * 14336 * 2;
constexpr u64 kLayerBytes = kQkvBytes + kOBytes + kGuBytes + kDownBytes;

struct Params {
  const u8* weights; const u16* gamma; const u16* embedding; u8* kv; const float* rope;
  u8* acts;            // xa, xo, xm: [256 k16][32 NC] | xd: [896 k16][32 NC]
  u8* qkv;             // [8 groups][48 tiles][2][NC][8] bf16
  float* ssq;          // [2][128 blocks][NC]
  u64* best;           // [128 blocks][NC]
  u64* inv;            // [2][NC] {1/rms, tag}
  u32* counters;       // [6][16] spaced by 128 bytes: xa, xm, xo, xd, xq, xt
  const int* first_token; int* tokens; float* logits; u32* report; float* states; long long* trace;
  int ntok; u32 epoch_x, epoch_l, epoch_t; int nslot, nact, window, window_o; u32 flags;  // flags 2: no K and V copies, 4: no activation copies (wrong results: what do they cost?)
};

// ---- ptx ----
__device__ __forceinline__ u32 s32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void mbar_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mbar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ void mbar_arrive_remote(u32 b) { asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ bool mbar_try(u32 b, u32 parity) {
  u32 r; asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(r) : "r"(b), "r"(parity) : "memory"); return r;
}
__device__ __forceinline__ u32 mapa(u32 a, u32 rank) { u32 r; asm("mapa.shared::cluster.u32 %0,%1,%2;" : "=r"(r) : "r"(a), "r"(rank)); return r; }
// to the peer's shared memory; its mbarrier counts the bytes, so neither side needs a fence for them
__device__ __forceinline__ void bulk_send(u32 dst, u32 src, u32 n, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(dst), "r"(src), "r"(n), "r"(bar) : "memory");
}
__device__ __forceinline__ void sts128(u32 a, float x, float y, float z, float w) { asm volatile("st.shared.v4.f32 [%0],{%1,%2,%3,%4};" ::"r"(a), "f"(x), "f"(y), "f"(z), "f"(w) : "memory"); }
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 n, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(dst), "l"(src), "r"(n), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 n, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(dst), "l"(src), "r"(n), "r"(bar) : "memory");
}
__device__ __forceinline__ u64 evict_first() { u64 p; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
struct Word { u32 x, y, z, w; };
__device__ __forceinline__ Word ld_kv(const u8* p) { Word v; asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ Word ld_word(const void* p) { Word v; asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ u32 ld_relaxed(const void* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ u64 ld_relaxed64(const void* p) { u64 v; asm volatile("ld.relaxed.gpu.global.u64 %0,[%1];" : "=l"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void st_relaxed64(void* p, u64 v) { asm volatile("st.relaxed.gpu.global.u64 [%0],%1;" ::"l"(p), "l"(v) : "memory"); }
__device__ __forceinline__ u32 ld_acquire(const u32* p) { u32 v; asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void red_release(u32* p) { asm volatile("red.release.gpu.global.add.u32 [%0],1;" ::"l"(p) : "memory"); }
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ Word lds128(u32 a) { Word v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v; }
__device__ __forceinline__ void ldsm(u32 a, u32* r) { asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(a)); }
__device__ __forceinline__ void mma(float* c, const Word& a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
#include "wgmma.inc"
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N = 0> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
template <int N> __device__ __forceinline__ void pin(float* c) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}
__device__ __forceinline__ u32 bf16x2(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float bf16f(u32 v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float rsqrt_(float x) { float r; asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float rcp(float x) { float r; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ u32 transpose8(u32 v) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(v)); return r; }
template <class T> __device__ __forceinline__ T shfl(T v, int l) { return __shfl_sync(~0u, v, l); }
template <class T> __device__ __forceinline__ T shflx(T v, int m) { return __shfl_xor_sync(~0u, v, m); }
template <int N> __device__ __forceinline__ float tree(const float* v) { if constexpr (N == 1) return v[0]; else return tree<N / 2>(v) + tree<N / 2>(v + N / 2); }

// ---- waits: bounded, with a report ----
constexpr long long kWaitLimit = 400000000;
__device__ __forceinline__ void wait_failed(const Params& p, u32 site, u32 expected, u32 seen) {
  volatile u32* r = p.report; r[1] = blockIdx.x; r[2] = threadIdx.x; r[3] = site; r[4] = expected; r[5] = seen;
  asm volatile("fence.acq_rel.sys;" ::: "memory"); r[0] = 1; asm volatile("fence.acq_rel.sys;" ::: "memory"); asm volatile("trap;");
}
__device__ __forceinline__ void mbar_wait(const Params& p, u32 b, u32 parity, u32 site) {
  if (!mbar_try(b, parity)) {
    long long t0 = clock64();
    while (!mbar_try(b, parity)) if (clock64() - t0 > 2 * kWaitLimit) wait_failed(p, site, parity, b);
  }
}
// until counter >= target, wrap-safe
__device__ __forceinline__ void count_wait(const Params& p, const u32* c, u32 target, u32 site) {
  u32 v = ld_acquire(c);
  if ((int)(v - target) < 0) {
    long long t0 = clock64();
    while ((int)((v = ld_acquire(c)) - target) < 0) if (clock64() - t0 > kWaitLimit) wait_failed(p, site, target, v);
  }
}

// acc (16 x NC, a warp) += A (a lane's fragment) x B (k16 x NC in shared memory). WG: four warps, rows of four tiles.
template <int NC, bool WG> __device__ __forceinline__ void product(float* acc, const Word& a, u32 b) {
  if constexpr (WG) wgmma<NC>(acc, a, (u64)((b & 0x3ffff) >> 4) | (128ull >> 4) << 16 | (256ull >> 4) << 32);
  else {
#pragma unroll
    for (int j = 0; j < NC / 16; j++) { u32 r[4]; ldsm(b + j * 512 + (threadIdx.x & 31) * 16, r); mma(acc + 8 * j, a, r[0], r[1]); mma(acc + 8 * j + 4, a, r[2], r[3]); }
  }
}

template <int V> struct Int { static constexpr int v = V; };
template <int NC, int SK> struct Smem {
  static constexpr u32 slot = 32768, act = 8 * NC * 32, recv = NC * 512 > 24576 ? NC * 512 : 24576;
  static u32 __host__ __device__ bytes(int nslot, int nact) { return nslot * slot + nact * act + recv + 2 * NC * 4 + 512 + 1024; }
};

template <int NC, int SK, bool WG, bool TRACE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) wide(const __grid_constant__ Params p) {
  constexpr int KB = NC * 32, R = NC / 2;                      // bytes of a k16 block of activations; accumulators of a 16 x NC tile a lane
  constexpr int KSH = 2 * SK, KSQ = 4 * SK, KSO = 4 * SK, KA = 8;  // k16 steps a stage: gate/up and head, qkv, o and down (of each warpgroup); of an activation slot
  constexpr u32 kW = Smem<NC, SK>::slot, kA = Smem<NC, SK>::act;
  extern __shared__ __align__(1024) u8 smem[];
  const int nslot = p.nslot, nact = p.nact;
  const u32 ring = s32(smem), aring = ring + nslot * kW, rbuf = aring + nact * kA, invs = rbuf + Smem<NC, SK>::recv, ropes = invs + 2 * NC * 4, bars = ropes + 512;
  const u32 wfull = bars, wempty = bars + 128, afull = bars + 256, aempty = bars + 384, rfull = bars + 512, rfree = bars + 520, invf = bars + 528;
  float* fr = (float*)(smem + (rbuf - ring)); float* finv = (float*)(smem + (invs - ring)); float* frope = (float*)(smem + (ropes - ring));
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, s = blockIdx.x, pair = s >> 1, half = s & 1, group = s >> 4, member = s & 15;
  u8 *xa = p.acts, *xo = xa + 256 * KB, *xm = xo + 256 * KB, *xd = xm + 256 * KB;
  u32 *ca = p.counters, *cm = ca + 512, *co = cm + 512, *cd = co + 512, *cq = cd + 512, *ct = cq + 512;
  if (tid == 0) {
    for (int i = 0; i < 16; i++) { mbar_init(wfull + 8 * i, 2); mbar_init(wempty + 8 * i, 8); mbar_init(afull + 8 * i, 1); mbar_init(aempty + 8 * i, 8); }
    mbar_init(rfull, 8); mbar_init(rfree, 2); mbar_init(invf, 1); mbar_init(invf + 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  if (tid < 128) frope[tid] = p.rope[tid];
  if (TRACE && tid == 0) { u32 id; asm volatile("mov.u32 %0, %%smid;" : "=r"(id)); p.trace[(u64)s * (kLayers + 1) * 24 + 23] = id; }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  const int head_lo = s * kTilesHead / kBlocks, head_n = (s + 1) * kTilesHead / kBlocks - head_lo, head_units = (head_n + 1) / 2, head_passes = (head_units + 7) / 8;

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 8 || warp == 11) {  // ---- the weight stream, bounded in flight; two warps share the copies of a stage ----
      const u64 policy = evict_first(); u32 i = 0, slot = 0, ph = 1, landed = 0, wslot = 0, wph = 0, window = p.window;
      // lanes with `on` copy `bytes` from src to offset dst of the stage's slot; each warp takes the lanes of its parity of every stage
      auto issue = [&](bool on, const u8* src, u32 dst, u32 bytes) {
        on = on && (lane & 1) == (warp == 11); const u32 total = __reduce_add_sync(~0u, on ? bytes : 0);
        if (lane == 0) {
          mbar_wait(p, wempty + 8 * slot, ph, 1);
          while (landed + window <= i) { mbar_wait(p, wfull + 8 * wslot, wph, 2); landed++; if (++wslot == (u32)nslot) { wslot = 0; wph ^= 1; } }
          mbar_expect(wfull + 8 * slot, total);
        }
        __syncwarp();
        if (on) bulk_load(ring + slot * kW + dst, src, bytes, wfull + 8 * slot, policy);
        i++; if (++slot == (u32)nslot) { slot = 0; ph ^= 1; }
      };
      for (int tok = 0; tok < p.ntok; tok++) {
        const u8* w = p.weights;
        for (int l = 0; l < kLayers; l++, w += kLayerBytes) {
          { const int wd = lane & 1 ? 1 : 2, first = pair * 6 + (lane >> 1) * 3 + (lane & 1) * 2; const u32 dst = ((lane >> 1) * 3 + (lane & 1) * 2) * KSQ * 512;
            const u8* src = w + (u64)first * 256 * 512 + (u64)half * 128 * wd * 512;
            for (int k = 0; k < 128; k += KSQ) issue(lane < 4, src + (u64)k * wd * 512, dst, KSQ * wd * 512); }
          { constexpr int WPI = 128 / NC, LPW = 32 / WPI; const int col = member * (NC / 16) + (lane & 7) / WPI, leaf0 = (lane & 7) % WPI * LPW;
            const u8* src = p.kv + ((((u64)l * NC + col) * 8 + group) * 32 + leaf0) * 8192;
            for (int k = 0; k < 2 * LPW; k++) issue(lane < 8 && !(p.flags & 2), src + (u64)(k % LPW) * 8192 + k / LPW * 4096, lane * 4096, 4096); }
          auto pair_phase = [&](const u8* base, int kl) {
            const int wg = lane >> 1, u = lane & 1; const u8* src = base + ((u64)(pair * 4 + 2 * u) * 16 * kl + (u64)(8 * half + 4 * wg) * kl * 2) * 512;
            for (int k = 0; k < 4 * kl; k += KSO) issue(lane < 4, src + k * 1024, (wg * 2 + u) * KSO * 1024, KSO * 1024);
          };
          window = p.window_o; pair_phase(w + kQkvBytes, 16); window = p.window;
          { const u8* src = w + kQkvBytes + kOBytes + (u64)(7 * s + lane) * 2 * 256 * 512;
            for (int k = 0; k < 256; k += KSH) issue(lane < 7, src + k * 1024, lane * KSH * 1024, KSH * 1024); }
          window = p.window_o; pair_phase(w + kQkvBytes + kOBytes + kGuBytes, 56); window = p.window;
        }
        for (int q = 0; q < head_passes; q++) {
          const int tiles = min(16, head_n - 16 * q), wd = min(2, tiles - 2 * lane); const u8* src = w + (u64)(head_lo + 16 * q + 2 * lane) * 256 * 512;
          for (int k = 0; k < 256; k += KSH) issue(wd > 0, src + (u64)k * wd * 512, lane * KSH * 1024, KSH * wd * 512);
        }
      }
    } else if (warp == 9) {  // ---- the activation stream ----
      u32 slot = 0, ph = 1, ready = 0;
      auto begin = [&](u32 bytes) { if (lane == 0) { mbar_wait(p, aempty + 8 * slot, ph, 11); if (p.flags & 4) mbar_arrive(afull + 8 * slot); else mbar_expect(afull + 8 * slot, bytes); } __syncwarp(); };
      auto next = [&] { if (++slot == (u32)nact) { slot = 0; ph ^= 1; } };
      auto need = [&](const u32* c, int n, int i, u32 target, u32 site) {  // counter i of n
        if (!(ready >> i & 1)) {
          long long t0 = clock64();
          while (true) {
            bool ok = true; u32 v = 0; if (lane < n) { v = ld_acquire(c + lane * 32); ok = (int)(v - target) >= 0; }
            ready = __ballot_sync(~0u, ok); if (ready >> i & 1) break;
            if (clock64() - t0 > kWaitLimit && lane == i) wait_failed(p, site, target, v);
          }
          proxy_fence(); __syncwarp();
        }
      };
      auto copy = [&](u32 dst, const u8* src, u32 bytes) { if (!(p.flags & 4)) bulk_load(aring + slot * kA + dst, src, bytes, afull + 8 * slot); };
      auto pair_phase = [&](const u8* base, int kl, const u32* c, int n, u32 target, u32 site) {
        ready = 0;
        for (int k = 0; k < 4 * kl; k += 4) {
          need(c, n, (8 * half + k / kl) * n / 16, target, site); need(c, n, (8 * half + 4 + k / kl) * n / 16, target, site); begin(8 * KB);
          if (lane < 2) copy(lane * 4 * KB, base + (u64)((8 * half + 4 * lane) * kl + k) * KB, 4 * KB);
          next();
        }
      };
      auto hidden_phase = [&](const u8* base, int k0, int k1, const u32* c, u32 target, u32 site) {
        for (int k = k0; k < k1; k += KA) { need(c, 16, k / 16, target, site); begin(KA * KB); if (lane == 0) copy(0, base + (u64)k * KB, KA * KB); next(); }
      };
      for (int tok = 0; tok < p.ntok; tok++) {
        const u32 nx = p.epoch_x + tok * (kLayers + 1) + 1, nl = p.epoch_l + tok * kLayers + 1;
        for (int l = 0; l < kLayers; l++) {
          ready = 0; hidden_phase(xa, 128 * half, 128 * half + 128, ca, 8 * (nx + l), 21);
          pair_phase(xo, 16, co, 8, 16 * (nl + l), 22);
          ready = 0; hidden_phase(xm, 0, 256, cm, 8 * (nl + l), 23);
          pair_phase(xd, 56, cd, 16, 8 * (nl + l), 24);
        }
        ready = 0; for (int q = 0; q < head_passes; q++) hidden_phase(xa, 0, 256, ca, 8 * (nx + kLayers), 25);
      }
    } else {  // ---- 1/rms of each column, from the blocks' sums of squares ----
      auto norm = [&](int buf, const u32* c, u32 target, u32 site) {
        if (s < NC && lane < 16) count_wait(p, c + lane * 32, target, site);
        __syncwarp();
        if (s < NC) {  // block c sums column c's 128 values as a binary tree and tells all: a value and a tag in one word
          float v[4];
#pragma unroll
          for (int i = 0; i < 4; i++) v[i] = __uint_as_float(ld_relaxed(p.ssq + (buf * kBlocks + lane * 4 + i) * NC + s));
          float q = tree<4>(v);
#pragma unroll
          for (int d = 1; d < 32; d *= 2) q += shflx(q, d);
          if (lane == 0) st_relaxed64(p.inv + buf * NC + s, (u64)target << 32 | __float_as_uint(rsqrt_(q * (1.0f / kHidden) + 1e-5f)));
        }
#pragma unroll 1
        for (int col = lane; col < NC; col += 32) {
          const u64* q = p.inv + buf * NC + col; u64 v = ld_relaxed64(q); const long long t0 = clock64();
          while ((u32)(v >> 32) != target) { if (clock64() - t0 > kWaitLimit) wait_failed(p, site + 10, target, (u32)(v >> 32)); v = ld_relaxed64(q); }
          finv[buf * NC + col] = __uint_as_float((u32)v);
        }
        __syncwarp(); if (lane == 0) mbar_arrive(invf + 8 * buf);
      };
      for (int tok = 0; tok < p.ntok; tok++) {
        const u32 nx = p.epoch_x + tok * (kLayers + 1) + 1, nl = p.epoch_l + tok * kLayers + 1;
        for (int l = 0; l < kLayers; l++) { norm(0, ca, 8 * (nx + l), 26); norm(1, cm, 8 * (nl + l), 27); }
        norm(0, ca, 8 * (nx + kLayers), 28);
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int wg = warp >> 2, wi = warp & 3;
    u32 ws = 0, wp = 0, as_ = 0, ap = 0, rp = 0, ip[2] = {0, 0};
    auto w_wait = [&] { mbar_wait(p, wfull + 8 * ws, wp, 3); __syncwarp(); };
    auto a_wait = [&] { mbar_wait(p, afull + 8 * as_, ap, 4); __syncwarp(); };
    auto w_next = [&] { if (++ws == (u32)nslot) { ws = 0; wp ^= 1; } };
    // Released once the products have used it: wgmma: after wait_group; mma: the arrive's address depends on every chain.
    auto w_release = [&](u32 slot, bool never) { __syncwarp(); if (lane == 0) mbar_arrive(wempty + 8 * slot + (never ? 8192 : 0)); };
    auto a_release = [&](bool never) { __syncwarp(); if (lane == 0) mbar_arrive(aempty + 8 * as_ + (never ? 8192 : 0)); if (++as_ == (u32)nact) { as_ = 0; ap ^= 1; } };
    auto used = [&](const float* c) { bool n = false; if constexpr (!WG) {
#pragma unroll
      for (int j = 0; j < R; j += 4) n |= __float_as_uint(c[j]) == 0x7fedcba9u; } return n; };
    auto bar = [&] { asm volatile("bar.sync 1, 256;" ::: "memory"); };
    auto publish = [&](u32* c) { proxy_fence(); bar(); if (tid == 0) red_release(c); };
    long long* tr = TRACE && tid == 0 ? p.trace + (u64)s * (kLayers + 1) * 24 : nullptr;
#define STAMP(i_) if (TRACE && tr && tok == p.ntok - 1) tr[l * 24 + i_] = clock64();

    // one tile a warp, steps of 4 k16: WPS of them a weight stage, APS an activation slot; all leaves of this block's half of K
    auto leaf_sum = [&](auto nl_c, auto aps_c, auto wps_c, int steps, u32 a0, u32 astride, u32 b0, float* acc) {
      constexpr int NL = decltype(nl_c)::v, APS = decltype(aps_c)::v, WPS = decltype(wps_c)::v;
      auto leaf = [&](float* c) {
#pragma unroll
        for (int i = 0; i < R; i++) c[i] = 0;
#pragma unroll 1
        for (int st = 0; st < steps; st++) {
          const u32 wsub = st & (WPS - 1), asub = st & (APS - 1);
          if (asub == 0) a_wait();
          if (wsub == 0) w_wait();
          Word f[4]; const u32 q = ring + ws * kW + a0 + lane * 16 + wsub * 4 * astride, b = aring + as_ * kA + b0 + asub * 4 * KB;
#pragma unroll
          for (int k = 0; k < 4; k++) f[k] = lds128(q + k * astride);
          if (WG) { pin<R>(c); wgmma_fence(); }
#pragma unroll
          for (int k = 0; k < 4; k++) product<NC, WG>(c, f[k], b + k * KB);
          if (WG) { wgmma_commit(); wgmma_wait(); pin<R>(c); }
          const bool never = used(c); if (wsub == WPS - 1) { w_release(ws, never); w_next(); } if (asub == APS - 1) a_release(never);
        }
      };
      auto add = [&](float* a, const float* b) {
#pragma unroll
        for (int i = 0; i < R; i++) a[i] += b[i]; };
      auto sum4 = [&](float* a) { float b[R], c[R]; leaf(a); leaf(b); add(a, b); leaf(b); leaf(c); add(b, c); add(a, b); };
      sum4(acc);
      if constexpr (NL == 8) { float d[R]; sum4(d); add(acc, d); }
    };
    // two tiles a warp, all of K, leaves in ascending order; units of one tile: tile 1 is computed from tile 0 and ignored
    auto hidden_sum = [&](int width, float (*sum)[R]) {
      float acc[2][R];
#pragma unroll
      for (int i = 0; i < R; i++) { sum[0][i] = 0; sum[1][i] = 0; }
      const u32 a0 = warp * KSH * 1024 + lane * 16;
#pragma unroll 1
      for (int leaf = 0; leaf < 16; leaf++) {
#pragma unroll
        for (int i = 0; i < R; i++) { acc[0][i] = 0; acc[1][i] = 0; }
#pragma unroll 1
        for (int as = 0; as < 2; as++) {
          a_wait(); const u32 b = aring + as_ * kA; Word f[2][2][2]; bool never = false;
          auto load = [&](Word (*x)[2], int w) {  // two k16 steps
            if (w % SK == 0) w_wait();
            const u32 q = ring + ws * kW + a0 + (w % SK) * 2 * width * 512;
#pragma unroll
            for (int k = 0; k < 2; k++) { x[k][0] = lds128(q + k * width * 512); x[k][1] = lds128(q + k * width * 512 + (width - 1) * 512); }
          };
          load(f[0], 0);
#pragma unroll
          for (int w = 0; w < 4; w++) {
            if (WG) { pin<R>(acc[0]); pin<R>(acc[1]); wgmma_fence(); }
#pragma unroll
            for (int k = 0; k < 2; k++) { product<NC, WG>(acc[0], f[w & 1][k][0], b + (w * 2 + k) * KB); product<NC, WG>(acc[1], f[w & 1][k][1], b + (w * 2 + k) * KB); }
            if (WG) wgmma_commit();
            const u32 cur = ws; if (w % SK == SK - 1) w_next();
            if (w < 3 && w % SK != SK - 1) load(f[(w + 1) & 1], w + 1);
            if (WG) { wgmma_wait(); pin<R>(acc[0]); pin<R>(acc[1]); }
            never = used(acc[0]) | used(acc[1]); if (w % SK == SK - 1) { w_release(cur, never); if (w < 3) load(f[(w + 1) & 1], w + 1); }
          }
          a_release(never);
        }
#pragma unroll
        for (int i = 0; i < R; i++) { sum[0][i] += acc[0][i]; sum[1][i] += acc[1][i]; }
      }
    };
    // Partials to the block of the cluster that owns the rows. A tile is [16 rows][NC] fp32, columns swizzled; in registers a
    // lane holds 4 columns of one row (lanes t, t ^ 1 swap halves of the product's layout). The peer's tiles go by one bulk copy
    // each, whose bytes complete its barrier; the 8 warps' arrivals order what lies here.
    constexpr u32 kTile = NC * 64;
    auto rows4 = [&](float* c) {
#pragma unroll
      for (int j = 0; j < NC / 8; j++) {
        float* v = c + 4 * j; const float s0 = shflx(t & 1 ? v[0] : v[2], 1), s1 = shflx(t & 1 ? v[1] : v[3], 1);
        if (t & 1) { v[0] = s0; v[1] = s1; } else { v[2] = s0; v[3] = s1; }
      }
    };
    auto at = [&](u32 tile, int swz_tile, int j) { const int row = g + 8 * (t & 1), sw = ((row ^ (row >> 3) ^ (2 * swz_tile)) & 3) << 3; return rbuf + tile * kTile + (row * NC + ((8 * j + 4 * (t >> 1)) ^ sw)) * 4; };
    auto put = [&](u32 tile, int swz_tile, const float* c) {
#pragma unroll
      for (int j = 0; j < NC / 8; j++) sts128(at(tile, swz_tile, j), c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]); };
    auto add_to = [&](u32 tile, int swz_tile, float* c) {
#pragma unroll
      for (int j = 0; j < NC / 8; j++) { const Word v = lds128(at(tile, swz_tile, j)); c[4 * j] += __uint_as_float(v.x); c[4 * j + 1] += __uint_as_float(v.y); c[4 * j + 2] += __uint_as_float(v.z); c[4 * j + 3] += __uint_as_float(v.w); } };
    auto ship = [&](u32 from, u32 to) { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncwarp(); if (lane == 0) bulk_send(mapa(rbuf + to * kTile, half ^ 1), rbuf + from * kTile, kTile, mapa(rfull, half ^ 1)); };
    auto arrive_and_wait = [&](u32 bytes) { __syncwarp(); if (lane == 0) { if (warp == 0) mbar_expect(rfull, bytes); else mbar_arrive(rfull); } mbar_wait(p, rfull, rp, 7); __syncwarp(); };
    // o, down: tiles 0..3 warpgroup 1's, 4 and 5 to the peer, 6 and 7 from the peer; own sums in 2 * half + 0, 1
    auto exchange_pair = [&](float* c) {
      mbar_wait(p, rfree, rp ^ 1, 6); __syncwarp(); rows4(c);
      if (wg == 1) put(wi, wi & 1, c);
      bar();
      if (wg == 0) { add_to(wi, wi & 1, c); if ((wi >> 1) == half) put(wi, wi & 1, c); else { put(4 + (wi & 1), wi & 1, c); ship(4 + (wi & 1), 6 + (wi & 1)); } }
      arrive_and_wait(2 * kTile);
    };
    // qkv: tiles 0..2 to the peer, 3..5 from it and then the sums
    auto exchange_qkv = [&](int u, int r, float* c) {
      mbar_wait(p, rfree, rp ^ 1, 6); __syncwarp(); rows4(c); const bool on = warp < 6, mine = u == half;
      if (on && !mine) { put(r, r & 1, c); ship(r, 3 + r); }
      arrive_and_wait(3 * kTile);
      if (on && mine) { add_to(3 + r, r & 1, c); put(3 + r, r & 1, c); }
      bar();
    };
    auto received = [&](int tile, int swz_tile, int row, int col) { return fr[tile * NC * 16 + row * NC + (col ^ (((row ^ (row >> 3) ^ (2 * swz_tile)) & 3) << 3))]; };
    // after the block's barrier that follows the last use of what was read
    auto recv_done = [&] { if (tid < 2) mbar_arrive_remote(mapa(rfree, tid)); rp ^= 1; };
    auto wait_inv = [&](int buf) { mbar_wait(p, invf + 8 * buf, ip[buf], 8); ip[buf] ^= 1; __syncwarp(); };

    // own rows of the hidden state: warp = 8 columns, lane = (8 of the 32 rows, column)
    const int hc = (warp * 8 + (lane & 7)) % NC, hq = lane >> 3; const bool own = warp < NC / 8; float h[8] = {}; Word gw;
    auto load_gamma = [&](const u16* gamma) { gw = ld_word(gamma + s * 32 + hq * 8); };
    auto publish_x = [&](u8* x, u32* counters, float* ssq) {
      if (own) {
        float q[8]; const u32 gg[4] = {gw.x, gw.y, gw.z, gw.w}; Word o; u32* oo = &o.x;
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = h[i] * h[i];
#pragma unroll
        for (int i = 0; i < 4; i++) oo[i] = bf16x2(h[2 * i] * bf16f(gg[i] & 0xffff), h[2 * i + 1] * bf16f(gg[i] >> 16));
        *(Word*)(x + (u64)(2 * s + (hq >> 1)) * KB + warp * 256 + (hq & 1) * 128 + (hc & 7) * 16) = o;
        float sum = tree<8>(q); sum += shflx(sum, 8); sum += shflx(sum, 16);
        if (hq == 0) ssq[s * NC + hc] = sum;
      }
      publish(counters + (s >> 3) * 32);
    };
    auto residual = [&](int which, int l, int tok) {
      if (own) {
#pragma unroll
        for (int i = 0; i < 8; i++) { const int row = hq * 8 + i; h[i] += received(2 * half + (row >> 4), row >> 4, row & 15, hc) + received(6 + (row >> 4), row >> 4, row & 15, hc); }
        if (TRACE && p.states && tok == p.ntok - 1) for (int i = 0; i < 8; i++) p.states[((u64)(l * 2 + which) * NC + hc) * kHidden + s * 32 + hq * 8 + i] = h[i];
      }
    };

    // ---- attention: 8 warps, NC / 16 columns of this kv head; a leaf is 16 positions ----
    auto attention = [&](int l, u32 target, int tok) {
      constexpr int WPI = 128 / NC, LPW = 32 / WPI;
      const int item = warp / WPI, part = warp % WPI, col = member * (NC / 16) + item, leaf0 = part * LPW;
      u8* kv = p.kv + ((((u64)l * NC + col) * 8 + group) * 32 + leaf0) * 8192 + lane * 16;
      float *zs = fr + 4096, *rs = zs + NC / 16 * 128, *ds = rs + NC / 16 * 128; u32* pbs = (u32*)fr + warp * 512;
      Word k[2][8];
      auto load2 = [&](u32* slots) {  // this warp's leaf of the next two stages
#pragma unroll
        for (int b = 0; b < 2; b++) {
          w_wait(); slots[b] = ws; const u32 q = ring + ws * kW + warp * 4096 + lane * 16;
#pragma unroll
          for (int j = 0; j < 8; j++) k[b][j] = lds128(q + j * 512);
          w_next();
        } };
      if (lane == 0) count_wait(p, cq + group * 32, target, 9);
      __syncwarp(); STAMP(13)
      const u8* qb = p.qkv + (u64)group * 48 * NC * 32 + col * 16; u32 qx[8], qy[8]; const bool newest = part == WPI - 1;
#pragma unroll
      for (int j = 0; j < 8; j++) {
        qx[j] = qy[j] = 0;
        if (g < 4 || (newest && g == 7)) { const u8* q = qb + ((g == 7 ? 32 : g * 8) + j) * NC * 32 + t * 4; qx[j] = ld_relaxed(q); qy[j] = ld_relaxed(q + NC * 16); }
      }
      constexpr float kScale = 0.08838834764831845f * 1.4426950408889634f;
#pragma unroll 1
      for (int i0 = 0; i0 < LPW; i0 += 2) {  // two leaves at a time
          u32 slots[2]; load2(slots);
          float sc[2][4] = {}, m[2][2], l[2][2], ex[2][4];
#pragma unroll
          for (int b = 0; b < 2; b++) {
            const int i = i0 + b; Word* kk = k[b];
            if (newest && i == LPW - 1 && g == 7) {
#pragma unroll
              for (int j = 0; j < 8; j++) { kk[j].y = qx[j]; kk[j].w = qy[j]; *(Word*)(kv + (u64)i * 8192 + j * 512) = kk[j]; }
            }
            __syncwarp();
          }
#pragma unroll
          for (int j = 0; j < 8; j++)
#pragma unroll
            for (int b = 0; b < 2; b++) mma(sc[b], k[b][j], g < 4 ? qx[j] : 0, g < 4 ? qy[j] : 0);
#pragma unroll
          for (int b = 0; b < 2; b++) w_release(slots[b], __float_as_uint(sc[b][0]) == 0x7fedcba9u);
#pragma unroll
          for (int b = 0; b < 2; b++) { m[b][0] = fmaxf(sc[b][0], sc[b][2]); m[b][1] = fmaxf(sc[b][1], sc[b][3]); }
#pragma unroll
          for (int d = 4; d < 32; d *= 2)
#pragma unroll
            for (int b = 0; b < 2; b++) { m[b][0] = fmaxf(m[b][0], shflx(m[b][0], d)); m[b][1] = fmaxf(m[b][1], shflx(m[b][1], d)); }
#pragma unroll
          for (int b = 0; b < 2; b++) {
#pragma unroll
            for (int c = 0; c < 4; c++) ex[b][c] = ex2((sc[b][c] - m[b][c & 1]) * kScale);
            l[b][0] = ex[b][0] + ex[b][2]; l[b][1] = ex[b][1] + ex[b][3];
          }
#pragma unroll
          for (int d = 4; d < 32; d *= 2)
#pragma unroll
            for (int b = 0; b < 2; b++) { l[b][0] += shflx(l[b][0], d); l[b][1] += shflx(l[b][1], d); }
#pragma unroll
          for (int b = 0; b < 2; b++) {
            const int i = i0 + b; const u32 pb0 = transpose8(bf16x2(ex[b][0], ex[b][1])), pb1 = transpose8(bf16x2(ex[b][2], ex[b][3]));
            if (lane < 16) { pbs[i * 32 + lane * 2] = pb0; pbs[i * 32 + lane * 2 + 1] = pb1; }
            if (lane < 2) {
              float* z = zs + (item * 32 + leaf0 + i) * 4 + 2 * t; z[0] = m[b][0] * kScale + lg2(l[b][0]); z[1] = m[b][1] * kScale + lg2(l[b][1]);
              float* r = rs + (item * 32 + leaf0 + i) * 4 + 2 * t; r[0] = rcp(l[b][0]); r[1] = rcp(l[b][1]);
            }
          }
        }
      STAMP(14) bar();
      float e[4];
#pragma unroll
      for (int hd = 0; hd < 4; hd++) {
        const float z = zs[(item * 32 + lane) * 4 + hd]; float mx = z, den = 0;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) mx = fmaxf(mx, shflx(mx, d));
        e[hd] = ex2(z - mx);
#pragma unroll
        for (int j = 0; j < 8; j++) den += shfl(e[hd], (lane & 24) + j);
        den += shflx(den, 8); den += shflx(den, 16);
        if (part == 0 && lane == 0) ds[item * 4 + hd] = rcp(den);
      }
      float n[8][4] = {}; float* ps = t == 0 ? fr + warp * 512 : LPW == 16 ? fr + 5136 + warp * 256 : fr + warp * 512 + 256;  // partial sums: heads 0 and 1, heads 2 and 3
      auto partial = [&](int j, int c) -> float& { return ps[(c & 1) * 128 + j * 16 + g + 8 * (c >> 1)]; };
#pragma unroll 1
      for (int i0 = 0; i0 < LPW; i0 += 2) {
        u32 slots[2]; load2(slots);
#pragma unroll
        for (int b = 0; b < 2; b++) {
          const int i = i0 + b; Word* vv = k[b];
          if (LPW == 16 && i == 8) {  // the first group of 8 leaves waits in shared memory
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
              for (int c = 0; c < 4; c++) { if (t < 2) partial(j, c) = n[j][c]; n[j][c] = 0; }
          }
          if (newest && i == LPW - 1 && t == 3) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
              const u8* q = qb + (40 + j) * NC * 32 + (g & ~1) * 2; u32 lo = ld_relaxed(q), hi = ld_relaxed(q + NC * 16); lo = g & 1 ? lo & 0xffff0000u : lo << 16; hi = g & 1 ? hi & 0xffff0000u : hi << 16;
              vv[j].z = (vv[j].z & 0xffff) | lo; vv[j].w = (vv[j].w & 0xffff) | hi; *(Word*)(kv + (u64)i * 8192 + 4096 + j * 512) = vv[j];
            }
          }
          __syncwarp();
          const u32 pb0 = lane < 16 ? pbs[i * 32 + lane * 2] : 0, pb1 = lane < 16 ? pbs[i * 32 + lane * 2 + 1] : 0;
          const float* r = rs + (item * 32 + leaf0 + i) * 4 + 2 * (t & 1); const float r0 = r[0], r1 = r[1];
          const float a0 = shfl(e[0], leaf0 + i), a1 = shfl(e[1], leaf0 + i), a2 = shfl(e[2], leaf0 + i), a3 = shfl(e[3], leaf0 + i); const float e0 = t & 1 ? a2 : a0, e1 = t & 1 ? a3 : a1;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            float o[4] = {}; mma(o, vv[j], pb0, pb1);
            n[j][0] += e0 * (o[0] * r0); n[j][1] += e1 * (o[1] * r1); n[j][2] += e0 * (o[2] * r0); n[j][3] += e1 * (o[3] * r1);
          }
          w_release(slots[b], __float_as_uint(n[7][0]) == 0x7fedcba9u);
        }
      }
      __syncwarp();
      if (t < 2) {
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int c = 0; c < 4; c++) partial(j, c) = LPW == 16 ? partial(j, c) + n[j][c] : n[j][c];
      }
      STAMP(15) bar();
      if (tid < NC * 4) {
        const int it = tid >> 6, hd = tid >> 4 & 3, j = tid >> 1 & 7, hf = tid & 1, c = member * (NC / 16) + it; const float d = ds[it * 4 + hd]; float o[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float v[WPI];
#pragma unroll
          for (int w = 0; w < WPI; w++) v[w] = fr[(hd < 2 || LPW != 16 ? (it * WPI + w) * 512 + hd * 128 : 5136 + (it * WPI + w) * 256 + (hd - 2) * 128) + j * 16 + hf * 8 + i];
          o[i] = tree<WPI>(v) * d;
        }
        *(Word*)(xo + (u64)((group * 4 + hd) * 8 + j) * KB + (c >> 3) * 256 + hf * 128 + (c & 7) * 16) = Word{bf16x2(o[0], o[1]), bf16x2(o[2], o[3]), bf16x2(o[4], o[5]), bf16x2(o[6], o[7])};
      }
    };

    using I1 = Int<1>; using I2 = Int<2>; using I4 = Int<4>; using I8 = Int<8>;
    int token = p.first_token[hc];
    for (int tok = 0; tok < p.ntok; tok++) {
      const u32 nl = p.epoch_l + tok * kLayers + 1;
      if (own) {
        const Word e = ld_word(p.embedding + (u64)token * kHidden + s * 32 + hq * 8); const u32 ee[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int i = 0; i < 8; i++) h[i] = bf16f(i & 1 ? ee[i / 2] >> 16 : ee[i / 2] & 0xffff);
      }
      load_gamma(p.gamma); publish_x(xa, ca, p.ssq);
      if (TRACE && tr && tok == p.ntok - 1) { u64 ns; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)); tr[21] = ns; tr[22] = clock64(); }
#pragma unroll 1
      for (int l = 0; l < kLayers; l++) {
        STAMP(0)
        { float acc[R]; // qkv: tiles 0..3 warpgroup 0, 4 and 5 warpgroup 1
          const int tile = min(warp, 5), u = tile / 3, r = tile % 3;
          leaf_sum(I8{}, I2{}, Int<SK>{}, 4, (u * 3 + (r == 2 ? 2 : 0)) * KSQ * 512 + (r == 1 ? 512 : 0), r == 2 ? 512 : 1024, 0, acc); STAMP(1)
          exchange_qkv(u, r, acc); }
        STAMP(2)
        wait_inv(0); STAMP(11)
        if (tid < 3 * NC) {
          const int tl = tid / NC, col = tid % NC, qt = member * 3 + tl; const float inv = finv[col]; float y[16];
#pragma unroll
          for (int i = 0; i < 16; i++) y[i] = received(3 + tl, tl & 1, i, col) * inv;
          if (qt < 40) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
              const float cs = frope[((qt & 7) * 8 + i) * 2], sn = frope[((qt & 7) * 8 + i) * 2 + 1], a = y[i], b = y[i + 8];
              y[i] = fmaf(a, cs, -(b * sn)); y[i + 8] = fmaf(b, cs, a * sn);
            }
          }
          Word* q = (Word*)(p.qkv + ((u64)group * 48 + qt) * NC * 32) + col;
          q[0] = Word{bf16x2(y[0], y[1]), bf16x2(y[2], y[3]), bf16x2(y[4], y[5]), bf16x2(y[6], y[7])}; q[NC] = Word{bf16x2(y[8], y[9]), bf16x2(y[10], y[11]), bf16x2(y[12], y[13]), bf16x2(y[14], y[15])};
        }
        bar(); STAMP(12) if (tid == 0) red_release(cq + group * 32);
        STAMP(3)
        attention(l, 16 * (nl + l), tok);
        STAMP(16) publish(co + group * 32); recv_done();  // the scratch of attention lay in the receive buffer
        STAMP(4)
        load_gamma(p.gamma + (2 * l + 1) * kHidden);
        { float acc[R]; leaf_sum(I4{}, I1{}, Int<SK>{}, 4, wg * KSO * 2048 + (wi >> 1) * KSO * 1024 + (wi & 1) * 512, 1024, wg * 4 * KB, acc); STAMP(5)
          exchange_pair(acc); STAMP(17) }
        residual(0, l, tok); publish_x(xm, cm, p.ssq + kBlocks * NC); recv_done();
        STAMP(6)
        { float sum[2][R]; hidden_sum(2, sum); STAMP(7)
          wait_inv(1);
          if (warp < 7) {
            u8* q = xd + (u64)(7 * s + warp) * KB + lane * 4;
#pragma unroll
            for (int j = 0; j < NC / 8; j++) {
              float a[4];
#pragma unroll
              for (int c = 0; c < 4; c++) {
                const float inv = finv[NC + 8 * j + 2 * t + (c & 1)], v = sum[0][4 * j + c] * inv, up = sum[1][4 * j + c] * inv;
                a[c] = v * rcp(1.0f + ex2(v * -1.4426950408889634f)) * up;
              }
              *(u32*)(q + j * 256) = transpose8(bf16x2(a[0], a[1])); *(u32*)(q + j * 256 + 128) = transpose8(bf16x2(a[2], a[3]));
            }
          }
          publish(cd + (s >> 3) * 32); }
        STAMP(8)
        load_gamma(p.gamma + (2 * l + 2) * kHidden);
        { float acc[R]; leaf_sum(I4{}, I1{}, Int<SK>{}, 14, wg * KSO * 2048 + (wi >> 1) * KSO * 1024 + (wi & 1) * 512, 1024, wg * 4 * KB, acc); STAMP(9)
          exchange_pair(acc); STAMP(18) }
        residual(1, l, tok); publish_x(xa, ca, p.ssq); recv_done();
        STAMP(10)
      }
      // ---- LM head and greedy choice ----
      { const int l = kLayers; STAMP(0) }
      for (int i = tid; i < 8 * NC; i += 256) { fr[2 * i] = -3.0e38f; fr[2 * i + 1] = 0; }
      bar();
      wait_inv(0);
#pragma unroll 1
      for (int q = 0; q < head_passes; q++) {
        const int width = max(0, min(2, head_n - 16 * q - 2 * warp)); float sum[2][R]; hidden_sum(max(width, 1), sum);
        const int v0 = (head_lo + 16 * q + 2 * warp) * 16 + g;
#pragma unroll
        for (int j = 0; j < NC / 8; j++)
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const int col = 8 * j + 2 * t + c; const float inv = finv[col]; float bv = -3.0e38f; int bi = 0x7fffffff;
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int tile = e >> 1, v = v0 + e * 8; const float z = sum[tile][4 * j + c + 2 * (e & 1)] * inv;
              if (tile < width) { if (p.logits && tok == p.ntok - 1) p.logits[(u64)col * kVocab + v] = z; if (z > bv) { bv = z; bi = v; } }
            }
#pragma unroll
            for (int d = 4; d < 32; d *= 2) { const float v = shflx(bv, d); const int i = shflx(bi, d); if (v > bv || (v == bv && i < bi)) { bv = v; bi = i; } }
            if (g == 0 && bv > fr[2 * (warp * NC + col)]) { fr[2 * (warp * NC + col)] = bv; fr[2 * (warp * NC + col) + 1] = __int_as_float(bi); }
          }
      }
      bar();
      { const int l = kLayers; STAMP(1) }
      auto take = [&](float& bv, int& bi, float v, int i) { if (v > bv || (v == bv && i < bi)) { bv = v; bi = i; } };
      if (tid < NC) {
        float bv = -3.0e38f; int bi = 0x7fffffff;
        for (int w = 0; w < 8; w++) take(bv, bi, fr[2 * (w * NC + tid)], __float_as_int(fr[2 * (w * NC + tid) + 1]));
        p.best[s * NC + tid] = (u64)(u32)bi << 32 | __float_as_uint(bv);
      }
      bar(); if (tid == 0) { red_release(ct); count_wait(p, ct, kBlocks * (p.epoch_t + tok + 1), 10); }
      bar();
      { float bv = -3.0e38f; int bi = 0x7fffffff; constexpr int PARTS = 256 / NC;
#pragma unroll 8
        for (int b = tid / NC; b < kBlocks; b += PARTS) { const u64 v = ld_relaxed64(p.best + b * NC + tid % NC); take(bv, bi, __uint_as_float((u32)v), (int)(v >> 32)); }
        fr[2 * tid] = bv; fr[2 * tid + 1] = __int_as_float(bi); bar();
        bv = -3.0e38f; bi = 0x7fffffff;
        for (int q = 0; q < PARTS; q++) take(bv, bi, fr[2 * (q * NC + hc)], __float_as_int(fr[2 * (q * NC + hc) + 1]));
        token = bi;
        if (s == 0 && own && hq == 0) p.tokens[tok * NC + hc] = bi;
        bar(); }
      { const int l = kLayers; STAMP(2) if (TRACE && tr && tok == p.ntok - 1) { u64 ns; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)); tr[l * 24 + 21] = ns; tr[l * 24 + 22] = clock64(); } }
    }
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- does wgmma sum like mma.sync? chains of `steps` k16 products of given fragments, both ways ----
template <int NC> __global__ void __launch_bounds__(128, 1) compare(const Word* a, const u8* b, int steps, float* out_wgmma, float* out_mma) {
  extern __shared__ __align__(1024) u8 smem[]; const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5; constexpr int R = NC / 2;
  a += (u64)blockIdx.x * steps * 128; b += (u64)blockIdx.x * steps * NC * 32;
  for (int i = threadIdx.x; i < steps * NC * 2; i += 128) ((Word*)smem)[i] = ((const Word*)b)[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncthreads();
  float c[R], d[R];
#pragma unroll
  for (int i = 0; i < R; i++) c[i] = d[i] = 0;
  for (int k = 0; k < steps; k++) {
    const Word f = a[(k * 4 + warp) * 32 + lane];
    pin<R>(c); wgmma_fence(); product<NC, true>(c, f, s32(smem) + k * NC * 32); wgmma_commit(); wgmma_wait(); pin<R>(c);
    product<NC, false>(d, f, s32(smem) + k * NC * 32);
  }
#pragma unroll
  for (int i = 0; i < R; i++) { out_wgmma[((u64)blockIdx.x * R + i) * 128 + threadIdx.x] = c[i]; out_mma[((u64)blockIdx.x * R + i) * 128 + threadIdx.x] = d[i]; }
}
