//! What the load tester's pages have in common: the head, with the style of page and plots for light and dark.

use std::fmt;
use std::time::SystemTime;

use crate::json::utc_date;
use crate::plot::Escaped;

/// Style of the page and its plots, light and dark.
const STYLE: &str = include_str!("page.css");

/// Everything before the first heading of a page, which needs nothing but itself: no script, no font, no request. `style` is
/// what its style sheet has beside that of all pages.
pub fn head(f: &mut fmt::Formatter<'_>, title: &str, style: &str) -> fmt::Result {
    writeln!(f, "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>")?;
    writeln!(f, r#"<meta name="viewport" content="width=device-width, initial-scale=1"/>"#)?;
    writeln!(f, "<title>{}</title>\n<style>\n{STYLE}{style}</style>\n</head>\n<body>", Escaped(title))
}

/// The heading, and below it what was done to which server and when.
pub fn heading(f: &mut fmt::Formatter<'_>, title: &str, target: &str, date: SystemTime, what: &str) -> fmt::Result {
    let [title, target, what] = [title, target, what].map(Escaped);
    let (date, version) = (readable(&utc_date(date)), env!("CARGO_PKG_VERSION"));
    writeln!(f, "<h1>{title}</h1>")?;
    writeln!(f, r#"<p class="muted">{target} · {date} · looplane {version} · {what}</p>"#)
}

/// What a reader has to know to trust the figures, as a list where there is anything.
pub fn notes(f: &mut fmt::Formatter<'_>, notes: &[String]) -> fmt::Result {
    if notes.is_empty() {
        return Ok(());
    }
    writeln!(f, r#"<ul class="notes">"#)?;
    for note in notes {
        writeln!(f, "<li>{}</li>", Escaped(note))?;
    }
    writeln!(f, "</ul>")
}

/// `YYYYMMDD-HHMMSS` as people write it.
pub fn readable(date: &str) -> String {
    let (day, time) = (&date[..8], &date[9..]);
    format!("{}-{}-{} {}:{} UTC", &day[..4], &day[4..6], &day[6..], &time[..2], &time[2..4])
}
