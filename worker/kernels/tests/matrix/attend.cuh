// What attend.cu times: the launches of matrix/attend.cuh.
#pragma once
#ifndef LP_LAYERS
#define LP_LAYERS 8
#define LP_COLUMNS 512
#endif
#include "tests/matrix/shape.cuh"
#include <cmath>
#include <cstdio>
#include <cuda_runtime.h>
#include <vector>
#include "ptx/ptx.cuh"
#include "ptx/wgmma.cuh"
#include "layout/shape.cuh"
#include "layout/launch.cuh"
#include "layout/page.cuh"
#include "matrix/layout.cuh"
#include "sync/reached.cuh"
#include "ops/tree_sum.cuh"
#include "ops/best.cuh"
#include "ops/softmax.cuh"
#include "ops/values.cuh"
#include "matrix/attend_tiles.cuh"
#include "matrix/attend_spans.cuh"
#include "matrix/attend.cuh"

/// Kernels that are timed beside each other. Without `merge`, `spans` merges by itself.
struct Candidate {
  const char* name;
  const void *spans, *merge;
  unsigned threads, shared, merge_threads;
  bool right, traced;  // whether it computes at all; writes Launch::trace
};
std::vector<Candidate>& candidates();
