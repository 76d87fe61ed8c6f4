//! Words of options and of servers: times and shares read, dates written, foreign text made safe to print.

use std::error::Error;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Longest run, and longest time limit of a request.
const MAX_DURATION: Duration = Duration::from_secs(24 * 3600);

pub fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| format!("'{text}' is no share: give 0 to 1"))
}

/// Reads `250ms`, `30s`, `5m`, `1h` or plain seconds, more than nothing and at most a day.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let unit_s = match unit {
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(format!("'{unit}' is no unit of time: use ms, s, m or h")),
    };
    let seconds = number.trim().parse::<f64>().map_err(|_| format!("'{number}' is no number"))? * unit_s;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() && duration <= MAX_DURATION => Ok(duration),
        _ => Err("a time must be more than 0 and at most 24h".into()),
    }
}

/// `text` on one line of at most `max_chars` characters, without control characters: a server's words must not be able
/// to steer the terminal that the report is printed on.
pub fn printable(text: &str, max_chars: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(max_chars).collect()
}

/// An error with all its sources on one line.
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    printable(&text, 200)
}

/// `time` as `YYYYMMDD-HHMMSS` in UTC. Civil date from days after Howard Hinnant, "chrono-compatible low-level date
/// algorithms", `civil_from_days`.
pub fn utc_date(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, second_of_day) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (second_of_day / 3600, second_of_day / 60 % 60, second_of_day % 60);
    format!("{year:04}{month:02}{day:02}-{hour:02}{minute:02}{second:02}")
}

pub fn readable(date: &str) -> String {
    let (day, time) = (&date[..8], &date[9..]);
    format!("{}-{}-{} {}:{} UTC", &day[..4], &day[4..6], &day[6..], &time[..2], &time[2..4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_units() {
        for (text, ms) in [("250ms", 250), ("30", 30_000), ("1.5s", 1500), ("2m", 120_000), ("24h", 86_400_000)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "0s", "-1s", "1d", "nan", "inf", "1e99h", "25h", "1 0s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn dates_are_civil() {
        for (seconds, date) in [
            (0, "19700101-000000"),
            (951_782_400, "20000229-000000"),
            (1_709_251_199, "20240229-235959"),
            (1_767_225_599, "20251231-235959"),
        ] {
            assert_eq!(utc_date(UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
        assert_eq!(readable("20240229-235959"), "2024-02-29 23:59 UTC");
    }

    #[test]
    fn printable_text_cannot_steer_the_terminal() {
        assert_eq!(printable("a\u{1b}[2J\r\nb", 100), "a [2J  b");
        assert_eq!(printable("ééé", 2), "éé");
    }
}
