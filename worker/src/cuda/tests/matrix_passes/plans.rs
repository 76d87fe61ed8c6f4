//! Requests through the loop yield what each yields alone.

use super::{BATCH_TOKENS, llama_3b, smol, tokens};
use crate::batch::Plan;
use crate::cuda::Options;
use crate::cuda::tests::gpu::{by_sequence, gpu, yields};
use crate::cuda::tests::plans::{Request, alike, drive, plans, sharing_plans, with_drafts};
use crate::cuda::tests::wide::{load_rows, random};
use crate::decoder::{Decoder, Outcome};
use crate::sampling::SamplingParams;

/// Requests through the loop: prompts of any size beside rows that decode, more than other passes hold, some of them
/// drawn with everything that the sampler does. Each yields what it yields alone.
#[test]
fn plans_of_a_crowd_yield_what_each_request_yields_alone() {
    if !gpu() {
        return;
    }
    let config = smol();
    const CROWD: u32 = 150;
    let request = |i: u32| {
        let drawn =
            SamplingParams { temperature: 0.7 + i as f32 / 160.0, seed: u64::from(i), ..SamplingParams::greedy() };
        let sampling = match i % 5 {
            0 | 3 => SamplingParams::greedy(),
            1 => drawn,
            2 => SamplingParams { top_p: 0.9, top_k: 30, ..drawn },
            _ => SamplingParams { min_p: 0.05, repetition_penalty: 1.2, frequency_penalty: 0.3, ..drawn },
        };
        let logprobs = [None, None, Some(3)][i as usize % 3];
        Request { sampling, logprobs, ..Request::greedy(&tokens(i, 1 + (i * i % 500) as usize), 12 + i % 20) }
    };
    let run = |requests: &[Request], chunk: usize, steps: u32, eager: bool| {
        let slots = CROWD as usize;
        let decoder = load_rows(&config, random(&config), (slots, BATCH_TOKENS), false, Options::default());
        yields(decoder, plans(requests, chunk, BATCH_TOKENS, steps), requests.len(), eager)
    };
    let greedy: Vec<_> = (0..CROWD).map(|i| Request::greedy(&tokens(i, 1 + (i * 7 % 300) as usize), 20)).collect();
    for requests in [(0..CROWD).map(request).collect::<Vec<_>>(), greedy] {
        let whole = run(&requests, 512, 40, true);
        assert!(whole.iter().zip(&requests).all(|(reply, request)| reply.len() == request.max_tokens as usize));
        for (chunk, steps, eager) in [(41, 3, false), (200, 7, true)] {
            assert!(run(&requests, chunk, steps, eager) == whole, "chunks of {chunk}, plans of {steps} steps");
        }
        for index in [0, 1, 2, 4, 77, 149] {
            assert!(run(&requests[index..=index], 100, 16, true)[0] == whole[index], "request {index} alone");
        }
    }
}

/// Log-probabilities of each step show every bit: in crowds of as many rows as passes have at most that sample.
#[test]
fn rows_of_large_crowds_have_the_bits_that_they_have_alone() {
    if !gpu() {
        return;
    }
    let config = smol();
    let request =
        |i: u32| Request { logprobs: Some(8), ..Request::greedy(&tokens(i, 1 + (i * i % 60) as usize), 6 + i % 5) };
    for crowd in [256, 512] {
        let requests: Vec<_> = (0..crowd).map(request).collect();
        let run = |requests: &[Request], chunk: usize| {
            let decoder = load_rows(&config, random(&config), (requests.len(), 2048), false, Options::default());
            yields(decoder, plans(requests, chunk, 2048, 16), requests.len(), true)
        };
        let whole = run(&requests, 64);
        assert!(whole.iter().zip(&requests).all(|(reply, of)| reply.len() == of.max_tokens as usize));
        for index in [0, 7, 63, 64, 130, crowd as usize - 1] {
            assert!(run(&requests[index..=index], 64)[0] == whole[index], "request {index} of {crowd}, alone");
        }
    }
}

/// A prompt whose slot is released before it is whole, as the scheduler does where memory is short: another takes its
/// pages, then it is computed again in other chunks, and both yield what they yield alone.
#[test]
fn a_prompt_that_is_preempted_in_its_middle_yields_the_same() {
    if !gpu() {
        return;
    }
    const CHUNK: usize = 130;
    let config = smol();
    let [cut, other] = [(21, 610), (22, 333)]
        .map(|(seed, len)| Request { logprobs: Some(3), ..Request::greedy(&tokens(seed, len), 20) });
    let run = |plans: Vec<Plan>| {
        let decoder = load_rows(&config, random(&config), (4, BATCH_TOKENS), false, Options::default());
        yields(decoder, plans, 1, true).swap_remove(0)
    };
    let of = |request: &Request, chunk| plans(std::slice::from_ref(request), chunk, BATCH_TOKENS, 16);
    let [whole, others] = [&cut, &other].map(|request| run(of(request, CHUNK)));
    assert!(whole != others);
    for chunks in 1..cut.prompt.len().div_ceil(CHUNK) {
        let release = || Plan { release: vec![0], steps: 1, ..Plan::default() };
        let mut all = of(&cut, CHUNK);
        all.truncate(chunks);
        all.push(release());
        all.extend(of(&other, 64));
        all.push(release());
        all.extend(of(&cut, 77));
        (1..).zip(&mut all).for_each(|(version, plan)| plan.version = version);
        assert!(run(all) == [&others[..], &whole[..]].concat(), "released after {chunks} chunks");
    }
}

/// Requests that begin behind the pages of another, and one whose pages give way to equal ones, beside rows that
/// decode: each yields what it yields alone.
#[test]
fn sequences_that_share_pages_yield_what_they_yield_alone() {
    if !gpu() {
        return;
    }
    for config in [smol(), llama_3b()] {
        for rows in [40, BATCH_TOKENS] {
            let run = |requests: &[Request], plans| {
                let options = Options { poison: true, ..Options::default() };
                let decoder = load_rows(&config, random(&config), (7, BATCH_TOKENS), false, options);
                yields(decoder, plans, requests.len(), true)
            };
            let requests = alike(7);
            let shared = run(&requests, sharing_plans(&requests, 2, rows));
            for (request, shared) in requests.iter().zip(&shared) {
                let alone = std::slice::from_ref(request);
                assert!(run(alone, plans(alone, 64, 64, 16))[0] == *shared, "{rows} rows");
            }
        }
    }
}

/// Requests whose answers have few tokens to choose from, so that drafts hold at times, alone and in crowds.
#[test]
fn drafts_touch_no_token() {
    if !gpu() {
        return;
    }
    let config = smol();
    let request = |i: u32| {
        let few = (0..2 + i % 5).map(|j| (i * 7 + j * 31, 60.0)).collect();
        let drawn = SamplingParams { temperature: 0.8, seed: u64::from(i), ..SamplingParams::greedy() };
        let sampling = match i % 5 {
            0 => SamplingParams::greedy(),
            1 => SamplingParams { logit_bias: few, ..SamplingParams::greedy() },
            2 => SamplingParams { logit_bias: few, ..drawn },
            3 => SamplingParams { logit_bias: few, top_p: 0.9, top_k: 3, ..drawn },
            _ => SamplingParams { logit_bias: few, frequency_penalty: 0.3, ..drawn },
        };
        let logprobs = [None, None, Some(3)][i as usize % 3];
        let mut request =
            Request { sampling, logprobs, ..Request::greedy(&tokens(i, 1 + (i * i % 300) as usize), 120 + i % 90) };
        if i % 7 == 1 {
            (request.min_tokens, request.stop_tokens) = (30, vec![i * 7]);
        }
        request
    };
    for few in [1, 2, 5, 40] {
        let requests: Vec<Request> = (0..few).map(request).collect();
        let run = |each: u32, steps: u32, eager: bool| {
            let decoder = load_rows(&config, random(&config), (64, BATCH_TOKENS), false, Options::default());
            let plans = with_drafts(plans(&requests, 200, BATCH_TOKENS, steps), each);
            let outcomes = drive(move |source, sink| Box::new(decoder).run(source, sink), plans, eager);
            let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(of).sum::<usize>();
            let (drafted, steps) = (sum(Outcome::rows_drafted), sum(|outcome| usize::from(outcome.ran_step)));
            (by_sequence(outcomes, requests.len()), drafted, steps)
        };
        let (plain, _, all) = run(0, 40, false);
        for (each, steps, eager) in [(7, 40, false), (3, 100, false), (7, 5, true)] {
            let (drafting, drafted, fewer) = run(each, steps, eager);
            println!("{few} sequences, up to {each} drafts each: {fewer} steps for {all}, {drafted} tokens drafted");
            assert!(drafting == plain, "{few} sequences, {each} drafts, plans of {steps}, {eager}");
            assert!(few < 2 || drafted > 100 && (eager || few > 5 || 3 * fewer < 2 * all));
        }
    }
}
