// Attention of rows that decode: every bit against plain arithmetic, and times, alone and between launches that stand
// for qkv and o; with --energy what it draws, beside plain loads of as many bytes. The model is that of the compiler's
// LP_ defines, or Llama 3.1 8B in eight layers.
//
// The stand-ins stream as many weights; the first one writes queries, and K and V where each row is, which were NaN:
// who reads them too early shows.
#include "tests/matrix/attend.cuh"
#include "tests/matrix/energy.cuh"
#include "tests/matrix/fill.cuh"
#include "tests/matrix/timing.cuh"
#include <algorithm>
#include <cstdlib>
#include <cstring>

using namespace matrix;

std::vector<Candidate>& candidates() {
  static std::vector<Candidate> all;
  return all;
}

__device__ u64 wrong, checked;
static u32 multiprocessors;
static Launch launch;
static Pass pass;
static u8 *weights, *outs, *first_outs;
static const u64 kOutBytes = (u64)kTokenBlocks * O::steps * kStepBytes;

template <class F> LP_DEVICE void each(u64 count, const F& f) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) f(i);
}
LP_DEVICE u32 at_u32(const u8* p) { return *(const u32*)p; }

// ---- the stand-ins ----

constexpr u32 kStandInThreads = 384, kStandInShared = 200 * 1024;
/// Block b's part of `bytes`.
LP_DEVICE void stream(const u8* from, u64 bytes) {
  u32 all = 0;
  const u64 quads = bytes / 16, stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i + 7 * stride < quads; i += 8 * stride) {
    Quad v[8];
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = load_constant_16(from + (i + k * stride) * 16);
#pragma unroll
    for (int k = 0; k < 8; k++) all ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (all == 0x12345) trap();  // so that the loads are needed
}
__global__ void __launch_bounds__(512) read_all(const u8* from, u64 bytes) { stream(from, bytes); }
/// Queries, and K and V where each row is: numbers of the layer, or NaN.
LP_DEVICE void project(const Launch& launch, u32 layer, bool none) {
  const auto value = [&](u64 index) {
    const u64 i = (u64)layer * 512 * (kHeads + 2 * kKvHeads) * kHeadDim + index;
    return none ? (u16)0xffff : value_of(i, 21, 0);
  };
  constexpr u64 kQueries = kHeads * kHeadDim;
  each(launch.row_count * (kQueries + 2 * kKvHeads * kHeadDim), [&](u64 i) {
    const u32 row = i / (kQueries + 2 * kKvHeads * kHeadDim), at = i % (kQueries + 2 * kKvHeads * kHeadDim);
    if (at < kQueries) {
      *(u16*)(launch.words + Memory::queries + (row * kQueries + at) * 2) = value(i);
      return;
    }
    const u32 head = (at - kQueries) / kHeadDim, dim = at % kHeadDim, position = launch.rows[row].position;
    const u32 page = launch.page_table[launch.rows[row].slot * launch.page_stride + position / kPage];
    u8* to = launch.kv + page_byte(layer, launch.kv_pages, page, head % kKvHeads);
    *(u16*)(to + (head < kKvHeads ? k_byte(position % kPage, dim) : v_byte(position % kPage, dim))) = value(i);
  });
  if constexpr (kQkNorm)
    each((u64)launch.row_count * (kHeads + kKvHeads), [&](u64 i) {
      const u32 row = i / (kHeads + kKvHeads), head = i % (kHeads + kKvHeads);
      const float v = none ? __uint_as_float(~0u) : 0.5f + (scrambled(i + layer * 999) & 1023) * (1.0f / 1024);
      if (head < kHeads) {
        ((float*)(launch.words + Memory::query_inverse))[row * kHeads + head] = v;
      } else {
        const Row& of = launch.rows[row];
        const u32 page = launch.page_table[of.slot * launch.page_stride + of.position / kPage];
        page_scales(launch, layer, page, head - kHeads)[of.position % kPage] = v;
      }
    });
}
__global__ void forget(Launch launch, u32 layer) { project(launch, layer, true); }
__global__ void __launch_bounds__(kStandInThreads, 1) before(Launch launch, const u8* from, u32 layer) {
  launch_dependents();
  stream(from, Qkv::bytes);
  wait_launch_before();
  project(launch, layer, false);
}
__global__ void __launch_bounds__(kStandInThreads, 1) behind(Launch launch, const u8* from, u8* to, u32 layer) {
  launch_dependents();
  stream(from, O::bytes);
  wait_launch_before();
  const u8* out = launch.words + Memory::attention_out;
  const u64 bytes = (launch.row_count + kTokens - 1) / kTokens * (u64)O::steps * kStepBytes;
  each(bytes / 16, [&](u64 i) { store_16(to + layer * bytes + i * 16, *(const Quad*)(out + i * 16)); });
}

// ---- plain arithmetic ----

/// A row's KV head, by a warp.
__global__ void __launch_bounds__(32) reference(Launch launch, u32 layer) {
  __shared__ float score[kPage][8];
  __shared__ u16 weight[8][kPage];
  __shared__ float sums[8][3];  // of a page: high, sum
  const u32 lane = threadIdx.x, g = lane >> 2, t = lane & 3, kv_head = blockIdx.x % kKvHeads,
            row = blockIdx.x / kKvHeads;
  const Row& of = launch.rows[row];
  const u32 first = first_visible(of.position), first_page = first / kPage, last_page = of.position / kPage;
  const u32 first_span = first_page / kSpanPages, last_span = last_page / kSpanPages;
  const u32 query = min(g, kQueriesPerKv - 1);
  float all_reference[2] = {kMinusInfinity, kMinusInfinity}, all_total[2] = {}, all[kDimTiles][4] = {};
  for (u32 span = first_span; span <= last_span; span++) {
    float reference[4][2], total[4][2] = {}, out[4][kDimTiles][4] = {};
#pragma unroll
    for (u32 share = 0; share < 4; share++) {
      reference[share][0] = reference[share][1] = kMinusInfinity;
      for (u32 page = span * kSpanPages + share; page < (span + 1) * kSpanPages; page += kSpanShares) {
        if (page < first_page || page > last_page) continue;
        const u32 entry = launch.page_table[of.slot * launch.page_stride + page];
        const u8* in = launch.kv + page_byte(layer, launch.kv_pages, entry, kv_head);
        const auto seen = [&](u32 at) { return page * kPage + at >= first && page * kPage + at <= of.position; };
        for (u32 leaf = 0; leaf < 4; leaf++) {
          float c[4] = {};
          for (u32 j = 0; j < kDimTiles; j++) {
            const u32 at = leaf * 16 + g, dim = j * 16 + 2 * t;
            const u8* q = query_at(launch, row, kv_head * kQueriesPerKv + query) + dim * 2;
            mma_m16n8k16(c, Quad{at_u32(in + k_byte(at, dim)), at_u32(in + k_byte(at + 8, dim)),
                                 at_u32(in + k_byte(at, dim + 8)), at_u32(in + k_byte(at + 8, dim + 8))},
                         at_u32(q), at_u32(q + 16));
          }
          for (u32 i = 0; i < 4; i++) score[leaf * 16 + g + i / 2 * 8][2 * t + i % 2] = c[i];
        }
        __syncwarp();
        if (lane < 8) {
          float scale = kScoreScale, high = kMinusInfinity, w[kPage], sum = 0;
          if (kQkNorm) scale *= query_inverse_at(launch, row, kv_head * kQueriesPerKv + min(lane, kQueriesPerKv - 1));
          for (u32 at = 0; at < kPage; at++) {
            const float k = kQkNorm ? page_scales(launch, layer, entry, kv_head)[at] : 1;
            w[at] = seen(at) ? score[at][lane] * (kQkNorm ? scale * k : scale) : kMinusInfinity;
            high = fmaxf(high, w[at]);
          }
          high = ceilf(high);
          for (u32 at = 0; at < kPage; at++) w[at] = exp2_approx(w[at] - fmaxf(high, -3.4e38f));
          for (u32 leaf = 0; leaf < 4; leaf++) {
            float v[8];
            for (u32 p = 0; p < 8; p++) v[p] = w[leaf * 16 + p] + w[leaf * 16 + p + 8];
            const float s = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
            sum = leaf ? sum + s : s;
          }
          for (u32 at = 0; at < kPage; at++) weight[lane][at] = (u16)bf16_pair(w[at], 0);
          sums[lane][0] = high, sums[lane][1] = sum;
        }
        __syncwarp();
        float keep[2], factor[2];
        for (u32 c = 0; c < 2; c++) {
          const float high = sums[2 * t + c][0], now = fmaxf(reference[share][c], high);
          keep[c] = rescale(reference[share][c], now), factor[c] = rescale(high, now);
          total[share][c] = fmaf(keep[c], total[share][c], factor[c] * sums[2 * t + c][1]);
          reference[share][c] = now;
        }
        const auto v = [&](u32 at, u32 dim) {
          return at_u32(in + v_byte(at, dim)) & ((seen(at) ? 0xffffu : 0) | (seen(at + 1) ? 0xffff0000u : 0));
        };
#pragma unroll
        for (u32 j = 0; j < kDimTiles; j++) {
          float c[4] = {};
          for (u32 leaf = 0; leaf < 4; leaf++) {
            const u32 at = leaf * 16 + 2 * t, dim = j * 16 + g;
            mma_m16n8k16(c, Quad{v(at, dim), v(at, dim + 8), v(at + 8, dim), v(at + 8, dim + 8)},
                         at_u32((const u8*)&weight[g][at]), at_u32((const u8*)&weight[g][at + 8]));
          }
          for (u32 i = 0; i < 4; i++)
            out[share][j][i] = fmaf(keep[i & 1], out[share][j][i], factor[i & 1] * c[i]);
        }
        __syncwarp();
      }
    }
    for (u32 c = 0; c < 2; c++) {
      float high = kMinusInfinity, sum = 0, factor[4];
      for (u32 s = 0; s < 4; s++) high = fmaxf(high, reference[s][c]);
      for (u32 s = 0; s < 4; s++) factor[s] = rescale(reference[s][c], high), sum = fmaf(factor[s], total[s][c], sum);
      const float now = fmaxf(all_reference[c], high), keep = rescale(all_reference[c], now), by = rescale(high, now);
      const bool only = first_span == last_span;
      all_total[c] = only ? sum : fmaf(keep, all_total[c], by * sum), all_reference[c] = now;
      for (u32 j = 0; j < kDimTiles; j++)
        for (u32 i = c; i < 4; i += 2) {
          float v = 0;
          for (u32 s = 0; s < 4; s++) v = fmaf(factor[s], out[s][j][i], v);
          all[j][i] = only ? v : fmaf(keep, all[j][i], by * v);
        }
    }
  }
  for (u32 j = 0; j < kDimTiles; j++)
    for (u32 i = 0; i < 4; i++) {
      const u32 column = 2 * t + i % 2, step = (kv_head * kQueriesPerKv + column) * kDimTiles + j;
      if (column >= kQueriesPerKv) continue;
      const float inverse = reciprocal_approx(all_total[i % 2]);
      *(u16*)(launch.words + Memory::attention_out + vector_byte(O::steps, step, row, i / 2) + g * 2) =
          (u16)bf16_pair(all[j][i] * inverse, 0);
    }
}
__global__ void compare(const u8* found, const u8* expected, u64 words, u32 rows) {
  each(words, [&](u64 i) {
    // Rows beyond the last one hold anything.
    const u64 at = i * 4, block = at / (O::steps * kStepBytes), in = at % kStepBytes;
    const u32 row = block % ((rows + kTokens - 1) / kTokens) * kTokens + in / 256 * 8 + in % 128 / 16;
    if (row >= rows) return;
    atomicAdd(&checked, 1ull);
    if (at_u32(found + at) != at_u32(expected + at)) atomicAdd(&wrong, 1ull);
  });
}

// ---- the host ----

template <class T> static T* allocate(u64 count) {
  T* p;
  CHECK(cudaMalloc(&p, count * sizeof(T)));
  return p;
}
template <class T> static void upload(T* to, const std::vector<T>& v) {
  if (!v.empty()) CHECK(cudaMemcpy(to, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
}
static void start(const void* kernel, u32 threads, u32 shared, void** parameters) {
  cudaLaunchConfig_t config = {};
  config.gridDim = multiprocessors / 4 * 4, config.blockDim = threads, config.dynamicSmemBytes = shared;
  cudaLaunchAttribute early;
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization, early.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &early, config.numAttrs = 1;
  CHECK(cudaLaunchKernelExC(&config, kernel, parameters));
}
static void attend(const Candidate& by, u32 layer) {
  void* parameters[] = {&launch, &pass, &layer};
  start(by.spans, by.threads, by.shared, parameters);
  if (pass.merge_count && by.merge) start(by.merge, by.merge_threads, 0, parameters);
}
static void project_layer(u32 layer) {
  void* parameters[] = {&launch, &weights, &layer};
  start((const void*)before, kStandInThreads, kStandInShared, parameters);
}
static void keep_layer(u32 layer) {
  void* parameters[] = {&launch, &weights, &outs, &layer};
  start((const void*)behind, kStandInThreads, kStandInShared, parameters);
}
static void forget_all() {
  for (u32 layer = 0; layer < kLayers; layer++) forget<<<256, 256>>>(launch, layer);
  CHECK(cudaMemset(launch.words + Memory::attention_out, 0xff, kOutBytes));
  CHECK(cudaDeviceSynchronize());
}
template <class F> static float microseconds(const F& work) { return milliseconds<9>(work) * 1000; }

constexpr u32 kMostRows = 512, kStride = 80, kMostPages = 6144;
/// Rows at these positions, each alone of its sequence, as items or by spans; pages in order, or anywhere. Bytes of K
/// and V that are read.
static u64 make_pass(const std::vector<u32>& positions, bool shuffled, bool whole) {
  std::vector<Row> rows;
  std::vector<u32> table(kMostRows * kStride, 0), merges;
  struct Span {
    u32 pages, word, place;
  };
  std::vector<Span> spans;
  u32 next = 0, places = 0, all = 0;
  u64 bytes = 0;
  for (u32 position : positions) all += position / kPage + 1;
  if (all > kMostPages) printf("too many pages\n"), exit(1);
  u32 step = shuffled ? 5 * all / 13 | 1 : 1;
  const auto apart = [](u32 a, u32 b) {
    while (b) std::swap(a %= b, b);
    return a == 1;
  };
  while (!apart(all, step)) step++;
  for (u32 row = 0; row < positions.size(); row++) {
    const u32 position = positions[row];
    rows.push_back(Row{0, position, row, row, position, kRowSample, ~0u, 0});
    for (u32 page = 0; page <= position / kPage; page++) table[row * kStride + page] = (u64)next++ * step % all;
    const u32 first = kWindow && position + 1 > kWindow ? (position + 1 - kWindow) / kPage : 0, last = position / kPage;
    const u32 of = last / kSpanPages - first / kSpanPages + 1;
    if (whole || of == 1) spans.push_back(Span{last - first + 1, row, kWhole});
    for (u32 span = first / kSpanPages; !whole && of > 1 && span <= last / kSpanPages; span++) {
      const u32 begin = std::max(first, span * kSpanPages), end = std::min(last + 1, (span + 1) * kSpanPages);
      spans.push_back(Span{end - begin, row | span << 16, places + span - first / kSpanPages});
    }
    if (!whole && of > 1) merges.insert(merges.end(), {row | of << 16, places}), places += of;
    bytes += ((u64)(last - first) * kPageBytes + (position % kPage / 8 + 1) * kGroupBytes) * kKvHeads;
  }
  if (places > kMostSpans) printf("too many spans\n"), exit(1);
  std::stable_sort(spans.begin(), spans.end(), [](const Span& a, const Span& b) { return a.pages > b.pages; });
  std::vector<u32> words;
  for (const Span& span : spans) words.insert(words.end(), {span.word, span.place});
  upload((Row*)launch.rows, rows), upload((u32*)launch.page_table, table);
  upload((u32*)pass.attend_spans, words), upload((u32*)pass.merges, merges);
  launch.row_count = rows.size(), launch.kv_pages = kMostPages;
  pass.span_count = spans.size(), pass.merge_count = merges.size() / 2;
  return bytes;
}
static bool same(u8* expected) {
  const u64 none = 0, bytes = (launch.row_count + kTokens - 1) / kTokens * (u64)O::steps * kStepBytes * kLayers;
  CHECK(cudaMemcpyToSymbol(wrong, &none, 8));
  CHECK(cudaMemcpyToSymbol(checked, &none, 8));
  compare<<<1024, 256>>>(outs, expected, bytes / 4, launch.row_count);
  u64 bad, all;
  CHECK(cudaMemcpyFromSymbol(&bad, wrong, 8));
  CHECK(cudaMemcpyFromSymbol(&all, checked, 8));
  if (bad || !all) printf("  %llu of %llu words wrong\n", bad, all);
  return !bad && all;
}
static void print_trace(const Candidate& by) {
  const u32 blocks = multiprocessors / 4 * 4, sets = 2;
  std::vector<long long> all(blocks * sets * 4, 0);
  CHECK(cudaMemset(launch.trace, 0, all.size() * 8));
  for (u32 layer = 0; layer < 2; layer++) project_layer(layer), attend(by, layer), keep_layer(layer);
  CHECK(cudaMemcpy(all.data(), launch.trace, all.size() * 8, cudaMemcpyDeviceToHost));
  // Begin of a block, when its consumers may go on, when the first page is there, when its last item is over.
  static const char* const names[] = {"begun", "go", "first", "ended"};
  long long go = 0;
  for (u32 i = 0; i < blocks * sets; i++) go = std::max(go, all[i * 4 + 1]);
  for (u32 what = 0; what < 4; what++) {
    std::vector<double> at;
    for (u32 i = 0; i < blocks * sets; i++)
      if (all[i * 4 + what]) at.push_back((all[i * 4 + what] - go) * 1e-3);
    if (at.empty()) continue;
    std::sort(at.begin(), at.end());
    const auto of = [&](double part) { return at[(size_t)(part * (at.size() - 1))]; };
    printf("      us after the last go: %-6s %7.2f %7.2f %7.2f %7.2f %7.2f  (0, 10, 50, 90, 100 %%)\n", names[what],
           of(0), of(0.1), of(0.5), of(0.9), of(1));
  }
}
static bool run(const char* name, const std::vector<u32>& positions, bool shuffled, double best, bool whole = false) {
  const u64 bytes = make_pass(positions, shuffled, whole);
  const double least = bytes / best * 1e-3;
  printf("%s%s: %u items, %u merges, %.1f MB a layer, %.1f us at %.0f GB/s\n", name, whole ? ", whole" : "",
         pass.span_count, pass.merge_count, bytes * 1e-6, least, best);
  bool good = true;
  forget_all();
  for (u32 layer = 0; layer < kLayers; layer++) {
    project_layer(layer);
    CHECK(cudaDeviceSynchronize());
    reference<<<launch.row_count * kKvHeads, 32>>>(launch, layer);
    CHECK(cudaDeviceSynchronize());
    keep_layer(layer);
  }
  CHECK(cudaDeviceSynchronize());
  std::swap(outs, first_outs);
  const auto none = [&] {
    for (u32 layer = 0; layer < kLayers; layer++) project_layer(layer), keep_layer(layer);
  };
  const float empty = microseconds(none) / kLayers;
  printf("  %-16s %8s %8s %6s %8s %8s %6s\n", "", "alone us", "GB/s", "%", "chain us", "GB/s", "%");
  for (const Candidate& by : candidates()) {
    bool right = true;
    if (by.right) {
      for (int round = 0; round < 3; round++) {
        forget_all();
        for (u32 layer = 0; layer < kLayers; layer++) project_layer(layer), attend(by, layer), keep_layer(layer);
        CHECK(cudaDeviceSynchronize());
        right &= same(first_outs);
      }
      good &= right;
    }
    const float alone = microseconds([&] {
      for (u32 layer = 0; layer < kLayers; layer++) attend(by, layer);
    }) / kLayers;
    const float chain = microseconds([&] {
      for (u32 layer = 0; layer < kLayers; layer++) project_layer(layer), attend(by, layer), keep_layer(layer);
    }) / kLayers - empty;
    printf("  %-16s %8.2f %8.0f %6.1f %8.2f %8.0f %6.1f%s\n", by.name, alone, bytes * 1e-3 / alone,
           100 * least / alone, chain, bytes * 1e-3 / chain, 100 * least / chain,
           !by.right ? "  (no result)" : right ? "" : "  WRONG");
    if (by.traced) print_trace(by);
    fflush(stdout);
  }
  return good;
}

static void print_energies(u32 rows, u32 position) {
  std::vector<u32> positions;
  for (u32 row = 0; row < rows; row++) positions.push_back(position + row * 37 % 16);
  const u64 bytes = make_pass(positions, true, true), layer_bytes = (u64)kMostPages * kKvHeads * kPageBytes;
  printf("%u rows at %u: %.1f MB\n", rows, position, bytes * 1e-6);
  print_energy("attention", kLayers, [] {
    for (u32 layer = 0; layer < kLayers; layer++) attend(candidates()[0], layer);
  });
  print_energy("loads", kLayers, [&] {
    for (u32 layer = 0; layer < kLayers; layer++)
      read_all<<<2 * multiprocessors, 512>>>(launch.kv + layer * layer_bytes, bytes);
  });
}

int main(int count, char** arguments) {
  const bool energy = count > 1 && !strcmp(arguments[1], "--energy");
  const double best = count > 1 && !energy ? atof(arguments[1]) : 4650;  // GB/s that reading can reach
  int multi;
  CHECK(cudaDeviceGetAttribute(&multi, cudaDevAttrMultiProcessorCount, 0));
  multiprocessors = multi;
  candidates().insert(candidates().begin(),
                      Candidate{"product", (const void*)matrix_attend_spans, (const void*)matrix_merge_spans,
                                kAttendSpansThreads, kAttendSpansShared, kMergeSpansThreads, true, false});
  for (const Candidate& by : candidates())
    CHECK(cudaFuncSetAttribute(by.spans, cudaFuncAttributeMaxDynamicSharedMemorySize, by.shared));
  CHECK(cudaFuncSetAttribute((const void*)before, cudaFuncAttributeMaxDynamicSharedMemorySize, kStandInShared));
  CHECK(cudaFuncSetAttribute((const void*)behind, cudaFuncAttributeMaxDynamicSharedMemorySize, kStandInShared));
  const u64 kv = (u64)kLayers * kMostPages * kKvHeads * kPageBytes, scales = kv / kPageBytes * kPage;
  launch.kv = allocate<u8>(kv), launch.k_scale = allocate<float>(scales), launch.words = allocate<u8>(Memory::bytes);
  CHECK(cudaMemset(launch.words, 0, Memory::bytes));
  fill<<<4096, 256>>>((u16*)launch.kv, kv / 2, 5, 0);
  fill<<<1024, 256>>>((u16*)launch.k_scale, scales * 2, 6, 2);
  weights = allocate<u8>(std::max<u64>(Qkv::bytes, O::bytes));
  outs = allocate<u8>(kLayers * kOutBytes), first_outs = allocate<u8>(kLayers * kOutBytes);
  launch.rows = allocate<Row>(kMostRows), launch.page_table = allocate<u32>(kMostRows * kStride);
  launch.page_stride = kStride, launch.trace = allocate<long long>(132 * 16);
  u32* items = allocate<u32>(4 * kMostSpans);
  pass.attend_spans = items, pass.merges = allocate<u32>(2 * kMostRows);
  const auto equal = [](u32 rows) { return std::vector<u32>(rows, 511); };
  const auto ragged = [](u32 rows) {
    std::vector<u32> positions;
    for (u32 row = 0; row < rows; row++) positions.push_back(448 + row * 37 % 128);
    return positions;
  };
  const auto mixed = [](u32 rows) {
    std::vector<u32> positions;
    for (u32 row = 0; row < rows; row++) positions.push_back((u32)(100 * pow(40, (row * 97 % rows + 0.5) / rows)));
    return positions;
  };
  if (energy) {
    fill<<<1024, 256>>>((u16*)(launch.words + Memory::queries), (u64)kMostRows * kHeads * kHeadDim, 21, 0);
    print_energies(256, 480), print_energies(224, 1040);
    return 0;
  }
  bool good = true;
  good &= run("64 rows x 512", equal(64), true, best);
  good &= run("128 rows x 512", equal(128), true, best);
  good &= run("128 rows x 512, pages in order", equal(128), false, best);
  good &= run("256 rows x 512", equal(256), true, best);
  good &= run("512 rows x 512", equal(512), true, best);
  good &= run("128 rows x 448 to 575", ragged(128), true, best);
  const auto at = [](u32 rows, u32 position) {
    std::vector<u32> positions;
    for (u32 row = 0; row < rows; row++) positions.push_back(position + row * 37 % 64);
    return positions;
  };
  for (bool whole : {false, true}) {
    good &= run("64 rows x 100 to 4000", mixed(64), true, best, whole);
    good &= run("256 rows x 100 to 4000", mixed(256), true, best, whole);
    good &= run("64 rows x 1040 to 1103", at(64, 1040), true, best, whole);
    good &= run("224 rows x 1040 to 1103", at(224, 1040), true, best, whole);
    good &= run("96 rows x 2040 to 2103", at(96, 2040), true, best, whole);
    good &= run("40 rows x 4000 to 4063", at(40, 4000), true, best, whole);
  }
  return !good;
}
