//! What a model writes, in tokens and in text: what comes out does not depend on where it is cut.

use std::sync::{Arc, LazyLock};

use looplane_server::{
    engine::GeneratedToken,
    reply::{Format, Part, Reply, ToolFormat},
    text::{OutputText, Start, StopMatcher, Stops, Tokenizer},
};

use crate::{
    client,
    pick::{Pick, cut},
};

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| client::text().tokenizer);

/// Four bytes say what is told apart and where the text is cut, which is the rest.
pub fn reply(bytes: &[u8]) {
    let mut pick = Pick(bytes);
    let tools = pick.of(&[None, Some(ToolFormat::Hermes), Some(ToolFormat::Llama3Json), Some(ToolFormat::Mistral)]);
    let choices = pick.byte();
    let [one_call, reasoning, thinks] = [1, 2, 4].map(|bit| choices & bit > 0);
    let seed = [pick.byte(), pick.byte()];
    let Some(text) = pick.text() else { return };
    let format = Format { tools, names: vec!["f".into(), "get_weather".into()], one_call, reasoning };
    let read = |pieces: &[&str]| {
        let mut reply = Reply::new(&format, thinks);
        let mut parts = Vec::new();
        pieces.iter().for_each(|piece| join(reply.push(piece), &mut parts));
        join(reply.finish(), &mut parts);
        parts
    };
    let whole = read(&[text]);
    assert_eq!(read(&cut(text, &seed)), whole, "cut as {seed:?} says");
    assert_eq!(read(&cut(text, &[1])), whole, "character by character");
    check_calls(&whole);
    // Nothing is made up but what JSON has escaped in names.
    let mut rest = text.chars();
    let spelled = whole.iter().flat_map(|part| match part {
        Part::Content(text) | Part::Reasoning(text) | Part::Arguments { text, .. } => text.chars(),
        Part::Call { .. } | Part::CallEnd { .. } => "".chars(),
    });
    spelled.for_each(|char| assert!(rest.any(|other| other == char), "{char:?} is not of the text: {whole:?}"));
    if tools.is_none() && !reasoning {
        assert!(matches!(&whole[..], [] | [Part::Content(_)]) && content(&whole) == text, "{whole:?}");
    }
}

fn content(parts: &[Part]) -> &str {
    match parts {
        [Part::Content(text)] => text,
        _ => "",
    }
}

/// Adds parts; neighbours of a kind are one.
fn join(more: Vec<Part>, parts: &mut Vec<Part>) {
    for part in more {
        match (parts.last_mut(), part) {
            (Some(Part::Content(text)), Part::Content(more)) | (Some(Part::Reasoning(text)), Part::Reasoning(more)) => {
                text.push_str(&more);
            }
            (Some(Part::Arguments { text, .. }), Part::Arguments { text: more, .. }) => text.push_str(&more),
            (_, part) => parts.push(part),
        }
    }
}

/// Calls are numbered, one after the other, each with its end.
fn check_calls(parts: &[Part]) {
    let (mut open, mut calls) = (None, 0);
    for part in parts {
        match part {
            Part::Call { index, name } => {
                assert!(open.is_none() && *index == calls && !name.is_empty(), "{parts:?}");
                (open, calls) = (Some(*index), calls + 1);
            }
            Part::Arguments { index, .. } => assert_eq!(open, Some(*index), "{parts:?}"),
            Part::CallEnd { index } => assert_eq!(open.take(), Some(*index), "{parts:?}"),
            Part::Content(_) | Part::Reasoning(_) => assert_eq!(open, None, "{parts:?}"),
        }
    }
    assert_eq!(open, None, "{parts:?}");
}

/// Stop texts, up to the first empty line, and the text behind it.
pub fn stops(bytes: &[u8]) {
    stops_hold(bytes, |stops, shown, pieces| {
        let mut matcher = StopMatcher::new(stops.to_vec(), shown);
        let mut out = Vec::new();
        for piece in pieces {
            let found = matcher.push(piece);
            out.push(found.text);
            if found.stopped {
                return out;
            }
        }
        out.push(matcher.finish());
        out
    });
}

/// What `run` lets through of a text in pieces is what stands in front of the first stop text.
pub fn stops_hold(bytes: &[u8], run: impl Fn(&[String], bool, &[&str]) -> Vec<String>) {
    let mut pick = Pick(bytes);
    let (shown, seed) = (pick.flag(), [pick.byte(), pick.byte()]);
    let Some((stops, text)) = pick.text().and_then(|text| text.split_once("\n\n")) else { return };
    let stops: Vec<String> = stops.lines().filter(|stop| !stop.is_empty()).map(str::to_owned).collect();
    let expected = up_to_stop(text, &stops, shown).0;
    for pieces in [cut(text, &seed), cut(text, &[1]), vec![text]] {
        let out = run(&stops, shown, &pieces).concat();
        assert_eq!(out, expected, "stops {stops:?} in {pieces:?}");
    }
}

/// The plain way: of all places where a stop text ends, the first, and there the longest. Says whether there is one.
fn up_to_stop<'a>(text: &'a str, stops: &[String], shown: bool) -> (&'a str, bool) {
    let ends = stops.iter().filter_map(|stop| text.find(stop).map(|at| (at + stop.len(), at)));
    match ends.min() {
        Some((end, start)) => (&text[..if shown { end } else { start }], true),
        None => (text, false),
    }
}

/// Tokens, two bytes each, behind the stop texts: what comes out of them one by one is what the tokenizer makes of all
/// at once, up to the first stop text, and so are their number and places.
pub fn output(bytes: &[u8]) {
    let mut pick = Pick(bytes);
    let (shown, start) = (pick.flag(), pick.of(&[Start::Beginning, Start::Middle]));
    let stops: Vec<String> =
        (0..pick.byte() % 4).map(|_| pick.of(&["\n", "END", "é", "aa", "<|eot_id|>"]).into()).collect();
    let pairs = pick.0.chunks_exact(2).map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]));
    // Past the last token, too.
    let ids: Vec<u32> = pairs.map(|id| id % (TOKENIZER.tokens() + 3)).collect();
    let stopping = Stops { texts: stops.clone(), shown, min_tokens: 0 };
    let mut output = OutputText::new(TOKENIZER.clone(), start, stopping);
    let (mut text, mut tokens, mut stopped) = (String::new(), Vec::new(), false);
    for id in &ids {
        let (piece, ends) = output.push(GeneratedToken { id: *id, logprob: None, top: Vec::new() });
        text.push_str(&piece.text);
        tokens.extend(piece.tokens);
        stopped = ends;
        if ends {
            break;
        }
    }
    if !stopped {
        let (piece, ends) = output.finish();
        text.push_str(&piece.text);
        tokens.extend(piece.tokens);
        stopped = ends;
    }
    let known: Vec<u32> = ids.iter().copied().filter(|id| *id < TOKENIZER.tokens()).collect();
    let whole = TOKENIZER.decode(&known, false).expect("every token has a text");
    assert_eq!((text.as_str(), stopped), up_to_stop(&whole, &stops, shown), "tokens {ids:?}, stops {stops:?}");
    assert!(tokens.iter().map(|token| token.token.id).eq(ids.iter().copied().take(tokens.len())), "{tokens:?}");
    assert!(stopped || tokens.len() == ids.len(), "{tokens:?} of {ids:?}");
    let chars = text.chars().count();
    assert!(tokens.is_sorted_by_key(|token| token.text_offset), "{tokens:?}");
    assert!(tokens.iter().all(|token| token.text_offset <= chars), "{tokens:?} in {text:?}");
}
