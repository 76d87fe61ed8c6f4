//! What a server is made of: replicas, and the workers of each.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Most replicas that a front end takes.
const MOST_REPLICAS: u32 = 64;

/// Replicas, each a group of workers that share the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layout {
    /// Reports from before there were replicas do not say.
    #[serde(default = "one")]
    pub replicas: u32,
    /// Workers of each.
    pub tp: u32,
}

fn one() -> u32 {
    1
}

impl Layout {
    /// One replica.
    pub fn group(tp: u32) -> Self {
        Self { replicas: 1, tp }
    }

    /// Workers of all replicas, each on a socket of its own.
    pub fn sockets(self) -> u32 {
        self.replicas * self.tp
    }

    /// As the option has it, and tables.
    pub fn in_short(self) -> String {
        format!("{}x{}", self.replicas, self.tp)
    }

    /// Begins the names of its files.
    pub fn stem(self) -> String {
        match self.replicas {
            1 => format!("tp{}", self.tp),
            replicas => format!("{replicas}xtp{}", self.tp),
        }
    }
}

impl Default for Layout {
    fn default() -> Self {
        Self::group(1)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.replicas {
            1 => write!(f, "TP {}", self.tp),
            replicas => write!(f, "{replicas} x TP {}", self.tp),
        }
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let of = |(replicas, tp): (&str, &str)| Some((replicas.parse().ok()?, size(tp)?));
        let parsed = text.trim().split_once('x').and_then(of);
        let layout = parsed.filter(|(replicas, _)| (1..=MOST_REPLICAS).contains(replicas));
        layout.map(|(replicas, tp)| Self { replicas, tp }).ok_or_else(|| {
            format!(
                "'{text}' is no layout: give replicas x workers of each, such as 4x2, with 1 to {MOST_REPLICAS} replicas of \
                 1, 2, 4, 8 or 16"
            )
        })
    }
}

/// The size of a group.
pub fn size(text: &str) -> Option<u32> {
    text.trim().parse().ok().filter(|size| matches!(size, 1 | 2 | 4 | 8 | 16))
}

/// Each of `layouts` once: the fewest sockets first, and of as many the fewest replicas.
pub fn ascending(layouts: impl IntoIterator<Item = Layout>) -> Vec<Layout> {
    let mut ascending: Vec<Layout> = layouts.into_iter().collect();
    ascending.sort_unstable_by_key(|layout| (layout.sockets(), layout.replicas));
    ascending.dedup();
    ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_replicas_times_workers_and_nothing_else() {
        let parsed = ["4x2", " 1x16 ", "64x1"].map(|text| text.parse::<Layout>().map(Layout::in_short));
        assert_eq!(parsed, ["4x2", "1x16", "64x1"].map(|text| Ok(text.to_owned())));
        for text in ["", "4", "x2", "4x", "0x1", "65x1", "4x3", "4x2x1", "-1x2"] {
            let refused = text.parse::<Layout>().expect_err(text);
            assert!(refused.starts_with(&format!("'{text}' is no layout: give")), "{refused}");
        }
        let all = ["4x1", "1x1", "1x4", "2x2", "1x1", "1x2"].map(|text| text.parse().expect("a layout"));
        let all: Vec<String> = ascending(all).into_iter().map(Layout::in_short).collect();
        assert_eq!(all, ["1x1", "1x2", "1x4", "2x2", "4x1"]);
    }
}
