//! Groups of ranks, as threads: on a GPU each where there are enough, else side by side on one, whose blocks they
//! divide.

use std::sync::Arc;
use std::time::Duration;

use super::gpu::{REQUIRE_GPU, by_sequence, choosy_requests, gpu, load_rank, request, yields};
use super::matrix_passes::shape;
use super::plans::{Request, drive, plans, with_drafts};
use super::wide::{llama_1b, llama_3b, random, swapped};
use crate::batch::Plan;
use crate::cuda::launches::looped_decoder::Launcher;
use crate::cuda::weights::layout::tests::llama_70b;
use crate::cuda::{CudaDecoder, Options, probe};
use crate::decoder::{Decoder, Fault, LoadRequest, Outcome, outcome_stream, plan_stream};
use crate::model::{ModelConfig, WeightFormat};
use crate::sampling::{Sampled, SamplingParams};

/// Blocks of all ranks that share a GPU.
const SHARED_BLOCKS: usize = 128;

/// How many kernels a GPU runs side by side, as the driver reads it when it starts: streams share the GPU's queues, and
/// a rank behind another in one queue would be waited for in vain.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
/// Models, and into how many ranks they are cut: heads of each kind; KV heads that several ranks have; one and two
/// heads a rank.
const MODELS: [(&str, &[usize]); 5] = [
    ("llama-gqa", &[2, 8]),
    ("llama-mha16", &[8, 16]),
    ("llama-tied", &[4]),
    ("mistral-window", &[2]),
    ("qwen3-qknorm", &[4]),
];

/// Whether there is a GPU for every rank.
fn apart(ranks: usize) -> bool {
    (0..ranks).all(|rank| probe(rank).is_ok())
}

/// Whether one GPU runs so many ranks side by side; the driver's default is eight.
fn side_by_side(ranks: usize) -> bool {
    let queues =
        std::env::var(QUEUES).map_or(8, |queues| queues.parse().expect("CUDA_DEVICE_MAX_CONNECTIONS is a number"));
    if ranks > queues {
        assert!(std::env::var_os(REQUIRE_GPU).is_none(), "{ranks} ranks on one GPU need {QUEUES}={ranks} or more");
        eprintln!("skipped: {ranks} ranks on one GPU; {QUEUES} is {queues}");
    }
    ranks <= queues
}

/// How a group is loaded, beside its model and size.
#[derive(Clone, Default)]
pub(super) struct Way {
    pub(super) unlooped: bool,
    pub(super) quantization: Option<WeightFormat>,
    pub(super) options: Options,
    /// Before the first step; ranks count alike.
    pub(super) epoch: Option<u32>,
    /// Every pass is a matrix pass.
    pub(super) matrix: bool,
    /// A rank whose matrix passes add up two leaves in each other's place.
    pub(super) swapped: Option<usize>,
}

/// A loaded group that has met, of ranks as a request for one of them asks.
pub(super) fn group(one: &LoadRequest, ranks: usize, way: &Way) -> Vec<CudaDecoder> {
    let options = match apart(ranks) {
        true => way.options.clone(),
        false => Options { ordinal: Some(0), blocks: Some(SHARED_BLOCKS / ranks), ..way.options.clone() },
    };
    let rank = |rank| {
        let mut options = options.clone();
        options.defines.extend((way.swapped == Some(rank)).then_some(("LP_SWAP_LEAVES", 1)));
        let request = LoadRequest { rank, tensor_parallel: ranks, unlooped: way.unlooped, ..one.clone() };
        load_rank(&request, &options)
    };
    let mut group: Vec<_> = (0..ranks).map(rank).collect();
    let handles: Vec<_> = group.iter().map(|rank| rank.fabric_handle()).collect();
    std::thread::scope(|scope| {
        let joining: Vec<_> = group.iter_mut().map(|rank| scope.spawn(|| rank.join(&handles))).collect();
        joining.into_iter().for_each(|rank| rank.join().unwrap().unwrap_or_else(|fault| panic!("{fault}")));
    });
    for rank in &mut group {
        let launcher = &mut rank.decoder.launcher;
        launcher.epoch = way.epoch.unwrap_or(launcher.epoch);
        launcher.matrix_only = way.matrix;
    }
    group
}

/// What each rank of a group reports.
pub(super) fn group_reports(group: Vec<CudaDecoder>, plans: &[Plan], eager: bool) -> Vec<Vec<Outcome>> {
    let run = |rank: CudaDecoder| drive(move |source, sink| Box::new(rank).run(source, sink), plans.to_vec(), eager);
    std::thread::scope(|scope| {
        let running: Vec<_> = group.into_iter().map(|rank| scope.spawn(|| run(rank))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// What each sequence yields, on every rank the same.
fn group_yields(group: Vec<CudaDecoder>, plans: &[Plan], sequences: usize, eager: bool) -> Vec<Vec<Sampled>> {
    same_yields(group_reports(group, plans, eager), sequences)
}

fn same_yields(reports: Vec<Vec<Outcome>>, sequences: usize) -> Vec<Vec<Sampled>> {
    let mut replies: Vec<_> = reports.into_iter().map(|outcomes| by_sequence(outcomes, sequences)).collect();
    assert!(replies.iter().all(|reply| *reply == replies[0]), "ranks yield different tokens");
    replies.swap_remove(0)
}

fn check(models: &[(&str, &[usize])], requests: &[Request], way: &Way, shared: bool) {
    for (model, sizes) in models {
        let one = LoadRequest { quantization: way.quantization, ..request(model) };
        let alone = |steps, eager| {
            let decoder = load_rank(&one, &Options::default());
            yields(decoder, plans(requests, 40, 64, steps), requests.len(), eager)
        };
        let whole = alone(16, true);
        assert!(alone(5, false) == whole, "{model} alone");
        for ranks in sizes.iter().copied().filter(|ranks| apart(*ranks) || shared && side_by_side(*ranks)) {
            for (chunk, steps, eager) in [(40, 16, true), (64, 5, false)] {
                let plans = plans(requests, chunk, 64, steps);
                let got = group_yields(group(&one, ranks, way), &plans, requests.len(), eager);
                assert!(got == whole, "{model}, {ranks} ranks, plans of {steps} steps");
            }
        }
    }
}

fn greedy() -> Vec<Request> {
    let prompt = |i: u32| (0..3 + i * 23).map(|j| (i * 131 + j * 17) % 768).collect::<Vec<u32>>();
    (0..6u32).map(|i| Request::greedy(&prompt(i), 30 + i * 5)).collect()
}

#[test]
fn a_group_of_any_size_yields_the_tokens_of_one_gpu() {
    if gpu() {
        check(&MODELS, &greedy(), &Way::default(), true);
    }
}

/// Scales as they come, which ranks apply behind the sums of all.
#[test]
fn a_group_of_any_size_yields_the_tokens_of_one_gpu_in_fp8() {
    if gpu() {
        let way = Way { quantization: Some(WeightFormat::E4m3), ..Way::default() };
        check(&MODELS, &greedy(), &way, true);
    }
}

/// Blocks with many row tiles of the hidden state: of 8 and 16 ranks, which have one leaf or two of o and down, warps
/// take several sets of them at a time, all or the first. Those of 63 tiles have leaves of a norm's input that are
/// fetched in parts. And KV heads of 16 and 12 query heads, of whose copies ranks have several, one, or a part.
#[test]
fn ranks_of_unusual_shapes_yield_the_tokens_of_one_gpu() {
    if !gpu() {
        return;
    }
    let shapes = [
        (shape(2048, (16, 8, 64), 1536), &[8, 16][..]),
        (shape(1008, (16, 16, 64), 1536), &[8, 16]),
        (shape(512, (32, 2, 64), 1536), &[2, 4, 8]),
        (shape(512, (48, 4, 64), 1536), &[2, 8, 16]),
    ];
    for (config, sizes) in shapes {
        let config = ModelConfig { max_positions: 2048, ..config };
        let options = Options { random: Some((config.clone(), random(&config))), ..Options::default() };
        let one = request("random");
        for requests in [&greedy()[..1], &greedy()] {
            let plans = plans(requests, 40, 64, 16);
            let whole = yields(load_rank(&one, &options), plans.clone(), requests.len(), true);
            for ranks in sizes.iter().copied().filter(|ranks| apart(*ranks) || side_by_side(*ranks)) {
                let way = Way { options: options.clone(), ..Way::default() };
                let got = group_yields(group(&one, ranks, &way), &plans, requests.len(), true);
                assert!(got == whole, "hidden size {}, {ranks} ranks, {} requests", config.hidden_size, requests.len());
            }
        }
    }
}

/// With log-probabilities, so the same bits; the sampler, which wants a GPU to itself, draws for some.
#[test]
fn a_group_draws_what_one_gpu_draws() {
    if gpu() && apart(2) {
        check(&[("llama-gqa", &[2, 4, 8])], &choosy_requests(), &Way::default(), false);
    }
}

/// Drafts of answers that have few tokens to choose from, so that they hold at times; the sampler draws all.
#[test]
fn drafts_of_a_group_touch_no_token() {
    if !gpu() || !apart(2) {
        return;
    }
    let few = |(i, of): (u32, Request)| {
        let logit_bias = (0..2 + i % 4).map(|j| (i * 7 + j * 31, 60.0)).collect();
        Request { sampling: SamplingParams { logit_bias, ..of.sampling }, max_tokens: 150, ..of }
    };
    let requests: Vec<_> = (0..).zip(choosy_requests()).map(few).collect();
    for requests in [&requests[..1], &requests] {
        let alone = load_rank(&request("llama-gqa"), &Options::default());
        let whole = yields(alone, plans(requests, 40, 64, 16), requests.len(), true);
        for ranks in [2, 4, 8].into_iter().filter(|ranks| apart(*ranks)) {
            for (each, steps, eager) in [(7, 40, false), (3, 100, false), (7, 5, true)] {
                let plans = with_drafts(plans(requests, 40, 64, steps), each);
                let reports = group_reports(group(&request("llama-gqa"), ranks, &Way::default()), &plans, eager);
                let drafted = |rank: &Vec<Outcome>| rank.iter().map(Outcome::rows_drafted).sum::<usize>();
                let drafted: Vec<_> = reports.iter().map(drafted).collect();
                println!("{ranks} ranks, {} sequences, plans of {steps}: drafted {drafted:?}", requests.len());
                assert!(drafted[0] > 50 && drafted.iter().all(|of| *of == drafted[0]));
                assert!(same_yields(reports, requests.len()) == whole, "{ranks} ranks, plans of {steps}");
            }
        }
    }
}

/// Launches of phases may wait for a GPU of their own: those of ranks that share one would wait for each other's end.
#[test]
fn a_group_without_the_loop_yields_the_same() {
    if gpu() && apart(2) {
        let way = Way { unlooped: true, ..Way::default() };
        check(&[("llama-gqa", &[2, 4, 8])], &greedy(), &way, false);
        check(&[("llama-gqa", &[2, 4, 8])], &choosy_requests(), &way, false);
    }
}

/// Log-probabilities show the order of additions: a group has the bits of one GPU with the same weights, and not those
/// of the same model with two leaves in each other's place.
#[test]
fn two_leaves_in_each_others_place_do_touch_a_groups_bits() {
    if !gpu() || !apart(2) {
        return;
    }
    let config = ModelConfig { max_positions: 2048, ..llama_1b() };
    let requests = choosy_requests();
    let plans = plans(&requests, 40, 64, 16);
    let [plain, swapped] = [random(&config), swapped(&config)].map(|source| {
        let options = Options { random: Some((config.clone(), source)), ..Options::default() };
        let one = yields(load_rank(&request("random"), &options), plans.clone(), requests.len(), true);
        let two = group(&request("random"), 2, &Way { options, ..Way::default() });
        (one, group_yields(two, &plans, requests.len(), true))
    });
    assert!(plain.0 == plain.1 && swapped.0 == swapped.1, "a group agrees with one GPU on either model");
    assert!(plain.0 != swapped.0);
}

/// Passes of every width: 40 rows that decode, prompts beside them, some of them sampled. The first two models are such
/// that ranks on half of a GPU's blocks have wide passes, too, of the second with uneven shares. Of the third, as wide
/// as 70b, ranks on whole GPUs have them, of four with three tiles of gate and up each. One GPU alone has an odd number
/// of blocks, so narrow passes, so that both kinds are compared.
#[test]
fn wide_passes_of_a_group_yield_what_one_gpu_yields() {
    if !gpu() {
        return;
    }
    let one = LoadRequest { max_slots: 40, max_batch_tokens: 512, kv_pages: 240, ..request("random") };
    let prompt = |i: u32| (0..1 + i * i % 300).map(|j| (i * 131 + j * 17) % 2048).collect::<Vec<u32>>();
    let mut requests: Vec<_> = (0..40).map(|i| Request::greedy(&prompt(i), 6 + i % 9)).collect();
    // Some are drawn by the sampler, behind the pass, in all the ways that there are.
    for (request, choosy) in requests.iter_mut().step_by(4).zip(choosy_requests()) {
        *request = Request { prompt: request.prompt.clone(), max_tokens: request.max_tokens, ..choosy };
    }
    let wide_hidden = ModelConfig { num_layers: 1, vocab_size: 2048, intermediate_size: 12_288, ..llama_70b() };
    let fp8 = ModelConfig { layer_weights: WeightFormat::E4m3, ..llama_1b() };
    for (config, shared) in [(llama_1b(), 2), (fp8, 2), (llama_3b(), 2), (wide_hidden, 1)] {
        let config = ModelConfig { max_positions: 2048, ..config };
        let options = Options { random: Some((config.clone(), random(&config))), ..Options::default() };
        let groups = [(2, 200, 16, true), (2, 33, 5, false), (4, 512, 40, true)];
        let groups = groups.into_iter().filter(|(ranks, ..)| apart(*ranks) || *ranks <= shared);
        let mut whole = None;
        for (ranks, chunk, steps, eager) in groups {
            let plans_of = |chunk, steps| plans(&requests, chunk, 512, steps);
            let narrow = Options { blocks: Some(127), ..options.clone() };
            let whole =
                whole.get_or_insert_with(|| yields(load_rank(&one, &narrow), plans_of(512, 40), requests.len(), true));
            let group = group(&one, ranks, &Way { options: options.clone(), ..Way::default() });
            assert_eq!(group[0].decoder.launcher.passes().columns(), 64, "{ranks} ranks");
            let got = group_yields(group, &plans_of(chunk, steps), requests.len(), eager);
            let hidden = config.hidden_size;
            assert!(got == *whole, "{hidden}, {ranks} ranks, chunks of {chunk}, plans of {steps} steps");
        }
    }
}

/// Sixteen heads and leaves, with everything that decoders differ in.
fn small() -> ModelConfig {
    let shape = crate::plan::tests::config(16, 4, 1024, 2048);
    ModelConfig { hidden_size: 512, qkv_bias: true, qk_norm: true, sliding_window: Some(300), ..shape }
}

/// Prompts of up to several hundred rows and rows that decode, drawn in all the ways that there are.
fn crowd() -> Vec<Request> {
    let prompt = |i: u32| (0..1 + i * i * 7 % 450).map(|j| (i * 131 + j * 17) % 2048).collect::<Vec<u32>>();
    let request = |(i, choosy)| Request { prompt: prompt(i), max_tokens: 6 + i % 9, ..choosy };
    (0..30).zip(choosy_requests().into_iter().cycle()).map(request).collect()
}

fn crowd_request() -> LoadRequest {
    LoadRequest { max_slots: 30, max_batch_tokens: 512, kv_pages: 240, ..request("random") }
}

/// Matrix passes of groups of every size, beside other passes and alone: log-probabilities show every bit.
#[test]
fn matrix_passes_of_a_group_yield_what_one_gpu_yields() {
    if !gpu() {
        return;
    }
    let llama_1b = ModelConfig { max_positions: 2048, ..llama_1b() };
    // Passes choose the tokens of requests that want no more than the largest logit.
    let greedy: Vec<_> = crowd().iter().map(|of| Request::greedy(&of.prompt, of.max_tokens)).collect();
    let fp8 = ModelConfig { layer_weights: WeightFormat::E4m3, ..small() };
    let runs = [(small(), &[2, 4, 8, 16][..], 16), (fp8, &[2, 8], 16), (llama_1b, &[2, 4], 2)];
    let runs = runs.into_iter().flat_map(|run| [(run.clone(), crowd()), (run, greedy.clone())]);
    for ((config, sizes, shared), requests) in runs {
        let options = Options { random: Some((config.clone(), random(&config))), ..Options::default() };
        let plans_of = |chunk, steps| plans(&requests, chunk, 512, steps);
        let whole = yields(load_rank(&crowd_request(), &options), plans_of(512, 40), requests.len(), true);
        for ranks in sizes.iter().copied().filter(|n| apart(*n) || *n <= shared && side_by_side(*n)) {
            for (matrix, chunk, steps, eager) in [(true, 130, 16, true), (false, 512, 5, false)] {
                let way = Way { options: options.clone(), matrix, ..Way::default() };
                let (group, hidden) = (group(&crowd_request(), ranks, &way), config.hidden_size);
                // 9 to 64 rows are wide passes then, of blocks of one GPU, too.
                let columns = group[0].decoder.launcher.passes().columns();
                assert!(hidden != 512 || ranks < 4 || columns == 64, "{ranks} ranks: {columns}");
                let got = group_yields(group, &plans_of(chunk, steps), requests.len(), eager);
                assert!(got == whole, "{hidden}, {ranks} ranks, chunks of {chunk}, matrix passes alone: {matrix}");
            }
        }
    }
}

/// Steps of more rows than a matrix pass: two are computed together, which copy engines serve. A sequence is in both.
#[test]
fn pairs_of_matrix_passes_yield_what_one_gpu_yields() {
    if !gpu() {
        return;
    }
    let prompt = |i: u32| (0..200 + i * i * 7 % 450).map(|j| (i * 131 + j * 17) % 2048).collect::<Vec<u32>>();
    let of_client = |(i, choosy)| Request { prompt: prompt(i), max_tokens: 6 + i % 9, ..choosy };
    let requests: Vec<_> = (0..30).zip(choosy_requests().into_iter().cycle()).map(of_client).collect();
    let loaded = LoadRequest { max_slots: 30, max_batch_tokens: 4096, kv_pages: 360, ..request("random") };
    let llama_1b = ModelConfig { max_positions: 2048, ..llama_1b() };
    for (config, sizes, shared) in [(small(), &[2, 4, 8][..], 8), (llama_1b, &[2, 4], 2)] {
        let options = Options { random: Some((config.clone(), random(&config))), ..Options::default() };
        let whole = yields(load_rank(&loaded, &options), plans(&requests, 512, 512, 40), requests.len(), true);
        // A rank has two streams, of launches and of copies.
        for ranks in sizes.iter().copied().filter(|n| apart(*n) || *n <= shared && side_by_side(2 * *n)) {
            for (chunk, budget) in [(650, 4096), (300, 2300)] {
                let group = group(&loaded, ranks, &Way { options: options.clone(), ..Way::default() });
                let got = group_yields(group, &plans(&requests, chunk, budget, 16), requests.len(), true);
                let hidden = config.hidden_size;
                assert!(got == whole, "{hidden}, {ranks} ranks, chunks of {chunk}, up to {budget} rows");
            }
        }
    }
}

/// The control of that: one rank adds up two leaves in each other's place.
#[test]
fn two_leaves_in_each_others_place_in_one_rank_do_touch_bits_of_matrix_passes() {
    if !gpu() {
        return;
    }
    let (config, requests) = (small(), crowd());
    let options = Options { random: Some((config.clone(), random(&config))), ..Options::default() };
    let plans = plans(&requests, 130, 512, 16);
    let [plain, swapped] = [None, Some(1)].map(|swapped| {
        let way = Way { options: options.clone(), matrix: true, swapped, ..Way::default() };
        group_yields(group(&crowd_request(), 2, &way), &plans, requests.len(), true)
    });
    assert!(plain != swapped);
}

/// Tags start again in the middle of the run.
#[test]
fn the_wrap_of_the_tags_does_not_touch_a_groups_tokens() {
    if gpu() {
        let way = Way { epoch: Some(u32::MAX - 500), ..Way::default() };
        check(&MODELS[..1], &greedy(), &way, true);
    }
}

#[test]
fn delays_on_every_rank_change_nothing_but_time() {
    if !gpu() {
        return;
    }
    let requests: Vec<_> = (0..3u32).map(|i| Request::greedy(&(i..20 + i * 30).collect::<Vec<u32>>(), 12)).collect();
    let options = Options { defines: vec![("LP_DELAYS", 3), ("LP_PACED", 1)], ..Options::default() };
    check(&MODELS[..1], &requests, &Way { options, ..Way::default() }, true);
}

/// What `just sanitize` runs under compute-sanitizer of a group, on a GPU each: narrow and wide passes, some of them
/// sampled.
#[test]
fn sanitized() {
    if !gpu() || !apart(2) {
        return;
    }
    let config = ModelConfig { num_layers: 2, max_positions: 2048, ..llama_1b() };
    let random = Some((config.clone(), random(&config)));
    let options = Options { random, poison: true, defines: vec![("LP_PATIENCE", 1000)], ..Options::default() };
    let load = LoadRequest { max_batch_tokens: 512, wait_limit: Duration::from_secs(600), ..request("random") };
    let prompt = |i: u32| (0..3 + 130 * i).map(|j| (i * 131 + j * 17) % 2048).collect::<Vec<u32>>();
    let mut requests: Vec<_> = (0..3).map(|i| Request::greedy(&prompt(i), 4)).collect();
    requests[1] = Request { prompt: prompt(1), max_tokens: 4, ..choosy_requests().swap_remove(1) };
    let plans = plans(&requests, 512, 64, 16);
    let one = yields(load_rank(&load, &options), plans.clone(), requests.len(), true);
    let two = group(&load, 2, &Way { options, ..Way::default() });
    assert!(group_yields(two, &plans, requests.len(), true) == one);
}

/// Waves of requests of random lengths, each in plans of random chunks and steps, with `tokens` tokens to draw in all;
/// and how many requests. Some are sampled, with log-probabilities.
fn random_load(tokens: usize) -> (Vec<Plan>, usize) {
    let mut state = 20_261_121u64;
    // The multiplier and increment of Knuth's MMIX; the upper bits are good.
    let mut below = |n: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % n
    };
    let (mut all, mut sequences, mut drawn): (Vec<Plan>, usize, usize) = (Vec::new(), 0, 0);
    while drawn < tokens {
        let mut requests = Vec::new();
        let most = 20 + below(180);
        for _ in 0..4 + below(9) {
            let prompt: Vec<u32> = (0..1 + below(120)).map(|_| below(768) as u32).collect();
            let mut request = Request::greedy(&prompt, (most - below(most / 4)) as u32);
            if below(16) == 0 {
                request.sampling = SamplingParams { temperature: 0.9, seed: below(1 << 30), ..request.sampling };
                request.logprobs = Some(3);
            }
            requests.push(request);
        }
        let (version, first) = (all.len() as u64, sequences as u64);
        let mut wave = plans(&requests, 1 + below(60) as usize, 64, 1 + below(40) as u32);
        wave.iter_mut().for_each(|plan| plan.version += version);
        wave[0].admit.iter_mut().for_each(|admit| admit.sequence += first);
        wave[0].release = all.last().map_or_else(Vec::new, |before| before.decode.clone());
        all.extend(wave);
        sequences += requests.len();
        drawn += requests.iter().map(|request| request.max_tokens as usize).sum::<usize>();
    }
    (all, sequences)
}

/// 100 000 tokens, in which every rank is held up at places and times of its own.
#[test]
fn a_long_run_of_four_ranks_under_delays_yields_what_one_calm_gpu_yields() {
    if !gpu() || !apart(4) {
        return;
    }
    let (plans, sequences) = random_load(100_000);
    let calm = yields(load_rank(&request("llama-gqa"), &Options::default()), plans.clone(), sequences, true);
    assert!(calm.iter().map(Vec::len).sum::<usize>() >= 100_000);
    let options =
        Options { defines: vec![("LP_DELAYS", 7), ("LP_DELAYS_ONE_IN", 4096), ("LP_PACED", 1)], ..Options::default() };
    let got =
        group_yields(group(&request("llama-gqa"), 4, &Way { options, ..Way::default() }), &plans, sequences, true);
    assert!(got == calm);
}

/// Set: this process is the one whose kernels fail, those of narrow passes, of wide ones or of matrix passes.
const CHILD: &str = "LOOPLANE_TEST_RANK_IS_LATE";
/// About 1.5 s: longer than a kernel waits for words.
const LATE_CLOCKS: u64 = 3_000_000_000;

/// What a group does whose rank 1 begins every launch late.
#[derive(Clone)]
struct LateRun {
    load: LoadRequest,
    options: Options,
    request: Request,
}

impl LateRun {
    fn narrow() -> Self {
        Self { load: request("llama-gqa"), options: Options::default(), request: Request::greedy(&[1, 2, 3], 4) }
    }

    /// Its prompt is of more rows than narrow passes take, or, beyond 64, than wide ones.
    fn long(rows: u32) -> Self {
        let config = ModelConfig { max_positions: 2048, ..llama_1b() };
        let options = Options { random: Some((config.clone(), random(&config))), ..Options::default() };
        let prompt: Vec<u32> = (0..rows).map(|i| i * 17 % 2048).collect();
        let load = LoadRequest { max_batch_tokens: 512, ..request("random") };
        Self { load, options, request: Request::greedy(&prompt, 2) }
    }

    fn plans(&self) -> Vec<Plan> {
        plans(std::slice::from_ref(&self.request), self.load.max_batch_tokens, 64, 16)
    }

    fn on_one_gpu(&self) -> Vec<Sampled> {
        yields(load_rank(&self.load, &self.options), self.plans(), 1, true).swap_remove(0)
    }

    /// Its tokens, or the fault of rank 0.
    fn on_two(mut self, defines: &[(&'static str, u64)]) -> Result<Vec<Sampled>, Fault> {
        self.options.defines = [&[("LP_LATE", LATE_CLOCKS)], defines].concat();
        let mut group = group(&self.load, 2, &Way { options: self.options.clone(), ..Way::default() });
        let late = group.pop().expect("two ranks");
        let first = group.pop().expect("two ranks");
        std::thread::scope(|scope| {
            let ranks = [first, late].map(|rank| {
                let plans = self.plans();
                scope.spawn(move || {
                    let (feed, source) = plan_stream();
                    let (sink, mut outcomes) = outcome_stream(Arc::default());
                    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
                    plans.into_iter().for_each(|plan| assert!(runtime.block_on(feed.push(plan))));
                    drop(feed);
                    // So few steps fit the channel of outcomes.
                    let ended = Box::new(rank).run(source, sink);
                    let mut drawn = Vec::new();
                    while let Ok(outcome) = outcomes.try_recv() {
                        drawn.extend(outcome.tokens.into_iter().map(|token| token.sampled));
                    }
                    ended.map(|()| drawn)
                })
            });
            let [first, late] = ranks.map(|rank| rank.join().unwrap());
            assert_eq!(first.is_ok(), late.is_ok());
            first
        })
    }
}

/// A rank that begins a launch late is waited for, by passes of all kinds. Where nobody waits for it, as the control
/// has it, a wait fails, and where a word has one writer, in all but wide passes, the report names the rank; kernels
/// fail then, and take their process's GPU along, so that is a process of its own.
#[test]
fn a_rank_that_begins_late_is_waited_for_and_one_that_does_not_speak_is_named() {
    if !gpu() {
        return;
    }
    let of = |kind: &str| match kind {
        "narrow" => LateRun::narrow(),
        "wide" => LateRun::long(60),
        _ => LateRun::long(200),
    };
    if let Ok(kind) = std::env::var(CHILD) {
        let fault = of(&kind).on_two(&[("LP_HASTY", 1)]).unwrap_err();
        eprintln!("{fault}");
        assert!(
            matches!(fault, Fault::KernelWait { missing, .. } if kind == "wide" || missing == Some(1)),
            "{fault:?}"
        );
        std::process::exit(0);
    }
    for kind in ["narrow", "wide", "matrix"] {
        let run = of(kind);
        let calm = run.on_one_gpu();
        assert_eq!(run.on_two(&[]).unwrap_or_else(|fault| panic!("{kind}: {fault}")), calm, "{kind}");
        let name = "cuda::tests::ranks::a_rank_that_begins_late_is_waited_for_and_one_that_does_not_speak_is_named";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let child = child.args(["--exact", name, "--nocapture"]).env(CHILD, kind).output().unwrap();
        let told = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{kind}: {told}");
        assert!(kind == "wide" || told.contains("rank 1 did not speak"), "{told}");
    }
}
