// The sampler's kernels: tokens for the rows of a step that need more than the largest logit, each step in a launch of
// its own behind the decoder's.
//
// A chain of steps is decoder, sampler, decoder, ... put into the stream some steps ahead of the host: the sampler
// reads the logits that the decoder wrote, and writes tokens and results to mapped memory and the rows of the next step
// to the decoder's. It ends early if the host asks for that.
#include "ptx/ptx.cuh"
#include "layout/launch.cuh"
#include "layout/sampler.cuh"
#include "sync/wait.cuh"
#include "ops/lanes.cuh"
#include "ops/exact_math.cuh"
#include "ops/noise.cuh"
#include "ops/sampling_state.cuh"
#include "ops/sampling_scan.cuh"
#include "ops/sampling_conclude.cuh"
#include "ops/sampling.cuh"

/// What the host must know of the compiled kernel: threads, bytes of exchange words.
extern "C" __device__ const u64 sampler_needs[2] = {sampling::kThreads, sampling::kWordsBytes};

extern "C" __global__ void __launch_bounds__(sampling::kThreads, 1)
    sampler(const __grid_constant__ SamplerLaunch launch) {
  __shared__ sampling::Scratch scratch;
  sampling::sample(launch, scratch, blockIdx.x, threadIdx.x);
}

/// Counts the tokens of a sequence that enters a slot into `counts` [padded vocabulary], zeroed before; the first
/// `prompt` of them are its prompt.
extern "C" __global__ void count_tokens(u32* counts, const u32* tokens, u32 prompt, u32 count) {
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
    sampling::count_token(counts, tokens[i], i < prompt);
}
