//! A group of ranks in one process, a thread each, driven by plans.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::batch::{Admit, PageGrant, Plan, PrefillChunk, Step};
use crate::cpu::{CpuDecoder, Isa, Options, load_with};
use crate::decoder::{Decoder, LoadRequest, Outcome, Sockets, Vitals, outcome_stream, plan_stream};
use crate::model::source::RandomSource;
use crate::plan::KvLayout;
use crate::sampling::SamplingParams;

/// Shown every step and the logits of its sampled rows.
pub type Tap = Box<dyn Fn(&Step, &[f32]) + Send>;

/// Logits of a rank by (slot, position of the row).
type Seen = Arc<Mutex<BTreeMap<(u32, u32), Vec<f32>>>>;

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// How a group is arranged: nothing here may change a bit.
#[derive(Debug, Clone)]
pub struct Arrangement {
    pub tensor_parallel: usize,
    pub threads: usize,
    pub isa: Isa,
    /// Most prompt tokens of a chunk.
    pub chunk: usize,
    /// Sequences that run at one time; the others wait for a slot.
    pub slots: usize,
    /// Breaks the tree on purpose.
    pub swap_leaves: bool,
    /// Delays ranks at random moments of their exchanges.
    pub delays: bool,
    /// Weights in place of a checkpoint's.
    pub random: Option<RandomSource>,
}

impl Default for Arrangement {
    fn default() -> Self {
        Self {
            tensor_parallel: 1,
            threads: 1,
            isa: Isa::best(),
            chunk: 512,
            slots: 16,
            swap_leaves: false,
            delays: false,
            random: None,
        }
    }
}

/// One sequence to run.
#[derive(Debug, Clone)]
pub struct Request {
    pub tokens: Vec<u32>,
    pub max_tokens: u32,
    pub sampling: SamplingParams,
}

/// What a sequence yielded.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Reply {
    pub tokens: Vec<u32>,
    /// Bits of the log-probability of each token.
    pub logprobs: Vec<u32>,
    /// Bits of the whole row of logits that each token was drawn from.
    pub logits: Vec<Vec<u32>>,
}

impl Request {
    pub fn greedy(tokens: &[u32], max_tokens: u32) -> Self {
        Self { tokens: tokens.to_vec(), max_tokens, sampling: SamplingParams::greedy() }
    }

    fn positions(&self) -> usize {
        self.tokens.len() + self.max_tokens as usize
    }
}

/// Runs requests in waves of `slots` and returns their replies in order.
pub fn run(model: &Path, arrangement: &Arrangement, requests: &[Request]) -> Vec<Reply> {
    requests.chunks(arrangement.slots).flat_map(|wave| run_wave(model, arrangement, wave)).collect()
}

fn run_wave(model: &Path, arrangement: &Arrangement, wave: &[Request]) -> Vec<Reply> {
    let pages = wave.iter().map(|request| KvLayout::pages_for(request.positions())).sum::<usize>() + 3;
    let mut ranks: Vec<_> =
        (0..arrangement.tensor_parallel).map(|rank| load_rank(model, arrangement, rank, pages)).collect();
    let handles: Vec<_> = ranks.iter().map(|rank| rank.fabric_handle()).collect();
    ranks.iter_mut().for_each(|rank| rank.join(&handles).unwrap());
    let seen: Vec<Seen> = ranks.iter().map(|_| Seen::default()).collect();
    let plans = plans(arrangement, wave);
    let (mut feeds, mut workers, mut outcomes) = (Vec::new(), Vec::new(), Vec::new());
    for (mut rank, seen) in ranks.into_iter().zip(&seen) {
        let vocab = rank.decoder.shard.rank.vocab.len();
        let seen = Arc::clone(seen);
        rank.decoder.fabric.swap_leaves = arrangement.swap_leaves;
        if arrangement.delays {
            rank.decoder.fabric.hook = Some(crate::cpu::fabric::tests::delays(feeds.len() as u64));
        }
        rank.decoder.tap = Some(Box::new(move |step, logits| {
            for (row, logits) in step.samples.iter().map(|row| &step.rows[*row]).zip(logits.chunks_exact(vocab)) {
                seen.lock().unwrap().insert((row.slot, row.position), logits.to_vec());
            }
        }));
        let (feed, source) = plan_stream();
        let (sink, out) = outcome_stream(Arc::new(Vitals::default()));
        outcomes.push(out);
        feeds.push(feed);
        workers.push(std::thread::spawn(move || Box::new(rank).run(source, sink)));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        for plan in plans {
            for feed in &feeds {
                feed.push(plan.clone()).await;
            }
        }
    });
    drop(feeds);
    for worker in workers {
        worker.join().unwrap().unwrap();
    }
    let mut replies = vec![Reply::default(); wave.len()];
    while let Ok(outcome) = outcomes[0].try_recv() {
        let Outcome { tokens, .. } = outcome;
        for token in tokens {
            let reply = &mut replies[token.sequence as usize];
            reply.tokens.push(token.sampled.token);
            reply.logprobs.extend(token.sampled.logprob.map(f32::to_bits));
        }
    }
    for (slot, (request, reply)) in wave.iter().zip(&mut replies).enumerate() {
        let first = request.tokens.len() - 1;
        for position in first..first + reply.tokens.len() {
            let row = seen.iter().flat_map(|rank| rank.lock().unwrap()[&(slot as u32, position as u32)].clone());
            reply.logits.push(row.map(f32::to_bits).collect());
        }
    }
    replies
}

fn load_rank(model: &Path, arrangement: &Arrangement, rank: usize, kv_pages: usize) -> CpuDecoder {
    let request = LoadRequest {
        device: crate::decoder::Device::Cpu,
        quantization: None,
        unlooped: false,
        measure_read_limit: false,
        draft_corpus_tokens: 0,
        vocabulary: None,
        others: Sockets::default(),
        model_dir: model.to_owned(),
        rank,
        tensor_parallel: arrangement.tensor_parallel,
        threads: arrangement.threads,
        max_slots: arrangement.slots,
        max_batch_tokens: 512.max(arrangement.slots),
        kv_pages,
        kv_bytes_limit: 0,
        wait_limit: Duration::from_secs(60),
        max_context: 0,
    };
    let options = Options { isa: Some(arrangement.isa), unpinned: true, random: arrangement.random.clone() };
    load_with(&request, &options, &mut |_| ()).unwrap()
}

/// Prompts in chunks, mixed with decoding: in every plan each sequence moves on by a chunk, or decodes a few steps.
/// Pages are granted from the top down, so that page numbers mean nothing.
fn plans(arrangement: &Arrangement, wave: &[Request]) -> Vec<Plan> {
    let pages = wave.iter().map(|request| KvLayout::pages_for(request.positions()) as u32);
    let mut next_page = pages.clone().sum::<u32>() + 3;
    let mut computed = vec![0; wave.len()];
    let mut plans = Vec::new();
    for version in 1.. {
        let mut plan = Plan { version, steps: 5, ..Plan::default() };
        if version == 1 {
            for (slot, (request, pages)) in wave.iter().zip(pages.clone()).enumerate() {
                let slot = slot as u32;
                plan.admit.push(Admit {
                    slot,
                    sequence: u64::from(slot),
                    tokens: request.tokens.clone(),
                    prompt_tokens: request.tokens.len() as u32,
                    max_tokens: request.max_tokens,
                    min_tokens: 0,
                    stop_tokens: Vec::new(),
                    sampling: request.sampling.clone(),
                    logprobs: Some(0),
                    cache_salt: String::new(),
                    grammar: None,
                    token_bounds: None,
                    prompt_logprobs: None,
                });
                next_page -= pages;
                plan.grants.push(PageGrant { slot, first: 0, pages: (next_page..next_page + pages).rev().collect() });
            }
        }
        let mut room = 512 - wave.len();
        for (slot, request) in wave.iter().enumerate() {
            let left = request.tokens.len() - computed[slot];
            let len = left.min(arrangement.chunk).min(room);
            if left > 0 && len > 0 {
                plan.prefill.push(PrefillChunk { slot: slot as u32, start: computed[slot] as u32, len: len as u32 });
                computed[slot] += len;
                room -= len;
            }
            if computed[slot] == request.tokens.len() {
                plan.decode.push(slot as u32);
            }
        }
        let decoding_only = plan.prefill.is_empty();
        if decoding_only {
            plan.steps = wave.iter().map(|request| request.max_tokens).max().unwrap_or(1);
        }
        plans.push(plan);
        if decoding_only {
            break;
        }
    }
    plans
}
