// Gate and up in wide passes (sum_unit), a warp after the other, with the kernel's own headers. Each product has the
// step's fragments and activations, in order, and adds to a sum of its leaf alone; leaves are added ascending. Of what
// is loaded ahead (Ahead) no operand changes while its product may run. Stages are given back once they have been read,
// slots once their products are over, as many of both as are filled. A warp is its first lane.
#include "emulated.h"

#include "../../layout/shape.cuh"
#include "../../layout/page.cuh"
#include "../../layout/launch.cuh"
#include "../../layout/rows.cuh"
#include "../../layout/inbox.cuh"
#include "../../ops/tree_sum.cuh"

inline u32 thread_index() { return threadIdx.x; }
inline u32 warp_index() { return threadIdx.x >> 5; }
inline u32 unknown(u32 v) { return v; }

#include "../../ops/weights.cuh"

u32 wrong = 0;
void expect(bool right, const char* what) {
  if (!right && wrong++ < 5) printf("%s\n", what);
}

/// A product that may still run: where its operand lies, and what it was when it was issued.
struct Running {
  const Quad* operand;
  Quad value;
};
std::deque<std::vector<Running>> groups;
std::vector<Running> issued;
bool same(const Quad& a, const Quad& b) { return a.x == b.x && a.y == b.y && a.z == b.z && a.w == b.w; }
inline u64 wgmma_operand(u32 address) { return address >> 4; }
inline u64 wgmma_operand(u64 operand, u32 bytes) { return operand + (bytes >> 4); }
inline void wgmma_fence() {}
inline void wgmma_commit() {
  groups.push_back(issued);
  issued.clear();
}
template <int GROUPS> void wgmma_wait() {
  for (; groups.size() > GROUPS; groups.pop_front())
    for (const Running& product : groups.front())
      expect(same(*product.operand, product.value), "an operand changed while its product ran");
}
template <int N> void pin(float*) {}
template <int N> void wgmma(float* c, const Quad& a, u64 b);
template <int N> void wgmma(float* c, const Quad& a, u64 b, u32 add);

namespace wide {
struct Consumer {
  u32 stages = 0, inputs = 0, waited = 0;  // given back; slots that were waited for
  bool reads = false;
  u32 wait();
  void release();
  u32 wait_input(u32 before = 0);
  void release_input();
};
}  // namespace wide

#include "../../wide/geometry.cuh"
#include "../../wide/product.cuh"

using namespace wide;

using C = GateUpOwn;
using P = C::P;
static_assert(Shared::ring == 0, "stages begin with shared memory");
constexpr u32 kTiles = C::warp_tiles, kStagesOfSpan = (C::span_steps + C::steps - 1) / C::steps,
              kSlotsOfSpan = (C::span_steps + C::input_steps - 1) / C::input_steps, kSpans = P::leaves / C::bundle,
              kSlotBytes = 1 << 16;
u32 unit, width, product;  // of the warp; products since the first stage was waited for

/// A word of a run of a tile: any function of where it is.
u32 word_of(u32 leaf, u32 run, u32 tile, u32 word) {
  return (((leaf * 64 + run) * 2 + tile) * (P::run / 4) + word) * 0x9e3779b9u;
}
void fill(u32 stage, u32 run, u32 tile, u32 leaf, u32 of_leaf) {
  for (u32 i = 0; i < P::run / 4; i++)
    store_shared_u32(stage + unit * C::runs * 2 * P::run + (run * width + tile) * P::run + i * 4,
                     word_of(leaf, of_leaf, tile, i));
}
u32 Consumer::wait() {
  expect(!reads, "a stage is waited for while another is read");
  reads = true;
  if (product == ~0u) product = 0;
  const u32 span = stages / kStagesOfSpan, first = stages % kStagesOfSpan * C::runs,
            at = stages % kStages * kStageBytes;
  for (u32 run = 0; run < C::runs && first + run < C::bundle * P::leaf_runs; run++)
    for (u32 tile = 0; tile < width; tile++)
      fill(at, run, tile, span * C::bundle + (first + run) / P::leaf_runs, (first + run) % P::leaf_runs);
  return at;
}
void Consumer::release() {
  expect(reads, "a stage is given back that nobody waited for");
  reads = false;
  std::memset(shared_bytes + stages++ % kStages * kStageBytes, 0xee, kStageBytes);
}
u32 Consumer::wait_input(u32 before) {
  expect(waited - inputs == before, "another slot than the next one is waited for");
  expect(before < kInputSlots, "more slots are waited for than there are");
#ifdef LP_NEXT_SLOT  // negative control
  return ++waited * kSlotBytes;
#else
  return waited++ * kSlotBytes;
#endif
}
void Consumer::release_input() {
  expect(inputs < waited, "a slot is given back that nobody waited for");
  expect(groups.empty() && issued.empty(), "a slot is given back while products read it");
  inputs++;
}
/// What a leaf's sum is in the end: values whose order of addition shows.
float value_of(u32 leaf, u32 tile) {
  const u32 hash = (leaf * 2 + tile + 1) * 0x9e3779b9u;
  return (float)(hash >> 8) * (hash & 1 ? 1.0f : -1.0f / 4096);
}
/// The next product of the warp's: `sum` has how many there were of its leaf, the leaf, and in the end its value.
void multiplied(float* sum, const Quad& a, u64 b) {
  const u32 of_step = product % kTiles, step = product / kTiles % P::leaf_steps,
            leaf = product / kTiles / P::leaf_steps, of_span = leaf % C::bundle * P::leaf_steps + step;
  const u32 run = step / P::run_steps, slot = leaf / C::bundle * kSlotsOfSpan + of_span / C::input_steps;
  const u32 tile = C::single ? C::second() && width == 2 : of_step;
  expect(sum[0] == (float)step && (step == 0 || sum[1] == (float)leaf), "a sum has products of another leaf");
  sum[0]++, sum[1] = (float)leaf;
  if (step + 1 == P::leaf_steps) sum[2] = value_of(leaf, tile);
  const u32 columns = C::split_columns ? (warp_index() >> 2) * (C::columns / 8 * 256) : 0;
  expect(b == wgmma_operand(slot * kSlotBytes + columns + of_span % C::input_steps * kStepBytes),
         "a step has other activations");
  if (tile < width) {
    constexpr u32 AT = 3 * kStageBytes;  // any place: what lies there is put back
    std::vector<u8> kept(shared_bytes + AT, shared_bytes + AT + P::run);
    for (u32 i = 0; i < P::run / 4; i++) store_shared_u32(AT + i * 4, word_of(leaf, run, tile, i));
    const auto scales = RunScales<P::format>::load(AT);
    const auto weights = StoredRun<P>::load(AT);
    std::memcpy(shared_bytes + AT, kept.data(), P::run);
    expect(same(a, weights.operand(step % P::run_steps, scales)), "a step has other weights");
  }
  product++;
}
template <int N> void wgmma(float* sum, const Quad& a, u64 b) { multiplied(sum, a, b); }
template <int N> void wgmma(float* sum, const Quad& a, u64 b, u32 add) {
  issued.push_back({&a, a});
  if (product == ~0u) {  // of the group in front of the first one
    expect(add != 0, "a chain begins with products of anything");
    return;
  }
  if (add == 0) sum[0] = sum[1] = sum[2] = 0;
  multiplied(sum, a, b);
}

int main() {
  Warp alone(1);
  warp_of_lane = &alone;
  u32 products = 0;
  for (u32 block : {0, 1, LP_BLOCKS - 1})
    for (u32 warp = 0; warp < kConsumers; warp++) {
      blockIdx.x = block, threadIdx.x = warp * 32;
      Consumer consumer;
      for (int pass = 0; pass < C::passes(); pass++) {
        consumer = Consumer{};
        unit = C::unit(), width = C::width(pass, (int)unit) > 0 ? C::width(pass, (int)unit) : 0, product = ~0u;
        float sum[C::warp_tiles][C::columns / 2];
        sum_unit<C>(consumer, (int)unit, C::width(pass, (int)unit), sum);
        expect(groups.empty() && issued.empty(), "products run on");
        expect(consumer.stages == kSpans * kStagesOfSpan && !consumer.reads, "other stages are used than are filled");
        expect(consumer.inputs == kSpans * kSlotsOfSpan && consumer.waited == consumer.inputs,
               "other slots are used than are filled");
        expect(product == kTiles * P::leaves * P::leaf_steps, "other products than the leaves have");
        for (u32 t = 0; t < kTiles && (int)t < (int)width; t++) {
          const u32 tile = C::single ? C::second() && width == 2 : t;
          float all = 0;
          for (u32 leaf = 0; leaf < P::leaves; leaf++) all += value_of(leaf, tile);
          expect(sum[t][2] == all, "leaves are not added in ascending order");
        }
        products += product;
      }
    }
  printf("leaves of %d steps, %d of a span, in groups of %d, stages of %d, slots of %d: %u products, %u faults\n",
         P::leaf_steps, C::bundle, C::group_steps, C::steps, C::input_steps, products, wrong);
  return wrong > 0;
}
