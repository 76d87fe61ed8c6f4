#!/usr/bin/env bash
# run.sh [TARGET|all [SECONDS]]: looks for inputs that break what a fuzz target promises, each for so many seconds
# (tests/fuzz/fuzz.rs says what a target is). Inputs that reach new code gather in target/fuzz/corpus, and those that break a
# promise in target/fuzz/findings. Needs a C++ compiler, for libFuzzer.
set -euo pipefail
cd "$(dirname "$0")/../.."
chosen=${1:-all} seconds=${2:-60}
if [ "$chosen" != all ] && [ ! -d "tests/fuzz/corpus/$chosen" ]; then
    echo "no target $chosen: it is all, or one of" tests/fuzz/corpus/* >&2
    exit 2
fi

# LLVM's own pass tells libFuzzer which code an input reaches: any Rust has it. With --target it stays out of what runs
# while others are compiled.
flags="--cfg fuzzing -Cpasses=sancov-module"
for option in level=4 inline-8bit-counters pc-table trace-compares; do
    flags+=" -Cllvm-args=-sanitizer-coverage-$option"
done
host=$(rustc -vV | sed -n 's/^host: //p')
RUSTFLAGS="$flags" cargo build --workspace --locked --profile fuzz --target "$host" --target-dir target/fuzz \
    --example fuzz

# As threads of the server have it: what recurses too deeply is to be found.
ulimit -s 2048
found=0
for kept in tests/fuzz/corpus/*/; do
    target=$(basename "$kept")
    if [ "$chosen" != all ] && [ "$chosen" != "$target" ]; then
        continue
    fi
    echo "== $target, $seconds s"
    mkdir -p "target/fuzz/corpus/$target" target/fuzz/findings
    RUST_BACKTRACE=0 LOOPLANE_FUZZ_TARGET=$target "target/fuzz/$host/fuzz/examples/fuzz" \
        "target/fuzz/corpus/$target" "$kept" \
        -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -max_len=4096 -dict=tests/fuzz/words.dict -reload=0 \
        -print_final_stats=1 \
        -artifact_prefix="target/fuzz/findings/$target-" 2>"target/fuzz/$target.log" || found=1
    tail -n 25 "target/fuzz/$target.log" | grep -aE 'stat::number_of|stat::peak|SUMMARY|Test unit written' || true
    grep -a -m 1 -A 1 'panicked at' "target/fuzz/$target.log" || true
done
exit $found
