//! What steps take, by their rows: timed on a group before it serves for the first time (`timing`), and learnt on from
//! every step that is reported. From it follows how many rows a step should have, and when one is late.

use std::collections::VecDeque;
use std::time::Duration;

use looplane_proto::worker::v1;

use crate::sched::{StepRows, StepSize};

/// A step is late after this many times what it should take.
const LATE: u32 = 4;
/// Steps that are remembered.
const REMEMBERED: usize = 64;
/// A step of this many rows may take twice as long as one of a single row, on any backend.
const ROWS_OF_A_UNIT: f64 = 4.0;
/// What a step with rows of prompts should take at most, where nobody says otherwise.
const PROMPT_STEP: Duration = Duration::from_millis(500);
/// Rows of a step with prompts before any was timed, and the fewest: steps of fewer would spend their time on reading
/// weights.
const MIN_PROMPT_ROWS: u32 = 64;
/// A step of twice the rows takes at most so many times as long as two.
const UNEVEN: f64 = 1.25;
/// In so many steps the time of a size that was not used goes most of the way to the best that is plausible, so that it
/// is tried again: it may have been disturbed. Each time that it is tried for nothing costs some long steps.
const FORGET: f64 = 4096.0;
/// Numbers of rows of which times are kept; others lie between.
const KNOTS: [u32; 15] = [1, 8, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192];
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
    /// Steps may be smaller than they can, where sequences decode beside.
    is_thrifty: bool,
    /// What a step should take at most where sequences decode.
    itl_target: Option<Duration>,
}

impl StepTimes {
    /// Nothing was timed yet. `is_thrifty`: beside sequences that decode, steps may be smaller than they can.
    /// `itl_target`: what such a step should take at most.
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
        let before = curve.known().find(|&(knot, _)| knot == rows);
        curve.follow(rows, time);
        if step.prompt_rows > 0 {
            let change = before.and_then(|(_, before)| Some(self.mixed.at(rows)? - before)).unwrap_or(0.0);
            self.mixed.follow_beside(rows, change, self.decode.at(1).unwrap_or(0.0));
        }
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

    /// What steps take of as many rows as were timed: that decode, or, of more, with rows of prompts.
    pub(super) fn table(&self) -> Vec<v1::StepTime> {
        let mixed = self.mixed.known().filter(|&(rows, _)| !self.decode.reaches(rows));
        let known = self.decode.known().chain(mixed);
        known.map(|(rows, time)| v1::StepTime { rows, us: (time * 1e6).clamp(1.0, 1e9) as u32 }).collect()
    }

    /// How many rows a step with prompts should have.
    pub(super) fn rows(&self) -> StepRows {
        let least = MIN_PROMPT_ROWS.min(self.max_rows);
        let rows = KNOTS.into_iter().filter(|rows| (least..self.max_rows).contains(rows)).chain(Some(self.max_rows));
        let size = |rows| Some(StepSize { rows, time: Duration::from_secs_f64(self.mixed.at(rows)?) });
        let mut sizes: Vec<StepSize> = rows.filter_map(size).filter(|size| size.time <= PROMPT_STEP).collect();
        let alone = sizes.last().map_or(least, |size| size.rows);
        let smallest = sizes.first().copied();
        sizes.retain(|size| Some(*size) == smallest || self.itl_target.is_none_or(|target| size.time <= target));
        let sizes = match (self.is_thrifty, sizes.last()) {
            (false, Some(&most)) => vec![most],
            _ => sizes,
        };
        let decode = self.decode.known();
        let decode = decode.map(|(rows, time)| StepSize { rows, time: Duration::from_secs_f64(time) }).collect();
        StepRows { sizes, decode, alone, least }
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

    /// What a step of `rows` rows says of other sizes, where its own is expected to take `change` longer now. Half of
    /// that is put down to what all share, such as rows that decode at long contexts or a GPU at the limit of its
    /// power, but of smaller sizes no more than in proportion to their times, and no other moves further than by a step
    /// of its own. And others are expected to take less and less until they are tried: down to rows at the best rate
    /// that is known, in no less than `least`, the time of a single row.
    fn follow_beside(&mut self, rows: u32, change: f64, mut least: f64) {
        let row = self.known().map(|(knot, time)| time / f64::from(knot)).fold(f64::INFINITY, f64::min);
        let own = self.at(rows).unwrap_or(f64::INFINITY);
        for (time, knot) in self.times.iter_mut().zip(KNOTS) {
            let Some(time) = time else { continue };
            if knot != rows {
                let shared = change / 2.0 * (*time / own).min(1.0);
                *time += shared.clamp(-FOLLOW * *time, FOLLOW * *time);
                *time -= (*time - row * f64::from(knot)).max(0.0) / FORGET;
            }
            *time = time.max(least);
            least = *time;
        }
    }

    /// Follows a step of `rows` rows that took `time`. Passes compute whole blocks of rows: between two knots a time is
    /// a bound of theirs, and no more.
    fn follow(&mut self, rows: u32, time: f64) {
        let above = KNOTS.partition_point(|&knot| knot < rows).min(KNOTS.len() - 1);
        let at_knot = KNOTS[above] <= rows;
        let below = if at_knot { above } else { above.saturating_sub(1) };
        let next = self.times[below + 1..].iter().copied().flatten().next().unwrap_or(f64::INFINITY);
        for knot in [above, below].into_iter().take(if at_knot { 1 } else { 2 }) {
            let time_of_knot = &mut self.times[knot];
            *time_of_knot = match *time_of_knot {
                Some(known) if at_knot || (knot == above) == (time > known) => {
                    let change = (time / known).clamp(1.0 / FOLLOW_MOST, FOLLOW_MOST) - 1.0;
                    Some(known * (1.0 + FOLLOW * change))
                }
                None => Some((time * (units(KNOTS[knot]) / units(rows)).max(1.0)).min(next)),
                known => known,
            };
        }
        // Steps of fewer rows take no more time, steps of more no less, and hardly more than several that have as many:
        // what was seen last is right.
        let [low, high] = [below, above].map(|knot| self.times[knot].unwrap_or(time));
        self.times[..below].iter_mut().flatten().for_each(|time| *time = time.min(low));
        let (high, of_high) = (high.max(low), f64::from(KNOTS[above]));
        for (time, knot) in self.times.iter_mut().zip(KNOTS).skip(above) {
            let most = if knot == KNOTS[above] { high } else { UNEVEN * high * f64::from(knot) / of_high };
            *time = time.map(|time| time.clamp(high, most));
        }
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

    /// Rows and microseconds of steps with prompts of an 8B model on an H200.
    const MIXED: [(u32, u64); 9] = [
        (64, 4900),
        (128, 6500),
        (256, 8700),
        (512, 13_500),
        (1024, 24_700),
        (2048, 48_600),
        (384, 13_000),
        (768, 22_200),
        (1536, 36_600),
    ];

    /// That model.
    fn timed(itl_target: Option<Duration>) -> StepTimes {
        let mut times = StepTimes::new(true, itl_target);
        times.set_max_rows(2048);
        for (rows, us) in [(1, 3400), (8, 3600), (32, 4400), (64, 5200), (128, 6400), (256, 9500), (512, 15_000)] {
            times.observe(&step(rows, 0, Duration::from_micros(us)));
        }
        for (rows, us) in MIXED {
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
        assert!(times.expected(2048) < Some(MS(60)), "{:?}", times.expected(2048));
        times.observe(&step(1, 0, MS(34)));
        assert!(times.expected(2048) > Some(MS(450)), "{:?}", times.expected(2048));
        (0..64).for_each(|_| times.observe(&step(1, 0, Duration::from_micros(3400))));
        assert!(times.expected(2048) < Some(MS(50)), "{:?}", times.expected(2048));
    }

    fn rows_of(rows: &StepRows) -> Vec<u32> {
        rows.sizes.iter().map(|size| size.rows).collect()
    }

    #[test]
    fn steps_have_the_sizes_that_were_timed() {
        let rows = timed(None).rows();
        let sizes = vec![64, 128, 256, 384, 512, 768, 1024, 1536, 2048];
        assert_eq!((rows_of(&rows), rows.alone, rows.least), (sizes, 2048, 64));
        assert!(rows.sizes[2].time.abs_diff(Duration::from_micros(8700)) < Duration::from_micros(50), "{rows:?}");
        let mut given = timed(None);
        given.is_thrifty = false;
        assert_eq!(rows_of(&given.rows()), [2048], "as many as were asked for");
        assert_eq!(unknown().rows(), StepRows { sizes: vec![], decode: vec![], alone: 64, least: 64 });
    }

    /// Others had the machine while steps of one size were timed.
    #[test]
    fn a_time_that_was_disturbed_bounds_no_step_for_good() {
        let truth = timed(None);
        let of = |rows| Duration::from_secs_f64(truth.mixed.at(rows).unwrap());
        for disturbed in [128, 256, 512, 1024, 2048] {
            let mut times = timed(None);
            times.mixed = Curve::default();
            for (rows, _) in MIXED {
                times.observe(&step(0, rows, of(rows) * if rows == disturbed { 4 } else { 1 }));
            }
            // Whichever size is taken.
            for turn in 0..2000 {
                let sizes = times.rows().sizes;
                let rows = sizes[turn % sizes.len()].rows;
                times.observe(&step(14, rows - 14, of(rows)));
            }
            for rows in [128, 256, 512, 1024] {
                let (time, truth) = (times.mixed.at(rows).unwrap(), truth.mixed.at(rows).unwrap());
                assert!((time / truth - 1.0).abs() < 0.05, "{disturbed}: {rows} rows {time}, not {truth}");
            }
        }
    }

    /// A GPU that gets busy takes a quarter longer for each, milliseconds of large steps: a small one that was not used
    /// meanwhile must not seem to take milliseconds longer, too, or it is not used again for a long time.
    #[test]
    fn large_steps_that_take_longer_say_little_of_small_ones() {
        let mut times = timed(None);
        for turn in 0..300 {
            let (rows, us) = [(256, 8700), (512, 13_500), (1536, 36_600)][turn % 3];
            times.observe(&step(14, rows - 14, Duration::from_micros(us * 5 / 4)));
        }
        let of = |rows| times.mixed.at(rows).unwrap() * 1e3;
        assert!((10.8..10.9).contains(&of(256)) && (16.8..16.9).contains(&of(512)), "{times:?}");
        assert!(of(128) < 6.5 * 1.4, "{} ms", of(128));
        assert!(of(1024) > 24.7 * 1.1, "{} ms", of(1024));
    }

    #[test]
    fn a_size_that_a_target_excludes_is_tried_again_and_not_soon() {
        let mut times = timed(Some(MS(8)));
        let has_128 = |times: &StepTimes| times.rows().sizes.iter().any(|size| size.rows == 128);
        let of_64 = Duration::from_secs_f64(times.mixed.at(64).unwrap());
        while has_128(&times) {
            times.observe(&step(14, 114, MS(30)));
        }
        let mut steps = 0;
        while !has_128(&times) && steps < 10_000 {
            times.observe(&step(14, 50, of_64));
            steps += 1;
        }
        assert!((100..4096).contains(&steps), "{steps} steps");
    }

    #[test]
    fn the_target_bounds_steps_beside_sequences_that_decode() {
        for (target, sizes) in [
            (4, &[64][..]),
            (8, &[64, 128]),
            (12, &[64, 128, 256]),
            (14, &[64, 128, 256, 384, 512]),
            (100, &[64, 128, 256, 384, 512, 768, 1024, 1536, 2048]),
        ] {
            let rows = timed(Some(MS(target))).rows();
            assert_eq!((rows_of(&rows), rows.alone, rows.least), (sizes.to_vec(), 2048, 64), "{target} ms");
        }
    }

    #[test]
    fn prompts_have_as_many_rows_as_half_a_second_computes() {
        // Microseconds of a step without rows, and of a row, on a machine that others use in between: a 1B model on two
        // cores, an 8B model on a GPU.
        for (base, row, quiet, busy) in [(60_000, 6600, 64, 64), (60_000, 2000, 128, 64), (4000, 300, 512, 256)] {
            let mut times = unknown();
            let mut run = |slower: u64| {
                let rows = times.rows().alone;
                times.observe(&step(0, rows, Duration::from_micros(slower * (base + row * u64::from(rows)))));
                rows
            };
            for (slower, wanted) in [(1, quiet), (5, busy), (1, quiet)] {
                let rows = (0..200).map(|_| run(slower)).last().unwrap();
                assert_eq!(rows, wanted, "microseconds {base} and {row}, {slower} times");
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
        let mut times = timed(Some(MS(30)));
        let mut run = |slower: u32| {
            for turn in 0..1000 {
                let sizes = times.rows().sizes;
                let rows = sizes[turn % sizes.len()].rows;
                let time = MIXED.iter().find(|(of, _)| *of == rows).map(|&(_, us)| Duration::from_micros(us));
                times.observe(&step(14, rows - 14, slower * time.unwrap()));
            }
            (times.rows().sizes.last().map(|size| size.rows), times.decode.at(64))
        };
        // Long contexts: steps take twice as long, and are shorter again.
        let decode = Some(5.2e-3);
        assert_eq!(run(2), (Some(512), decode), "steps that only decode are another matter");
        assert_eq!(run(1), (Some(1024), decode));
    }

    #[test]
    fn a_time_between_two_sizes_bounds_theirs() {
        let mut curve = Curve::default();
        MIXED.into_iter().for_each(|(rows, us)| curve.follow(rows, us as f64 / 1e6));
        // Blocks of 128 rows: 600 take as long as 640, 150 as 256.
        for _ in 0..50 {
            curve.follow(600, 20e-3);
            curve.follow(150, 8.7e-3);
        }
        assert_eq!([128, 256, 512, 768].map(|rows| curve.at(rows)), [6.5e-3, 8.7e-3, 13.5e-3, 22.2e-3].map(Some));
        (0..200).for_each(|_| curve.follow(600, 24e-3));
        assert!(curve.at(768) > Some(23.9e-3) && curve.at(512) == Some(13.5e-3), "{curve:?}");
    }
}
