//! How fast all threads together can read memory: the limit that decoding is measured against.
//!
//! A pass reads a buffer far above the caches from end to end, as the decoder's products do: a contiguous run a thread,
//! whole cache lines, lines asked for ahead into L2. Processors differ in which pattern they like best: the fastest of
//! several is found first.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::ahead::prefetch;
use super::kernels::isa::Isa;
use super::load::placement;
use super::memory::{Buffer, Disjoint, OutOfMemory};
use super::team::{Team, TeamError};

/// A cache line.
type Line = [u64; 8];
/// Lines that are dealt to a thread at one time: 1 MiB.
const UNIT_LINES: usize = (1 << 20) / size_of::<Line>();
/// (Runs read side by side within a unit, bytes asked for ahead of each). Side by side as tiles of a product are.
const PATTERNS: [(usize, usize); 6] = [(1, 0), (1, 2 << 10), (1, 8 << 10), (4, 0), (4, 2 << 10), (4, 4 << 10)];
/// How often a benchmark tries each pattern, in turns.
const TRIALS: usize = 3;
/// A rank that loads reads so much a thread, over its share of any cache, and at least so much.
const LOAD_BYTES: [usize; 2] = [32 << 20, 128 << 20];
/// It reads that again and again for so long, and at least this often.
const LOAD_TIME: Duration = Duration::from_millis(150);
const LOAD_PASSES: usize = 3;

/// The read limit cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The buffer does not fit.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The threads cannot be started.
    #[error(transparent)]
    Team(#[from] TeamError),
}

/// A buffer and the threads that read it.
pub struct ReadBandwidth {
    team: Team,
    reading: Reading,
}

impl ReadBandwidth {
    /// Takes `bytes` of memory (at least 1 MiB), finds the fastest pattern, and starts as many threads, on the cores
    /// that a group of ranks with as many threads in all would use.
    ///
    /// # Errors
    /// The memory or the threads are refused.
    pub fn new(threads: usize, bytes: usize, unpinned: bool) -> Result<Self, ReadError> {
        let (placement, crowded, _) = placement(0, 1, threads, unpinned);
        let mut team = Team::new(threads, placement, crowded)?;
        let reading = led(&mut team, |team| Reading::new(team, Isa::best(), bytes, TRIALS))?;
        Ok(Self { team, reading })
    }

    /// Bytes of a pass.
    pub fn bytes(&self) -> usize {
        self.reading.bytes()
    }

    /// Reads the buffer once and returns the time.
    pub fn pass(&mut self) -> Duration {
        let Self { team, reading } = self;
        led(team, |team| reading.pass(team))
    }
}

/// Bytes that [`limit`] takes for so many threads.
pub(super) fn limit_bytes(threads: usize) -> usize {
    let [a_thread, least] = LOAD_BYTES;
    (a_thread * threads).max(least)
}

/// Bytes a second that a rank's threads read, by the median pass: what it shares with ranks that read at the same time
/// it has a share of.
///
/// # Errors
/// There is not so much memory as [`limit_bytes`].
pub(super) fn limit(team: &mut Team, isa: Isa) -> Result<u64, OutOfMemory> {
    led(team, |team| {
        let reading = Reading::new(team, isa, limit_bytes(team.threads()), 1)?;
        let (begun, mut passes) = (Instant::now(), Vec::new());
        while passes.len() < LOAD_PASSES || begun.elapsed() < LOAD_TIME {
            passes.push(reading.pass(team));
        }
        passes.sort_unstable();
        Ok((reading.bytes() as f64 / passes[passes.len() / 2].as_secs_f64()) as u64)
    })
}

/// Runs `work` on a thread of its own that leads the team: to lead is to move to the team's first core and to stay
/// there.
fn led<T: Send>(team: &mut Team, work: impl FnOnce(&Team) -> T + Send) -> T {
    let lead = move || {
        let _leading = team.lead();
        work(team)
    };
    let worked = std::thread::scope(|scope| scope.spawn(lead).join());
    worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// A buffer, and how it is read.
struct Reading {
    isa: Isa,
    buffer: Buffer<Line>,
    pattern: (usize, usize),
}

impl Reading {
    /// With the pattern that is the fastest of so many trials.
    fn new(team: &Team, isa: Isa, bytes: usize, trials: usize) -> Result<Self, OutOfMemory> {
        let units = (bytes / (UNIT_LINES * size_of::<Line>())).max(1);
        let mut buffer = Buffer::<Line>::zeroed(units * UNIT_LINES, "measuring read bandwidth")?;
        let lines = Disjoint::new(&mut buffer);
        // Pages that were never written are all one page of zeros, which would be read from the cache. The system gives
        // a page from the memory of the core that writes it first.
        team.for_each(units, |unit| {
            // SAFETY: each unit is run once, and has lines of its own.
            let lines = unsafe { lines.part(unit * UNIT_LINES..(unit + 1) * UNIT_LINES) };
            lines.iter_mut().zip(unit as u64..).for_each(|(line, value)| *line = [value; 8]);
        });
        let mut this = Self { isa, buffer, pattern: PATTERNS[0] };
        let mut best = Duration::MAX;
        for pattern in std::iter::repeat_n(PATTERNS, trials).flatten() {
            let before = std::mem::replace(&mut this.pattern, pattern);
            match this.pass(team) {
                time if time < best => best = time,
                _ => this.pattern = before,
            }
        }
        Ok(this)
    }

    fn bytes(&self) -> usize {
        self.buffer.len() * size_of::<Line>()
    }

    /// Reads the buffer once and returns the time.
    fn pass(&self, team: &Team) -> Duration {
        let begun = Instant::now();
        let (isa, buffer, pattern) = (self.isa, &*self.buffer, self.pattern);
        team.for_each(buffer.len() / UNIT_LINES, |unit| {
            let lines = &buffer[unit * UNIT_LINES..][..UNIT_LINES];
            black_box(match isa {
                // SAFETY: whoever made it found the set on this processor.
                #[cfg(target_arch = "x86_64")]
                Isa::Amx | Isa::Avx512Bf16 => unsafe { read_avx512(lines, pattern) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 => unsafe { read_avx2(lines, pattern) },
                _ => read_inlined(lines, pattern),
            });
        });
        begun.elapsed()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl")]
fn read_avx512(lines: &[Line], pattern: (usize, usize)) -> Line {
    read_inlined(lines, pattern)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn read_avx2(lines: &[Line], pattern: (usize, usize)) -> Line {
    read_inlined(lines, pattern)
}

#[inline(always)]
fn read_inlined(lines: &[Line], (runs, ahead): (usize, usize)) -> Line {
    match (runs, ahead) {
        (1, 0) => read_runs::<1, false>(lines, 0),
        (1, _) => read_runs::<1, true>(lines, ahead),
        (_, 0) => read_runs::<4, false>(lines, 0),
        (_, _) => read_runs::<4, true>(lines, ahead),
    }
}

/// Xors all lines, so that none need not be read: `RUNS` runs side by side, four lines of each at a time.
#[inline(always)]
fn read_runs<const RUNS: usize, const AHEAD: bool>(lines: &[Line], ahead: usize) -> Line {
    const STEP: usize = 4;
    let run_len = lines.len() / RUNS;
    let mut sums = [[[0u64; 8]; STEP]; RUNS];
    for at in (0..run_len).step_by(STEP) {
        for run in 0..RUNS {
            let step: &[Line; STEP] = lines[run * run_len + at..].first_chunk().expect("a run is whole steps");
            for (sum, line) in sums[run].iter_mut().zip(step) {
                if AHEAD {
                    prefetch(line.as_ptr().cast::<u16>().wrapping_byte_add(ahead));
                }
                for (sum, word) in sum.iter_mut().zip(line) {
                    *sum ^= word;
                }
            }
        }
    }
    let mut all = [0; 8];
    for sum in sums.as_flattened() {
        all.iter_mut().zip(sum).for_each(|(all, sum)| *all ^= sum);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_reads_every_line() {
        let lines: Vec<Line> =
            (0..UNIT_LINES as u64).map(|i| std::array::from_fn(|w| (i * 8 + w as u64) << 9)).collect();
        let expected: Line = std::array::from_fn(|w| lines.iter().fold(0, |sum, line| sum ^ line[w]));
        for pattern in PATTERNS {
            assert_eq!(read_inlined(&lines, pattern), expected, "{pattern:?}");
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx2") {
                // SAFETY: just detected.
                assert_eq!(unsafe { read_avx2(&lines, pattern) }, expected, "{pattern:?}");
            }
        }
    }

    #[test]
    fn a_pass_takes_time_and_leaves_the_caller_where_it_was() {
        let cores = || rustix::thread::sched_getaffinity(None).unwrap();
        let before = cores();
        let mut reader = ReadBandwidth::new(2, 4 << 20, false).unwrap();
        assert_eq!(reader.bytes(), 4 << 20);
        assert!(reader.pass() > Duration::ZERO);
        assert_eq!(cores(), before);
    }

    #[test]
    fn a_rank_measures_beside_others_that_do() {
        let measured = || {
            let (placement, ..) = placement(0, 1, 1, true);
            let mut team = Team::new(1, placement, true).unwrap();
            limit(&mut team, Isa::best()).unwrap()
        };
        let together =
            std::thread::scope(|scope| [(); 4].map(|()| scope.spawn(measured)).map(|rank| rank.join().unwrap()));
        // From a slow virtual machine that others use, too, to more than any core reads.
        assert!(together.iter().all(|limit| (1 << 27..1 << 40).contains(limit)), "{together:?}");
        assert_eq!([limit_bytes(1), limit_bytes(64)], [128 << 20, 2 << 30]);
    }
}
