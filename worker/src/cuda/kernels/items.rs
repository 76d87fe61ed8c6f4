//! Who attends to what in matrix passes, and which rows sample (kernels/matrix/layout.cuh).
//!
//! Rows of a sequence that has several in a pass are cut into tiles, and where blocks would idle, by spans, too. A row
//! that is alone of its sequence is an item, or, where sets of warps would idle, each of its spans is. Spans that are
//! items are merged behind that. Longest first: what is left over at the end is short. But before others come those
//! that the last layer needs, too: of the rows that sample. Few rows that are alone are computed beside tiles, by other
//! blocks.

use std::cmp::Reverse;
use std::ops::Range;

use super::launch::{ROW_SAMPLE, Row};
use super::variants::TOKEN_BLOCK;
use crate::plan::PAGE_POSITIONS;

/// Pages of a span. The first page of one is a multiple of this.
const SPAN_PAGES: usize = 16;
/// Bits of a row's number; what goes with it is above them.
const ROW_BITS: usize = 16;
const ROW_MASK: u32 = (1 << ROW_BITS) - 1;
/// What a page takes of a tile that is cut by spans, what adds these included, and of a whole one. 8B on four H200,
/// 2048 rows behind 4096 and 6144 positions: 196 and 240 us by blocks that all have as many pages, 78 and 109, where
/// whole tiles take 133 and 176 us for 96 and 128 pages of the longest. A page of a row that is alone takes about as
/// long as of these.
const CUT_COST: usize = 7;
const WHOLE_COST: usize = 4;
/// What a set takes for an item beside its pages, in pages: to begin, to end and to merge it; and what all sets take
/// for the launch that merges, in pages each. 8B, 64 and 224 rows at 1040: 73.4 and 247 us by spans, 67.1 and 225 by
/// rows.
const ITEM_COST: usize = 1;
const MERGE_COST: usize = 2;
/// Memory is the limit as long as one set of so many has pages left. 40 rows at 4000 in two rounds, the second of a
/// fifth of the sets: 171 us, by spans 154, by their bytes 142.
const SETS_A_STREAM: usize = 3;
/// In place of a place: all that the rows see.
const WHOLE: u32 = u32::MAX;

/// How attention is divided among blocks: what those of a KV head compute side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AtOnce {
    /// Rows of a tile at most.
    pub tile_rows: usize,
    pub tiles: usize,
    /// Rows that are alone, or spans of them; each by a set of warps.
    pub rows: usize,
}

/// What a matrix pass has room for beside its columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Rows that sample.
    pub samples: usize,
    /// Spans that are merged.
    pub spans: usize,
    /// Positions that a row sees at most, its own included; `None`: all before it.
    pub window: Option<usize>,
}

/// What the launches of a pass are given, as u32 words, one list after the other.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Items {
    /// {first row | rows << 16, place | span << 16} of each span of a tile: the place of its first row, behind which
    /// come those of other spans, and then those of other rows. Or, of all that the rows see, no place.
    pub tiles: Vec<[u32; 2]>,
    /// Blocks of a KV head that compute tiles while the others compute rows that are alone; 0: all do the one, then the
    /// other.
    pub tile_blocks: u16,
    /// Of rows that are alone: {row | span << 16, place} of each span, or, of all that the row sees, {row, no place}.
    pub spans: Vec<[u32; 2]>,
    /// {row | spans << 16, first place} of each row whose spans are items.
    pub merges: Vec<[u32; 2]>,
    /// Rows that sample, ascending.
    pub samples: Vec<u32>,
    /// Of these lists what the last layer needs.
    pub last: Last,
}

/// What is left to compute of a pass behind K and V of its last layer: of all rows only those that sample go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Last {
    /// Blocks of tokens in which rows sample, a bit each.
    pub blocks: u32,
    /// The first so many tiles have rows that sample.
    pub tiles: u32,
    /// The first so many merges are of rows that sample.
    pub merges: u32,
}

impl Last {
    /// Tokens of these blocks.
    pub fn tokens(self) -> u32 {
        self.blocks.count_ones() * TOKEN_BLOCK as u32
    }
}

impl Items {
    /// Whether tiles are cut by spans.
    pub fn is_cut(&self) -> bool {
        self.tiles.iter().any(|[_, part]| *part != WHOLE)
    }

    /// Adds the rows that sample, and puts what the last layer needs first. Both parts of a list keep their order.
    fn add_samples(&mut self, rows: &[Row]) {
        self.samples = samples(rows).collect();
        let samples = |word: u32, count: usize| {
            let first = (word & ROW_MASK) as usize;
            rows[first..first + count].iter().any(|row| row.flags & ROW_SAMPLE != 0)
        };
        let tile_samples = |[word, _]: &[u32; 2]| samples(*word, (*word >> ROW_BITS) as usize);
        let row_samples = |[word, _]: &[u32; 2]| samples(*word, 1);
        self.last = Last {
            blocks: self.samples.iter().fold(0, |blocks, row| blocks | 1 << (*row as usize / TOKEN_BLOCK)),
            tiles: put_first(&mut self.tiles, tile_samples),
            merges: put_first(&mut self.merges, row_samples),
        };
    }
}

/// Puts those items first that are `of` a kind, and counts them.
fn put_first(items: &mut [[u32; 2]], of: impl Fn(&[u32; 2]) -> bool) -> u32 {
    items.sort_by_key(|item| !of(item));
    items.iter().filter(|item| of(item)).count() as u32
}

impl Bounds {
    /// Spans of a row that sees up to `pages` pages, at most.
    pub fn most_spans(pages: usize) -> usize {
        // The first and the last may be seen in part.
        pages.div_ceil(SPAN_PAGES) + 1
    }

    /// Words of the items of `rows` rows in any passes, each of which sees up to `pages` pages, at most: a row is part
    /// of a tile, or has spans and a merge; it may sample; and one is left out so that pairs are aligned.
    pub fn most_words(rows: usize, pages: usize) -> usize {
        rows * (2 * Self::most_spans(pages) + 4)
    }

    /// The pages that a row at `position` sees.
    fn pages(&self, position: usize) -> Range<usize> {
        let first = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        first / PAGE_POSITIONS..position / PAGE_POSITIONS + 1
    }

    /// The items of rows that are alone, each with the pages that it sees, the longest first, for `sets` sets of warps
    /// of `all`: all rows whole, or those of more than a set's share of pages cut by spans, or all, whichever takes
    /// least time. The first `places` are taken.
    fn row_items(&self, rows: &[(usize, Range<usize>)], (sets, all): (usize, usize), places: usize) -> RowItems {
        let sets = sets.max(1);
        let whole = self.rows_cut(rows, usize::MAX, places);
        let pages: usize = rows.iter().map(|(_, pages)| pages.len()).sum();
        let spans: usize = rows.iter().map(|(_, pages)| spans_of(pages).len()).sum();
        // No cut is faster than even shares of all spans.
        if spans == rows.len() || whole.time(sets, all) <= pages + spans * ITEM_COST {
            return whole;
        }
        let cut = [pages / sets, 0].map(|most| self.rows_cut(rows, most, places));
        [whole].into_iter().chain(cut).min_by_key(|items| items.time(sets, all)).expect("three")
    }

    /// Rows that see more than `most` pages and several spans are cut, as long as there are places behind the first
    /// `places`.
    fn rows_cut(&self, rows: &[(usize, Range<usize>)], most: usize, mut places: usize) -> RowItems {
        let mut items = RowItems::default();
        for (row, pages) in rows {
            let spans = spans_of(pages);
            if spans.len() == 1 || pages.len() <= most || places + spans.len() > self.spans {
                items.parts.push((pages.len(), [word(*row, 0), WHOLE]));
                continue;
            }
            items.merges.push([word(*row, spans.len()), places as u32]);
            for span in spans {
                items.parts.push((seen_of(pages, span).len(), [word(*row, span), places as u32]));
                places += 1;
            }
        }
        items.parts.sort_by_key(|(pages, _)| Reverse(*pages));
        items
    }

    /// The items of tiles, which are cut by spans if `is_cut`, as long as there are places.
    fn tile_items(&self, rows: &[Row], tiles: &[Range<usize>], is_cut: bool) -> TileItems {
        let mut items = TileItems::default();
        for tile in tiles {
            let (pages, word) = (self.tile_pages(rows, tile), word(tile.start, tile.len()));
            let spans = spans_of(&pages);
            let taken = tile.len() * spans.len();
            if !is_cut || spans.len() == 1 || items.places + taken > self.spans {
                items.parts.push((pages.len(), [word, WHOLE]));
                continue;
            }
            for (index, row) in tile.clone().enumerate() {
                let seen = spans_of(&self.pages(rows[row].position as usize));
                let first = items.places + index * spans.len() + seen.start - spans.start;
                items.merges.push([self::word(row, seen.len()), first as u32]);
            }
            for span in spans.clone() {
                let place = items.places + span - spans.start;
                items.parts.push((seen_of(&pages, span).len(), [word, self::word(place, span)]));
            }
            items.places += taken;
        }
        items.parts.sort_by_key(|(pages, _)| Reverse(*pages));
        items
    }

    /// The items of tiles, the longest first, and of rows that are alone, and [`Items::tile_blocks`], whichever take
    /// least time: tiles whole or cut by spans; before those rows or, where each of these can have a set of warps of
    /// its own, beside them.
    fn divide(
        &self,
        rows: &[Row],
        tiles: &[Range<usize>],
        lone: &[(usize, Range<usize>)],
        at_once: AtOnce,
    ) -> (TileItems, RowItems, usize) {
        let AtOnce { tiles: blocks, rows: all_sets, .. } = at_once;
        let left = match lone.len() {
            0 => 0,
            rows => blocks.saturating_sub((rows * blocks).div_ceil(all_sets.max(1))),
        };
        let way = |is_cut| {
            let tiles = self.tile_items(rows, tiles, is_cut);
            let beside = Some(left.min(tiles.parts.len())).filter(|beside| *beside > 0);
            let divided = [0].into_iter().chain(beside).map(|beside| {
                let sets = all_sets - all_sets * beside / blocks.max(1);
                let lone = self.row_items(lone, (sets, all_sets), tiles.places);
                let of_rows = lone.longest(sets, all_sets);
                let time = match beside {
                    0 => tiles.time(blocks) + of_rows,
                    beside => tiles.time(beside).max(of_rows),
                };
                (time, lone, beside)
            });
            let (time, lone, beside) = divided.min_by_key(|(time, ..)| *time).expect("one behind the other");
            (time, (tiles, lone, beside))
        };
        let whole = way(false);
        // No less than even shares: of many tiles that are equally long none is cut to see that.
        let costs = tiles
            .iter()
            .map(|tile| self.tile_pages(rows, tile))
            .map(|pages| pages.len() * if spans_of(&pages).len() > 1 { CUT_COST } else { WHOLE_COST });
        let cut = (costs.sum::<usize>() < whole.0 * blocks).then(|| way(true));
        [whole].into_iter().chain(cut).min_by_key(|(time, _)| *time).expect("whole").1
    }

    /// The pages that the rows of a tile see.
    fn tile_pages(&self, rows: &[Row], tile: &Range<usize>) -> Range<usize> {
        let [first, last] = [tile.start, tile.end - 1].map(|row| self.pages(rows[row].position as usize));
        first.start..last.end
    }

    /// The items of a pass of these rows, `step` steps on. Rows that are past their last position have none, but their
    /// places among the samples.
    pub fn items(&self, rows: &[Row], step: u32, at_once: AtOnce) -> Items {
        let mut items = Items::default();
        let mut tiles = Vec::new();
        // Those that are alone, with the pages that they see.
        let mut lone = Vec::new();
        let mut first = 0;
        for sequence in rows.chunk_by(|row, next| row.first_row == next.first_row) {
            let end = first + sequence.len();
            if let [row] = sequence {
                let position = row.position + step;
                if position <= row.last_position {
                    lone.push((first, self.pages(position as usize)));
                }
            } else {
                let rows = at_once.tile_rows;
                tiles.extend((first..end).step_by(rows).map(|start| start..(start + rows).min(end)));
            }
            first = end;
        }
        lone.sort_by_key(|(_, pages)| Reverse(pages.len()));
        tiles.sort_by_key(|tile| Reverse(self.tile_pages(rows, tile).len()));
        let (tiles, lone, beside) = self.divide(rows, &tiles, &lone, at_once);
        let words = |parts: Vec<Item>| parts.into_iter().map(|(_, part)| part).collect();
        items.merges = [tiles.merges, lone.merges].concat();
        (items.tiles, items.spans, items.tile_blocks) = (words(tiles.parts), words(lone.parts), beside as u16);
        items.add_samples(rows);
        items
    }
}

/// Pages of an item, and its words.
type Item = (usize, [u32; 2]);

/// Tiles, as items.
#[derive(Default)]
struct TileItems {
    /// The longest first.
    parts: Vec<Item>,
    merges: Vec<[u32; 2]>,
    /// Places of the merges; 0: no tile is cut.
    places: usize,
}

impl TileItems {
    /// How long `blocks` blocks take, in quarters of a page.
    fn time(&self, blocks: usize) -> usize {
        let cost = |(pages, [_, part]): &Item| pages * if *part == WHOLE { WHOLE_COST } else { CUT_COST };
        dealt(&self.parts, blocks, cost).into_iter().max().unwrap_or(0)
    }
}

/// Rows that are alone, as items.
#[derive(Default)]
struct RowItems {
    /// The longest first.
    parts: Vec<Item>,
    merges: Vec<[u32; 2]>,
}

impl RowItems {
    /// How long `sets` sets of warps take of the GPU's `all` sets, in pages that all of these read at a time.
    fn time(&self, sets: usize, all: usize) -> usize {
        let mut left = dealt(&self.parts, sets, Self::cost);
        left.sort_unstable_by_key(|pages| Reverse(*pages));
        left.push(0);
        let at_least = all.div_ceil(SETS_A_STREAM);
        let items: usize = left.windows(2).zip(1..).map(|(two, busy)| (two[0] - two[1]) * at_least.max(busy)).sum();
        items + if self.merges.is_empty() { 0 } else { all * MERGE_COST }
    }

    /// How long the set takes that has most, or memory, and what adds spans, in quarters of a page of a tile. A set
    /// that reads alone takes three quarters of what it takes as one of the GPU's `all`.
    fn longest(&self, sets: usize, all: usize) -> usize {
        let items = dealt(&self.parts, sets, Self::cost);
        let by_memory = (4 * items.iter().sum::<usize>()).div_ceil(3 * all.max(1));
        let items = items.into_iter().max().unwrap_or(0).max(by_memory);
        WHOLE_COST * (items + if self.merges.is_empty() { 0 } else { MERGE_COST })
    }

    fn cost((pages, _): &Item) -> usize {
        pages + ITEM_COST
    }
}

/// What each of `units` has to do of items. They are dealt one after the other, in the next round in the opposite
/// order, as the kernels do.
fn dealt(items: &[Item], units: usize, cost: impl Fn(&Item) -> usize) -> Vec<usize> {
    let units = units.max(1);
    let mut all = vec![0; units];
    for (index, item) in items.iter().enumerate() {
        let (round, place) = (index / units, index % units);
        all[if round.is_multiple_of(2) { place } else { units - 1 - place }] += cost(item);
    }
    all
}

/// The spans in which pages are.
fn spans_of(pages: &Range<usize>) -> Range<usize> {
    pages.start / SPAN_PAGES..pages.end.div_ceil(SPAN_PAGES)
}

/// Those of the pages that are in a span.
fn seen_of(pages: &Range<usize>, span: usize) -> Range<usize> {
    pages.start.max(span * SPAN_PAGES)..pages.end.min((span + 1) * SPAN_PAGES)
}

/// The rows that sample, ascending.
pub fn samples(rows: &[Row]) -> impl Iterator<Item = u32> {
    (0..).zip(rows).filter(|(_, row)| row.flags & ROW_SAMPLE != 0).map(|(index, _)| index)
}

fn word(row: usize, with: usize) -> u32 {
    assert!(with <= ROW_MASK as usize, "a span of {with}: no sequence has so many positions");
    (row | with << ROW_BITS) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a pass: (first position, rows) of each sequence, whose last samples.
    fn pass(sequences: &[(usize, usize)]) -> Vec<Row> {
        let mut rows = Vec::new();
        for &(start, len) in sequences {
            let first_row = rows.len() as u32;
            rows.extend((start..start + len).map(|position| Row {
                position: position as u32,
                first_row,
                first_position: start as u32,
                last_position: position as u32,
                flags: if position + 1 == start + len { ROW_SAMPLE } else { 0 },
                ..Row::default()
            }));
        }
        rows
    }

    /// Of blocks of a KV head, two sets of warps each.
    fn by(tile_rows: usize, blocks: usize) -> AtOnce {
        AtOnce { tile_rows, tiles: blocks, rows: 2 * blocks }
    }

    const ALL: Bounds = Bounds { samples: 512, spans: 4096, window: None };

    #[test]
    fn a_pass_of_prompts_and_decoding_rows_is_cut_as_the_kernels_read_it() {
        let rows = pass(&[(100, 1), (0, 40), (3000, 1), (1000, 33), (1023, 1), (1024, 1)]);
        let items = ALL.items(&rows, 0, by(32, 4));
        // Tiles end at positions 1032 and 39, where rows sample, and at 1031 and 31.
        let tiles = [74 | 1 << 16, 33 | 8 << 16, 42 | 32 << 16, 1 | 32 << 16];
        assert_eq!(items.tiles, tiles.map(|tile| [tile, WHOLE]));
        let spans = [[76, WHOLE], [41, 0], [41 | 1 << 16, 1], [75, WHOLE], [41 | 2 << 16, 2], [0, WHOLE]];
        assert_eq!(items.spans, spans);
        assert_eq!(items.merges, [[41 | 3 << 16, 0]]);
        assert_eq!(items.samples, [0, 40, 41, 74, 75, 76]);
        assert_eq!(items.last, Last { blocks: 1, tiles: 2, merges: 1 });
        assert_eq!(items.tile_blocks, 2, "beside four sets");
    }

    #[test]
    fn the_last_layer_needs_the_blocks_of_rows_that_sample() {
        let mut rows = pass(&[(0, 200), (1000, 100), (0, 212)]);
        let last = |rows: &[Row]| ALL.items(rows, 0, by(32, 4)).last;
        assert_eq!(last(&rows), Last { blocks: 0b1110, tiles: 3, merges: 0 });
        rows[511].flags = 0;
        assert_eq!(last(&rows), Last { blocks: 0b0110, tiles: 2, merges: 0 });
        rows.iter_mut().for_each(|row| row.flags = 0);
        assert_eq!(last(&rows), Last::default());
        assert_eq!(last(&pass(&[(5, 1); 300])).tokens(), 384);
    }

    /// Rows 2047 and 2048 of a sequence are in a tile, of which the first sees two spans, the second three.
    #[test]
    fn few_tiles_are_cut_by_spans() {
        let rows = pass(&[(100, 1), (2047, 2)]);
        let items = ALL.items(&rows, 0, by(32, 2));
        let tile = 1 | 2 << 16;
        assert_eq!(items.tiles, [[tile, 0], [tile, 1 | 1 << 16], [tile, 2 | 2 << 16]]);
        assert_eq!(items.merges, [[2 | 3 << 16, 3], [1 | 2 << 16, 0]], "row 1 does not sample");
        assert_eq!(items.last, Last { blocks: 1, tiles: 3, merges: 1 });
        let whole = |at_once, bounds: Bounds| bounds.items(&rows, 0, by(32, at_once)).tiles.len() == 1;
        assert!(whole(1, ALL), "there are no fewer tiles than blocks");
        assert!(whole(2, Bounds { spans: 5, ..ALL }) && !whole(2, Bounds { spans: 6, ..ALL }));
        // Tiles that are equally long: a few blocks more do not make up for what parts cost. No more do those that end
        // a page behind their first span.
        let tiles = |first, at_once| ALL.items(&pass(&[(first, 2); 3]), 0, by(32, at_once)).tiles.len();
        assert_eq!([3, 4, 5, 6].map(|at_once| tiles(2047, at_once)), [3, 3, 3, 9]);
        assert_eq!(tiles(1023, 100), 3);
        // One that is far longer than the others is cut however many there are, and before others take the places.
        let far = pass(&[(2000, 480), (50_000, 32)]);
        for spans in [1600, 4096] {
            let items = Bounds { spans, ..ALL }.items(&far, 0, by(32, 16));
            let parts = items.tiles.iter().filter(|[tile, part]| *tile == 480 | 32 << 16 && *part != WHOLE).count();
            assert_eq!(parts, 49, "{spans} places");
        }
    }

    /// Tiles are not cut where rows that are alone compute beside them for as long.
    #[test]
    fn tiles_leave_blocks_to_rows_that_are_alone_where_each_has_a_set() {
        // Prompts of so many tokens behind 480 positions, beside rows that decode at 1000; 16 blocks.
        let tile_blocks = |tokens, rows| {
            let sequences = [&[(480, tokens)], &vec![(1000, 1); rows][..]].concat();
            ALL.items(&pass(&sequences), 0, by(32, 16)).tile_blocks
        };
        assert_eq!([(114, 14), (242, 14), (256, 16)].map(|(tokens, rows)| tile_blocks(tokens, rows)), [4, 8, 8]);
        // More tiles than blocks that are left: two rounds of them, but none of rows behind.
        assert_eq!([(300, 16), (450, 14)].map(|(tokens, rows)| tile_blocks(tokens, rows)), [8, 9]);
        assert_eq!([(700, 14), (114, 32), (114, 0)].map(|(tokens, rows)| tile_blocks(tokens, rows)), [0; 3]);
        let far = |rows| {
            let sequences = [&[(4000, 242)], &vec![(4000, 1); rows][..]].concat();
            let Items { tile_blocks, tiles, .. } = ALL.items(&pass(&sequences), 0, by(32, 16));
            (tile_blocks, tiles.len())
        };
        assert_eq!([14, 0, 40].map(far), [(8, 8), (0, 37), (0, 37)]);
        // A row behind a long context is cut, and has all blocks.
        for (rows, position, prompt) in [(1, 60_000, 480), (4, 16_000, 512), (1, 4000, 480)] {
            let sequences = [&[(0, prompt)], &vec![(position, 1); rows][..]].concat();
            let items = ALL.items(&pass(&sequences), 0, by(32, 16));
            assert_eq!((items.tile_blocks, items.merges.len()), (0, rows), "at {position}");
        }
        // Ten tiles do not take a second round for rows that hardly take time.
        let short = pass(&[(2000, 300), (60, 1), (60, 1), (60, 1), (60, 1), (60, 1), (60, 1), (60, 1), (60, 1)]);
        assert_eq!([9, 13, 14, 16].map(|blocks| ALL.items(&short, 0, by(32, blocks)).tile_blocks), [0, 0, 10, 10]);
    }

    #[test]
    fn a_window_begins_in_the_span_of_its_first_page() {
        let bounds = Bounds { window: Some(2049), ..ALL };
        // It sees positions 1023 to 3071, so the last page of span 0; a position later it does not.
        let rows = pass(&[(3071, 1)]);
        let mut rows = [rows[0]; 1];
        rows[0].last_position = 4000;
        let spans = |step| bounds.items(&rows, step, by(8, 16)).spans;
        assert_eq!(spans(0), [[1 << 16, 1], [2 << 16, 2], [0, 0]]);
        assert_eq!(spans(1), [[1 << 16, 0], [2 << 16, 1], [3 << 16, 2]]);
        let one = Bounds { window: Some(1), ..ALL };
        assert_eq!(one.items(&rows, 0, by(8, 16)).spans, [[0, WHOLE]], "all that it sees");
    }

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % bound
        }
    }

    /// Every row is in one tile, or has its spans, each once and no page outside of one; places are used once.
    #[test]
    fn every_page_that_a_row_sees_is_read_for_it_once() {
        let mut random = Random(3);
        for round in 0..300 {
            let window = [None, Some(1), Some(64), Some(1 + random.below(5000))][round % 4];
            let bounds = Bounds { window, ..ALL };
            let tile_rows = [8, 16, 32, 42, 128][random.below(5)];
            let sequences: Vec<_> = (0..1 + random.below(60))
                .map(|_| (random.below(9000), if random.below(2) == 0 { 1 } else { 1 + random.below(200) }))
                .collect();
            let mut rows = pass(&sequences);
            rows.truncate(2048);
            let lone = |row: usize| {
                let same = |other: Option<&Row>| other.is_some_and(|other| other.first_row == rows[row].first_row);
                !same(rows.get(row + 1)) && !same(row.checked_sub(1).map(|row| &rows[row]))
            };
            let items = bounds.items(&rows, 0, by(tile_rows, [0, 16, 1000][round % 3]));
            // Pages that are read for each row, and the places of the spans of a row of a cut tile.
            let mut tiled = vec![0; rows.len()];
            let mut spans = vec![Vec::new(); rows.len()];
            let mut used = std::collections::BTreeSet::new();
            let mut read = usize::MAX;
            let is_sampled = |row: usize| rows[row].flags & ROW_SAMPLE != 0;
            for (place, &[tile, part]) in items.tiles.iter().enumerate() {
                let (first, len) = ((tile & 0xffff) as usize, (tile >> 16) as usize);
                assert!((1..=tile_rows).contains(&len));
                let tile = &rows[first..first + len];
                assert!(tile.iter().all(|row| row.first_row == rows[first].first_row));
                assert_eq!(
                    (first..first + len).any(is_sampled),
                    place < items.last.tiles as usize,
                    "what samples first"
                );
                if place == items.last.tiles as usize {
                    read = usize::MAX;
                }
                let all =
                    bounds.pages(tile[0].position as usize).start..bounds.pages(tile[len - 1].position as usize).end;
                let (from, to) = (all.start / 16, all.end.div_ceil(16));
                let (place, span) = (part & 0xffff, (part >> 16) as usize);
                let pages = match part {
                    WHOLE => all,
                    _ => all.start.max(16 * span)..all.end.min(16 * span + 16),
                };
                assert!(pages.len() <= std::mem::replace(&mut read, pages.len()), "longest first");
                for (index, row) in tile.iter().enumerate() {
                    let seen = bounds.pages(row.position as usize);
                    let of_row = seen.end.min(pages.end).saturating_sub(seen.start.max(pages.start));
                    tiled[first + index] += of_row;
                    if part != WHOLE {
                        let place = place + (index * (to - from)) as u32;
                        assert!(used.insert(place), "a place is used once");
                        if of_row > 0 {
                            spans[first + index].push((span, place));
                        }
                    }
                }
            }
            let mut read = usize::MAX;
            for &[word, place] in &items.spans {
                let (row, span) = ((word & 0xffff) as usize, (word >> 16) as usize);
                let pages = bounds.pages(rows[row].position as usize);
                let part = if place == WHOLE { pages.clone() } else { seen_of(&pages, span) };
                assert!(part.len() <= std::mem::replace(&mut read, part.len()), "longest first");
                assert!(place == WHOLE || used.insert(place), "a place is used once");
                if place == WHOLE {
                    assert!(span == 0 && spans[row].is_empty(), "nothing else of the row");
                    spans[row] = spans_of(&pages).map(|span| (span, WHOLE)).collect();
                } else {
                    spans[row].push((span, place));
                }
            }
            assert_eq!(used.iter().copied().collect::<Vec<_>>(), (0..used.len() as u32).collect::<Vec<_>>());
            for (place, [word, _]) in items.merges.iter().enumerate() {
                assert_eq!(is_sampled((word & 0xffff) as usize), place < items.last.merges as usize);
            }
            let mut places = 0;
            for (row, spans) in spans.iter_mut().enumerate() {
                spans.sort();
                let position = rows[row].position as usize;
                let pages = bounds.pages(position);
                assert_eq!(tiled[row], if lone(row) { 0 } else { pages.len() });
                if !lone(row) {
                    let merge = items.merges.iter().find(|[word, _]| (*word & 0xffff) as usize == row);
                    let places = merge.map_or(0..0, |[word, first]| *first..*first + (word >> 16));
                    assert!(spans.iter().map(|(_, place)| *place).eq(places), "those of its spans, ascending");
                    continue;
                }
                let expected: Vec<_> = {
                    let mut all: Vec<_> = pages.map(|page| page / 16).collect();
                    all.dedup();
                    all
                };
                assert_eq!(spans.iter().map(|(span, _)| *span).collect::<Vec<_>>(), expected);
                assert!(spans.len() <= Bounds::most_spans(position / 64 + 1));
                places += spans.iter().filter(|(_, place)| *place != WHOLE).count();
                let merge = items.merges.iter().find(|[word, _]| (*word & 0xffff) as usize == row);
                match merge {
                    Some([word, first]) => {
                        assert_eq!((*word >> 16) as usize, spans.len());
                        assert!((*first..).zip(spans.iter()).all(|(place, (_, of))| place == *of), "ascending");
                    }
                    None => assert!(spans.iter().all(|(_, place)| *place == WHOLE)),
                }
            }
            assert!(places <= used.len() && used.len() <= bounds.spans);
            assert_eq!(items.samples, samples(&rows).collect::<Vec<_>>());
            let words = 2 * items.tiles.len() + 2 * (items.spans.len() + items.merges.len()) + rows.len();
            assert!(words <= Bounds::most_words(rows.len(), 9200usize.div_ceil(64)));
        }
    }

    /// (rows that are whole, items of those that are cut) of rows at these positions, of 132 blocks and 8 KV heads.
    fn cut(positions: &[usize], spans: usize) -> (usize, usize) {
        let by = AtOnce { tile_rows: 32, tiles: 16, rows: 33 };
        let rows = pass(&positions.iter().map(|position| (*position, 1)).collect::<Vec<_>>());
        let items = Bounds { spans, ..ALL }.items(&rows, 0, by).spans;
        let whole = items.iter().filter(|[_, place]| *place == WHOLE).count();
        (whole, items.len() - whole)
    }

    #[test]
    fn rows_of_a_crowd_are_whole_and_those_that_would_hold_it_up_are_cut() {
        assert_eq!([32, 64, 224].map(|rows| cut(&vec![1040; rows], 4096)), [(32, 0), (64, 0), (224, 0)]);
        assert_eq!([33, 65, 66].map(|rows| cut(&vec![1500; rows], 4096)), [(33, 0), (65, 0), (66, 0)], "whole rounds");
        assert_eq!(cut(&[2047; 8], 4096), (0, 16), "of 33 sets 25 would idle");
        assert_eq!(cut(&[1040; 8], 4096), (8, 0), "for spans of a page");
        assert_eq!(cut(&[4000; 40], 4096), (0, 160), "in the second round, too");
        assert_eq!(cut(&[4000; 96], 4096), (96, 0));
        let mut long = vec![1040; 200];
        long[77] = 60_000;
        assert_eq!(cut(&long, 4096), (199, 59));
        // Rows that have no place.
        assert_eq!([16, 15].map(|spans| cut(&[2047; 8], spans)), [(0, 16), (8, 0)]);
        assert_eq!(cut(&[1_000_000; 4], 4096), (0, 4 * 977));
        assert_eq!(cut(&[1_100_000, 1_100_000, 1_100_000, 2000], 4096), (1, 3 * 1075));
        assert_eq!(cut(&[4_000_000, 300_000, 2000], 4096), (2, 3907));
    }

    /// Rows that end before others of a chain have no items, and keep their columns.
    #[test]
    fn rows_that_have_ended_attend_to_nothing() {
        let mut rows = pass(&[(10, 1), (20, 1)]);
        rows[1].last_position = 25;
        let items = ALL.items(&rows, 1, by(32, 0));
        assert_eq!((items.spans, items.samples), (vec![[1, WHOLE]], vec![0, 1]));
    }
}
