//! Which backend computes: a GPU where there is one that can, else CPU sockets.

use crate::decoder::{Decoder, Device, LoadError, LoadRequest, Progress};
use crate::model::ModelConfig;
use crate::{cpu, cuda};

/// Bytes of a rank's KV cache on CPUs where nobody says otherwise.
const CPU_KV_BYTES: u64 = 4 << 30;

/// Loads a rank on the device that is asked for.
///
/// # Errors
/// The model is refused or does not fit, or the GPU that was asked for cannot be used.
pub fn load(request: &LoadRequest, progress: &mut dyn FnMut(Progress)) -> Result<Box<dyn Decoder>, LoadError> {
    if on_gpu(request)? {
        return Ok(Box::new(cuda::load(request, progress)?));
    }
    if request.unlooped {
        return Err(LoadError::Request("--loop off takes a GPU: CPU sockets have no launches (leave it out)".into()));
    }
    let limit = if request.kv_bytes_limit == 0 { CPU_KV_BYTES } else { request.kv_bytes_limit };
    Ok(Box::new(cpu::load(&LoadRequest { kv_bytes_limit: limit, ..request.clone() }, progress)?))
}

/// Whether the rank is to run on a GPU; the log says which, or why not.
fn on_gpu(request: &LoadRequest) -> Result<bool, LoadError> {
    match request.device {
        Device::Cpu => return Ok(false),
        Device::Cuda => return Ok(true),
        Device::Auto => {}
    }
    let config = ModelConfig::from_dir(&request.model_dir)?;
    let usable = cuda::probe(request.rank)
        .and_then(|gpu| cuda::Compiler::find().map(|_| gpu))
        .and_then(|gpu| cuda::survey(request.tensor_parallel).map(|()| gpu))
        .map_err(LoadError::from)
        .and_then(|gpu| cuda::check(request, &config).map(|()| gpu));
    match &usable {
        Ok(gpu) => tracing::info!("--device auto: GPU {}, {}", gpu.ordinal, gpu.name),
        Err(LoadError::Cuda(cuda::CudaError::NoDriver)) => tracing::info!("--device auto: CPU, as there is no GPU"),
        Err(reason) => tracing::warn!("--device auto: CPU ({reason})"),
    }
    Ok(usable.is_ok())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn request(device: Device, tensor_parallel: usize) -> LoadRequest {
        LoadRequest {
            model_dir: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/llama-gqa").into(),
            rank: tensor_parallel - 1,
            tensor_parallel,
            threads: 1,
            max_slots: 2,
            max_batch_tokens: 8,
            kv_pages: 4,
            kv_bytes_limit: 0,
            wait_limit: Duration::from_secs(1),
            max_context: 0,
            device,
            unlooped: false,
        }
    }

    #[test]
    fn auto_never_fails_for_want_of_a_gpu_and_cuda_says_what_is_missing() {
        // Auto: on a machine with a GPU for either rank it would be theirs.
        let devices = if cuda::survey(2).is_err() { &[Device::Auto, Device::Cpu][..] } else { &[Device::Cpu] };
        for device in devices {
            let loaded = load(&request(*device, 2), &mut |_| ()).unwrap();
            assert!(loaded.loaded().bit_domain.starts_with("cpu-"));
        }
        let unlooped = LoadRequest { unlooped: true, ..request(Device::Cpu, 2) };
        let refusal = load(&unlooped, &mut |_| ()).err().expect("CPU sockets have one way to run").to_string();
        assert!(refusal.contains("--loop off takes a GPU"), "{refusal}");
        if let Err(missing) = cuda::probe(0) {
            let refusal = load(&request(Device::Cuda, 1), &mut |_| ()).err().expect("there is no GPU").to_string();
            assert_eq!(refusal, missing.to_string());
        }
    }
}
