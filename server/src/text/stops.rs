//! Stop texts in a stream: what may be shown, what must wait, and where the output ends.

/// What a push made known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// Text that is part of the output whatever comes next.
    pub text: String,
    /// A stop text is complete: `text` is the rest of the output.
    pub stopped: bool,
}

/// What ends an output by its text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stops {
    /// Any of them, none of them empty.
    pub texts: Vec<String>,
    /// It is part of the output.
    pub shown: bool,
    /// They are not looked for in the text of so many tokens.
    pub min_tokens: u32,
}

/// Looks for stop texts in text that arrives in pieces; the result does not depend on where the pieces are cut.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    shown: bool,
    /// Text that may be the start of a stop: shorter than the longest stop between calls.
    held: String,
    /// Index of the one that was found.
    found: Option<usize>,
}

impl StopMatcher {
    /// For these stop texts, none of them empty. `shown`: the one that is found is part of the output.
    pub fn new(stops: Vec<String>, shown: bool) -> Self {
        debug_assert!(stops.iter().all(|stop| !stop.is_empty()));
        Self { stops, shown, held: String::new(), found: None }
    }

    /// Takes a piece in which nothing is looked for.
    pub fn pass(&mut self, piece: &str) -> Match {
        let text = std::mem::take(&mut self.held) + piece;
        Match { text, stopped: false }
    }

    /// Takes the next piece. The stop that is complete first ends the output; of several that end together, the
    /// longest.
    pub fn push(&mut self, piece: &str) -> Match {
        self.held.push_str(piece);
        let indexed = self.stops.iter().enumerate();
        let found = indexed.filter_map(|(index, stop)| self.held.find(stop).map(|at| (at + stop.len(), at, index)));
        if let Some((end, start, index)) = found.min() {
            self.found = Some(index);
            let mut text = std::mem::take(&mut self.held);
            text.truncate(if self.shown { end } else { start });
            return Match { text, stopped: true };
        }
        let safe = self.held.len() - self.possible_start();
        let rest = self.held.split_off(safe);
        Match { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }

    /// The stop text that ended the output.
    pub fn found(&self) -> Option<&str> {
        self.found.map(|index| self.stops[index].as_str())
    }

    /// The text still held, at the end of the stream.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length in bytes of the longest end of `held` that some stop starts with.
    fn possible_start(&self) -> usize {
        let held = self.held.as_bytes();
        let longest = |stop: &String| {
            let stop = stop.as_bytes();
            (1..stop.len().min(held.len() + 1)).rev().find(|len| held.ends_with(&stop[..*len]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect(), false);
        let mut shown = String::new();
        for piece in pieces {
            let found = matcher.push(piece);
            shown.push_str(&found.text);
            if found.stopped {
                return (shown, true);
            }
        }
        shown.push_str(&matcher.finish());
        (shown, false)
    }

    #[test]
    fn a_stop_that_is_shown_is_the_end_of_the_output() {
        let mut matcher = StopMatcher::new(vec!["END".into(), "ND!".into()], true);
        assert_eq!(matcher.push("one E").text, "one ");
        assert_eq!(matcher.push("ND! two"), Match { text: "END".into(), stopped: true });
        assert_eq!(matcher.found(), Some("END"));
        let mut matcher = StopMatcher::new(vec!["END".into()], false);
        assert_eq!(matcher.pass("END E"), Match { text: "END E".into(), stopped: false });
        assert_eq!(matcher.push("ND"), Match { text: "ND".into(), stopped: false }, "half of it was passed");
    }

    #[test]
    fn a_stop_across_pieces_is_found_and_never_shown() {
        assert_eq!(run(&["END"], &["on", "e E", "N", "D two"]), ("one ".into(), true));
        assert_eq!(run(&["END"], &["E", "NE", "ND"]), ("EN".into(), true));
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]), ("a".into(), true));
        assert_eq!(run(&["日本"], &["は日", "本"]), ("は".into(), true));
    }

    #[test]
    fn text_that_only_starts_like_a_stop_is_shown_in_the_end() {
        assert_eq!(run(&["END"], &["the EN"]), ("the EN".into(), false));
        assert_eq!(run(&[], &["any", "thing"]), ("anything".into(), false));
    }

    #[test]
    fn only_what_may_be_a_stop_is_held() {
        let mut matcher = StopMatcher::new(vec!["\n\n".into()], false);
        assert_eq!(matcher.push("line\n"), Match { text: "line".into(), stopped: false });
        assert_eq!(matcher.push("next"), Match { text: "\nnext".into(), stopped: false });
    }

    #[test]
    fn the_stop_that_is_complete_first_wins() {
        assert_eq!(run(&["bcd", "c"], &["abcd"]), ("ab".into(), true));
        assert_eq!(run(&["c", "bc"], &["abc"]), ("a".into(), true));
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(
            text in "[ab]{0,24}",
            stops in prop::collection::vec("[ab]{1,4}", 0..4),
            cuts in prop::collection::vec(0usize..25, 0..8),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let letters: Vec<&str> = (0..text.len()).map(|at| &text[at..at + 1]).collect();
            prop_assert_eq!(run(&stops, &pieces), run(&stops, &letters));
        }
    }
}
