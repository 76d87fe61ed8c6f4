// Between the products of matrix passes: embedding, norms, and the rows that sample. Any number of warps a block.
#pragma once

namespace matrix {

constexpr u32 kVectorThreads = 512;

constexpr u32 token_blocks(u32 tokens) { return (tokens + kTokens - 1) / kTokens; }
/// Whether a launch computes the block that a token is in.
LP_DEVICE bool has_block(const Pass& pass, u32 token) { return pass.blocks >> token / kTokens & 1; }
/// Calls work(i) for i below `count`, a warp one.
template <class WORK> LP_DEVICE void each_warp(u32 count, const WORK& work) {
#pragma unroll 1
  for (u32 i = blockIdx.x * (blockDim.x / 32) + warp_index(); i < count; i += gridDim.x * (blockDim.x / 32)) work(i);
}

/// Position and place of a token.
LP_DEVICE uint2 place_of(const Launch& launch, u32 token) {
  if (token >= launch.row_count) return make_uint2(0, kNoPlace);
  const Row& row = launch.rows[token];
  // Attention of a row that is alone of its sequence looks at what it sees by itself.
  const bool last = row.first_row != token &&
                    (token + 1 == launch.row_count || launch.rows[token + 1].first_row != row.first_row);
  const u32 page = launch.page_table[row.slot * launch.page_stride + row.position / kPage];
  return make_uint2(row.position, (page * kPage + row.position % kPage) << 1 | last);
}
/// Dimensions k and k + 1 of a token's embedding.
LP_DEVICE u32 embedding_pair(const Launch& launch, u32 token, u32 k) {
  const u8* at = kTied ? launch.weights + kHeadOffset + head_byte(token, k)
                       : launch.embedding + ((u64)token * kHidden + k) * 2;
  return load_constant_u32((const u32*)at);
}
/// Of a token of the pass; of several ranks the one that has it in its shard has told it (ranks.cuh).
LP_DEVICE u32 token_pair(const Launch& launch, u32 token, u32 k) {
  if constexpr (kRanks == 1) return embedding_pair(launch, launch.rows[token].token, k);
  return load_relaxed_u32(launch.words + Memory::embeddings + ((u64)token * kHidden + k) * 2);
}
/// The residual's beginning, the first layer's input, and where rows lie in the pool. A warp takes 32 tokens of a row
/// tile.
LP_DEVICE void embed(const Launch& launch) {
  const u32 lane = lane_index(), g = lane >> 2, t = lane & 3, runs = token_blocks(launch.row_count) * kRuns;
  uint2* places = reinterpret_cast<uint2*>(launch.words + Memory::places);
  u32* come = reinterpret_cast<u32*>(launch.words + Memory::come);
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < kMostBlocks / 2; i += gridDim.x * blockDim.x) come[i] = 0;
  each_warp(runs, [&](u32 run) { places[run * 32 + lane] = place_of(launch, run * 32 + lane); });
  each_warp(runs * kHiddenTiles, [&](u32 item) {
    const u32 tile = item % kHiddenTiles, first = item / kHiddenTiles * kRunTokens;
    float h[kRunValues];
#pragma unroll
    for (int j = 0; j < kRunGroups; j++) {
      const u32 token = first + 8 * j + g;
      u32 pairs[2] = {0, 0};  // of the lower and the upper 8 rows, two rows of a token
      if (token < launch.row_count) {
        pairs[0] = token_pair(launch, token, tile * 16 + 2 * t);
        pairs[1] = token_pair(launch, token, tile * 16 + 2 * t + 8);
      }
      __syncwarp();
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const u32 turned = transpose_8x8(pairs[half]);
        h[4 * j + 2 * half] = from_bf16(turned & 0xffff), h[4 * j + 2 * half + 1] = from_bf16(turned >> 16);
      }
    }
    const u32 gamma = gamma_of(launch, 0, tile);
    publish_hidden(launch, tile, first, from_bf16(gamma & 0xffff), from_bf16(gamma >> 16), h);
  });
}

LP_DEVICE u32 norm_runs(const Launch& launch) { return (launch.row_count + 31) / 32; }
/// 1 / rms of the tokens: a block takes 32 at a time, a warp a leaf.
LP_DEVICE void find_norms(const Launch& launch, const Pass& pass) {
  __shared__ float leaves[kHiddenLeaves][32];
  float* inverse = reinterpret_cast<float*>(launch.words + Memory::inverse);
  const u32 lane = lane_index(), runs = norm_runs(launch);
#pragma unroll 1
  for (u32 run = blockIdx.x; run < runs; run += gridDim.x) {
    if (!has_block(pass, run * 32)) continue;
    const u32 token = run * 32 + lane;
    const float* squares = reinterpret_cast<const float*>(launch.words + squares_byte(0, token));
    for (u32 leaf = warp_index(); leaf < kHiddenLeaves; leaf += blockDim.x / 32)
      leaves[leaf][lane] =
          leaf_squares([&](int tile) { return squares[(leaf * kHiddenSteps + tile) * kTokens]; });
    __syncthreads();
    if (warp_index() == 0) {
      float v[kHiddenLeaves];
#pragma unroll
      for (int leaf = 0; leaf < kHiddenLeaves; leaf++) v[leaf] = leaves[leaf][lane];
      inverse[token] = inverse_rms<kHidden>(tree_sum<kHiddenLeaves>(v));
    }
    __syncthreads();
  }
}

/// The rows that sample, one behind the other: the LM head's input. A warp takes 32 rows of half a k16 step.
LP_DEVICE void gather(const Launch& launch, const Pass& pass) {
  const u32 lane = lane_index(), runs = (pass.sample_count + 31) / 32;
  const float* inverse = inverse_of(launch);
  float* head_inverse = reinterpret_cast<float*>(launch.words + Memory::head_inverse);
  each_warp(runs * kHiddenTiles * 2, [&](u32 item) {
    const u32 half = item % 2, step = item / 2 % kHiddenTiles, column = item / (2 * kHiddenTiles) * 32 + lane;
    if (column >= pass.sample_count) return;
    const u32 row = pass.samples[column];
    if (item % (2 * kHiddenTiles) == 0) head_inverse[column] = inverse[row];
    *reinterpret_cast<uint4*>(launch.words + Memory::head_x + vector_byte(kHiddenTiles, step, column, half)) =
        *reinterpret_cast<const uint4*>(launch.words + Memory::x + vector_byte(kHiddenTiles, step, row, half));
  });
}

}  // namespace matrix
