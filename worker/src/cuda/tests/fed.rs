//! Launches that are given the rows of each step while they run: sequences with drafts yield what they do without.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::gpu::{BROKEN, by_sequence, gpu, load_rank, request};
use super::matrix_passes::{Echo, shape, smol};
use super::plans::{Request, drive, plans, with_drafts};
use super::ranks::{Way, group, group_reports};
use super::wide::load_rows;
use crate::cuda::{CudaDecoder, Options};
use crate::decoder::{Decoder, Outcome};
use crate::model::ModelConfig;
use crate::model::source::{RandomSource, Source};
use crate::sampling::Sampled;

/// A model that has five tokens to choose from, so that drafts are made often and some hold.
fn few_tokens(config: &ModelConfig) -> Arc<dyn Source + Send> {
    Arc::new(Echo { of: RandomSource { config: config.clone(), seed: 3 }, rows: 5 })
}

/// Most blocks have no tiles.
fn tiny() -> ModelConfig {
    shape(48, (2, 1, 64), 160)
}

/// A window of two pages and a half, and norms of heads.
fn windowed() -> ModelConfig {
    ModelConfig { sliding_window: Some(160), qk_norm: true, ..shape(512, (8, 2, 128), 1024) }
}

fn requests(count: u32) -> Vec<Request> {
    let prompt = |i: u32| (0..1 + i * i * 41 % 300).map(|j| (i * 131 + j * 17) % 5).collect::<Vec<u32>>();
    (1..=count).map(|i| Request::greedy(&prompt(i), 300 + i * 41)).collect()
}

/// What sequences yield, tokens drafted, steps, and steps that were fed.
struct Run {
    yields: Vec<Vec<Sampled>>,
    drafted: usize,
    steps: usize,
    fed: usize,
}

fn run(decoder: CudaDecoder, requests: &[Request], each: u32, steps: u32, eager: bool) -> Run {
    let feeding = decoder.decoder.launcher.feeding.clone();
    let plans = with_drafts(plans(requests, 40, 64, steps), each);
    let outcomes = drive(move |source, sink| Box::new(decoder).run(source, sink), plans, eager);
    let sum = |of: fn(&Outcome) -> usize| outcomes.iter().map(of).sum::<usize>();
    let (drafted, steps) = (sum(Outcome::rows_drafted), sum(|outcome| usize::from(outcome.ran_step)));
    Run { yields: by_sequence(outcomes, requests.len()), drafted, steps, fed: feeding.steps.load(Ordering::Relaxed) }
}

/// Whether as many steps were fed as show something. Several sequences may draft so much that wide passes compute it.
fn enough(fed: usize, sequences: u32, each: u32) -> bool {
    fed > 15 || sequences > 1 && each > 2
}

#[test]
fn steps_that_are_fed_touch_no_token() {
    if !gpu() {
        return;
    }
    for config in [smol(), tiny(), windowed()] {
        let load = |defines: &[(&'static str, u64)]| {
            let options = Options { defines: defines.to_vec(), ..Options::default() };
            load_rows(&config, few_tokens(&config), (16, 64), false, options)
        };
        for count in [1, 3] {
            let requests = requests(count);
            let plain = run(load(&[]), &requests, 0, 40, false);
            for (each, steps, eager) in [(7, 40, false), (2, 100, false), (7, 5, true)] {
                let of = run(load(&[]), &requests, each, steps, eager);
                println!(
                    "{} wide, {count} sequences: {} of {} steps fed, {} without drafts, {} tokens drafted",
                    config.hidden_size, of.fed, of.steps, plain.steps, of.drafted
                );
                assert!(of.yields == plain.yields, "{} wide, {count} sequences, {each}", config.hidden_size);
                assert!(enough(of.fed, count, each) && of.drafted > 50 && of.steps < plain.steps);
            }
            for defines in BROKEN {
                let of = run(load(defines), &requests, 7, 40, false);
                assert!(
                    of.yields == plain.yields && enough(of.fed, count, 7),
                    "{} wide, {defines:?}",
                    config.hidden_size
                );
            }
        }
    }
}

/// A host that is held up for longer than anything else on a GPU may take, while q, k and v of the first layer fill the
/// rings.
#[test]
fn a_launch_waits_for_a_late_host() {
    if !gpu() {
        return;
    }
    let (config, requests) = (shape(4096, (32, 8, 128), 1024), requests(1));
    let load = || load_rows(&config, few_tokens(&config), (16, 64), false, Options::default());
    let (plain, late) = (run(load(), &requests, 0, 40, false), load());
    *late.decoder.launcher.feeding.late.lock().unwrap() = Duration::from_millis(3500);
    let late = run(late, &requests, 7, 40, false);
    assert!(late.yields == plain.yields && late.fed > 15, "{} steps fed", late.fed);
}

/// Hosts feed their own ranks, one of them late.
#[test]
fn a_group_is_fed_alike() {
    if !gpu() {
        return;
    }
    let config = ModelConfig { max_positions: 2048, ..shape(512, (8, 4, 64), 1024) };
    let options = Options { random: Some((config.clone(), few_tokens(&config))), ..Options::default() };
    for count in [1, 3] {
        let requests = requests(count);
        let plain = run(load_rank(&request("random"), &options), &requests, 0, 40, false);
        for ranks in [2, 4] {
            for (each, steps, eager) in [(7, 40, false), (2, 100, false), (7, 5, true)] {
                let group = group(&request("random"), ranks, &Way { options: options.clone(), ..Way::default() });
                let feeding: Vec<_> = group.iter().map(|rank| rank.decoder.launcher.feeding.clone()).collect();
                *feeding[1].late.lock().unwrap() = Duration::from_millis(if eager { 0 } else { 1500 });
                let plans = with_drafts(plans(&requests, 40, 64, steps), each);
                for (rank, outcomes) in group_reports(group, &plans, eager).into_iter().enumerate() {
                    let fed = feeding[rank].steps.load(Ordering::Relaxed);
                    println!("{ranks} ranks, {count} sequences, plans of {steps}: rank {rank} fed {fed}");
                    assert!(
                        by_sequence(outcomes, requests.len()) == plain.yields && enough(fed, count, each),
                        "{ranks} ranks"
                    );
                }
            }
        }
    }
}
