//! generation_config.json: what a request gets for the fields that it leaves out.

use serde_json::Value;

/// Defaults of generation. Where the file says nothing: temperature 1, all else off.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationDefaults {
    /// Tokens that end a sequence, ascending.
    pub eos_tokens: Vec<u32>,
    /// 0 or more; 0 is greedy.
    pub temperature: f64,
    /// 0: all.
    pub top_k: i64,
    /// In (0, 1].
    pub top_p: f64,
    /// In [0, 1].
    pub min_p: f64,
    /// Over 0; 1: off.
    pub repetition_penalty: f64,
}

impl Default for GenerationDefaults {
    fn default() -> Self {
        Self { eos_tokens: Vec::new(), temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

impl GenerationDefaults {
    /// Reads the file's contents (null: no file) for a model with `vocab_size` embedding rows.
    ///
    /// # Errors
    /// Names the field that has a wrong type or is out of range.
    pub fn from_json(json: &Value, vocab_size: u32) -> Result<Self, String> {
        let mut defaults = Self::default();
        defaults.add_eos_tokens(token_ids(&json["eos_token_id"], "eos_token_id", vocab_size)?);
        // `do_sample: false` is how a model says that it wants to be decoded greedily.
        if json["do_sample"] == false {
            defaults.temperature = 0.0;
        }
        type InRange = fn(f64) -> bool;
        let temperature: InRange = |v| (0.0..=2.0).contains(&v);
        let top_p: InRange = |v| v > 0.0 && v <= 1.0;
        let min_p: InRange = |v| (0.0..=1.0).contains(&v);
        let repetition_penalty: InRange = |v| v > 0.0 && v <= 10.0;
        let fields = [
            ("temperature", &mut defaults.temperature, temperature, "in [0, 2]"),
            ("top_p", &mut defaults.top_p, top_p, "in (0, 1]"),
            ("min_p", &mut defaults.min_p, min_p, "in [0, 1]"),
            ("repetition_penalty", &mut defaults.repetition_penalty, repetition_penalty, "in (0, 10]"),
        ];
        for (name, field, in_range, range) in fields {
            match &json[name] {
                Value::Null => {}
                value => match value.as_f64().filter(|v| in_range(*v)) {
                    Some(number) => *field = number,
                    None => return Err(format!("{name} is {value}, but must be a number {range}")),
                },
            }
        }
        match &json["top_k"] {
            Value::Null => {}
            value => match value.as_i64().filter(|k| *k >= -1) {
                Some(k) => defaults.top_k = k.max(0),
                None => return Err(format!("top_k is {value}, but must be a whole number of at least 0")),
            },
        }
        Ok(defaults)
    }

    /// Adds tokens that end a sequence.
    pub fn add_eos_tokens(&mut self, ids: impl IntoIterator<Item = u32>) {
        self.eos_tokens.extend(ids);
        self.eos_tokens.sort_unstable();
        self.eos_tokens.dedup();
    }
}

/// A token id, a list of them, or null.
pub(super) fn token_ids(value: &Value, name: &str, vocab_size: u32) -> Result<Vec<u32>, String> {
    let list = match value {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => &list[..],
        one => std::slice::from_ref(one),
    };
    let read = |id: &Value| id.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| *id < vocab_size);
    let ids: Option<Vec<u32>> = list.iter().map(read).collect();
    ids.ok_or_else(|| format!("{name} is {value}, but must be token ids below {vocab_size}"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn fields_are_read_and_the_rest_is_off() {
        assert_eq!(GenerationDefaults::from_json(&Value::Null, 10).unwrap(), GenerationDefaults::default());
        let json = json!({"eos_token_id": [4, 1, 4], "temperature": 0.6, "top_k": 50, "top_p": 0.9});
        let defaults = GenerationDefaults::from_json(&json, 10).unwrap();
        assert_eq!((defaults.eos_tokens.as_slice(), defaults.temperature, defaults.top_k), (&[1, 4][..], 0.6, 50));
        assert_eq!(GenerationDefaults::from_json(&json!({"eos_token_id": 3}), 10).unwrap().eos_tokens, [3]);
        assert_eq!(GenerationDefaults::from_json(&json!({"do_sample": false}), 10).unwrap().temperature, 0.0);
    }

    #[test]
    fn a_value_out_of_range_is_named() {
        for (json, name) in [
            (json!({"eos_token_id": 10}), "eos_token_id"),
            (json!({"eos_token_id": [-1]}), "eos_token_id"),
            (json!({"temperature": -0.1}), "temperature"),
            (json!({"top_p": 0}), "top_p"),
            (json!({"min_p": 2}), "min_p"),
            (json!({"top_k": 1.5}), "top_k"),
            (json!({"repetition_penalty": 0}), "repetition_penalty"),
        ] {
            assert!(GenerationDefaults::from_json(&json, 10).unwrap_err().contains(name));
        }
    }
}
