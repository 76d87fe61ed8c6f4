//! Request bodies that are wrong.

use bytes::Bytes;
use serde_json::{Value, json};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Breakage {
    /// Not JSON from its second byte on.
    InvalidJson,
    /// The first half of the JSON, in a body that is whole as HTTP has it.
    CutOff,
    /// JSON in which `max_tokens` is text.
    WrongType,
}

impl Breakage {
    pub const ALL: [Self; 3] = [Self::InvalidJson, Self::CutOff, Self::WrongType];

    pub fn name(self) -> &'static str {
        match self {
            Breakage::InvalidJson => "invalid_json",
            Breakage::CutOff => "cut_off_json",
            Breakage::WrongType => "wrong_type",
        }
    }

    /// The JSON object `body`, broken.
    pub fn of(self, body: &Bytes) -> Bytes {
        match self {
            Breakage::InvalidJson => [b"{,", &body[1..]].concat().into(),
            Breakage::CutOff => body.slice(..body.len() / 2),
            Breakage::WrongType => {
                let mut body: Value = serde_json::from_slice(body).expect("the load tester writes JSON");
                body["max_tokens"] = json!("many");
                body.to_string().into()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_is_broken_in_its_way() {
        let body = Bytes::from_static(br#"{"model":"m","max_tokens":5}"#);
        let [invalid, cut_off, wrong_type] = Breakage::ALL.map(|breakage| breakage.of(&body));
        let why = |bytes: &Bytes| serde_json::from_slice::<Value>(bytes).expect_err("broken");
        assert!(why(&invalid).is_syntax(), "{invalid:?}");
        assert!(why(&cut_off).is_eof(), "{cut_off:?}");
        let value: Value = serde_json::from_slice(&wrong_type).expect("JSON");
        assert_eq!(value, json!({"model": "m", "max_tokens": "many"}));
    }
}
