//! Whatever JSON comes is a valid request, or is refused by field.

use std::{collections::BTreeSet, path::Path};

use proptest::prelude::*;

use super::{super::fields::asked, *};
use crate::{engine::ModelInfo, request::validate, text::Text};

const FIELDS: [&str; 38] = [
    "model",
    "messages",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "n",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "stop",
    "stream",
    "stream_options",
    "ignore_eos",
    "user",
    "tools",
    "response_format",
    "echo",
    "best_of",
    "metadata",
    "tool_choice",
    "parallel_tool_calls",
    "role",
    "content",
    "tool_calls",
    "tool_call_id",
    "function",
    "name",
    "arguments",
    "parameters",
];

/// The names in the first column of a table of docs/fields.md, but for those that belong to one API alone.
fn documented(heading: &str, others: &str) -> BTreeSet<String> {
    let page = include_str!("../../../../../docs/fields.md");
    let table = page.split(&format!("\n## {heading}\n")).nth(1).expect("the heading").split("\n## ").next().unwrap();
    let columns = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let columns = columns.filter(|names| !names.starts_with(others));
    let names = columns.flat_map(|names| names.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>());
    names.collect()
}

#[test]
fn the_page_of_fields_has_those_that_are_known() {
    type Parse = fn(Value) -> Result<HttpRequest, ApiError>;
    let apis: [(Parse, Value, &str, &str); 2] = [
        (chat, json!({"messages": [{"role": "user", "content": "x"}]}), "Chats", "of completions"),
        (completion, json!({"prompt": "x"}), "Completions", "of chats"),
    ];
    for (parse, body, own, others) in apis {
        let (parsed, known) = asked::during(|| parse(body.clone()));
        parsed.unwrap();
        let known: BTreeSet<String> = known.into_keys().filter(|path| !path.contains(['.', '['])).collect();
        let tables = ["Both", own, "Not supported"].map(|heading| documented(heading, others));
        let documented: BTreeSet<String> = tables.into_iter().flatten().collect();
        assert_eq!(documented, known, "{own}");
        // Each is looked at: none takes whatever comes, but for those that change nothing.
        for field in known.iter().filter(|field| *field != "guided_decoding_backend") {
            let mut body = body.clone();
            body[field] = json!([[{"no": "such"}]]);
            let error = parse(body).expect_err(field).body().to_string();
            assert!(error.contains(&format!("\"param\":\"{field}")), "{field}: {error}");
        }
    }
}

/// Any JSON, of the names and kinds that requests are made of.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        (-3i64..800).prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3.0..3.0f64).prop_map(Value::from),
        "\\PC{0,12}".prop_map(Value::from),
        prop::sample::select(vec![
            "user",
            "system",
            "text",
            "none",
            "auto",
            "function",
            "required",
            "tool",
            "assistant",
            "{}"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 48, 6, |inner| {
        let name = prop_oneof![
            prop::sample::select(FIELDS.to_vec()).prop_map(str::to_owned),
            (0u32..900).prop_map(|id| id.to_string()),
            Just("type".to_owned()),
            Just("text".to_owned()),
        ];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((name, inner), 0..6).prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

fn any_body() -> impl Strategy<Value = Value> {
    let field = (prop::sample::select(FIELDS[..30].to_vec()), any_json());
    (prop::collection::vec(field, 0..4), any::<bool>()).prop_map(|(fields, chat)| {
        let mut body = match chat {
            true => json!({"messages": [{"role": "user", "content": "Hi"}]}),
            false => json!({"prompt": [5, 6]}),
        };
        let map = body.as_object_mut().expect("made as an object");
        map.extend(fields.into_iter().map(|(name, value)| (name.to_owned(), value)));
        body
    })
}

/// What is let through keeps every promise of [`crate::engine::SequenceRequest`]; what is not is the client's fault and
/// says where.
fn check(body: Value, text: &Text, model: &ModelInfo) -> Result<(), TestCaseError> {
    for parse in [chat, completion] {
        let request = match parse(body.clone()) {
            Ok(request) => request,
            Err(error) => {
                prop_assert!(error.status.is_client_error() && error.param.is_some(), "{error:?}");
                continue;
            }
        };
        let Ok(valid) = validate(request.raw, model, text) else { continue };
        for (sequence, _) in valid.sequences() {
            let sampling = &sequence.sampling;
            let fits = sequence.prompt.len() + sequence.max_tokens as usize <= model.max_context as usize;
            prop_assert!(!sequence.prompt.is_empty() && sequence.max_tokens >= 1 && fits);
            prop_assert!(sequence.prompt.iter().all(|id| *id < model.vocab_size));
            prop_assert!(sequence.min_tokens <= sequence.max_tokens);
            prop_assert!((0.0..=2.0).contains(&sampling.temperature) && sampling.top_p > 0.0 && sampling.top_p <= 1.0);
            prop_assert!((0.0..=1.0).contains(&sampling.min_p) && sampling.repetition_penalty > 0.0);
            prop_assert!(sampling.presence_penalty.abs() <= 2.0 && sampling.frequency_penalty.abs() <= 2.0);
            prop_assert!(sampling.logit_bias.windows(2).all(|pair| pair[0].0 < pair[1].0));
            prop_assert!(sampling.logit_bias.iter().all(|(id, bias)| *id < model.vocab_size && bias.abs() <= 100.0));
        }
    }
    Ok(())
}

#[test]
fn whatever_json_comes_is_valid_or_refused_by_field() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
    let text = Text::load(&fixture).unwrap();
    let model = ModelInfo { vocab_size: 768, max_context: 256, ..ModelInfo::default() };
    let config = ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(body in any_body(), stray in any_json())| {
        check(body, &text, &model)?;
        check(stray, &text, &model)?;
    });
}
