//! The loop against a model that is nothing but its page table: what a row finds in the pages of its sequence decides
//! the next token, so that a wrong page, position, row or order shows.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::plans::{END, Request, VOCAB, alike, drive, plans, regex, replies, request, sharing_plans, vocabulary};
use crate::batch::{Batch, Drafting, Drafts, Finish, Limits, PageGrant, Plan, PrefillChunk, Slot, StepTime};
use crate::cuda::kernels::items::Bounds;
use crate::cuda::kernels::launch::{NO_TOKEN, ROW_SAMPLE, Row};
use crate::cuda::kernels::variants::{Attention, Width};
use crate::cuda::launches::looped_decoder::{Draws, Launcher, LoopedDecoder};
use crate::cuda::launches::passes::Passes;
use crate::decoder::{Fault, Outcome};
use crate::grammar::Grammars;
use crate::plan::{KvLayout, PAGE_POSITIONS};
use crate::sampling::{Allowed, Sampled};

const CONTEXT: usize = 512;
const SLOTS: usize = 12;
const BATCH_TOKENS: usize = 160;

/// Kernels, small ones so that a step takes many passes.
const WIDTHS: [Width; 3] = [Width::fixed(1, 10), Width::fixed(4, 12), Width::fixed(8, 16)];
/// The same with matrix passes, in which only half of the sequences have room.
const MATRIX_WIDTHS: [Width; 3] = [Width::fixed(1, 10), Width::fixed(4, 12), MATRIX];
const MATRIX: Width = Width { block_us: 9, bounds: Some(BOUNDS), ..Width::fixed(50, 10) };
const BOUNDS: Bounds = Bounds { samples: SLOTS / 2, spans: 0, window: None };

/// What became of a launch, for tests to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Launched {
    rows: usize,
    steps: u32,
    run: u32,
    sampled: bool,
    fed: bool,
}

struct FakeLaunch {
    rows: Vec<Row>,
    /// Whether each step is given rows, in place of those of the step before.
    fed: bool,
    steps: u32,
    sampled: bool,
    /// Its masks are yet to come.
    masked: bool,
    /// By step and row.
    tokens: Vec<Vec<u32>>,
}

/// The token behind so many.
type Model = fn(&[u32]) -> u32;

struct Fake {
    model: Model,
    /// Whether sequences of slots want what the decoder does not give.
    choosy: Vec<bool>,
    penalised: Vec<bool>,
    tables: Vec<Vec<u32>>,
    /// Tokens by page and position: what K and V are here.
    memory: Vec<u32>,
    launches: Vec<FakeLaunch>,
    finished: bool,
    last_step: u32,
    widths: &'static [Width],
    passes: Passes,
    log: Arc<Mutex<Vec<Launched>>>,
}

/// Nothing comes twice.
fn next_token(tokens: &[u32]) -> u32 {
    let add = |hash: u64, token: &u32| (hash ^ u64::from(*token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    (tokens.iter().fold(7, add) >> 20) as u32 % VOCAB as u32
}

/// A text that repeats itself, but for a token here and there.
fn next_of_period(tokens: &[u32]) -> u32 {
    let skips = u32::from(next_token(tokens).is_multiple_of(19));
    (tokens[tokens.len() - 1] + 1 + skips) % 11
}

/// Rows of a sequence are next to each other, positions ascending, and know the first of them.
fn check_rows(rows: &[Row]) {
    for (index, row) in rows.iter().enumerate() {
        let (back, first) = (row.position - row.first_position, row.first_row as usize);
        let of_first = (rows[first].slot, rows[first].position);
        assert_eq!((index - first, of_first), (back as usize, (row.slot, row.first_position)));
        assert!(first == 0 || rows[first - 1].slot != row.slot);
    }
}

impl Fake {
    fn new(model: Model, pages: usize, widths: &'static [Width], log: Arc<Mutex<Vec<Launched>>>) -> Self {
        Self {
            model,
            choosy: vec![false; SLOTS],
            penalised: vec![false; SLOTS],
            tables: vec![vec![u32::MAX; KvLayout::pages_for(CONTEXT)]; SLOTS],
            memory: vec![u32::MAX; pages * PAGE_POSITIONS],
            launches: Vec::new(),
            finished: true,
            last_step: 0,
            widths,
            passes: Passes::new(widths, BATCH_TOKENS, Attention { ranks: 1, queries_per_kv: 4, page_ns: 1 }),
            log,
        }
    }

    fn place(&self, slot: u32, position: u32) -> usize {
        let (page, within) = (position as usize / PAGE_POSITIONS, position as usize % PAGE_POSITIONS);
        self.tables[slot as usize][page] as usize * PAGE_POSITIONS + within
    }

    fn run_step(&mut self, launch: usize) {
        let of = &self.launches[launch];
        let (ran, rows) = (of.tokens.len() as u32, of.rows.clone());
        let step = if of.fed { 0 } else { ran };
        let active = |row: &Row| step == 0 || row.position + step <= row.last_position;
        let token = |this: &Self, index: usize, row: &Row| match step {
            0 => row.token,
            _ => this.launches[launch].tokens[ran as usize - 1][index],
        };
        for (index, row) in rows.iter().enumerate().filter(|(_, row)| active(row)) {
            let place = self.place(row.slot, row.position + step);
            self.memory[place] = token(self, index, row);
        }
        let tokens = rows.iter().map(|row| {
            if !active(row) || row.flags & ROW_SAMPLE == 0 {
                return NO_TOKEN;
            }
            let seen = (0..=row.position + step).map(|position| self.memory[self.place(row.slot, position)]);
            (self.model)(&seen.collect::<Vec<_>>())
        });
        let tokens = tokens.collect();
        self.launches[launch].tokens.push(tokens);
    }
}

impl Launcher for Fake {
    fn passes(&self) -> &Passes {
        &self.passes
    }

    fn most_steps(&self) -> u32 {
        10
    }

    fn write_pages(&mut self, slot: u32, first: usize, pages: &[u32]) -> Result<(), Fault> {
        assert!(self.finished, "pages change under a launch");
        self.tables[slot as usize][first..first + pages.len()].copy_from_slice(pages);
        Ok(())
    }

    fn agree(&mut self, newest: u64) -> Result<u64, Fault> {
        assert!(self.finished, "ranks agree under a launch");
        Ok(newest)
    }

    fn all_know(&mut self, known: u64) -> Result<u64, Fault> {
        assert!(!self.finished, "ranks agree on masks while the decoder computes");
        Ok(known)
    }

    fn draw(&mut self, allowed: &[(usize, Allowed<'_>)]) -> Result<(), Fault> {
        let launch = self.launches.last_mut().expect("a launch");
        assert!(std::mem::take(&mut launch.masked), "masks of a launch without");
        for &(row, allowed) in allowed {
            let drawn = &mut launch.tokens[0][row];
            let has = |token: &u32| match allowed {
                Allowed::These(mask) => mask[*token as usize / 32] >> (token % 32) & 1 == 1,
                Allowed::Only(only) => only == *token,
                other => panic!("{other:?} is nothing to draw by"),
            };
            *drawn = (*drawn..VOCAB as u32).chain(0..*drawn).find(has).expect("a mask allows a token");
        }
        Ok(())
    }

    fn admit(&mut self, slot: u32, sequence: &Slot) -> Result<(), Fault> {
        assert!(self.finished, "a slot changes under a launch");
        self.penalised[slot as usize] = sequence.sampling().has_penalties();
        self.choosy[slot as usize] =
            sequence.logprobs().or(sequence.prompt_logprobs()).is_some() || sequence.sampling().temperature > 0.0;
        Ok(())
    }

    fn held(&mut self, slot: u32, tokens: &[u32]) -> Result<(), Fault> {
        assert!(self.finished && self.penalised[slot as usize] && !tokens.is_empty(), "{slot} counts {tokens:?}");
        Ok(())
    }

    /// With matrix passes; without, as if there were others.
    fn is_alone(&self) -> bool {
        self.widths[2].bounds.is_some()
    }

    fn feeds(&self, rows: &[Row]) -> bool {
        rows.len() <= self.widths[1].columns && rows.len() > self.widths[0].columns
    }

    fn launch_fed(&mut self, rows: &[Row], steps: u32) -> Result<usize, Fault> {
        assert!(self.finished && self.feeds(rows) && (1..=10).contains(&steps), "{} rows, {steps} steps", rows.len());
        self.launch(rows, 1, Draws::Decoder)?;
        self.last_step = steps;
        let launch = &mut self.launches[0];
        (launch.fed, launch.steps) = (true, steps);
        Ok(0)
    }

    fn feed(&mut self, launch: usize, step: u32, rows: &[Row]) {
        let of = &mut self.launches[launch];
        assert!(of.fed && of.tokens.len() == step as usize && step < of.steps, "step {step} has no tokens before it");
        check_rows(rows);
        of.rows = rows.to_vec();
        match rows {
            [] => self.last_step = step,
            _ if step < self.last_step => self.run_step(launch),
            _ => {}
        }
    }

    fn launch(&mut self, rows: &[Row], steps: u32, draws: Draws) -> Result<usize, Fault> {
        let (sampled, masked) = (draws != Draws::Decoder, draws == Draws::Masked);
        assert!(!masked || steps == 1, "masks are of one step");
        let samples = rows.iter().any(|row| row.flags & ROW_SAMPLE != 0);
        let mut held = self.widths.iter().filter(|width| rows.len() <= width.columns);
        let width = held.next().unwrap_or_else(|| panic!("no kernel for {} rows", rows.len()));
        assert!(!rows.is_empty() && (1..=10).contains(&steps), "{} rows, {steps} steps", rows.len());
        let room = width.bounds.map_or(rows.len(), |bounds| bounds.samples);
        assert!(rows.iter().filter(|row| row.flags & ROW_SAMPLE != 0).count() <= room, "{width:?}");
        check_rows(rows);
        if std::mem::replace(&mut self.finished, false) {
            self.launches.clear();
            // Rows of matrix passes do not idle: the first that ends is the end of all.
            let left = rows.iter().map(|row| row.last_position - row.position + 1).min().filter(|_| samples);
            self.last_step = steps.min(left.filter(|_| width.bounds.is_some()).unwrap_or(steps));
        }
        assert!(steps == 1 || self.launches.is_empty(), "several steps beside another launch");
        let choosy = rows.iter().any(|row| row.flags & ROW_SAMPLE != 0 && self.choosy[row.slot as usize]);
        assert!(sampled || !choosy, "the decoder draws only the largest logit");
        self.launches.push(FakeLaunch { rows: rows.to_vec(), fed: false, steps, sampled, masked, tokens: Vec::new() });
        if steps == 1 {
            self.run_step(self.launches.len() - 1);
        }
        Ok(self.launches.len() - 1)
    }

    fn launch_pair(&mut self, pair: [(&[Row], Draws); 2]) -> Result<usize, Fault> {
        assert!(self.passes.pair(pair[0].0.len(), pair[1].0.len()) && pair.iter().all(|of| of.1 != Draws::Masked));
        for (rows, draws) in pair {
            self.launch(rows, 1, draws)?;
        }
        Ok(self.launches.len() - 1)
    }

    fn wait_step(&mut self, launch: usize, step: u32, superseded: &dyn Fn() -> bool) -> Result<bool, Fault> {
        assert_eq!(launch + 1, self.launches.len(), "launches before the last are under way");
        if superseded() {
            self.stop();
        }
        if step >= self.last_step {
            return Ok(false);
        }
        while self.launches[launch].tokens.len() <= step as usize {
            assert!(!self.launches[launch].fed, "nobody feeds step {step}");
            self.run_step(launch);
        }
        Ok(true)
    }

    fn stop(&mut self) {
        self.last_step = self.last_step.min(self.launches[0].tokens.len() as u32 + 2);
    }

    fn finish(&mut self) -> Result<(), Fault> {
        assert!(self.launches.iter().all(|of| !of.masked), "masks never came");
        let run = |of: &FakeLaunch| of.tokens.len() as u32;
        // Steps that nobody waits for write to memory all the same.
        while self.launches[0].steps > 1 && !self.launches[0].fed && run(&self.launches[0]) < self.last_step {
            self.run_step(0);
        }
        let launched = self.launches.iter().map(|of| Launched {
            rows: of.rows.len(),
            steps: of.steps,
            run: run(of),
            sampled: of.sampled,
            fed: of.fed,
        });
        self.log.lock().unwrap().extend(launched);
        self.finished = true;
        Ok(())
    }

    fn sampled(&self, launch: usize, step: u32, column: usize, logprobs: Option<u32>) -> Sampled {
        let of = &self.launches[launch];
        assert!(of.sampled || logprobs.is_none(), "the decoder gives no log-probabilities");
        let token = of.tokens[step as usize][column];
        Sampled { token, logprob: logprobs.map(|_| -(token as f32)), top: Vec::new() }
    }
}

/// What a sequence has to yield.
fn expected(request: &Request) -> (Vec<u32>, Option<Finish>) {
    expected_of(next_token, request)
}

fn expected_of(model: Model, request: &Request) -> (Vec<u32>, Option<Finish>) {
    let mut tokens = request.prompt.clone();
    loop {
        let next = model(&tokens);
        tokens.push(next);
        let count = (tokens.len() - request.prompt.len()) as u32;
        let output = || tokens[request.prompt.len()..].to_vec();
        if count > request.min_tokens && request.stop_tokens.contains(&next) {
            return (output(), Some(Finish::Stop));
        }
        if count == request.max_tokens {
            return (output(), Some(Finish::Length));
        }
    }
}

fn run(requests: &[Request], plans: Vec<Plan>, eager: bool) -> (Vec<Outcome>, Vec<Launched>) {
    run_with(&WIDTHS, requests, plans, eager)
}

fn run_with(
    widths: &'static [Width],
    requests: &[Request],
    plans: Vec<Plan>,
    eager: bool,
) -> (Vec<Outcome>, Vec<Launched>) {
    run_model(next_token, widths, requests, plans, eager)
}

fn run_model(
    model: Model,
    widths: &'static [Width],
    requests: &[Request],
    plans: Vec<Plan>,
    eager: bool,
) -> (Vec<Outcome>, Vec<Launched>) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let pages: u32 = requests.iter().map(Request::pages).sum();
    let limits = Limits {
        max_slots: SLOTS,
        max_batch_tokens: BATCH_TOKENS,
        kv_pages: pages as usize,
        max_context: CONTEXT,
        vocab_size: VOCAB,
        drafting: Drafting { whole_sizes: true, extra_us: 1 },
        draft_corpus_tokens: 1 << 12,
        window: None,
    };
    let launcher = Fake::new(model, pages as usize, widths, log.clone());
    let grammars = Grammars::new(Some(vocabulary()), VOCAB, SLOTS, 1);
    let decoder = LoopedDecoder {
        launcher,
        batch: Batch::new(limits),
        grammars,
        rank: 0,
        since_drafts: u32::MAX,
        masked_step: Duration::ZERO,
    };
    let outcomes = drive(move |source, sink| decoder.run(source, &sink), plans, eager);
    let log = log.lock().unwrap().clone();
    (outcomes, log)
}

/// Beside others, in whatever chunks and passes, with and without drafts.
#[test]
fn sequences_that_grammars_hold_yield_what_these_allow_and_others_what_they_do_alone() {
    let mut requests: Vec<_> = (0..SLOTS as u32).map(|i| request(i, 1 + (i as usize * 29) % 90, 60 + i * 7)).collect();
    for (slot, grammar) in [(1, "([a-f]{3}-)+"), (4, "[0-9]{40}"), (5, "(ab|cd)*"), (11, ".*")] {
        requests[slot].grammar = regex(grammar);
        requests[slot].stop_tokens = vec![END];
    }
    requests[5].logprobs = Some(2);
    let mut held = None;
    for widths in [&WIDTHS[..], &MATRIX_WIDTHS] {
        for (chunk, steps, eager, each) in [(64, 40, false, 0), (30, 50, true, 7), (7, 4, true, 7)] {
            let mut plans = plans(&requests, chunk, BATCH_TOKENS, steps);
            // Late rows take more steps.
            plans.last_mut().unwrap().steps = 1000;
            let times: Vec<_> = [(1, 10), (160, 100)].map(|(rows, us)| StepTime { rows, us }).into();
            plans.iter_mut().for_each(|plan| plan.drafts = Drafts { each, rows: 100, times: times.clone() });
            let (outcomes, _) = run_model(next_of_period, widths, &requests, plans, eager);
            let yielded: Vec<_> = replies(&outcomes, SLOTS);
            for (slot, reply) in yielded.iter().enumerate().filter(|(slot, _)| requests[*slot].grammar.is_none()) {
                assert_eq!(*reply, expected_of(next_of_period, &requests[slot]), "slot {slot}");
            }
            let of = |slot: usize| yielded[slot].0.clone();
            let (threes, digits, pairs) = (of(1), of(4), of(5));
            assert!(threes.iter().enumerate().all(|(at, token)| (at % 4 == 3) == (*token == u32::from(b'-'))));
            assert_eq!((digits.len(), digits[40]), (41, END), "{digits:?}");
            assert!(pairs.iter().all(|token| *token == END || (b'a'..=b'd').any(|byte| u32::from(byte) == *token)));
            let all = [threes, digits, pairs, of(11)];
            assert_eq!(held.get_or_insert_with(|| all.clone()), &all, "{} widths, chunks of {chunk}", widths.len());
        }
    }
}

/// Several sequences, alone and in crowds, of which some have log-probabilities, stops or penalties.
#[test]
fn drafts_change_no_token_but_the_number_of_steps() {
    let mut requests: Vec<_> = (0..SLOTS as u32).map(|i| request(i, 1 + (i as usize * 29) % 90, 60 + i * 7)).collect();
    requests[2].logprobs = Some(3);
    requests[3].stop_tokens = vec![expected_of(next_of_period, &requests[3]).0[40]];
    requests[3].min_tokens = 30;
    requests[4].sampling.frequency_penalty = 0.5;
    requests[5].max_tokens = 1;
    let steps_of = |outcomes: &[Outcome]| outcomes.iter().filter(|outcome| outcome.ran_step).count();
    for (few, widths) in [1, 3, SLOTS].into_iter().flat_map(|few| [(few, &WIDTHS[..]), (few, &MATRIX_WIDTHS)]) {
        for (chunk, steps, eager) in [(64, 40, false), (30, 50, true), (7, 4, true)] {
            let requests = &requests[SLOTS - few..];
            let mut plans = plans(requests, chunk, BATCH_TOKENS, steps);
            let plain = run_model(next_of_period, widths, requests, plans.clone(), eager);
            let times = [(1, 10), (4, 12), (8, 16), (50, 40), (160, 100)].map(|(rows, us)| StepTime { rows, us });
            plans.iter_mut().for_each(|plan| plan.drafts = Drafts { each: 7, rows: 100, times: times.to_vec() });
            let (outcomes, log) = run_model(next_of_period, widths, requests, plans, eager);
            let expected: Vec<_> = requests.iter().map(|request| expected_of(next_of_period, request)).collect();
            assert_eq!(replies(&outcomes, few), expected, "{few} sequences, plans of {steps}, {eager}");
            let (drafted, fewer) = (outcomes.iter().map(Outcome::rows_drafted).sum::<usize>(), steps_of(&outcomes));
            assert!(drafted > 100, "{drafted} drafted tokens");
            if !eager {
                assert!(5 * fewer < 4 * steps_of(&plain.0), "{few}: {fewer} steps for {}", steps_of(&plain.0));
            }
            if steps > 10 && few == 1 {
                assert!(
                    log.iter().any(|of| !of.fed && of.run > 1) && log.iter().any(|of| of.fed && (eager || of.run > 1)),
                    "steps share launches, without drafts and with: {log:?}"
                );
            }
        }
    }
}

#[test]
fn every_sequence_yields_its_tokens_whatever_the_plans() {
    let mut requests: Vec<_> = (0..SLOTS as u32).map(|i| request(i, 1 + (i as usize * 29) % 150, 5 + i * 7)).collect();
    // A stop token that comes, one that may not yet be drawn, and log-probabilities.
    requests[3].stop_tokens = vec![expected(&requests[3]).0[4]];
    requests[5].logprobs = Some(3);
    requests[7].max_tokens = 1;
    let plans_of = [(7, 4, true), (64, 16, false), (1, 1, true), (30, 50, true)];
    for (few, widths) in [1, 3, 6, SLOTS].into_iter().flat_map(|few| [(few, &WIDTHS[..]), (few, &MATRIX_WIDTHS)]) {
        for (chunk, steps, eager) in plans_of {
            let few = &requests[..few];
            let (outcomes, _) = run_with(widths, few, plans(few, chunk, BATCH_TOKENS, steps), eager);
            let expected: Vec<_> = few.iter().map(expected).collect();
            assert_eq!(replies(&outcomes, few.len()), expected, "{} by {chunk}, plans of {steps}, {eager}", few.len());
            let mut last = (0, 0);
            for outcome in &outcomes {
                let this = (outcome.version, outcome.step);
                assert!(this == (last.0 + 1, 0) || this == (last.0, last.1 + 1), "{this:?} after {last:?}");
                last = this;
            }
        }
    }
}

#[test]
fn decoding_is_one_launch_whoever_draws() {
    let alone = [request(1, 20, 30)];
    let (_, launched) = run(&alone, plans(&alone, 64, BATCH_TOKENS, 40), false);
    // 20 prompt tokens in three launches; the 29 tokens that follow in launches of up to ten steps.
    let prompt = launched.iter().take(3).map(|of| (of.rows, of.steps)).collect::<Vec<_>>();
    assert_eq!(prompt, [(8, 1), (8, 1), (4, 1)]);
    let decode: Vec<_> = launched[3..].iter().map(|of| (of.rows, of.run)).collect();
    assert_eq!(decode, [(1, 10), (1, 10), (1, 9)]);
    assert!(launched.iter().all(|of| !of.sampled), "{launched:?}");

    let mut suppressed = alone.clone();
    suppressed[0].stop_tokens = vec![299];
    suppressed[0].min_tokens = 3;
    let (outcomes, launched) = run(&suppressed, plans(&suppressed, 64, BATCH_TOKENS, 40), false);
    assert_eq!(replies(&outcomes, 1), [expected(&suppressed[0])]);
    // The first three tokens may not be a stop token: the sampler draws, in as few launches. The first is the prompt's
    // last row's.
    let decode: Vec<_> = launched[2..].iter().take(3).map(|of| (of.run, of.sampled)).collect();
    assert_eq!(decode, [(1, true), (10, true), (10, false)]);

    let mut asked = [alone[0].clone(), request(2, 5, 30)];
    asked[1].logprobs = Some(2);
    let (outcomes, launched) = run(&asked, plans(&asked, 64, BATCH_TOKENS, 40), false);
    assert!(launched.iter().any(|of| of.rows == 2 && of.sampled && of.run == 10), "{launched:?}");
    for token in outcomes.iter().flat_map(|outcome| &outcome.tokens) {
        let logprob = (token.sequence == 1).then_some(-(token.sampled.token as f32));
        assert_eq!(token.sampled.logprob, logprob);
    }
}

#[test]
fn sequences_read_the_pages_of_others() {
    let requests = alike(7);
    for (widths, eager) in [(&WIDTHS, true), (&WIDTHS, false), (&MATRIX_WIDTHS, true)] {
        let plans = sharing_plans(&requests, 2, BATCH_TOKENS);
        let filled = |plan: &Plan| plan.grants.iter().any(|grant| grant.slot == 2 && grant.pages[2..].contains(&4));
        assert!(plans.iter().any(filled), "a page that was given back is filled by another");
        let (outcomes, _) = run_with(widths, &requests, plans, eager);
        assert_eq!(replies(&outcomes, 7), requests.iter().map(expected).collect::<Vec<_>>());
    }
}

#[test]
fn a_newer_plan_ends_a_launch_and_a_slot_changes_hands() {
    let requests = [request(1, 10, 60), request(2, 90, 20), request(3, 70, 30)];
    let mut all = plans(&requests[..2], 64, BATCH_TOKENS, 16);
    all.truncate(6);
    // Slot 0 is cancelled, and its pages and one of its own go to the next sequence, in another order.
    let held: Vec<u32> =
        all[0].grants.iter().filter(|grant| grant.slot == 0).flat_map(|grant| grant.pages.clone()).collect();
    let pages: Vec<u32> = held.iter().rev().copied().collect();
    assert_eq!((pages.len(), requests[2].pages()), (2, 2));
    let mut version = all.len() as u64;
    let mut next = |plan: Plan| {
        version += 1;
        Plan { version, steps: 16, ..plan }
    };
    all.push(next(Plan {
        release: vec![0],
        admit: vec![requests[2].admit(0, 2)],
        grants: vec![PageGrant { slot: 0, first: 0, pages }],
        prefill: vec![PrefillChunk { slot: 0, start: 0, len: 60 }],
        decode: vec![1],
        ..Plan::default()
    }));
    all.push(next(Plan {
        prefill: vec![PrefillChunk { slot: 0, start: 60, len: 10 }],
        decode: vec![0, 1],
        ..Plan::default()
    }));
    for _ in 0..40 {
        all.push(next(Plan { decode: vec![0, 1], ..Plan::default() }));
    }
    for eager in [true, false] {
        let (outcomes, launched) = run(&requests, all.clone(), eager);
        let got = replies(&outcomes, 3);
        let cancelled = expected(&requests[0]).0;
        assert_eq!(got[0].0, cancelled[..got[0].0.len()]);
        assert_eq!(got[0].1.is_none(), eager, "cancelled before its end");
        assert_eq!(got[1..], [expected(&requests[1]), expected(&requests[2])]);
        if eager {
            // Asked while the first step runs.
            assert!(launched.iter().any(|of| of.steps > 3 && of.run == 2), "none was stopped: {launched:?}");
        }
    }
}
