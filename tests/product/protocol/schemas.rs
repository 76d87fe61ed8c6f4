//! What comes out of schemas, drawn at random as workers allow it: every answer that is whole is valid, as a validator
//! says that shares nothing with the grammars. Server and workers are joined here without processes.

use std::sync::Arc;
use std::time::Duration;

use looplane_server::text::{Body, Constraint, Form, Text};
use looplane_worker::batch::{Admit, Batch, Drafting, Drafts, Finish, Limits, PageGrant, Plan, PrefillChunk, Verdict};
use looplane_worker::grammar::{Grammars, Vocabulary};
use looplane_worker::plan::PAGE_POSITIONS;
use looplane_worker::sampling::{Allowed, Sampled, SamplingParams};
use serde_json::Value;

use crate::common::fixture;

const SLOTS: usize = 16;
/// Tokens that are drawn at random; then what closes is preferred.
const AT_RANDOM: usize = 24;
const MAX_TOKENS: usize = 20 * PAGE_POSITIONS - 2;
const LONG: Duration = Duration::from_secs(60);

/// Draws tokens from masks.
struct Drawer {
    rng: u64,
    /// `[token]`
    words: Vec<Vec<u8>>,
    end: u32,
}

impl Drawer {
    fn below(&mut self, bound: usize) -> usize {
        self.rng = self.rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.rng >> 33) as usize % bound
    }

    /// `drawn`: tokens so far.
    fn draw(&mut self, mask: &[u32], drawn: usize) -> u32 {
        let allowed: Vec<u32> =
            (0..self.words.len() as u32).filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1).collect();
        assert!(!allowed.is_empty(), "no token is allowed");
        // As likely as all the letters: what shapes a value.
        let shapes = |word: &[u8]| word.iter().any(|byte| b"{}[],:\"0123456789.eE-\\".contains(byte));
        let closes = |word: &[u8]| matches!(word, b"\"" | b"}" | b"]");
        let kind = |of: &dyn Fn(&[u8]) -> bool| -> Vec<u32> {
            allowed.iter().copied().filter(|token| of(&self.words[*token as usize])).collect()
        };
        let ends = allowed.contains(&self.end);
        if drawn < AT_RANDOM {
            let shaping = kind(&shapes);
            if ends && self.below(4) == 0 {
                return self.end;
            }
            let from = if shaping.is_empty() || self.below(3) == 0 { &allowed } else { &shaping };
            return from[self.below(from.len())];
        }
        if ends {
            return self.end;
        }
        let (closing, shaping) = (kind(&closes), kind(&shapes));
        // Now and then another, so that no circle holds it.
        let from = match (closing.is_empty(), shaping.is_empty(), self.below(8)) {
            (_, _, 0) | (true, true, _) => &allowed,
            (false, _, _) => &closing,
            (true, false, _) => &shaping,
        };
        from[self.below(from.len())]
    }
}

/// The texts of one answer each by the grammars, `None` where it is too long.
fn walk(grammars: &[Arc<str>], vocabulary: &Arc<Vocabulary>, drawer: &mut Drawer) -> Vec<Option<Vec<u8>>> {
    let pages = (MAX_TOKENS + 2).div_ceil(PAGE_POSITIONS) as u32;
    let vocab_size = vocabulary.words.len();
    let mut batch = Batch::new(Limits {
        max_slots: SLOTS,
        max_batch_tokens: 2 * SLOTS,
        kv_pages: SLOTS * pages as usize,
        max_context: MAX_TOKENS + 2,
        vocab_size,
        drafting: Drafting { whole_sizes: true, extra_us: 0 },
        draft_corpus_tokens: 0,
        window: None,
    });
    let slots = 0..grammars.len() as u32;
    let admit = |(slot, grammar): (u32, &Arc<str>)| Admit {
        slot,
        sequence: u64::from(slot) + 1,
        tokens: vec![5],
        prompt_tokens: 1,
        max_tokens: MAX_TOKENS as u32,
        min_tokens: 0,
        stop_tokens: vec![vocabulary.end],
        sampling: SamplingParams::greedy(),
        logprobs: None,
        cache_salt: String::new(),
        grammar: Some(grammar.clone()),
        token_bounds: None,
        prompt_logprobs: None,
    };
    let plan = Plan {
        version: 1,
        steps: MAX_TOKENS as u32 + 1,
        admit: slots.clone().zip(grammars).map(admit).collect(),
        grants: slots
            .clone()
            .map(|slot| PageGrant { slot, first: 0, pages: (slot * pages..(slot + 1) * pages).collect() })
            .collect(),
        prefill: slots.clone().map(|slot| PrefillChunk { slot, start: 0, len: 1 }).collect(),
        decode: slots.clone().collect(),
        drafts: Drafts::default(),
        ..Plan::default()
    };
    batch.apply(&plan).expect("the plan fits");
    let mut followed = Grammars::new(Some(vocabulary.clone()), vocab_size, SLOTS, 1);
    slots.for_each(|slot| followed.admit(slot, batch.slot(slot)));
    let mut texts = vec![None; grammars.len()];
    let mut drawn = vec![Vec::new(); grammars.len()];
    while !batch.step().samples.is_empty() {
        followed.ask(&batch);
        followed.await_masks(&batch, LONG);
        let rows: Vec<usize> = batch.step().samples.clone();
        let slots: Vec<usize> = rows.iter().map(|row| batch.step().rows[*row].slot as usize).collect();
        let draw = |(row, slot): (&usize, &usize)| match followed.allowed(&batch, *row) {
            Allowed::These(mask) => Sampled::none(drawer.draw(mask, drawn[*slot].len())),
            // What llguidance gives up by its bounds ends without a whole answer.
            Allowed::Nothing => Sampled::none(Sampled::NOTHING),
            other => panic!("{other:?}"),
        };
        let sampled: Vec<Sampled> = rows.iter().zip(&slots).map(draw).collect();
        let verdicts = batch.complete(&sampled).to_vec();
        for ((slot, sampled), verdict) in slots.into_iter().zip(sampled).zip(verdicts) {
            match verdict {
                Verdict::Token(Some(Finish::Stop)) => {
                    let words = drawn[slot].iter().map(|token: &u32| &vocabulary.words[*token as usize][..]);
                    texts[slot] = Some(words.collect::<Vec<_>>().concat());
                }
                Verdict::Token(_) => drawn[slot].push(sampled.token),
                _ => {}
            }
        }
    }
    texts
}

/// The text with exponents of at most two digits: a number may be larger than what is read as f64.
fn in_range(text: &str) -> String {
    let (mut kept, mut in_text, mut escaped, mut exponent) = (String::new(), false, false, None);
    for char in text.chars() {
        exponent = match (char, exponent) {
            ('e' | 'E', _) if !in_text => Some(0),
            ('+' | '-', Some(0)) => Some(0),
            ('0'..='9', Some(digits)) => Some(digits + 1),
            _ => None,
        };
        in_text ^= char == '"' && !escaped;
        escaped = in_text && char == '\\' && !escaped;
        if exponent.is_none_or(|digits| digits <= 2) {
            kept.push(char);
        }
    }
    kept
}

/// A validator's view: formats that grammars do not know say nothing, as JSON Schema has it.
fn validator(schema: &Value) -> Option<jsonschema::Validator> {
    let draft7 = schema["$schema"].as_str().is_some_and(|draft| draft.contains("draft-07"));
    let draft = if draft7 { jsonschema::Draft::Draft7 } else { jsonschema::Draft::Draft202012 };
    let mut options = jsonschema::options().with_draft(draft);
    for unknown in [
        "regex",
        "json-pointer",
        "relative-json-pointer",
        "uri-reference",
        "uri-template",
        "iri",
        "iri-reference",
        "idn-email",
        "idn-hostname",
    ] {
        options = options.with_format(unknown, |_: &str| true);
    }
    options.should_validate_formats(true).build(schema).ok()
}

#[test]
fn whatever_is_drawn_from_a_schema_s_masks_is_valid() {
    let suite: Vec<Value> =
        serde_json::from_str(include_str!("../../../server/tests/fixtures/schemas/suite.json")).unwrap();
    let text = Text::load(&fixture("llama-gqa")).unwrap();
    let looplane_proto::worker::v1::Vocabulary { texts, lengths, end } = text.grammars.vocabulary().unwrap();
    let mut left = &texts[..];
    let word = |length: &u32| left.split_off(..*length as usize).expect("the texts are as long as they say").to_vec();
    let words: Vec<Vec<u8>> = lengths.iter().map(word).collect();
    let vocabulary = Arc::new(Vocabulary { words: words.clone(), end });
    let grammar = |schema: &Value| {
        let form = Form { body: Body::Constraint(Constraint::Json(schema.clone())), thinking: None };
        text.grammars.compile(&form).ok()
    };
    let taken: Vec<(Value, Arc<str>, jsonschema::Validator)> = suite
        .iter()
        .map(|group| group["schema"].clone())
        .filter_map(|schema| Some((grammar(&schema)?, validator(&schema)?, schema)))
        .map(|(grammar, validator, schema)| (schema, grammar, validator))
        .collect();
    let (mut whole, mut drawn) = (0, 0);
    let mut wrong = Vec::new();
    for seed in 1..=3 {
        let mut drawer = Drawer { rng: seed, words: words.clone(), end };
        for group in taken.chunks(SLOTS) {
            let grammars: Vec<Arc<str>> = group.iter().map(|(_, grammar, _)| grammar.clone()).collect();
            let texts = walk(&grammars, &vocabulary, &mut drawer);
            for ((schema, _, validator), text) in group.iter().zip(texts) {
                drawn += 1;
                let Some(text) = text else { continue };
                whole += 1;
                let text = String::from_utf8(text).expect("whole answers are whole characters");
                match serde_json::from_str::<Value>(&in_range(&text)) {
                    Ok(value) if validator.is_valid(&value) => {}
                    // The validator divides what f64 has of it.
                    Ok(value) if value.as_f64().is_some_and(|value| value.abs() > 1e15) => {}
                    Ok(_) => wrong.push(format!("{schema} lets out {text}")),
                    Err(error) => wrong.push(format!("{schema} lets out {text}, no JSON: {error}")),
                }
            }
        }
    }
    println!("{whole} of {drawn} answers by {} schemas are whole", taken.len());
    assert!(wrong.is_empty(), "{} answers:\n{}", wrong.len(), wrong.join("\n"));
    assert!(taken.len() >= 270 && whole * 100 >= drawn * 90, "{whole} of {drawn}, {} schemas", taken.len());
}
