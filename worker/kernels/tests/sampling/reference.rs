//! Expected results of the sampler's GPU tests: reads cases, samples them with the CPU sampler, writes what it drew.
//!
//! Stands alone: `rustc -O --edition 2024 reference.rs`, with the sampler compiled in as a module.
#![allow(dead_code, missing_docs)]

#[path = "../../../src/math.rs"]
mod math;
#[path = "../../../src/sampling/mod.rs"]
mod sampling;
/// What the sampler reads of the plan.
mod plan {
    pub const MAX_LEAVES: usize = 16;
    pub const ROW_TILE: usize = 16;
}

use std::io::{Read, Write};

use math::{exp, ln_f64};
use sampling::{Alone, RowInput, Sampler, SamplerShape, SamplingParams, Serial};

/// Little-endian numbers of a file.
struct Input(std::io::BufReader<std::fs::File>);

impl Input {
    fn u32(&mut self) -> u32 {
        let mut bytes = [0; 4];
        self.0.read_exact(&mut bytes).expect("the file of cases ends early");
        u32::from_le_bytes(bytes)
    }
    fn f32(&mut self) -> f32 {
        f32::from_bits(self.u32())
    }
    fn list(&mut self) -> Vec<u32> {
        (0..self.u32()).map(|_| self.u32()).collect()
    }
}

fn scaled(logit: f32) -> f32 {
    let value = logit + 0.0;
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

/// Log-probabilities as the GPU defines them: the logarithm of a sum of integer weights. For a raw logit.
struct IntegerLogSum {
    max: f32,
    log_sum: f32,
}

impl IntegerLogSum {
    fn of(logits: &[f32]) -> Self {
        let max = logits.iter().copied().map(scaled).fold(f32::NEG_INFINITY, f32::max);
        let weight = |x: f32| {
            let share = if x == max { 1.0 } else { exp(x - max) };
            (share * (1u64 << 40) as f32) as u64
        };
        let sum: u64 = logits.iter().map(|logit| weight(scaled(*logit))).sum();
        Self { max, log_sum: ln_f64(sum as f64 / (1u64 << 40) as f64) as f32 }
    }
    fn logprob(&self, logit: f32) -> f32 {
        let logit = scaled(logit);
        (if logit == self.max { 0.0 } else { logit - self.max }) - self.log_sum
    }
}

fn main() {
    let paths: Vec<String> = std::env::args().skip(1).collect();
    let mut input = Input(std::io::BufReader::new(std::fs::File::open(&paths[0]).expect("the file of cases")));
    let mut output = std::io::BufWriter::new(std::fs::File::create(&paths[1]).expect("the file of results"));
    let (cases, steps, vocab_size) = (input.u32(), input.u32(), input.u32() as usize);
    let padded_vocab = vocab_size.next_multiple_of(256);
    let shape = SamplerShape { vocab_size, padded_vocab, tensor_parallel: 1, rank: 0, max_rows: 1 };
    let mut sampler = Sampler::new(shape);
    for _ in 0..cases {
        let mut params = SamplingParams {
            temperature: input.f32(),
            top_p: input.f32(),
            min_p: input.f32(),
            top_k: input.u32(),
            seed: u64::from(input.u32()) | u64::from(input.u32()) << 32,
            repetition_penalty: input.f32(),
            presence_penalty: input.f32(),
            frequency_penalty: input.f32(),
            logit_bias: Vec::new(),
        };
        let (first_position, suppress_until) = (input.u32(), input.u32());
        let logprobs = Some(input.u32()).filter(|top| *top <= 20);
        params.logit_bias = (0..input.u32()).map(|_| (input.u32(), input.f32())).collect();
        let (prompt, mut generated, suppress) = (input.list(), input.list(), input.list());
        let logits: Vec<f32> = (0..vocab_size).map(|_| input.f32()).collect();
        let integer = logprobs.map(|_| IntegerLogSum::of(&logits));
        for step in 0..steps {
            let position = first_position + step;
            let suppress = if position < suppress_until { &suppress[..] } else { &[] };
            let row =
                RowInput { params: &params, position, prompt: &prompt, generated: &generated, suppress, logprobs };
            let mut local = logits.clone();
            local.resize(padded_vocab, f32::NAN);
            let Ok(results) = sampler.sample(&[row], &mut local, &mut Alone::default(), &Serial);
            let sampled = results[0].clone();
            let exact = |token: u32| integer.as_ref().map_or(0.0, |i| i.logprob(logits[token as usize]));
            let both = |token: u32, cpu: f32| [cpu, exact(token)];
            let mut words = vec![sampled.token];
            words.extend(both(sampled.token, sampled.logprob.unwrap_or(0.0)).map(f32::to_bits));
            words.push(sampled.top.len() as u32);
            for &(token, logprob) in &sampled.top {
                words.push(token);
                words.extend(both(token, logprob).map(f32::to_bits));
            }
            for word in words {
                output.write_all(&word.to_le_bytes()).expect("the file of results");
            }
            generated.push(sampled.token);
        }
    }
}
