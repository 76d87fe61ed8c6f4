//! Finds the tool calls in a reply, in the way that the model's template has it write them.

use super::{
    Part, Parts, ToolFormat,
    marker::Marker,
    object::{CallObject, Nested, Step},
};

const HERMES_CLOSE: &str = "</tool_call>";
/// Between the name and the arguments of Mistral's newer calls.
const MISTRAL_ARGUMENTS: &str = "[ARGS]";
/// An id may stand before that.
const MISTRAL_ID: &str = "[CALL_ID]";

/// Reads a reply that may hold calls.
#[derive(Debug)]
pub(super) struct Calls {
    format: ToolFormat,
    /// Tools of the request.
    names: Vec<String>,
    /// Nothing is read behind the first call.
    one_call: bool,
    at: At,
    /// Text that is part of a call if the call turns out to be one.
    held: String,
    /// The call stands behind the format's marker; else nothing but its tool's name tells it from other JSON.
    marked: bool,
    /// In Mistral's list of calls.
    in_list: bool,
    /// The call under way has been told of.
    open: bool,
    /// Calls that have been told of.
    count: u32,
}

#[derive(Debug)]
enum At {
    /// In text.
    Text(Marker),
    /// Behind the marker.
    Marked,
    /// In a call's object.
    Object(CallObject),
    /// In the name of Mistral's newer calls: all that stands between marker and arguments.
    Name(String),
    /// In the arguments behind it.
    Arguments(Nested),
    /// Behind the object of Hermes' calls.
    Closing(Marker),
    /// Where a call may begin without a marker: behind another, or at the start of a reply.
    Between,
    /// Behind the only call that is wanted.
    Over,
}

impl Calls {
    pub(super) fn new(format: ToolFormat, names: Vec<String>, one_call: bool) -> Self {
        let at = match format {
            // Small models of Hermes' kind leave the tags out, as Llama does: they call a tool all the same.
            ToolFormat::Hermes | ToolFormat::Llama3Json => At::Between,
            ToolFormat::Mistral => At::Text(Marker::new(format.marker())),
        };
        let (held, marked, in_list, open, count) = (String::new(), false, false, false, 0);
        Self { format, names, one_call, at, held, marked, in_list, open, count }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.at, At::Over)
    }

    pub(super) fn push(&mut self, c: char, parts: &mut Parts) {
        match &mut self.at {
            At::Text(marker) => {
                let mut passed = String::new();
                let found = marker.push(c, &mut passed);
                parts.content(&passed);
                if let Some(marker) = found {
                    self.held = marker;
                    (self.marked, self.in_list, self.at) = (true, false, At::Marked);
                }
            }
            At::Marked => match c {
                '{' => self.object(c),
                '[' if self.format == ToolFormat::Mistral && !self.in_list => {
                    self.in_list = true;
                    self.held.push(c);
                }
                _ if c.is_whitespace() => self.held.push(c),
                _ if self.format == ToolFormat::Mistral && !self.in_list && in_name(c) => {
                    self.held.push(c);
                    self.at = At::Name(c.into());
                }
                _ => self.no_call(c, parts),
            },
            At::Object(object) => match object.push(c) {
                Step::Argument => {
                    if !self.open {
                        let name = object.name().expect("arguments are told of once it is known").to_owned();
                        self.begin(name, parts);
                    }
                    parts.arguments(self.count - 1, c.encode_utf8(&mut [0; 4]));
                    self.held.clear();
                }
                Step::Other
                    if !self.marked && object.name().is_some_and(|name| !self.names.iter().any(|n| n == name)) =>
                {
                    self.no_call(c, parts);
                }
                Step::Other => self.held.push(c),
                Step::Done if self.open => self.end(parts),
                Step::Done => match object.name().map(str::to_owned) {
                    Some(name) => {
                        let arguments = object.whole_arguments().to_owned();
                        self.begin(name, parts);
                        parts.arguments(self.count - 1, &arguments);
                        self.end(parts);
                    }
                    None => self.no_call(c, parts),
                },
                // Its arguments are out, so a call it is, whatever follows them.
                Step::Broken if self.open => {
                    let tail = std::mem::take(&mut self.held);
                    self.end(parts);
                    if !self.is_over() {
                        parts.content(tail.trim_start());
                        self.push(c, parts);
                    }
                }
                Step::Broken => self.no_call(c, parts),
            },
            At::Name(head) => match c {
                '{' => match name_of(head) {
                    Some(name) => {
                        let name = name.to_owned();
                        self.begin(name, parts);
                        parts.arguments(self.count - 1, "{");
                        self.at = At::Arguments(Nested::brackets());
                    }
                    None => self.no_call(c, parts),
                },
                _ if in_name(c) || c == '[' || c == ']' => {
                    head.push(c);
                    self.held.push(c);
                }
                _ => self.no_call(c, parts),
            },
            At::Arguments(nested) => {
                let ended = nested.push(c);
                parts.arguments(self.count - 1, c.encode_utf8(&mut [0; 4]));
                if ended {
                    self.end(parts);
                }
            }
            At::Closing(close) => {
                let mut passed = String::new();
                let closed = close.push(c, &mut passed).is_some();
                if closed || !passed.is_empty() {
                    // A model may leave it out: this may be the next marker.
                    passed.push_str(&close.release());
                    self.text();
                    passed.chars().for_each(|c| self.push(c, parts));
                }
            }
            At::Between => match c {
                '{' => self.object(c),
                ']' if self.in_list => {
                    self.held.clear();
                    self.text();
                }
                _ if c.is_whitespace() || self.count > 0 && c == self.separator() => self.held.push(c),
                _ => {
                    let held = std::mem::take(&mut self.held);
                    self.text();
                    held.chars().chain([c]).for_each(|c| self.push(c, parts));
                }
            },
            At::Over => {}
        }
    }

    /// The end of the reply.
    pub(super) fn finish(&mut self, parts: &mut Parts) {
        match &mut self.at {
            At::Text(marker) | At::Closing(marker) => self.held.push_str(&marker.release()),
            At::Between if self.count > 0 => self.held.clear(),
            _ => {}
        }
        if self.open {
            let tail = std::mem::take(&mut self.held);
            self.end(parts);
            self.held = tail;
        }
        // Behind a call whitespace only sets it apart.
        let held = std::mem::take(&mut self.held);
        parts.content(if self.count > 0 { held.trim() } else { &held });
    }

    /// A call's object begins with this brace.
    fn object(&mut self, brace: char) {
        self.held.push(brace);
        self.at = At::Object(CallObject::new(!self.marked));
    }

    /// What was held for a call is content, and the text goes on with `c`.
    fn no_call(&mut self, c: char, parts: &mut Parts) {
        parts.content(&std::mem::take(&mut self.held));
        self.at = At::Text(Marker::new(self.format.marker()));
        self.push(c, parts);
    }

    fn begin(&mut self, name: String, parts: &mut Parts) {
        parts.0.push(Part::Call { index: self.count, name });
        (self.open, self.count) = (true, self.count + 1);
        self.held.clear();
    }

    fn end(&mut self, parts: &mut Parts) {
        parts.0.push(Part::CallEnd { index: self.count - 1 });
        self.open = false;
        self.held.clear();
        match self.format {
            _ if self.one_call => self.at = At::Over,
            ToolFormat::Hermes if self.marked => self.at = At::Closing(Marker::behind(HERMES_CLOSE)),
            ToolFormat::Mistral if !self.in_list => self.text(),
            _ => self.at = At::Between,
        }
    }

    /// Goes on with text, behind a call or at the start of the reply.
    fn text(&mut self) {
        let marker = self.format.marker();
        self.at = At::Text(if self.count > 0 { Marker::behind(marker) } else { Marker::new(marker) });
    }

    /// What stands between two calls behind one marker.
    fn separator(&self) -> char {
        if self.in_list { ',' } else { ';' }
    }
}

/// Characters of a tool's name in Mistral's newer calls.
fn in_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.')
}

/// The name in what stands between Mistral's marker and the arguments: the name alone, or with tags behind it.
fn name_of(head: &str) -> Option<&str> {
    let (name, tags) = head.split_at(head.find('[').unwrap_or(head.len()));
    let id_and_end = tags.strip_prefix(MISTRAL_ID).and_then(|rest| rest.strip_suffix(MISTRAL_ARGUMENTS));
    let known = tags.is_empty() || tags == MISTRAL_ARGUMENTS || id_and_end.is_some_and(|id| id.chars().all(in_name));
    (known && !name.is_empty()).then_some(name)
}
