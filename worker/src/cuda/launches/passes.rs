//! Which rows of a step are computed together: a step has up to thousands of rows, a launch as many as its kernel has
//! columns.
//!
//! A pass streams all weights, so what counts is how many passes there are, and how wide: three rows in a pass of eight
//! cost what eight do. Where there are matrix passes, one holds all rows of a step that narrower kernels do not,
//! prompts and decoding rows in the order of the step; it ends only where it has no room for more. Of a group, a step
//! of more rows than one has is two of about half of them, which are computed together.

use std::ops::Range;

use crate::batch::Row;
use crate::cuda::kernels::launch::{ROW_SAMPLE, Row as LaunchRow};
use crate::cuda::kernels::matrix::Products;
use crate::cuda::kernels::variants::{Attention, TOKEN_BLOCK, Width};
use crate::plan::PAGE_POSITIONS;

/// Rows at most that are drawn together: 32 drafts, as many as servers allow, and the row in front of them. (Longer
/// runs of rows that all sample are of prompts whose log-probabilities are wanted, whose tokens are given.)
const MOST_DRAWN: usize = 33;

/// The fastest ways to compute any number of rows with given kernels.
#[derive(Debug, Clone)]
pub struct Passes {
    attention: Attention,
    /// By columns ascending.
    widths: Vec<Width>,
    /// Of so many rows: the fastest way's time, and the kernel of its first pass.
    best: Vec<(u64, Width)>,
    columns: usize,
    /// Of matrix passes.
    products: Option<Products>,
}

impl Passes {
    /// The ways with `widths`, of which there is one, for steps of up to `most_rows` rows.
    pub fn new(widths: &[Width], most_rows: usize, attention: Attention) -> Self {
        let mut widths = widths.to_vec();
        widths.sort_by_key(|width| width.columns);
        let most = |width: &Width| width.bounds.map_or(width.columns, |bounds| bounds.samples.min(width.columns));
        let columns = widths.iter().map(most).max().unwrap_or(0);
        assert!(columns > 0, "there is a kernel: {widths:?}");
        let mut best: Vec<(u64, Width)> = vec![(0, widths[0])];
        for rows in 1..=most_rows {
            let with = |width: &Width| {
                let taken = rows.min(width.columns);
                (best[rows - taken].0 + width.time(taken), *width)
            };
            let ways = widths.iter().map(with);
            // Of equally fast ways the one of fewer passes.
            let fastest = ways.min_by_key(|(time, width)| (*time, std::cmp::Reverse(width.columns)));
            best.push(fastest.expect("a kernel, as asserted above"));
        }
        Self { attention, widths, best, columns, products: None }
    }

    /// The same where products of matrix passes are divided so among blocks.
    pub fn by(self, products: Option<Products>) -> Self {
        Self { products, ..self }
    }

    /// Most rows of a pass whose rows sample.
    pub fn columns(&self) -> usize {
        self.columns
    }

    /// Whether rows that all sample can be one pass.
    pub fn hold(&self, rows: &[Row]) -> bool {
        let narrowest = self.widths.iter().find(|width| width.columns >= rows.len());
        narrowest.is_some_and(|width| fitting(width, rows) == rows.len())
    }

    /// The columns of the kernel that computes a pass fastest, or so many passes of rows that each go on by a position.
    /// It counts how often pages are read where a sequence has several rows, and what pages of the others take longer;
    /// where that is nothing, the narrowest. Of several passes the last decides: it has the most pages.
    ///
    /// # Panics
    /// If no kernel holds the rows.
    pub fn columns_for(&self, rows: &[LaunchRow], steps: u32) -> usize {
        let of_batch = |row: &LaunchRow| {
            let sample = row.flags & ROW_SAMPLE != 0;
            let position = (row.position + steps - 1).min(row.last_position).max(row.position);
            Row { slot: row.slot, token: row.token, position, sample }
        };
        let of_batch: Vec<Row> = rows.iter().map(of_batch).collect();
        let holds = |width: &&Width| width.columns >= rows.len() && fitting(width, &of_batch) == rows.len();
        let widths = self.widths.iter().filter(holds);
        let fastest = widths.min_by_key(|width| 1000 * width.time(rows.len()) + self.reads_ns(width, &of_batch));
        fastest.expect("passes are chosen so that a kernel holds their rows").columns
    }

    /// What it takes that rows of sequences with several read their pages, and what those of others take longer than
    /// elsewhere.
    fn reads_ns(&self, width: &Width, rows: &[Row]) -> u64 {
        let together = self.attention.rows_together(width);
        let window = self.widths.iter().find_map(|width| width.bounds?.window);
        let reads = rows.chunk_by(|row, next| row.slot == next.slot).map(|rows| {
            let pages = rows[rows.len() - 1].position as usize / PAGE_POSITIONS + 1;
            let seen = window.map_or(pages, |window| pages.min(window / PAGE_POSITIONS + 1)) as u64;
            seen * match rows.len() {
                1 => self.attention.page_alone_ns(width),
                several => several.div_ceil(together) as u64 * self.attention.page_ns,
            }
        });
        reads.sum()
    }

    /// Whether two passes of a step, one behind the other, are computed together, so that what the ranks of one tell
    /// each other travels while the other multiplies: matrix passes of a group that are not one.
    pub fn pair(&self, first: usize, second: usize) -> bool {
        let widest = self.widths.last().filter(|width| width.bounds.is_some() && self.attention.ranks > 1);
        widest.is_some_and(|width| first + second > width.columns && first.min(second) >= TOKEN_BLOCK)
    }

    /// The rows of two passes that are computed together, where `width` takes the first ones of `rows`, and not all.
    fn halves(&self, width: &Width, rows: &[Row]) -> Option<[usize; 2]> {
        let first = self.first_half(width.columns, rows.len());
        let first = fitting(&Width { columns: first, ..*width }, rows);
        let second = fitting(width, &rows[first..]);
        self.pair(first, second).then_some([first, second])
    }

    /// The rows of the first of two passes that take `rows`, if both have so many `columns`: half of them, or up to a
    /// quarter of that more where products then take fewer rounds of tiles. (As many less would take as many rounds.)
    fn first_half(&self, columns: usize, rows: usize) -> usize {
        let rows = rows.min(2 * columns);
        let half = rows.div_ceil(2).next_multiple_of(TOKEN_BLOCK).min(columns);
        let firsts = (half..rows.min(columns + 1).min(half * 5 / 4 + 1)).step_by(TOKEN_BLOCK);
        firsts.min_by_key(|first| self.products.map(|of| of.time(*first) + of.time(rows - first))).unwrap_or(half)
    }

    /// The passes of a step, in the order in which they run, as ranges of its rows.
    ///
    /// # Panics
    /// If there are more rows than steps have at most.
    pub fn of(&self, rows: &[Row]) -> Vec<Range<usize>> {
        let mut passes = Vec::new();
        let mut begin = 0;
        while begin < rows.len() {
            let width = self.best[rows.len() - begin].1;
            let left = &rows[begin..];
            let taken = self.halves(&width, left).unwrap_or_else(|| [fitting(&width, left), 0]);
            for taken in taken.into_iter().filter(|taken| *taken > 0) {
                passes.push(begin..begin + taken);
                begin += taken;
            }
        }
        passes
    }
}

/// How many of the rows a pass takes, at least one: whole sequences, but for one that the last column cuts, unless its
/// rows are drawn together.
fn fitting(width: &Width, rows: &[Row]) -> usize {
    let within = &rows[..rows.len().min(width.columns)];
    let Some(bounds) = width.bounds else { return undrafted(rows, within.len()) };
    let (mut taken, mut samples) = (0, 0);
    for sequence in within.chunk_by(|row, next| row.slot == next.slot) {
        samples += sequence.iter().filter(|row| row.sample).count();
        if samples > bounds.samples {
            break;
        }
        taken += sequence.len();
    }
    undrafted(rows, taken.max(1))
}

/// The first `taken` rows without the begin of a sequence with drafts that goes on behind them: the sampler draws each
/// of its rows with those in front of it, so they are of one launch. What is longer than a kernel has columns is cut.
fn undrafted(rows: &[Row], taken: usize) -> usize {
    let Some(slot) = rows.get(taken).map(|row| row.slot) else { return taken };
    let begin = taken - rows[..taken].iter().rev().take_while(|row| row.slot == slot).count();
    let len = rows[begin..].iter().take_while(|row| row.slot == slot).count();
    let has_drafts = len <= MOST_DRAWN && rows[begin..begin + len].iter().all(|row| row.sample);
    if has_drafts && begin > 0 { begin } else { taken }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::kernels::items::Bounds;

    const NARROW: [Width; 2] = [Width::fixed(1, 3370), Width::fixed(8, 3990)];
    const WIDE: [Width; 2] = [Width::fixed(32, 4400), Width::fixed(64, 5400)];
    const BOUNDS: Bounds = Bounds { samples: 100, spans: 50, window: None };
    const MATRIX: [Width; 1] = [Width { block_us: 2800, bounds: Some(BOUNDS), ..Width::fixed(1024, 4000) }];

    const ATTENTION: Attention = Attention { ranks: 1, queries_per_kv: 4, page_ns: 3100 };

    /// Without matrix passes, as for steps of few rows.
    fn all() -> Vec<Width> {
        [&NARROW[..], &WIDE].concat()
    }

    fn mixed() -> Vec<Width> {
        [&NARROW[..], &WIDE, &MATRIX].concat()
    }

    fn sizes(widths: &[Width], samples: &[bool]) -> Vec<usize> {
        Passes::new(widths, 2048, ATTENTION).of(&rows(samples)).iter().map(Range::len).collect()
    }

    /// Rows that sample or not: each that follows one that does begins a sequence.
    fn rows(samples: &[bool]) -> Vec<Row> {
        let mut slot = 0;
        let row = |sample: &bool| {
            let row = Row { slot, token: 0, position: 5, sample: *sample };
            slot += u32::from(*sample);
            row
        };
        samples.iter().map(row).collect()
    }

    /// A prompt chunk of `len` rows, `last`: up to its prompt's end.
    fn chunk(len: usize, last: bool) -> Vec<bool> {
        (1..=len).map(|row| row == len && last).collect()
    }

    #[test]
    fn one_matrix_pass_holds_whatever_narrower_ones_do_not() {
        let narrow: Vec<_> = [&NARROW[..], &MATRIX].concat();
        for (widths, held) in [(mixed(), 64), (narrow, 8)] {
            for count in [1, held, held + 1, 100] {
                assert_eq!(sizes(&widths, &vec![true; count]), [count]);
            }
            let beside = [vec![true; 32], chunk(900, true), chunk(92, false)].concat();
            assert_eq!(sizes(&widths, &beside), [1024]);
            assert_eq!(sizes(&widths, &chunk(1500, true)), [1024, 476]);
            assert_eq!(sizes(&widths, &chunk(1030, true)), [1024, 6]);
        }
        assert_eq!(Passes::new(&mixed(), 2048, ATTENTION).columns(), 100, "its rows that sample");
    }

    #[test]
    fn a_matrix_pass_ends_where_it_has_no_room() {
        let sizes =
            |rows: &[Row]| Passes::new(&mixed(), 2048, ATTENTION).of(rows).iter().map(Range::len).collect::<Vec<_>>();
        assert_eq!(sizes(&rows(&[true; 230])), [100, 100, 30]);
        let prompts: Vec<bool> = (0..101).flat_map(|_| chunk(7, true)).collect();
        assert_eq!(sizes(&rows(&prompts)), [700, 7], "a sequence stays whole");
        // However far on they are: spans that have no place are not cut.
        let mut far = rows(&[vec![true; 90], chunk(200, true)].concat());
        far.iter_mut().for_each(|row| row.position += 100_000);
        assert_eq!(sizes(&far), [290]);
        let passes = Passes::new(&mixed(), 2048, ATTENTION);
        assert!(!passes.hold(&rows(&[true; 101])) && passes.hold(&rows(&[true; 100])));
    }

    #[test]
    fn ranks_of_a_group_compute_two_passes_together() {
        let of_four = Attention { ranks: 4, ..ATTENTION };
        let [one, four] = [ATTENTION, of_four].map(|attention| Passes::new(&mixed(), 4096, attention));
        for (rows, expected) in [
            (1024, vec![1024]),
            (1030, vec![640, 390]),
            (1500, vec![768, 732]),
            (2048, vec![1024; 2]),
            (3000, vec![1024, 1024, 952]),
            (4000, vec![1024, 1024, 1024, 928]),
        ] {
            let passes: Vec<usize> = four.of(&rows_of_prompt(rows)).iter().map(Range::len).collect();
            assert_eq!(passes, expected, "{rows} rows");
            let pairs = passes.windows(2).map(|pair| four.pair(pair[0], pair[1]));
            assert!(pairs.eq(vec![true; passes.len() - 1]), "{rows} rows");
        }
        assert_eq!(one.of(&rows_of_prompt(1500)).iter().map(Range::len).collect::<Vec<_>>(), [1024, 476]);
        assert!(!one.pair(1024, 476) && !four.pair(500, 500) && !four.pair(1024, 100), "one GPU, one pass, few rows");
        // Two passes because of what they have room for.
        assert_eq!(four.of(&rows(&[true; 230])).iter().map(Range::len).collect::<Vec<_>>(), [100, 100, 30]);
        assert!(!four.pair(100, 100));
        let narrow = Passes::new(&NARROW, 4096, of_four);
        assert!(!narrow.pair(8, 8));
    }

    /// 8B's passes of 8, 11 and 16 blocks of tokens fill the rounds that they take; of 10 and 12 not.
    #[test]
    fn two_passes_are_cut_where_their_products_take_fewest_rounds() {
        let matrix = Width { columns: 2048, ..MATRIX[0] };
        let passes = Passes::new(&[&all()[..], &[matrix]].concat(), 4096, Attention { ranks: 4, ..ATTENTION });
        let products = Products::LLAMA_8B_RANK;
        let by = passes.clone().by(Some(products));
        for (rows, half, cut) in [(2366, 1280, 1408), (2060, 1152, 1152), (3072, 1536, 1664), (4096, 2048, 2048)] {
            let sizes = |passes: &Passes| passes.of(&rows_of_prompt(rows)).iter().map(Range::len).collect::<Vec<_>>();
            assert_eq!((sizes(&passes), sizes(&by)), (vec![half, rows - half], vec![cut, rows - cut]), "{rows}");
            let time = |first: usize| products.time(first) + products.time(rows - first);
            assert!((half..rows).step_by(TOKEN_BLOCK).all(|first| first > half * 5 / 4 || time(first) >= time(cut)));
        }
        // One takes all rows that a pass has columns for at most.
        assert_eq!(by.of(&rows_of_prompt(2048)).len(), 1);
    }

    /// The cut of a pass moves to the begin of a sequence with drafts, not of a prompt.
    #[test]
    fn rows_that_are_drawn_together_are_of_one_pass() {
        let of_four = Passes::new(&mixed(), 4096, Attention { ranks: 4, ..ATTENTION });
        let row = |slot, sample| Row { slot, token: 0, position: 5, sample };
        let prompt = |slot, len: usize| (0..len).map(move |at| row(slot, at + 1 == len));
        let drafts = |slot, len: usize| (0..len).map(move |_| row(slot, true));
        let sizes = |passes: &Passes, rows: Vec<Row>| passes.of(&rows).iter().map(Range::len).collect::<Vec<_>>();
        // Halves of 1200 rows would end at 640, in the middle of the drafts of slot 1.
        let around = |drafted| prompt(0, 636).chain(drafts(1, drafted)).chain(prompt(2, 564 - drafted)).collect();
        assert_eq!(sizes(&of_four, around(8)), [636, 564]);
        assert_eq!(sizes(&of_four, around(33)), [636, 564]);
        assert_eq!(sizes(&of_four, around(34)), [640, 560], "a prompt whose log-probabilities are wanted");
        assert_eq!(sizes(&of_four, around(4)), [640, 560], "whole");
        let narrow = Passes::new(&NARROW, 64, ATTENTION);
        assert_eq!(sizes(&narrow, drafts(0, 3).chain(drafts(1, 8)).collect()), [3, 8]);
        assert_eq!(sizes(&narrow, drafts(0, 20).collect()), [8, 8, 4], "more than there are columns");
    }

    /// A prompt's rows, the last of which samples.
    fn rows_of_prompt(count: usize) -> Vec<Row> {
        rows(&chunk(count, true))
    }

    /// Rows of several sequences, (first position, rows) each.
    #[test]
    fn rows_of_a_sequence_far_on_are_computed_where_they_share_its_pages() {
        let columns_of = |passes: &Passes, sequences: &[(u32, u32)]| {
            let rows = (0..).zip(sequences).flat_map(|(slot, &(first, len))| {
                (first..first + len).map(move |position| LaunchRow { slot, position, ..LaunchRow::default() })
            });
            passes.columns_for(&rows.collect::<Vec<_>>(), 1)
        };
        let passes = Passes::new(&mixed(), 2048, ATTENTION);
        let columns = |sequences: &[(u32, u32)]| columns_of(&passes, sequences);
        assert_eq!(columns(&[(100, 1)]), 1);
        assert_eq!((columns(&[(100, 8)]), columns(&[(4000, 8)])), (8, 8));
        assert_eq!((columns(&[(12_000, 8)]), columns(&[(12_000, 1); 8])), (8, 8));
        assert_eq!((columns(&[(1000, 64)]), columns(&[(2000, 64)])), (64, 1024));
        assert_eq!((columns(&[(9000, 64)]), columns(&[(16_000, 64)])), (1024, 1024));
        // Narrow kernels of four ranks read the pages for each row.
        let of_four = Passes::new(&mixed(), 2048, Attention { ranks: 4, ..ATTENTION });
        assert_eq!([100, 8000].map(|position| columns_of(&of_four, &[(position, 8)])), [8, 32]);
        // And the outputs of every page are kept.
        assert_eq!([2000, 8000].map(|position| columns_of(&of_four, &[(position, 1); 8])), [8, 32]);
        assert_eq!([2000, 8000].map(|position| columns_of(&of_four, &[(position, 1); 2])), [8, 8]);
        assert_eq!(columns_of(&of_four, &[(60_000, 1)]), 1);
    }

    /// As far on as the rows of many steps come, and no farther.
    #[test]
    fn the_last_of_many_steps_decides() {
        let of_four = Passes::new(&mixed(), 2048, Attention { ranks: 4, ..ATTENTION });
        let columns = |position, last_position, steps| {
            let row = |slot| LaunchRow { slot, position, last_position, flags: ROW_SAMPLE, ..LaunchRow::default() };
            of_four.columns_for(&(0..8).map(row).collect::<Vec<_>>(), steps)
        };
        assert_eq!((columns(2000, 9000, 256), columns(8000, 9000, 256)), (8, 32));
        let turn = (2000..8000).find(|position| columns(*position, 9000, 1) == 32).expect("wide passes far on");
        assert_eq!((columns(turn - 1, 9000, 1), columns(turn - 1, 9000, 2)), (8, 32));
        assert_eq!((columns(turn - 200, 9000, 256), columns(turn - 200, turn - 1, 256)), (32, 8));
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

    /// Any step: every row once, in order, each in a pass that holds it, and no way that is faster.
    #[test]
    fn passes_hold_every_row_in_order() {
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for round in 0..400 {
            let widths = [NARROW.to_vec(), all(), all(), mixed()][round % 4].clone();
            let mut samples = Vec::new();
            let mut sequence = Vec::new();
            for id in 0..1 + random(40) {
                let len = if random(3) == 0 { 1 + random(200) } else { 1 };
                samples.extend(chunk(len, len == 1 || random(2) == 0));
                sequence.extend(vec![id as u32; len]);
            }
            let passes = Passes::new(&widths, samples.len(), ATTENTION);
            let row = |(sample, slot): (&bool, &u32)| Row { slot: *slot, token: 0, position: 9, sample: *sample };
            let of = passes.of(&samples.iter().zip(&sequence).map(row).collect::<Vec<_>>());
            let (mut end, mut time) = (0, 0);
            for pass in &of {
                let width = widths.iter().filter(|width| pass.len() <= width.columns);
                let width = width.min_by_key(|width| width.columns).expect("a kernel for the pass");
                time += width.time(pass.len());
                assert_eq!(pass.start, std::mem::replace(&mut end, pass.end), "{of:?}");
            }
            assert_eq!(end, samples.len(), "{of:?}");
            let in_order = samples.chunks(passes.columns()).map(|rows| {
                let holds = |width: &&Width| width.columns >= rows.len();
                widths.iter().filter(holds).map(|width| width.time(rows.len())).min().unwrap()
            });
            assert!(time <= in_order.sum(), "{of:?}");
        }
    }
}
