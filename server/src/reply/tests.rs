//! Replies as models write them, cut anywhere.

use proptest::prelude::*;
use serde_json::json;

use super::*;

const HERMES: ToolFormat = ToolFormat::Hermes;
const LLAMA: ToolFormat = ToolFormat::Llama3Json;
const MISTRAL: ToolFormat = ToolFormat::Mistral;

/// A reply in short: `content`, `(reasoning)` and `name#arguments`.
fn read(format: &Format, thinks: bool, pieces: &[&str]) -> Vec<String> {
    let mut reply = Reply::new(format, thinks);
    let mut parts = Parts::default();
    let mut pushed: Vec<Vec<Part>> = pieces.iter().map(|piece| reply.push(piece)).collect();
    pushed.push(reply.finish());
    for part in pushed.into_iter().flatten() {
        match part {
            Part::Content(text) => parts.content(&text),
            Part::Reasoning(text) => parts.reasoning(&text),
            Part::Arguments { index, text } => parts.arguments(index, &text),
            other => parts.0.push(other),
        }
    }
    let mut told = Vec::new();
    let (mut count, mut open) = (0, None);
    for part in parts.0 {
        match part {
            Part::Content(text) => told.push(text),
            Part::Reasoning(text) => told.push(format!("({text})")),
            Part::Call { index, name } => {
                assert_eq!((index, open), (count, None), "calls are numbered, and none begins in another");
                (count, open) = (count + 1, Some(index));
                told.push(format!("{name}#"));
            }
            Part::Arguments { index, text } => {
                assert_eq!(open, Some(index));
                told.last_mut().unwrap().push_str(&text);
            }
            Part::CallEnd { index } => assert_eq!(open.take(), Some(index)),
        }
    }
    assert_eq!(open, None, "every call ends");
    told
}

fn tools(format: ToolFormat) -> Format {
    Format { tools: Some(format), names: vec!["f".into(), "g".into()], ..Format::default() }
}

fn calls(format: ToolFormat, text: &str) -> Vec<String> {
    read(&tools(format), false, &[text])
}

#[test]
fn hermes_calls_are_told_with_the_models_own_arguments() {
    let one =
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":  \"}</tool_call>\\\"\", \"b\": [1, {}]}}\n</tool_call>";
    let arguments = "{\"a\":  \"}</tool_call>\\\"\", \"b\": [1, {}]}";
    assert_eq!(calls(HERMES, one), [format!("f#{arguments}")]);
    let two = format!("Let me see.\n\n{one}\n{one}\n");
    assert_eq!(calls(HERMES, &two), ["Let me see.".into(), format!("f#{arguments}"), format!("f#{arguments}")]);
    for (text, told) in [
        // Any name, any order of keys, others beside them.
        (r#"<tool_call>{"arguments": {"a": 1}, "id": [1], "name": "other"}</tool_call>"#, &[r#"other#{"a": 1}"#][..]),
        (r#"<tool_call>{"name":"f","arguments":{},"x":-1.5e3}</tool_call>"#, &["f#{}"]),
        (r#"<tool_call>{"name":"f"}</tool_call> so"#, &["f#{}", "so"]),
        // What small models leave out.
        ("{\"name\":\"f\",\"arguments\":{}}\n{\"name\":\"g\",\"arguments\":{}}", &["f#{}", "g#{}"]),
        (r#"<tool_call>{"name":"f","arguments":{"a":1}}"#, &[r#"f#{"a":1}"#]),
        (r#"<tool_call>{"name":"f","arguments":{"a":1}</tool_call>"#, &[r#"f#{"a":1}"#]),
        (r#"<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g","arguments":{}}"#, &["f#{}", "g#{}"]),
        // The end in the middle.
        (r#"<tool_call>{"name":"f","arguments":{"a":"#, &[r#"f#{"a":"#]),
        (r#"<tool_call>{"name":"f","argu"#, &[r#"<tool_call>{"name":"f","argu"#]),
        ("{\"name\":\"f\",\"arguments\":{}}\n{\"name\": \"", &["f#{}", "{\"name\": \""]),
        // No calls.
        ("<tool_call>[1]</tool_call>", &["<tool_call>[1]</tool_call>"]),
        (r#"<tool_call>{"arguments":{}}</tool_call>"#, &[r#"<tool_call>{"arguments":{}}</tool_call>"#]),
        (r#"<tool_call>{"name":"f","arguments":"x"}"#, &[r#"<tool_call>{"name":"f","arguments":"x"}"#]),
        (r#"<tool_call><tool_call>{"name":"f","arguments":{}}"#, &["<tool_call>", "f#{}"]),
        (r#"{"name":"h","arguments":{}}"#, &[r#"{"name":"h","arguments":{}}"#]),
        (r#"So {"name":"f","arguments":{}}"#, &[r#"So {"name":"f","arguments":{}}"#]),
        ("a < b \n", &["a < b \n"]),
    ] {
        assert_eq!(calls(HERMES, text), told, "{text}");
    }
}

#[test]
fn llama_calls_stand_at_the_start_or_behind_the_tag() {
    for (text, told) in [
        (r#"{"name": "f", "parameters": {"a": "b"}}"#, &[r#"f#{"a": "b"}"#][..]),
        (r#" {"type": "function", "name": "f", "parameters": {}}"#, &["f#{}"]),
        (r#"{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"x": 1}};"#, &["f#{}", r#"g#{"x": 1}"#]),
        (r#"<|python_tag|>{"name": "f", "parameters": {}}"#, &["f#{}"]),
        (r#"I look. <|python_tag|>{"name": "any", "parameters": {}}"#, &["I look.", "any#{}"]),
        (r#"{"name": "f", "parameters": {}} done"#, &["f#{}", "done"]),
        // JSON that is no call of a tool of the request.
        (r#"{"name": "Bob", "age": 3}"#, &[r#"{"name": "Bob", "age": 3}"#]),
        (r#"{"name": "Bob", "parameters": {}}"#, &[r#"{"name": "Bob", "parameters": {}}"#]),
        (r#"{"city": {"name": "f"}}"#, &[r#"{"city": {"name": "f"}}"#]),
        (r#"See {"name": "f", "parameters": {}}"#, &[r#"See {"name": "f", "parameters": {}}"#]),
        (r#"<|python_tag|>search.call(q="x")"#, &[r#"<|python_tag|>search.call(q="x")"#]),
    ] {
        assert_eq!(calls(LLAMA, text), told, "{text}");
    }
}

#[test]
fn mistral_calls_are_a_list_or_names_with_arguments() {
    for (text, told) in [
        (
            r#"[TOOL_CALLS] [{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}, "id": "9"}] so"#,
            &[r#"f#{"a": [1]}"#, "g#{}", "so"][..],
        ),
        (r#"[TOOL_CALLS]f[ARGS]{"a": {}}[TOOL_CALLS]g[CALL_ID]Ab3[ARGS]{}"#, &[r#"f#{"a": {}}"#, "g#{}"]),
        (r#"Well. [TOOL_CALLS]f{"a": 1}"#, &["Well.", r#"f#{"a": 1}"#]),
        ("[TOOL_CALLS]f[X]{}", &["[TOOL_CALLS]f[X]{}"]),
        ("[TOOL_CALLS] none of them", &["[TOOL_CALLS] none of them"]),
        (r#"[TOOL_CALLS][{"name": "f", "arguments": {}}, 7]"#, &["f#{}", ", 7]"]),
        ("a list: [1, 2] [TOOL", &["a list: [1, 2] [TOOL"]),
    ] {
        assert_eq!(calls(MISTRAL, text), told, "{text}");
    }
}

#[test]
fn thinking_comes_first_or_not_at_all() {
    let format = Format { reasoning: true, ..tools(HERMES) };
    let call = r#"<tool_call>{"name":"f","arguments":{}}</tool_call>"#;
    for (thinks, text, told) in [
        (false, format!("\n<think>\nI < you.\n</think>\n\nHi. {call}"), &["(I < you.)", "Hi.", "f#{}"][..]),
        (true, format!("I see {call}.\n\n</think>\n{call}"), &[&format!("(I see {call}.)"), "f#{}"]),
        (true, " I s \n".into(), &["( I s)"]),
        (false, "<think> I s \n".into(), &["(I s)"]),
        (true, "all </thin".into(), &["(all </thin)"]),
        (false, "<think></think>Hi".into(), &["Hi"]),
        (false, "Hi <think>no</think>".into(), &["Hi <think>no</think>"]),
        (false, "<thi".into(), &["<thi"]),
        (false, " <b>".into(), &[" <b>"]),
        (false, call.into(), &["f#{}"]),
    ] {
        assert_eq!(read(&format, thinks, &[&text]), told, "{text}");
    }
    assert_eq!(read(&Format::default(), false, &["<think>x</think>"]), ["<think>x</think>"]);
}

#[test]
fn only_what_may_become_a_marker_is_held() {
    let content = |text: &str| vec![Part::Content(text.into())];
    let mut reply = Reply::new(&tools(HERMES), false);
    for (piece, known) in [("a <b", "a <b"), (" \n<tool", ""), ("_", ""), ("box", " \n<tool_box"), ("<", "")] {
        assert_eq!(reply.push(piece), if known.is_empty() { vec![] } else { content(known) }, "{piece}");
    }
    assert_eq!(reply.push("tool_call>{\"name\": \"f\", \"arguments\""), vec![]);
    let known = vec![Part::Call { index: 0, name: "f".into() }, Part::Arguments { index: 0, text: "{\"a".into() }];
    assert_eq!(reply.push(": {\"a"), known);
    assert_eq!(reply.push("\": 1"), vec![Part::Arguments { index: 0, text: "\": 1".into() }]);
    let known = vec![Part::Arguments { index: 0, text: "}".into() }, Part::CallEnd { index: 0 }];
    assert_eq!(reply.push("}}"), known);
    assert_eq!(reply.push("\n</tool_call>\n"), vec![]);
    assert_eq!(reply.finish(), vec![]);
}

#[test]
fn a_reply_of_one_call_is_over_with_it() {
    for (format, text) in [
        (HERMES, r#"<tool_call>{"name":"f","arguments":{}}"#),
        (LLAMA, r#"{"name":"f","parameters":{}}"#),
        (MISTRAL, r#"[TOOL_CALLS][{"name":"f","arguments":{}}"#),
        (MISTRAL, "[TOOL_CALLS]f[ARGS]{}"),
    ] {
        let format = Format { one_call: true, ..tools(format) };
        let mut reply = Reply::new(&format, false);
        let (almost, last) = text.split_at(text.len() - 1);
        reply.push(almost);
        assert!(!reply.is_over(), "{text}");
        reply.push(last);
        assert!(reply.is_over(), "{text}");
        assert_eq!(read(&format, false, &[text, " more", text]), ["f#{}"]);
    }
}

/// Text out of what replies are made of, whole and in fragments.
fn any_text() -> impl Strategy<Value = String> {
    let fragments = vec![
        "<tool_call>",
        "</tool_call>",
        "<tool",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[",
        "]",
        "<|python_tag|>",
        "<think>",
        "</think>",
        "{\"name\": \"f\", \"arguments\": ",
        "{\"name\":\"f\",\"parameters\":",
        "{\"a\": [1, \"}\"]}",
        "{",
        "}",
        "\"",
        "\\",
        ",",
        ";",
        ":",
        "\n",
        " ",
        "f",
        "é",
        "name",
        "\"name\"",
        "1",
    ];
    prop::collection::vec(prop::sample::select(fragments), 0..24).prop_map(|fragments| fragments.concat())
}

fn any_format() -> impl Strategy<Value = Format> {
    let tools = prop::sample::select(vec![None, Some(HERMES), Some(LLAMA), Some(MISTRAL)]);
    (tools, any::<bool>(), any::<bool>()).prop_map(|(tools, one_call, reasoning)| Format {
        tools,
        names: vec!["f".into()],
        one_call,
        reasoning,
    })
}

fn cut<'a>(text: &'a str, cuts: &[prop::sample::Index]) -> Vec<&'a str> {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| text.floor_char_boundary(cut.index(text.len() + 1))).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

/// Well-formed calls as a format writes them, with what must be told of them.
fn any_calls() -> impl Strategy<Value = (ToolFormat, String, Vec<String>)> {
    let value =
        prop_oneof![any::<i32>().prop_map(|n| json!(n)), "\\PC{0,8}".prop_map(|text| json!([text, {"k": text}]))];
    let arguments = prop::collection::vec(("\\PC{0,6}", value), 0..3)
        .prop_map(|fields| serde_json::Value::Object(fields.into_iter().collect()).to_string());
    let call = (prop::sample::select(vec!["f", "g"]), arguments);
    let format =
        prop::sample::select(vec![(HERMES, 0), (HERMES, 1), (LLAMA, 0), (LLAMA, 1), (MISTRAL, 0), (MISTRAL, 1)]);
    (format, prop::collection::vec(call, 1..4)).prop_map(|((format, way), calls)| {
        let told = calls.iter().map(|(name, arguments)| format!("{name}#{arguments}")).collect();
        let each = |key: &str, open: &str, close: &str, between: &str| {
            let call = |(name, arguments): &(&str, String)| {
                format!("{open}{{\"name\": \"{name}\", \"{key}\": {arguments}}}{close}")
            };
            calls.iter().map(call).collect::<Vec<_>>().join(between)
        };
        let text = match (format, way) {
            (HERMES, 1) => each("arguments", "", "", "\n"),
            (HERMES, _) => each("arguments", "<tool_call>\n", "\n</tool_call>", "\n"),
            (LLAMA, 0) => each("parameters", "", "", "; "),
            (LLAMA, _) => each("parameters", "<|python_tag|>", "", ""),
            (MISTRAL, 0) => format!("[TOOL_CALLS][{}]", each("arguments", "", "", ", ")),
            (MISTRAL, _) => calls.iter().map(|(name, args)| format!("[TOOL_CALLS]{name}[ARGS]{args}")).collect(),
        };
        (format, text, told)
    })
}

proptest! {
    #[test]
    fn cuts_do_not_matter(
        text in any_text(),
        format in any_format(),
        thinks in any::<bool>(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        prop_assert_eq!(read(&format, thinks, &cut(&text, &cuts)), read(&format, thinks, &[&text]));
    }

    #[test]
    fn text_without_calls_and_thinking_is_content_to_the_byte(
        text in any_text(),
        format in any_format(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let mut told = read(&format, false, &cut(&text, &cuts));
        told.retain(|part| !part.is_empty());
        let thought = format.reasoning && text.contains("<think>");
        if !thought && !told.iter().any(|part| part.contains('#')) {
            prop_assert_eq!(told.concat(), text);
        }
    }

    #[test]
    fn calls_are_told_whatever_their_arguments(
        (format, text, told) in any_calls(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        prop_assert_eq!(read(&tools(format), false, &cut(&text, &cuts)), told);
    }
}
