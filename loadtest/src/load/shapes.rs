//! How long the prompt and the answer of each request are: drawn by a seed, or as a trace says.

use std::sync::Arc;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use crate::load::lengths::{Lengths, Shape};
use crate::load::trace::Trace;

#[derive(Debug, Clone)]
pub enum Shapes {
    /// Drawn; the same seed and index give the same lengths.
    Drawn {
        prompt: Lengths,
        /// Most tokens of answers.
        output: Lengths,
        seed: u64,
    },
    /// As recorded, request `first_index` as the first one, and again from there after the last.
    Trace { trace: Arc<Trace>, first_index: u64 },
}

impl Shapes {
    pub fn of(&self, index: u64) -> Shape {
        match self {
            Shapes::Drawn { prompt, output, seed } => {
                // Another stream than that of the prompt's words, which is seeded by the index, too.
                let mut rng = StdRng::seed_from_u64(!seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(index));
                Shape { prompt_tokens: prompt.draw(&mut rng), max_tokens: output.draw(&mut rng) }
            }
            Shapes::Trace { trace, first_index } => trace.shape(index.wrapping_sub(*first_index)),
        }
    }

    /// The longest prompt that is ever asked for.
    pub fn longest_prompt(&self) -> u32 {
        match self {
            Shapes::Drawn { prompt, .. } => prompt.longest(),
            Shapes::Trace { trace, .. } => trace.longest_prompt(),
        }
    }

    /// Lengths of prompts and answers, each a number or words.
    pub fn to_json(&self) -> (Value, Value) {
        match self {
            Shapes::Drawn { prompt, output, .. } => (prompt.to_json(), output.to_json()),
            Shapes::Trace { .. } => (json!("trace"), json!("trace")),
        }
    }

    pub fn in_words(&self) -> (String, String) {
        match self {
            Shapes::Drawn { prompt, output, .. } => (prompt.to_string(), output.to_string()),
            Shapes::Trace { .. } => ("as the trace says".into(), "as the trace says".into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_and_index_decide_the_lengths() {
        let shapes = |seed| {
            let (prompt, output) = ("1..1000".parse().expect("valid"), "1..1000".parse().expect("valid"));
            let shapes = Shapes::Drawn { prompt, output, seed };
            (0..20).map(|index| shapes.of(index)).collect::<Vec<_>>()
        };
        assert_eq!(shapes(1), shapes(1));
        assert_ne!(shapes(1), shapes(2));
        assert!(shapes(1).iter().any(|shape| shape.prompt_tokens != shape.max_tokens));
    }
}
