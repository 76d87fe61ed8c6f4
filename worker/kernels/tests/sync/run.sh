#!/usr/bin/env bash
# Compiles the kernel's sync and layout headers as host C++ and runs them under ThreadSanitizer, for two shapes (rings of two warps and of one),
# then the negative control, which must be reported. Needs a C++20 compiler with ThreadSanitizer: CXX, else c++.
set -euo pipefail
cd "$(dirname "$0")"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
build() { # OUT FLAGS...
    local to=$1
    shift
    "${CXX:-c++}" -std=c++20 -O1 -g -fsanitize=thread -Wall -Wno-unknown-pragmas -DLP_LAYERS=1 -DLP_VOCAB=512 -DLP_WINDOW=0 -DLP_QKV_BIAS=0 -DLP_QK_NORM=0 \
        -DLP_TIED=0 -DLP_EPS=0 -DLP_COLUMNS=1 "$@" -o "$out/$to" stream.cpp -pthread
}
shared=(-DLP_HIDDEN=512 -DLP_HEADS=16 -DLP_KV_HEADS=4 -DLP_HEAD_DIM=64 -DLP_INTERMEDIATE=4608 -DLP_BLOCKS=3)
own=(-DLP_HIDDEN=384 -DLP_HEADS=4 -DLP_KV_HEADS=4 -DLP_HEAD_DIM=128 -DLP_INTERMEDIATE=400 -DLP_BLOCKS=5)
build shared "${shared[@]}"
build own "${own[@]}"
build early "${shared[@]}" -DLP_RELEASE_EARLY
export TSAN_OPTIONS="halt_on_error=1 exitcode=66"
"$out/shared"
"$out/own"
if "$out/early" > "$out/log" 2>&1; then
    echo "the negative control was not noticed" >&2
    exit 1
fi
grep -q -e "data race" -e "saw other fragments" "$out/log" || { cat "$out/log" >&2; exit 1; }
echo "slots given back before they are read: noticed"
