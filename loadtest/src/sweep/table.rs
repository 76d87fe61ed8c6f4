//! The sweep for people: a table for each load.

use std::fmt::{self, Display};

use crate::sweep::figures::{Choice, Device, How, Row, Size, Sweep};

const SIZE_WIDTH: usize = 6;
const WIDTH: usize = 12;

/// Heads of the columns of a load's table; `socket` is what one worker computes on.
pub fn heads(socket: &str) -> [String; 10] {
    [
        "layout".into(),
        "tokens/s".into(),
        "speed-up".into(),
        "efficiency".into(),
        format!("/s a {socket}"),
        "/s a user".into(),
        "ms a token".into(),
        "first, ms".into(),
        "read limit".into(),
        "model off".into(),
    ]
}

/// A row under [`heads`], and where its figures come from; a dash where nothing was counted.
pub fn cells(row: &Row) -> [String; 10] {
    let some = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    [
        row.layout.in_short(),
        format!("{:.1}", row.tokens_per_s),
        some(row.speed_up.map(|ratio| format!("{ratio:.2}"))),
        some(row.efficiency.map(|share| format!("{:.0} %", 100.0 * share))),
        format!("{:.1}", row.tokens_per_s_a_socket),
        some(row.tokens_per_s_a_user.map(|rate| format!("{rate:.1}"))),
        some(row.tpot_ms.map(|ms| format!("{ms:.3}"))),
        some(row.median_ttft_ms.zip(row.p99_ttft_ms).map(|(p50, p99)| format!("{p50:.0}, {p99:.0}"))),
        some(row.read_share.map(|share| format!("{:.0} %", 100.0 * share))),
        some(row.model_error.map(|error| {
            let role = if row.model_fitted { " fit" } else { "" };
            format!("{:+.1} %{role}", 100.0 * error)
        })),
    ]
}

/// Heads of the table of choices.
pub const CHOICE_HEADS: [&str; 4] = ["load", "sockets", "most tokens a second", "shortest time between tokens"];

/// A choice under [`CHOICE_HEADS`].
pub fn choice_cells(sweep: &Sweep, choice: &Choice) -> [String; 4] {
    let Choice { load, most, fastest } = choice;
    let told = |row: &Row, figure: String| format!("{}: {figure}, {}", row.layout.in_short(), row.how.in_words());
    [
        sweep.loads[*load].name.clone(),
        most.layout.sockets().to_string(),
        told(most, format!("{:.1} / s", most.tokens_per_s)),
        fastest.tpot_ms.map_or_else(|| "-".into(), |ms| told(fastest, format!("{ms:.3} ms"))),
    ]
}

/// What the columns mean, for below the tables.
pub fn legend(device: Device) -> String {
    let socket = device.socket();
    format!(
        "Layout: replicas x workers that share the model. Efficiency: speed-up over as many times the smallest size. /s a {socket}, a \
         user: tokens a second of each {socket}, and of each stream behind its first token. ms a token: time per output \
         token behind the first, mean. First: time to the first token, p50 and p99. Read limit: bytes of weights, K and \
         V of a step over the time of a token, as a share of what the bench read at best. Model off: tokens a second by \
         the scaling model over what was measured, less 1; \"fit\" where it was fitted on that size."
    )
}

/// One line on a size that has just been measured, or was not.
pub fn line(sweep: &Sweep, size: &Size) -> String {
    let (layout, measured, loads) = (size.layout, size.measured.len(), sweep.loads.len());
    match &size.not_measured {
        Some(why) if measured == 0 => format!("{layout} is not measured: {why}"),
        Some(why) => format!("{layout} is measured under {measured} of {loads} loads: {why}"),
        None => format!("{layout} is measured"),
    }
}

impl Sweep {
    /// Model, place and version in one line.
    pub fn head(&self) -> String {
        let place = match self.device {
            Device::Cpu => format!("CPU, {} cores", self.cores),
            Device::Cuda => format!("{} GPUs", self.gpus),
        };
        let processor = self.processor.as_ref().map_or_else(String::new, |name| format!(" ({name})"));
        format!("{place}{processor} · looplane {}", self.version)
    }
}

impl Display for Sweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "\n{} · {}", self.model.as_deref().unwrap_or("no model was served"), self.head())?;
        for (load, point) in self.loads.iter().enumerate() {
            let rows = self.rows(load);
            if rows.is_empty() {
                continue;
            }
            writeln!(f, "\n{} ({})", point.name, point.pacing)?;
            line_of(f, &heads(self.device.socket()), "")?;
            for row in &rows {
                line_of(f, &cells(row), row.how.in_words())?;
            }
        }
        let choices = self.choices();
        if !choices.is_empty() {
            writeln!(f, "\nWhich layout for which load")?;
            let cells = choices.iter().map(|choice| choice_cells(self, choice));
            for [load, sockets, most, fastest] in [CHOICE_HEADS.map(str::to_owned)].into_iter().chain(cells) {
                writeln!(f, "{load:>14}{sockets:>9}   {most:<44}{fastest}")?;
            }
        }
        writeln!(f, "\n{}", legend(self.device))?;
        for size in self.sizes.iter().filter(|size| size.not_measured.is_some()) {
            writeln!(f, "{}", line(self, size))?;
        }
        for remark in self.remarks() {
            writeln!(f, "note: {remark}")?;
        }
        Ok(())
    }
}

fn line_of(f: &mut fmt::Formatter<'_>, cells: &[String], how: &str) -> fmt::Result {
    for (place, cell) in cells.iter().enumerate() {
        let width = if place == 0 { SIZE_WIDTH } else { WIDTH };
        write!(f, "{cell:>width$}")?;
    }
    // Figures of different origin must not look alike.
    match how {
        "" => writeln!(f),
        how if how == How::Measured.in_words() => writeln!(f, "   {how}"),
        how => writeln!(f, " * {how}"),
    }
}
