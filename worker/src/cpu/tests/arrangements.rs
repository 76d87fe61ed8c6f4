//! Same bits: whatever the group size, threads, chunks and neighbours.

use std::path::Path;

use super::group::{Arrangement, Reply, Request, fixture, run};
use crate::cpu::Isa;
use crate::model::source::RandomSource;
use crate::sampling::SamplingParams;

const MODELS: [&str; 7] =
    ["llama-mha16", "llama-gqa", "qwen2-bias", "mistral-window", "llama-tied-fp8", "tiny-awq", "tiny-fp8-blocks"];

/// Prompts of many lengths, on both sides of pages and windows; greedy and sampled.
fn requests(count: usize) -> Vec<Request> {
    let lengths = [1, 3, 130, 17, 64, 65, 8, 31, 200, 2, 5, 63, 33, 16, 128, 90];
    let tokens = |i: usize, len: usize| (0..len).map(|j| ((i * 131 + j * j * 7 + j * 29) % 768) as u32).collect();
    let sampled = |i: usize| SamplingParams {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        seed: i as u64,
        ..SamplingParams::greedy()
    };
    (0..count)
        .map(|i| Request {
            tokens: tokens(i, lengths[i % lengths.len()]),
            max_tokens: 6,
            sampling: if i % 3 == 1 { sampled(i) } else { SamplingParams::greedy() },
        })
        .collect()
}

fn replies(model: &Path, arrangement: Arrangement) -> Vec<Reply> {
    let replies = run(model, &arrangement, &requests(9));
    assert!(replies.iter().all(|reply| reply.tokens.len() == 6 && reply.logits.len() == 6));
    replies
}

#[test]
fn group_sizes_give_the_same_bits() {
    for model in MODELS.map(fixture) {
        let alone = replies(&model, Arrangement::default());
        for tensor_parallel in [2, 4, 8, 16] {
            let config = crate::model::ModelConfig::from_dir(&model).unwrap();
            if crate::plan::ModelPlan::new(&config, tensor_parallel).is_err() {
                continue;
            }
            let group = replies(&model, Arrangement { tensor_parallel, ..Arrangement::default() });
            assert!(group == alone, "{model:?} on {tensor_parallel} ranks");
        }
    }
}

#[test]
fn odd_dimensions_give_the_same_bits() {
    // A hidden size that is no multiple of a slice, leaves of 25 columns, sixteen queries for one KV head, and a
    // vocabulary that leaves most shards nothing but padding.
    let mut config = crate::plan::tests::config(16, 1, 400, 20);
    (config.hidden_size, config.head_dim) = (208, 16);
    let random = Some(RandomSource { config, seed: 7 });
    let requests = requests(5).into_iter().map(|mut request| {
        request.tokens.iter_mut().for_each(|token| *token %= 20);
        request
    });
    let requests: Vec<_> = requests.collect();
    let alone = Arrangement { random, ..Arrangement::default() };
    let expected = run(Path::new("random"), &alone, &requests);
    assert!(expected.iter().all(|reply| reply.tokens.len() == 6));
    for (tensor_parallel, threads, chunk) in [(1, 3, 7), (2, 1, 512), (4, 2, 16), (16, 1, 512)] {
        let group = Arrangement { tensor_parallel, threads, chunk, ..alone.clone() };
        let replies = run(Path::new("random"), &group, &requests);
        for (reply, expected) in replies.iter().zip(&expected) {
            assert_eq!((&reply.tokens, &reply.logprobs), (&expected.tokens, &expected.logprobs), "{group:?}");
            // The logits of padding, of which a group has as many, are looked at by nobody.
            let real = |reply: &Reply| reply.logits.iter().map(|row| row[..20].to_vec()).collect::<Vec<_>>();
            assert!(real(reply) == real(expected), "{group:?}");
        }
    }
}

#[test]
fn leaves_in_another_order_are_noticed() {
    let model = fixture("llama-mha16");
    let alone = replies(&model, Arrangement::default());
    let swapped = Arrangement { tensor_parallel: 4, swap_leaves: true, ..Arrangement::default() };
    assert!(replies(&model, swapped) != alone);
}

#[test]
fn threads_give_the_same_bits() {
    for model in MODELS.map(fixture) {
        let one = replies(&model, Arrangement::default());
        for (threads, tensor_parallel) in [(2, 1), (5, 1), (3, 2)] {
            let more = replies(&model, Arrangement { threads, tensor_parallel, ..Arrangement::default() });
            assert!(more == one, "{model:?} with {threads} threads on {tensor_parallel} ranks");
        }
    }
}

#[test]
fn chunks_give_the_same_bits() {
    for model in MODELS.map(fixture) {
        let whole = replies(&model, Arrangement::default());
        for chunk in [1, 7, 16, 64] {
            assert!(
                replies(&model, Arrangement { chunk, ..Arrangement::default() }) == whole,
                "{model:?} in chunks of {chunk}"
            );
        }
    }
}

#[test]
fn neighbours_in_the_batch_give_the_same_bits() {
    for model in MODELS.map(fixture) {
        let alone = run(&model, &Arrangement { slots: 1, ..Arrangement::default() }, &requests(9));
        for slots in [2, 3, 9] {
            let together = replies(&model, Arrangement { slots, ..Arrangement::default() });
            assert!(together == alone, "{model:?} in batches of {slots}");
        }
        let many = run(&model, &Arrangement { slots: 64, chunk: 7, ..Arrangement::default() }, &requests(64));
        assert!(many[..9] == alone, "{model:?} in a batch of 64");
    }
}

#[test]
fn portable_and_avx2_give_the_same_bits() {
    if !Isa::Avx2.available() {
        eprintln!("skipped: this processor has no AVX2");
        return;
    }
    for model in MODELS.map(fixture) {
        let of = |isa| replies(&model, Arrangement { isa, ..Arrangement::default() });
        assert!(of(Isa::Portable) == of(Isa::Avx2), "{model:?}");
    }
}

#[test]
fn delayed_ranks_give_the_same_bits() {
    let model = fixture("llama-mha16");
    let alone = replies(&model, Arrangement::default());
    for (tensor_parallel, threads) in [(2, 3), (8, 2)] {
        let late = Arrangement { tensor_parallel, threads, delays: true, ..Arrangement::default() };
        assert!(replies(&model, late) == alone, "{threads} threads on {tensor_parallel} ranks");
    }
}

#[test]
fn a_sequence_recomputed_after_preemption_goes_on_with_the_same_bits() {
    for model in MODELS.map(fixture) {
        let request = Request::greedy(&requests(3)[2].tokens, 12);
        let whole = &run(&model, &Arrangement::default(), std::slice::from_ref(&request))[0];
        for done in [1, 5] {
            let tokens: Vec<_> = request.tokens.iter().chain(&whole.tokens[..done]).copied().collect();
            let resumed = Request::greedy(&tokens, 12 - done as u32);
            let rest = &run(&model, &Arrangement { chunk: 50, ..Arrangement::default() }, &[resumed])[0];
            assert!(
                rest.tokens == whole.tokens[done..] && rest.logits == whole.logits[done..],
                "{model:?} after {done}"
            );
        }
    }
}
