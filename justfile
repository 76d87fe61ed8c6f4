# The list of commands; .ci/run calls the same.

# Build everything and serve the demo model.
serve *ARGS:
    cargo run --release -- serve {{ARGS}}

# Every test. The one that compiles the GPU's kernels needs NVRTC, which is installed in target/nvrtc.
test:
    LOOPLANE_NVRTC="$(.ci/nvrtc)" cargo test --workspace

# The tests that need a GPU; without one they fail.
gpu:
    LOOPLANE_REQUIRE_GPU=1 cargo test --workspace --lib cuda:: -- --test-threads 1

# The protocols of the kernel's weight stream on a host, under ThreadSanitizer; needs a C++20 compiler.
tsan:
    bash worker/kernels/tests/sync/run.sh

# What CI runs.
ci:
    bash .ci/run

# Format and lint.
lint:
    cargo fmt --all
    cargo clippy --workspace --all-targets -- -D warnings

# Decode speed beside llama.cpp's, in turns; `--help` says how. The first time it compiles llama.cpp and writes 2.2 GB to target/.
compare-llama-cpp *ARGS:
    cargo build --release --workspace
    python3 -m venv target/llama-cpp
    target/llama-cpp/bin/pip install --quiet llama-cpp-python==0.3.36 gguf==0.19.0
    target/llama-cpp/bin/python deploy/compare/beside_llama_cpp.py {{ARGS}}
