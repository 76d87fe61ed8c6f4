//! Which backend computes: a GPU where there is one that can, else CPU sockets.

use crate::decoder::{Decoder, Device, LoadError, LoadRequest, Progress};
use crate::model::ModelConfig;
use crate::{cpu, cuda};

/// Bytes of a rank's KV cache on CPUs where nobody says otherwise.
const CPU_KV_BYTES: u64 = 4 << 30;
/// Slots of a rank, and rows of a step, on CPUs where nobody says otherwise.
const CPU_SLOTS: usize = 64;
const CPU_ROWS: usize = 512;
/// The same on a GPU, where they fit; else half as many, down to those of CPUs.
const GPU_SLOTS: usize = 512;
const GPU_ROWS: usize = 2048;
/// Rows of a step on several GPUs: two passes, which hide the exchange of each other.
const GROUP_ROWS: usize = 2 * GPU_ROWS;

/// Loads a rank on the device that is asked for.
///
/// # Errors
/// The model is refused or does not fit, or the GPU that was asked for cannot be used.
pub fn load(request: &LoadRequest, progress: &mut dyn FnMut(Progress)) -> Result<Box<dyn Decoder>, LoadError> {
    if on_gpu(request)? {
        return load_on_gpu(request, progress);
    }
    if request.unlooped {
        return Err(LoadError::Request("--loop off takes a GPU: CPU sockets have no launches (leave it out)".into()));
    }
    let limit = if request.kv_bytes_limit == 0 { CPU_KV_BYTES } else { request.kv_bytes_limit };
    let request = LoadRequest { kv_bytes_limit: limit, ..bounded(request, CPU_SLOTS, CPU_ROWS) };
    Ok(Box::new(cpu::load(&request, progress)?))
}

/// What fits is known before weights are read, so that trying again costs little.
fn load_on_gpu(request: &LoadRequest, progress: &mut dyn FnMut(Progress)) -> Result<Box<dyn Decoder>, LoadError> {
    let (mut slots, mut rows) = (GPU_SLOTS, gpu_rows(request));
    let is_open = request.max_slots == 0 || request.max_batch_tokens == 0;
    loop {
        let bounded = bounded(request, slots, rows);
        let (most_slots, most_rows) = (bounded.max_slots, bounded.max_batch_tokens);
        tracing::info!("asking the GPU for {most_slots} slots and steps of {most_rows} rows");
        match cuda::load(&bounded, progress) {
            Err(LoadError::TooLarge { .. }) if is_open && slots > CPU_SLOTS => {
                (slots, rows) = fewer(request, slots, rows);
                tracing::info!("that is too much for this GPU");
            }
            loaded => return Ok(Box::new(loaded?)),
        }
    }
}

/// Rows of a step on GPUs, where nobody says otherwise and they fit.
fn gpu_rows(request: &LoadRequest) -> usize {
    if request.tensor_parallel > 1 { GROUP_ROWS } else { GPU_ROWS }
}

/// What is tried where so many slots and rows do not fit: of a group first steps without the second pass.
fn fewer(request: &LoadRequest, slots: usize, rows: usize) -> (usize, usize) {
    match request.max_batch_tokens == 0 && rows > GPU_ROWS {
        true => (slots, GPU_ROWS),
        false => ((slots / 2).max(CPU_SLOTS), (rows / 2).max(CPU_ROWS)),
    }
}

/// The request with these bounds where it leaves them open.
fn bounded(request: &LoadRequest, slots: usize, rows: usize) -> LoadRequest {
    let max_batch_tokens = match request.max_batch_tokens {
        0 => rows.max(request.max_slots),
        given => given,
    };
    let max_slots = match request.max_slots {
        0 => slots.min(max_batch_tokens),
        given => given,
    };
    LoadRequest { max_slots, max_batch_tokens, ..request.clone() }
}

/// Whether the rank is to run on a GPU; the log says which, or why not.
fn on_gpu(request: &LoadRequest) -> Result<bool, LoadError> {
    match request.device {
        Device::Cpu => return Ok(false),
        Device::Cuda => return Ok(true),
        Device::Auto => {}
    }
    let config = ModelConfig::from_dir(&request.model_dir)?;
    let usable = cuda::probe(request.socket())
        .and_then(|gpu| cuda::Compiler::find().map(|_| gpu))
        .and_then(|gpu| cuda::survey(request.others.before, request.tensor_parallel).map(|()| gpu))
        .map_err(LoadError::from)
        .and_then(|gpu| cuda::check(&bounded(request, GPU_SLOTS, gpu_rows(request)), &config).map(|()| gpu));
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
            quantization: None,
            unlooped: false,
            measure_read_limit: false,
            draft_corpus_tokens: 0,
            vocabulary: None,
            others: crate::decoder::Sockets::default(),
        }
    }

    #[test]
    fn bounds_that_are_left_open_never_contradict_those_that_are_given() {
        for (asked, chosen) in [
            ((0, 0), (512, 2048)),
            ((3, 0), (3, 2048)),
            ((3000, 0), (3000, 3000)),
            ((0, 100), (100, 100)),
            ((4, 9), (4, 9)),
        ] {
            let request = LoadRequest { max_slots: asked.0, max_batch_tokens: asked.1, ..request(Device::Cpu, 1) };
            let bounded = bounded(&request, GPU_SLOTS, GPU_ROWS);
            assert_eq!((bounded.max_slots, bounded.max_batch_tokens), chosen, "{asked:?}");
        }
        let of_group = |ranks| gpu_rows(&request(Device::Cuda, ranks));
        assert_eq!([1, 2, 4].map(of_group), [2048, 4096, 4096], "two passes where ranks exchange");
        let open = LoadRequest { max_slots: 0, max_batch_tokens: 0, ..request(Device::Cpu, 1) };
        assert_eq!([fewer(&open, 512, 4096), fewer(&open, 512, 2048)], [(512, 2048), (256, 1024)]);
        assert_eq!(fewer(&LoadRequest { max_batch_tokens: 4096, ..open.clone() }, 512, 4096), (256, 2048));
        let loaded = load(&open, &mut |_| ()).unwrap();
        assert_eq!((loaded.loaded().max_slots, loaded.loaded().max_batch_tokens), (CPU_SLOTS, CPU_ROWS));
    }

    #[test]
    fn auto_never_fails_for_want_of_a_gpu_and_cuda_says_what_is_missing() {
        // Auto: on a machine with a GPU for either rank it would be theirs.
        let devices = if cuda::survey(0, 2).is_err() { &[Device::Auto, Device::Cpu][..] } else { &[Device::Cpu] };
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
