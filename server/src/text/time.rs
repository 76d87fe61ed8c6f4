//! The date for chat templates: `strftime` in UTC, for the directives that templates use.

/// Formats seconds since 1970 as Python's `strftime` does in the C locale; `None` for a directive that is not known.
pub(super) fn strftime(format: &str, unix_seconds: u64) -> Option<String> {
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
    let days = unix_seconds / 86400;
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (unix_seconds / 3600 % 24, unix_seconds / 60 % 60, unix_seconds % 60);
    let (month_name, day_name) = (MONTHS[month as usize - 1], DAYS[((days + 4) % 7) as usize]);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };

    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        out.push_str(&match chars.next()? {
            'Y' => year.to_string(),
            'y' => format!("{:02}", year % 100),
            'm' => format!("{month:02}"),
            'd' => format!("{day:02}"),
            'e' => format!("{day:2}"),
            'B' => month_name.into(),
            'b' | 'h' => month_name[..3].into(),
            'A' => day_name.into(),
            'a' => day_name[..3].into(),
            'H' => format!("{hour:02}"),
            'I' => format!("{hour12:02}"),
            'M' => format!("{minute:02}"),
            'S' => format!("{second:02}"),
            'p' => if hour < 12 { "AM" } else { "PM" }.into(),
            'F' => format!("{year}-{month:02}-{day:02}"),
            'T' => format!("{hour:02}:{minute:02}:{second:02}"),
            'Z' => "UTC".into(),
            'z' => "+0000".into(),
            '%' => "%".into(),
            '-' => match chars.next()? {
                'd' => day.to_string(),
                'm' => month.to_string(),
                'H' => hour.to_string(),
                'I' => hour12.to_string(),
                _ => return None,
            },
            _ => return None,
        });
    }
    Some(out)
}

/// Year, month (1 to 12) and day (1 to 31) of a day since 1970-01-01 in the Gregorian calendar (Howard Hinnant,
/// "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`).
fn civil(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        for (seconds, date) in [
            (0, "Thursday 01 January 1970 00:00:00 AM"),
            (951_782_400, "Tuesday 29 February 2000 00:00:00 AM"),
            (951_868_800, "Wednesday 01 March 2000 00:00:00 AM"),
            (1_735_689_599, "Tuesday 31 December 2024 23:59:59 PM"),
            (4_107_542_400, "Monday 01 March 2100 00:00:00 AM"),
        ] {
            assert_eq!(strftime("%A %d %B %Y %H:%M:%S %p", seconds).unwrap(), date);
        }
        assert_eq!(strftime("%-d %b %y %I 100%%", 0).unwrap(), "1 Jan 70 12 100%");
        assert_eq!(strftime("%Q", 0), None);
        assert_eq!(strftime("%", 0), None);
    }
}
