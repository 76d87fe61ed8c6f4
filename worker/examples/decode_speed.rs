//! How fast a group decodes a model of about 1B parameters with random weights: milliseconds a step, bytes streamed by all
//! ranks. The ranks are threads of one process; what they exchange goes through shared memory all the same.
//!
//! `cargo run --release --example decode_speed -- [threads a rank] [layers] [ranks]`

use std::sync::Arc;
use std::time::Duration;

use looplane_worker::batch::{Admit, PageGrant, Plan, PrefillChunk};
use looplane_worker::cpu::{Options, RandomSource, load_with};
use looplane_worker::decoder::{Decoder, LoadRequest, Vitals, outcome_stream, plan_stream};
use looplane_worker::model::ModelConfig;
use looplane_worker::model::config::{Architecture, Rope};
use looplane_worker::sampling::SamplingParams;

const STEPS: u32 = 24;
const PROMPT: u32 = 256;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let threads = arguments.next().transpose()?.unwrap_or(2);
    let layers = arguments.next().transpose()?.unwrap_or(16);
    let ranks = arguments.next().transpose()?.unwrap_or(1);
    for batch in [1, 8] {
        measure(threads, layers, ranks, batch)?;
    }
    Ok(())
}

fn measure(threads: usize, layers: usize, ranks: usize, batch: u32) -> anyhow::Result<()> {
    let config = ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 2048,
        num_layers: layers,
        num_heads: 32,
        num_kv_heads: 8,
        head_dim: 64,
        intermediate_size: 8192,
        vocab_size: 32_000,
        max_positions: 2048,
        rms_norm_eps: 1e-5,
        rope: Rope { theta: 500_000.0, llama3: None },
        sliding_window: None,
        qkv_bias: false,
        qk_norm: false,
        tied_embeddings: false,
    };
    let request = LoadRequest {
        model_dir: "random".into(),
        rank: 0,
        tensor_parallel: ranks,
        threads,
        max_slots: batch as usize,
        max_batch_tokens: 512,
        kv_pages: 8 * batch as usize,
        kv_bytes_limit: 0,
        wait_limit: Duration::from_secs(10),
        max_context: 0,
    };
    let options = Options { random: Some(RandomSource { config, seed: 1 }), ..Options::default() };
    let begun = std::time::Instant::now();
    let load = |rank| load_with(&LoadRequest { rank, ..request.clone() }, &options, &mut |_| ());
    let mut group = (0..ranks).map(load).collect::<Result<Vec<_>, _>>()?;
    println!("batch {batch}: {} in {:.1} s", group[0].loaded().notes.join("; "), begun.elapsed().as_secs_f64());
    let handles: Vec<_> = group.iter().map(|rank| rank.fabric_handle()).collect();
    let bytes = group.iter().map(|rank| rank.stream_bytes()).sum::<u64>() as f64;
    let (mut feeds, mut workers, mut outcomes) = (Vec::new(), Vec::new(), Vec::new());
    for mut rank in group.drain(..) {
        rank.join(&handles)?;
        let (feed, source) = plan_stream();
        let (sink, out) = outcome_stream(Arc::new(Vitals::default()));
        feeds.push(feed);
        outcomes.push(out);
        workers.push(std::thread::spawn(move || Box::new(rank).run(source, sink)));
    }
    let decode = Plan { version: u64::from(batch) + 1, steps: STEPS, decode: (0..batch).collect(), ..Plan::default() };
    tokio::runtime::Builder::new_current_thread().build()?.block_on(async {
        for plan in (0..batch).map(prefill).chain([decode]) {
            for feed in &feeds {
                feed.push(plan.clone()).await;
            }
        }
    });
    drop(feeds);
    for worker in workers {
        worker.join().map_err(|_| anyhow::anyhow!("the decoder panicked"))??;
    }
    let (mut decode, mut waited) = (Vec::new(), 0.0);
    while let Ok(outcome) = outcomes[0].try_recv() {
        let ms = outcome.step_time.as_secs_f64() * 1e3;
        if outcome.rows == PROMPT as usize {
            println!("batch {batch}: prompt of {PROMPT} in {ms:.1} ms");
        } else {
            decode.push(ms);
            waited += outcome.wait_time.as_secs_f64() * 1e3 / f64::from(STEPS);
        }
    }
    decode.sort_by(f64::total_cmp);
    let (best, median) = (decode[0], decode[decode.len() / 2]);
    let rate = |ms: f64| bytes / ms / 1e6;
    println!(
        "batch {batch}: {median:.1} ms a step ({:.1} GB/s), best {best:.1} ms ({:.1} GB/s), of which waiting {waited:.1} ms",
        rate(median),
        rate(best)
    );
    Ok(())
}

/// Admits a sequence and computes its prompt.
fn prefill(slot: u32) -> Plan {
    Plan {
        version: u64::from(slot) + 1,
        steps: 1,
        admit: vec![Admit {
            slot,
            sequence: u64::from(slot),
            tokens: (0..PROMPT).map(|i| (i * 37 + slot * 11) % 32_000).collect(),
            prompt_tokens: PROMPT,
            max_tokens: STEPS + 8,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: SamplingParams {
                temperature: 0.0,
                top_k: 0,
                top_p: 1.0,
                min_p: 0.0,
                seed: 0,
                presence_penalty: 0.0,
                frequency_penalty: 0.0,
                repetition_penalty: 1.0,
                logit_bias: Vec::new(),
            },
            logprobs: None,
        }],
        grants: vec![PageGrant { slot, pages: (slot * 8..slot * 8 + 8).collect() }],
        prefill: vec![PrefillChunk { slot, start: 0, len: PROMPT }],
        ..Plan::default()
    }
}
