// Products of wide passes alone: the stream, the activations and their barriers as in wide_decoder.cu, nothing else. Of
// LP_PRODUCT (gate and up, qkv, o, down: 0 to 3) `steps` layers one after the other; activations are there from the
// beginning. tests/wide/products.py compiles and runs it.
#include "ptx/ptx.cuh"
#include "ptx/wgmma.cuh"
#include "layout/shape.cuh"
#include "layout/page.cuh"
#include "layout/launch.cuh"
#include "layout/rows.cuh"
#include "layout/inbox.cuh"
#include "sync/wait.cuh"
#include "ops/ranks.cuh"
#include "ops/tree_sum.cuh"
#include "ops/values.cuh"
#include "ops/weights.cuh"
#include "wide/geometry.cuh"
#include "wide/stream.cuh"
#include "wide/product.cuh"
#include "wide/exchange.cuh"
#include "wide/ranks.cuh"
#include "wide/epilogue.cuh"

namespace wide {

extern __shared__ __align__(1024) u8 shared_memory[];

constexpr int kProduct = LP_PRODUCT;
template <int PRODUCT> struct Chosen {
  using Cut = QkvCut;
  static constexpr u64 offset = 0;
};
template <> struct Chosen<0> {
  using Cut = QkvCut;  // of none
  static constexpr u64 offset = kGateUpOffset;
};
template <> struct Chosen<2> {
  using Cut = OCut;
  static constexpr u64 offset = kOOffset;
};
template <> struct Chosen<3> {
  using Cut = DownCut;
  static constexpr u64 offset = kDownOffset;
};
using Measured = Chosen<kProduct>;
using C = Measured::Cut;

/// A layer's sums of this warp, added up: so that none is left out.
LP_DEVICE float sum_layer(Consumer& consumer) {
  float all = 0;
  if constexpr (kProduct == 0) {
#pragma unroll 1
    for (int pass = 0; pass < GateUpOwn::passes(); pass++) {
      float sum[GateUpOwn::warp_tiles][GateUpOwn::columns / 2];
      sum_unit<GateUpOwn>(consumer, GateUpOwn::unit(), GateUpOwn::width(pass, GateUpOwn::unit()), sum);
#pragma unroll
      for (int t = 0; t < GateUpOwn::warp_tiles; t++)
#pragma unroll
        for (int i = 0; i < GateUpOwn::columns / 2; i++) all += sum[t][i];
    }
  } else if (C::on()) {
    float sum[C::parts][C::columns / 2];
    sum_leaves<C>(consumer, place_of<C>(), sum);
#pragma unroll
    for (int p = 0; p < C::parts; p++)
#pragma unroll
      for (int i = 0; i < C::columns / 2; i++) all += sum[p][i];
  }
  return all;
}

/// Bytes of shared memory, threads.
extern "C" __device__ const u64 products_needs[2] = {Shared::bytes, kThreads};

/// tokens: clocks a layer of each consumer warp. logits: never written.
extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    products(const __grid_constant__ Launch launch) {
  const u32 shared = shared_address(shared_memory), role = warp_index(), layers = launch.steps;
  if (threadIdx.x == 0) {
    init_rings(shared);
    fence_mbarrier_init();
  }
  __syncthreads();
  cluster_sync();
  if (role < kConsumers) {
    raise_registers<kConsumerRegisters>();
    Consumer consumer(launch, unknown(shared));
    float all = 0;
    const long long begun = clock64();
#pragma unroll 1
    for (u32 layer = 0; layer < layers; layer++) all += sum_layer(consumer);
    const long long end = clock64();
    if (all == 123.0f) launch.logits[0] = all;
    if (lane_index() == 0) launch.tokens[blockIdx.x * kConsumers + role] = (end - begun) / layers;
  } else {
    lower_registers<kOtherRegisters>();
    const u32 own = unknown(shared);
    if (role == kInput) {
      Input input(launch, own);
#pragma unroll 1
      for (u32 layer = 0; layer < layers; layer++) {
        if constexpr (kProduct == 0) input.stream_own<GateUpOwn>(Words::mlp_x, Words::mlp_x_ready, 0, kSiteMlpX);
        else input.stream<C>(Words::activation, Words::activation_ready, C::P::leaves, 0, kSiteActivation);
      }
    } else if (role != kNorms) {
      Producer producer(launch, own, role);
      const u8* weights = launch.weights + Measured::offset;
#pragma unroll 1
      for (u32 layer = 0; layer < layers; layer++, weights += kLayerBytes) {
        if constexpr (kProduct == 0) {
#pragma unroll 1
          for (int pass = 0; pass < GateUpOwn::passes(); pass++)
            producer.stream(Producer::own_part<GateUpOwn>(weights, pass));
        } else {
          producer.stream(Producer::part<C>(weights));
        }
      }
    }
  }
  __syncthreads();
  cluster_sync();
}

}  // namespace wide
