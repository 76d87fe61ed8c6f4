#!/usr/bin/env bash
# Compiles the kernel's headers as host C++ and runs them under ThreadSanitizer: the stream of a block for two shapes
# (rings of two warps and of one) and for ranks of 4, 8 and 16, the vectors' words of several blocks, one of them
# without tiles, and pages of attention in rings of four and five stages, and products of matrix passes in those of a
# pair of blocks, of leaves that are several stages, one, and not whole ones; then the negative controls, which must be
# reported; then the sums of products of 1 to 16 ranks, of which one shape's by 2 and 4 ranks run under ThreadSanitizer,
# too: it takes ten times as long; then gate and up of wide passes, of the longest to the shortest leaves. Needs a C++20
# compiler with ThreadSanitizer: CXX, else c++.
set -euo pipefail
cd "$(dirname "$0")"
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
cores=$(nproc)
build() { # OUT SOURCE FLAGS...: begins to compile, once a core is free
    local to=$1 source=$2
    shift 2
    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
    "${CXX:-c++}" -std=c++20 -O1 -g $sanitizer -Wall -Wno-unknown-pragmas -DLP_VOCAB=512 -DLP_WINDOW=0 \
        -DLP_QKV_BIAS=0 -DLP_QK_NORM=0 -DLP_TIED=0 -DLP_EPS=0 "$@" -o "$out/$to" "$source" -pthread $libraries &
    compilers+=($!)
}
sanitizer=-fsanitize=thread libraries=
compilers=()
built() { # all that was begun
    for compiler in "${compilers[@]}"; do wait "$compiler"; done
    compilers=()
}
noticed() { # WHAT PROGRAM SYMPTOM...
    local what=$1 program=$2
    shift 2
    if timeout 180 "$out/$program" > "$out/log" 2>&1; then
        echo "a negative control was not noticed: $what" >&2
        exit 1
    fi
    grep -q "${@/#/-e}" "$out/log" || { cat "$out/log" >&2; exit 1; }
    echo "$what: noticed"
}
shared=(-DLP_LAYERS=1 -DLP_COLUMNS=1 -DLP_HIDDEN=512 -DLP_HEADS=16
    -DLP_KV_HEADS=4 -DLP_HEAD_DIM=64 -DLP_INTERMEDIATE=4608 -DLP_BLOCKS=3)
own=(-DLP_LAYERS=1 -DLP_COLUMNS=1 -DLP_HIDDEN=384 -DLP_HEADS=4
    -DLP_KV_HEADS=4 -DLP_HEAD_DIM=128 -DLP_INTERMEDIATE=400 -DLP_BLOCKS=5)
words=(-DLP_LAYERS=2 -DLP_COLUMNS=8 -DLP_HIDDEN=192 -DLP_HEADS=4
    -DLP_KV_HEADS=4 -DLP_HEAD_DIM=64 -DLP_INTERMEDIATE=80 -DLP_BLOCKS=3)
build shared stream.cpp "${shared[@]}"
build own stream.cpp "${own[@]}"
build early stream.cpp "${shared[@]}" -DLP_RELEASE_EARLY
build unpaced stream.cpp "${shared[@]}" -DLP_UNPACED
# A rank of four, and of eight and sixteen, whose blocks take four and eight of their eleven tiles at a time.
ranks() { # OUT RANKS FLAGS...
    build "$1" stream.cpp -DLP_LAYERS=1 -DLP_COLUMNS=1 -DLP_HIDDEN=512 -DLP_HEADS=$((16 / $2)) -DLP_KV_HEADS=1 \
        -DLP_HEAD_DIM=64 -DLP_INTERMEDIATE=$((9984 / $2)) -DLP_BLOCKS=3 -DLP_RANKS="$2" "${@:3}"
}
ranks four 4
ranks eight 8
ranks sixteen 16
ranks unawaited 4 -DLP_UNAWAITED
idle=(-DLP_LAYERS=3 -DLP_COLUMNS=8 -DLP_HIDDEN=48 -DLP_HEADS=4
    -DLP_KV_HEADS=4 -DLP_HEAD_DIM=64 -DLP_INTERMEDIATE=33 -DLP_BLOCKS=4)
build words words.cpp "${words[@]}"
build idle words.cpp "${idle[@]}"
build kept words.cpp "${words[@]}" -DLP_KEEP_WORDS
build cleared words.cpp "${words[@]}" -DLP_CLEAR_EARLY
build ahead words.cpp "${idle[@]}" -DLP_RUN_AHEAD
build behind words.cpp "${idle[@]}" -DLP_FALL_BEHIND
pages=(-Wno-parentheses -DLP_LAYERS=1 -DLP_HEADS=16 -DLP_KV_HEADS=4 -DLP_HEAD_DIM=64 -DLP_INTERMEDIATE=3072
    -DLP_BLOCKS=128)
build pages pages.cpp -DLP_COLUMNS=32 -DLP_HIDDEN=1024 "${pages[@]}"
build pages-five pages.cpp -DLP_COLUMNS=32 -DLP_HIDDEN=4096 "${pages[@]}" # five stages: a warp waits for all pages
build pages-window pages.cpp -DLP_COLUMNS=32 -DLP_HIDDEN=1024 "${pages[@]}" -ULP_WINDOW -DLP_WINDOW=300
build unheard pages.cpp -DLP_COLUMNS=32 -DLP_HIDDEN=1024 "${pages[@]}" -DLP_UNHEARD
build unmet pages.cpp -DLP_COLUMNS=32 -DLP_HIDDEN=1024 "${pages[@]}" -DLP_UNMET
tiles=(-Wno-parentheses -DLP_LAYERS=1 -DLP_COLUMNS=2048 -DLP_HEADS=16 -DLP_KV_HEADS=4 -DLP_HEAD_DIM=64 -DLP_BLOCKS=128)
build tiles tiles.cpp -DLP_HIDDEN=1024 -DLP_INTERMEDIATE=308 "${tiles[@]}" # an odd number of groups
for hidden in 1152 1536 2048 3072; do
    build "tiles-$hidden" tiles.cpp -DLP_HIDDEN="$hidden" -DLP_INTERMEDIATE=76 "${tiles[@]}"
done
build untold tiles.cpp -DLP_HIDDEN=1024 -DLP_INTERMEDIATE=308 "${tiles[@]}" -DLP_UNTOLD
built
export TSAN_OPTIONS="halt_on_error=1 exitcode=66"
"$out/shared"
"$out/own"
"$out/four"
"$out/eight"
"$out/sixteen"
"$out/pages"
"$out/pages-five"
"$out/pages-window"
for shape in '' -1152 -1536 -2048 -3072; do timeout 180 "$out/tiles$shape"; done
for _ in 1 2 3; do
    "$out/words"
    "$out/idle"
done
noticed "chunks of others passed over before they have landed" unawaited "data race" "[1-9][0-9]* warps saw other" \
    "trapped at"
noticed "slots given back before they are read" early "data race" "saw other fragments"
noticed "pages awaited before those of the other set have landed" unheard "data race" "[1-9][0-9]* warps saw others" \
    "waits at a barrier without an end"
noticed "a page of both sets read before the other has changed it" unmet "data race"
noticed "halves of a pair's weights fetched before the other block has read" untold "data race" "[1-9][0-9]* wrong"
noticed "rings that are not paced" unpaced "[1-9][0-9]* times too many rings"
noticed "words that are not cleared" kept "fragments of another step"
noticed "words cleared a turn too early" cleared "data race"
# By luck of the threads a word is lost, too, and a wait for it fails.
noticed "turns begun before they are open" ahead "data race" "trapped at"
noticed "steps that end before all have left their rows" behind "data race" "trapped at"
programs=()
sums() { # RANKS COLUMNS HIDDEN [HEADS KV_HEADS HEAD_DIM INTERMEDIATE BLOCKS PAIR...]
    local ranks=$1 columns=$2 hidden=$3 heads=${4:-32} kv=${5:-8} dim=${6:-128} intermediate=${7:-4096} blocks=${8:-128}
    for pair in "${@:9}"; do
        programs+=("sums-$ranks-$columns-$hidden-$pair${scaled:+-scaled}")
        # Hundreds of threads on a few cores: with 16 ranks a wait was seen to take 40 s.
        build "${programs[-1]}" sums.cpp ${scaled:-} -Wno-parentheses -DLP_PATIENCE=20 -DLP_LAYERS=1 \
            -DLP_RANKS="$ranks" -DLP_COLUMNS="$columns" -DLP_HIDDEN="$hidden" -DLP_HEADS=$((heads / ranks)) \
            -DLP_KV_HEADS=$((ranks < kv ? kv / ranks : 1)) -DLP_HEAD_DIM="$dim" \
            -DLP_INTERMEDIATE=$((intermediate / ranks)) -DLP_BLOCKS="$blocks" -DLP_PAIR="$pair"
    done
}
whole=(32 8 128 4096 128 3)
for ranks in 2 4; do
    sums "$ranks" 8 4096 "${whole[@]}"
    sums "$ranks" 32 4096 "${whole[@]}"
done
# Words of 16 bytes, which ThreadSanitizer brings along.
sanitizer='' libraries=-latomic
for ranks in 1 8 16; do
    sums "$ranks" 8 4096 "${whole[@]}"
    sums "$ranks" 32 4096 "${whole[@]}"
done
sums 8 1 4096 "${whole[@]}"    # pairs of rows a word
# Rows with scales.
for ranks in 1 4 8; do scaled=-DLP_LAYER_FORMAT=1 sums "$ranks" 8 4096 "${whole[@]}"; done
scaled=-DLP_LAYER_FORMAT=1 sums 2 1 4096 "${whole[@]}"
sums 4 64 8192 "${whole[@]}"   # a warp a tile
# Wide passes of pairs that own unequally much: pairs with the most and the fewest tiles.
sums 1 64 3072 24 8 128 8192 128 2 3
sums 1 32 2560 32 8 128 9728 120 1 2
sums 2 64 3072 24 8 128 8192 128 3
sums 1 32 896 14 2 64 4864 128 1 2    # two leaves of o; blocks without a tile of it
sums 1 32 576 9 3 64 1536 128 1 3     # o is not cut; four leaves of hidden
sums 1 64 3584 28 4 128 18944 128 5   # leaves of 14, 56 and 74 steps
sums 1 32 5120 40 8 128 13824 120 7   # a warp a tile of o and down
sums 16 32 12288 96 8 128 28672 128 3 # the first block of a pair has more of qkv than the second
own() { # NAME COLUMNS HIDDEN HEADS KV_HEADS HEAD_DIM INTERMEDIATE FORMAT GROUP FLAGS...
    build "$1" own.cpp -Wno-parentheses -DLP_LAYERS=1 -DLP_COLUMNS="$2" -DLP_HIDDEN="$3" -DLP_HEADS="$4" \
        -DLP_KV_HEADS="$5" -DLP_HEAD_DIM="$6" -DLP_INTERMEDIATE="$7" -DLP_BLOCKS=128 -DLP_LAYER_FORMAT="$8" \
        -DLP_GROUP="$9" "${@:10}"
}
owned=(70b 8b nemo 4b-zeros 7b-blocks 1.5b 0.5b-twice 4b 3b 3b-int4 1b 0.6b 0.6b-64 0.5b smol)
own 70b 64 8192 64 8 128 28672 1 0         # leaves of 32 steps, two passes
own 8b 64 4096 32 8 128 14336 3 128
own nemo 32 5120 32 8 128 14336 1 0        # groups of 7, 7 and 6
own 4b-zeros 64 2560 32 8 128 9728 4 64    # 6 and 4
own 7b-blocks 64 3584 28 4 128 18944 2 128 # 4, 4, 4 and 2, stages that end within slots
own 1.5b 32 1536 12 2 128 8960 3 128       # one group, in slots of two
own 0.5b-twice 32 896 14 2 64 9728 3 32    # 4 and 3, runs of one step
own 4b 32 2560 32 8 128 9728 0 0           # not ahead
own 3b 64 3072 24 8 128 8192 0 0           # a tile a warp, like those that follow; 6 and 6
own 3b-int4 32 3072 24 8 128 8192 3 128    # of few bits
own 1b 32 2048 32 8 64 8192 1 0            # bundles of two leaves
own 0.6b 32 1024 16 8 128 3072 0 0         # of four leaves, warpgroups divide columns
own 0.6b-64 64 1024 16 8 128 3072 3 128    # the same in two slots
own 0.5b 32 896 14 2 64 4864 3 32
own smol 32 576 9 3 64 1536 0 0
own next-slot 64 4096 32 8 128 14336 1 0 -DLP_NEXT_SLOT
built
# One after the other: each has more threads than there are cores.
for program in "${programs[@]}" "${owned[@]}"; do "$out/$program"; done
noticed "activations of the next slot" next-slot "a step has other activations"
