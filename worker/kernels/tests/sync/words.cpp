// The vectors' exchange words over several blocks, launches and steps, with the kernel's own headers, under
// ThreadSanitizer: what a warp takes is what this step and layer wrote, and zeros that clear a set are ordered between
// the last read of what was there and the next word. A thread is a warp, its lanes one after the other. Nothing but
// turns and tokens orders the warps: merges wait for no pages, and blocks without tiles wait for nothing in a layer;
// there a warp more, as the producer is, reads nothing but the step's rows and items. In some passes a host gives the
// rows of each step once it has the tokens of the one before. Negative controls: `-DLP_KEEP_WORDS` clears nothing;
// `-DLP_CLEAR_EARLY` clears a turn too early; `-DLP_RUN_AHEAD` lets consumers begin turns that are not open;
// `-DLP_FALL_BEHIND` lets steps end whose rows a warp has not left. See run.sh.
#include "emulated.h"

#include "../../layout/shape.cuh"
#include "../../layout/page.cuh"
#include "../../layout/launch.cuh"
#include "../../layout/rows.cuh"
#include "../../layout/inbox.cuh"
#include "../../sync/wait.cuh"
#include "../../ops/ranks.cuh"
#include "../../sync/start.cuh"
#include "../../ops/tree_sum.cuh"
#include "../../ops/values.cuh"
#include "../../ops/weights.cuh"
#include "../../narrow/words.cuh"
#include "../../narrow/inbox.cuh"
#include "../../narrow/shared_memory.cuh"
#include "../../narrow/ring.cuh"
#include "../../narrow/turns.cuh"
#include "../../narrow/steps.cuh"
#include "../../narrow/product.cuh"
#include "../../narrow/epilogue.cuh"

using namespace narrow;

constexpr u32 kReaders = 2;        // consumer warps: each takes every other leaf
constexpr u32 kBlockBytes = sizeof(shared_bytes) / 4;
static_assert(kBlocks <= 4 && kColumns == 8);

/// Rows 1, 3, 5 .. idle after step `shortest`. `stop`: the step that sees the host's wish to end. Fed: the host gives
/// the rows of the steps up to `shortest`, then none.
struct Pass {
  u32 row_count, steps, shortest, stop;
  bool sampling, fed = false;
};
constexpr u32 kNever = ~0u;
constexpr Pass kPasses[] = {{3, 5, 1, kNever, true},  {8, 1, 0, kNever, false},      {1, 1, 0, kNever, true},
                            {6, 9, 3, 2, true},       {8, 7, 4, kNever, true, true}, {2, 1, 0, kNever, false},
                            {8, 5, 9, 2, true, true}, {4, 4, 9, kNever, true},       {8, 3, 9, kNever, true, true}};
/// Whether a row computes in a step of a fed pass.
constexpr bool is_given(u32 row, u32 step) { return row == 0 || (row + step) % 3 == 0; }

enum Kind : u32 { kAttentionX, kAttentionOut, kMlpX, kActivation };
/// What word t of (k block, column) should hold: four small numbers, which are exact as bf16.
struct Expected {
  u32 serial, layer;  // serial: of the step
  Kind kind;
  float value(int i, int k_block, int column, int t) const {
    return i == 0   ? (float)(serial % 200 + 1)
           : i == 1 ? (float)(layer * 4 + kind)
           : i == 2 ? (float)k_block
                    : (float)(column * 4 + t);
  }
};

/// A warp of a block in a launch.
struct Role {
  const Launch& launch;
  const Pass& pass;
  u32 serial, shared, warp;  // serial: of the launch's first step
  std::atomic<int>& wrong;
  u32 set = 0;

  void lane(u32 l) const { threadIdx.x = warp * 32 + l; }
  template <class F> void each_lane(F&& f) const {
    for (u32 l = 0; l < 32; l++) lane(l), f();
    lane(0);
  }
  Rows rows(u32 step) const { return Rows{(const Row*)(shared_bytes + shared + Shared::rows), launch.row_count, step}; }
  u32 tag(u32 step) const { return launch.epoch + step * (kLayers + 1); }
  /// Whether the block has tiles of a product; of q, k and v if of o.
  template <class P> static bool has() { return Epilogue::sets<P>() > 0; }
  bool heads() const { return blockIdx.x + 1 < kBlocks; }  // the last block has no rows of the LM head
  /// Whether there is such a step, once that is known.
  bool begins(u32 step) const {
    wait_sampled(launch, shared, step);
    return may_begin(step);
  }
  bool is_before_last(u32 step) const { return step < load_shared_u32(shared + Shared::last_step); }
  bool may_begin(u32 step) const { return is_before_last(step) && rows(step).mask(); }
  u32 items(u32 step) const { return shared + Shared::counts + step % 2 * kColumns * kCountBytes; }

  // ---- the producer of a block without tiles ----
  void idle() {
    for (u32 step = 0; pass.fed ? is_before_last(step) : may_begin(step); step++) {
      wait_sampled(launch, shared, step);
      if (pass.fed && !rows(step).mask()) return;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
      if (load_shared_u32(items(step)) != serial + step) wrong++;
      for (u32 row = 0; pass.fed && row < kColumns; row++)
        if (rows(step).active(row) != is_given(row, step)) wrong++;
      leave_rows(shared);
    }
  }

  // ---- consumers ----
  template <class V, int LEAVES, int STEPS, bool SQUARES> void take(const Expected& expected, u32 vector, u32 active,
                                                                    Partials& partials) {
    for (int leaf = warp; leaf < LEAVES; leaf += kReaders)
      each_lane([&] {
        const int column = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
        u32 b[STEPS][2];
        get_fragments<STEPS, SQUARES>(launch, launch.words + vector + leaf * V::leaf_bytes, 0, active, b,
                                      kSiteAttentionX);
        for (int k = 0; k < STEPS; k++)
          for (int h = 0; h < 2; h++) {
            const auto value = [&](int i) { return expected.value(2 * h + i, leaf * STEPS + k, column, t); };
            if (b[k][h] != (active >> column & 1 ? bf16_pair(value(0), value(1)) : 0)) wrong++;
          }
      });
    partials.put<1>(false, 0, 0, nullptr);
  }
  /// Merges its share of attention's output, as merge_pages does.
  void merge(const Expected& expected, u32 vector, u32 active) const {
    for (int job = blockIdx.x + kBlocks * warp; job < kColumns * kHeads * kDimTiles; job += kBlocks * kReaders) {
      const int column = job / (kHeads * kDimTiles), k_block = job % (kHeads * kDimTiles);
      for (int t = 0; active >> column & 1 && t < 4; t++) {
        const auto value = [&](int i) { return expected.value(i, k_block, column, t); };
        store_relaxed_8(launch.words + vector + AttentionVector::word(k_block, column, t),
                        ~bf16_pair(value(0), value(1)), ~bf16_pair(value(2), value(3)));
      }
    }
  }
  void begin(u32 tag) const {
#ifdef LP_RUN_AHEAD
    mbarrier_arrive(shared + Shared::begun);
#else
    begin_turn(launch, shared, tag);
#endif
  }
  void consume() {
    Partials partials(launch, shared);
    for (u32 step = 0; begins(step); step++) {
      const u32 active = rows(step).mask();
      for (u32 layer = 0; layer <= kLayers; layer++) {
        begin(tag(step) + layer);
        const auto expected = [&](Kind kind) { return Expected{serial + step, layer, kind}; };
        const u32 at = vectors_at(shared, tag(step) + layer);
        if (layer == kLayers) leave_rows(shared);
        if (layer == kLayers && !pass.sampling) return;
        if (layer == kLayers ? heads() : has<O>())
          take<HiddenVector, kHiddenLeaves, kHiddenSteps, true>(expected(kAttentionX), at + Vectors::attention_x,
                                                                active, partials);
        if (layer == kLayers) break;
        merge(expected(kAttentionOut), at + Vectors::attention_out, active);
        if (has<O>())
          take<AttentionVector, kHeadLeaves, O::leaf_steps, false>(expected(kAttentionOut), at + Vectors::attention_out,
                                                                   active, partials);
        if (has<GateUp>())
          take<HiddenVector, kHiddenLeaves, kHiddenSteps, true>(expected(kMlpX), at + Vectors::mlp_x, active, partials);
        if (has<Down>())
          take<ActivationVector, kDownLeaves, kDownSteps, false>(expected(kActivation), at + Vectors::activation,
                                                                 active, partials);
      }
    }
  }

  // ---- epilogue: as `finish` in looped_decoder.cu ----
  void await_set() {
    wait_barrier(launch, shared + Shared::partials_full + 8 * (set & 1), set >> 1 & 1, kSitePartialsFull);
    mbarrier_arrive(shared + Shared::partials_empty + 8 * (set++ & 1));
  }
  void publish_hidden(Epilogue& epilogue, const Expected& expected, u32 vector, u32 active) const {
    for (int s = 0; s < Epilogue::kSets; s++)
      each_lane([&] {
        const int tile = O::first_tile(blockIdx.x) + 2 * s + Epilogue::half();
        for (int i = 0; i < kEpilogueColumns; i++)
          epilogue.hidden(s)[i] = expected.value(i, tile, epilogue.word_column(), Epilogue::word());
        epilogue.publish_hidden(vector, s, 1, active, 0);
      });
  }
  void publish_activation(Epilogue& epilogue, const Expected& expected, u32 vector, u32 active) const {
    // A tile is two of the four words of a k block, which may be of two blocks.
    for (int tile = GateUp::first_tile(blockIdx.x); tile < GateUp::first_tile(blockIdx.x + 1); tile++)
      each_lane([&] {
        float v[kEpilogueColumns];
        for (int i = 0; i < kEpilogueColumns; i++)
          v[i] = expected.value(i, tile / 2, epilogue.word_column(), Epilogue::word());
        epilogue.publish<ActivationVector>(vector, tile / 2, v, active, 0,
                                           Epilogue::half() == 0 && Epilogue::word() / 2 == tile % 2);
      });
  }
  /// Token words to all blocks and from all; true if the launch is to end.
  bool exchange_tokens(const Epilogue& epilogue, u32 step, u32 active) const {
    const auto words = [&](int column) { return launch.words + token_words(step, column); };
    fence_gpu();
    for (int c = 0; c < kEpilogueColumns; c++)
      store_relaxed_16(words(epilogue.column(c)) + blockIdx.x * 16, 0, 0, tag(step),
                       step == pass.stop && blockIdx.x == 0);
    bool stopped = false;
    for (int c = 0; c < kEpilogueColumns; c++) {
      const int column = epilogue.column(c);
      if (!(active >> column & 1) && column != 0) continue;
      for (u32 from = 0; from < kBlocks; from++) {
        u32 x, y, extra;
        poll_words<1>(launch, words(column) + from * 16, 0, tag(step), 1, &x, &y, &extra, kSiteSampled);
        stopped |= column == 0 && from == 0 && extra != 0;
      }
    }
    fence_gpu();
    return stopped;
  }
  void end(const Epilogue& epilogue, u32 tag) const {
    pass_turn(launch, shared, tag, [&](u32 turn) {
#ifdef LP_CLEAR_EARLY
      turn++;
#endif
      each_lane([&] { epilogue.clear(turn); });
    });
  }
  void finish() {
    const u32 number = warp - kEpilogue;
    Epilogue epilogue(launch, shared, number);
    u32 step = 0;
    for (; begins(step); step++) {
      const u32 active = rows(step).mask();
      u32 layer = 0;
      const auto expected = [&](Kind kind) { return Expected{serial + step, layer, kind}; };
      const auto vectors = [&] { return vectors_at(shared, tag(step) + layer); };
      publish_hidden(epilogue, expected(kAttentionX), vectors() + Vectors::attention_x, active);
      while (layer < kLayers) {
        if (has<O>()) await_set();
        end(epilogue, tag(step) + layer);
        if (has<O>()) await_set();
        publish_hidden(epilogue, expected(kMlpX), vectors() + Vectors::mlp_x, active);
        if (has<GateUp>()) await_set();
        publish_activation(epilogue, expected(kActivation), vectors() + Vectors::activation, active);
        if (has<Down>()) await_set();
        layer++;
        publish_hidden(epilogue, expected(kAttentionX), vectors() + Vectors::attention_x, active);
      }
      end(epilogue, tag(step) + layer);
      if (!pass.sampling) {
        step++;
        break;
      }
      if (heads()) await_set();
      const bool stopped = exchange_tokens(epilogue, step, active);
      if (number == 0 && stopped) store_shared_u32(shared + Shared::last_step, step + 2);
      if (number == 0) {
        if (blockIdx.x == 0) store_system_u64(launch.tokens, tag(step));
        wait_left(launch, shared, step);
        if (pass.fed && is_before_last(step + 1))
          each_lane([&] { take_rows(launch, shared, step + 1, tag(step + 1)); });
        store_shared_u32(items(step + 1), serial + step + 1);
      }
      mbarrier_arrive(shared + Shared::sampled);
    }
    u8* steps = launch.words + Words::steps + blockIdx.x * 4;
    if (number == 0) store_relaxed_u32(steps, load_relaxed_u32(steps) + step);
  }
};

int main() {
  std::vector<u8> words(Words::page + 16);
  u8* aligned = words.data() + (16 - (uintptr_t)words.data() % 16) % 16;
  static u32 report[16];
  std::atomic<int> wrong{0};
  u32 epoch = 1, serial = 0;
  for (const Pass& pass : kPasses) {
    Row rows[kColumns] = {};
    for (u32 r = 0; r < pass.row_count; r++) {
      rows[r].position = pass.fed && !is_given(r, 0);
      rows[r].last_position = pass.fed ? 0 : r % 2 ? pass.shortest : pass.steps;
    }
    std::vector<Row> given(pass.steps * kColumns);
    u64 tokens = 0;
    u32 control[3] = {};
    Launch launch{};
    launch.fed = pass.fed ? given.data() : nullptr, launch.tokens = &tokens, launch.control = control;
    launch.words = aligned, launch.report = report, launch.rows = rows, launch.row_count = pass.row_count;
    launch.steps = pass.steps, launch.epoch = epoch;
    std::vector<std::thread> threads;
    for (u32 b = 0; b < kBlocks; b++) {
      const u32 shared = b * kBlockBytes;
      for (u32 i = 0; i < 2; i++) {
        mbarrier_init(shared + Shared::partials_full + 8 * i, kReaders);
        mbarrier_init(shared + Shared::partials_empty + 8 * i, kEpilogueWarps);
      }
      begin_steps(shared, kReaders + 1);
      std::memcpy(shared_bytes + shared + Shared::rows, rows, sizeof(rows));
      store_shared_u32(shared + Shared::counts, serial);
      store_shared_u32(shared + Shared::last_step, pass.steps);
      begin_turns(shared);
      mbarrier_init(shared + Shared::begun, kReaders);
      store_shared_u32(shared + Shared::turns_before,
                       load_relaxed_u32(launch.words + Words::steps + b * 4) * (kLayers + 1) - launch.epoch);
      for (u32 w = 0; w < kReaders + kEpilogueWarps + kIdleBlocks; w++)
        threads.emplace_back([&, b, w, shared] {
          blockIdx.x = b;
          Warp alone(1);
          warp_of_lane = &alone;
          const bool idle = w == kReaders + kEpilogueWarps;
          Role role{launch, pass, serial, shared, w < kReaders ? w : idle ? kProducer : kEpilogue + w - kReaders,
                    wrong};
          role.lane(0);
          if (w < kReaders) role.consume();
          else if (idle) role.idle();
          else role.finish();
        });
    }
    for (u32 step = 1; pass.fed && step <= pass.shortest + 1 && step < pass.steps && step - 1 <= pass.stop; step++) {
      while (__atomic_load_n(&tokens, __ATOMIC_ACQUIRE) != epoch + (step - 1) * (kLayers + 1)) stumble();
      for (u32 r = 0; r < kColumns; r++) {
        Row& row = given[step * kColumns + r];
        row.position = step;
        row.last_position = step <= pass.shortest && is_given(r, step) ? step : 0;
      }
      __atomic_store_n(control + 2, epoch + step * (kLayers + 1), __ATOMIC_RELEASE);
    }
    for (std::thread& thread : threads) thread.join();
    epoch += pass.steps * (kLayers + 1);
    serial += pass.steps;
  }
  std::printf("%d blocks, %u steps of %d layers: %d fragments of another step or place\n", kBlocks, serial, kLayers,
              wrong.load());
  return wrong != 0;
}
