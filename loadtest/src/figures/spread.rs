//! How much figures differ from run to run.

use serde_json::{Map, Value, json};

use crate::figures::tally::Tally;

#[derive(Debug, Clone)]
pub struct Figure {
    pub title: &'static str,
    pub key: &'static str,
    /// Its value in each run that has it, in the order of the runs.
    pub values: Vec<f64>,
}

#[derive(Debug, Clone)]
pub struct Spread {
    pub runs: usize,
    pub figures: Vec<Figure>,
}

impl Spread {
    pub fn of(runs: &[&Tally]) -> Self {
        let figure = |title, key, value: &dyn Fn(&Tally) -> Option<f64>| Figure {
            title,
            key,
            values: runs.iter().copied().filter_map(value).collect(),
        };
        let time = |key: &'static str, percentile: f64| move |tally: &Tally| tally.percentile_ms(key, percentile);
        let figures = vec![
            figure("output tokens a second", "output_throughput", &|tally| Some(tally.output_tokens_per_s())),
            figure("requests a second", "request_throughput", &|tally| Some(tally.requests_per_s())),
            figure("good requests a second", "request_goodput", &Tally::good_requests_per_s),
            figure("first token p50, ms", "median_ttft_ms", &time("ttft", 50.0)),
            figure("first token p99, ms", "p99_ttft_ms", &time("ttft", 99.0)),
            figure("between tokens p50, ms", "median_itl_ms", &time("itl", 50.0)),
            figure("between tokens p99, ms", "p99_itl_ms", &time("itl", 99.0)),
            figure("end to end p99, ms", "p99_e2el_ms", &time("e2el", 99.0)),
        ];
        Self { runs: runs.len(), figures: figures.into_iter().filter(|figure| !figure.values.is_empty()).collect() }
    }

    /// One object a figure: mean, coefficient of variation, and the value of each run.
    pub fn to_json(&self) -> Value {
        let figures = self.figures.iter().map(|figure| {
            let body = json!({ "mean": figure.mean(), "cv": figure.cv(), "values": figure.values });
            (figure.key.to_owned(), body)
        });
        json!({ "runs": self.runs, "figures": figures.collect::<Map<_, _>>() })
    }
}

impl Figure {
    pub fn mean(&self) -> f64 {
        self.values.iter().sum::<f64>() / self.values.len() as f64
    }

    /// Coefficient of variation: standard deviation of the runs as a sample (n - 1) over their mean. None for one run
    /// and for a mean of nothing.
    pub fn cv(&self) -> Option<f64> {
        let mean = self.mean();
        if self.values.len() < 2 || mean == 0.0 {
            return None;
        }
        let squares: f64 = self.values.iter().map(|value| (value - mean).powi(2)).sum();
        Some((squares / (self.values.len() - 1) as f64).sqrt() / mean)
    }
}

/// Which of `runs` is in the middle by output tokens a second: the one to show of several. The lower of two.
pub fn middle(runs: &[&Tally]) -> Option<usize> {
    let mut order: Vec<usize> = (0..runs.len()).collect();
    order.sort_by(|&a, &b| runs[a].output_tokens_per_s().total_cmp(&runs[b].output_tokens_per_s()));
    order.get(order.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::record::RequestRecord;
    use crate::testing::records::record;

    /// A run of one second in which one answer of `tokens` tokens arrived.
    fn run(tokens: u64) -> Tally {
        let mut tally = Tally::default();
        tally.add(&RequestRecord { completion_tokens: Some(tokens), ..record(0, 0, &[1000]) });
        tally
    }

    #[test]
    fn mean_and_variation_are_of_the_runs() {
        let runs = [run(90), run(110), run(100)];
        let runs: Vec<&Tally> = runs.iter().collect();
        let spread = Spread::of(&runs);
        let throughput = &spread.figures[0];
        assert_eq!((throughput.key, throughput.values.as_slice()), ("output_throughput", &[90.0, 110.0, 100.0][..]));
        assert_eq!((throughput.mean(), throughput.cv()), (100.0, Some(0.1)));
        assert_eq!(middle(&runs), Some(2));
        assert!(spread.figures.iter().all(|figure| figure.key != "request_goodput"), "no limits, no goodput");
        assert_eq!(spread.to_json()["figures"]["output_throughput"]["cv"], 0.1);
        assert_eq!(Spread::of(&[&run(5)]).figures[0].cv(), None, "one run");
        assert_eq!(Spread::of(&[&run(0), &run(0)]).figures[0].cv(), None, "a mean of nothing");
        assert_eq!(middle(&[]), None);
    }
}
