//! What transformers computed for the fixtures (worker/tests/fixtures): the tests of every backend read it here.

use std::path::Path;

use half::f16;
use safetensors::SafeTensors;

/// Positions at the end of a prompt whose logits are recorded.
pub(crate) const RECORDED: usize = 16;

/// One prompt of a fixture.
pub(crate) struct Golden {
    /// Its tokens.
    pub(crate) ids: Vec<u32>,
    /// The largest logit's token, step by step.
    pub(crate) greedy: Vec<u32>,
    /// By how much the largest recorded logit of a greedy step exceeds the second.
    margin: Vec<f64>,
    /// Of the last [`RECORDED`] positions of the prompt, then of each greedy step.
    logits: Vec<Vec<f32>>,
}

/// How far a position's logits are from the recorded ones.
pub(crate) struct Error {
    /// Of all logits.
    pub(crate) relative_l2: f64,
    /// Largest difference of one logit.
    largest: f64,
}

#[derive(serde::Deserialize)]
struct Expected {
    prompts: Vec<Prompt>,
}

#[derive(serde::Deserialize)]
struct Prompt {
    ids: Vec<u32>,
    greedy: Vec<u32>,
    margin: Vec<f64>,
}

/// The prompts of a fixture.
pub(crate) fn read(dir: &Path) -> Vec<Golden> {
    let expected: Expected = serde_json::from_slice(&std::fs::read(dir.join("expected.json")).unwrap()).unwrap();
    let tensors = std::fs::read(dir.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&tensors).unwrap();
    let golden = |(index, Prompt { ids, greedy, margin }): (usize, Prompt)| {
        let tensor = |kind: &str| tensors.tensor(&format!("{kind}.{index}")).unwrap();
        let of_prompt: Vec<f32> = bytemuck::pod_collect_to_vec(tensor("logits").data());
        let of_greedy: Vec<f16> = bytemuck::pod_collect_to_vec(tensor("greedy").data());
        let all: Vec<f32> = of_prompt.into_iter().chain(of_greedy.into_iter().map(f16::to_f32)).collect();
        let logits = all.chunks_exact(all.len() / (RECORDED + greedy.len())).map(<[f32]>::to_vec).collect();
        Golden { ids, greedy, margin, logits }
    };
    expected.prompts.into_iter().enumerate().map(golden).collect()
}

impl Golden {
    /// Prompt and greedy tokens.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        self.ids.iter().chain(&self.greedy).copied().collect()
    }

    /// For each recorded position, how many of [`Self::tokens`] come before the token that its logits say: the greedy
    /// steps begin at the prompt's last position again.
    pub(crate) fn ends(&self) -> impl Iterator<Item = usize> {
        let length = self.ids.len();
        (length + 1 - RECORDED..=length).chain(length..length + self.greedy.len())
    }

    /// The errors of logits at each of [`Self::ends`].
    pub(crate) fn errors<'a>(&self, got: impl Iterator<Item = &'a [f32]>) -> Vec<Error> {
        let errors: Vec<_> = self.logits.iter().zip(got).map(|(expected, got)| Error::of(got, expected)).collect();
        assert_eq!(errors.len(), self.logits.len(), "a position's logits are missing");
        errors
    }

    /// The greedy steps whose margin, that of the largest recorded logit over the second, exceeds the largest error of
    /// a logit at that very step. It takes both logits to be off by half of it, in opposite directions, to turn one of
    /// the others.
    pub(crate) fn decided(&self, errors: &[Error]) -> Vec<usize> {
        let is_decided = |step: &usize| self.margin[*step] > errors[RECORDED + step].largest;
        (0..self.greedy.len()).filter(is_decided).collect()
    }
}

impl Error {
    fn of(got: &[f32], expected: &[f32]) -> Self {
        assert_eq!(got.len(), expected.len());
        let (mut error, mut size, mut largest) = (0.0, 0.0, 0.0f64);
        for (got, expected) in got.iter().zip(expected) {
            let expected = f64::from(*expected);
            let difference = f64::from(*got) - expected;
            largest = largest.max(difference.abs());
            error += difference * difference;
            size += expected * expected;
        }
        Self { relative_l2: (error / size).sqrt(), largest }
    }
}
