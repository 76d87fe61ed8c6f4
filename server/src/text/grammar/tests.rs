use std::path::Path;
use std::sync::LazyLock;

use rustix::time::{ClockId, clock_gettime};

use super::*;
use crate::reply::{ToolFormat, calls};
use crate::text::Text;

fn grammars() -> Grammars {
    Text::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa")).unwrap().grammars
}

fn form(constraint: Constraint) -> Form {
    Form { body: Body::Constraint(constraint), thinking: None }
}

#[test]
fn the_vocabulary_has_every_token_and_marks_control() {
    let grammars = grammars();
    let Vocabulary { texts, lengths, end } = grammars.vocabulary().unwrap();
    assert_eq!(lengths.len(), 768);
    assert_eq!(lengths.iter().sum::<u32>() as usize, texts.len());
    assert_eq!(end, 1);
    assert_eq!(&texts[..lengths[0] as usize], b"\xff<|begin_of_text|>");
    assert!(texts.split(|byte| *byte == CONTROL).count() > 3);
}

#[test]
fn what_can_be_followed_compiles_and_the_rest_says_why_not() {
    let grammars = grammars();
    let object = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    for good in [
        Constraint::json_object(),
        Constraint::Json(object),
        Constraint::Json(json!({})),
        Constraint::Regex("[a-z]{3}\\d+".into()),
        Constraint::Choice(vec!["yes \"indeed\"".into(), "no\n".into()]),
        Constraint::Grammar("start: \"a\" start | \"b\"".into()),
        // It writes rules, and has none of these.
        Constraint::Grammar("start: /[a-z]+/ \" ::= \" /[a-z]+/".into()),
    ] {
        let grammar = grammars.compile(&form(good)).unwrap();
        assert!(serde_json::from_str::<TopLevelGrammar>(&grammar).is_ok());
    }
    let nothing = "no text keeps to this";
    for (bad, says) in [
        (Constraint::Json(json!({"$ref": "#"})), nothing),
        (Constraint::Json(json!({"allOf": [{"$ref": "#"}]})), nothing),
        (Constraint::Json(json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})), nothing),
        (Constraint::Grammar("root ::= root".into()), nothing),
        (Constraint::Json(json!({"type": "nonsense"})), "nonsense"),
        (Constraint::Regex("(".into()), "regex"),
        (Constraint::Grammar("start: nothing".into()), "nothing"),
        (Constraint::Grammar("root ::= a".into()), "line 1, column 10: no rule a"),
    ] {
        let problem = grammars.compile(&form(bad.clone())).unwrap_err();
        assert!(problem.contains(says), "{problem}");
        let behind_thoughts = Form { thinking: Some(Thinking::Begun), ..form(bad) };
        assert!(grammars.compile(&behind_thoughts).unwrap_err().contains(says));
    }
}

#[test]
fn a_tool_whose_arguments_cannot_be_is_named() {
    let (good, endless) = (json!({"type": "object"}), json!({"$ref": "#"}));
    let inside = json!({"properties": {"n": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}});
    for (bad, says) in [
        (endless, "no text keeps to this"),
        (inside, "properties.n: no text keeps to this"),
        (json!({"minProperties": 2}), "minProperties: 2 "),
        (json!({"not": {}}), ""),
    ] {
        let tools = [("f", good.as_object()), ("g", bad.as_object())];
        for format in [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral] {
            let calls = calls(format, &tools, false, |_| None);
            let bodies = [Body::Calls(calls.clone()), Body::Either(Constraint::json_object(), calls.clone())];
            let announced = calls.marker.map(|_| Body::Announced(calls));
            for body in bodies.into_iter().chain(announced) {
                let problem = shared().compile(&Form { body, thinking: None }).expect_err(&bad.to_string());
                assert!(problem.starts_with(&format!("the parameters of g: {says}")), "{problem}");
            }
        }
    }
}

#[test]
fn schemas_that_begin_with_themselves_are_refused_where_they_stand() {
    let schema = |a: Value, b: Value| {
        json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/a"}}, "required": ["n"],
            "$defs": {"a": a, "b": b}})
    };
    let to = |name: &str| json!({"$ref": format!("#/$defs/{name}")});
    for (a, b) in [
        (to("b"), to("a")),
        (json!({"anyOf": [to("a"), to("b")]}), to("a")),
        (json!({"oneOf": [to("b")]}), json!({"allOf": [{"type": "string"}, to("a")]})),
    ] {
        let problem = shared().compile(&form(Constraint::Json(schema(a, b)))).unwrap_err();
        assert!(problem.starts_with("properties.n: no text keeps to this"), "{problem}");
    }
    for (a, b) in [
        (json!({"anyOf": [to("b"), {"type": "integer"}]}), to("a")),
        (json!({"type": "array", "items": to("b")}), to("a")),
        (json!({"enum": [{"$ref": "#/$defs/a"}, 7]}), to("a")),
    ] {
        let held = form(Constraint::Json(schema(a.clone(), b)));
        let text = if a["type"] == "array" { r#"{"n":[[],[[]]]}"# } else { r#"{"n":7}"# };
        assert!(allows(&held, text), "{a}");
    }
}

/// A long chain, in whatever order it is walked, takes no square of its length; neither does one schema that is
/// referred to often, or by many spellings.
#[test]
fn references_are_followed_quickly() {
    let chain = |links: usize, last: Value| {
        let to = |link: usize| json!({"$ref": format!("#/$defs/{link}")});
        let mut all: serde_json::Map<_, _> = (0..links).map(|link| (link.to_string(), to(link + 1))).collect();
        all.insert(links.to_string(), last);
        json!({"properties": {"n": to(0)}, "$defs": all})
    };
    // The thread's own time: others may have its core.
    let begun = clock_gettime(ClockId::ThreadCPUTime);
    assert_eq!(loops::check(&chain(60_000, json!({"type": "integer"}))), Ok(()));
    let problem = loops::check(&chain(60_000, json!({"$ref": "#/$defs/0"}))).unwrap_err();
    assert!(problem.starts_with("properties.n: no text keeps to this"), "{problem}");
    let problem = loops::check(&chain(70_000, json!({}))).unwrap_err();
    assert!(problem.contains("more than 65536 schemas may begin what is referred to"), "{problem}");

    let mut often = vec![json!({"$ref": "#/r"}); 30_000];
    often.push(json!({"$ref": "#/t"}));
    let problem = loops::check(&json!({"r": {"type": "integer"}, "t": {"allOf": often}})).unwrap_err();
    assert!(problem.starts_with("t: no text keeps to this"), "{problem}");

    let spelling = |way: usize| (0..12).map(|at| if way >> at & 1 == 1 { "~0" } else { "~" }).collect::<String>();
    let ways: Vec<_> = (0..4096).map(|way| json!({"$ref": format!("#/{}", spelling(way))})).collect();
    let heads = vec![json!({"$ref": "#/r"}); 10_000];
    let mut root = json!({"r": {"type": "integer"}, "all": {"anyOf": ways}});
    root["~".repeat(12)] = json!({"allOf": heads});
    assert_eq!(loops::check(&root), Ok(()));
    let took = clock_gettime(ClockId::ThreadCPUTime) - begun;
    assert!(took.tv_sec < 8, "{took:?}");
}

/// What llguidance says of texts that a form is to allow, followed byte by byte to their ends.
pub(super) struct Followed(Matcher);

impl Followed {
    pub(super) fn new(form: &Form) -> Result<Self, String> {
        Self::by(shared(), form)
    }

    fn by(grammars: &Grammars, form: &Form) -> Result<Self, String> {
        let grammar: TopLevelGrammar = serde_json::from_str(&grammars.compile(form)?).unwrap();
        let factory = grammars.factory.get().unwrap().as_ref().unwrap();
        Ok(Self(Matcher::new(factory.create_parser(grammar))))
    }

    pub(super) fn allows(&self, text: &str) -> bool {
        static IDS: LazyLock<[u32; 256]> = LazyLock::new(|| {
            std::array::from_fn(|byte| (0..768).find(|id| shared().tokenizer.token_bytes(*id) == [byte as u8]).unwrap())
        });
        let tokens: Vec<u32> = text.bytes().map(|byte| IDS[usize::from(byte)]).collect();
        let mut matcher = self.0.deep_clone();
        matcher.try_consume_tokens(&tokens).unwrap() == tokens.len() && matcher.is_accepting().unwrap()
    }
}

fn shared() -> &'static Grammars {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    GRAMMARS.get_or_init(grammars)
}

fn allows(form: &Form, text: &str) -> bool {
    Followed::new(form).unwrap().allows(text)
}

#[test]
fn calls_are_held_to_their_format_and_schemas() {
    let schema = json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "required": ["n"],
        "additionalProperties": false, "$defs": {"n": {"type": "integer"}}});
    let tools = [("f", schema.as_object()), ("g", None)];
    let held = |format, one_call, thinking| {
        let calls = calls(format, &tools, one_call, |_| None);
        Form { body: Body::Calls(calls), thinking }
    };
    let hermes = |text: &str| format!("<tool_call>\n{text}\n</tool_call>");
    let (f, g) = (r#"{"name": "f", "arguments": {"n": 5}}"#, r#"{"name": "g", "arguments": {"a": []}}"#);
    for (form, text, expected) in [
        (held(ToolFormat::Hermes, false, None), hermes(f), true),
        (held(ToolFormat::Hermes, false, None), format!("{}\n{}", hermes(f), hermes(g)), true),
        (held(ToolFormat::Hermes, true, None), format!("{}\n{}", hermes(f), hermes(g)), false),
        (held(ToolFormat::Hermes, true, None), hermes(r#"{"name": "f", "arguments": {"n": "5"}}"#), false),
        (held(ToolFormat::Hermes, true, None), hermes(r#"{"name": "h", "arguments": {}}"#), false),
        (held(ToolFormat::Hermes, true, None), "Hi".into(), false),
        (held(ToolFormat::Llama3Json, false, None), f.replace("arguments", "parameters"), true),
        (held(ToolFormat::Llama3Json, true, None), f.into(), false),
        (held(ToolFormat::Mistral, false, None), format!("[TOOL_CALLS][{f},{g}]"), true),
        (held(ToolFormat::Mistral, true, None), format!("[TOOL_CALLS][{f},{g}]"), false),
        (held(ToolFormat::Hermes, true, Some(Thinking::Tagged)), hermes(f), true),
        (held(ToolFormat::Hermes, true, Some(Thinking::Tagged)), format!("<think>so\n</think>\n{}", hermes(f)), true),
        (held(ToolFormat::Hermes, true, Some(Thinking::Begun)), format!("so\n</think>\n\n{}", hermes(f)), true),
        (held(ToolFormat::Hermes, true, Some(Thinking::Begun)), hermes(f), false),
    ] {
        assert_eq!(allows(&form, &text), expected, "{text} by {form:?}");
    }
}

#[test]
fn calls_keep_to_their_schemas_behind_what_announces_them() {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
        "additionalProperties": false});
    let tools = [("f", schema.as_object()), ("g", None)];
    let held = |format, one_call, thinking| {
        let form = Form { body: Body::Announced(calls(format, &tools, one_call, |_| None)), thinking };
        Followed::new(&form).unwrap()
    };
    let call = |arguments: &str| format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {arguments}}}\n</tool_call>");
    let (good, bad) = (call("{\"n\": 5}"), call("{\"n\": \"5\"}"));
    let other = call("{}").replace("\"f\"", "\"g\"");
    let hermes = held(ToolFormat::Hermes, false, None);
    for (text, expected) in [
        ("".to_owned(), true),
        ("Just <text>, <tool_cal and {\"n\": \"5\"}\n".into(), true),
        (good.clone(), true),
        (format!("I call. {good}\n{other} So.\n{good}"), true),
        (format!("I call. {bad}"), false),
        (format!("{good} {bad}"), false),
        (format!("{good} <tool_call>"), false),
        ("It is written <tool_call>.".into(), false),
        (call("{}").replace("\"f\"", "\"h\""), false),
    ] {
        assert_eq!(hermes.allows(&text), expected, "{text}");
    }
    let one = held(ToolFormat::Hermes, true, None);
    assert!(one.allows(&format!("So {good}.")) && !one.allows(&format!("{good}\n{good}")) && !one.allows(&bad));
    let mistral = held(ToolFormat::Mistral, false, None);
    let list = |arguments: &str| format!("[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {arguments}}}]");
    assert!(mistral.allows("[TOOL_CALL]") && mistral.allows(&list("{\"n\": 5}")) && !mistral.allows(&list("{}")));
    // Thinking may say what it likes.
    let thought = |text: &str| format!("I could {bad} or <tool_call></think>{text}");
    let begun = held(ToolFormat::Hermes, false, Some(Thinking::Begun));
    let tagged = held(ToolFormat::Hermes, false, Some(Thinking::Tagged));
    for (text, expected) in [(thought(&good), true), (thought("Hi"), true), (thought(&bad), false)] {
        assert_eq!(begun.allows(&text), expected, "{text}");
        assert_eq!(tagged.allows(&format!("<think>{text}")), expected, "{text}");
    }
    assert!(tagged.allows(&format!("Hi {good}")) && !tagged.allows(&bad) && tagged.allows("<thin"));
}

/// Where it is a control token, no text is the marker.
#[test]
fn calls_are_announced_by_control_tokens_too() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../worker/tests/fixtures/llama-gqa");
    let tokenizer = std::fs::read_to_string(fixture.join("tokenizer.json")).unwrap();
    let tokenizer = tokenizer.replace("<|start_header_id|>", "[TOOL_CALLS]").replace("<|end_header_id|>", "<think>");
    let tokenizer = Arc::new(Tokenizer::from_json(tokenizer.as_bytes(), 768).unwrap());
    let grammars = Grammars::new(tokenizer.clone(), Some(1));
    assert!(grammars.marker("[TOOL_CALLS]").is_some() && grammars.marker("<think>").is_some());
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let tools = [("f", schema.as_object())];
    for thinking in [None, Some(Thinking::Tagged)] {
        let body = Body::Announced(calls(ToolFormat::Mistral, &tools, false, |text| grammars.marker(text)));
        let Followed(matcher) = Followed::by(&grammars, &Form { body, thinking }).unwrap();
        let allows = |parts: &[&str]| {
            let tokens = parts.iter().flat_map(|part| match tokenizer.id(part) {
                Some(id) if tokenizer.is_special(id) => vec![id],
                _ => tokenizer.encode(part, false, "").unwrap(),
            });
            let (tokens, mut matcher) = (tokens.collect::<Vec<u32>>(), matcher.deep_clone());
            matcher.try_consume_tokens(&tokens).unwrap() == tokens.len() && matcher.is_accepting().unwrap()
        };
        let (good, bad) = (r#"[{"name": "f", "arguments": {"n": 5}}]"#, r#"[{"name": "f", "arguments": {}}]"#);
        assert!(allows(&["Hi "]) && allows(&["[TOOL_CALLS]", good]) && allows(&["Hi ", "[TOOL_CALLS]", good]));
        assert!(!allows(&["[TOOL_CALLS]", bad]) && !allows(&["Hi", "[TOOL_CALLS]"]));
        let thought = ["<think>", "I may </think>", "[TOOL_CALLS]"];
        assert_eq!(allows(&[&thought[..], &[good]].concat()), thinking.is_some());
        assert!(!allows(&[&thought[..], &[bad]].concat()));
    }
}

/// A value in other words of JSON, each of which says the same.
fn spellings(value: &Value) -> Vec<String> {
    let escaped = |text: &str| {
        let unit = |unit: u16| format!("\\u{unit:04x}");
        format!("\"{}\"", text.encode_utf16().map(unit).collect::<String>())
    };
    let spell = |number: &dyn Fn(&Value) -> String, text: &dyn Fn(&str) -> String| spelled(value, number, text);
    let (plain, json) = (|number: &Value| number.to_string(), |text: &str| json!(text).to_string());
    let whole = |suffix: &'static str| {
        move |number: &Value| match number.is_i64() {
            true => format!("{number}{suffix}"),
            false => number.to_string(),
        }
    };
    let mut all = vec![
        value.to_string(),
        serde_json::to_string_pretty(value).unwrap(),
        spell(&plain, &escaped),
        spell(&whole(".0"), &json),
        spell(&whole("e0"), &json),
        spell(&whole("0e-1"), &json),
        spell(&whole("0E-01"), &json),
    ];
    all.dedup();
    all
}

fn spelled(value: &Value, number: &dyn Fn(&Value) -> String, text: &dyn Fn(&str) -> String) -> String {
    let inner = |value| spelled(value, number, text);
    match value {
        Value::Number(_) => number(value),
        Value::String(string) => text(string),
        Value::Array(list) => format!("[{}]", list.iter().map(inner).collect::<Vec<_>>().join(",")),
        Value::Object(fields) => {
            let field = |(name, value): (&String, _)| format!("{}:{}", text(name), inner(value));
            format!("{{{}}}", fields.iter().map(field).collect::<Vec<_>>().join(","))
        }
        other => other.to_string(),
    }
}

/// A public suite: of the schemas that are taken, no value is allowed that is not valid, however it is written. Valid
/// ones may be missing: properties come in the schema's order.
#[test]
fn no_schema_allows_what_is_not_valid() {
    let suite = include_str!("../../../tests/fixtures/schemas/suite.json");
    let suite: Vec<Value> = serde_json::from_str(suite).unwrap();
    let (mut taken, mut valid, mut found) = (0, 0, 0);
    let mut wrong = Vec::new();
    for group in &suite {
        let held = form(Constraint::Json(group["schema"].clone()));
        let held = match Followed::new(&held) {
            Ok(held) => held,
            Err(problem) => {
                println!("{}: {}", group["of"], problem.lines().next().unwrap_or_default());
                continue;
            }
        };
        taken += 1;
        for test in group["tests"].as_array().unwrap() {
            if test[0] == true {
                valid += 1;
                found += usize::from(held.allows(&test[1].to_string()));
                continue;
            }
            for text in spellings(&test[1]) {
                if held.allows(&text) {
                    wrong.push(format!("{}: {} allows {text}", group["of"], group["schema"]));
                }
            }
        }
    }
    println!("{taken} of {} schemas are taken; {found} of {valid} valid values are allowed", suite.len());
    assert!(wrong.is_empty(), "{} values:\n{}", wrong.len(), wrong.join("\n"));
    assert!(taken >= 280 && found >= 785, "{taken} are taken, and {found} values of {valid} allowed");
}

#[test]
fn a_form_is_kept_by_the_order_of_its_properties() {
    let of = |names: [&str; 2]| {
        let properties: serde_json::Map<String, Value> =
            names.map(|name| (name.to_owned(), json!({}))).into_iter().collect();
        form(Constraint::Json(json!({"properties": properties, "required": names, "type": "object"})))
    };
    let (one, other) = (of(["a", "b"]), of(["b", "a"]));
    let grammar = shared().compile(&one).unwrap();
    assert!(Arc::ptr_eq(&grammar, &shared().compile(&one.clone()).unwrap()));
    assert!(allows(&one, r#"{"a":1,"b":2}"#) && allows(&other, r#"{"b":1,"a":2}"#));
    assert!(!allows(&other, r#"{"a":1,"b":2}"#));
}

#[test]
fn what_grammars_would_follow_too_widely_is_refused_by_its_keyword() {
    for (schema, says) in [
        (json!({"dependencies": {"a": ["b"]}}), "dependencies: "),
        (json!({"properties": {"dependencies": {"dependencies": {}}}}), "properties.dependencies: dependencies: "),
        (json!({"items": {"minProperties": 2}}), "items: minProperties: 2 "),
        (json!({"const": {"a": ["b\u{1}"]}}), "const: a text with \\u{1}: "),
        (json!({"pattern": "a\\x01"}), "pattern: \"a\\\\x01\": \\x01: "),
        (json!({"patternProperties": {"[a--b]": {}}}), "patternProperties: \"[a--b]\": -- in a class"),
        (json!({"pattern": "[a"}), "a class is not closed"),
        (json!({"x-guidance": 1}), "x-guidance: must be an object"),
    ] {
        let problem = shared().compile(&form(Constraint::Json(schema.clone()))).expect_err(&schema.to_string());
        assert!(problem.contains(says), "{schema}: {problem}");
    }
    // Names are no keywords, and values no schemas.
    for schema in [
        json!({"properties": {"dependencies": {}, "minProperties": {"type": "integer"}}}),
        json!({"enum": [{"dependencies": 1, "minProperties": 7, "pattern": "[a"}]}),
        json!({"minProperties": 2, "required": ["a"]}),
        json!({"pattern": "^[^\\x00-\\x1f]+[\\x00-\\x7f]*$"}),
    ] {
        shared().compile(&form(Constraint::Json(schema))).unwrap();
    }
}

#[test]
fn bounds_of_integers_that_no_f64_has_are_kept_to_as_others_are() {
    for (schema, inside, outside) in [
        (json!({"minimum": 9007199254740993_u64}), "9007199254740994", "9007199254740992"),
        (json!({"maximum": 9007199254740993_u64}), "9007199254740992", "9007199254740994"),
        (json!({"maximum": -9007199254740993_i64}), "-9007199254740994", "-9007199254740992"),
        (json!({"exclusiveMinimum": 9007199254740992_u64}), "9007199254740996", "9007199254740992"),
        (json!({"exclusiveMaximum": -9007199254740992_i64}), "-9007199254740996", "-9007199254740992"),
        (json!({"minimum": i64::MIN, "maximum": i64::MAX}), "-9223372036854774784", "-9223372036854775809"),
        (json!({"minimum": 0, "maximum": u64::MAX}), "9223372036854774784", "18446744073709551616"),
        (json!({"minimum": -1e300, "maximum": 1e20}), "-9223372036854774784", "100000000000000000001"),
    ] {
        let mut schema = schema;
        schema["type"] = "integer".into();
        let held = Followed::new(&form(Constraint::Json(schema.clone()))).unwrap_or_else(|e| panic!("{schema}: {e}"));
        assert!(held.allows(inside) && !held.allows(outside), "{schema}");
    }
    for schema in [
        json!({"type": "integer", "minimum": 1e308, "maximum": 1.7e308}),
        json!({"type": "integer", "maximum": -1e19}),
        json!({"type": "integer", "exclusiveMinimum": i64::MAX}),
    ] {
        let problem = shared().compile(&form(Constraint::Json(schema.clone()))).expect_err(&schema.to_string());
        assert!(problem.ends_with("of 63 bits"), "{schema}: {problem}");
    }
}

#[test]
fn a_panic_of_the_compiler_is_told_without_its_stack() {
    let panic = told("panic: overflow\n<backtrace>\n 0: main\n</backtrace>");
    assert!(panic.starts_with("this grammar cannot be compiled") && !panic.contains("main"), "{panic}");
    assert_eq!(told("line 1\nline 2\n<backtrace>\n 0: main"), "line 1\nline 2");
}

/// The same text matches as in ECMA-262, but for rare white space.
#[test]
fn patterns_are_those_of_ecma() {
    for (pattern, matches, others) in [
        ("^a.b$", &["axb", "a\u{85}b"][..], &["a\nb", "a\rb", "a\u{2028}b"][..]),
        ("^[[&~]+$", &["[", "&&", "~~["], &["a"]),
        ("^\\s\\S[\\s\\d][^\\s]$", &[" a\tb", "\nx5y"], &["aa b", " \u{feff} b", " a\u{85}b"]),
        ("^\\u0041[\\u{42}\\b]\\/$", &["AB/", "A\u{8}/"], &["Ab/"]),
        ("^[^]$", &["a", "\n"], &["", "ab"]),
        ("b", &["abc"], &["ac"]),
    ] {
        let held = Followed::new(&form(Constraint::Json(json!({"type": "string", "pattern": pattern})))).unwrap();
        for (text, expected) in matches.iter().map(|text| (text, true)).chain(others.iter().map(|text| (text, false))) {
            assert_eq!(held.allows(&json!(text).to_string()), expected, "{text:?} by {pattern}");
        }
    }
}

#[test]
fn white_space_of_json_has_an_end() {
    let list = form(Constraint::Json(json!({"type": "array", "items": {"type": "integer"}})));
    assert!(allows(&list, &format!("[1,{}2]", " ".repeat(64))) && allows(&list, "[\n  1,\n  2\n]"));
    assert!(!allows(&list, &format!("[1,{}2]", " ".repeat(65))));
    for (schema, text) in [(json!(true), "[1, 2]"), (json!({}), "{\"a\": null}")] {
        assert!(allows(&form(Constraint::Json(schema)), text));
    }
}

#[test]
fn a_form_may_stand_behind_thinking_or_beside_calls() {
    let json = || Constraint::Json(json!({"type": "integer"}));
    let behind = |thinking| Form { body: Body::Constraint(json()), thinking: Some(thinking) };
    assert!(allows(&behind(Thinking::Tagged), "7") && allows(&behind(Thinking::Tagged), "<think>a</think>7"));
    assert!(allows(&behind(Thinking::Begun), "a</think> 7") && !allows(&behind(Thinking::Begun), "7"));
    let calls = calls(ToolFormat::Hermes, &[("f", None)], false, |_| None);
    let either = Form { body: Body::Either(json(), calls), thinking: None };
    assert!(allows(&either, "12") && !allows(&either, "Hi"));
    assert!(allows(&either, "<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>"));
}
