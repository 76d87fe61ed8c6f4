// Tests of the sampler against the CPU sampler. `cases FILE` writes the cases, reference.rs turns them into results,
// and `check RESULTS` compares: every stage, all parameters, odd logits, chains of several steps, repeats. `time`
// measures. Built with LP_VOCAB, LP_BLOCKS, LP_COLUMNS and LP_SAMPLE_THREADS for a GPU (nvcc) or, with LP_EMULATED, for
// a host (g++ -x c++).
#ifdef LP_EMULATED
#include "emulate.h"
#include "layout/launch.cuh"
#include "layout/sampler.cuh"
#include "ops/exact_math.cuh"
#include "ops/noise.cuh"
#include "ops/sampling_state.cuh"
#include "ops/sampling_scan.cuh"
#include "ops/sampling_conclude.cuh"
#include "ops/sampling.cuh"
#else
#include "sampler.cu"
#endif
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vector>
using namespace sampling;

constexpr u32 kSteps = 3, kSlots = kRows + 3;

static u32 word(float v) { u32 r; memcpy(&r, &v, 4); return r; }
static float real(u32 v) { float r; memcpy(&r, &v, 4); return r; }

// ---- cases
struct Random {
  u64 state;
  u64 next() {
    u64 z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  u32 below(u32 n) { return (u32)(next() % n); }
  float unit() { return (float)(next() >> 40) / (float)(1 << 24); }
  float normal() { float s = -6; for (int i = 0; i < 12; i++) s += unit(); return s; }
};
struct Case {
  RowSampling params;
  u32 position;
  std::vector<u32> bias, prompt, generated, suppress; // bias: token, bits of f32
  std::vector<float> logits;
};
constexpr u32 kKindsOfLogits = 10;
static float odd_logit(u32 kind, u32 id, Random& random) {
  const float nan = real(0x7fc00000u);
  switch (kind) {
    case 0: return random.normal() * 3;
    // Ties, both zeros.
    case 1: return (float)(int)(random.normal() * 2) * (random.below(2) ? 0.5f : -0.5f);
    case 2: {
      const u32 k = random.below(12);
      return k == 0 ? nan : k == 1 ? -kInfinity : k == 2 && random.below(2000) == 0 ? kInfinity : random.normal();
    }
    case 3: return 0.25f;
    case 4: return random.normal() * 40;
    case 5: return random.below(2) ? nan : -kInfinity;
    case 6: return random.normal() * 2 + (id == kVocab / 2 ? 15.0f : 0.0f);                              // peaked
    // All good ones in one block.
    case 7: return random.normal() + (id < 300 ? 12.0f : 0.0f);
    // A grammar's mask.
    case 8: return id % 97 == 5 ? random.normal() : -kInfinity;
    // Many ties at the top.
    default: return (float)random.below(64) * 0.125f;
  }
}
static Case make_case(u32 i) {
  Random random{0x5eed0000ull + i * 7919ull};
  Case c{};
  RowSampling& p = c.params;
  const float temperatures[] = {0.0f, 1.0f, 0.3f, 2.5f, 1.0f, 0.7f}, top_ps[] = {1.0f, 0.9f, 0.5f, 1.0f, 1e-6f, 0.999f},
              min_ps[] = {0.0f, 0.0f, 0.05f, 0.0f, 1.0f, 1e-4f};
  const u32 ks[] = {0, 1, 40, 64, 65, 150, 700, kVocab - 1, 0xffffffffu, 5, 0};
  p.temperature = temperatures[random.below(6)];
  p.top_p = top_ps[random.below(6)];
  p.min_p = min_ps[random.below(6)];
  p.top_k = ks[random.below(11)];
  if (i % 5 == 0) { p.top_p = 1; p.min_p = 0; p.top_k = 0; }                        // the fast path
  if (i % 11 == 7) { p.temperature = 1; p.top_p = 0.8f; p.min_p = 0; p.top_k = 100; } // the longest path
  p.seed_lo = (u32)random.next(); p.seed_hi = (u32)random.next();
  p.repetition_penalty = 1;
  p.flags = 0;
  if (random.below(3) == 0) {
    const u32 tops[] = {0, 1, 7, 20};
    p.flags = kWantLogprobs;
    p.top_logprobs = tops[random.below(4)];
  }
  c.position = 1 + random.below(6000);
  p.suppress_until = 0;
  if (random.below(3) == 0) {
    auto some = [&](u32 n, u32 range) {
      std::vector<u32> v;
      for (u32 j = 0; j < n; j++) v.push_back(random.below(range) * (kVocab / range));
      return v;
    };
    c.prompt = some(40, kVocab < 500 ? kVocab : 500);
    c.generated = some(60, kVocab < 20 ? kVocab : 20);
    c.suppress = some(3, kVocab);
    c.suppress.push_back(kVocab + 3);
    p.suppress_until = c.position + random.below(3);
    const float penalties[] = {1.0f, 1.3f, 0.8f};
    p.repetition_penalty = penalties[random.below(3)];
    if (random.below(2)) { p.presence_penalty = random.normal(); p.frequency_penalty = random.normal() * 0.3f; }
    for (u32 id = random.below(9), n = 0; id < kVocab && n < 300; id += 1 + random.below(kVocab / 150 + 1), n++) {
      c.bias.push_back(id);
      c.bias.push_back(word(random.normal() * 5));
    }
    if (random.below(4) == 0) c.bias.clear();
  }
  p.bias_count = (u32)c.bias.size() / 2; p.suppress_count = (u32)c.suppress.size();
  const u32 kind = i % kKindsOfLogits;
  c.logits.resize(kVocab);
  for (u32 id = 0; id < kVocab; id++) c.logits[id] = odd_logit(kind, id, random);
  return c;
}
static u32 number_of_cases() { return kVocab > 50000 ? 120 : 660; }

static int write_cases(const char* path) {
  FILE* f = fopen(path, "wb");
  auto put = [&](u32 v) { fwrite(&v, 4, 1, f); };
  put(number_of_cases()); put(kSteps); put(kVocab);
  for (u32 i = 0; i < number_of_cases(); i++) {
    const Case c = make_case(i);
    const RowSampling& p = c.params;
    put(word(p.temperature)); put(word(p.top_p)); put(word(p.min_p)); put(p.top_k); put(p.seed_lo); put(p.seed_hi);
    put(word(p.repetition_penalty)); put(word(p.presence_penalty)); put(word(p.frequency_penalty));
    put(c.position); put(p.suppress_until); put(p.flags & kWantLogprobs ? p.top_logprobs : 99);
    put(p.bias_count); for (u32 v : c.bias) put(v);
    for (auto* list : {&c.prompt, &c.generated, &c.suppress}) { put((u32)list->size()); for (u32 v : *list) put(v); }
    fwrite(c.logits.data(), 4, kVocab, f);
  }
  return fclose(f);
}

struct Expected { u32 token; float cpu, exact; std::vector<u32> top; std::vector<float> top_cpu, top_exact; };
static std::vector<Expected> read_expected(const char* path) {
  FILE* f = fopen(path, "rb");
  if (!f) { printf("no %s\n", path); exit(2); }
  auto get = [&] { u32 v = 0; if (fread(&v, 4, 1, f) != 1) { printf("%s ends early\n", path); exit(2); } return v; };
  std::vector<Expected> all(number_of_cases() * kSteps);
  for (Expected& e : all) {
    e.token = get(); e.cpu = real(get()); e.exact = real(get());
    const u32 n = get();
    for (u32 i = 0; i < n; i++) {
      e.top.push_back(get());
      e.top_cpu.push_back(real(get()));
      e.top_exact.push_back(real(get()));
    }
  }
  fclose(f);
  return all;
}

// ---- the kernel under test: launches of it in a row, on the same logits
#ifdef LP_EMULATED
static void* take(size_t n) { void* p = malloc(n); memset(p, 0, n); return p; }
static void put(void* to, const void* from, size_t n) { memcpy(to, from, n); }
static u32 schedule = 1;
static void launch(const SamplerLaunch& of) {
  std::vector<Scratch> scratch(kBlocks);
  memset((void*)scratch.data(), 0xcd, sizeof(Scratch) * kBlocks);
  emulated::launch(kBlocks, kThreads, schedule++,
                   [&](u32 block, u32 thread) { sample(of, scratch[block], block, thread); });
}
static float timed(u32 steps, std::vector<SamplerLaunch> chain) {
  for (u32 i = 0; i < steps; i++) launch(chain[i]);
  return 0;
}
static void* take_mapped(size_t n) { return take(n); }
static void admit(u32* counts, const u32* tokens, u32 prompt, u32 n) {
  for (u32 i = 0; i < n; i++) count_token(counts, tokens[i], i < prompt);
}
#else
#define CHECK(call) do { \
    cudaError_t e_ = (call); \
    if (e_ != cudaSuccess) { \
      printf("%s: %s\n", #call, cudaGetErrorString(e_)); \
      fail_report(); \
      exit(3); \
    } \
  } while (0)
static u32* mapped_report;
static void fail_report() {
  if (mapped_report)
    printf("report: %u block %u thread %u site %u expected %u seen %u\n", mapped_report[0], mapped_report[1],
           mapped_report[2], mapped_report[3], mapped_report[4], mapped_report[5]);
}
static void admit(u32* counts, const u32* tokens, u32 prompt, u32 n) {
  count_tokens<<<1, 256>>>(counts, tokens, prompt, n);
  CHECK(cudaGetLastError());
}
static void* take(size_t n) { void* p; CHECK(cudaMalloc(&p, n)); CHECK(cudaMemset(p, 0, n)); return p; }
static void put(void* to, const void* from, size_t n) { CHECK(cudaMemcpy(to, from, n, cudaMemcpyDefault)); }
static void* take_mapped(size_t n) {
  void* p;
  CHECK(cudaHostAlloc(&p, n, cudaHostAllocMapped));
  memset(p, 0, n);
  return p;
}
static u32 missing_blocks = 0;
static float timed(u32 steps, std::vector<SamplerLaunch> chain) {
  static cudaEvent_t from, to;
  if (!from) { CHECK(cudaEventCreate(&from)); CHECK(cudaEventCreate(&to)); }
  CHECK(cudaEventRecord(from));
  for (u32 i = 0; i < steps; i++) {
    void* args[] = {(void*)&chain[i]};
    if (missing_blocks) sampler<<<kBlocks - missing_blocks, kThreads>>>(chain[i]);
    else CHECK(cudaLaunchCooperativeKernel((void*)sampler, dim3(kBlocks), dim3(kThreads), args, 0, nullptr));
  }
  CHECK(cudaEventRecord(to));
  CHECK(cudaDeviceSynchronize());
  float ms = 0;
  CHECK(cudaEventElapsedTime(&ms, from, to));
  return ms;
}
#endif

// ---- running cases
struct Machine {
  SamplerLaunch a{};
  float *logits, *processed;
  RowSampling* sampling;
  Row first[kRows];    // rows of the first step
  u32 *counts, *lists; // lists: bias and suppress of every row
  u64* tokens; RowLogprobs* logprobs;
  u32 most_steps;
  explicit Machine(u32 steps) : most_steps(steps) {
    logits = (float*)take(kRows * kPadded * 4ull); processed = (float*)take(kRows * kPadded * 4ull);
    sampling = (RowSampling*)take(sizeof(RowSampling) * kSlots);
    counts = (u32*)take(kSlots * kPadded * 4ull); lists = (u32*)take(kRows * 4096 * 4);
    tokens = (u64*)take_mapped(steps * kRows * 8);
    logprobs = (RowLogprobs*)take_mapped(steps * kRows * sizeof(RowLogprobs));
    a = SamplerLaunch{
        logits, processed, counts, (u8*)take(kWordsBytes), sampling, (Row*)take(sizeof first), (u32*)take(4), tokens,
        logprobs, (u32*)take_mapped(8), (u32*)take_mapped(64), 0, 0, 0, 0};
#ifndef LP_EMULATED
    mapped_report = a.report;
#endif
    // Tags near the wrap; memory that nobody may read before it is written is poisoned.
    const u32 tag = 0xfffffff0u;
    put(a.words, &tag, 4);
    std::vector<u32> poison(kRows * kPadded, 0x7f800000u);
    put(processed, poison.data(), poison.size() * 4);
  }
  // `steps`: that each row samples; then it idles.
  void load(const std::vector<const Case*>& rows, u32 slot_of_first, const std::vector<u32>& steps) {
    a.row_count = (u32)rows.size();
    for (u32 r = 0; r < a.row_count; r++) {
      const Case& c = *rows[r];
      std::vector<float> padded(kPadded, kInfinity); // padding is poisoned with what would win
      memcpy(padded.data(), c.logits.data(), kVocab * 4ull);
      put(logits + r * kPadded, padded.data(), kPadded * 4ull);
      const u32 slot = (slot_of_first + r) % kSlots;
      // The new token's position is that after the row's.
      first[r] = Row{
          7, c.position - 1, slot, r, c.position - 1, steps[r] > 0 ? kRowSample : 0,
          c.position - 1 + (steps[r] > 0 ? steps[r] - 1 : 0), 0};
      std::vector<u32> history(c.prompt), zeros(kPadded, 0);
      history.insert(history.end(), c.generated.begin(), c.generated.end());
      put(counts + slot * kPadded, zeros.data(), kPadded * 4ull);
      if (!history.empty()) {
        put(lists + r * 4096 + 3500, history.data(), history.size() * 4);
        admit(counts + slot * kPadded, lists + r * 4096 + 3500, (u32)c.prompt.size(), (u32)history.size());
      }
      RowSampling p = c.params;
      u32* list = lists + r * 4096;
      p.bias = (u64)list; p.suppress = (u64)(list + 3000);
      if (!c.bias.empty()) put(list, c.bias.data(), c.bias.size() * 4);
      if (!c.suppress.empty()) put(list + 3000, c.suppress.data(), c.suppress.size() * 4);
      put(sampling + slot, &p, sizeof p);
    }
  }
  // `stop`: the host asks the chain to end before it begins.
  float go(u32 steps, bool stop = false) {
    memset(tokens, 0xff, steps * kRows * 8);
    memset((void*)logprobs, 0xff, steps * kRows * sizeof(RowLogprobs));
    put(a.rows, first, sizeof(Row) * a.row_count);
    a.control[0] = stop; a.control[1] = 0; a.stop = a.control;
    std::vector<SamplerLaunch> chain(steps, a);
    for (u32 step = 0; step < steps; step++) {
      chain[step].tokens = tokens + step * kRows; chain[step].logprobs = logprobs + step * kRows;
      chain[step].tag = step + 1; chain[step].step = step;
    }
    return timed(steps, chain);
  }
};

struct Tally {
  u32 rows = 0, tokens = 0, idle = 0, next = 0, logprobs = 0, tops = 0;
  float off = 0;
  bool good() const { return tokens + idle + next + logprobs + tops == 0 && off < 4e-6f; }
};
static void compare(const Machine& m, u32 r, u32 step, u32 steps_of_row, const Case& c, const Expected& e, Tally& tally,
                    u32 index) {
  const u64 got = m.tokens[step * kRows + r];
  tally.rows++;
  if (step >= steps_of_row) { tally.idle += got != ((u64)(step + 1) << 32 | kNone); return; }
  if (got != ((u64)(step + 1) << 32 | e.token)) {
    if (tally.tokens++ < 4)
      printf("  case %u step %u: token %u tag %u, not %u (t %g k %u p %g m %g flags %u)\n", index, step, (u32)got,
             (u32)(got >> 32), e.token, c.params.temperature, c.params.top_k, c.params.top_p, c.params.min_p,
             c.params.flags);
    return;
  }
  if (step + 1 == steps_of_row) {
    Row next;
    put(&next, m.a.rows + r, sizeof next);
    const u32 position = c.position + step;
    if (next.token != e.token || next.position != position || next.first_position != position ||
        next.slot != m.first[r].slot)
      tally.next++;
  }
  if (!(c.params.flags & kWantLogprobs)) return;
  const RowLogprobs& l = m.logprobs[step * kRows + r];
  auto off = [&](float a, float b) {
    if (a != b && !(a != a && b != b)) {
      const float d = (a > b ? a - b : b - a) / (1 + (a > 0 ? a : -a));
      if (!(d <= tally.off)) tally.off = d;
    }
  };
  if (word(l.logprob) != word(e.exact)) {
    if (tally.logprobs++ < 4) printf("  case %u step %u: logprob %.9g, not %.9g\n", index, step, l.logprob, e.exact);
  }
  off(l.logprob, e.cpu);
  bool same = l.count == e.top.size();
  for (u32 i = 0; same && i < l.count; i++) {
    same = l.top[i].token == e.top[i] && word(l.top[i].logprob) == word(e.top_exact[i]);
    off(l.top[i].logprob, e.top_cpu[i]);
  }
  if (!same && tally.tops++ < 4)
    printf("  case %u step %u: top %u of %zu differs: %u %.9g, not %u %.9g\n", index, step, l.count, e.top.size(),
           l.top[0].token, l.top[0].logprob, e.top.empty() ? 0 : e.top[0], e.top.empty() ? 0.0f : e.top_exact[0]);
}

// `every`: of the batches, that many are left out but for one; `flip`: one bit of each seed is changed.
static int check(const char* path, u32 repeats, u32 every, bool flip) {
  const std::vector<Expected> expected = read_expected(path);
  std::vector<Case> cases;
  for (u32 i = 0; i < number_of_cases(); i++) cases.push_back(make_case(i));
  Machine m(kSteps);
  Tally tally;
  Random random{42};
  for (u32 repeat = 0; repeat < repeats; repeat++) {
    // Other neighbours, another number of rows, another place in the batch every time.
    std::vector<u32> order(cases.size());
    for (u32 i = 0; i < order.size(); i++) {
      order[i] = i;
      const u32 j = random.below(i + 1);
      order[i] = order[j];
      order[j] = i;
    }
    u32 batch = 0;
    for (u32 i = 0; i < order.size(); batch++) {
      u32 n = batch % 3 == 0 ? kRows : 1 + random.below(kRows);
      if (n > order.size() - i) n = (u32)order.size() - i;
      if (batch % every == 0) {
        std::vector<Case> flipped;
        std::vector<const Case*> rows;
        std::vector<u32> steps;
        for (u32 r = 0; r < n; r++) {
          flipped.push_back(cases[order[i + r]]);
          steps.push_back(random.below(8) ? kSteps : random.below(kSteps));
        }
        for (Case& c : flipped) { if (flip) c.params.seed_hi ^= 1u << 17; rows.push_back(&c); }
        m.load(rows, random.below(kSlots), steps);
        m.go(kSteps);
        for (u32 step = 0; step < kSteps; step++)
          for (u32 r = 0; r < n; r++)
            compare(m, r, step, steps[r], cases[order[i + r]], expected[order[i + r] * kSteps + step], tally,
                    order[i + r]);
      }
      i += n;
    }
  }
  // A chain that is asked to end runs one step, and says so.
  m.load({&cases[0]}, 0, {kSteps});
  m.go(kSteps, true);
  const bool stopped = m.a.control[1] == 1 && m.tokens[0] >> 32 == 1 && m.tokens[kRows] == ~0ull &&
                       m.tokens[2 * kRows] == ~0ull;
  const bool wrong_expected = flip ||
#ifdef LP_BREAK_TIES
    true;
#else
    false;
#endif
  const bool ok = wrong_expected ? tally.tokens > 0 : tally.good() && stopped;
  printf(
      "%s vocab %u blocks %u threads %u rows %u%s: %u results; wrong tokens %u, idle rows %u, next rows %u, logprobs "
      "%u, tops %u; %s; from the CPU's logprobs at most %.2g\n",
      ok ? "ok  " : "FAIL", kVocab, kBlocks, kThreads, kRows, wrong_expected ? " (negative control)" : "", tally.rows,
      tally.tokens, tally.idle, tally.next, tally.logprobs, tally.tops, stopped ? "stopped" : "did not stop",
      tally.off);
  return ok ? 0 : 1;
}

// Microseconds a launch, the gap to the next one included, over chains of many.
static int time_all() {
  constexpr u32 steps = 400;
  Machine m(steps);
  struct Setting { const char* name; float t; u32 k; float p, min_p; int top; bool penalties; };
  const Setting settings[] = {{"greedy", 0, 0, 1, 0, -1, false},
                              {"temperature", 1, 0, 1, 0, -1, false},
                              {"greedy, 20 logprobs", 0, 0, 1, 0, 20, false},
                              {"temperature, penalties", 1, 0, 1, 0, -1, true},
                              {"top_k 40, top_p 0.9", 1, 40, 0.9f, 0, -1, false},
                              {"the same, 20 logprobs", 1, 40, 0.9f, 0, 20, false},
                              {"top_p 0.9", 1, 0, 0.9f, 0, -1, false},
                              {"min_p 0.05", 1, 0, 1, 0.05f, -1, false},
                              {"top_k 200", 1, 200, 1, 0, -1, false},
                              {"top_k 200, top_p 0.9", 1, 200, 0.9f, 0, -1, false}};
  for (u32 kind : {0u, 6u, 3u}) for (u32 rows : {1u, 8u, kRows}) for (const Setting& setting : settings) {
    std::vector<Case> cases(rows);
    std::vector<const Case*> pointers;
    for (u32 r = 0; r < rows; r++) {
      Case& c = cases[r];
      c.params = RowSampling{};
      c.position = 1;
      c.params.temperature = setting.t;
      c.params.top_k = setting.k;
      c.params.top_p = setting.p;
      c.params.min_p = setting.min_p;
      c.params.seed_lo = r;
      c.params.repetition_penalty = 1;
      if (setting.penalties) c.params.frequency_penalty = 0.01f;
      if (setting.top >= 0) { c.params.flags = kWantLogprobs; c.params.top_logprobs = setting.top; }
      Random random{r};
      for (u32 id = 0; id < kVocab; id++) c.logits.push_back(odd_logit(kind, id, random));
      pointers.push_back(&c);
    }
    m.load(pointers, 0, std::vector<u32>(rows, steps));
    m.go(steps);
    printf("logits %u rows %u %-24s %6.2f us\n", kind, rows, setting.name, m.go(steps) * 1000 / steps);
  }
  return 0;
}

// A block that says nothing: the others must report and end the launch.
static int mute(void) {
#ifndef LP_EMULATED
  const Case c = make_case(1);
  Machine m(kSteps);
  m.load({&c}, 0, {kSteps});
  missing_blocks = 1;
  m.go(1); // exits with the report
#endif
  printf("FAIL: nobody noticed\n");
  return 1;
}

int main(int argc, char** argv) {
  auto is = [&](const char* s) { return argc > 1 && !strcmp(argv[1], s); };
  auto number = [&](int i, u32 otherwise) { return argc > i ? (u32)atoi(argv[i]) : otherwise; };
  if (is("cases") && argc > 2) return write_cases(argv[2]);
  if (is("check") && argc > 2) return check(argv[2], number(3, 1), number(4, 1), number(5, 0) != 0);
  if (is("time")) return time_all();
  if (is("mute")) return mute();
  printf("usage: cases FILE | check RESULTS [repeats] [every] [flip] | time | mute\n");
  return 2;
}
