// How long the tests' launches take.
#pragma once
#include <algorithm>
#include <cuda_runtime.h>
#include <vector>
#include "tests/matrix/fill.cuh"

/// Milliseconds of `work`, put into the default stream: the median of RUNS.
template <int RUNS, class F> float milliseconds(const F& work) {
  cudaEvent_t begun, ended;
  CHECK(cudaEventCreate(&begun));
  CHECK(cudaEventCreate(&ended));
  std::vector<float> times(RUNS);
  for (float& ms : times) {
    CHECK(cudaEventRecord(begun));
    work();
    CHECK(cudaEventRecord(ended));
    CHECK(cudaEventSynchronize(ended));
    CHECK(cudaEventElapsedTime(&ms, begun, ended));
  }
  CHECK(cudaEventDestroy(begun));
  CHECK(cudaEventDestroy(ended));
  std::sort(times.begin(), times.end());
  return times[RUNS / 2];
}
