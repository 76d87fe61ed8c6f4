//! A group of ranks as threads of this process, driven by plans as a server would drive it.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::sync::mpsc::Receiver;

use super::BenchError;
use crate::batch::{Admit, PageGrant, Plan, PrefillChunk};
use crate::cuda::{Gauge, NormalSource, Phase};
use crate::decoder::{
    Decoder, Device, Fault, LoadRequest, Outcome, PlanFeed, Sockets, Vitals, outcome_stream, plan_stream,
};
use crate::model::source::RandomSource;
use crate::model::{ModelConfig, WeightFormat};
use crate::plan::{KvLayout, PAGE_POSITIONS};
use crate::sampling::SamplingParams;

/// Most prompt tokens of one step: on CPUs, on a GPU, and on several.
const PREFILL_ROWS: [u32; 3] = [512, 2048, 4096];
/// Of the weights that are made up.
const SEED: u64 = 1;
/// Longest wait of a rank for another.
const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// What a group is loaded with.
pub struct Setup<'a> {
    /// `rank` is filled in.
    pub model_dir: &'a std::path::Path,
    /// Dimensions to make weights up for.
    pub random: Option<ModelConfig>,
    /// On a GPU.
    pub on_gpu: bool,
    /// Thread blocks there, where not as many as suit the model.
    pub blocks: Option<usize>,
    /// What changes modes there, and hands over times.
    pub gauge: Option<Arc<Gauge>>,
    /// Ranks.
    pub ranks: usize,
    /// Shards of the model, where those are only some.
    pub shards: Option<usize>,
    /// Threads of each.
    pub threads: usize,
    /// Sequences.
    pub slots: u32,
    /// Tokens that each sequence starts with.
    pub context: u32,
    /// Steps that each sequence can be decoded for.
    pub max_steps: u32,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Log-probabilities are wanted, and of how many likely tokens.
    pub logprobs: Option<u32>,
    /// Tokens of a prompt that one more sequence has.
    pub prompt: Option<u32>,
    /// Tokens of a prompt that steps compute beside those of the sequences.
    pub beside: Option<u32>,
    /// What the layers' matrices become.
    pub weights: Option<WeightFormat>,
}

/// What decoding reads from one memory: of one rank on GPUs, which have a memory each, of all ranks on CPU sockets of
/// one machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Bytes of weights that stream in one step.
    pub weight_bytes: u64,
    /// The same by phase, on a GPU.
    pub phase_bytes: Vec<(Phase, u64)>,
    /// Bytes of K and V of one position.
    pub position_bytes: u64,
}

/// The time of one decode step.
#[derive(Debug, Clone, Copy)]
pub struct StepTime {
    /// From its first row to its sampled tokens.
    pub step: Duration,
    /// How much of it rank 0 waited for other ranks.
    pub wait: Duration,
}

/// Loaded ranks that wait for plans.
pub struct Group {
    /// What rank 0 said about its load.
    pub notes: Vec<String>,
    /// What decoding reads.
    pub traffic: Traffic,
    runtime: Runtime,
    feeds: Vec<PlanFeed>,
    outcomes: Vec<Receiver<Outcome>>,
    ranks: Vec<JoinHandle<Result<(), Fault>>>,
    version: u64,
    vocab: u32,
    pages_a_slot: u32,
    prefill_rows: u32,
    sampling: SamplingParams,
    logprobs: Option<u32>,
}

impl Group {
    /// Loads all ranks and starts them.
    ///
    /// # Errors
    /// The model is refused, or does not fit.
    pub fn load(setup: &Setup<'_>) -> Result<Self, BenchError> {
        let prompt = setup.prompt.max(setup.beside);
        let positions = setup.context.saturating_add(setup.max_steps).max(prompt.unwrap_or(0)) as usize + 1;
        let slots = setup.slots as usize + usize::from(prompt.is_some());
        let pages_a_slot = KvLayout::pages_for(positions);
        let prefill_rows = PREFILL_ROWS[usize::from(setup.on_gpu) + usize::from(setup.on_gpu && setup.ranks > 1)];
        let beside = setup.beside.map_or(0, |tokens| tokens as usize + slots);
        let request = LoadRequest {
            model_dir: setup.model_dir.to_owned(),
            rank: 0,
            tensor_parallel: setup.ranks,
            threads: setup.threads,
            max_slots: slots,
            max_batch_tokens: slots.max(prefill_rows as usize).max(beside),
            kv_pages: pages_a_slot * slots,
            kv_bytes_limit: 0,
            wait_limit: WAIT_LIMIT,
            max_context: positions,
            device: if setup.on_gpu { Device::Cuda } else { Device::Cpu },
            quantization: setup.weights.filter(|format| *format != WeightFormat::Bf16),
            unlooped: false,
            measure_read_limit: false,
            draft_corpus_tokens: 0,
            vocabulary: None,
            others: Sockets::default(),
        };
        let load = |rank| load(setup, &LoadRequest { rank, ..request.clone() });
        let loaded: Vec<_> = match setup.on_gpu {
            // Each by a thread of its own, which is bound to cores near the GPU.
            true => at_once((0..setup.ranks).map(|rank| move || load(rank))),
            false => (0..setup.ranks).map(load).collect(),
        };
        let (mut decoders, streams): (Vec<_>, Vec<Streams>) =
            loaded.into_iter().collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
        let handles: Vec<_> = decoders.iter().map(|rank| rank.fabric_handle()).collect();
        // At the same time: a rank may wait for the others.
        at_once(decoders.iter_mut().map(|rank| || rank.join(&handles))).into_iter().collect::<Result<(), _>>()?;
        let shared = if setup.on_gpu { 1 } else { decoders.len() };
        let position_bytes =
            |rank: &dyn Decoder| rank.loaded().kv_bytes / (rank.loaded().kv_pages * PAGE_POSITIONS) as u64;
        let mut group = Self {
            notes: decoders[0].loaded().notes.clone(),
            traffic: Traffic {
                weight_bytes: streams.iter().take(shared).map(|streams| streams.bytes).sum(),
                phase_bytes: streams.into_iter().take(shared).flat_map(|streams| streams.by_phase).collect(),
                position_bytes: decoders.iter().take(shared).map(|rank| position_bytes(&**rank)).sum(),
            },
            runtime: tokio::runtime::Builder::new_current_thread().build().map_err(BenchError::Runtime)?,
            feeds: Vec::new(),
            outcomes: Vec::new(),
            ranks: Vec::new(),
            version: 0,
            vocab: decoders[0].loaded().vocab_size as u32,
            pages_a_slot: pages_a_slot as u32,
            prefill_rows,
            sampling: setup.sampling.clone(),
            logprobs: setup.logprobs,
        };
        for decoder in decoders {
            let (feed, source) = plan_stream();
            let (sink, out) = outcome_stream(Arc::new(Vitals::default()));
            group.feeds.push(feed);
            group.outcomes.push(out);
            group.ranks.push(std::thread::spawn(move || decoder.run(source, sink)));
        }
        Ok(group)
    }

    /// Admits a sequence of `context` tokens and computes all of them.
    ///
    /// # Errors
    /// The fault that ended a rank.
    pub fn prefill(&mut self, slot: u32, context: u32, max_tokens: u32) -> Result<(), BenchError> {
        for start in (0..context).step_by(self.prefill_rows as usize) {
            let len = self.prefill_rows.min(context - start);
            let plan = Plan { prefill: vec![PrefillChunk { slot, start, len }], ..Plan::default() };
            self.run(if start == 0 { self.admitting(plan, slot, context, max_tokens) } else { plan }, 1)?;
        }
        Ok(())
    }

    /// The plan, which also admits a sequence of `context` tokens.
    fn admitting(&self, plan: Plan, slot: u32, context: u32, max_tokens: u32) -> Plan {
        let pages = slot * self.pages_a_slot..(slot + 1) * self.pages_a_slot;
        let grants = vec![PageGrant { slot, first: 0, pages: pages.collect() }];
        Plan { admit: vec![self.admission(slot, context, max_tokens)], grants, ..plan }
    }

    /// Decodes slots `0..batch` for a step that also computes a prompt of `tokens` tokens in `slot`.
    ///
    /// # Errors
    /// The fault that ended a rank.
    pub fn decode_beside(&mut self, batch: u32, slot: u32, tokens: u32) -> Result<StepTime, BenchError> {
        let prefill = vec![PrefillChunk { slot, start: 0, len: tokens }];
        let plan = Plan { decode: (0..batch).collect(), prefill, ..Plan::default() };
        let times = self.run(self.admitting(plan, slot, tokens, 1), 1)?;
        self.release(slot)?;
        Ok(times[0])
    }

    /// Ends the sequence in a slot.
    ///
    /// # Errors
    /// The fault that ended a rank.
    pub fn release(&mut self, slot: u32) -> Result<(), BenchError> {
        self.run(Plan { release: vec![slot], ..Plan::default() }, 1).map(drop)
    }

    /// Decodes slots `0..batch` for `steps` steps.
    ///
    /// # Errors
    /// The fault that ended a rank.
    pub fn decode(&mut self, batch: u32, steps: u32) -> Result<Vec<StepTime>, BenchError> {
        self.run(Plan { decode: (0..batch).collect(), ..Plan::default() }, steps)
    }

    /// Waits until the ranks have nothing left to do of what ran before.
    ///
    /// # Errors
    /// The fault that ended a rank.
    pub fn settle(&mut self) -> Result<(), BenchError> {
        self.run(Plan::default(), 1).map(drop)
    }

    /// Ends the stream of plans and waits for the ranks.
    ///
    /// # Errors
    /// The fault that ended a rank.
    pub fn finish(mut self) -> Result<(), BenchError> {
        self.feeds.clear();
        self.join()
    }

    fn run(&mut self, plan: Plan, steps: u32) -> Result<Vec<StepTime>, BenchError> {
        self.version += 1;
        let plan = Plan { version: self.version, steps, ..plan };
        let mut delivered = true;
        for feed in &self.feeds {
            delivered &= self.runtime.block_on(feed.push(plan.clone()));
        }
        let mut times = Vec::with_capacity(steps as usize);
        for _ in 0..steps {
            // Every rank's, so that none ever waits for its outcomes to be read.
            for (rank, outcomes) in self.outcomes.iter_mut().enumerate() {
                let Some(outcome) = outcomes.blocking_recv().filter(|_| delivered) else {
                    self.feeds.clear();
                    self.join()?;
                    return Err(BenchError::Ended);
                };
                if rank == 0 {
                    times.push(StepTime { step: outcome.step_time, wait: outcome.wait_time.unwrap_or_default() });
                }
            }
        }
        Ok(times)
    }

    fn join(&mut self) -> Result<(), BenchError> {
        let ended: Vec<_> = self.ranks.drain(..).map(JoinHandle::join).collect();
        ended.into_iter().try_for_each(|rank| rank.unwrap_or(Ok(())).map_err(BenchError::from))
    }

    fn admission(&self, slot: u32, context: u32, max_tokens: u32) -> Admit {
        let vocab = u64::from(self.vocab);
        let token = |i: u32| ((u64::from(i) * 37 + u64::from(slot) * 11) % vocab) as u32;
        Admit {
            slot,
            sequence: u64::from(slot),
            tokens: (0..context).map(token).collect(),
            prompt_tokens: context,
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling: SamplingParams { seed: u64::from(slot), ..self.sampling.clone() },
            logprobs: self.logprobs,
            cache_salt: String::new(),
            grammar: None,
            token_bounds: None,
            prompt_logprobs: None,
        }
    }
}

/// What all of these return, each run by a thread of its own.
fn at_once<T: Send>(all: impl Iterator<Item = impl FnOnce() -> T + Send>) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = all.map(|one| scope.spawn(one)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic))).collect()
    })
}

/// Bytes of weights that stream through a rank in a step.
struct Streams {
    bytes: u64,
    by_phase: Vec<(Phase, u64)>,
}

fn load(setup: &Setup<'_>, request: &LoadRequest) -> Result<(Box<dyn Decoder>, Streams), BenchError> {
    if setup.on_gpu {
        let random = setup.random.as_ref().map(|config| {
            let source: Arc<dyn crate::model::source::Source + Send> = Arc::new(NormalSource::new(config, SEED));
            (config.clone(), source)
        });
        let gauge = setup.gauge.clone();
        let options =
            crate::cuda::Options { random, blocks: setup.blocks, gauge, shards: setup.shards, ..Default::default() };
        let decoder = crate::cuda::load_with(request, &options, &mut |_| ())?;
        let by_phase = Phase::ALL.into_iter().map(|phase| (phase, decoder.phase_bytes(phase))).collect();
        let streams = Streams { bytes: decoder.stream_bytes(), by_phase };
        return Ok((Box::new(decoder), streams));
    }
    let random = setup.random.as_ref().map(|config| RandomSource { config: config.clone(), seed: SEED });
    let options = crate::cpu::Options { random, ..Default::default() };
    let decoder = crate::cpu::load_with(request, &options, &mut |_| ())?;
    let streams = Streams { bytes: decoder.stream_bytes(), by_phase: Vec::new() };
    Ok((Box::new(decoder), streams))
}
