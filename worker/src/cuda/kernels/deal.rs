//! Who attends to what in wide passes (kernels/wide/attention_items.cuh).
//!
//! An item is what a group, some rows of one sequence, sees of a KV head in one span of pages. Spans are counted from
//! position 0. All KV heads have the same items and as many blocks, so one deal serves them all. The longest item comes
//! first, each to the block that has least so far. Who computes an item touches no bit.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::launch::Row;
use super::sizes::MOST_STEPS;
use crate::plan::PAGE_POSITIONS;

/// Positions that attention reads together: a page is read as far as its leaves are begun.
const LEAF_POSITIONS: usize = 16;
/// Bits of a row's number in a list; the span is above them.
const ROW_BITS: u32 = 8;

/// How a kernel cuts attention into items, and how many blocks take part in those of a KV head.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deal {
    /// Blocks of a KV head.
    pub blocks: usize,
    /// Rows of a group at most.
    pub group_rows: usize,
    /// Pages of a span.
    pub span_pages: usize,
    /// Positions that a row sees at most, its own included; `None`: all before it.
    pub window: Option<usize>,
}

/// A span of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Item {
    /// Leaves that are read in the launch's last step.
    leaves: usize,
    /// The group's last row.
    row: usize,
    span: usize,
    block: usize,
}

impl Deal {
    /// The items of a launch of `steps` steps, as the kernel reads them: `[blocks]` where each block's list begins and
    /// where the last one ends, then the lists, longest items first. Spans that a row comes to, or leaves, during the
    /// launch are among them, and count by what they are at its end.
    pub fn of(&self, rows: &[Row], steps: u32) -> Vec<u32> {
        let groups = (0..rows.len()).filter(|row| self.ends_group(rows, *row));
        let mut items: Vec<Item> = groups.flat_map(|row| self.spans(row, &rows[row], steps)).collect();
        items.sort_unstable_by_key(|item| (Reverse(item.leaves), item.row, item.span));
        let mut shares: BinaryHeap<_> = (0..self.blocks).map(|block| Reverse((0, block))).collect();
        for item in &mut items {
            let mut least = shares.peek_mut().expect("a KV head has blocks");
            let Reverse((leaves, block)) = &mut *least;
            item.block = *block;
            *leaves += item.leaves;
        }
        items.sort_by_key(|item| item.block);
        let begin = |block| self.blocks + 1 + items.partition_point(|item| item.block < block);
        let lists = items.iter().map(|item| item.row | item.span << ROW_BITS);
        (0..=self.blocks).map(begin).chain(lists).map(|word| word as u32).collect()
    }

    /// Words of that at most, for a launch of so many rows, each of which sees up to `pages` pages in a step.
    pub fn most_words(&self, rows: usize, pages: usize) -> usize {
        let moved = (MOST_STEPS - 1).div_ceil(PAGE_POSITIONS);
        self.blocks
            + 1
            + rows
                * self
                    .window
                    .map_or_else(|| pages.div_ceil(self.span_pages), |_| most_spans(pages + moved, self.span_pages))
    }

    /// Whether a group's last row is this one.
    fn ends_group(&self, rows: &[Row], row: usize) -> bool {
        let (this, active) = (rows[row], |row: &Row| row.position <= row.last_position);
        let goes_on = |next: &Row| active(next) && next.first_row == this.first_row;
        let place = row - this.first_row as usize;
        active(&this) && ((place + 1).is_multiple_of(self.group_rows) || !rows.get(row + 1).is_some_and(goes_on))
    }

    /// The spans that a group whose last row is `last` sees in any of the steps.
    fn spans(&self, row: usize, last: &Row, steps: u32) -> impl Iterator<Item = Item> + use<> {
        let window = self.window.unwrap_or(usize::MAX);
        // The begin of the first page that is seen from a position.
        let first_seen = move |position: usize| (position + 1).saturating_sub(window) / PAGE_POSITIONS * PAGE_POSITIONS;
        let begin = last.position as usize;
        let end = (last.position + steps - 1).min(last.last_position) as usize;
        let span_positions = self.span_pages * PAGE_POSITIONS;
        (first_seen(begin) / span_positions..=end / span_positions).map(move |span| {
            let from = first_seen(end).max(span * span_positions);
            let positions = (end + 1).min((span + 1) * span_positions).saturating_sub(from);
            // A window may have left the span by then: as nothing, all such spans would go to one block.
            Item { leaves: positions.div_ceil(LEAF_POSITIONS).max(1), row, span, block: 0 }
        })
    }
}

/// Spans that so many pages, from any page on, touch at most.
pub fn most_spans(pages: usize, span_pages: usize) -> usize {
    (pages + 2 * span_pages - 2) / span_pages
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;

    const DEAL: Deal = Deal { blocks: 16, group_rows: 4, span_pages: 16, window: None };

    /// Rows that decode for `steps` steps, each at a position.
    fn decoding(positions: impl IntoIterator<Item = u32>, steps: u32) -> Vec<Row> {
        let row = |(index, position)| Row {
            position,
            first_row: index,
            first_position: position,
            last_position: position + steps - 1,
            ..Row::default()
        };
        (0..).zip(positions).map(row).collect()
    }

    /// Rows of prompts, (first position, rows) each.
    fn prompts(prompts: &[(u32, u32)]) -> Vec<Row> {
        let mut rows = Vec::new();
        for &(first_position, len) in prompts {
            let first_row = rows.len() as u32;
            rows.extend((first_position..first_position + len).map(|position| Row {
                position,
                first_row,
                first_position,
                last_position: position,
                ..Row::default()
            }));
        }
        rows
    }

    /// (last row, span) of each block.
    fn lists(deal: &Deal, rows: &[Row], steps: u32) -> Vec<Vec<(usize, usize)>> {
        let words = deal.of(rows, steps);
        let at = |block: usize| words[block] as usize;
        assert_eq!((at(0), at(deal.blocks)), (deal.blocks + 1, words.len()));
        let item = |word: &u32| (*word as usize & 255, *word as usize >> 8);
        (0..deal.blocks).map(|block| words[at(block)..at(block + 1)].iter().map(item).collect()).collect()
    }

    /// Rows whose window begins with a span at the end of the launch, and in the steps before reaches into the one
    /// before it.
    #[test]
    fn spans_that_a_window_leaves_do_not_all_go_to_one_block() {
        let deal = Deal { group_rows: 1, window: Some(1024), ..DEAL };
        let rows = decoding([2047 - 8; 32], 9);
        assert!(groups(&deal, &rows, 0).iter().all(|(_, pages)| *pages == (15..=31)));
        assert!(groups(&deal, &rows, 8).iter().all(|(_, pages)| *pages == (16..=31)));
        assert!(lists(&deal, &rows, 9).iter().all(|list| list.len() == 4));
    }

    /// Spans begin at multiples of 16 pages, wherever a window begins.
    #[test]
    fn spans_are_counted_from_position_0() {
        let deal = Deal { blocks: 1, group_rows: 1, window: Some(100), ..DEAL };
        for (position, spans) in [(1023, 0..=0), (1024, 0..=1), (1122, 0..=1), (1123, 1..=1), (10_000, 9..=9)] {
            let spans: Vec<_> = spans.map(|span| (0, span)).collect();
            let mut dealt = lists(&deal, &decoding([position], 1), 1).concat();
            dealt.sort_unstable();
            assert_eq!(dealt, spans, "at {position}");
        }
    }

    /// What the kernel has in a step, by the rules of kernels/layout/rows.cuh and wide/attention_items.cuh, written
    /// down again: last row and pages of each group.
    fn groups(deal: &Deal, rows: &[Row], step: u32) -> Vec<(usize, RangeInclusive<usize>)> {
        let active = |row: usize| row < rows.len() && rows[row].position + step <= rows[row].last_position;
        let ends = |row: &usize| {
            let first = rows[*row].first_row as usize;
            active(*row)
                && ((row + 1 - first).is_multiple_of(deal.group_rows)
                    || !active(row + 1)
                    || rows[row + 1].first_row as usize != first)
        };
        let pages = |row: usize| {
            let position = (rows[row].position + step) as usize;
            let first = deal.window.map_or(0, |window| (position + 1).saturating_sub(window));
            first / 64..=position / 64
        };
        (0..rows.len()).filter(ends).map(|row| (row, pages(row))).collect()
    }

    /// Leaves of an item in a step, where there is no window.
    fn leaves(rows: &[Row], (row, span): (usize, usize), step: u32) -> usize {
        let last = (rows[row].position + step).min(rows[row].last_position) as usize;
        (last / 16 + 1).saturating_sub(span * 64).min(64)
    }

    /// Leaves of each block in the last of the steps.
    fn shares(deal: &Deal, rows: &[Row], steps: u32) -> Vec<usize> {
        let share = |list: &Vec<_>| list.iter().map(|item| leaves(rows, *item, steps - 1)).sum();
        lists(deal, rows, steps).iter().map(share).collect()
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % bound
        }

        fn rows(&mut self) -> (Vec<Row>, u32) {
            if self.below(3) == 0 {
                let mut lens = [0; 6].map(|_| (self.below(3000) as u32, 1 + self.below(30) as u32));
                lens[0].1 = 1;
                return (prompts(&lens), 1);
            }
            let (count, most, steps) = (1 + self.below(64), 1 + self.below(5000), 1 + self.below(256) as u32);
            let mut rows = decoding((0..count).map(|_| self.below(most) as u32), steps);
            // Some end before the launch.
            rows.iter_mut().for_each(|row| row.last_position -= self.below(steps as usize) as u32);
            (rows, steps)
        }
    }

    #[test]
    fn every_item_of_every_step_is_dealt_once() {
        let mut random = Random(1);
        for round in 0..300 {
            let window =
                [None, None, Some(1), Some(100), Some(1024), Some(1025), Some(1 + random.below(3000))][round % 7];
            let blocks = [1, 4, 16, 128][random.below(4)];
            let group_rows = if window.is_some() { 1 } else { [1, 2, 4, 8][random.below(4)] };
            let deal = Deal { blocks, group_rows, window, ..DEAL };
            let (rows, steps) = random.rows();
            let dealt = lists(&deal, &rows, steps);
            let mut items: Vec<_> = dealt.concat();
            items.sort_unstable();
            assert!(items.windows(2).all(|pair| pair[0] != pair[1]), "round {round}: an item is dealt twice");
            let mut most = 0;
            for step in 0..steps {
                for (row, pages) in groups(&deal, &rows, step) {
                    most = most.max(pages.clone().count());
                    for span in pages.start() / deal.span_pages..=pages.end() / deal.span_pages {
                        assert!(
                            items.binary_search(&(row, span)).is_ok(),
                            "round {round}: {row}, {span} at step {step}"
                        );
                    }
                }
            }
            let ends: Vec<_> = groups(&deal, &rows, 0).into_iter().map(|(row, _)| row).collect();
            assert!(items.iter().all(|(row, _)| ends.contains(row)), "round {round}: a row that ends no group");
            assert!(deal.of(&rows, steps).len() <= deal.most_words(rows.len(), most), "round {round}");
            assert_eq!(dealt, lists(&deal, &rows, steps), "round {round}: the same rows are dealt alike");
        }
    }

    /// The last item that the fullest block got was its shortest, and no block had less then.
    #[test]
    fn the_fullest_block_has_at_most_its_shortest_item_more_than_any_other() {
        let mut random = Random(2);
        for round in 0..300 {
            let deal = Deal { blocks: [2, 16, 32, 128][random.below(4)], ..DEAL };
            let (rows, steps) = random.rows();
            let (lists, shares) = (lists(&deal, &rows, steps), shares(&deal, &rows, steps));
            let (fullest, most) = shares.iter().enumerate().max_by_key(|(_, share)| **share).unwrap();
            let shortest = lists[fullest].iter().map(|item| leaves(&rows, *item, steps - 1)).min().unwrap();
            assert!(most - shortest <= *shares.iter().min().unwrap(), "round {round}: {shares:?}");
            let longest = lists.concat().iter().map(|item| leaves(&rows, *item, steps - 1)).max().unwrap();
            let mean = shares.iter().sum::<usize>() as f64 / deal.blocks as f64;
            assert!(
                *most as f64 <= mean + longest as f64 * (1.0 - 1.0 / deal.blocks as f64),
                "round {round}: {shares:?}"
            );
            let descending = |list: &Vec<_>| list.is_sorted_by_key(|item| Reverse(leaves(&rows, *item, steps - 1)));
            assert!(lists.iter().all(descending), "round {round}: longest first");
        }
    }

    #[test]
    fn rows_of_equal_length_make_equal_shares() {
        for (count, position) in [(32, 511), (64, 511), (64, 2000), (16, 0)] {
            let shares = shares(&DEAL, &decoding([position; 64].into_iter().take(count), 64), 64);
            assert!(shares.iter().all(|share| *share == shares[0] && *share > 0), "{count} rows: {shares:?}");
        }
    }

    /// As `looplane bench --batch 1,8,32,64` has them: dealt in their order, the fullest block had 26 pages of a mean
    /// of 19.
    #[test]
    fn rows_of_different_lengths_make_nearly_equal_shares() {
        let lengths = [vec![776], vec![646; 7], vec![516; 24]].concat();
        let shares = shares(&DEAL, &decoding(lengths, 1), 1);
        let mean = shares.iter().sum::<usize>() as f64 / 16.0 / 4.0;
        let fullest = *shares.iter().max().unwrap() as f64 / 4.0;
        assert!((17.0..18.0).contains(&mean) && fullest <= 20.75, "{fullest} pages of {mean}: {shares:?}");
    }
}
