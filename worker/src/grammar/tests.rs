//! Grammars followed over a vocabulary of bytes, pairs of letters and two control tokens.

use super::*;
use crate::batch::{Admit, Drafting, Drafts, Limits, PageGrant, Plan, PrefillChunk, StepTime, TokenBounds, Verdict};
use crate::sampling::{Sampled, SamplingParams};

const END: u32 = 256;
/// Ids of "aa", "ab", ... behind the control tokens.
const PAIRS: u32 = 258;
const VOCAB: usize = 258 + 26 * 26 + 3;
const LONG: Duration = Duration::from_secs(20);

fn vocabulary() -> Arc<Vocabulary> {
    let mut words: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    words.extend([b"\xff<end>".to_vec(), b"\xff<other>".to_vec()]);
    words.extend((b'a'..=b'z').flat_map(|first| (b'a'..=b'z').map(move |second| vec![first, second])));
    Arc::new(Vocabulary { words, end: END })
}

/// The mask in front of each of the tokens of an answer.
pub fn masks_along(vocabulary: Arc<Vocabulary>, vocab_size: usize, sequence: &Admit) -> Vec<Vec<u32>> {
    let library = Library::new(Some(vocabulary), vocab_size);
    let mut follower = Follower::of(sequence.grammar.clone(), sequence.token_bounds.clone());
    let prompt = sequence.prompt_tokens as usize;
    let mask = |position: usize| {
        let newest = if position > prompt { sequence.tokens[position - 1..position].to_vec() } else { Vec::new() };
        let (drafts, stops) = (Vec::new(), sequence.stop_tokens.clone());
        let ask = Ask { newest, drafts, position, stops, stops_from: prompt + sequence.min_tokens as usize };
        let masks = follower.answer(&ask, &library);
        masks.words.expect("the answer keeps to its grammar").remove(0).expect("a mask without drafts")
    };
    (prompt..sequence.tokens.len()).map(mask).collect()
}

fn pair(text: &str) -> u32 {
    let [first, second] = text.as_bytes() else { panic!("{text:?} is no pair") };
    PAIRS + u32::from(first - b'a') * 26 + u32::from(second - b'a')
}

fn lark(grammar: &str) -> String {
    serde_json::to_string(&llguidance::api::TopLevelGrammar::from_lark(grammar.into())).unwrap()
}

/// A batch with one sequence, whose prompt is computed in the first step.
fn batch(grammar: &str, drafts: u32) -> (Batch, Grammars) {
    batch_of(Some(grammar), None, 0, drafts)
}

/// The same of a sequence that is held to tokens, too, or to them alone.
fn batch_of(grammar: Option<&str>, bounds: Option<TokenBounds>, min_tokens: u32, drafts: u32) -> (Batch, Grammars) {
    let limits = Limits {
        max_slots: 9,
        max_batch_tokens: 64,
        kv_pages: 8,
        max_context: 256,
        vocab_size: VOCAB,
        drafting: Drafting { whole_sizes: true, extra_us: 0 },
        draft_corpus_tokens: 0,
        window: None,
    };
    let mut batch = Batch::new(limits);
    let admit = Admit {
        slot: 0,
        sequence: 7,
        tokens: vec![b'x'.into(), b'y'.into()],
        prompt_tokens: 2,
        max_tokens: 100,
        min_tokens,
        stop_tokens: vec![END, 257],
        sampling: SamplingParams::greedy(),
        logprobs: None,
        cache_salt: String::new(),
        grammar: grammar.map(Into::into),
        token_bounds: bounds.map(Arc::new),
        prompt_logprobs: None,
    };
    let plan = Plan {
        version: 1,
        steps: 100,
        admit: vec![admit],
        grants: vec![PageGrant { slot: 0, first: 0, pages: vec![0, 1] }],
        prefill: vec![PrefillChunk { slot: 0, start: 0, len: 2 }],
        decode: vec![0],
        drafts: Drafts {
            each: drafts,
            rows: 8,
            times: vec![StepTime { rows: 1, us: 10 }, StepTime { rows: 9, us: 11 }],
        },
        ..Plan::default()
    };
    batch.apply(&plan).unwrap();
    let mut grammars = Grammars::new(Some(vocabulary()), VOCAB, 9, 1);
    grammars.admit(0, batch.slot(0));
    (batch, grammars)
}

/// The tokens that each sampled row of the step may draw.
fn allowed(batch: &Batch, grammars: &mut Grammars) -> Vec<Vec<u32>> {
    grammars.ask(batch);
    grammars.await_masks(batch, LONG);
    let of_row = |row: &usize| match grammars.allowed(batch, *row) {
        Allowed::These(words) => (0..VOCAB as u32).filter(|token| words[*token as usize / 32] >> (token % 32) & 1 == 1),
        other => panic!("{other:?}"),
    };
    batch.step().samples.iter().map(|row| of_row(row).collect()).collect()
}

fn draw(batch: &mut Batch, tokens: &[u32]) -> Vec<Verdict> {
    let sampled: Vec<Sampled> = tokens.iter().map(|token| Sampled::none(*token)).collect();
    batch.complete(&sampled).to_vec()
}

#[test]
fn each_token_is_one_that_the_grammar_allows_next() {
    let (mut batch, mut grammars) = batch(&lark("start: \"ab\" (\"c\" | \"de\")"), 0);
    let ids = |texts: &[&str]| -> Vec<u32> {
        let id = |text: &&str| if text.len() == 1 { text.as_bytes()[0].into() } else { pair(text) };
        texts.iter().map(id).collect()
    };
    for (may, draws) in [(&["a", "ab"][..], "a"), (&["b", "bc", "bd"], "bd"), (&["e"], "e")] {
        assert_eq!(allowed(&batch, &mut grammars), [ids(may)]);
        draw(&mut batch, &ids(&[draws]));
    }
    assert_eq!(allowed(&batch, &mut grammars), [[END, 257]], "nothing but the end");
    assert_eq!(draw(&mut batch, &[END]), [Verdict::Token(Some(crate::batch::Finish::Stop))]);
}

/// The library's own limit let such a list compile, and ended its answer behind the first token.
#[test]
fn one_of_many_choices_is_followed_to_its_end() {
    let choices: Vec<String> = (0..9000).map(|choice| format!("\"c{choice}\"")).collect();
    let (mut batch, mut grammars) = batch(&lark(&format!("start: {}", choices.join(" | "))), 0);
    for byte in "c8999".bytes() {
        assert!(allowed(&batch, &mut grammars)[0].contains(&byte.into()));
        assert_eq!(draw(&mut batch, &[byte.into()]), [Verdict::Token(None)]);
    }
    assert_eq!(allowed(&batch, &mut grammars), [[END, 257]]);
}

#[test]
fn an_answer_may_end_where_the_grammar_may() {
    let (mut batch, mut grammars) = batch(&lark("start: /[ab]{1,2}/"), 0);
    let none = allowed(&batch, &mut grammars);
    assert!(!none[0].contains(&END) && none[0].contains(&pair("ba")));
    draw(&mut batch, &[b'a'.into()]);
    assert_eq!(allowed(&batch, &mut grammars), [[b'a'.into(), b'b'.into(), END, 257]]);
}

#[test]
fn a_row_whose_mask_is_late_is_computed_again() {
    let (mut batch, mut grammars) = batch(&lark("start: \"abc\""), 0);
    assert_eq!(draw(&mut batch, &[Sampled::LATE]), [Verdict::Late]);
    let rows = &batch.step().rows;
    assert_eq!((rows.len(), rows[0].position, rows[0].token, rows[0].sample), (1, 1, b'y'.into(), true));
    for _ in 0..2 {
        assert_eq!(allowed(&batch, &mut grammars), [[b'a'.into(), pair("ab")]]);
        draw(&mut batch, &[Sampled::LATE]);
    }
    draw(&mut batch, &[pair("ab")]);
    assert_eq!(batch.step().rows[0].position, 2);
    assert_eq!(allowed(&batch, &mut grammars), [[u32::from(b'c')]]);
}

/// Ranks that are late or not follow the same plans: the next one finds the prompt computed.
#[test]
fn a_late_row_at_the_end_of_a_prompt_decodes_in_the_next_plan() {
    let (mut batch, _) = batch(&lark("start: \"abc\""), 0);
    draw(&mut batch, &[Sampled::LATE]);
    batch.apply(&Plan { version: 2, steps: 4, decode: vec![0], ..Plan::default() }).unwrap();
    assert_eq!((batch.step().rows.len(), batch.step().rows[0].position), (1, 1));
    assert_eq!(draw(&mut batch, &[b'a'.into()]), [Verdict::Token(None)]);
    assert_eq!(batch.slot(0).generated(), [u32::from(b'a')]);
}

#[test]
fn drafts_are_held_to_the_grammar_and_taken_back() {
    let (mut batch, mut grammars) = batch(&lark("start: /(abc)+x/"), 4);
    let text: Vec<u32> = b"abcabcabcabcabcabcabcabca".iter().map(|byte| (*byte).into()).collect();
    let (mut next, mut drafted) = (0, 0);
    while next < text.len() {
        let masks = allowed(&batch, &mut grammars);
        drafted += masks.len() - 1;
        for (behind, mask) in masks.iter().enumerate() {
            let expected = text.get(next + behind).copied().unwrap_or_else(|| text[(next + behind) % 3]);
            assert!(mask.contains(&expected), "{behind} behind {next}");
        }
        let drawn: Vec<u32> =
            (next..next + masks.len()).map(|at| text.get(at).copied().unwrap_or(text[at % 3])).collect();
        next += draw(&mut batch, &drawn).iter().filter(|verdict| matches!(verdict, Verdict::Token(_))).count();
    }
    assert!(drafted > 3, "{drafted} tokens were drafted");
    // Another token than was drafted: what comes behind it is taken back, and the grammar goes on from there.
    while batch.step().drafted == 0 || batch.slot(0).tokens().last() != Some(&b'c'.into()) {
        let masks = allowed(&batch, &mut grammars).len();
        let newest = batch.slot(0).tokens().len() - 2;
        draw(&mut batch, &(newest..newest + masks).map(|at| text[at % 3]).collect::<Vec<_>>());
    }
    let rows = allowed(&batch, &mut grammars).len();
    let verdicts = draw(&mut batch, &vec![b'x'.into(); rows]);
    assert_eq!(verdicts[..2], [Verdict::Token(None), Verdict::Rejected]);
    assert_eq!(allowed(&batch, &mut grammars), [[END, 257]]);
}

#[test]
fn a_grammar_that_cannot_be_followed_ends_its_sequence() {
    for (grammar, vocabulary) in [("{}".to_owned(), Some(vocabulary())), (lark("start: \"a\""), None)] {
        let (mut batch, _) = batch(&grammar, 0);
        let mut grammars = Grammars::new(vocabulary, VOCAB, 9, 1);
        grammars.admit(0, batch.slot(0));
        grammars.ask(&batch);
        grammars.await_masks(&batch, LONG);
        assert_eq!(grammars.allowed(&batch, 1), Allowed::Nothing);
        assert_eq!(draw(&mut batch, &[Sampled::NOTHING]), [Verdict::Nothing]);
        assert!(batch.step().rows.is_empty() && batch.slot(0).is_finished());
    }
}

#[test]
fn a_sequence_goes_on_from_what_it_had_before() {
    let (mut batch, mut grammars) = batch(&lark("start: \"abcabc\""), 0);
    for token in [pair("ab"), pair("ca")] {
        allowed(&batch, &mut grammars);
        draw(&mut batch, &[token]);
    }
    let mut again = Grammars::new(Some(vocabulary()), VOCAB, 9, 1);
    again.admit(0, batch.slot(0));
    assert_eq!(allowed(&batch, &mut again), [[b'b'.into(), pair("bc")]]);
}

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// All tokens but these.
fn all_but(forbidden: &[u32]) -> Vec<u32> {
    (0..VOCAB as u32).filter(|token| !forbidden.contains(token)).collect()
}

#[test]
fn only_tokens_that_are_allowed_by_name_are_drawn_and_stop_tokens_when_they_may() {
    // A token that the vocabulary does not have is none.
    let bounds = TokenBounds { allowed: vec![b'a'.into(), b'b'.into(), END, 5000], forbidden: Vec::new() };
    let (mut batch, mut grammars) = batch_of(None, Some(bounds), 2, 0);
    for _ in 0..2 {
        assert_eq!(allowed(&batch, &mut grammars), [ids("ab")]);
        draw(&mut batch, &ids("a"));
    }
    assert_eq!(allowed(&batch, &mut grammars), [[b'a'.into(), b'b'.into(), END]]);
    assert_eq!(draw(&mut batch, &[END]), [Verdict::Token(Some(crate::batch::Finish::Stop))]);
}

#[test]
fn of_a_word_of_several_tokens_the_last_is_forbidden_behind_the_others() {
    let bounds = TokenBounds { allowed: Vec::new(), forbidden: vec![ids("q"), ids("abc"), ids("bd")] };
    let (mut batch, mut grammars) = batch_of(None, Some(bounds.clone()), 0, 0);
    // The prompt is no part of the answer.
    for (forbidden, drawn) in [("q", "a"), ("q", "b"), ("qcd", "a"), ("q", "b"), ("qcd", "b"), ("qd", "x"), ("q", "a")]
    {
        assert_eq!(allowed(&batch, &mut grammars), [all_but(&ids(forbidden))]);
        draw(&mut batch, &ids(drawn));
    }
    draw(&mut batch, &ids("b"));
    // One that comes back has its answer to go on from.
    let mut again = Grammars::new(None, VOCAB, 9, 1);
    again.admit(0, batch.slot(0));
    assert_eq!(allowed(&batch, &mut again), [all_but(&ids("qcd"))]);
}

#[test]
fn drafts_are_held_to_tokens_by_name_and_taken_back() {
    let bounds = TokenBounds { allowed: ids("abcxy"), forbidden: vec![ids("abca"), ids("cx")] };
    let (mut batch, mut grammars) = batch_of(None, Some(bounds), 0, 4);
    let may = |behind: &[u32]| -> Vec<u32> {
        let ends = |text: &str| behind.ends_with(&ids(text));
        let forbidden = [(ends("abc"), b'a'), (ends("c"), b'x')];
        ids("abcxy").into_iter().filter(|token| !forbidden.contains(&(true, *token as u8))).collect()
    };
    let (mut text, mut drafted, mut refused) = (Vec::new(), 0, 0);
    while text.len() < 60 {
        let masks = allowed(&batch, &mut grammars);
        drafted += masks.len() - 1;
        let drafts: Vec<u32> =
            batch.step().rows.iter().skip(batch.step().samples[0] + 1).map(|row| row.token).collect();
        let (mut behind, mut held) = (text.clone(), true);
        for (index, mask) in masks.iter().enumerate() {
            if held {
                assert_eq!(*mask, may(&behind), "{index} drafts behind {behind:?}");
            }
            if let Some(draft) = drafts.get(index) {
                held &= may(&behind).contains(draft);
                refused += usize::from(!held);
                behind.push(*draft);
            }
        }
        // "abcyabcy...", and at times another letter than was drafted.
        let next = |at: usize| if at % 13 == 12 { b'b'.into() } else { ids("abcy")[at % 4] };
        let drawn: Vec<u32> = (text.len()..text.len() + masks.len()).map(next).collect();
        let count = draw(&mut batch, &drawn).iter().filter(|verdict| matches!(verdict, Verdict::Token(_))).count();
        text.extend(&drawn[..count]);
    }
    assert!(drafted > 10, "{drafted} tokens were drafted, {refused} of them refused");
}

#[test]
fn a_grammar_and_tokens_by_name_hold_together() {
    let bounds = TokenBounds { allowed: [ids("abc"), vec![END]].concat(), forbidden: vec![ids("ab")] };
    let (mut batch, mut grammars) = batch_of(Some(&lark("start: /[abd]{2,3}/")), Some(bounds), 0, 0);
    assert_eq!(allowed(&batch, &mut grammars), [ids("ab")]);
    draw(&mut batch, &ids("a"));
    assert_eq!(allowed(&batch, &mut grammars), [ids("a")]);
    draw(&mut batch, &ids("a"));
    assert_eq!(allowed(&batch, &mut grammars), [[b'a'.into(), END]]);
}

#[test]
fn where_no_token_is_left_the_sequence_ends() {
    let bounds = TokenBounds { allowed: ids("ab"), forbidden: vec![ids("aa"), ids("ab")] };
    let (mut batch, mut grammars) = batch_of(None, Some(bounds), 0, 0);
    assert_eq!(allowed(&batch, &mut grammars), [ids("ab")]);
    draw(&mut batch, &ids("a"));
    grammars.ask(&batch);
    grammars.await_masks(&batch, LONG);
    let row = batch.step().samples[0];
    assert_eq!(grammars.allowed(&batch, row), Allowed::Nothing);
}

#[test]
fn a_grammar_that_is_kept_is_what_compiling_yields_and_few_are_kept() {
    let library = Library::new(Some(vocabulary()), VOCAB);
    let grammar: Arc<str> = lark("start: /(abc)+x/").into();
    let first_mask = |library: &Library| library.matcher(&grammar).unwrap().compute_mask().unwrap();
    let mut used = library.matcher(&grammar).unwrap();
    let fresh = first_mask(&library);
    used.consume_tokens(&ids("abc")).unwrap();
    used.compute_mask().unwrap();
    assert_eq!(first_mask(&library).as_slice(), fresh.as_slice(), "what one does with its copy is its own");
    for other in 0..100 {
        library.matcher(&lark(&format!("start: \"{other}\"")).into()).unwrap();
    }
    assert_eq!(library.kept_count(), 32);
    assert_eq!(first_mask(&library).as_slice(), fresh.as_slice());
    let wrong: Arc<str> = "{}".into();
    assert_eq!(library.matcher(&wrong).err(), library.matcher(&wrong).err());
}
