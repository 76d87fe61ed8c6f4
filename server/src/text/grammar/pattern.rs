//! Regular expressions of JSON schema, which are those of ECMA-262, in the syntax of Rust's `regex`: what they say
//! otherwise, and what llguidance would follow wrongly.

/// What `.` does not match.
const LINE_ENDS: &str = "\\n\\r\\x{2028}\\x{2029}";

/// White space that all know as such.
const SPACES: &str = " \\t\\n\\r\\f";

/// The pattern as llguidance is to read it; where white space of Unicode is meant, in a narrow sense.
///
/// # Errors
/// In words: what in it cannot be followed.
pub(super) fn translated(pattern: &str) -> Result<String, String> {
    let mut text = String::with_capacity(pattern.len());
    let mut rest = pattern.chars().peekable();
    while let Some(char) = rest.next() {
        match char {
            '.' => text.push_str(&format!("[^{LINE_ENDS}]")),
            '[' => class(&mut rest, &mut text)?,
            '\\' => match escape(&mut rest)?.as_str() {
                "\\s" => text.push_str(&format!("[{SPACES}]")),
                "\\S" => text.push_str("[^\\s\\x{feff}]"),
                escape if is_control(escape) => return Err(no_control(escape)),
                escape => text.push_str(escape),
            },
            char if char.is_control() && !"\n\r\t".contains(char) => return Err(no_control(char.escape_debug())),
            char => text.push(char),
        }
    }
    Ok(text)
}

type Chars<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// A class, behind its bracket.
fn class(rest: &mut Chars, text: &mut String) -> Result<(), String> {
    let negated = rest.next_if_eq(&'^').is_some();
    let (mut items, mut count) = (String::new(), 0);
    let mut controls = None;
    loop {
        let Some(char) = rest.next() else { return Err("a class is not closed: ] is missing".into()) };
        match char {
            ']' => break,
            '-' if rest.peek() == Some(&'-') => return Err("-- in a class is not supported; write \\- for one".into()),
            // Two of them, and a bracket, mean something else in Rust's syntax.
            '&' | '~' | '[' => items.extend(['\\', char]),
            '\\' => {
                let escape = escape(rest)?;
                if is_control(&escape) {
                    controls = Some(escape.clone());
                }
                match escape.as_str() {
                    "\\s" if negated => items.push_str("\\s\\x{feff}"),
                    "\\s" => items.push_str(SPACES),
                    "\\S" if negated => items.push_str("\\S\\x{85}"),
                    "\\S" => items.push_str("[^\\s\\x{feff}]"),
                    "\\b" => items.push_str("\\x08"),
                    escape => items.push_str(escape),
                }
            }
            char => items.push(char),
        }
        count += 1;
    }
    match (negated, controls) {
        (true, _) if count == 0 => text.push_str("(?s:.)"),
        (false, _) if count == 0 => return Err("[] matches nothing".into()),
        (false, Some(control)) if count == 1 => return Err(no_control(&control)),
        _ => text.push_str(&format!("[{}{items}]", if negated { "^" } else { "" })),
    }
    Ok(())
}

/// An escape with its backslash, which has been read, and with its digits.
fn escape(rest: &mut Chars) -> Result<String, String> {
    let Some(kind) = rest.next() else { return Err("it ends with a backslash".into()) };
    let mut escape = format!("\\{kind}");
    let digits = match kind {
        'x' => 2,
        'u' if rest.peek() != Some(&'{') => 4,
        'c' | '0' => return Err(no_control(&escape)),
        _ => return Ok(escape),
    };
    for _ in 0..digits {
        let digit = rest.next_if(char::is_ascii_hexdigit);
        escape.push(digit.ok_or_else(|| format!("{escape} lacks digits: it is to have {digits}"))?);
    }
    Ok(escape)
}

/// A character that JSON spells by its number alone: llguidance passes over it beside others.
fn is_control(escape: &str) -> bool {
    let number = escape.strip_prefix("\\x").or_else(|| escape.strip_prefix("\\u"));
    let number = number.and_then(|digits| u32::from_str_radix(digits, 16).ok());
    matches!(escape, "\\v" | "\\a" | "\\e") || number.is_some_and(|number| number < 0x20 || number == 0x7f)
}

fn no_control(escape: impl std::fmt::Display) -> String {
    format!("{escape}: control characters are not supported outside of ranges")
}
