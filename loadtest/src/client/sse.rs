//! Server-sent events, read incrementally: bytes in as the network splits them, the data of whole events out.
//!
//! Follows the WHATWG HTML standard, section 9.2 (server-sent events), as far as a token stream needs it: lines end in
//! LF, CR or CRLF, comment lines and fields other than `data` are skipped, several `data` lines of one event are joined
//! by LF, and an event without its closing blank line is never delivered. Keep-alive comments are therefore no events,
//! and cannot be mistaken for tokens.

/// Most bytes that one event (or one line of any kind) may hold before the stream is refused.
pub const MAX_EVENT_BYTES: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("one server-sent event is longer than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLong;

/// Parser of one response body. Feed it with [`SseParser::push`].
#[derive(Debug, Default)]
pub struct SseParser {
    /// The line being read, without its end.
    line: Vec<u8>,
    /// `data` of the event being read, every line closed by LF.
    data: Vec<u8>,
    /// The last byte seen was a CR: an LF that follows belongs to the same line end.
    after_cr: bool,
    /// A first line has been read, so that a byte order mark is no longer expected.
    past_first_line: bool,
}

impl SseParser {
    /// Takes the next `bytes` of the body and appends the data of each event that they complete to `events`.
    ///
    /// # Errors
    /// [`EventTooLong`]; events completed before it are in `events`, and the parser must not be fed again.
    pub fn push(&mut self, mut bytes: &[u8], events: &mut Vec<Vec<u8>>) -> Result<(), EventTooLong> {
        while !bytes.is_empty() {
            if std::mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let Some(end) = bytes.iter().position(|&byte| byte == b'\n' || byte == b'\r') else {
                return self.extend_line(bytes);
            };
            self.extend_line(&bytes[..end])?;
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            self.end_line(events);
        }
        Ok(())
    }

    /// Whether bytes of an event that was not closed by a blank line are held: the body was cut if it ends now.
    pub fn is_mid_event(&self) -> bool {
        !self.line.is_empty() || !self.data.is_empty()
    }

    fn extend_line(&mut self, part: &[u8]) -> Result<(), EventTooLong> {
        if self.line.len() + self.data.len() + part.len() > MAX_EVENT_BYTES {
            return Err(EventTooLong);
        }
        self.line.extend_from_slice(part);
        Ok(())
    }

    fn end_line(&mut self, events: &mut Vec<Vec<u8>>) {
        let mut line = self.line.as_slice();
        if !std::mem::replace(&mut self.past_first_line, true) {
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        if line.is_empty() {
            // The LF after the last data line closes that line and is not data.
            if self.data.pop().is_some() {
                events.push(std::mem::take(&mut self.data));
            }
        } else if line == b"data" {
            self.data.push(b'\n');
        } else if let Some(value) = line.strip_prefix(b"data:") {
            self.data.extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.data.push(b'\n');
        }
        self.line.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(pieces: &[&[u8]]) -> Vec<String> {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        for piece in pieces {
            parser.push(piece, &mut events).expect("test events are short");
        }
        events.into_iter().map(|event| String::from_utf8(event).expect("test events are UTF-8")).collect()
    }

    #[test]
    fn lines_end_in_every_way_and_only_data_is_read() {
        let other_fields = b"\xef\xbb\xbfdata: a\n\n: ping\n\nevent: e\nid: 7\nretry: 1\ndata: b\n\ndatum: x\n\n";
        let split_line_ends: [&[u8]; 4] = [b"data: a\r", b"\ndata: b\r", b"\n\r", b"\ndata: c\n\n"];
        assert_eq!(parse(&[b"data: a\n\ndata: b\r\n\r\ndata: c\r\r"]), ["a", "b", "c"]);
        assert_eq!(parse(&split_line_ends), ["a\nb", "c"]);
        assert_eq!(parse(&[other_fields]), ["a", "b"]);
        assert_eq!(parse(&[b"data:  a\ndata\ndata:b\n\n"]), [" a\n\nb"], "lines are joined, one space is taken off");
    }

    #[test]
    fn an_unclosed_event_is_not_delivered_and_is_noticed() {
        let mut parser = SseParser::default();
        let mut events = Vec::new();
        parser.push(b"data: whole\n\ndata: cut", &mut events).expect("short");
        assert_eq!(events, [b"whole".to_vec()]);
        assert!(parser.is_mid_event());
        parser.push(b"\n\n", &mut events).expect("short");
        assert!(!parser.is_mid_event());
    }

    #[test]
    fn endless_lines_and_endless_events_are_refused() {
        let mut events = Vec::new();
        let mut parser = SseParser::default();
        let line = vec![b'x'; MAX_EVENT_BYTES + 1];
        assert_eq!(parser.push(&line, &mut events), Err(EventTooLong));

        let mut parser = SseParser::default();
        let data_line = [b"data: ".as_slice(), &[b'x'; 1000], b"\n"].concat();
        let refused = (0..2000).find_map(|_| parser.push(&data_line, &mut events).err());
        assert_eq!(refused, Some(EventTooLong));
        assert!(events.is_empty());
    }

    proptest! {
        /// However events are framed and wherever the network cuts the body, the same data comes out.
        #[test]
        fn any_split_of_any_framing_gives_the_same_events(
            events in prop::collection::vec((prop::collection::vec("[^\r\n]{0,12}", 1..4), 0..3usize, any::<bool>()), 0..12),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..24),
        ) {
            let mut body = Vec::new();
            let mut expected = Vec::new();
            for (lines, line_end, commented) in &events {
                let line_end = ["\n", "\r\n", "\r"][*line_end];
                if *commented {
                    body.extend_from_slice(format!(": keep-alive{line_end}event: x{line_end}").as_bytes());
                }
                for line in lines {
                    body.extend_from_slice(format!("data: {line}{line_end}").as_bytes());
                }
                body.extend_from_slice(line_end.as_bytes());
                expected.push(lines.join("\n"));
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
            cuts.extend([0, body.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &body[pair[0]..pair[1]]).collect();
            prop_assert_eq!(parse(&pieces), expected);
        }
    }
}
