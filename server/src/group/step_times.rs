//! What steps take, by their rows: timed on a group before it serves for the first time (`timing`), and learnt on from
//! every step that is reported. From it follows how many rows a step should have, and when one is late.

use std::collections::VecDeque;
use std::time::Duration;

use crate::sched::StepRows;

/// A step is late after this many times what it should take.
const LATE: u32 = 4;
/// Steps that are remembered.
const REMEMBERED: usize = 64;
/// A step of this many rows may take twice as long as one of a single row, on any backend.
const ROWS_OF_A_UNIT: f64 = 4.0;
/// What a step with rows of prompts should take at most, where nobody says otherwise.
const PROMPT_STEP: Duration = Duration::from_millis(500);
/// Rows of prompts in a step before any was timed, and the least: steps of fewer would spend their time on reading
/// weights.
const MIN_PROMPT_ROWS: u32 = 64;
/// Twice the rows in a step are worth the wait of those who decode if they bring so many times the rows a second: while
/// few rows of prompts wait, if the rate grows more than the step does; while many do, if it grows at all.
const WORTH_CALM: f64 = std::f64::consts::SQRT_2;
const WORTH_CROWDED: f64 = 1.05;
/// How many times that are known of more rows are looked at. While many rows wait, all: one that was disturbed would
/// hide the others for good, as no step of its size would be run to show it.
const AHEAD_CALM: usize = 1;
const AHEAD_CROWDED: usize = KNOTS.len();
/// Rows that the CPU backend computes together.
const PANEL_ROWS: u32 = 16;
/// Numbers of rows of which times are kept; others lie between.
pub(super) const KNOTS: [u32; 11] = [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192];
/// How far a time that is kept follows a new one, and how many times as long or short that may be.
const FOLLOW: f64 = 0.125;
const FOLLOW_MOST: f64 = 4.0;

/// A step, and what it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StepTime {
    pub(super) decode_rows: u32,
    pub(super) prompt_rows: u32,
    pub(super) time: Duration,
}

/// What steps have been taking, over all groups of a replica.
#[derive(Debug)]
pub(super) struct StepTimes {
    /// Steps that only decode.
    decode: Curve,
    /// Steps with rows of prompts, by all their rows.
    mixed: Curve,
    /// The newest steps: times over what was expected.
    delays: VecDeque<f64>,
    /// Rows that a step may have at all.
    max_rows: u32,
    /// Steps are no larger than is worth it, where sequences decode beside.
    is_thrifty: bool,
    /// What a step should take at most where sequences decode.
    itl_target: Option<Duration>,
}

impl StepTimes {
    /// Nothing was timed yet. `is_thrifty`: beside sequences that decode, steps are only as large as brings more rows a
    /// second. `itl_target`: what such a step should take at most.
    pub(super) fn new(is_thrifty: bool, itl_target: Option<Duration>) -> Self {
        Self {
            decode: Curve::default(),
            mixed: Curve::default(),
            delays: VecDeque::new(),
            max_rows: u32::MAX,
            is_thrifty,
            itl_target,
        }
    }

    /// Steps of the group at hand have at most `rows` rows.
    pub(super) fn set_max_rows(&mut self, rows: u32) {
        self.max_rows = rows;
    }

    /// No step was timed yet.
    pub(super) fn is_empty(&self) -> bool {
        self.delays.is_empty()
    }

    /// A step was run.
    pub(super) fn observe(&mut self, step: &StepTime) {
        let (rows, time) = (step.decode_rows + step.prompt_rows, step.time.as_secs_f64().max(1e-9));
        if rows == 0 {
            return;
        }
        let curve = if step.prompt_rows > 0 { &mut self.mixed } else { &mut self.decode };
        if self.delays.len() == REMEMBERED {
            self.delays.pop_front();
        }
        self.delays.push_back(curve.at(rows).map_or(1.0, |expected| time / expected));
        curve.follow(rows, time);
    }

    /// What a step of `rows` rows should take at most; `None` before any was timed.
    pub(super) fn expected(&self, rows: u32) -> Option<Duration> {
        let mixed = self.mixed.at(rows);
        // More rows than ever decoded are of prompts.
        let decode = self.decode.at(rows).filter(|_| mixed.is_none() || self.decode.reaches(rows));
        let longest = mixed.into_iter().chain(decode).reduce(f64::max)?;
        let delay = self.delays.iter().copied().fold(1.0, f64::max);
        Some(Duration::from_secs_f64((longest * delay).min(1e6)))
    }

    /// After how long a step of `rows` rows counts as hung: several times what it should take, within bounds.
    pub(super) fn limit(&self, rows: u32, floor: Duration, cap: Duration) -> Duration {
        self.expected(rows).map_or(cap, |expected| (expected * LATE).max(floor).min(cap))
    }

    /// How many rows a step with prompts should have.
    pub(super) fn rows(&self) -> StepRows {
        let least = MIN_PROMPT_ROWS.min(self.max_rows);
        let within = |limit| self.mixed.rows_within(limit).unwrap_or(0);
        let alone = within(PROMPT_STEP).clamp(least, self.max_rows);
        let worth = |gain, ahead| self.mixed.worth(gain, ahead).filter(|_| self.is_thrifty).unwrap_or(u32::MAX);
        let most = self.itl_target.map_or(alone, |target| within(target).min(alone));
        let [calm, crowded] = [worth(WORTH_CALM, AHEAD_CALM), worth(WORTH_CROWDED, AHEAD_CROWDED)];
        StepRows { calm: most.min(calm), crowded: most.min(crowded), alone, least }
    }
}

/// Times of steps by their rows, in seconds: at the [`KNOTS`] that are known, ascending.
#[derive(Debug, Default)]
struct Curve {
    times: [Option<f64>; KNOTS.len()],
}

impl Curve {
    fn known(&self) -> impl DoubleEndedIterator<Item = (u32, f64)> {
        KNOTS.into_iter().zip(self.times).filter_map(|(rows, time)| Some((rows, time?)))
    }

    /// The time of a step of `rows` rows: between the knots that are known, or at most.
    fn at(&self, rows: u32) -> Option<f64> {
        let below = self.known().rfind(|&(knot, _)| knot <= rows);
        let above = self.known().find(|&(knot, _)| knot >= rows);
        match (below, above) {
            (Some(below), Some(above)) => Some(below.1 + (above.1 - below.1) * share(rows, below.0, above.0)),
            (Some((knot, time)), None) => Some(time * units(rows) / units(knot)),
            (None, above) => above.map(|(_, time)| time),
        }
    }

    /// Whether the time of so many rows, or of more, is known.
    fn reaches(&self, rows: u32) -> bool {
        self.known().next_back().is_some_and(|(knot, _)| rows <= knot)
    }

    /// Follows a step of `rows` rows that took `time`.
    fn follow(&mut self, rows: u32, time: f64) {
        let expected = self.at(rows);
        let above = KNOTS.iter().position(|&knot| knot >= rows).unwrap_or(KNOTS.len() - 1);
        let below = if KNOTS[above] > rows { above.saturating_sub(1) } else { above };
        let share = share(rows, KNOTS[below], KNOTS[above]);
        let knots = [(below, 1.0 - share), (above, share)];
        for (knot, weight) in knots.into_iter().take(if below == above { 1 } else { 2 }) {
            self.times[knot] = match (self.times[knot], expected) {
                (Some(known), Some(expected)) => {
                    let change = (time / expected).clamp(1.0 / FOLLOW_MOST, FOLLOW_MOST) - 1.0;
                    Some(known * (1.0 + FOLLOW * weight * change))
                }
                _ => {
                    let most = self.times[knot..].iter().copied().flatten().next().unwrap_or(f64::INFINITY);
                    Some((time * (units(KNOTS[knot]) / units(rows)).max(1.0)).min(most))
                }
            };
        }
        // Steps of fewer rows take no more time, and steps of more no less: what was seen last is right.
        let [low, high] = [below, above].map(|knot| self.times[knot].unwrap_or(time));
        self.times[..below].iter_mut().flatten().for_each(|time| *time = time.min(low));
        self.times[above..].iter_mut().flatten().for_each(|time| *time = time.max(low).max(high));
    }

    /// How many rows a step of `limit` has, as far as is known: at least.
    fn rows_within(&self, limit: Duration) -> Option<u32> {
        let limit = limit.as_secs_f64();
        let (last, time) = self.known().next_back()?;
        if time <= limit {
            let rows = units(last) * limit / time - ROWS_OF_A_UNIT;
            return Some(whole_panels(rows));
        }
        let mut above = (last, time);
        for (knot, time) in self.known().rev() {
            if time <= limit {
                let rows = f64::from(knot) + f64::from(above.0 - knot) * (limit - time) / (above.1 - time);
                return Some(whole_panels(rows));
            }
            above = (knot, time);
        }
        Some(0)
    }

    /// The rows of a step from which on twice as many bring less than `gain` times the rows a second, four times as
    /// many less than its square and so on, as far as `ahead` knots go; `None` if that is not known.
    fn worth(&self, gain: f64, ahead: usize) -> Option<u32> {
        let known: Vec<(u32, f64)> = self.known().filter(|&(rows, _)| rows >= 64).collect();
        (1..known.len()).find_map(|next| {
            let (rows, time) = known[next - 1];
            let is_worth = |&(more, its): &(u32, f64)| {
                let times = f64::from(more) / f64::from(rows);
                times * time / its >= gain.powf(times.log2())
            };
            (!known[next..].iter().take(ahead).any(is_worth)).then_some(rows)
        })
    }
}

fn units(rows: u32) -> f64 {
    ROWS_OF_A_UNIT + f64::from(rows)
}

/// How far `rows` is on the way from `below` to `above`, from 0 to 1.
fn share(rows: u32, below: u32, above: u32) -> f64 {
    match above > below {
        true => (f64::from(rows.max(below)) - f64::from(below)) / f64::from(above - below),
        false => 0.0,
    }
}

fn whole_panels(rows: f64) -> u32 {
    rows as u32 / PANEL_ROWS * PANEL_ROWS
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOOR: Duration = Duration::from_secs(3);
    const CAP: Duration = Duration::from_secs(120);
    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn step(decode_rows: u32, prompt_rows: u32, time: Duration) -> StepTime {
        StepTime { decode_rows, prompt_rows, time }
    }

    /// Steps of at most 512 rows, of which nothing is known.
    fn unknown() -> StepTimes {
        let mut times = StepTimes::new(true, None);
        times.set_max_rows(512);
        times
    }

    /// Steps of one row that took `one`.
    fn times(one: Duration) -> StepTimes {
        let mut times = unknown();
        (0..10).for_each(|_| times.observe(&step(1, 0, one)));
        times
    }

    /// An 8B model on an H200, in microseconds.
    fn timed(itl_target: Option<Duration>) -> StepTimes {
        let mut times = StepTimes::new(true, itl_target);
        times.set_max_rows(2048);
        for (rows, us) in [(1, 3400), (8, 3600), (32, 4400), (64, 5200), (128, 6400), (256, 9500), (512, 15_000)] {
            times.observe(&step(rows, 0, Duration::from_micros(us)));
        }
        for (rows, us) in [(64, 5300), (128, 6500), (256, 10_000), (512, 13_000), (1024, 24_000), (2048, 46_000)] {
            times.observe(&step(0, rows, Duration::from_micros(us)));
        }
        times
    }

    #[test]
    fn a_hang_is_noticed_by_what_steps_have_been_taking() {
        assert_eq!(unknown().limit(1, FLOOR, CAP), CAP, "nothing is known yet");
        // The demo model and an 8B model on a GPU; chunks of 512 rows.
        for one in [Duration::from_micros(900), Duration::from_micros(3300)] {
            assert_eq!(times(one).limit(512, FLOOR, CAP), FLOOR);
        }
        // A 1B model on two cores: 512 rows take some 4 s there.
        let limit = times(MS(60)).limit(512, FLOOR, CAP);
        assert!(limit > Duration::from_secs(16) && limit < Duration::from_secs(60), "{limit:?}");
        assert_eq!(times(Duration::from_secs(2)).limit(512, FLOOR, CAP), CAP);
        // One step that took ten times as long: others may.
        let mut times = timed(None);
        assert_eq!(times.expected(2048), Some(MS(46)));
        times.observe(&step(1, 0, MS(34)));
        assert!(times.expected(2048) > Some(MS(450)), "{:?}", times.expected(2048));
        (0..64).for_each(|_| times.observe(&step(1, 0, Duration::from_micros(3400))));
        assert!(times.expected(2048) < Some(MS(50)), "{:?}", times.expected(2048));
    }

    #[test]
    fn steps_beside_sequences_that_decode_are_as_large_as_is_worth_it() {
        // From 128 to 256 rows 30 % more rows a second, from 512 to 1024 8 %, from there to 2048 4 %.
        let rows = StepRows { calm: 128, crowded: 1024, alone: 2048, least: 64 };
        assert_eq!(timed(None).rows(), rows);
        let mut given = timed(None);
        given.is_thrifty = false;
        assert_eq!(given.rows(), StepRows { calm: 2048, crowded: 2048, ..rows }, "as many as were asked for");
    }

    /// Others had the machine while steps of one size were timed.
    #[test]
    fn a_time_that_was_disturbed_bounds_no_step_for_good() {
        let truth = timed(None);
        for disturbed in [128, 256, 512, 1024] {
            let mut times = timed(None);
            times.mixed = Curve::default();
            for rows in [64, 128, 256, 512, 1024, 2048] {
                let slower = if rows == disturbed { 4.0 } else { 1.0 };
                let time = Duration::from_secs_f64(slower * truth.mixed.at(rows).unwrap());
                times.observe(&step(0, rows, time));
            }
            for _ in 0..200 {
                let rows = times.rows().crowded;
                times.observe(&step(64, rows - 64, Duration::from_secs_f64(truth.mixed.at(rows).unwrap())));
            }
            assert!(times.rows().crowded >= 1024, "{disturbed} rows: {:?}", times.mixed);
        }
    }

    #[test]
    fn the_target_bounds_steps_beside_sequences_that_decode() {
        for (target, calm, crowded) in [(8, 128, 176), (13, 128, 512), (20, 128, 832), (100, 128, 1024), (4, 0, 0)] {
            let rows = timed(Some(MS(target))).rows();
            assert_eq!(rows, StepRows { calm, crowded, alone: 2048, least: 64 }, "{target} ms");
        }
    }

    #[test]
    fn prompts_have_as_many_rows_as_half_a_second_computes() {
        // Microseconds of a step without rows, and of a row, on a machine that others use in between: a 1B model on two
        // cores, an 8B model on a GPU.
        for (base, row, quiet, busy) in [(60_000, 6600, 64, 64), (60_000, 2000, 208, 64), (4000, 300, 512, 320)] {
            let mut times = unknown();
            let mut run = |slower: u64| {
                let rows = times.rows().alone;
                times.observe(&step(0, rows, Duration::from_micros(slower * (base + row * u64::from(rows)))));
                rows
            };
            for (slower, wanted) in [(1, quiet), (5, busy), (1, quiet)] {
                let rows = (0..200).map(|_| run(slower)).last().unwrap();
                assert!(rows.abs_diff(wanted) <= 16, "{rows} rows in place of {wanted}");
            }
        }
        let mut times = unknown();
        times.observe(&step(0, 512, MS(30)));
        let rows = times.rows().alone;
        times.observe(&step(17, 3, Duration::from_secs(1)));
        assert_eq!((rows, times.rows().alone), (512, 512), "a step of few rows says little of one of many");
    }

    #[test]
    fn what_was_timed_follows_what_is_seen() {
        let mut times = timed(Some(MS(20)));
        // Long contexts: steps of 800 rows take twice as long now.
        for _ in 0..100 {
            let rows = times.rows().crowded;
            times.observe(&step(64, rows - 64, Duration::from_micros(2 * (2000 + 22 * u64::from(rows)))));
        }
        let rows = times.rows().crowded;
        assert!((320..=384).contains(&rows), "{rows} rows");
        assert_eq!(times.decode.at(64), Some(5.2e-3), "steps that only decode are another matter");
    }
}
