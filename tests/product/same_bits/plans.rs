//! The scheduler's plans against the batch that the workers run: what one room sends, the other takes, and every
//! sequence gets its tokens. Random runs with preemption, cancels and lost groups; a failure prints its seed.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::common::{Rng, mix};
use looplane_proto::worker::v1;
use looplane_server::engine::{SamplingParams, SequenceRequest};
use looplane_server::sched::{Action, Blame, Event, GroupShape, Limits, Scheduler, Standing};
use looplane_worker::batch::{Batch, Boundary, Drafting, Limits as BatchLimits};
use looplane_worker::convert;
use looplane_worker::decoder::Outcome;
use looplane_worker::plan::PAGE_POSITIONS;
use looplane_worker::sampling::Sampled;

const VOCAB: u64 = 500;
const STOP: u32 = 7;

/// Mostly as the last token has it, so that texts repeat themselves; now and then as all of them have it.
fn next_token(tokens: &[u32]) -> u32 {
    let seen = if tokens.len().is_multiple_of(37) { tokens } else { &tokens[tokens.len() - 1..] };
    (seen.iter().fold(1, |hash, &token| mix(hash ^ u64::from(token))) % VOCAB) as u32
}

fn expected(request: &SequenceRequest) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    for _ in 0..request.max_tokens {
        tokens.push(next_token(&tokens));
        if tokens.last() == Some(&STOP) {
            break;
        }
    }
    tokens.split_off(request.prompt.len())
}

fn request(rng: &mut Rng, max_context: u64) -> SequenceRequest {
    let prompt = 1 + rng.below(max_context - 1);
    let max_tokens = 1 + rng.below(max_context - prompt);
    let sampling = SamplingParams::greedy();
    SequenceRequest {
        prompt: (0..prompt).map(|_| rng.below(VOCAB) as u32).collect(),
        max_tokens: max_tokens as u32,
        min_tokens: 0,
        stop_tokens: vec![STOP],
        sampling,
        logprobs: None,
        cache_salt: Arc::default(),
        grammar: None,
        token_bounds: Arc::default(),
        prompt_logprobs: (rng.below(5) == 0).then_some(0),
    }
}

/// A group: the worker's batch with a hash in place of the model.
struct Group {
    batch: Batch,
    held: VecDeque<v1::Plan>,
    newest: u64,
    /// Of so many samples one comes late, as where a mask does; 0: none.
    late: u64,
    rng: Rng,
}

impl Group {
    fn run(&mut self) -> Option<v1::Outcome> {
        loop {
            match self.batch.boundary(self.newest) {
                Boundary::Idle => return None,
                Boundary::Step => return Some(self.step()),
                Boundary::Apply(version) => {
                    let plan = self.held.pop_front().expect("an agreed plan is held");
                    let plan = convert::plan(plan).unwrap();
                    self.batch.apply(&plan).unwrap();
                    if self.batch.step().rows.is_empty() {
                        return Some(v1::Outcome { version, ..v1::Outcome::default() });
                    }
                }
            }
        }
    }

    fn step(&mut self) -> v1::Outcome {
        let step = self.batch.step();
        let (number, rows_in_all) = (step.number, step.rows.len());
        let next = |&row: &usize| {
            if let Some(token) = self.batch.given(row) {
                return token;
            }
            let input = self.batch.row_input(row);
            next_token(&[input.prompt, input.generated].concat())
        };
        let mut tokens: Vec<u32> = step.samples.iter().map(next).collect();
        for (token, row) in tokens.iter_mut().zip(&step.samples).filter(|_| self.late > 0) {
            if self.rng.below(self.late) == 0 && self.batch.given(*row).is_none() {
                *token = Sampled::LATE;
            }
        }
        let rows = self.batch.sampled_rows();
        let sampled: Vec<Sampled> =
            tokens.iter().map(|&token| Sampled { logprob: Some(-(token as f32)), ..Sampled::none(token) }).collect();
        let mut outcome = Outcome { step: number, ran_step: true, rows: rows_in_all, ..Outcome::default() };
        let verdicts = self.batch.complete(&sampled);
        outcome.take_samples(&rows, sampled, verdicts);
        outcome.version = self.batch.version();
        convert::outcome(outcome)
    }
}

#[derive(Default)]
struct Seen {
    request: Option<SequenceRequest>,
    tokens: Vec<u32>,
    /// The prompt's tokens with their log-probabilities.
    prompt: Vec<(u32, Option<f32>)>,
    ended: bool,
    cancelled: bool,
}

/// How often sequences were computed again, and the tokens of prompts that were cached.
fn run(seed: u64) -> (usize, u64) {
    println!("seed {seed}");
    let mut rng = Rng(seed);
    let max_slots = 1 + rng.below(5) as u32;
    let max_batch_tokens = max_slots + rng.below(40) as u32;
    let max_context = 2 + rng.below(4 * PAGE_POSITIONS as u64);
    let kv_pages = max_context.div_ceil(PAGE_POSITIONS as u64) + rng.below(4);
    let steps_per_plan = 1 + rng.below(9) as u32;
    let drafts = rng.below(8) as u32;
    let limits =
        Limits { max_slots, max_batch_tokens, steps_per_plan, suspect_after: 1000, drafts, ..Limits::default() };
    let batch_limits = BatchLimits {
        max_slots: max_slots as usize,
        max_batch_tokens: max_batch_tokens as usize,
        kv_pages: kv_pages as usize,
        max_context: max_context as usize,
        vocab_size: VOCAB as usize,
        drafting: Drafting { whole_sizes: rng.below(2) == 0, extra_us: 20 },
        draft_corpus_tokens: 1 << 16,
        window: None,
    };
    let late = rng.below(2) * (2 + rng.below(20));
    let group =
        || Group { batch: Batch::new(batch_limits), held: VecDeque::new(), newest: 0, late, rng: Rng(seed ^ 0x1a7e) };
    let (kv_pages, page_positions) = (kv_pages as u32, PAGE_POSITIONS as u32);
    let shape = GroupShape { kv_pages, page_positions, max_slots, max_batch_tokens, first_version: 1 };
    let ready = || Event::GroupReady(shape);
    let mut scheduler = Scheduler::new(limits).unwrap();
    scheduler.set_step_times([(1, 1000), (64, 7000)].map(|(rows, us)| v1::StepTime { rows, us }).to_vec());
    let mut worker = group();
    let mut events = VecDeque::from([ready()]);
    let mut seen: BTreeMap<u64, Seen> = BTreeMap::new();
    let (mut admissions, mut cached) = (0, 0);
    let mut up = false;
    let sequences = 1 + rng.below(12);
    for round in 0.. {
        assert!(round < 100_000, "no end");
        let arrived = seen.len() as u64;
        if up && arrived < sequences && rng.below(4) == 0 {
            let mut request = request(&mut rng, max_context);
            // Some begin as an earlier one did, and its answer.
            if arrived > 0 && rng.below(2) == 0 {
                let earlier = &seen[&(1 + rng.below(arrived))];
                let tokens = [&earlier.request.as_ref().unwrap().prompt[..], &earlier.tokens].concat();
                let shared = tokens.len().min(request.prompt.len());
                request.prompt[..shared].copy_from_slice(&tokens[..shared]);
            }
            let number = arrived + 1;
            seen.insert(number, Seen { request: Some(request.clone()), ..Seen::default() });
            assert_eq!(scheduler.submit(vec![request], &Standing::default()), Ok(number..number + 1));
        }
        if arrived > 0 && rng.below(400) == 0 {
            let sequence = 1 + rng.below(arrived);
            let seen = seen.get_mut(&sequence).unwrap();
            seen.cancelled |= !seen.ended;
            events.push_back(Event::Cancel { sequence });
        }
        let mut actions = Vec::new();
        if up && rng.below(300) == 0 {
            events.retain(|event| !matches!(event, Event::Outcome(_)));
            assert_eq!(scheduler.group_lost(&mut actions), Blame::Nobody);
            events.push_back(ready());
            worker = group();
        }
        up = true;
        while let Some(event) = events.pop_front() {
            scheduler.apply(event, &mut actions);
        }
        for action in actions {
            match action {
                Action::Prompt { sequence, cached_tokens, logprobs } => {
                    cached += u64::from(cached_tokens);
                    let told = logprobs.iter().map(|token| (token.id, token.logprob));
                    seen.get_mut(&sequence).unwrap().prompt = told.collect();
                }
                Action::Token { sequence, token } => seen.get_mut(&sequence).unwrap().tokens.push(token.id),
                Action::Finished { sequence, .. } => seen.get_mut(&sequence).unwrap().ended = true,
                other => panic!("{other:?}"),
            }
        }
        while let Some(plan) = scheduler.next_plan() {
            admissions += plan.admit.len();
            worker.newest = plan.version;
            worker.held.push_back(plan);
        }
        events.extend((0..rng.below(4)).filter_map(|_| worker.run()).map(Event::Outcome));
        if seen.len() as u64 == sequences && events.is_empty() && scheduler.is_idle() {
            break;
        }
    }
    for (sequence, seen) in &seen {
        let request = seen.request.as_ref().unwrap();
        let scored = request.prompt_logprobs.is_some() && !seen.tokens.is_empty();
        let told = request.prompt[1..].iter().map(|&token| (token, Some(-(token as f32)))).filter(|_| scored);
        assert_eq!(seen.prompt, told.collect::<Vec<_>>(), "prompt of sequence {sequence}");
        let expected = expected(request);
        let whole = seen.ended && seen.tokens == expected;
        assert!(
            whole || seen.cancelled && expected.starts_with(&seen.tokens),
            "sequence {sequence}: {:?}",
            seen.tokens
        );
    }
    (admissions.saturating_sub(seen.len()), cached)
}

#[test]
fn the_batch_takes_every_plan() {
    let (again, cached): (Vec<usize>, Vec<u64>) = (0..200).map(run).unzip();
    let (again, cached): (usize, u64) = (again.iter().sum(), cached.iter().sum());
    assert!(again > 100, "only {again} sequences were computed again");
    assert!(cached > 5000, "only {cached} tokens were cached");
}
