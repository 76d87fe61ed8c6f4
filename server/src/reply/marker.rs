//! Looks for a marker in characters that come one by one.

/// Looks for one text. Whitespace in front of it belongs to it, and is held like its beginning until it is known what
/// follows.
#[derive(Debug)]
pub(super) struct Marker {
    text: &'static str,
    /// Whitespace is dropped until anything else comes.
    skips_blank: bool,
    blank: String,
    /// Bytes of `text` that have come.
    matched: usize,
}

impl Marker {
    /// The first character of `text` must stand in it once, so that a match that fails can only begin anew with the
    /// character that it fails at.
    pub(super) fn new(text: &'static str) -> Self {
        debug_assert!(text.chars().next().is_some_and(|first| text.matches(first).count() == 1));
        Self { text, skips_blank: false, blank: String::new(), matched: 0 }
    }

    /// The same behind something that whitespace only sets apart.
    pub(super) fn behind(text: &'static str) -> Self {
        Self { skips_blank: true, ..Self::new(text) }
    }

    /// Takes a character. Text that is no part of the marker is appended to `passed`. The marker, once it is complete,
    /// with the whitespace in front of it.
    pub(super) fn push(&mut self, c: char, passed: &mut String) -> Option<String> {
        if self.text[self.matched..].starts_with(c) {
            self.matched += c.len_utf8();
            return (self.matched == self.text.len()).then(|| self.release());
        }
        if self.matched > 0 || !c.is_whitespace() {
            passed.push_str(&self.release());
        }
        if self.text.starts_with(c) {
            self.matched = c.len_utf8();
        } else if !c.is_whitespace() {
            self.skips_blank = false;
            passed.push(c);
        } else if !self.skips_blank {
            self.blank.push(c);
        }
        None
    }

    /// What is held, which is not looked at any more.
    pub(super) fn release(&mut self) -> String {
        let mut held = std::mem::take(&mut self.blank);
        held.push_str(&self.text[..std::mem::take(&mut self.matched)]);
        self.skips_blank &= held.is_empty();
        held
    }
}
