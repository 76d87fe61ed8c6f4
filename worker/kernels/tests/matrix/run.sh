#!/usr/bin/env bash
# run.sh [--compile] [decoder] [attend]: the kernels of matrix passes alone, their bits and times, on a Hopper GPU; or
# whether they compile. Needs nvcc (or NVCC, which names one).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile=
if [ "${1:-}" = --compile ]; then
  compile=-c
  shift
fi
for name in ${@:-decoder attend}; do
  "${NVCC:-nvcc}" -O3 -std=c++17 --fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
      --diag-suppress 128 -I . $compile -o "$out/$name" "tests/matrix/$name.cu"
  if [ -z "$compile" ]; then "$out/$name"; fi
done
