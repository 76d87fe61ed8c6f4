// Spike of prompt passes: 128 rows of one sequence a pass, no LM head. As wide.cu, with these differences:
//   each warpgroup owns 64 of the 128 columns of every product (so accumulators are as large as in passes of 64);
//   qkv: a block owns its 3 tiles with all of K (16 leaves, a binary tree in registers); o, down: 4 tiles of a cluster, half of K a block;
//   gate/up: two passes over its activations, 4 and 3 units;
//   K and V go straight into the cache in fragment order; attention: a block owns 8 rows of a kv head, online softmax over leaves.
#pragma once
#include "wide.cu"
template <bool TRACE>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(384, 1) prompt(const __grid_constant__ Params p) {
  constexpr int NC = 128, KB = NC * 32, R = 32; constexpr u32 kW = 32768, kA = 4 * KB, kTile = 4096;
  extern __shared__ __align__(1024) u8 smem[];
  const int nslot = p.nslot, nact = p.nact;
  const u32 ring = s32(smem), aring = ring + nslot * kW, rbuf = aring + nact * kA, invs = rbuf + 32768, bars = invs + 2 * NC * 4;
  const u32 wfull = bars, wempty = bars + 128, afull = bars + 256, aempty = bars + 384, rfull = bars + 512, rfree = bars + 520, invf = bars + 528;
  float* fr = (float*)(smem + (rbuf - ring)); float* finv = (float*)(smem + (invs - ring));
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3, s = blockIdx.x, pair = s >> 1, half = s & 1, group = s >> 4, member = s & 15;
  u8 *xa = p.acts, *xo = xa + 256 * KB, *xm = xo + 256 * KB, *xd = xm + 256 * KB;
  u32 *ca = p.counters, *cm = ca + 512, *co = cm + 512, *cd = co + 512, *cq = cd + 512;
  if (tid == 0) {
    for (int i = 0; i < 16; i++) { mbar_init(wfull + 8 * i, 2); mbar_init(wempty + 8 * i, 8); mbar_init(afull + 8 * i, 1); mbar_init(aempty + 8 * i, 8); }
    mbar_init(rfull, 8); mbar_init(rfree, 2); mbar_init(invf, 1); mbar_init(invf + 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp == 8 || warp == 11) {
      const u64 policy = evict_first(); u32 i = 0, slot = 0, ph = 1, landed = 0, wslot = 0, wph = 0; const u32 window = p.window;
      auto issue = [&](bool on, const u8* src, u32 dst, u32 bytes, bool once = true) {
        on = on && (lane & 1) == (warp == 11); const u32 total = __reduce_add_sync(~0u, on ? bytes : 0);
        if (lane == 0) {
          mbar_wait(p, wempty + 8 * slot, ph, 1);
          while (landed + window <= i) { mbar_wait(p, wfull + 8 * wslot, wph, 2); landed++; if (++wslot == (u32)nslot) { wslot = 0; wph ^= 1; } }
          mbar_expect(wfull + 8 * slot, total);
        }
        __syncwarp();
        if (on) { if (once) bulk_load(ring + slot * kW + dst, src, bytes, wfull + 8 * slot, policy); else bulk_load(ring + slot * kW + dst, src, bytes, wfull + 8 * slot); }
        i++; if (++slot == (u32)nslot) { slot = 0; ph ^= 1; }
      };
      for (int tok = 0; tok < p.ntok; tok++) {
        const u8* w = p.weights; const u32 n = p.epoch_l + tok * kLayers + 1; const int pos0 = tok * NC;
        for (int l = 0; l < kLayers; l++, w += kLayerBytes) {
          { const int wd = lane ? 1 : 2; const u8* src = w + (u64)(s * 3 + lane * 2) * 256 * 512;
            for (int k = 0; k < 256; k += 16) issue(lane < 2, src + (u64)k * wd * 512, lane * 16384, 16 * wd * 512); }
          // K and V: 64 positions a stage; those of this pass once the group has written them
          { const u8* src = p.kv + ((u64)l * 8 + group) * 128 * 8192 + lane * 16384; const int stages = (pos0 + member * 8 + 7) / 64 + 1;
            for (int k = 0; k < stages; k++) {
              if (k == pos0 / 64) { if (lane == 0) count_wait(p, cq + group * 32, 16 * (n + l), 12); __syncwarp(); proxy_fence(); }
              issue(lane < 2, src + (u64)k * 32768, lane * 16384, 16384, false);
            } }
          auto pair_phase = [&](const u8* base, int kl, int ks) {
            const u8* src = base + ((u64)(pair * 4 + 2 * lane) * 16 * kl + (u64)8 * half * kl * 2) * 512;
            for (int k = 0; k < 8 * kl; k += ks) issue(lane < 2, src + (u64)k * 1024, lane * ks * 1024, ks * 1024);
          };
          pair_phase(w + kQkvBytes, 16, 16);
          for (int q = 0; q < 2; q++) { const u8* src = w + kQkvBytes + kOBytes + (u64)(7 * s + 4 * q + lane) * 2 * 256 * 512; for (int k = 0; k < 256; k += 8) issue(lane < 4 - q, src + k * 1024, lane * 8192, 8192); }
          pair_phase(w + kQkvBytes + kOBytes + kGuBytes, 56, 8);
        }
      }
    } else if (warp == 9) {
      u32 slot = 0, ph = 1, ready = 0;
      auto need = [&](const u32* c, int n, int i, u32 target, u32 site) {
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
      auto copy = [&](const u8* src) {
        if (lane == 0) { mbar_wait(p, aempty + 8 * slot, ph, 11); mbar_expect(afull + 8 * slot, kA); bulk_load(aring + slot * kA, src, kA, afull + 8 * slot); }
        __syncwarp(); if (++slot == (u32)nact) { slot = 0; ph ^= 1; }
      };
      for (int tok = 0; tok < p.ntok; tok++) {
        const u32 n = p.epoch_l + tok * kLayers + 1;
        for (int l = 0; l < kLayers; l++) {
          ready = 0; for (int k = 0; k < 256; k += 4) { need(ca, 16, k / 16, 8 * (n + l), 21); copy(xa + (u64)k * KB); }
          ready = 0; for (int k = 0; k < 128; k += 4) { need(co, 8, (8 * half + k / 16) / 2, 16 * (n + l), 22); copy(xo + (u64)(128 * half + k) * KB); }
          ready = 0; for (int q = 0; q < 2; q++) for (int k = 0; k < 256; k += 4) { need(cm, 16, k / 16, 8 * (n + l), 23); copy(xm + (u64)k * KB); }
          ready = 0; for (int k = 0; k < 448; k += 4) { need(cd, 16, 8 * half + k / 56, 8 * (n + l), 24); copy(xd + (u64)(448 * half + k) * KB); }
        }
      }
    } else {
      auto norm = [&](int buf, const u32* c, u32 target, u32 site) {
        if (lane < 16) count_wait(p, c + lane * 32, target, site);
        __syncwarp(); float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] = __uint_as_float(ld_relaxed(p.ssq + (buf * kBlocks + lane * 4 + i) * NC + s));
        float q = tree<4>(v);
#pragma unroll
        for (int d = 1; d < 32; d *= 2) q += shflx(q, d);
        if (lane == 0) st_relaxed64(p.inv + buf * NC + s, (u64)target << 32 | __float_as_uint(rsqrt_(q * (1.0f / kHidden) + 1e-5f)));
#pragma unroll 1
        for (int col = lane; col < NC; col += 32) {
          const u64* a = p.inv + buf * NC + col; u64 w = ld_relaxed64(a); const long long t0 = clock64();
          while ((u32)(w >> 32) != target) { if (clock64() - t0 > kWaitLimit) wait_failed(p, site + 10, target, (u32)(w >> 32)); w = ld_relaxed64(a); }
          finv[buf * NC + col] = __uint_as_float((u32)w);
        }
        __syncwarp(); if (lane == 0) mbar_arrive(invf + 8 * buf);
      };
      for (int tok = 0; tok < p.ntok; tok++) {
        const u32 n = p.epoch_l + tok * kLayers + 1;
        for (int l = 0; l < kLayers; l++) { norm(0, ca, 8 * (n + l), 26); norm(1, cm, 8 * (n + l), 27); }
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const int wg = warp >> 2, wi = warp & 3;
    u32 ws = 0, wp = 0, as_ = 0, ap = 0, rp = 0, fp = 0, ip[2] = {0, 0};
    auto w_wait = [&] { mbar_wait(p, wfull + 8 * ws, wp, 3); __syncwarp(); };
    auto a_wait = [&] { mbar_wait(p, afull + 8 * as_, ap, 4); __syncwarp(); };
    auto w_release = [&] { __syncwarp(); if (lane == 0) mbar_arrive(wempty + 8 * ws); if (++ws == (u32)nslot) { ws = 0; wp ^= 1; } };
    auto a_release = [&] { __syncwarp(); if (lane == 0) mbar_arrive(aempty + 8 * as_); if (++as_ == (u32)nact) { as_ = 0; ap ^= 1; } };
    auto bar = [&] { asm volatile("bar.sync 1, 256;" ::: "memory"); };
    auto publish = [&](u32* c) { proxy_fence(); bar(); if (tid == 0) red_release(c); };
    auto wait_inv = [&](int buf) { mbar_wait(p, invf + 8 * buf, ip[buf], 8); ip[buf] ^= 1; __syncwarp(); };
    long long* tr = TRACE && tid == 0 ? p.trace + (u64)s * (kLayers + 1) * 24 : nullptr;
    // one tile a warp, 64 columns; steps of 4 k16, WPS of them a weight stage
    auto leaf_sum = [&](auto nl_c, auto wps_c, int steps, u32 a0, u32 astride, float* acc) {
      constexpr int NL = decltype(nl_c)::v, WPS = decltype(wps_c)::v;
      auto leaf = [&](float* c) {
#pragma unroll
        for (int i = 0; i < R; i++) c[i] = 0;
#pragma unroll 1
        for (int st = 0; st < steps; st++) {
          const u32 wsub = st & (WPS - 1); a_wait(); if (wsub == 0) w_wait();
          Word f[4]; const u32 q = ring + ws * kW + a0 + lane * 16 + wsub * 4 * astride, b = aring + as_ * kA + wg * 2048;
#pragma unroll
          for (int k = 0; k < 4; k++) f[k] = lds128(q + k * astride);
          pin<R>(c); wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; k++) product<64, true>(c, f[k], b + k * KB);
          wgmma_commit(); wgmma_wait(); pin<R>(c);
          if (wsub == WPS - 1) w_release();
          a_release();
        }
      };
      auto add = [&](float* a, const float* b) {
#pragma unroll
        for (int i = 0; i < R; i++) a[i] += b[i]; };
      auto sum4 = [&](float* a) { float b[R], c[R]; leaf(a); leaf(b); add(a, b); leaf(b); leaf(c); add(b, c); add(a, b); };
      auto sum8 = [&](float* a) { sum4(a); float d[R]; sum4(d); add(a, d); };
      sum8(acc);
      if constexpr (NL == 16) { float e[R]; sum8(e); add(acc, e); }
    };
    auto rows4 = [&](float* c) {
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float* v = c + 4 * j; const float s0 = shflx(t & 1 ? v[0] : v[2], 1), s1 = shflx(t & 1 ? v[1] : v[3], 1);
        if (t & 1) { v[0] = s0; v[1] = s1; } else { v[2] = s0; v[3] = s1; }
      }
    };
    auto at = [&](u32 tile, int z, int j) { const int row = g + 8 * (t & 1), sw = ((row ^ (row >> 3) ^ (2 * z)) & 3) << 3; return rbuf + tile * kTile + (row * 64 + ((8 * j + 4 * (t >> 1)) ^ sw)) * 4; };
    auto put = [&](u32 tile, int z, const float* c) {
#pragma unroll
      for (int j = 0; j < 8; j++) sts128(at(tile, z, j), c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3]); };
    // tiles 0..3 to the peer, 4..7 from it and then the sums: [row tile][column half]
    auto exchange = [&](float* c) {
      mbar_wait(p, rfree, fp ^ 1, 6); __syncwarp(); rows4(c); const int r = (wi & 1) * 2 + wg; const bool mine = (wi >> 1) == half;
      if (!mine) { put(r, wi & 1, c); asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); __syncwarp(); if (lane == 0) bulk_send(mapa(rbuf + (4 + r) * kTile, half ^ 1), rbuf + r * kTile, kTile, mapa(rfull, half ^ 1)); }
      __syncwarp(); if (lane == 0) { if (warp == 0) mbar_expect(rfull, 4 * kTile); else mbar_arrive(rfull); } mbar_wait(p, rfull, rp, 7); rp ^= 1; __syncwarp();
      if (mine) {
#pragma unroll
        for (int j = 0; j < 8; j++) { const Word v = lds128(at(4 + r, wi & 1, j)); c[4 * j] += __uint_as_float(v.x); c[4 * j + 1] += __uint_as_float(v.y); c[4 * j + 2] += __uint_as_float(v.z); c[4 * j + 3] += __uint_as_float(v.w); }
        put(4 + r, wi & 1, c);
      }
      bar();
    };
    // the receive buffer (and attention's scratch in it) is free again
    auto recv_done = [&] { if (tid < 2) mbar_arrive_remote(mapa(rfree, tid)); fp ^= 1; };
    // own rows of the hidden state: warp = 16 columns, lane = (8 of the 32 rows, column), twice
    const int hq = lane >> 3; float h[2][8] = {}; Word gw;
    auto load_gamma = [&](const u16* gamma) { gw = ld_word(gamma + s * 32 + hq * 8); };
    auto publish_x = [&](u8* x, u32* counters, float* ssq) {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int hc = warp * 16 + c * 8 + (lane & 7); float q[8]; const u32 gg[4] = {gw.x, gw.y, gw.z, gw.w}; Word o; u32* oo = &o.x;
#pragma unroll
        for (int i = 0; i < 8; i++) q[i] = h[c][i] * h[c][i];
#pragma unroll
        for (int i = 0; i < 4; i++) oo[i] = bf16x2(h[c][2 * i] * bf16f(gg[i] & 0xffff), h[c][2 * i + 1] * bf16f(gg[i] >> 16));
        *(Word*)(x + (u64)(2 * s + (hq >> 1)) * KB + (hc >> 3) * 256 + (hq & 1) * 128 + (hc & 7) * 16) = o;
        float sum = tree<8>(q); sum += shflx(sum, 8); sum += shflx(sum, 16);
        if (hq == 0) ssq[s * NC + hc] = sum;
      }
      publish(counters + (s >> 3) * 32);
    };
    auto residual = [&] {
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int hc = warp * 16 + c * 8 + (lane & 7);
#pragma unroll
        for (int i = 0; i < 8; i++) { const int row = (hq & 1) * 8 + i; h[c][i] += fr[(4 + (hq >> 1) * 2 + (hc >> 6)) * 1024 + row * 64 + ((hc & 63) ^ (((row ^ (row >> 3) ^ (2 * (hq >> 1))) & 3) << 3))]; }
      }
    };
    // ---- attention: rows 8 member .. of this kv head; warp = (4 of the rows, every fourth leaf) ----
    auto attention = [&](int l, int pos0, u32 target) {
      const int gp = warp & 1, way = warp >> 1, row0 = member * 8 + gp * 4; const int stages = (pos0 + member * 8 + 7) / 64 + 1;
      if (lane == 0) count_wait(p, cq + group * 32, target, 9);
      __syncwarp();
      u32 q[2][8][2];
#pragma unroll
      for (int b = 0; b < 2; b++)
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int hf = 0; hf < 2; hf++) q[b][j][hf] = ld_relaxed(p.qkv + (((u64)group * 48 + (g & 3) * 8 + j) * 2 + hf) * NC * 16 + (row0 + 2 * b + (g >> 2)) * 16 + t * 4);
      constexpr float kScale = 0.08838834764831845f * 1.4426950408889634f;
      float o[2][8][4] = {}, m[2][2] = {{-1e30f, -1e30f}, {-1e30f, -1e30f}}, ls[2][2] = {};
#pragma unroll 1
      for (int st = 0; st < stages; st++) {
        w_wait(); const int leaf = st * 4 + way; const u32 at = ring + ws * kW + way * 8192 + lane * 16; Word v[8];
        float sc[2][4] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
          const Word k = lds128(at + j * 512);
#pragma unroll
          for (int b = 0; b < 2; b++) mma(sc[b], k, q[b][j][0], q[b][j][1]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = lds128(at + 4096 + j * 512);
        u32 pb[2][2]; float f[2][2];
#pragma unroll
        for (int b = 0; b < 2; b++) {
          float e[4];
#pragma unroll
          for (int c = 0; c < 2; c++) {
            const int last = pos0 + row0 + 2 * b + ((2 * t + c) >> 2) - leaf * 16; const bool v0 = g <= last, v1 = g + 8 <= last;  // not masked
            float mx = fmaxf(v0 ? sc[b][c] * kScale : -1e30f, v1 ? sc[b][c + 2] * kScale : -1e30f);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) mx = fmaxf(mx, shflx(mx, d));
            mx = fmaxf(mx, m[b][c]); f[b][c] = ex2(m[b][c] - mx); m[b][c] = mx;
            e[c] = v0 ? ex2(sc[b][c] * kScale - mx) : 0; e[c + 2] = v1 ? ex2(sc[b][c + 2] * kScale - mx) : 0;
            float sum = e[c] + e[c + 2];
#pragma unroll
            for (int d = 4; d < 32; d *= 2) sum += shflx(sum, d);
            ls[b][c] = ls[b][c] * f[b][c] + sum;
          }
          pb[b][0] = transpose8(bf16x2(e[0], e[1])); pb[b][1] = transpose8(bf16x2(e[2], e[3]));
        }
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
          for (int j = 0; j < 8; j++) {
            o[b][j][0] *= f[b][0]; o[b][j][1] *= f[b][1]; o[b][j][2] *= f[b][0]; o[b][j][3] *= f[b][1];
            mma(o[b][j], v[j], pb[b][0], pb[b][1]);
          }
        w_release();  // K and V were used by products that later ones of this warp waited for
      }
      // merge the 4 warps of the same rows: maxima and sums, then two rounds of partial outputs
      if (g == 0) {
#pragma unroll
        for (int b = 0; b < 2; b++)
#pragma unroll
          for (int c = 0; c < 2; c++) { fr[((warp * 2 + b) * 8 + 2 * t + c) * 2] = m[b][c]; fr[((warp * 2 + b) * 8 + 2 * t + c) * 2 + 1] = ls[b][c]; }
      }
      bar(); float f[2][2];
#pragma unroll
      for (int b = 0; b < 2; b++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float mm[4], ll[4], mx = -1e30f, den = 0;
#pragma unroll
          for (int w = 0; w < 4; w++) { const float* x = fr + (((w * 2 + gp) * 2 + b) * 8 + 2 * t + c) * 2; mm[w] = x[0]; ll[w] = x[1]; mx = fmaxf(mx, mm[w]); }
#pragma unroll
          for (int w = 0; w < 4; w++) den += ex2(mm[w] - mx) * ll[w];
          f[b][c] = ex2(m[b][c] - mx) * rcp(den);
        }
#pragma unroll
      for (int b = 0; b < 2; b++) {
        bar();
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
          for (int c = 0; c < 4; c++) { const int n = 2 * t + (c & 1), d = j * 16 + g + 8 * (c >> 1); fr[(warp * 8 + n) * 128 + (d ^ (t << 3))] = o[b][j][c] * f[b][c & 1]; }
        bar();
        const int gx = tid >> 7, n = tid >> 4 & 7, ch = tid & 15, row = member * 8 + gx * 4 + 2 * b + (n >> 2); float r[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
          float x[4];
#pragma unroll
          for (int w = 0; w < 4; w++) x[w] = fr[((w * 2 + gx) * 8 + n) * 128 + ((ch * 8) ^ ((n >> 1) << 3)) + i];
          r[i] = tree<4>(x);
        }
        *(Word*)(xo + (u64)((group * 4 + (n & 3)) * 8 + (ch >> 1)) * KB + (row >> 3) * 256 + (ch & 1) * 128 + (row & 7) * 16) = Word{bf16x2(r[0], r[1]), bf16x2(r[2], r[3]), bf16x2(r[4], r[5]), bf16x2(r[6], r[7])};
      }
    };
    using I2 = Int<2>; using I4 = Int<4>; using I8 = Int<8>; using I16 = Int<16>;
    for (int tok = 0; tok < p.ntok; tok++) {
      const u32 n = p.epoch_l + tok * kLayers + 1; const int pos0 = tok * NC;
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const Word e = ld_word(p.embedding + (u64)p.first_token[tok * NC + warp * 16 + c * 8 + (lane & 7)] * kHidden + s * 32 + hq * 8); const u32 ee[4] = {e.x, e.y, e.z, e.w};
#pragma unroll
        for (int i = 0; i < 8; i++) h[c][i] = bf16f(i & 1 ? ee[i / 2] >> 16 : ee[i / 2] & 0xffff);
      }
      load_gamma(p.gamma); publish_x(xa, ca, p.ssq);
#pragma unroll 1
      for (int l = 0; l < kLayers; l++) {
        STAMP(0)
        { float acc[R]; const int tl = min(wi, 2), qt = member * 3 + tl;
          leaf_sum(I16{}, I4{}, 4, tl == 2 ? 16384 : tl * 512, tl == 2 ? 512 : 1024, acc); STAMP(1)
          wait_inv(0);
          if (wi < 3) {
            u8* leafs = p.kv + ((u64)l * 8 + group) * 128 * 8192;
#pragma unroll
            for (int j = 0; j < 8; j++) {
              const int col = wg * 64 + 8 * j + 2 * t; float y[4];
#pragma unroll
              for (int c = 0; c < 4; c++) y[c] = acc[4 * j + c] * finv[col + (c & 1)];
              if (qt < 40) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                  const float* r = p.rope + ((u64)(pos0 + col + c) * 64 + (qt & 7) * 8 + g) * 2; const float cs = r[0], sn = r[1], a = y[c], b = y[c + 2];
                  y[c] = fmaf(a, cs, -(b * sn)); y[c + 2] = fmaf(b, cs, a * sn);
                }
              }
              u32 lo = bf16x2(y[0], y[1]), hi = bf16x2(y[2], y[3]); if (qt < 40) { lo = transpose8(lo); hi = transpose8(hi); }
              u8* leaf = leafs + (u64)((pos0 + wg * 64 + 8 * j) >> 4) * 8192 + (qt & 7) * 512 + lane * 16;
              if (qt < 32) { u8* q = p.qkv + ((u64)group * 48 + qt) * 2 * NC * 16 + (wg * 64 + 8 * j) * 16 + lane * 4; *(u32*)q = lo; *(u32*)(q + NC * 16) = hi; }
              else if (qt < 40) { *(u32*)(leaf + (j & 1) * 4) = lo; *(u32*)(leaf + (j & 1) * 4 + 8) = hi; }
              else { *(u32*)(leaf + 4096 + (j & 1) * 8) = lo; *(u32*)(leaf + 4096 + (j & 1) * 8 + 4) = hi; }
            }
          }
          publish(cq + group * 32); }
        STAMP(2)
        mbar_wait(p, rfree, fp ^ 1, 6); __syncwarp();
        attention(l, pos0, 16 * (n + l));
        publish(co + group * 32); recv_done(); STAMP(3)
        load_gamma(p.gamma + (2 * l + 1) * kHidden);
        { float acc[R]; leaf_sum(I8{}, I4{}, 4, (wi >> 1) * 16384 + (wi & 1) * 512, 1024, acc); STAMP(4) exchange(acc); }
        residual(); publish_x(xm, cm, p.ssq + kBlocks * NC); recv_done();
        STAMP(5)
        wait_inv(1);
#pragma unroll 1
        for (int q = 0; q < 2; q++) {
          float sum[2][R], acc[2][R];
#pragma unroll
          for (int i = 0; i < R; i++) { sum[0][i] = 0; sum[1][i] = 0; }
#pragma unroll 1
          for (int leaf = 0; leaf < 16; leaf++) {
#pragma unroll
            for (int i = 0; i < R; i++) { acc[0][i] = 0; acc[1][i] = 0; }
#pragma unroll 1
            for (int st = 0; st < 4; st++) {
              a_wait(); if ((st & 1) == 0) w_wait();
              Word f[4][2]; const u32 a = ring + ws * kW + wi * 8192 + (st & 1) * 4096 + lane * 16, b = aring + as_ * kA + wg * 2048;
#pragma unroll
              for (int k = 0; k < 4; k++) { f[k][0] = lds128(a + k * 1024); f[k][1] = lds128(a + k * 1024 + 512); }
              pin<R>(acc[0]); pin<R>(acc[1]); wgmma_fence();
#pragma unroll
              for (int k = 0; k < 4; k++) { product<64, true>(acc[0], f[k][0], b + k * KB); product<64, true>(acc[1], f[k][1], b + k * KB); }
              wgmma_commit(); wgmma_wait(); pin<R>(acc[0]); pin<R>(acc[1]);
              if (st & 1) w_release();
              a_release();
            }
#pragma unroll
            for (int i = 0; i < R; i++) { sum[0][i] += acc[0][i]; sum[1][i] += acc[1][i]; }
          }
          if (4 * q + wi < 7) {
            u8* d = xd + (u64)(7 * s + 4 * q + wi) * KB + wg * 2048 + lane * 4;
#pragma unroll
            for (int j = 0; j < 8; j++) {
              float a[4];
#pragma unroll
              for (int c = 0; c < 4; c++) {
                const float inv = finv[NC + wg * 64 + 8 * j + 2 * t + (c & 1)], v = sum[0][4 * j + c] * inv, up = sum[1][4 * j + c] * inv;
                a[c] = v * rcp(1.0f + ex2(v * -1.4426950408889634f)) * up;
              }
              *(u32*)(d + j * 256) = transpose8(bf16x2(a[0], a[1])); *(u32*)(d + j * 256 + 128) = transpose8(bf16x2(a[2], a[3]));
            }
          }
        }
        STAMP(6) publish(cd + (s >> 3) * 32);
        load_gamma(p.gamma + (2 * l + 2) * kHidden);
        { float acc[R]; leaf_sum(I8{}, I2{}, 14, (wi >> 1) * 8192 + (wi & 1) * 512, 1024, acc); STAMP(7) exchange(acc); }
        residual();
        if (l + 1 < kLayers) publish_x(xa, ca, p.ssq);
        else if (p.states) {
#pragma unroll
          for (int c = 0; c < 2; c++)
#pragma unroll
            for (int i = 0; i < 8; i++) p.states[((u64)tok * NC + warp * 16 + c * 8 + (lane & 7)) * kHidden + s * 32 + hq * 8 + i] = h[c][i];
        }
        if (l + 1 == kLayers) bar();
        recv_done(); STAMP(8)
      }
    }
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
