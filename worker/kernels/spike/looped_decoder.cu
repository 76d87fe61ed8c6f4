// Spike of the looped decoder: Llama-3.1-8B shape, one GPU, one cooperative launch that walks embedding, 32 layers,
// attention over 512 positions, LM head and greedy choice, for many tokens.
//
//   x = bf16(h * gamma), y = (W x) * rsqrt(mean(h^2) + eps)          for qkv, gate/up and LM head
//   h += W_o attn(q, K, V);  h += W_down bf16(silu(gate) * up)       h stays fp32 in registers of its owner
//
// Geometry: 128 blocks (of 132 SMs), each 16 consumer warps, 1 producer warp, 2 epilogue warps. A block owns whole row
// tiles (m16, all of K): qkv 3, o 2, gate/up 7 + 7, down 2, LM head 62 or 63. 128 divides the tiles of every layer product,
// 132 does not (3 % imbalance). Consumer warp w owns K leaf w of 16 in every product: the activations it needs sit in its
// registers as B fragments, loaded straight from the words that the producing blocks published. The 16 leaf partials of a
// tile meet in shared memory; an epilogue warp adds them as a binary tree and publishes one k block of B fragments.
//
// Exchanges of a layer (all data-as-flag, every reader reads what it needs of all writers):
//   xa  residual -> qkv           128 writers, 128 readers      xq  qkv -> attention     16 blocks of a kv head
//   xp  leaves -> merge           16 blocks of a kv head        xo  attention -> o       128, 128
//   xm  residual -> gate/up       128, 128                      xd  activation -> down   128, 128
// A word is 16 bytes {B fragment of 4 k values, tag, sum of squares}: one relaxed store by one lane, one relaxed load. The
// tag counts layers over all tokens and is compared for equality, so it may wrap. One buffer an exchange suffices: a block
// publishes for layer l + 1 only after it has all of xd of layer l, and a block publishes its part of xd of layer l only
// after each of its 16 warps has read xa and xm of that layer (each contributes a leaf to every tile); xq, xp and xo of layer
// l + 1 depend on all of xa of layer l + 1. A reader that came late would hang and report, never read newer data as older.
//
// Shared memory: ring [nslot][16 KiB] | partials [2][2 tiles][16 warps][NB][16 rows] f32 | sums of squares [2][16][NB] f32 |
// barriers 512 B | V of two attention warps 8 KiB (batch 1).
// Bytes a token: 15.01 GB of weights (the embedding is not read) and 67 MB of K and V a column.
typedef unsigned int u32; typedef unsigned long long u64; typedef unsigned short u16; typedef unsigned char u8;

constexpr int kLayers = 32, kHidden = 4096, kVocab = 128256, kBlocks = 128;
#ifdef EARLY_RELEASE
constexpr bool kEarlyRelease = true;  // negative control
#else
constexpr bool kEarlyRelease = false;
#endif
constexpr int kWarps = 16, kSlotBytes = 16384;
constexpr int kQkvChunks = 32, kQkvBytes = 12288;    // [2 k halves][16 warps]: [8 k][3 tiles][512 B]
constexpr int kOChunks = 16, kOBytes = 16384;        // [16 warps]: [16 k][2 tiles][512 B]
constexpr int kGuChunks = 112, kGuBytes = 16384;     // [7 pairs][16 warps]: [16 k][gate, up][512 B]
constexpr int kDownChunks = 64, kDownBytes = 14336;  // [4 k quarters][16 warps]: [14 k][2 tiles][512 B]
constexpr int kHeadRounds = 31, kHeadRest = 80;      // 31 * 128 pairs of tiles, then 80 single tiles

struct Params {
  const u8* weights;       // [32 layers][qkv, o, gate/up, down], then LM head; chunks interleaved over the blocks
  const u16* gamma;        // [2 * 32 + 1][4096] bf16
  const u16* embedding;    // [128256][4096] bf16
  u8* kv;                  // [32][NB][8 kv heads][32 leaves][K 4 KiB, V 4 KiB] fragments
  const float* rope;       // [64][2] cos, sin of the new position
  u8* words;               // exchange words
  const int* first_token;  // [NB]
  int* tokens;             // [ntok][NB]
  float* logits;           // [NB][128256] of the last token, or null
  u32* report;             // mapped host memory, 16 words
  float* states;           // [32][2][NB][4096] residual after o and down of the last token (TRACE), or null
  long long* trace;        // [128][32][24] clocks of the last token, or null
  int ntok; u32 epoch0; int nslot; int window;
  u32 skip;                // waits not made, bit site - 10 (ABLATE builds: what does an exchange cost? wrong results)
  int window_o;            // of the o chunks, which stream while attention and its exchanges are waited for
};
// offsets of the exchange words, [k blocks][NB][4] words of 16 bytes each
template <int NB> struct Words {
  static constexpr u64 xa = 0, xm = xa + NB * 256 * 64ull, xo = xm + NB * 256 * 64ull, xd = xo + NB * 256 * 64ull;
  static constexpr u64 xq = xd + NB * 896 * 64ull;            // [8 groups][NB][48 tiles][4]
  static constexpr u64 xp = xq + 8ull * NB * 48 * 64;          // [8 groups][NB][32 leaves][4 heads][8][8]
  static constexpr u64 xt = xp + 8ull * NB * 32 * 4 * 64 * 16; // [NB][128 blocks]
  static constexpr u64 end = xt + NB * 128 * 16ull;
};

// byte offset of the four words of (k block, column) in a vector of KBS k blocks
template <int NB, int KBS> __device__ __forceinline__ u32 word_at(int kb, int col) {
#ifdef COLUMN_MAJOR_WORDS
  return (u32)(col * KBS + kb) * 64;  // worse: 32 lanes touch eight half lines
#else
  return (u32)(kb * NB + col) * 64;
#endif
}

// ---- ptx ----
__device__ __forceinline__ u32 s32(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void mbar_init(u32 b, u32 n) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n)); }
__device__ __forceinline__ void mbar_expect(u32 b, u32 n) { asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n) : "memory"); }
__device__ __forceinline__ void mbar_arrive(u32 b) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory"); }
__device__ __forceinline__ bool mbar_try(u32 b, u32 parity) {
  u32 r; asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p,[%1],%2;\nselp.u32 %0,1,0,p;\n}" : "=r"(r) : "r"(b), "r"(parity) : "memory"); return r;
}
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 n, u32 bar, u64 policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0],[%1],%2,[%3],%4;" ::"r"(dst), "l"(src), "r"(n), "r"(bar), "l"(policy) : "memory");
}
__device__ __forceinline__ void copy16(u32 dst, const u8* src) { asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(dst), "l"(src) : "memory"); }
__device__ __forceinline__ void copy_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ u64 evict_first() { u64 p; asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(p)); return p; }
struct Word { u32 x, y, z, w; };
__device__ __forceinline__ Word ld_relaxed(const u8* p) {
  u64 a, b; asm volatile("{\n.reg .b128 r;\nld.relaxed.gpu.global.b128 r,[%2];\nmov.b128 {%0,%1}, r;\n}" : "=l"(a), "=l"(b) : "l"(p) : "memory");
  return Word{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}
__device__ __forceinline__ void st_relaxed(u8* p, u32 x, u32 y, u32 z, u32 w) {
  u64 a = (u64)y << 32 | x, b = (u64)w << 32 | z;
  asm volatile("{\n.reg .b128 r;\nmov.b128 r, {%1,%2};\nst.relaxed.gpu.global.b128 [%0], r;\n}" ::"l"(p), "l"(a), "l"(b) : "memory");
}
__device__ __forceinline__ Word ld_word(const u8* p) { Word v; asm volatile("ld.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory"); return v; }
__device__ __forceinline__ void prefetch_l2(const u8* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
__device__ __forceinline__ Word lds128(u32 a) { Word v; asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a)); return v; }
__device__ __forceinline__ void mma(float* c, const Word& a, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 bf16x2(float lo, float hi) { u32 r; asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(hi), "f"(lo)); return r; }
__device__ __forceinline__ float bf16f(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float ex2(float x) { float r; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float lg2(float x) { float r; asm("lg2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float rsqrt_(float x) { float r; asm("rsqrt.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ float rcp(float x) { float r; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x)); return r; }
__device__ __forceinline__ u32 transpose8(u32 v) { u32 r; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(r) : "r"(v)); return r; }
template <class T> __device__ __forceinline__ T shfl(T v, int l) { return __shfl_sync(~0u, v, l); }
template <class T> __device__ __forceinline__ T shflx(T v, int m) { return __shfl_xor_sync(~0u, v, m); }

// ---- waits: bounded, with a report ----
constexpr long long kWaitLimit = 600000000;  // clocks, about 0.3 s; waits inside a block get twice that, so that the exchange reports first
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
// How a reader waits: it loads all its words; while some are missing, kScout polls one of them and loads all again once it
// is there, kAll polls them all, kNone goes on with whatever is there (wrong results: the ceiling of everything else).
enum Wait { kScout, kAll, kNone };
#ifdef ABLATE
__device__ __forceinline__ bool skipped(const Params& p, u32 site) { return p.skip >> (site - 10) & 1; }
#else
__device__ __forceinline__ bool skipped(const Params&, u32) { return false; }
#endif
// N words at base + j * stride; x, y and w of each word (w only where the caller uses it)
template <Wait WAIT, int N, bool SCOUT = false> __device__ __forceinline__ void poll_words(const Params& p, const u8* base, u32 stride, u32 tag, bool active, u32* x, u32* y, u32* w, u32 site) {
  long long t0 = 0;
  while (true) {
    u32 missing = 0xff, seen = 0;  // lowest word still missing
#pragma unroll
    for (int j = N - 1; j >= 0; j--) {
      Word v{0, 0, tag, 0}; if (active) v = ld_relaxed(base + j * stride);
      x[j] = v.x; y[j] = v.y; w[j] = v.w; if (WAIT != kNone && v.z != tag && !skipped(p, site)) { missing = j; seen = v.z; }
    }
    if (!__any_sync(~0u, missing != 0xff)) break;
    if (t0 == 0) t0 = clock64();
    if (clock64() - t0 > kWaitLimit && missing != 0xff) wait_failed(p, site, tag, seen);
    if (WAIT == kScout && SCOUT) {  // one lane's missing word stands for all
      if (missing != 0xff && (threadIdx.x & 31) == 0) { const u8* q = base + missing * stride; while ((seen = ld_relaxed(q).z) != tag) if (clock64() - t0 > kWaitLimit) wait_failed(p, site, tag, seen); }
      __syncwarp();
    }
  }
}
template <int N> __device__ __forceinline__ float tree(const float* v) { float l = 0; if constexpr (N == 1) return v[0]; else { l = tree<N / 2>(v) + tree<N / 2>(v + N / 2); return l; } }

template <int V> struct Int { static constexpr int v = V; };
using C1 = Int<1>; using C2 = Int<2>; using C3 = Int<3>; using C8 = Int<8>; using C14 = Int<14>; using C16 = Int<16>;

// KB k blocks of B fragments from words, from k block `first` on; returns this column's sum
// of squares over them. One column: the warp's 32 lanes share the words and hand them out by shuffles.
template <int NB, Wait WAIT, int KB, int KBS> __device__ __forceinline__ float get_fragments(const Params& p, const u8* words, int first, u32 tag, u32 (*b)[2], u32 site) {
  constexpr int H = KB / 2; const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3; float sum[2];
  if constexpr (NB == 1) {
    const bool on = lane < H * 4; bool m0 = on, m1 = on; Word v0{0, 0, 0, 0}, v1{0, 0, 0, 0}; long long t0 = 0; const u8* q = words + word_at<1, KBS>(first, 0) + lane * 16;
    while (true) {
      if (m0) v0 = ld_relaxed(q);
      if (m1) v1 = ld_relaxed(q + H * 64);
      if (WAIT == kNone || skipped(p, site)) break;
      m0 = on && v0.z != tag; m1 = on && v1.z != tag;
      if (!__any_sync(~0u, m0 || m1)) break;
      if (WAIT == kScout && t0 == 0) {  // nothing there yet: one k block's words stand for all
        t0 = clock64();
        if (g == H / 2) { u32 z; while ((z = ld_relaxed(q + H * 64).z) != tag) if (clock64() - t0 > kWaitLimit) wait_failed(p, site, tag, z); }
        __syncwarp();
      }
      if (t0 == 0) t0 = clock64();
      if (clock64() - t0 > kWaitLimit && (m0 || m1)) wait_failed(p, site, tag, m0 ? v0.z : v1.z);
    }
    __syncwarp();
#pragma unroll
    for (int j = 0; j < KB; j++) {
      const Word& v = j < H ? v0 : v1; u32 x = shfl(v.x, (j % H) * 4 + t), y = shfl(v.y, (j % H) * 4 + t);
      b[j][0] = g == 0 ? x : 0; b[j][1] = g == 0 ? y : 0;
    }
    sum[0] = __uint_as_float(v0.w); sum[1] = __uint_as_float(v1.w);  // in the lanes t == 0
#pragma unroll
    for (int d = 4; d < 32; d *= 2) { sum[0] += shflx(sum[0], d); sum[1] += shflx(sum[1], d); }
  } else {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      u32 x[H], y[H], w[H]; poll_words<WAIT, H, true>(p, words + word_at<NB, KBS>(first + h * H, g) + t * 16, word_at<NB, KBS>(1, 0), tag, true, x, y, w, site); float f[H];
#pragma unroll
      for (int j = 0; j < H; j++) { b[h * H + j][0] = x[j]; b[h * H + j][1] = y[j]; f[j] = __uint_as_float(w[j]); }
      if constexpr (H == 8) sum[h] = tree<8>(f); else sum[h] = 0;
    }
    __syncwarp();
  }
  return sum[0] + sum[1];
}

// ---- the kernel ----
template <int NB, Wait WAIT, bool TRACE>
__global__ void __launch_bounds__((kWarps + 3) * 32, 1) looped_decoder(const __grid_constant__ Params p) {
  constexpr int EW = (NB + 3) / 4, NBW = NB / EW;  // epilogue warps that share the columns, columns of each; one more at batch 1
  using X = Words<NB>;
  extern __shared__ __align__(1024) u8 smem[];
  const u32 ring = s32(smem), red = ring + p.nslot * kSlotBytes;
  constexpr u32 kRed = 2 * kWarps * NB * 16 * 4;   // bytes of one buffer of partials
  const u32 ssq = red + 2 * kRed, bars = ssq + 2 * kWarps * NB * 4;
  const u32 vbuf = bars + 512;  // V of the two attention warps, batch 1
  const u32 full = bars, empty = bars + 128, part_full = bars + 256, part_empty = bars + 272;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, s = blockIdx.x, g = lane >> 2, t = lane & 3;
  const int group = s >> 4, member = s & 15;
  float* fsm = (float*)(smem + (red - ring));
  float* fssq = (float*)(smem + (ssq - ring));
  if (threadIdx.x == 0) {
    for (int i = 0; i < 16; i++) { mbar_init(full + 8 * i, 1); mbar_init(empty + 8 * i, 1); }
    for (int i = 0; i < 2; i++) { mbar_init(part_full + 8 * i, kWarps); mbar_init(part_empty + 8 * i, 2); }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  long long* tr = TRACE ? p.trace + (u64)s * kLayers * 24 : nullptr;
  if (TRACE && threadIdx.x == 0) { u32 id; asm volatile("mov.u32 %0, %%smid;" : "=r"(id)); tr[14] = id; }

  if (warp == kWarps) {  // ---- producer: the weight stream, bounded in flight, never reset ----
    if (lane != 0) return;
    // Barriers belong to consumer warps (chunk i goes to warp i % 16), slots to the ring (i % nslot). As nslot <= 16 a warp
    // never has two chunks in the ring, so a parity cannot be taken for the one two phases later.
    const u64 policy = evict_first(); u32 i = 0, slot = 0; long long blocked = 0;
    auto issue = [&](const u8* src, u32 bytes, u32 window) {
      if (i >= (u32)p.nslot) {  // consumed: orders the reads of chunk i - nslot before the copy that overwrites it (block)
        const u32 j = i - p.nslot; long long t0; if (TRACE) t0 = clock64();
        mbar_wait(p, empty + 8 * (j & 15), j >> 4 & 1, 1); if (TRACE) blocked += clock64() - t0;
      }
      if (i >= window) { const u32 j = i - window; mbar_wait(p, full + 8 * (j & 15), j >> 4 & 1, 2); }  // landed
      const u32 bar = full + 8 * (i & 15); mbar_expect(bar, bytes); bulk_load(ring + slot * kSlotBytes, src, bytes, bar, policy);
      i++; if (++slot == (u32)p.nslot) slot = 0;
    };
    auto phase = [&](const u8*& base, int chunks, u32 bytes, u32 window) {
      for (int c = 0; c < chunks; c++) issue(base + (u64)(c * kBlocks + s) * bytes, bytes, window);
      base += (u64)kBlocks * chunks * bytes;
    };
    for (int tok = 0; tok < p.ntok; tok++) {
      const u8* w = p.weights;
      for (int l = 0; l < kLayers; l++) {
        const bool traced = TRACE && tok == p.ntok - 1; blocked = 0;
        phase(w, kQkvChunks, kQkvBytes, p.window); if (traced) { tr[l * 24 + 16] = blocked; blocked = 0; }
        phase(w, kOChunks, kOBytes, p.window_o); if (traced) { tr[l * 24 + 17] = blocked; blocked = 0; }
        phase(w, kGuChunks, kGuBytes, p.window); if (traced) { tr[l * 24 + 18] = blocked; blocked = 0; }
        phase(w, kDownChunks, kDownBytes, p.window); if (traced) { tr[l * 24 + 19] = blocked; blocked = 0; }
      }
      phase(w, kHeadRounds * 16, kSlotBytes, p.window);
      if (s < kHeadRest) for (int c = 0; c < 16; c++) issue(w + (u64)(c * kHeadRest + s) * 8192, 8192, p.window);
    }
    return;
  }

  if (warp < kWarps) {  // ---- consumers ----
    u32 slot = warp % p.nslot, round = 0, set = 0;  // own chunks, and sets of partials written
    auto mma_chunk = [&](auto kb_c, auto nt_c, const u32 (*b)[2], float (*acc)[4]) {
      constexpr int KB = decltype(kb_c)::v, NT = decltype(nt_c)::v;
      mbar_wait(p, full + 8 * warp, round & 1, 3); __syncwarp();
      u32 a = ring + slot * kSlotBytes + lane * 16;
#pragma unroll
      for (int k = 0; k < KB; k++)
#pragma unroll
        for (int n = 0; n < NT; n++) mma(acc[n], lds128(a + (k * NT + n) * 512), b[k][0], b[k][1]);
      // The slot is released once every chain has used its last fragment: the arrive's address depends on the results.
      // Without that the arrive overtakes shared-memory loads still queued behind polls, and the next copy overwrites them.
      bool never = false;
#pragma unroll
      for (int n = 0; n < NT; n++) never |= __float_as_uint(acc[n][0]) == 0x7fedcba9u;
      __syncwarp(); if (lane == 0) mbar_arrive(empty + 8 * warp + (!kEarlyRelease && never ? 8192 : 0));
      round++; slot += 16; while (slot >= (u32)p.nslot) slot -= p.nslot;
    };
    // partials of `nt` tiles into buffer set & 1; orders the 16 warps' partials before the epilogue's reads (block)
    auto put_set = [&](auto nt_c, float (*acc)[4]) {
      constexpr int nt = decltype(nt_c)::v;
      u32 buf = set & 1; mbar_wait(p, part_empty + 8 * buf, (set >> 1 & 1) ^ 1, 4); __syncwarp();
      float* f = fsm + buf * (kRed / 4);
#pragma unroll
      for (int n = 0; n < nt; n++) {
        float* q = f + (n * kWarps + warp) * NB * 16;
        if (2 * t < NB) { q[2 * t * 16 + g] = acc[n][0]; q[2 * t * 16 + g + 8] = acc[n][2]; }
        if (2 * t + 1 < NB) { q[(2 * t + 1) * 16 + g] = acc[n][1]; q[(2 * t + 1) * 16 + g + 8] = acc[n][3]; }
      }
      __syncwarp(); if (lane == 0) mbar_arrive(part_full + 8 * buf);
      set++;
    };
    u32 b[16][2];
    // this warp's 16 k blocks of a 4096 vector into registers, and its leaf's sum of squares into shared memory
    auto get_x = [&](u64 off, u32 tag, int ssq_buf, u32 site) {
      const float sum = get_fragments<NB, WAIT, 16, 256>(p, p.words + off, warp * 16, tag, b, site);
      if (ssq_buf >= 0 && t == 0 && g < NB) fssq[(ssq_buf * kWarps + warp) * NB + g] = sum;
    };
    for (int tok = 0; tok < p.ntok; tok++) {
      const u32 t0 = p.epoch0 + tok * (kLayers + 1);
      const bool traced = TRACE && tok == p.ntok - 1 && lane == 0 && (warp == 15 || warp == 0);
      for (int l = 0; l < kLayers; l++) {
        const u32 tag = t0 + l; long long* q = traced ? tr + l * 24 : nullptr;
#define STAMP(w_, i_) if (TRACE && traced && warp == w_) q[i_] = clock64();
        STAMP(15, 0) get_x(X::xa, tag, 0, 10); STAMP(15, 1)
        { float acc[3][4] = {};
          mma_chunk(C8{}, C3{}, b, acc); mma_chunk(C8{}, C3{}, b + 8, acc); STAMP(15, 2)
          put_set(C2{}, acc); put_set(C1{}, acc + 2); }
        if (warp < 2 * NB) {  // ---- attention: leaf of 16 positions, K and V^T as A, the 4 queries of a kv head as columns ----
          const int col = warp >> 1, leaf = member * 2 + (warp & 1);
          u8* kv = p.kv + ((((u64)l * NB + col) * 8 + group) * 32 + leaf) * 8192 + lane * 16; Word ka[8], va[8];
#pragma unroll
          for (int j = 0; j < 8; j++) { ka[j] = ld_word(kv + j * 512); if (NB == 1) copy16(vbuf + warp * 4096 + j * 512 + lane * 16, kv + 4096 + j * 512); else prefetch_l2(kv + 4096 + j * 512); }
          const u8* xq = p.words + X::xq + ((u64)group * NB + col) * 48 * 64;
          STAMP(0, 3)
          // lanes g < 4 fetch the 4 queries; for the new position's leaf, g == 7 fetches its k and g == 5 its v
          const bool newest = leaf == 31; const int first = g < 4 ? g * 8 : g == 7 ? 32 : 40;
          u32 x[8], y[8], w[8]; poll_words<WAIT, 8>(p, xq + first * 64 + t * 16, 64, tag, g < 4 || (newest && (g == 7 || g == 5)), x, y, w, 11); STAMP(0, 4)
          // the new position is the last row of the last leaf: patch it in and append it to the cache
          if (newest && g == 7) {
#pragma unroll
            for (int j = 0; j < 8; j++) { ka[j].y = x[j]; ka[j].w = y[j]; *(Word*)(kv + j * 512) = ka[j]; }
          }
          __syncwarp();
          float sc[4] = {};
#pragma unroll
          for (int j = 0; j < 8; j++) mma(sc, ka[j], g < 4 ? x[j] : 0, g < 4 ? y[j] : 0);
          if (NB == 1) copy_wait();
#pragma unroll
          for (int j = 0; j < 8; j++) va[j] = NB == 1 ? lds128(vbuf + warp * 4096 + j * 512 + lane * 16) : ld_word(kv + 4096 + j * 512);
          if (newest) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
              const u32 vx = shfl(x[j], 20 + (g >> 1)), vy = shfl(y[j], 20 + (g >> 1));
              if (t == 3) {
                u32 lo = g & 1 ? vx & 0xffff0000u : vx << 16, hi = g & 1 ? vy & 0xffff0000u : vy << 16;
                va[j].z = (va[j].z & 0xffff) | lo; va[j].w = (va[j].w & 0xffff) | hi; *(Word*)(kv + 4096 + j * 512) = va[j];
              }
            }
            __syncwarp();
          }
          constexpr float kScale = 0.08838834764831845f * 1.4426950408889634f;  // 1/sqrt(128), in powers of two
          float m0 = fmaxf(sc[0], sc[2]), m1 = fmaxf(sc[1], sc[3]);
#pragma unroll
          for (int d = 4; d < 32; d *= 2) { m0 = fmaxf(m0, shflx(m0, d)); m1 = fmaxf(m1, shflx(m1, d)); }
          float e0 = ex2((sc[0] - m0) * kScale), e1 = ex2((sc[1] - m1) * kScale), e2 = ex2((sc[2] - m0) * kScale), e3 = ex2((sc[3] - m1) * kScale);
          float l0 = e0 + e2, l1 = e1 + e3;
#pragma unroll
          for (int d = 4; d < 32; d *= 2) { l0 += shflx(l0, d); l1 += shflx(l1, d); }
          const u32 pb0 = transpose8(bf16x2(e0, e1)), pb1 = transpose8(bf16x2(e2, e3));
          const float r0 = rcp(l0), r1 = rcp(l1); const u32 z0 = __float_as_uint(m0 * kScale + lg2(l0)), z1 = __float_as_uint(m1 * kScale + lg2(l1));
          u8* xp = p.words + X::xp + (((u64)group * NB + col) * 32 + leaf) * 4096 + (2 * (t & 1)) * 1024 + g * 16;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            float o[4] = {}; mma(o, va[j], pb0, pb1);
            if (t < 2) { st_relaxed(xp + j * 128, __float_as_uint(o[0] * r0), __float_as_uint(o[2] * r0), tag, z0); st_relaxed(xp + 1024 + j * 128, __float_as_uint(o[1] * r1), __float_as_uint(o[3] * r1), tag, z1); }
          }
          STAMP(0, 5)
          // merge 32 leaves of one (head, 16 dimensions): lane = (8 leaves, g)
          const int head = member >> 2, mt = (member & 3) * 2 + (warp & 1), gg = lane & 7;
                    poll_words<WAIT, 8>(p, p.words + X::xp + (((u64)group * NB + col) * 32 + (lane >> 3) * 8) * 4096 + (head * 8 + mt) * 128 + gg * 16, 4096, tag, true, x, y, w, 14); STAMP(0, 6)
          float mx = __uint_as_float(w[0]), n0 = 0, n1 = 0, den = 0;
#pragma unroll
          for (int j = 1; j < 8; j++) mx = fmaxf(mx, __uint_as_float(w[j]));
          mx = fmaxf(mx, shflx(mx, 8)); mx = fmaxf(mx, shflx(mx, 16));
#pragma unroll
          for (int j = 0; j < 8; j++) { float e = ex2(__uint_as_float(w[j]) - mx); den += e; n0 += e * __uint_as_float(x[j]); n1 += e * __uint_as_float(y[j]); }
#pragma unroll
          for (int d = 8; d < 32; d *= 2) { den += shflx(den, d); n0 += shflx(n0, d); n1 += shflx(n1, d); }
          n0 = n0 * rcp(den); n1 = n1 * rcp(den);
          float a0 = shfl(n0, 2 * t), a1 = shfl(n0, 2 * t + 1), a2 = shfl(n1, 2 * t), a3 = shfl(n1, 2 * t + 1);
          const int kb = (group * 4 + head) * 8 + mt;
          if (lane < 4) st_relaxed(p.words + X::xo + word_at<NB, 256>(kb, col) + t * 16, bf16x2(a0, a1), bf16x2(a2, a3), tag, 0);
          STAMP(0, 7)
        }
        get_x(X::xo, tag, -1, 15); STAMP(15, 8)
        { float acc[2][4] = {}; mma_chunk(C16{}, C2{}, b, acc); STAMP(15, 9) put_set(C2{}, acc); }
        get_x(X::xm, tag, 1, 16); STAMP(15, 10)
        for (int j = 0; j < 7; j++) { float acc[2][4] = {}; mma_chunk(C16{}, C2{}, b, acc); if (j == 6) { STAMP(15, 11) } put_set(C2{}, acc); }
        { float acc[2][4] = {};           for (int c = 0; c < 4; c++) {
            u32 bd[14][2];
            get_fragments<NB, WAIT, 14, 896>(p, p.words + X::xd, warp * 56 + c * 14, tag, bd, 17);
            if (c == 0) { STAMP(15, 12) }
            mma_chunk(C14{}, C2{}, bd, acc);
          }
          STAMP(15, 13) put_set(C2{}, acc); }
      }
      get_x(X::xa, t0 + kLayers, 0, 18);
      for (int j = 0; j < kHeadRounds; j++) { float acc[2][4] = {}; mma_chunk(C16{}, C2{}, b, acc); put_set(C2{}, acc); }
      if (s < kHeadRest) { float acc[1][4] = {}; mma_chunk(C16{}, C1{}, b, acc); put_set(C1{}, acc); }
    }
    return;
  }

  // ---- epilogue: lane = (tile of the set, row); adds leaves, norm, rope, silu, residual; publishes B fragments ----
  const bool second = NB == 1 && warp == kWarps + 2;  // takes the third qkv tile, nothing else
  const int ew = NB == 1 ? 0 : warp - kWarps - 1, tile = lane >> 4, row = lane & 15; u32 set = 0;
  float h[NBW], inv[NBW], y[NBW];
  const int hrow = s * 32 + lane;  // own row of the hidden state
  auto get_set = [&](int ssq_buf) {
    u32 buf = set & 1; mbar_wait(p, part_full + 8 * buf, set >> 1 & 1, 5); __syncwarp();
    const float* f = fsm + buf * (kRed / 4);
#pragma unroll
    for (int c = 0; c < NBW; c++) {
      const int col = ew * NBW + c; float v[16];
#pragma unroll
      for (int w = 0; w < 16; w++) v[w] = f[((tile * kWarps + w) * NB + col) * 16 + row];
      y[c] = tree<16>(v);
      if (ssq_buf >= 0) {
        float q = fssq[(ssq_buf * kWarps + row) * NB + col];
#pragma unroll
        for (int d = 1; d < 16; d *= 2) q += shflx(q, d);
        inv[c] = rsqrt_(q * (1.0f / kHidden) + 1e-5f);
      }
    }
    __syncwarp(); if (lane == 0) mbar_arrive(part_empty + 8 * buf);
    set++;
  };
  // a set that the other epilogue warp takes: every phase of the barriers is followed by both, or parities alias
  auto skip_sets = [&](int n) {
    for (; n > 0; n--) { u32 buf = set & 1; mbar_wait(p, part_full + 8 * buf, set >> 1 & 1, 6); __syncwarp(); if (lane == 0) mbar_arrive(part_empty + 8 * buf); set++; }
  };
  // one row tile a half warp, rows in lanes -> one k block of B fragments
  auto publish = [&](u8* q, float v, u32 tag, float sum, bool on) {
    const int o = lane & 16;
    float a = shfl(v, o + 2 * t), b = shfl(v, o + 2 * t + 1), c = shfl(v, o + 2 * t + 8), d = shfl(v, o + 2 * t + 9);
    if (on && row < 4) st_relaxed(q + t * 16, bf16x2(a, b), bf16x2(c, d), tag, t == 0 ? __float_as_uint(sum) : 0);
  };
  // the scaled residual and its sum of squares: orders h (owner) before the products of every block (grid)
  auto publish_x = [&](u64 off, float gamma, u32 tag) {
#pragma unroll
    for (int c = 0; c < NBW; c++) {
      float q = h[c] * h[c];
#pragma unroll
      for (int d = 1; d < 16; d *= 2) q += shflx(q, d);
      publish(p.words + off + word_at<NB, 256>(s * 2 + tile, ew * NBW + c), h[c] * gamma, tag, q, true);
    }
  };
  int token[NBW];
#pragma unroll
  for (int c = 0; c < NBW; c++) token[c] = p.first_token[ew * NBW + c];
  for (int tok = 0; tok < p.ntok; tok++) {
    const u32 t0 = p.epoch0 + tok * (kLayers + 1);
#pragma unroll
    for (int c = 0; c < NBW; c++) h[c] = bf16f(p.embedding[(u64)token[c] * kHidden + hrow]);
    if (!second) { publish_x(X::xa, bf16f(p.gamma[hrow]), t0); }
    for (int l = 0; l < kLayers; l++) {
      const u32 tag = t0 + l; const float gm = bf16f(p.gamma[(2 * l + 1) * kHidden + hrow]), ga = bf16f(p.gamma[(2 * l + 2) * kHidden + hrow]);
      const bool traced = TRACE && tok == p.ntok - 1 && lane == 0 && ew == 0; long long* q = traced ? tr + l * 24 : nullptr;
      for (int j = second; j < 2; j++) {
        if (NB == 1 && !second && j == 1) { skip_sets(1); break; }
        if (second) skip_sets(1);
        const int qt = member * 3 + 2 * j + tile; const int pair = (qt & 7) * 8 + (row & 7); const float cs = p.rope[pair * 2], sn = p.rope[pair * 2 + 1];
        get_set(j == 0 || second ? 0 : -1);
#pragma unroll
        for (int c = 0; c < NBW; c++) {
          float v = y[c] * inv[c], o = shflx(v, 8);
          float r = qt >= 40 ? v : row < 8 ? fmaf(v, cs, -(o * sn)) : fmaf(v, cs, o * sn);
          publish(p.words + X::xq + (((u64)group * NB + ew * NBW + c) * 48 + qt) * 64, r, tag, 0, j == 0 || tile == 0);
        }
       
      }
      if (second) { skip_sets(9); continue; }
      if (TRACE && traced) q[20] = clock64();
      get_set(-1);
#pragma unroll
      for (int c = 0; c < NBW; c++) h[c] += y[c];
      if (TRACE && p.states && tok == p.ntok - 1) for (int c = 0; c < NBW; c++) p.states[((u64)(l * 2) * NB + ew * NBW + c) * kHidden + hrow] = h[c];
      #ifdef MUTE
      if (s == 77 && l == 3) continue;  // negative control: the others must report and trap
#endif
      publish_x(X::xm, gm, tag); if (TRACE && traced) q[21] = clock64();
      for (int j = 0; j < 7; j++) {
        get_set(j == 0 ? 1 : -1);
#pragma unroll
        for (int c = 0; c < NBW; c++) {
          float v = y[c] * inv[c], up = shflx(v, 16), a = v * rcp(1.0f + ex2(v * -1.4426950408889634f)) * up;
          publish(p.words + X::xd + word_at<NB, 896>(s * 7 + j, ew * NBW + c), a, tag, 0, tile == 0);
        }
       
      }
      if (TRACE && traced) q[22] = clock64();
      get_set(-1);
#pragma unroll
      for (int c = 0; c < NBW; c++) h[c] += y[c];
      if (TRACE && p.states && tok == p.ntok - 1) for (int c = 0; c < NBW; c++) p.states[((u64)(l * 2 + 1) * NB + ew * NBW + c) * kHidden + hrow] = h[c];
      publish_x(X::xa, ga, tag + 1); if (TRACE && traced) q[23] = clock64();
    }
    if (second) { skip_sets(kHeadRounds + (s < kHeadRest)); continue; }
    float best[NBW]; int arg[NBW];
#pragma unroll
    for (int c = 0; c < NBW; c++) { best[c] = -3.0e38f; arg[c] = 0x7fffffff; }
    const int rounds = kHeadRounds + (s < kHeadRest);
    for (int j = 0; j < rounds; j++) {
      get_set(j == 0 ? 0 : -1);
      const int v = (j < kHeadRounds ? (j * kBlocks + s) * 32 : kHeadRounds * kBlocks * 32 + s * 16) + lane; const bool on = j < kHeadRounds || lane < 16;
#pragma unroll
      for (int c = 0; c < NBW; c++) {
        float z = y[c] * inv[c];
        if (on && p.logits && tok == p.ntok - 1) p.logits[(u64)(ew * NBW + c) * kVocab + v] = z;
        if (on && z > best[c]) { best[c] = z; arg[c] = v; }
      }
    }
    // greedy choice: every block publishes its best, every block takes the best of all; ties to the lowest id
#pragma unroll
    for (int c = 0; c < NBW; c++) {
      const int col = ew * NBW + c; float bv = best[c]; int bi = arg[c];
      auto take = [&](float v, int i) { if (v > bv || (v == bv && i < bi)) { bv = v; bi = i; } };
#pragma unroll
      for (int d = 1; d < 32; d *= 2) { float v = shflx(bv, d); int i = shflx(bi, d); take(v, i); }
      if (lane == 0) st_relaxed(p.words + X::xt + ((u64)col * 128 + s) * 16, __float_as_uint(bv), (u32)bi, t0, 0);
      best[c] = bv; arg[c] = bi;
    }
#pragma unroll
    for (int c = 0; c < NBW; c++) {
      const int col = ew * NBW + c; float bv = -3.0e38f; int bi = 0x7fffffff; u32 x[4], yy[4], w[4];
      auto take = [&](float v, int i) { if (v > bv || (v == bv && i < bi)) { bv = v; bi = i; } };
      poll_words<WAIT == kNone ? kNone : kAll, 4>(p, p.words + X::xt + ((u64)col * 128 + lane) * 16, 512, t0, true, x, yy, w, 19);
#pragma unroll
      for (int j = 0; j < 4; j++) take(__uint_as_float(x[j]), (int)yy[j]);
#pragma unroll
      for (int d = 1; d < 32; d *= 2) { float v = shflx(bv, d); int i = shflx(bi, d); take(v, i); }
      token[c] = WAIT == kNone ? (tok * 977 + col) % kVocab : bi; if (s == 0 && lane == 0) p.tokens[tok * NB + col] = bi;
    }
  }
}
