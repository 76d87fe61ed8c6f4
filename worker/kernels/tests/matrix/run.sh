#!/usr/bin/env bash
# The measurements of worker/kernels/matrix/DESIGN.md, on a Hopper GPU; needs nvcc. Arguments: those to run. `decoder`:
# the product's kernels, their bits and times.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
[ $# -gt 0 ] || set -- products prefill attention crowd
for one in "$@"; do
    nvcc -O3 -std=c++17 --fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a -I . \
        -o "$out/$one" "tests/matrix/$one.cu"
    "$out/$one"
done
