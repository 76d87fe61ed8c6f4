//! How long prompts and answers are: drawn for each request from a seeded distribution, or as a trace says.

use std::fmt::{self, Display};
use std::str::FromStr;

use rand::Rng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, StandardNormal};
use serde_json::{Value, json};

/// Longest prompt or answer, in tokens.
pub const MAX_TOKENS: u32 = 1_000_000;

/// Distribution of a length in tokens, written `128`, `64..256` (uniform), `normal:MEAN,DEVIATION,LOW..HIGH` or
/// `lognormal:MEDIAN,SIGMA,LOW..HIGH`. Bounds are included; a draw outside of them is drawn again.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lengths {
    Constant(u32),
    /// Every length between the bounds equally often.
    Uniform {
        low: u32,
        high: u32,
    },
    Normal {
        mean: f64,
        deviation: f64,
        low: u32,
        high: u32,
    },
    LogNormal {
        median: f64,
        /// Standard deviation of the logarithm before the cut.
        sigma: f64,
        low: u32,
        high: u32,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub prompt_tokens: u32,
    /// Most tokens of the answer.
    pub max_tokens: u32,
}

impl Lengths {
    pub fn draw(&self, rng: &mut StdRng) -> u32 {
        let mut cut = |low: u32, high: u32, of_normal: &dyn Fn(f64) -> f64| loop {
            // About one draw in three lies inside, or more: `FromStr` sees to it.
            let length = of_normal(StandardNormal.sample(rng)).round();
            if (f64::from(low)..=f64::from(high)).contains(&length) {
                return length as u32;
            }
        };
        match *self {
            Lengths::Constant(length) => length,
            Lengths::Uniform { low, high } => rng.random_range(low..=high),
            Lengths::Normal { mean, deviation, low, high } => cut(low, high, &|z| mean + deviation * z),
            Lengths::LogNormal { median, sigma, low, high } => cut(low, high, &|z| median * (sigma * z).exp()),
        }
    }

    pub fn longest(&self) -> u32 {
        match *self {
            Lengths::Constant(length) => length,
            Lengths::Uniform { high, .. } | Lengths::Normal { high, .. } | Lengths::LogNormal { high, .. } => high,
        }
    }

    /// A number where there is one length, else the distribution in words.
    pub fn to_json(self) -> Value {
        match self {
            Lengths::Constant(length) => json!(length),
            _ => json!(self.to_string()),
        }
    }
}

impl FromStr for Lengths {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("normal:") {
            let (mean, deviation, low, high) = parameters(rest, "normal:MEAN,DEVIATION,LOW..HIGH")?;
            within(mean, mean - deviation, mean + deviation, low, high)?;
            return Ok(Lengths::Normal { mean, deviation, low, high });
        }
        if let Some(rest) = text.strip_prefix("lognormal:") {
            let (median, sigma, low, high) = parameters(rest, "lognormal:MEDIAN,SIGMA,LOW..HIGH")?;
            within(median, median / sigma.exp(), median * sigma.exp(), low, high)?;
            return Ok(Lengths::LogNormal { median, sigma, low, high });
        }
        if text.contains("..") {
            let (low, high) = bounds(text)?;
            return Ok(Lengths::Uniform { low, high });
        }
        tokens(text).map(Lengths::Constant)
    }
}

impl Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lengths::Constant(length) => write!(f, "{length}"),
            Lengths::Uniform { low, high } => write!(f, "{low}..{high}"),
            Lengths::Normal { mean, deviation, low, high } => write!(f, "normal:{mean},{deviation},{low}..{high}"),
            Lengths::LogNormal { median, sigma, low, high } => write!(f, "lognormal:{median},{sigma},{low}..{high}"),
        }
    }
}

fn tokens(text: &str) -> Result<u32, String> {
    let length = text.trim().parse::<u32>().ok().filter(|length| (1..=MAX_TOKENS).contains(length));
    length.ok_or_else(|| format!("'{text}' is no length: give 1 to {MAX_TOKENS} tokens"))
}

fn bounds(text: &str) -> Result<(u32, u32), String> {
    let (low, high) = text.split_once("..").ok_or_else(|| format!("'{text}' is not of the form LOW..HIGH"))?;
    let (low, high) = (tokens(low)?, tokens(high)?);
    if low > high { Err(format!("{low}..{high} is empty: give the lower bound first")) } else { Ok((low, high)) }
}

fn parameters(text: &str, form: &str) -> Result<(f64, f64, u32, u32), String> {
    let malformed = || format!("'{text}' is not of the form {form}");
    let parts: Vec<&str> = text.split(',').collect();
    let [centre, width, range] = parts[..] else { return Err(malformed()) };
    let number = |text: &str| text.trim().parse::<f64>().ok().filter(|number| number.is_finite());
    let (centre, width) = (number(centre).ok_or_else(malformed)?, number(width).ok_or_else(malformed)?);
    if width < 0.0 {
        return Err(format!("{width} is no width: it must not be negative"));
    }
    let (low, high) = bounds(range)?;
    Ok((centre, width, low, high))
}

/// Refuses bounds that next to no draw would fall between: the middle and a deviation to one side must.
fn within(centre: f64, below: f64, above: f64, low: u32, high: u32) -> Result<(), String> {
    let (low, high) = (f64::from(low), f64::from(high));
    if (low..=high).contains(&centre) && (below >= low || above <= high) {
        return Ok(());
    }
    Err(format!("{low}..{high} is too narrow: it must hold the middle and one deviation to either side of it"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::samples::{KS_CRITICAL, ks_statistic, mean_and_variance};
    use rand::SeedableRng;

    const SAMPLES: u64 = 5_000;

    fn draws(text: &str) -> Vec<f64> {
        let prompt: Lengths = text.parse().expect(text);
        let mut rng = StdRng::seed_from_u64(5);
        (0..SAMPLES).map(|_| f64::from(prompt.draw(&mut rng))).collect()
    }

    #[test]
    fn uniform_lengths_have_the_mean_variance_and_shape_of_the_uniform() {
        let draws = draws("64..255");
        let (mean, variance) = mean_and_variance(&draws);
        let want = (192.0f64.powi(2) - 1.0) / 12.0;
        assert!((mean - 159.5).abs() < 5.0 * (want / SAMPLES as f64).sqrt(), "{mean}");
        assert!((variance / want - 1.0).abs() < 5.0 * (0.8 / SAMPLES as f64).sqrt(), "{variance}");
        // The law of the lengths as if each were spread over the unit below it; so are the draws.
        let spread: Vec<f64> = (0..).zip(&draws).map(|(index, x)| x - f64::from(index * 617 % 1000) / 1000.0).collect();
        let ks = ks_statistic(&spread, |x| ((x - 63.0) / 192.0).clamp(0.0, 1.0));
        assert!(ks < KS_CRITICAL, "{ks}");
        // Control: eight lengths too many in the law are noticed.
        assert!(ks_statistic(&spread, |x| ((x - 63.0) / 200.0).clamp(0.0, 1.0)) > KS_CRITICAL);
    }

    #[test]
    fn normal_and_lognormal_lengths_have_their_mean_and_variance_and_keep_their_bounds() {
        let drawn = draws("normal:500,40,100..900");
        let (mean, variance) = mean_and_variance(&drawn);
        assert!((mean - 500.0).abs() < 5.0 * 40.0 / (SAMPLES as f64).sqrt(), "{mean}");
        assert!((variance / 1600.0 - 1.0).abs() < 5.0 * (2.0 / SAMPLES as f64).sqrt(), "{variance}");
        let drawn = draws("lognormal:1000,0.5,1..1000000");
        let logs: Vec<f64> = drawn.iter().map(|x| x.ln()).collect();
        let (mean, variance) = mean_and_variance(&logs);
        assert!((mean - 1000f64.ln()).abs() < 5.0 * 0.5 / (SAMPLES as f64).sqrt(), "{mean}");
        assert!((variance / 0.25 - 1.0).abs() < 5.0 * (2.0 / SAMPLES as f64).sqrt(), "{variance}");
        // Half of a normal of deviation 50 above its mean of 100: folded there, with a mean of 100 + 50 sqrt(2 / pi).
        let half = draws("normal:100,50,100..1000");
        assert!(half.iter().all(|&length| length >= 100.0));
        assert!((mean_and_variance(&half).0 - 139.9).abs() < 1.5, "{}", mean_and_variance(&half).0);
    }

    #[test]
    fn lengths_are_read_as_they_are_written() {
        for text in ["128", "64..256", "normal:128,32,1..512", "lognormal:200,0.8,16..4096"] {
            assert_eq!(text.parse::<Lengths>().expect(text).to_string(), text);
        }
        assert_eq!("7".parse::<Lengths>().expect("valid").to_json(), json!(7));
        for text in [
            "",
            "0",
            "x",
            "1000001",
            "9..3",
            "0..3",
            "normal:5",
            "normal:5,1",
            "normal:5,-1,1..9",
            "normal:99,1,1..9",
            "normal:50,1000,49..51",
            "normal:nan,1,1..9",
            "lognormal:0,1,1..9",
            "lognormal:100,9,99..101",
            "gamma:1,1,1..2",
        ] {
            assert!(text.parse::<Lengths>().is_err(), "{text}");
        }
    }
}
