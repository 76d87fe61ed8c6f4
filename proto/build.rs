//! Compiles the .proto files with protox (pure Rust), so that no system protoc is needed.

use std::{env, fs, path::PathBuf};

use prost::Message;

const PROTOS: [&str; 3] = [
    "proto/looplane/inference/v1/inference.proto",
    "proto/looplane/worker/v1/worker.proto",
    "proto/looplane/fleet/v1/fleet.proto",
];

fn main() -> anyhow::Result<()> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
