//! What a body makes of its bytes besides what it is about: choices, and places to cut.

/// Takes choices from the front of an input, zeros once it is used up.
pub struct Pick<'a>(pub &'a [u8]);

impl<'a> Pick<'a> {
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn flag(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    /// One of them.
    pub fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::from(self.byte()) % all.len()]
    }

    /// What is left, if it is a text.
    pub fn text(self) -> Option<&'a str> {
        str::from_utf8(self.0).ok()
    }
}

/// The text in pieces, cut as the numbers in `seed` say, one after the other and again.
pub fn cut<'a>(text: &'a str, seed: &[u8]) -> Vec<&'a str> {
    let mut lens = seed.iter().map(|byte| usize::from(*byte % 7)).cycle();
    let (mut pieces, mut rest) = (Vec::new(), text);
    while !rest.is_empty() {
        let chars = lens.next().unwrap_or(1);
        let at = rest.char_indices().nth(chars).map_or(rest.len(), |(at, _)| at);
        let (piece, behind) = rest.split_at(at);
        pieces.push(piece);
        rest = behind;
        if seed.iter().all(|byte| byte % 7 == 0) && !rest.is_empty() {
            // Nothing but empty pieces would never end.
            pieces.push(rest);
            rest = "";
        }
    }
    pieces
}
