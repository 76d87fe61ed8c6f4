// What launches draw: a GPU at its limit of power is as fast as they draw little.
#pragma once
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include "tests/matrix/fill.cuh"

/// The first GPU's counters, by NVML.
class Counters {
  void* device = nullptr;
  int (*energy)(void*, unsigned long long*) = nullptr;
  int (*clock)(void*, int, unsigned*) = nullptr;

 public:
  Counters() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) printf("no energy: %s\n", dlerror()), exit(1);
    const auto begin = (int (*)())dlsym(library, "nvmlInit_v2");
    const auto find = (int (*)(unsigned, void**))dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    energy = (decltype(energy))dlsym(library, "nvmlDeviceGetTotalEnergyConsumption");
    clock = (decltype(clock))dlsym(library, "nvmlDeviceGetClockInfo");
    if (!begin || !find || !energy || !clock || begin() || find(0, &device)) printf("no energy: NVML\n"), exit(1);
  }
  /// Since the driver was loaded; told anew every 20 to 100 ms.
  unsigned long long millijoules() const {
    unsigned long long all = 0;
    if (energy(device, &all)) printf("no energy: NVML does not tell it\n"), exit(1);
    return all;
  }
  /// Of the multiprocessors.
  unsigned megahertz() const {
    unsigned mhz = 0;
    return clock(device, 1, &mhz) ? 0 : mhz;
  }
};

/// Prints what each of the `launches` launches of `work` takes and draws in the mean, over 1.2 s behind 0.35 s of the
/// same.
template <class F> void print_energy(const char* name, int launches, const F& work) {
  static const Counters counters;
  const auto seconds = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  };
  cudaEvent_t ended;
  CHECK(cudaEventCreate(&ended));
  const auto run = [&](int times) {
    for (int i = 0; i < times; i++) work();
    CHECK(cudaEventRecord(ended));
  };
  int batch = 1;
  for (const double begun = seconds(); seconds() - begun < 0.35; batch++) {
    run(1);
    CHECK(cudaEventSynchronize(ended));
  }
  batch = batch / 8 + 1;
  // Works until the counter is told anew; when that was, what it says, and how often it has worked.
  struct Edge {
    double at;
    unsigned long long millijoules;
    long times;
  };
  const auto edge = [&] {
    const unsigned long long before = counters.millijoules();
    Edge edge{0, before, 0};
    while (edge.millijoules == before) {
      run(1);
      edge.times++;
      do {
        edge.millijoules = counters.millijoules(), edge.at = seconds();
      } while (edge.millijoules == before && cudaEventQuery(ended) == cudaErrorNotReady);
    }
    CHECK(cudaEventSynchronize(ended));
    return edge;
  };
  const Edge first = edge();
  long times = 0;
  u64 clocks = 0, reads = 0;
  while (seconds() - first.at < 1.2) {
    run(batch);
    times += batch, clocks += counters.megahertz(), reads++;
    CHECK(cudaEventSynchronize(ended));
  }
  const Edge last = edge();
  CHECK(cudaEventDestroy(ended));
  const double taken = last.at - first.at, joules = (last.millijoules - first.millijoules) * 1e-3;
  const double count = (double)(times + last.times) * launches;
  printf("  %-10s %8.2f us %8.2f mJ %6.0f W at %4.0f MHz\n", name, taken / count * 1e6, joules / count * 1e3,
         joules / taken, (double)clocks / reads);
  fflush(stdout);
}
