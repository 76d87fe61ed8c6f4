#!/bin/sh
# Tests the device sampler against the CPU sampler.
#   run.sh host [OUT]   emulated on this machine: g++ and rustc, no GPU, a minute
#   run.sh build [OUT]  for a GPU: nvcc on the path; CUDART_DIR: where libcudart_static.a is
#   run.sh gpu [OUT]    what `build` made, on the GPU
#   run.sh time [OUT]   microseconds a step, on the GPU
set -eu
mode=$1
out=${2:-/tmp/looplane-sampling}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")"

emulated() { # name vocab blocks threads [flags [rows]]
  g++ -O2 -std=c++17 -ffp-contract=off -Wall -Wno-unknown-pragmas -Wno-unused-function -I. -I../.. -DLP_EMULATED \
    "-DLP_COLUMNS=${6:-4}" "-DLP_VOCAB=$2" "-DLP_BLOCKS=$3" "-DLP_SAMPLE_THREADS=$4" ${5:-} -x c++ harness.cu \
    -o "$out/host_$1"
}
device() { # name vocab blocks threads [flags [rows]]
  nvcc -std=c++17 -O3 -gencode arch=compute_90a,code=sm_90a --fmad=false -I../.. --expt-relaxed-constexpr \
    ${CUDART_DIR:+-L$CUDART_DIR} "-DLP_COLUMNS=${6:-8}" "-DLP_VOCAB=$2" "-DLP_BLOCKS=$3" "-DLP_SAMPLE_THREADS=$4" \
    ${5:-} harness.cu -o "$out/gpu_$1"
}
expected() { # program vocab
  "$out/$1" cases "$out/cases_$2"
  "$out/reference" "$out/cases_$2" "$out/expected_$2"
  rm "$out/cases_$2"
}

case $mode in
host)
  rustc -O --edition 2024 reference.rs -o "$out/reference"
  emulated 1003 1003 8 64
  emulated ties 1003 8 64 -DLP_BREAK_TIES
  emulated 40 40 12 64
  emulated wide 1003 4 64 "" 64
  emulated 128256 128256 8 64
  expected host_1003 1003
  expected host_40 40
  expected host_128256 128256
  "$out/host_1003" check "$out/expected_1003" 1 3
  "$out/host_wide" check "$out/expected_1003" 1 2
  "$out/host_40" check "$out/expected_40" 1 6
  "$out/host_128256" check "$out/expected_128256" 1 12
  "$out/host_ties" check "$out/expected_1003" 1 20
  "$out/host_1003" check "$out/expected_1003" 1 20 1
  ;;
build)
  rustc -O --edition 2024 reference.rs -o "$out/reference"
  device 132 128256 132 512
  device 128 128256 128 512
  device 64 128256 64 512
  device wide 128256 132 512 "" 64
  device 8 128256 8 512
  device 132_few 128256 132 128
  device small 1003 132 512
  device small_8 1003 8 64
  device tiny 40 132 512
  device ties 1003 132 512 -DLP_BREAK_TIES
  expected gpu_132 128256
  expected gpu_small 1003
  expected gpu_tiny 40
  ;;
gpu)
  "$out/gpu_small" check "$out/expected_1003" 6
  "$out/gpu_small_8" check "$out/expected_1003" 2
  "$out/gpu_tiny" check "$out/expected_40" 4
  "$out/gpu_132" check "$out/expected_128256" 8
  "$out/gpu_128" check "$out/expected_128256" 4
  "$out/gpu_64" check "$out/expected_128256" 4
  "$out/gpu_wide" check "$out/expected_128256" 4
  "$out/gpu_8" check "$out/expected_128256" 1
  "$out/gpu_132_few" check "$out/expected_128256" 3
  "$out/gpu_ties" check "$out/expected_1003" 1
  "$out/gpu_small" check "$out/expected_1003" 1 1 1
  ! "$out/gpu_small" mute # must report a wait that failed, and end
  ;;
time) "$out/gpu_wide" time ;;
*) echo "run.sh host | build | gpu | time" && exit 2 ;;
esac
