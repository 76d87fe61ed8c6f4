//! Reads GBNF.

use std::collections::HashMap;

use super::{Class, Node};

/// Times that something is repeated, where they are counted.
const MAX_COUNT: u32 = 2000;
/// Rules, parts of rules, and characters of texts, in all.
const MAX_PARTS: usize = 50_000;
/// Groups inside of each other.
const MAX_DEPTH: usize = 64;
const LAST: u32 = 0x10_ffff;
/// Numbers between these are no characters.
const SURROGATES: (u32, u32) = (0xd800, 0xdfff);

pub(super) struct Grammar {
    pub(super) rules: Vec<Rule>,
    /// The number of the rule `root`.
    pub(super) root: usize,
}

pub(super) struct Rule {
    pub(super) body: Node,
}

pub(super) fn begins_with_rule(text: &str) -> bool {
    let mut reader = Reader::new(text);
    reader.space();
    reader.at_rule()
}

/// # Errors
/// What is wrong, with line and column.
pub(super) fn grammar(text: &str) -> Result<Grammar, String> {
    let mut reader = Reader::new(text);
    let mut bodies: Vec<Option<Node>> = Vec::new();
    reader.space();
    while reader.peek().is_some() {
        let at = reader.at;
        let name = reader.name().ok_or_else(|| reader.wrong("a rule is expected: name ::= ..."))?;
        reader.space();
        if !reader.takes("::=") {
            return Err(reader.wrong(&format!("::= is expected behind {name}")));
        }
        let number = reader.number(&name, at);
        bodies.resize(bodies.len().max(reader.names.len()), None);
        let body = reader.alternatives(0)?;
        bodies.resize(bodies.len().max(reader.names.len()), None);
        if bodies[number].replace(body).is_some() {
            return Err(reader.wrong_at(at, &format!("the rule {name} is defined twice")));
        }
        reader.space();
    }
    let missing = reader.names.iter().find(|(_, (number, _))| bodies[*number].is_none());
    if let Some((name, (_, at))) = missing {
        return Err(reader.wrong_at(*at, &format!("no rule {name} is defined")));
    }
    let Some((root, _)) = reader.names.get("root").copied() else {
        return Err("no rule root is defined, with which a grammar begins".into());
    };
    let rules = bodies.into_iter().flatten().map(|body| Rule { body }).collect();
    Ok(Grammar { rules, root })
}

struct Reader {
    chars: Vec<char>,
    at: usize,
    /// Rules by name: their numbers, and where they are first named.
    names: HashMap<String, (usize, usize)>,
    parts: usize,
}

fn is_of_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || char == '-' || char == '_'
}

impl Reader {
    fn new(text: &str) -> Self {
        Self { chars: text.chars().collect(), at: 0, names: HashMap::new(), parts: 0 }
    }

    fn peek(&self) -> Option<char> {
        self.chars.get(self.at).copied()
    }

    fn takes(&mut self, text: &str) -> bool {
        let found = text.chars().enumerate().all(|(index, char)| self.chars.get(self.at + index) == Some(&char));
        if found {
            self.at += text.chars().count();
        }
        found
    }

    fn count_parts(&mut self, parts: usize) -> Result<(), String> {
        self.parts += parts;
        match self.parts <= MAX_PARTS {
            true => Ok(()),
            false => Err(self.wrong(&format!("the grammar has more than {MAX_PARTS} parts up to here"))),
        }
    }

    fn wrong(&self, what: &str) -> String {
        self.wrong_at(self.at, what)
    }

    fn wrong_at(&self, at: usize, what: &str) -> String {
        let before = &self.chars[..at.min(self.chars.len())];
        let line = before.iter().filter(|char| **char == '\n').count() + 1;
        let column = before.iter().rev().take_while(|char| **char != '\n').count() + 1;
        format!("line {line}, column {column}: {what}")
    }

    /// White space and comments.
    fn space(&mut self) {
        while let Some(char) = self.peek() {
            if char == '#' {
                while self.peek().is_some_and(|char| char != '\n') {
                    self.at += 1;
                }
            } else if char.is_ascii_whitespace() {
                self.at += 1;
            } else {
                return;
            }
        }
    }

    fn name(&mut self) -> Option<String> {
        let name: String = self.chars[self.at..].iter().copied().take_while(|char| is_of_name(*char)).collect();
        self.at += name.len();
        (!name.is_empty()).then_some(name)
    }

    /// A name with `::=` behind it is next.
    fn at_rule(&mut self) -> bool {
        let at = self.at;
        let found = self.name().is_some() && {
            self.space();
            self.takes("::=")
        };
        self.at = at;
        found
    }

    fn number(&mut self, name: &str, at: usize) -> usize {
        let next = self.names.len();
        self.names.entry(name.to_owned()).or_insert((next, at)).0
    }

    fn alternatives(&mut self, depth: usize) -> Result<Node, String> {
        if depth > MAX_DEPTH {
            return Err(self.wrong(&format!("more than {MAX_DEPTH} groups are inside of each other")));
        }
        self.count_parts(1)?;
        let mut any = vec![self.sequence(depth)?];
        while self.takes("|") {
            self.count_parts(1)?;
            any.push(self.sequence(depth)?);
        }
        Ok(if any.len() == 1 { any.remove(0) } else { Node::Any(any) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Node, String> {
        let mut all = Vec::new();
        loop {
            self.space();
            let Some(char) = self.peek() else { break };
            self.count_parts(1)?;
            let node = match char {
                '|' | ')' => {
                    if char == ')' && depth == 0 {
                        return Err(self.wrong(") closes no group"));
                    }
                    break;
                }
                '"' => self.text()?,
                '[' => self.class()?,
                '.' => {
                    self.at += 1;
                    Node::Class(inverted(&[]))
                }
                '(' => {
                    let at = self.at;
                    self.at += 1;
                    let group = self.alternatives(depth + 1)?;
                    if !self.takes(")") {
                        return Err(self.wrong_at(at, "this group is not closed: ) is missing"));
                    }
                    group
                }
                char if is_of_name(char) => {
                    if self.at_rule() {
                        break;
                    }
                    let at = self.at;
                    let name = self.name().expect("it begins with a character of names");
                    Node::Rule(self.number(&name, at))
                }
                '*' | '+' | '?' | '{' => return Err(self.wrong(&format!("{char} has nothing in front to repeat"))),
                '<' | '!' => return Err(self.wrong("tokens by name or number (<...>) are not supported")),
                other => return Err(self.wrong(&format!("{other:?} begins nothing that a rule may have"))),
            };
            all.push(self.repeated(node)?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Node::All(all) })
    }

    /// The node with the count behind it, if there is one.
    fn repeated(&mut self, node: Node) -> Result<Node, String> {
        let Some((least, most)) = self.counts()? else { return Ok(node) };
        let behind = self.at;
        if self.counts()?.is_some() {
            return Err(self.wrong_at(behind, "a count of a count is not supported; put ( ) around the first"));
        }
        Ok(match most {
            Some(0) => Node::All(Vec::new()),
            most => Node::Repeated(Box::new(node), least, most),
        })
    }

    /// How often something is repeated, if that is next: on the line of what it is of.
    fn counts(&mut self) -> Result<Option<(u32, Option<u32>)>, String> {
        let before = self.at;
        while self.peek().is_some_and(|char| char == ' ' || char == '\t') {
            self.at += 1;
        }
        let counts = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => {
                self.at += 1;
                let least = self.count()?;
                let most = match self.peek() {
                    Some(',') => {
                        self.at += 1;
                        self.blank();
                        if self.peek() == Some('}') { None } else { Some(self.count()?) }
                    }
                    _ => Some(least),
                };
                if self.peek() != Some('}') {
                    return Err(self.wrong("} is expected behind the count"));
                }
                if most.is_some_and(|most| most < least) {
                    return Err(self.wrong("the most is less than the least"));
                }
                (least, most)
            }
            _ => {
                self.at = before;
                return Ok(None);
            }
        };
        self.at += 1;
        Ok(Some(counts))
    }

    fn blank(&mut self) {
        while self.peek() == Some(' ') {
            self.at += 1;
        }
    }

    fn count(&mut self) -> Result<u32, String> {
        self.blank();
        let at = self.at;
        let digits: String = self.chars[at..].iter().take_while(|char| char.is_ascii_digit()).collect();
        self.at += digits.len();
        let count = digits.parse().ok().filter(|count| *count <= MAX_COUNT);
        self.blank();
        count.ok_or_else(|| self.wrong_at(at, &format!("a count of 0 to {MAX_COUNT} is expected")))
    }

    fn text(&mut self) -> Result<Node, String> {
        let opened = self.at;
        self.at += 1;
        let mut text = Vec::new();
        loop {
            match self.peek() {
                Some('"') => break,
                None | Some('\n') => return Err(self.wrong_at(opened, "this text is not closed: \" is missing")),
                Some(_) => text.push(self.char()?),
            }
        }
        self.count_parts(text.len())?;
        self.at += 1;
        Ok(match text[..] {
            [char] => Node::Class(vec![(char, char)]),
            _ => Node::Text(text),
        })
    }

    fn class(&mut self) -> Result<Node, String> {
        let opened = self.at;
        self.at += 1;
        let negated = self.takes("^");
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => break,
                None | Some('\n') => return Err(self.wrong_at(opened, "this class is not closed: ] is missing")),
                Some(_) => {}
            }
            let at = self.at;
            let first = self.char()?;
            let ranged = self.peek() == Some('-') && self.chars.get(self.at + 1).is_some_and(|next| *next != ']');
            let last = match ranged {
                true => {
                    self.at += 1;
                    self.char()?
                }
                false => first,
            };
            if last < first {
                return Err(self.wrong_at(at, "the range ends before it begins"));
            }
            ranges.push((first, last));
            self.count_parts(1)?;
        }
        self.at += 1;
        let class = if negated { inverted(&ranges) } else { inverted(&inverted(&ranges)) };
        match class.is_empty() {
            true => Err(self.wrong_at(opened, "no character is in this class")),
            false => Ok(Node::Class(class)),
        }
    }

    /// A character of a text or a class, escaped or not.
    fn char(&mut self) -> Result<u32, String> {
        let at = self.at;
        let char = self.peek().ok_or_else(|| self.wrong("a character is missing"))?;
        self.at += 1;
        if char != '\\' {
            return Ok(char.into());
        }
        let kind = self.peek().ok_or_else(|| self.wrong("the escape has no end"))?;
        self.at += 1;
        let digits = match kind {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            't' => return Ok('\t'.into()),
            'r' => return Ok('\r'.into()),
            'n' => return Ok('\n'.into()),
            '\\' | '"' | '[' | ']' | '-' | '^' | '\'' | '/' => return Ok(kind.into()),
            other => return Err(self.wrong_at(at, &format!("\\{other} is no escape"))),
        };
        let hex: String = self.chars[self.at..].iter().take(digits).collect();
        let number = u32::from_str_radix(&hex, 16).ok().filter(|_| hex.len() == digits && !hex.starts_with('+'));
        let number = number.filter(|number| char::from_u32(*number).is_some());
        self.at += digits;
        number.ok_or_else(|| {
            self.wrong_at(at, &format!("\\{kind} is to have {digits} hexadecimal digits of a character"))
        })
    }
}

/// All other characters.
fn inverted(ranges: &[(u32, u32)]) -> Class {
    let mut taken: Vec<(u32, u32)> = ranges.to_vec();
    taken.push(SURROGATES);
    taken.sort_unstable();
    let (mut left, mut next) = (Class::new(), 0);
    for (first, last) in taken {
        if first > next {
            left.push((next, first - 1));
        }
        next = next.max(last + 1);
    }
    if next <= LAST {
        left.push((next, LAST));
    }
    left
}
