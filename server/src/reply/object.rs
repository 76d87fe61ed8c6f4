//! Reads the JSON object of a tool call character by character: `{"name": .., "arguments": {..}}`.

/// What a character of a call's object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Some other part of the object, or of arguments that stand before the name.
    Other,
    /// Of the arguments, and the name is known.
    Argument,
    /// The end of the object.
    Done,
    /// Not what belongs there: this is no call.
    Broken,
}

/// Reads one object, from behind its opening brace.
#[derive(Debug)]
pub(super) struct CallObject {
    /// Keys that no call has are taken for a sign that this is none.
    strict: bool,
    at: At,
    name: Option<String>,
    /// Arguments that stand before the name.
    early: String,
    has_arguments: bool,
}

#[derive(Debug)]
enum At {
    /// Before a key, or the end.
    Key,
    /// In a key: its JSON text so far.
    InKey(String, Nested),
    /// Behind a key.
    Colon(Key),
    Value(Key),
    InName(String, Nested),
    InArguments(Nested),
    InOther(Nested),
    /// In a number or a word.
    InScalar,
    /// Behind a value.
    Next,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Name,
    Arguments,
    Other,
}

impl CallObject {
    /// `strict`: an object is no call if it has a key that no call has.
    pub(super) fn new(strict: bool) -> Self {
        Self { strict, at: At::Key, name: None, early: String::new(), has_arguments: false }
    }

    /// The tool's name, once it is known.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// The arguments of a call that has ended, where none was [`Step::Argument`]: an empty object if it has none.
    pub(super) fn whole_arguments(&self) -> &str {
        if self.early.is_empty() { "{}" } else { &self.early }
    }

    /// Takes the next character.
    pub(super) fn push(&mut self, c: char) -> Step {
        let blank = c.is_whitespace();
        match &mut self.at {
            At::Key | At::Colon(_) | At::Value(_) | At::Next if blank => Step::Other,
            At::Key => match c {
                '"' => self.go(At::InKey(c.into(), Nested::string())),
                '}' => Step::Done,
                _ => Step::Broken,
            },
            At::InKey(text, nested) => {
                text.push(c);
                if !nested.push(c) {
                    return Step::Other;
                }
                let key = match serde_json::from_str::<String>(text).as_deref() {
                    Ok("name") if self.name.is_none() => Key::Name,
                    // Llama's word is the second.
                    Ok("arguments" | "parameters") if !self.has_arguments => Key::Arguments,
                    Ok("id" | "type") => Key::Other,
                    Ok(_) if !self.strict => Key::Other,
                    _ => return Step::Broken,
                };
                self.go(At::Colon(key))
            }
            At::Colon(key) if c == ':' => {
                let key = *key;
                self.go(At::Value(key))
            }
            At::Colon(_) => Step::Broken,
            At::Value(key) => match (*key, c) {
                (Key::Name, '"') => self.go(At::InName(c.into(), Nested::string())),
                (Key::Arguments, '{') => {
                    self.has_arguments = true;
                    self.at = At::InArguments(Nested::brackets());
                    self.argument(c)
                }
                (Key::Other, '"') => self.go(At::InOther(Nested::string())),
                (Key::Other, '{' | '[') => self.go(At::InOther(Nested::brackets())),
                (Key::Other, '-' | '0'..='9' | 'a'..='z') => self.go(At::InScalar),
                _ => Step::Broken,
            },
            At::InName(text, nested) => {
                text.push(c);
                if !nested.push(c) {
                    return Step::Other;
                }
                match serde_json::from_str::<String>(text) {
                    Ok(name) if !name.is_empty() => self.name = Some(name),
                    _ => return Step::Broken,
                }
                self.go(At::Next)
            }
            At::InArguments(nested) => {
                if nested.push(c) {
                    self.at = At::Next;
                }
                self.argument(c)
            }
            At::InOther(nested) => {
                if nested.push(c) {
                    self.at = At::Next;
                }
                Step::Other
            }
            At::InScalar if c.is_ascii_alphanumeric() || matches!(c, '-' | '+' | '.') => Step::Other,
            At::InScalar | At::Next => match c {
                ',' => self.go(At::Key),
                '}' => Step::Done,
                _ if blank => self.go(At::Next),
                _ => Step::Broken,
            },
        }
    }

    fn go(&mut self, at: At) -> Step {
        self.at = at;
        Step::Other
    }

    fn argument(&mut self, c: char) -> Step {
        if self.name.is_some() {
            return Step::Argument;
        }
        self.early.push(c);
        Step::Other
    }
}

/// Finds the end of a JSON value that has an end of its own, without asking whether all in it is right.
#[derive(Debug)]
pub(super) struct Nested {
    /// Brackets that are open.
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl Nested {
    /// From behind the opening quote of a string.
    fn string() -> Self {
        Self { depth: 0, in_string: true, escaped: false }
    }

    /// From behind the opening bracket of an object or a list.
    pub(super) fn brackets() -> Self {
        Self { depth: 1, in_string: false, escaped: false }
    }

    /// Takes the next character: whether it is the value's last.
    pub(super) fn push(&mut self, c: char) -> bool {
        match c {
            _ if self.escaped => self.escaped = false,
            '\\' if self.in_string => self.escaped = true,
            '"' => self.in_string = !self.in_string,
            _ if self.in_string => {}
            '{' | '[' => self.depth += 1,
            '}' | ']' => self.depth -= 1,
            _ => {}
        }
        self.depth == 0 && !self.in_string
    }
}
