#!/usr/bin/env bash
# run.sh [decoder] [attend]: the kernels of matrix passes alone, their bits and times, on a Hopper GPU; needs nvcc.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
for name in ${@:-decoder attend}; do
  nvcc -O3 -std=c++17 --fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -I . \
      -o "$out/$name" "tests/matrix/$name.cu"
  "$out/$name"
done
