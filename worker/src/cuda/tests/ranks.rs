//! Groups of ranks, as threads: on a GPU each where there are enough, else side by side on one, whose blocks they divide.

use super::gpu::{choosy_requests, gpu, load_rank, yields};
use super::plans::{Request, plans};
use crate::batch::Plan;
use crate::cuda::{CudaDecoder, Options, probe};
use crate::decoder::Decoder;
use crate::sampling::Sampled;

/// Blocks of all ranks that share a GPU.
const SHARED_BLOCKS: usize = 128;

/// Models, and into how many ranks they are cut: heads of each kind; KV heads that several ranks have; two heads a rank. More than eight kernels are not
/// run side by side on one GPU: streams share its eight queues. (16 ranks are in kernels/tests/variants/ranks.py, in one launch.)
const MODELS: [(&str, &[usize]); 5] = [
    ("llama-gqa", &[2, 8]),
    ("llama-mha16", &[8]),
    ("llama-tied", &[4]),
    ("mistral-window", &[2]),
    ("qwen3-qknorm", &[4]),
];

/// Whether there is a GPU for every rank.
fn apart(ranks: usize) -> bool {
    (0..ranks).all(|rank| probe(rank).is_ok())
}

/// A loaded group that has met.
fn group(model: &str, ranks: usize, options: &Options) -> Vec<CudaDecoder> {
    let options = match apart(ranks) {
        true => options.clone(),
        false => Options { ordinal: Some(0), blocks: Some(SHARED_BLOCKS / ranks), ..options.clone() },
    };
    let mut group: Vec<_> = (0..ranks).map(|rank| load_rank(model, rank, ranks, &options)).collect();
    let handles: Vec<_> = group.iter().map(|rank| rank.fabric_handle()).collect();
    std::thread::scope(|scope| {
        let joining: Vec<_> = group.iter_mut().map(|rank| scope.spawn(|| rank.join(&handles))).collect();
        joining.into_iter().for_each(|rank| rank.join().unwrap().unwrap_or_else(|fault| panic!("{fault}")));
    });
    group
}

/// What each sequence yields, on every rank the same.
fn group_yields(group: Vec<CudaDecoder>, plans: &[Plan], sequences: usize, eager: bool) -> Vec<Vec<Sampled>> {
    std::thread::scope(|scope| {
        let running: Vec<_> =
            group.into_iter().map(|rank| scope.spawn(move || yields(rank, plans.to_vec(), sequences, eager))).collect();
        let mut replies: Vec<_> = running.into_iter().map(|rank| rank.join().unwrap()).collect();
        assert!(replies.iter().all(|reply| *reply == replies[0]), "ranks yield different tokens");
        replies.swap_remove(0)
    })
}

fn check(models: &[(&str, &[usize])], requests: &[Request], options: &Options, shared: bool) {
    for (model, sizes) in models {
        let alone = |steps, eager| {
            yields(load_rank(model, 0, 1, &Options::default()), plans(requests, 40, 64, steps), requests.len(), eager)
        };
        let whole = alone(16, true);
        assert!(alone(5, false) == whole, "{model} alone");
        for ranks in sizes.iter().copied().filter(|ranks| shared || apart(*ranks)) {
            for (chunk, steps, eager) in [(40, 16, true), (64, 5, false)] {
                let got = group_yields(
                    group(model, ranks, options),
                    &plans(requests, chunk, 64, steps),
                    requests.len(),
                    eager,
                );
                assert!(got == whole, "{model}, {ranks} ranks, plans of {steps} steps");
            }
        }
    }
}

#[test]
fn a_group_of_any_size_yields_the_tokens_of_one_gpu() {
    if !gpu() {
        return;
    }
    let greedy: Vec<_> = (0..6u32)
        .map(|i| Request::greedy(&(0..3 + i * 23).map(|j| (i * 131 + j * 17) % 768).collect::<Vec<u32>>(), 30 + i * 5))
        .collect();
    check(&MODELS, &greedy, &Options::default(), true);
}

/// With log-probabilities, so the same bits; the sampler, which wants a GPU to itself, draws for some.
#[test]
fn a_group_draws_what_one_gpu_draws() {
    if !gpu() || !apart(2) {
        return;
    }
    check(&[("llama-gqa", &[2, 4])], &choosy_requests(), &Options::default(), false);
}

#[test]
fn delays_on_every_rank_change_nothing_but_time() {
    if !gpu() {
        return;
    }
    let requests: Vec<_> = (0..3u32).map(|i| Request::greedy(&(i..20 + i * 30).collect::<Vec<u32>>(), 12)).collect();
    let options = Options { defines: vec![("LP_DELAYS", 3)], ..Options::default() };
    check(&MODELS[..1], &requests, &options, true);
}
