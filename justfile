# The list of commands; .ci/run calls the same.

# Build everything and serve the demo model.
serve *ARGS:
    cargo run --release -- serve {{ARGS}}

# The test that compiles the GPU's kernels needs NVRTC, which is installed in target/nvrtc, and those that open pages
# need a browser, which is installed in target/browser where there is no Chromium. Clients are in target/clients, and
# Prometheus in target/prometheus.
# Every test.
test:
    LOOPLANE_NVRTC="$(.ci/nvrtc)" LOOPLANE_BROWSER="$(.ci/browser)" LOOPLANE_CLIENTS="$(.ci/clients)" \
        LOOPLANE_PROMETHEUS="$(.ci/prometheus)" cargo test --workspace

# The first time torch and transformers compute an 8B model's logits, for which they take 60 GB of the GPU.
# The tests that need a GPU; without one they fail.
gpu:
    test -e target/full_size.safetensors || python3 worker/kernels/tests/full_size.py target/full_size.safetensors
    LOOPLANE_FULL_SIZE_REFERENCE="$PWD/target/full_size.safetensors" LOOPLANE_REQUIRE_GPU=1 \
        LOOPLANE_EVERY_SHAPE=1 CUDA_DEVICE_MAX_CONNECTIONS=32 \
        cargo test --workspace --lib cuda:: -- --test-threads 1
    LOOPLANE_DEVICE=cuda LOOPLANE_STORM_REQUESTS=10000 LOOPLANE_STORM_RANKS=1 \
        cargo test --workspace --test product a_storm_of_requests

# Runs on as many GPUs as there are: a group that is larger shares one, up to 16 ranks side by side.
# Groups of ranks on GPUs, and what ties them together.
gpu-tp:
    LOOPLANE_REQUIRE_GPU=1 CUDA_DEVICE_MAX_CONNECTIONS=32 \
        cargo test --workspace --lib -- cuda::tests::ranks cuda::tests::fabric cuda::tests::fed --test-threads 1

# Tests on a GPU find them with LOOPLANE_KERNEL_CACHE=FOLDER. TESTS: begins of names, as `wide::`; otherwise all.
# Compiles the kernels of tests that need a GPU, on a machine that has none.
kernel-cache FOLDER *TESTS:
    LOOPLANE_NVRTC="$(.ci/nvrtc)" LOOPLANE_KERNEL_CACHE="$(realpath -m {{FOLDER}})" LOOPLANE_TESTS="{{TESTS}}" \
        cargo test --release --workspace --lib cuda::tests::driver -- --ignored --nocapture

# The driver computes nothing, so what `bench` prints is thrown away.
# Compiles the kernels of `looplane bench --device cuda ARGS`, on a machine that has no GPU.
bench-kernels FOLDER *ARGS:
    cargo build --release --workspace
    mkdir -p target/driver {{FOLDER}}
    "${CC:-cc}" -O1 -shared -fPIC -pthread -o target/driver/libcuda.so.1 worker/src/cuda/tests/driver.c
    LOOPLANE_NVRTC="$(.ci/nvrtc)" LOOPLANE_KERNEL_CACHE="$(realpath {{FOLDER}})" \
        LD_LIBRARY_PATH="$PWD/target/driver:${LD_LIBRARY_PATH:-}" \
        target/release/looplane bench --device cuda {{ARGS}} > /dev/null

# HTTP needs torch and safetensors, which make up the checkpoint.
# The figures of one GPU in docs/benchmarks.md, as tables.
gpu-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/gpu_figures.py {{ARGS}}

# Needs torch and safetensors, which make up the checkpoint.
# Tokens a second and times between tokens under load, as a table.
serving-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/serving_figures.py {{ARGS}}

# What the prefix cache is worth.
prefix-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/prefix_figures.py {{ARGS}}

# What crowds of clients would see of the scheduler on GPUs, in virtual time.
crowds:
    cargo test --release --workspace --lib -- --ignored group::tests::crowds --nocapture

# On more than two cores, with `--cpus 0,1 --client-cpus 2-15`, the clients do not take the server's.
# What a streamed token costs the front end, and how long it takes to its client, as a table.
front-end-figures *ARGS:
    cargo bench --workspace --bench streams -- {{ARGS}}

# Needs torch and safetensors, which make up the checkpoint.
# What it costs to hold answers to a form.
structured-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/structured_figures.py {{ARGS}}

# Needs torch and safetensors, which make up the checkpoints.
# What drafts are worth.
draft-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/draft_figures.py {{ARGS}}

# Steps and prompts of every published shape, as a table.
shape-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/shape_figures.py {{ARGS}}

# Kills workers of a group of GPUs in the middle of streams: the others end, the text stays the same, nothing is left.
kill-ranks *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/kill_ranks.py {{ARGS}}

# Servers of several group sizes answer the same to the last bit.
same-bits *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/same_bits.py {{ARGS}}

# Needs a machine with several GPUs (--gpus 8: groups of 8 alone); what larger groups would do follows as tables and a
# picture.
# The figures of several GPUs in docs/benchmarks.md, as a table.
tp-figures *ARGS:
    cargo build --release --workspace
    python3 deploy/compare/tp_figures.py --dir docs/scaling {{ARGS}}
    just scaling

# What groups of GPUs do, calculated from the figures in docs/scaling.
scaling *ARGS:
    cargo run --release -- scaling docs/scaling/*.json --plot docs/scaling.svg {{ARGS}}

# Takes the report's picture, too, where there is a chromium.
# What 1 to 16 workers do on this machine's CPUs: the report of docs/benchmarks.md.
sweep-cpu:
    cargo build --release --workspace
    target/release/looplane loadtest sweep --tp 1,2,4,8,16 --device cpu --duration 10s \
        --model worker/tests/fixtures/llama-mha16 --out target/sweep-cpu
    -chromium --headless=new --no-sandbox --window-size=1240,1440 --screenshot=target/sweep-cpu/sweep.png \
        "file://$PWD/target/sweep-cpu/sweep.html"

# racecheck is not among the tools: NOTES.md in worker/kernels says why.
# compute-sanitizer over small models on a GPU, in passes of every kind, and over a group where there are two.
sanitize *TOOLS="memcheck synccheck":
    for tool in {{TOOLS}}; do \
        runner="compute-sanitizer --tool $tool --error-exitcode 1 --require-cuda-init no"; \
        CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$runner" LOOPLANE_REQUIRE_GPU=1 cargo test --workspace --lib -- \
            cuda::tests::gpu::sanitized cuda::tests::matrix_passes::controls::sanitized cuda::tests::ranks::sanitized \
            --test-threads 1 || exit 1; \
    done

# What is left out: that every body by the document is taken. It says little of what is inside of lists and objects, and
# nothing of what the model says: its context, its tokens, its template.
# Fuzzes a server that runs at this address by its own /openapi.json.
schemathesis URL="http://127.0.0.1:8000" *ARGS:
    python3 -m venv target/schemathesis
    target/schemathesis/bin/pip install --quiet schemathesis==4.32.5
    target/schemathesis/bin/schemathesis --config-file deploy/schemathesis.toml run {{URL}}/openapi.json \
        --continue-on-failure --exclude-checks positive_data_acceptance {{ARGS}}

# The first time it compiles everything with counters, for ten minutes. A finding is run again by
# `cargo run --example fuzz -- TARGET FILE`, and kept in tests/fuzz/corpus with the change that mends it.
# Looks for inputs that break what a place that takes them promises, a minute for each.
fuzz TARGET="all" SECONDS="60":
    bash tests/fuzz/run.sh {{TARGET}} {{SECONDS}}

# The protocols of the kernel's weight stream on a host, under ThreadSanitizer; needs a C++20 compiler.
tsan:
    bash worker/kernels/tests/sync/run.sh

# The chart, the images, rules and alerts, the unit: what of them can be looked at without running them.
deploy:
    bash .ci/deploy

# The handbook, static pages in target/book.
book:
    bash docs/book.sh

# What CI runs.
ci:
    bash .ci/run

# `just deny advisories` asks for known flaws, whose database it fetches.
# Licences, sources and arrows between crates, by deny.toml.
deny *CHECKS="licenses bans sources":
    "$(.ci/deny)" check {{CHECKS}}

# Format and lint.
lint:
    cargo fmt --all
    cargo clippy --workspace --all-targets -- -D warnings

# The first time it compiles llama.cpp and writes 2.2 GB to target/; `--help` says more.
# Decode speed beside llama.cpp's, in turns.
compare-llama-cpp *ARGS:
    cargo build --release --workspace
    python3 -m venv target/llama-cpp
    target/llama-cpp/bin/pip install --quiet llama-cpp-python==0.3.36 gguf==0.19.0
    target/llama-cpp/bin/python deploy/compare/beside_llama_cpp.py {{ARGS}}
