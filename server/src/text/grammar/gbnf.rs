//! Grammars as llama.cpp writes them (GBNF; xgrammar's EBNF is close to it), in llguidance's Lark.
//!
//! GBNF has no tokens of its own: any rule may match any characters. Lark's terminals are read greedily, the longest
//! first. Both say the same where each terminal is one character. Longer ones make masks cheap, so they are formed
//! where nothing else could begin with the same character; `terminals` says where that is.

mod parse;
mod terminals;

use std::fmt::Write;

use terminals::Terminals;

/// Whether the first thing in a text is a rule of GBNF.
pub(super) fn is_gbnf(text: &str) -> bool {
    parse::begins_with_rule(text)
}

/// The grammar in Lark.
///
/// # Errors
/// What is wrong, with line and column.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let mut grammar = parse::grammar(text)?;
    terminals::gather(&mut grammar);
    let terminals = Terminals::of(&grammar);
    let mut lark = format!("start: r{}\n", grammar.root);
    let mut next = 0;
    for (index, rule) in grammar.rules.iter().enumerate() {
        write!(lark, "r{index}: ").expect("a text takes whatever is written");
        node(&rule.body, &terminals, &mut next, &mut lark);
        lark.push('\n');
    }
    Ok(lark)
}

/// Characters by their numbers, ascending, none beside another.
type Class = Vec<(u32, u32)>;

/// What a rule is made of.
#[derive(Debug, Clone, PartialEq)]
enum Node {
    /// One of these characters.
    Class(Class),
    /// One of these characters or more, inside of what may be repeated: as [`terminals::gather`] leaves them.
    Run(Class),
    /// These characters.
    Text(Vec<u32>),
    /// A rule, by its number.
    Rule(usize),
    /// One behind the other.
    All(Vec<Node>),
    /// One of them.
    Any(Vec<Node>),
    /// So many times, `None`: without end.
    Repeated(Box<Node>, u32, Option<u32>),
}

/// Writes a node. `next`: the number of the terminal that is met next, in the order in which `terminals` met them.
fn node(node: &Node, terminals: &Terminals, next: &mut usize, lark: &mut String) {
    let mut all = |nodes: &[Node], between: &str, lark: &mut String| {
        for (index, inner) in nodes.iter().enumerate() {
            lark.push_str(if index > 0 { between } else { "" });
            self::node(inner, terminals, next, lark);
        }
    };
    match node {
        Node::Class(class) => {
            *next += 1;
            write_class(class, "", lark);
        }
        Node::Run(class) => {
            let whole = terminals.is_whole(*next);
            *next += 1;
            write_class(class, if whole { "+" } else { "" }, lark);
        }
        Node::Text(text) => {
            let whole = terminals.is_whole(*next);
            *next += 1;
            if text.is_empty() {
                lark.push_str("\"\"");
            } else if whole {
                let text: String = text.iter().filter_map(|char| char::from_u32(*char)).collect();
                lark.push_str(&serde_json::Value::from(text).to_string());
            } else {
                lark.push('(');
                text.iter().for_each(|char| write_class(&[(*char, *char)], "", lark));
                lark.push(')');
            }
        }
        Node::Rule(index) => lark.push_str(&format!("r{index}")),
        Node::All(nodes) if nodes.is_empty() => lark.push_str("\"\""),
        Node::All(nodes) => {
            lark.push('(');
            all(nodes, " ", lark);
            lark.push(')');
        }
        Node::Any(nodes) => {
            lark.push('(');
            all(nodes, " | ", lark);
            lark.push(')');
        }
        Node::Repeated(inner, least, most) => {
            lark.push('(');
            self::node(inner, terminals, next, lark);
            lark.push(')');
            match (least, most) {
                (0, None) => lark.push('*'),
                (1, None) => lark.push('+'),
                (0, Some(1)) => lark.push('?'),
                (least, None) => lark.push_str(&format!("{{{least},}}")),
                (least, Some(most)) => lark.push_str(&format!("{{{least},{most}}}")),
            }
        }
    }
}

/// A terminal that is a regular expression, with a space behind it.
fn write_class(class: &[(u32, u32)], suffix: &str, lark: &mut String) {
    lark.push_str("/[");
    for (first, last) in class {
        lark.push_str(&format!("\\x{{{first:x}}}-\\x{{{last:x}}}"));
    }
    lark.push_str(&format!("]{suffix}/ "));
}

#[cfg(test)]
mod tests;
