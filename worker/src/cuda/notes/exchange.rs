//! How long ranks take to add up what each has of a product, from what all of them noted of a step.
//!
//! Timers of different GPUs begin and go as they like, so the notes themselves relate them. A word that rank i pushes
//! and rank j hears takes `least(i, j)` at least: of all layers, blocks and warps the least that j's timer, when all
//! was heard, is ahead of i's when it was pushed. That is the way of a word and how far j's timer is ahead; both ways
//! together, if the quickest word takes as long in one direction as in the other,
//!
//!   ahead(i, j) = (least(i, j) - least(j, i)) / 2,    way(i, j) = (least(i, j) + least(j, i)) / 2
//!
//! What is wrong with that: without the assumption `ahead` is off by `way` at most, since no word comes before it is
//! pushed. How well it holds the notes tell: ranks that are related through a third one ([`Exchanges::closure_us`]),
//! and by half of the layers ([`Exchanges::drift_us`]). A stage's own time is as exact as the GPU's timer, which goes
//! on in steps of 64 ns on an H200: `way`, a least of many, may be too small by up to one of them.

use std::ops::Range;

use serde::Serialize;

use super::phase::Phase;
use super::roles::ExchangeStages;
use super::trace::Trace;

/// The exchanges of a step between ranks.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchanges {
    /// By the product whose sums they are.
    pub sums: Vec<Exchange>,
    /// From a push until it has been heard at the quickest, in microseconds: of the two ranks that are nearest to each
    /// other.
    pub nearest_us: f64,
    /// The same of the two that are farthest apart: the most by which timers that keep their rate can be related
    /// wrongly.
    pub farthest_us: f64,
    /// Most that a rank's timer differs between what two ranks say directly and what they say through a third, in
    /// microseconds; of at least three ranks.
    pub closure_us: Option<f64>,
    /// Most that a rank's timer moves from what the first half of the layers says to what the second half says, in
    /// microseconds.
    pub drift_us: f64,
}

/// The exchange of a product's sums, over all layers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Exchange {
    /// The product: attention's output or down.
    pub phase: Phase,
    /// From the last push of a block of any rank to when the last consumer warp of any rank has its input.
    pub push_to_use: Spread,
    /// Its first part: until the last block of any rank has heard all sums, and is about to publish its own to its GPU.
    pub push_to_heard: Spread,
    /// The rest of it.
    pub heard_to_use: Spread,
    /// Of each warp that tells, not of the last alone: from when the last rank has pushed what this warp tells until a
    /// rank has heard it. What it takes over `nearest_us` is looks that come late, and trips behind the stream of
    /// weights.
    pub word: Spread,
}

/// Times of the layers of a step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Spread {
    /// In microseconds.
    pub median_us: f64,
    /// In microseconds.
    pub mean_us: f64,
    /// In microseconds.
    pub most_us: f64,
}

impl Exchanges {
    /// From the notes of all ranks, by rank, of the same step. `None`: there is but one rank, or they note no
    /// exchanges.
    pub fn new(ranks: &[&Trace]) -> Option<Self> {
        let first = ranks.first()?;
        let words: Vec<_> = ranks.iter().map(|trace| Words::new(trace)).collect();
        let half = first.layers * first.roles.exchanges.len() / 2 * first.blocks * first.roles.tellers.len();
        let [all, early, late] = [0..usize::MAX, 0..half, half..usize::MAX].map(|of| Ways::new(&words, of));
        let pairs = || (0..ranks.len()).flat_map(|j| (0..j).map(move |i| (i, j)));
        let ways = || pairs().map(|(i, j)| all.way_ns(i, j));
        let nearest = ways().reduce(f64::min).filter(|ns| ns.is_finite())?;
        let farthest = ways().fold(nearest, f64::max);
        let through = |(i, j)| (0..i).map(move |k| (i, j, k));
        let closures = pairs().flat_map(through);
        let closures = closures.map(|(i, j, k)| (all.ahead_ns(k, i) + all.ahead_ns(i, j) - all.ahead_ns(k, j)).abs());
        let drift = pairs().map(|(i, j)| (early.ahead_ns(i, j) - late.ahead_ns(i, j)).abs()).fold(0.0, f64::max);
        let ahead: Vec<f64> = (0..ranks.len()).map(|rank| all.ahead_ns(0, rank)).collect();
        Some(Self {
            sums: (0..first.roles.exchanges.len()).map(|index| Exchange::new(index, ranks, &words, &ahead)).collect(),
            nearest_us: nearest / 1e3,
            farthest_us: farthest / 1e3,
            closure_us: closures.reduce(f64::max).map(|ns| ns / 1e3),
            drift_us: drift / 1e3,
        })
    }
}

impl Exchange {
    /// The exchange number `index` of a layer. `words`: of each rank; `ahead`: of its timer, by how many ns it is ahead
    /// of rank 0's.
    fn new(index: usize, ranks: &[&Trace], words: &[Words], ahead: &[f64]) -> Self {
        let roles = ranks[0].roles;
        let ExchangeStages { phase, pushed, heard, used, layers_on } = roles.exchanges[index];
        let last = |warps: Range<usize>, layer: usize, stage: usize| {
            let of = |trace: &Trace| {
                let places = (0..trace.blocks).flat_map(|block| warps.clone().map(move |warp| (block, warp)));
                let times = places.filter_map(|(block, warp)| trace.reached_ns(block, warp, layer, stage));
                times.fold(f64::NEG_INFINITY, f64::max)
            };
            ranks.iter().zip(ahead).map(|(trace, ahead)| of(trace) - ahead).fold(f64::NEG_INFINITY, f64::max)
        };
        let ends = (0..ranks[0].layers).map(|layer| {
            let teller = |stage| last(roles.tellers.clone(), layer, stage);
            [teller(pushed), teller(heard), last(0..roles.consumers, layer + layers_on, used)]
        });
        let ends: Vec<[f64; 3]> = ends.collect();
        let spread = |from: usize, to: usize| Spread::new(ends.iter().map(|of| (of[to] - of[from]) / 1e3).collect());
        let of_exchange =
            |place: &usize| place / roles.tellers.len() / ranks[0].blocks % roles.exchanges.len() == index;
        let places = (0..words[0].0.len()).filter(of_exchange);
        let word = Spread::new(places.flat_map(|place| waits_us(words, ahead, place)).collect());
        Self { phase, push_to_use: spread(0, 2), push_to_heard: spread(0, 1), heard_to_use: spread(1, 2), word }
    }
}

impl Spread {
    /// Of at least one layer.
    fn new(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        let mean = us.iter().sum::<f64>() / us.len() as f64;
        Self { median_us: us[us.len() / 2], mean_us: mean, most_us: us[us.len() - 1] }
    }
}

/// When a rank's tellers had pushed their sums and heard all ranks', `[layer][exchange][block][teller]` in ns of its
/// own timer, where they took part. What one pushes the same one of every other rank hears.
struct Words(Vec<Option<[f64; 2]>>);

impl Words {
    fn new(trace: &Trace) -> Self {
        let mut words = Vec::new();
        for layer in 0..trace.layers {
            for stages in trace.roles.exchanges {
                for block in 0..trace.blocks {
                    words.extend(trace.roles.tellers.clone().map(|warp| {
                        let at = |stage| trace.reached_ns(block, warp, layer, stage);
                        Some([at(stages.pushed)?, at(stages.heard)?])
                    }));
                }
            }
        }
        Self(words)
    }
}

/// From when the last rank has pushed the word at a place until each has heard it, in us; of none where one has no such
/// word.
fn waits_us(words: &[Words], ahead: &[f64], place: usize) -> Vec<f64> {
    let times = words.iter().zip(ahead).map(|(words, ahead)| words.0[place].map(|times| times.map(|ns| ns - ahead)));
    let times: Vec<_> = times.collect::<Option<_>>().unwrap_or_default();
    let last = times.iter().map(|[pushed, _]| *pushed).fold(f64::NEG_INFINITY, f64::max);
    times.into_iter().map(|[_, heard]| (heard - last) / 1e3).collect()
}

/// `least(i, j)`, in ns.
struct Ways(Vec<Vec<f64>>);

impl Ways {
    /// Of some of the words.
    fn new(ranks: &[Words], of: Range<usize>) -> Self {
        let least = |from: &Words, to: &Words| {
            let pairs = from.0.iter().zip(&to.0).take(of.end).skip(of.start);
            let took = pairs.filter_map(|(from, to)| Some((*to)?[1] - (*from)?[0]));
            took.fold(f64::INFINITY, f64::min)
        };
        Self(ranks.iter().map(|from| ranks.iter().map(|to| least(from, to)).collect()).collect())
    }

    /// By how much rank j's timer is ahead of rank i's.
    fn ahead_ns(&self, i: usize, j: usize) -> f64 {
        (self.0[i][j] - self.0[j][i]) / 2.0
    }

    /// How long the quickest word takes between ranks i and j.
    fn way_ns(&self, i: usize, j: usize) -> f64 {
        (self.0[i][j] + self.0[j][i]) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::super::roles::{NARROW, Roles, WIDE};
    use super::super::trace::{ENDED, STAGES};
    use super::*;

    const BLOCKS: usize = 6;
    const WARPS: usize = 19;
    const LAYERS: usize = 4;

    /// What an exchange took, in us.
    struct Truth {
        /// By layer: the last push, the last hearing, the last use.
        ends: [[f64; 3]; LAYERS],
        words: Vec<f64>,
    }

    /// Ranks whose words take `way(from, to)` ns. Their timers differ by seconds and their launches begin and end at
    /// other times. After half of the layers rank 1's timer is `late` ns behind.
    fn group(ranks: usize, way: impl Fn(usize, usize) -> i64, late: i64) -> (Vec<Trace>, Vec<Truth>) {
        let mut random = 1u64;
        let mut up_to = |ns: i64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) as i64 % (ns / 4) * 4
        };
        let mut values = vec![vec![0; BLOCKS * WARPS * (LAYERS + 1) * STAGES]; ranks];
        let place = |block, warp, layer, stage| ((block * WARPS + warp) * (LAYERS + 1) + layer) * STAGES + stage;
        let timer = |rank: usize, ns: i64| 5_000_000_000_000_000 + rank as i64 * 7_000_000_000 + ns;
        for (rank, values) in values.iter_mut().enumerate() {
            values[place(0, NARROW.clocks, LAYERS, ENDED + 1)] = timer(rank, rank as i64 * 3000 + 400_000);
        }
        let mut truth = Vec::new();
        for (index, stages) in NARROW.exchanges.iter().enumerate() {
            let mut words = Vec::new();
            let ends = std::array::from_fn(|layer| {
                let now = 20_000 * (2 * layer + index) as i64 + 10_000;
                let behind = |rank| if rank == 1 && layer >= LAYERS / 2 { late } else { 0 };
                let mut note = |rank: usize, block, warp, layer, stage, ns| {
                    values[rank][place(block, warp, layer, stage)] = timer(rank, ns - behind(rank));
                };
                let mut last = [0; 3];
                let mut heard_by = vec![0; ranks];
                // The second teller of the last block has no sums.
                for at in 0..2 * BLOCKS - 1 {
                    let (block, warp) = (at / 2, NARROW.tellers.start + at % 2);
                    let pushed: Vec<_> = (0..ranks).map(|_| now + up_to(6000)).collect();
                    for rank in 0..ranks {
                        let arrives = |from: usize| pushed[from] + if from == rank { 0 } else { way(from, rank) };
                        let heard = (0..ranks).map(arrives).max().unwrap();
                        note(rank, block, warp, layer, stages.pushed, pushed[rank]);
                        note(rank, block, warp, layer, stages.heard, heard);
                        heard_by[rank] = heard.max(heard_by[rank]);
                        words.push((heard - pushed.iter().max().unwrap()) as f64 / 1e3);
                        last = [last[0].max(pushed[rank]), last[1].max(heard), 0];
                    }
                }
                for (rank, heard) in heard_by.into_iter().enumerate() {
                    // Some consumers do not take part.
                    for at in (0..BLOCKS * NARROW.consumers).filter(|at| at % 7 != 3) {
                        let used = heard + 900 + up_to(400);
                        let (block, warp) = (at / NARROW.consumers, at % NARROW.consumers);
                        note(rank, block, warp, layer + stages.layers_on, stages.used, used);
                        last[2] = used.max(last[2]);
                    }
                }
                last.map(|ns| ns as f64 / 1e3)
            });
            truth.push(Truth { ends, words });
        }
        let trace = |values| Trace::new(values, BLOCKS, WARPS, LAYERS, &NARROW);
        (values.into_iter().map(trace).collect(), truth)
    }

    fn exchanges(ranks: &[Trace]) -> Option<Exchanges> {
        Exchanges::new(&ranks.iter().collect::<Vec<_>>())
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-6
    }

    /// The most that a median, mean or longest time differs from what it is.
    fn error(got: &Exchange, truth: &Truth) -> f64 {
        let between = |from: usize, to: usize| truth.ends.map(|of| of[to] - of[from]).to_vec();
        let parts = [
            (&got.push_to_use, between(0, 2)),
            (&got.push_to_heard, between(0, 1)),
            (&got.heard_to_use, between(1, 2)),
            (&got.word, truth.words.clone()),
        ];
        let errors = parts.into_iter().flat_map(|(got, mut us)| {
            us.sort_by(f64::total_cmp);
            let mean = us.iter().sum::<f64>() / us.len() as f64;
            [got.median_us - us[us.len() / 2], got.mean_us - mean, got.most_us - us[us.len() - 1]]
        });
        errors.map(f64::abs).fold(0.0, f64::max)
    }

    #[test]
    fn times_between_ranks_are_right_whatever_their_timers() {
        for count in [2, 4] {
            let (ranks, truth) = group(count, |i, j| 800 + 40 * (i + j) as i64, 0);
            let got = exchanges(&ranks).unwrap();
            let phases: Vec<_> = got.sums.iter().map(|of| of.phase).collect();
            assert_eq!(phases, [Phase::AttentionOut, Phase::Down]);
            let errors = got.sums.iter().zip(&truth).map(|(got, truth)| error(got, truth));
            assert!(errors.clone().all(|us| us < 1e-6), "{count} ranks: {:?}", errors.collect::<Vec<_>>());
            assert!(near(got.nearest_us, 0.84) && near(got.farthest_us, [0.84, 1.0][count / 4]), "{got:?}");
            assert_eq!(got.closure_us.is_some(), count > 2);
            assert!(got.closure_us.unwrap_or(0.0) < 1e-6 && got.drift_us < 1e-6, "{got:?}");
            // Where timers are not related launches seem to end at the same time.
            let words: Vec<_> = ranks.iter().map(Words::new).collect();
            let ranks: Vec<_> = ranks.iter().collect();
            for (index, truth) in truth.iter().enumerate() {
                let wrong = error(&Exchange::new(index, &ranks, &words, &[0.0; 4]), truth);
                assert!(wrong > 0.1, "{count} ranks: {wrong}");
            }
        }
    }

    #[test]
    fn a_way_that_is_longer_in_one_direction_shows_as_closure() {
        let (ranks, truth) = group(4, |i, j| if (i, j) == (1, 0) { 1200 } else { 800 }, 0);
        let got = exchanges(&ranks).unwrap();
        assert!(near(got.closure_us.unwrap(), 0.2) && near(got.farthest_us, 1.0) && got.drift_us < 1e-6, "{got:?}");
        let errors: Vec<_> = got.sums.iter().zip(&truth).map(|(got, truth)| error(got, truth)).collect();
        assert!(errors.iter().all(|us| *us < 0.2 + 1e-6) && errors.iter().any(|us| *us > 0.01), "{errors:?}");
    }

    #[test]
    fn a_timer_that_does_not_keep_its_rate_shows_as_drift() {
        let got = exchanges(&group(2, |_, _| 800, 400).0).unwrap();
        assert!(near(got.drift_us, 0.4) && got.closure_us.is_none(), "{got:?}");
    }

    #[test]
    fn one_rank_and_wide_passes_tell_of_no_exchange() {
        assert!(exchanges(&group(1, |_, _| 0, 0).0).is_none() && exchanges(&[]).is_none());
        let nothing = |roles: &'static Roles| Trace::new(vec![0; 4 * 12 * STAGES], 1, 12, 3, roles);
        assert!(exchanges(&[nothing(&WIDE), nothing(&WIDE)]).is_none());
    }
}
