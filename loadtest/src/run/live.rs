//! The live view of a run on standard error: a bar and figures in a terminal, a line now and then anywhere else.
//!
//! It is drawn by a thread of its own from what the run's [`Meter`] holds: a terminal that is held (Ctrl-S) or slow
//! keeps no stream waiting.

use std::collections::VecDeque;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::client::record::Clock;
use crate::load::pacing::Extent;
use crate::run::drive::Running;
use crate::run::meter::{Arrivals, Meter};
use crate::stats::distribution::Distribution;

/// Looks at the meter in a second, of which each is drawn in a terminal.
const LOOKS_A_SECOND: u8 = 5;
/// Looks that rates and times are of: the last five seconds.
const RECENT_LOOKS: usize = 5 * LOOKS_A_SECOND as usize;
/// Looks between two lines where there is no terminal: ten seconds.
const LOOKS_A_LINE: u64 = 10 * LOOKS_A_SECOND as u64;
const TEMPLATE: &str = "{prefix} [{bar:24}] {msg}";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Screen {
    Quiet,
    /// In lines on standard error, each of which stays.
    Lines,
    /// In a terminal, where what is shown is replaced, and gone when the run has ended.
    Terminal,
}

/// A run that is shown until this is dropped.
pub struct View(Option<(mpsc::Sender<()>, JoinHandle<()>)>);

struct Look {
    elapsed_s: f64,
    /// Requests that ended well and that did not.
    ended: (u64, u64),
    /// Those whose client misbehaved on purpose, however they ended.
    misused: u64,
    in_flight: usize,
    answers_per_s: f64,
    tokens_per_s: f64,
    first_token: Distribution,
    gaps: Distribution,
}

struct Recent {
    looks: VecDeque<(f64, Arrivals)>,
}

impl Screen {
    /// Standard error as it is, unless nothing is to be shown.
    pub fn new(quiet: bool) -> Self {
        let steers = std::env::var_os("TERM").is_none_or(|terminal| terminal != "dumb");
        match io::stderr().is_terminal() && steers {
            _ if quiet => Self::Quiet,
            true => Self::Terminal,
            false => Self::Lines,
        }
    }

    /// Shows `running`, named `title`, which ends with `extent`, until the view is dropped.
    pub fn watch(self, title: &str, extent: Extent, running: &Running) -> View {
        let (meter, clock, title) = (running.meter.clone(), running.clock, title.to_owned());
        let (stop, stopped) = mpsc::channel();
        let show = match self {
            Self::Quiet => return View(None),
            Self::Lines => write_lines,
            Self::Terminal => draw,
        };
        View(Some((stop, std::thread::spawn(move || show(&title, extent, &meter, clock, &stopped)))))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.0.take() {
            drop(stop);
            // A view that panicked has said so on standard error; the run's report is still to come.
            let _ = thread.join();
        }
    }
}

fn draw(title: &str, extent: Extent, meter: &Meter, clock: Clock, stopped: &mpsc::Receiver<()>) {
    let target = ProgressDrawTarget::stderr_with_hz(LOOKS_A_SECOND);
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is a constant that is well-formed");
    let bar = ProgressBar::with_draw_target(Some(1000), target).with_style(style.progress_chars("=> "));
    bar.set_prefix(title.to_owned());
    each_look(meter, clock, stopped, |look, _| {
        bar.set_position((1000.0 * look.share(extent)) as u64);
        bar.set_message(look.text(extent, "\n  "));
    });
    bar.finish_and_clear();
}

fn write_lines(title: &str, extent: Extent, meter: &Meter, clock: Clock, stopped: &mpsc::Receiver<()>) {
    each_look(meter, clock, stopped, |look, number| {
        if number % LOOKS_A_LINE == 0 {
            // A line that cannot be shown is no reason to stop.
            let _ = writeln!(io::stderr(), "{title}: {}", look.text(extent, "; "));
        }
    });
}

/// Calls `show` with every look at `meter` and its number (from 1) until the view is dropped.
fn each_look(meter: &Meter, clock: Clock, stopped: &mpsc::Receiver<()>, mut show: impl FnMut(&Look, u64)) {
    let period = Duration::from_secs(1) / LOOKS_A_SECOND.into();
    let mut recent = Recent { looks: VecDeque::new() };
    for number in 1.. {
        match stopped.recv_timeout(period) {
            Err(RecvTimeoutError::Timeout) => show(&recent.look(meter, clock.now_ns() as f64 / 1e9), number),
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Recent {
    fn look(&mut self, meter: &Meter, elapsed_s: f64) -> Look {
        self.looks.push_back((elapsed_s, meter.take(Arrivals::default())));
        // What is left out ended where the rest begins.
        let from_s = match self.looks.len() > RECENT_LOOKS {
            true => self.looks.pop_front().map_or(0.0, |(time_s, _)| time_s),
            false => 0.0,
        };
        let mut all = Arrivals::default();
        for (_, arrivals) in &self.looks {
            all.answers += arrivals.answers;
            all.chunks += arrivals.chunks;
            all.first_token.add(&arrivals.first_token);
            all.gaps.add(&arrivals.gaps);
        }
        let seconds = elapsed_s - from_s;
        Look {
            elapsed_s,
            ended: meter.ended(),
            misused: meter.misused(),
            in_flight: meter.in_flight(),
            answers_per_s: all.answers as f64 / seconds,
            tokens_per_s: all.chunks as f64 * meter.tokens_a_chunk() / seconds,
            first_token: all.first_token,
            gaps: all.gaps,
        }
    }
}

impl Look {
    fn over(&self) -> u64 {
        self.ended.0 + self.ended.1 + self.misused
    }

    /// How much of the run is over, 0 to 1.
    fn share(&self, extent: Extent) -> f64 {
        let share = match extent {
            Extent::Requests(requests) => self.over() as f64 / requests.max(1) as f64,
            Extent::Duration(duration) => self.elapsed_s / duration.as_secs_f64(),
        };
        share.clamp(0.0, 1.0)
    }

    /// "12 of 30 s", and after that what is waited for.
    fn progress(&self, extent: Extent) -> String {
        let elapsed_s = self.elapsed_s;
        match extent {
            Extent::Requests(requests) => {
                format!("{} of {requests} requests, {elapsed_s:.0} s", self.over())
            }
            Extent::Duration(duration) if elapsed_s < duration.as_secs_f64() => {
                format!("{elapsed_s:.0} of {:.0} s", duration.as_secs_f64())
            }
            Extent::Duration(_) => format!("{elapsed_s:.0} s, waiting for the last {}", self.in_flight),
        }
    }

    fn counts(&self) -> String {
        let (succeeded, failed) = self.ended;
        format!(
            "{succeeded} ok, {failed} failed, {} in flight; {:.1} requests/s, {:.1} tokens/s",
            self.in_flight, self.answers_per_s, self.tokens_per_s
        )
    }

    /// Distribution of the last seconds, TTFT from when a request was due.
    fn times(&self) -> String {
        let figures = |times: &Distribution| match (times.percentile_ms(50.0), times.percentile_ms(99.0)) {
            (Some(p50), Some(p99)) => format!("p50 {p50:.1} p99 {p99:.1} ms"),
            _ => "-".into(),
        };
        format!("TTFT {}, ITL {}", figures(&self.first_token), figures(&self.gaps))
    }

    /// All of it: between line breaks what stands beside and below the bar, each line short enough for 80 columns.
    fn text(&self, extent: Extent, between: &str) -> String {
        [self.progress(extent), self.counts(), self.times()].join(between)
    }
}

#[cfg(test)]
mod tests;
