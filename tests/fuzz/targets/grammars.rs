//! What a client holds an answer to.

use std::sync::LazyLock;

use looplane_server::text::{Body, Constraint, Form, Text, Thinking};

use crate::{client, pick::Pick};

static TEXT: LazyLock<Text> = LazyLock::new(client::text);

/// JSON schema, as its text.
pub fn schema(bytes: &[u8]) {
    let Ok(schema) = serde_json::from_slice(bytes) else { return };
    compile(Constraint::Json(schema), None, bytes.len());
}

/// A regular expression.
pub fn regex(bytes: &[u8]) {
    let Ok(regex) = str::from_utf8(bytes) else { return };
    compile(Constraint::Regex(regex.into()), None, bytes.len());
}

/// A grammar in Lark or GBNF; the first byte says whether thinking may stand in front.
pub fn grammar(bytes: &[u8]) {
    let mut pick = Pick(bytes);
    let thinking = pick.of(&[None, Some(Thinking::Tagged), Some(Thinking::Begun)]);
    let Some(grammar) = pick.text() else { return };
    compile(Constraint::Grammar(grammar.into()), thinking, bytes.len());
}

/// It is taken, or refused in words that are not those of a compiler that failed.
fn compile(constraint: Constraint, thinking: Option<Thinking>, bytes: usize) {
    let form = Form { body: Body::Constraint(constraint), thinking };
    match TEXT.grammars.compile(&form) {
        Ok(grammar) => assert!(!grammar.is_empty()),
        Err(problem) => {
            assert!(!problem.is_empty() && problem.len() < 20 * bytes + 10_000, "{problem}");
            assert!(!problem.contains("compiler failed"), "{problem}");
        }
    }
}
