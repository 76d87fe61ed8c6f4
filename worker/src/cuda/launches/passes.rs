//! Which rows of a step are computed together: a step has up to hundreds of rows, a launch as many as its kernel has
//! columns.
//!
//! A pass streams all weights, so what counts is how many passes there are, and how wide: three rows in a pass of eight
//! cost what eight do. Kernels for prompts have no LM head and take only rows that do not sample. Rows of a sequence
//! stay in order from pass to pass, because a later pass finds K and V of the earlier ones in memory; only the last row
//! of a sequence samples, so all prompt passes can come first.

use crate::cuda::kernels::variants::Width;

/// The fastest ways to compute any number of rows with given kernels.
#[derive(Debug, Clone)]
pub struct Passes {
    /// Kernel for rows that do not sample.
    prompt: Option<Width>,
    /// Of so many rows that may sample: the fastest way's time, and the columns of one of its passes.
    best: Vec<(u64, usize)>,
    columns: usize,
}

impl Passes {
    /// The ways with `widths`, one of which at least samples, for steps of up to `most_rows` rows.
    pub fn new(widths: &[Width], most_rows: usize) -> Self {
        let (sampling, others): (Vec<Width>, Vec<Width>) = widths.iter().partition(|width| width.samples);
        let columns = sampling.iter().map(|width| width.columns).max().unwrap_or(0);
        assert!(columns > 0, "no kernel samples: {widths:?}");
        let mut best: Vec<(u64, usize)> = vec![(0, 0)];
        for rows in 1..=most_rows {
            let with = |width: &Width| (best[rows.saturating_sub(width.columns)].0 + u64::from(width.time_us), *width);
            let ways = sampling.iter().map(with);
            // Of equally fast ways the one of fewer passes.
            let fastest = ways.min_by_key(|(time, width)| (*time, std::cmp::Reverse(width.columns)));
            let (time, width) = fastest.expect("a kernel that samples, as asserted above");
            best.push((time, width.columns));
        }
        Self { prompt: others.into_iter().max_by_key(|width| width.columns), best, columns }
    }

    /// Most rows of a pass whose rows sample.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// The passes of a step, in the order in which they run, as indices of its rows; `samples` says of each row whether
    /// it does.
    ///
    /// # Panics
    /// If there are more rows than steps have at most.
    pub fn of(&self, samples: &[bool]) -> Vec<Vec<usize>> {
        // A prefix of what each sequence has of rows that do not sample, so its other rows come after it.
        let mut left = self.prompt_rows(samples.len(), samples.iter().filter(|samples| !*samples).count());
        let (first, rest): (Vec<usize>, Vec<usize>) = (0..samples.len()).partition(|row| {
            let taken = !samples[*row] && left > 0;
            left -= usize::from(taken);
            taken
        });
        let width = self.prompt.map_or(1, |width| width.columns);
        let mut passes: Vec<Vec<usize>> = first.chunks(width).map(<[usize]>::to_vec).collect();
        let mut rest = rest.as_slice();
        while !rest.is_empty() {
            let (pass, others) = rest.split_at(self.best[rest.len()].1.min(rest.len()));
            passes.push(pass.to_vec());
            rest = others;
        }
        passes
    }

    /// How many of `rows` rows, of which `plain` do not sample, go into prompt passes.
    fn prompt_rows(&self, rows: usize, plain: usize) -> usize {
        let Some(width) = self.prompt else { return 0 };
        let taken = |passes: usize| plain.min(passes * width.columns);
        let time = |passes: &usize| *passes as u64 * u64::from(width.time_us) + self.best[rows - taken(*passes)].0;
        (0..=plain.div_ceil(width.columns)).min_by_key(time).map_or(0, taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NARROW: [Width; 2] =
        [Width { columns: 1, samples: true, time_us: 3370 }, Width { columns: 8, samples: true, time_us: 3990 }];
    const WIDE: [Width; 3] = [
        Width { columns: 32, samples: true, time_us: 4400 },
        Width { columns: 64, samples: true, time_us: 5400 },
        Width { columns: 128, samples: false, time_us: 6800 },
    ];

    fn all() -> Vec<Width> {
        [&NARROW[..], &WIDE[..]].concat()
    }

    fn sizes(widths: &[Width], samples: &[bool]) -> Vec<usize> {
        Passes::new(widths, 2048).of(samples).iter().map(Vec::len).collect()
    }

    /// A prompt chunk of `len` rows, `last`: up to its prompt's end.
    fn chunk(len: usize, last: bool) -> Vec<bool> {
        (1..=len).map(|row| row == len && last).collect()
    }

    #[test]
    fn rows_that_decode_share_the_cheapest_passes_that_hold_them() {
        let decode = |rows| sizes(&all(), &vec![true; rows]);
        for (rows, expected) in [
            (1, vec![1]),
            (2, vec![2]),
            (8, vec![8]),
            // One pass of 32 beats 8 and 1.
            (9, vec![9]),
            (33, vec![33]),
            (64, vec![64]),
            (65, vec![64, 1]),
            (72, vec![64, 8]),
            (96, vec![64, 32]),
            (128, vec![64, 64]),
        ] {
            assert_eq!(decode(rows), expected, "{rows} rows");
        }
        assert_eq!(sizes(&NARROW, &[true; 19]), [8, 8, 3]);
        assert_eq!(sizes(&NARROW, &[true; 17]), [8, 8, 1]);
    }

    #[test]
    fn prompts_take_the_widest_passes_and_their_last_rows_sample() {
        assert_eq!(sizes(&all(), &chunk(512, false)), [128; 4]);
        assert_eq!(sizes(&all(), &chunk(512, true)), [128, 128, 128, 127, 1]);
        assert_eq!(sizes(&all(), &chunk(20, true)), [20]);
        assert_eq!(sizes(&all(), &chunk(64, false)), [64]);
        assert_eq!(sizes(&all(), &chunk(65, false)), [65]);
        assert_eq!(sizes(&NARROW, &chunk(20, true)), [8, 8, 4]);
        // 32 that decode beside a chunk: what is over three passes goes along with them.
        let beside = [vec![true; 32], chunk(416, false)].concat();
        assert_eq!(sizes(&all(), &beside), [128, 128, 128, 64]);
    }

    /// Any step: every row once, each in a pass that may hold it, rows of a sequence in order, and no way that is
    /// faster.
    #[test]
    fn passes_hold_every_row_in_the_order_of_its_sequence() {
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for round in 0..400 {
            let widths = if round % 4 == 0 { NARROW.to_vec() } else { all() };
            let mut samples = Vec::new();
            let mut sequence = Vec::new();
            for id in 0..1 + random(40) {
                let len = if random(3) == 0 { 1 + random(200) } else { 1 };
                samples.extend(chunk(len, len == 1 || random(2) == 0));
                sequence.extend(vec![id; len]);
            }
            let passes = Passes::new(&widths, samples.len());
            let of = passes.of(&samples);
            let mut last = vec![None; samples.len()];
            let mut seen = vec![false; samples.len()];
            let mut time = 0;
            for pass in &of {
                let fits = |width: &&Width| {
                    pass.len() <= width.columns && (width.samples || !pass.iter().any(|row| samples[*row]))
                };
                let width =
                    widths.iter().filter(fits).min_by_key(|width| width.columns).expect("a kernel for the pass");
                time += u64::from(width.time_us);
                for (place, row) in pass.iter().enumerate() {
                    assert!(!std::mem::replace(&mut seen[*row], true) && last[sequence[*row]] < Some(*row));
                    last[sequence[*row]] = Some(*row);
                    // Rows of a sequence are next to each other, without a gap.
                    if place > 0 && sequence[pass[place - 1]] == sequence[*row] {
                        assert_eq!(pass[place - 1] + 1, *row);
                    }
                }
            }
            assert!(seen.iter().all(|seen| *seen), "{of:?}");
            let in_order = samples.chunks(passes.columns()).map(|rows| {
                let holds = |width: &&Width| width.samples && width.columns >= rows.len();
                u64::from(widths.iter().filter(holds).map(|width| width.time_us).min().unwrap())
            });
            assert!(time <= in_order.sum(), "{of:?}");
        }
    }
}
