//! Grammars followed over a vocabulary of bytes, pairs of letters and two control tokens.

use super::*;
use crate::batch::{Admit, Drafting, Drafts, Limits, PageGrant, Plan, PrefillChunk, StepTime, Verdict};
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
    let factory = threads::parser_factory(Some(&vocabulary), vocab_size);
    let mut follower = Follower::new(sequence.grammar.as_deref().expect("it is held to one"));
    let prompt = sequence.prompt_tokens as usize;
    let mask = |position: usize| {
        let newest = if position > prompt { sequence.tokens[position - 1..position].to_vec() } else { Vec::new() };
        let ask = Ask { newest, drafts: Vec::new(), position, stops: sequence.stop_tokens.clone() };
        let masks = follower.answer(&ask, &factory, vocab_size.div_ceil(32));
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
        min_tokens: 0,
        stop_tokens: vec![END, 257],
        sampling: SamplingParams::greedy(),
        logprobs: None,
        cache_salt: String::new(),
        grammar: Some(grammar.into()),
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
