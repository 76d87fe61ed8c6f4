#!/usr/bin/env bash
# run.sh [--compile | --energy] [decoder] [attend]: the kernels of matrix passes alone, their bits and times, on a
# Hopper GPU; or whether they compile, or what they draw. Needs nvcc (or NVCC, which names one).
set -euo pipefail
cd "$(dirname "$0")/../.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile=
energy=
case ${1:-} in
  --compile) compile=-c; shift ;;
  --energy) energy=--energy; shift ;;
esac
for name in ${@:-decoder attend}; do
  "${NVCC:-nvcc}" -O3 -std=c++17 --fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a \
      --diag-suppress 128 -I . $compile -o "$out/$name" "tests/matrix/$name.cu" -ldl
  if [ -z "$compile" ]; then "$out/$name" $energy; fi
done
