//! What engines count, under its names: every family once, with a series for each engine.

use std::fmt::Error;
use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::engine::{Ended, EngineMetrics};
use super::names::{self, Name};

/// Engines of one server, which the label `engine` numbers from 0, as vLLM numbers those of data parallelism.
#[derive(Debug)]
pub struct Engines(Vec<Arc<EngineMetrics>>);

impl Engines {
    /// What these count.
    pub fn new(engines: impl IntoIterator<Item = Arc<EngineMetrics>>) -> Self {
        Self(engines.into_iter().collect())
    }
}

impl Collector for Engines {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        for (name, write) in FAMILIES {
            let family = name.begin(&mut encoder)?;
            let mut samples = Samples { family, engine: String::new() };
            for (index, engine) in self.0.iter().enumerate() {
                samples.engine = index.to_string();
                write(engine, &mut samples)?;
            }
        }
        Ok(())
    }
}

/// The samples of a family.
struct Samples<'a> {
    family: MetricEncoder<'a>,
    /// Whose they are.
    engine: String,
}

impl Samples<'_> {
    /// The only one of its engine.
    fn one(&mut self, metric: &impl EncodeMetric) -> Result<(), Error> {
        metric.encode(self.family.encode_family(&[("engine", self.engine.as_str())])?)
    }

    /// One of several of its engine, which a label tells apart.
    fn labelled(&mut self, label: (&str, &str), metric: &impl EncodeMetric) -> Result<(), Error> {
        metric.encode(self.family.encode_family(&[("engine", self.engine.as_str()), label])?)
    }

    /// One of each.
    fn numbered<M: EncodeMetric>(&mut self, label: &str, metrics: impl Iterator<Item = M>) -> Result<(), Error> {
        let mut numbered = metrics.enumerate();
        numbered.try_for_each(|(number, metric)| self.labelled((label, &number.to_string()), &metric))
    }
}

type Write = fn(&EngineMetrics, &mut Samples<'_>) -> Result<(), Error>;

const FAMILIES: &[(&Name, Write)] = &[
    (names::RUNNING, |of, to| to.one(&of.running)),
    (names::WAITING, |of, to| to.one(&of.waiting)),
    (names::SUCCESS, |of, to| {
        let mut ended = Ended::ALL.iter().zip(&of.ended);
        ended.try_for_each(|(how, count)| to.labelled(("finished_reason", how.word()), count))
    }),
    (names::PREEMPTIONS, |of, to| to.one(&of.preemptions)),
    (names::FIRST_TOKEN, |of, to| to.one(&of.first_token)),
    (names::INTER_TOKEN, |of, to| to.one(&of.inter_token)),
    (names::TIME_PER_TOKEN, |of, to| to.one(&of.time_per_token)),
    (names::END_TO_END, |of, to| to.one(&of.end_to_end)),
    (names::QUEUE_TIME, |of, to| to.one(&of.queue_time)),
    (names::PREFILL_TIME, |of, to| to.one(&of.prefill_time)),
    (names::DECODE_TIME, |of, to| to.one(&of.decode_time)),
    (names::INFERENCE_TIME, |of, to| to.one(&of.inference_time)),
    (names::PROMPT_TOKENS, |of, to| to.one(&of.prompt_tokens)),
    (names::GENERATION_TOKENS, |of, to| to.one(&of.generation_tokens)),
    (names::REQUEST_PROMPT_TOKENS, |of, to| to.one(&of.request_prompt_tokens)),
    (names::REQUEST_GENERATION_TOKENS, |of, to| to.one(&of.request_generation_tokens)),
    (names::CACHE_QUERIES, |of, to| to.one(&of.prefix_cache_queries)),
    (names::CACHE_HITS, |of, to| to.one(&of.prefix_cache_hits)),
    (names::DRAFTS, |of, to| to.one(&of.drafts)),
    (names::DRAFT_TOKENS, |of, to| to.one(&of.draft_tokens)),
    (names::ACCEPTED_TOKENS, |of, to| to.one(&of.accepted_tokens)),
    (names::ACCEPTED_BY_POSITION, |of, to| {
        // Positions follow each other: where none was accepted, none was behind it.
        let seen = of.accepted_by_position.iter().take_while(|accepted| accepted.get() > 0);
        to.numbered("position", seen.cloned())
    }),
    (names::KV_USAGE, |of, to| to.one(&of.kv_usage)),
    (names::CACHE_CONFIG, |of, to| {
        let (block_size, blocks) = (of.page_positions.get().to_string(), of.kv_pages.get().to_string());
        let labels = [("engine", to.engine.as_str()), ("block_size", &block_size), ("num_gpu_blocks", &blocks)];
        // Nothing is known before a group has loaded.
        if of.kv_pages.get() == 0 {
            return Ok(());
        }
        ConstGauge::new(1u64).encode(to.family.encode_family(&labels)?)
    }),
    (names::KV_PAGES, |of, to| to.one(&of.kv_pages)),
    (names::KV_PAGES_USED, |of, to| to.one(&of.kv_pages_used)),
    (names::KV_PAGES_CACHED, |of, to| to.one(&of.kv_pages_cached)),
    (names::KV_BYTES, |of, to| to.one(&of.kv_bytes)),
    (names::PLANS, |of, to| to.one(&of.plans)),
    (names::STEP_TIME, |of, to| to.one(&of.step_time)),
    (names::STEP_WAIT, |of, to| to.one(&of.step_wait)),
    (names::STEP_ROWS, |of, to| to.one(&of.step_rows)),
    (names::DECODE_ROWS, |of, to| to.one(&of.decode_rows)),
    (names::PROMPT_ROWS, |of, to| to.one(&of.prompt_rows)),
    (names::READ_BYTES, |of, to| to.one(&of.read_bytes)),
    (names::STREAM_BYTES, |of, to| to.one(&of.stream_bytes)),
    (names::RANK_STEP, |of, to| {
        to.numbered("rank", of.ranks.iter().map(|rank| ConstCounter::new(rank.step_seconds())))
    }),
    (names::RANK_WAIT, |of, to| {
        // All ranks tell, or none does.
        let waits = of.ranks.iter().map_while(|rank| rank.wait_seconds());
        to.numbered("rank", waits.map(ConstCounter::new))
    }),
    (names::RANK_READ, |of, to| to.numbered("rank", of.ranks.iter().map(|rank| ConstCounter::new(rank.read_bytes())))),
    (names::RANK_READ_LIMIT, |of, to| {
        // All ranks measure, or none does.
        let limits = of.ranks.iter().map_while(|rank| rank.read_limit());
        to.numbered("rank", limits.map(ConstGauge::new))
    }),
    (names::LOSSES, |of, to| to.one(&of.losses)),
    (names::RECOVERY, |of, to| to.one(&of.recovery)),
];
