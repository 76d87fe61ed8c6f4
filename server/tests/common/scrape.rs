//! Reads what `/metrics` says, and refuses what Prometheus would.
#![allow(dead_code, reason = "every test binary uses its own part of this module")]

/// Of every name one.
const PREFIXES: [&str; 2] = ["looplane_", "vllm:"];

/// One answer of `/metrics`: series, without the prefix of their names, and values.
pub struct Scrape {
    lines: Vec<(String, f64)>,
}

impl Scrape {
    /// Panics where a line has no value, a histogram's buckets fall, or the end mark is missing.
    pub fn parse(text: &str) -> Self {
        assert!(text.ends_with("\n# EOF\n"), "no end: {text}");
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let lines: Vec<(String, f64)> = samples
            .map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no value: {line}"));
                let (name, labels) = series.split_once('{').unwrap_or_else(|| panic!("no labels: {line}"));
                let bare = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
                let bare = bare.unwrap_or_else(|| panic!("nobody's name: {line}"));
                assert!(bare.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{line}");
                assert!(labels.starts_with("model_name=\"") && labels.ends_with("\"}"), "{line}");
                (format!("{bare}{{{labels}"), value.parse().unwrap_or_else(|_| panic!("no number: {line}")))
            })
            .collect();
        let scrape = Self { lines };
        for (series, count) in scrape.lines.iter().filter(|(series, _)| series.contains("_count{")) {
            let (name, labels) = series.trim_end_matches('}').split_once("_count{").expect("that is what it has");
            let is_of = |bucket: &str| {
                bucket.strip_prefix(name).is_some_and(|rest| rest.starts_with("_bucket{"))
                    && labels.split(',').all(|label| bucket.contains(label))
            };
            let of = scrape.lines.iter().filter(|(series, _)| is_of(series));
            let buckets: Vec<f64> = of.map(|(_, value)| *value).collect();
            assert!(buckets.is_sorted() && buckets.last() == Some(count), "{series}: {buckets:?}");
        }
        scrape
    }

    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = f64> {
        let named = move |series: &str| series.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'));
        self.lines.iter().filter(move |(series, _)| named(series)).map(|(_, value)| *value)
    }

    /// The only series of that name that has all these labels; panics if there is none, or more.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let has = |series: &str| labels.iter().all(|(key, value)| series.contains(&format!("{key}=\"{value}\"")));
        let name = format!("{name}{{");
        let mut found = self.lines.iter().filter(|(series, _)| series.starts_with(&name) && has(series));
        let (_, value) = found.next().unwrap_or_else(|| panic!("no {name} {labels:?}"));
        assert!(found.next().is_none(), "several {name} {labels:?}");
        *value
    }

    /// Whether there is any series of that name.
    pub fn has(&self, name: &str) -> bool {
        self.of(name).next().is_some()
    }
}
