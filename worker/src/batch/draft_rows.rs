//! How many tokens each sequence drafts in a step: as many as bring the most tokens a second, for the batch as a whole.
//!
//! A drafted token is worth its chance to count, and costs what the step takes longer with its row. Integers, so that
//! all ranks know the same.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::plan::StepTime;

/// What is certain; chances are parts of it.
pub(super) const SURE: u32 = 1 << 16;

/// What a decoder says of its steps with drafts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drafting {
    /// A step takes as long as one of the next larger size in the plan's times, not something in between.
    pub whole_sizes: bool,
    /// Microseconds that a step with drafts takes longer than times say: steps without may be parts of a launch.
    pub extra_us: u32,
}

/// What a sequence has drafted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Offer {
    /// Its slot.
    pub(super) slot: usize,
    /// Tokens, at least one.
    pub(super) tokens: usize,
    /// Chance that a token counts if those before it do.
    pub(super) chance: u32,
    /// The first token counts as certain: to learn whether drafts hold again.
    pub(super) tries: bool,
}

/// A step without its drafts.
#[derive(Debug, Clone, Copy)]
pub(super) struct Base {
    /// Rows.
    pub(super) rows: usize,
    /// Tokens that it brings.
    pub(super) tokens: usize,
    /// Rows that it has room for.
    pub(super) room: usize,
}

/// Chooses; keeps its memory.
#[derive(Debug, Default)]
pub(super) struct DraftRows {
    /// Next token of each offer: its chance to count, and the offer.
    next: BinaryHeap<(u32, Reverse<usize>)>,
    /// Offers, by their tokens from the likeliest on.
    order: Vec<usize>,
    /// Tokens of each offer that are computed.
    chosen: Vec<usize>,
}

/// It keeps memory, and nothing that counts.
impl PartialEq for DraftRows {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl DraftRows {
    /// Tokens of each offer that the step computes, in the order of the offers.
    pub(super) fn choose(&mut self, offers: &[Offer], base: Base, times: &[StepTime], of: Drafting) -> &[usize] {
        let first = |offer: &Offer| if offer.tries { SURE } else { offer.chance };
        self.next.clear();
        self.next.extend(offers.iter().enumerate().map(|(index, offer)| (first(offer), Reverse(index))));
        self.order.clear();
        self.chosen.clear();
        self.chosen.resize(offers.len(), 0);
        let (mut tokens, mut best_rows) = (base.tokens as u64 * u64::from(SURE), 0);
        let mut best = time(times, base.rows, of.whole_sizes).map(|us| (tokens, us));
        while self.order.len() < base.room
            && let Some((value, Reverse(index))) = self.next.pop()
            && let Some(us) = time(times, base.rows + self.order.len() + 1, of.whole_sizes)
        {
            self.order.push(index);
            tokens += u64::from(value);
            let us = us + u64::from(of.extra_us);
            // Of equals the one of more rows: in a whole size they cost nothing.
            if best.is_some_and(|(most, in_us)| tokens * in_us >= most * us) {
                (best, best_rows) = (Some((tokens, us)), self.order.len());
            }
            let offer = &offers[index];
            self.chosen[index] += 1;
            if self.chosen[index] < offer.tokens {
                let value = u64::from(value) * u64::from(offer.chance) / u64::from(SURE);
                self.next.push((value as u32, Reverse(index)));
            }
        }
        self.order[best_rows..].iter().for_each(|&index| self.chosen[index] -= 1);
        &self.chosen
    }
}

/// Microseconds of a step of `rows` rows; `None`: of more than are known.
fn time(times: &[StepTime], rows: usize, whole_sizes: bool) -> Option<u64> {
    let above = times.partition_point(|time| (time.rows as usize) < rows);
    let high = times.get(above)?;
    let low = above.checked_sub(1).map(|below| times[below]).filter(|_| !whole_sizes);
    let Some(low) = low else { return Some(high.us.into()) };
    let (part, all) = (rows as u64 - u64::from(low.rows), u64::from(high.rows - low.rows));
    Some(u64::from(low.us) + u64::from(high.us.saturating_sub(low.us)) * part / all)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GPU: Drafting = Drafting { whole_sizes: true, extra_us: 50 };
    const CPU: Drafting = Drafting { whole_sizes: false, extra_us: 0 };
    /// An 8B model on an H200.
    const TIMES: [(u32, u32); 5] = [(1, 3290), (8, 3570), (32, 4360), (64, 5180), (128, 7320)];

    fn times(times: &[(u32, u32)]) -> Vec<StepTime> {
        times.iter().map(|&(rows, us)| StepTime { rows, us }).collect()
    }

    /// Sequences that decode, of which each has drafted tokens, with a chance in percent.
    fn chosen(offers: &[(usize, u32)], room: usize, of: Drafting) -> Vec<usize> {
        let offer = |(slot, &(tokens, percent))| Offer { slot, tokens, chance: SURE / 100 * percent, tries: false };
        let base = Base { rows: offers.len(), tokens: offers.len(), room };
        let offers: Vec<Offer> = offers.iter().enumerate().map(offer).collect();
        DraftRows::default().choose(&offers, base, &times(&TIMES), of).to_vec()
    }

    #[test]
    fn rows_are_taken_that_are_worth_what_the_step_takes_longer() {
        assert_eq!(chosen(&[(7, 80)], 100, GPU), [7], "a step of 8 rows takes 9 % longer");
        assert_eq!(chosen(&[(7, 8)], 100, GPU), [0], "worth 8 %, and the launch costs, too");
        assert_eq!(chosen(&[(7, 12)], 100, GPU), [7], "once there is a row the others are free");
        assert_eq!(chosen(&[(7, 80)], 3, GPU), [3], "no more than there is room for");
        assert_eq!(chosen(&[(7, 50); 4], 100, GPU), [7; 4], "half as many tokens again in a step of 32");
        assert_eq!(chosen(&[(7, 20); 4], 100, GPU), [1; 4], "the rows of a step of 8");
        assert_eq!(chosen(&[(7, 90), (7, 10)], 6, GPU), [6, 0], "where they count most");
        assert_eq!(chosen(&[(7, 1); 20], 100, GPU), [0; 20], "12 free rows are worth less than the launch");
        assert_eq!(chosen(&[(7, 60); 120], 400, GPU)[..9], [1, 1, 1, 1, 1, 1, 1, 1, 0], "nothing beyond what is known");
        assert_eq!(chosen(&[(7, 3)], 100, CPU), [1], "a row of 1.2 %, and no second");
        assert_eq!(chosen(&[(7, 1)], 100, CPU), [0]);
        assert_eq!(chosen(&[], 100, CPU), [0; 0]);
    }

    #[test]
    fn a_sequence_that_tries_has_a_row_where_that_is_not_dear() {
        let offer = Offer { slot: 0, tokens: 7, chance: 10, tries: true };
        let rows = |rows, of| {
            let base = Base { rows, tokens: rows, room: 50 };
            DraftRows::default().choose(&[offer], base, &times(&TIMES), of)[0]
        };
        assert_eq!((rows(1, CPU), rows(1, GPU)), (1, 7));
        assert_eq!(rows(64, GPU), 0, "a row more costs what 26 tokens do");
    }

    #[test]
    fn nothing_is_drafted_where_no_times_are_known() {
        let offer = Offer { slot: 0, tokens: 7, chance: SURE, tries: true };
        let base = Base { rows: 1, tokens: 1, room: 50 };
        assert_eq!(DraftRows::default().choose(&[offer], base, &[], CPU), [0]);
        assert_eq!(DraftRows::default().choose(&[offer], base, &times(&[(1, 100)]), CPU), [0]);
    }

    proptest! {
        /// The slow definition: of all numbers of rows, each filled with the likeliest tokens, the one of the best
        /// rate.
        #[test]
        fn no_other_number_of_rows_has_a_better_rate(
            offers in prop::collection::vec((1usize..8, 0u32..100), 1..9), room in 0usize..40, whole in any::<bool>(),
        ) {
            let of = Drafting { whole_sizes: whole, ..GPU };
            let chosen = chosen(&offers, room, of);
            let chance = |&(_, percent): &(usize, u32)| f64::from(SURE / 100 * percent) / f64::from(SURE);
            let rate = |rows: usize, gain: f64| {
                let us = time(&times(&TIMES), offers.len() + rows, whole)? + if rows > 0 { 50 } else { 0 };
                Some((offers.len() as f64 + gain) / us as f64)
            };
            let value = |offer, number: usize| chance(offer).powi(number as i32);
            let mut values: Vec<f64> =
                offers.iter().flat_map(|offer| (1..=offer.0).map(move |number| value(offer, number))).collect();
            values.sort_by(|a, b| b.total_cmp(a));
            let best = (0..=values.len().min(room))
                .filter_map(|rows| rate(rows, values[..rows].iter().sum()))
                .fold(0.0, f64::max);
            let gain = offers.iter().zip(&chosen);
            let gain: f64 = gain.map(|(offer, &n)| (1..=n).map(|number| value(offer, number)).sum::<f64>()).sum();
            prop_assert!(chosen.iter().sum::<usize>() <= room);
            prop_assert!(chosen.iter().zip(&offers).all(|(n, offer)| *n <= offer.0));
            let found = rate(chosen.iter().sum(), gain).unwrap();
            prop_assert!(found >= best * (1.0 - 1e-3), "{found} of {best}");
        }
    }
}
