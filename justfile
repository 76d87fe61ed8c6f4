# The list of commands; .ci/run calls the same.

# Build everything and serve the demo model.
serve *ARGS:
    cargo run --release -- serve {{ARGS}}

# Every test.
test:
    cargo test --workspace

# What CI runs.
ci:
    bash .ci/run

# Format and lint.
lint:
    cargo fmt --all
    cargo clippy --workspace --all-targets -- -D warnings
