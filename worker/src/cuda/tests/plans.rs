//! Sequences, plans that run them, and what comes of them.

use std::sync::Arc;

use crate::batch::{Admit, Drafts, Finish, PageGrant, Plan, PrefillChunk, StepTime};
use crate::decoder::{Fault, Outcome, OutcomeSink, PlanSource, Vitals, outcome_stream, plan_stream};
use crate::grammar::Vocabulary;
use crate::plan::{KvLayout, PAGE_POSITIONS};
use crate::sampling::SamplingParams;

/// Tokens of prompts are below.
pub const VOCAB: usize = 300;

/// One sequence to run.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub stop_tokens: Vec<u32>,
    pub sampling: SamplingParams,
    pub logprobs: Option<u32>,
    pub grammar: Option<Arc<str>>,
    pub prompt_logprobs: Option<u32>,
}

impl Request {
    pub fn greedy(prompt: &[u32], max_tokens: u32) -> Self {
        let sampling = SamplingParams::greedy();
        Self {
            prompt: prompt.to_vec(),
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            sampling,
            logprobs: None,
            grammar: None,
            prompt_logprobs: None,
        }
    }

    pub fn pages(&self) -> u32 {
        KvLayout::pages_for(self.prompt.len() + self.max_tokens as usize) as u32
    }

    pub fn admit(&self, slot: u32, sequence: u64) -> Admit {
        Admit {
            slot,
            sequence,
            tokens: self.prompt.clone(),
            prompt_tokens: self.prompt.len() as u32,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens,
            stop_tokens: self.stop_tokens.clone(),
            sampling: self.sampling.clone(),
            logprobs: self.logprobs,
            cache_salt: String::new(),
            grammar: self.grammar.clone(),
            token_bounds: None,
            prompt_logprobs: self.prompt_logprobs,
        }
    }
}

pub fn request(index: u32, prompt: usize, max_tokens: u32) -> Request {
    let prompt: Vec<u32> = (0..prompt as u32).map(|i| (index * 97 + i * 31) % VOCAB as u32).collect();
    Request::greedy(&prompt, max_tokens)
}

/// Plans that run all requests, a slot each: chunks of prompts mixed with decoding, then decoding in plans of `steps`.
/// Pages are dealt from the top down.
pub fn plans(requests: &[Request], chunk: usize, rows: usize, steps: u32) -> Vec<Plan> {
    let mut top: u32 = requests.iter().map(Request::pages).sum();
    let mut computed = vec![0; requests.len()];
    let mut plans: Vec<Plan> = Vec::new();
    let mut decoding = 0;
    while decoding < requests.iter().map(|request| request.max_tokens).max().unwrap_or(0) {
        let mut plan = Plan { version: plans.len() as u64 + 1, steps, ..Plan::default() };
        if plans.is_empty() {
            for (slot, request) in requests.iter().enumerate() {
                plan.admit.push(request.admit(slot as u32, slot as u64));
                top -= request.pages();
                // In two grants.
                let pages: Vec<u32> = (top..top + request.pages()).rev().collect();
                let (first, rest) = pages.split_at(1);
                for (first, pages) in [(0, first), (1, rest)] {
                    plan.grants.push(PageGrant { slot: slot as u32, first, pages: pages.to_vec() });
                }
            }
        }
        let mut room = rows - requests.len();
        for (slot, request) in requests.iter().enumerate() {
            let len = (request.prompt.len() - computed[slot]).min(chunk).min(room);
            if len > 0 {
                plan.prefill.push(PrefillChunk { slot: slot as u32, start: computed[slot] as u32, len: len as u32 });
                computed[slot] += len;
                room -= len;
            }
            if computed[slot] == request.prompt.len() {
                plan.decode.push(slot as u32);
            }
        }
        // A plan runs one step at least.
        decoding += u32::from(plan.prefill.is_empty());
        plans.push(plan);
    }
    plans
}

/// Plans that run all requests, a slot each, whose prompts begin with the same `shared` full pages. The first computes
/// them. So does the second, which takes over those of the first then and gives its own back: later ones fill these.
/// All others begin behind the pages of the first.
pub fn sharing_plans(requests: &[Request], shared: usize, rows: usize) -> Vec<Plan> {
    let (mut plans, mut free): (Vec<Plan>, Vec<u32>) = (Vec::new(), Vec::new());
    let mut next_page = 0..requests.iter().map(Request::pages).sum();
    let (mut first_pages, mut swap) = (Vec::new(), None);
    for (slot, request) in (0..).zip(requests) {
        let begun = if slot < 2 { 0 } else { shared };
        let own: Vec<u32> = free.drain(..).chain(&mut next_page).take(request.pages() as usize - begun).collect();
        let pages = [&first_pages[..begun], &own[..]].concat();
        let mut start = (begun * PAGE_POSITIONS) as u32;
        let mut plan = Plan { admit: vec![request.admit(slot, u64::from(slot))], ..Plan::default() };
        plan.grants = swap.take().into_iter().chain([PageGrant { slot, first: 0, pages: pages.clone() }]).collect();
        while start < request.prompt.len() as u32 {
            let len = (request.prompt.len() as u32 - start).min((rows - requests.len()) as u32);
            plan.prefill = vec![PrefillChunk { slot, start, len }];
            start += len;
            plan.decode = (0..slot + u32::from(start == request.prompt.len() as u32)).collect();
            plan.steps = 1;
            plan.version = plans.len() as u64 + 1;
            plans.push(std::mem::take(&mut plan));
        }
        match slot {
            0 => first_pages = pages[..shared].to_vec(),
            1 => {
                free = pages[..shared].to_vec();
                swap = Some(PageGrant { slot, first: 0, pages: first_pages.clone() });
            }
            _ => {}
        }
    }
    let longest = requests.iter().map(|request| request.max_tokens).max().unwrap_or(0);
    // A plan runs one step at least.
    for _ in 0..longest {
        let version = plans.len() as u64 + 1;
        let decode = (0..requests.len() as u32).collect();
        plans.push(Plan { version, steps: 16, decode, ..Plan::default() });
    }
    plans
}

/// The same plans, by which each sequence may draft so many tokens a step.
pub fn with_drafts(mut plans: Vec<Plan>, each: u32) -> Vec<Plan> {
    let times = [(1, 1000), (8, 1100), (32, 1200), (64, 1300)].map(|(rows, us)| StepTime { rows, us });
    plans.iter_mut().for_each(|plan| plan.drafts = Drafts { each, rows: 100, times: times.to_vec() });
    plans
}

/// Runs plans; `eager`: each as soon as there is room, else once the one before is over.
pub fn drive(
    decoder: impl FnOnce(PlanSource, OutcomeSink) -> Result<(), Fault> + Send + 'static,
    plans: Vec<Plan>,
    eager: bool,
) -> Vec<Outcome> {
    let (feed, source) = plan_stream();
    let (sink, mut out) = outcome_stream(Arc::new(Vitals::default()));
    let worker = std::thread::spawn(move || decoder(source, sink));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut outcomes: Vec<Outcome> = Vec::new();
    runtime.block_on(async {
        for plan in plans {
            let (version, steps) = (plan.version, plan.steps);
            // Outcomes are taken meanwhile: a worker that cannot report takes no plan.
            let mut push = std::pin::pin!(feed.push(plan));
            let open = loop {
                tokio::select! {
                    open = &mut push => break open,
                    Some(outcome) = out.recv() => outcomes.push(outcome),
                }
            };
            if !open {
                break;
            }
            let over =
                |outcome: &Outcome| outcome.version == version && (outcome.step + 1 == steps || !outcome.ran_step);
            while !eager && !outcomes.last().is_some_and(over) {
                // A plan whose sequences all end says nothing more.
                match tokio::time::timeout(std::time::Duration::from_millis(300), out.recv()).await {
                    Ok(Some(outcome)) => outcomes.push(outcome),
                    _ => break,
                }
            }
        }
    });
    drop(feed);
    while let Some(outcome) = out.blocking_recv() {
        outcomes.push(outcome);
    }
    worker.join().unwrap().unwrap_or_else(|fault| panic!("{fault}"));
    outcomes
}

/// Tokens of each sequence, and how it ended.
pub fn replies(outcomes: &[Outcome], sequences: usize) -> Vec<(Vec<u32>, Option<Finish>)> {
    let mut replies = vec![(Vec::new(), None); sequences];
    for token in outcomes.iter().flat_map(|outcome| &outcome.tokens) {
        let (tokens, finish) = &mut replies[token.sequence as usize];
        assert_eq!(*finish, None, "sequence {} goes on after its end", token.sequence);
        tokens.push(token.sampled.token);
        *finish = token.finish;
    }
    replies
}

/// A byte a token, then the end.
pub fn vocabulary() -> Arc<Vocabulary> {
    let words = (0..=255).map(|byte| vec![byte]).chain([b"\xff<end>".to_vec()]);
    Arc::new(Vocabulary { words: words.collect(), end: END })
}

/// The token that ends answers of [`vocabulary`].
pub const END: u32 = 256;

/// A grammar of a regular expression.
pub fn regex(regex: &str) -> Option<Arc<str>> {
    let grammar = llguidance::api::TopLevelGrammar::from_regex(regex);
    Some(serde_json::to_string(&grammar).unwrap().into())
}

/// Requests whose prompts begin with the same two pages, and go on as they like.
pub fn alike(count: usize) -> Vec<Request> {
    let lengths = [200, 180, 129, 190, 150, 300, 170];
    let requests = (0..).zip(lengths.into_iter().cycle()).take(count).map(|(index, len)| {
        let mut request = request(index, len, 20 + 9 * index);
        request.prompt[..128].copy_from_slice(&self::request(50, 128, 1).prompt);
        request
    });
    requests.collect()
}
