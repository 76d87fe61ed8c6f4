"""Compiles the sampler with NVRTC, without a GPU, as the worker does: no CUDA headers, own files as named headers.
Usage: nvrtc.py LIBNVRTC; prints registers and spills for shapes of LP_BLOCKS and LP_COLUMNS."""
import ctypes, os, re, sys

ops = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "ops")
rtc = ctypes.CDLL(sys.argv[1])
headers = {name: open(os.path.join(ops, name), "rb").read() for name in sorted(os.listdir(ops)) if name.endswith(".cuh")}
KERNEL = b"""
#include "sampling.cuh"
using namespace sampling;
struct Args { Memory memory; const RowSampling* params; u64* tokens; RowLogprobs* logprobs; u32 position, steps; };
extern "C" __global__ void __launch_bounds__(608, 1) probe(const __grid_constant__ Args a) {
  __shared__ Scratch s;
  if (threadIdx.x >= kThreads) return;
  start(blockIdx.x, threadIdx.x, s, a.memory);
  for (u32 step = 0; step < a.steps; step++) {
    if (threadIdx.x < kRows) begin_row(s, threadIdx.x, a.params + threadIdx.x, a.position + step, threadIdx.x, kOfferNone);
    sync();
    sample(threadIdx.x, s, Output{a.tokens, a.logprobs, step});
  }
  stop(threadIdx.x, s);
}
"""


def check(code):
    if code != 0:
        sys.exit(f"NVRTC error {code}")


for blocks, columns, threads, vocab in [(132, 1, 512, 128256), (132, 8, 512, 128256), (128, 8, 512, 151936), (64, 8, 128, 32000), (8, 16, 64, 1003)]:
    defines = f"#define LP_VOCAB {vocab}u\n#define LP_BLOCKS {blocks}u\n#define LP_COLUMNS {columns}u\n#define LP_SAMPLE_THREADS {threads}u\n".encode()
    program = ctypes.c_void_p()
    sources = (ctypes.c_char_p * len(headers))(*headers.values())
    names = (ctypes.c_char_p * len(headers))(*[name.encode() for name in headers])
    check(rtc.nvrtcCreateProgram(ctypes.byref(program), defines + KERNEL, b"probe.cu", len(headers), sources, names))
    options = [b"--gpu-architecture=sm_90a", b"-std=c++17", b"--fmad=false", b"--ptxas-options=-v"]
    code = rtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    check(rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(rtc.nvrtcGetProgramLog(program, log))
    text = log.value.decode()
    if code != 0:
        sys.exit(text)
    check(rtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", text))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill stores", text))
    print(f"vocab {vocab} blocks {blocks} rows {columns} threads {threads}: {registers} registers, {spills} bytes of spill stores, cubin {size.value} bytes")
