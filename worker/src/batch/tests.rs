use proptest::prelude::*;

use super::*;
use crate::plan::KvLayout;
use crate::sampling::SamplingParams;

const LIMITS: Limits = Limits {
    max_slots: 4,
    max_batch_tokens: 96,
    kv_pages: 12,
    max_context: 256,
    vocab_size: 100,
    drafting: Drafting { whole_sizes: false, extra_us: 0 },
    draft_corpus_tokens: 1 << 12,
    window: None,
};

fn admit(slot: u32, tokens: &[u32], max_tokens: u32) -> Admit {
    Admit {
        slot,
        sequence: 100 + u64::from(slot),
        tokens: tokens.to_vec(),
        prompt_tokens: tokens.len() as u32,
        max_tokens,
        min_tokens: 0,
        stop_tokens: vec![7],
        sampling: SamplingParams::greedy(),
        logprobs: None,
        cache_salt: String::new(),
        grammar: None,
        token_bounds: None,
        prompt_logprobs: None,
    }
}

/// Plan 1: a prompt of three tokens in slot 1, prefilled at once, then up to eight steps of decode.
fn first_plan() -> Plan {
    Plan {
        version: 1,
        steps: 8,
        admit: vec![admit(1, &[10, 11, 12], 5)],
        grants: vec![PageGrant { slot: 1, first: 0, pages: vec![3] }],
        prefill: vec![PrefillChunk { slot: 1, start: 0, len: 3 }],
        decode: vec![1],
        ..Plan::default()
    }
}

fn sampled(tokens: &[u32]) -> Vec<Sampled> {
    tokens.iter().map(|&token| Sampled { token, logprob: None, top: Vec::new() }).collect()
}

fn rows(batch: &Batch) -> Vec<(u32, u32, u32, bool)> {
    batch.step().rows.iter().map(|r| (r.slot, r.token, r.position, r.sample)).collect()
}

#[test]
fn a_prompt_is_computed_then_decoded_to_its_bound() {
    let mut batch = Batch::new(LIMITS);
    assert_eq!(batch.boundary(0), Boundary::Idle);
    assert_eq!(batch.boundary(1), Boundary::Apply(1));
    batch.apply(&first_plan()).unwrap();
    assert_eq!(batch.boundary(1), Boundary::Step);
    assert_eq!(rows(&batch), [(1, 10, 0, false), (1, 11, 1, false), (1, 12, 2, true)]);
    assert_eq!(batch.step().segments, [Segment { slot: 1, rows: 0..3 }]);
    assert_eq!(batch.step().samples, [2]);
    for (i, token) in [20, 21, 22, 23].into_iter().enumerate() {
        assert_eq!(batch.complete(&sampled(&[token])), [Verdict::Token(None)]);
        assert_eq!(rows(&batch), [(1, token, 3 + i as u32, true)]);
        assert_eq!(batch.step().number, i as u32 + 1);
    }
    assert_eq!(batch.slot(1).generated(), [20, 21, 22, 23]);
    assert_eq!(batch.complete(&sampled(&[24])), [Verdict::Token(Some(Finish::Length))]);
    assert_eq!(batch.boundary(1), Boundary::Idle);
    assert_eq!(batch.slot(1).prompt(), [10, 11, 12]);
}

#[test]
fn a_plan_takes_over_after_the_first_step_and_one_without_rows_runs_none() {
    let mut batch = Batch::new(LIMITS);
    batch.apply(&first_plan()).unwrap();
    assert_eq!(batch.boundary(3), Boundary::Step, "the first step is always run");
    batch.complete(&sampled(&[20]));
    assert_eq!(batch.boundary(1), Boundary::Step, "no other plan is held by all");
    assert_eq!(batch.boundary(3), Boundary::Apply(2));
    batch.apply(&Plan { version: 2, steps: 1, ..Plan::default() }).unwrap();
    assert_eq!(batch.boundary(2), Boundary::Idle, "plan 2 has no rows");
    assert_eq!(batch.boundary(3), Boundary::Apply(3));
    batch.apply(&Plan { version: 3, steps: 2, decode: vec![1], ..Plan::default() }).unwrap();
    assert_eq!(rows(&batch), [(1, 20, 3, true)]);
    batch.complete(&sampled(&[21]));
    batch.complete(&sampled(&[22]));
    assert_eq!(batch.boundary(3), Boundary::Idle, "plan 3 ran its steps");
}

#[test]
fn stop_tokens_end_a_sequence_once_min_tokens_are_out() {
    let mut batch = Batch::new(LIMITS);
    let mut plan = first_plan();
    plan.admit[0].min_tokens = 2;
    batch.apply(&plan).unwrap();
    assert!(batch.slot(1).is_stop_forbidden(batch.slot(1).generated().len()));
    assert_eq!(batch.complete(&sampled(&[7])), [Verdict::Token(None)], "one of two");
    assert!(batch.slot(1).is_stop_forbidden(batch.slot(1).generated().len()));
    assert_eq!(batch.complete(&sampled(&[20])), [Verdict::Token(None)]);
    assert!(!batch.slot(1).is_stop_forbidden(batch.slot(1).generated().len()));
    assert_eq!(batch.complete(&sampled(&[7])), [Verdict::Token(Some(Finish::Stop))]);
    assert!(batch.step().rows.is_empty());
}

#[test]
fn the_end_of_the_context_ends_a_sequence() {
    let mut batch = Batch::new(Limits { max_context: 5, ..LIMITS });
    let mut plan = first_plan();
    plan.admit[0].max_tokens = 1000;
    batch.apply(&plan).unwrap();
    assert_eq!(batch.complete(&sampled(&[20])), [Verdict::Token(None)]);
    assert_eq!(batch.complete(&sampled(&[21])), [Verdict::Token(Some(Finish::Length))]);
}

/// What `share of the read limit` is calculated from.
#[test]
fn positions_are_those_whose_k_and_v_the_rows_read() {
    for (window, read) in [(None, [5, 6, 7]), (Some(3), [5, 3, 3]), (Some(6), [5, 6, 6])] {
        let mut batch = Batch::new(Limits { window, ..LIMITS });
        let mut plan = first_plan();
        plan.admit = vec![admit(1, &[7; 5], 50)];
        plan.prefill = vec![PrefillChunk { slot: 1, start: 0, len: 5 }];
        batch.apply(&plan).unwrap();
        for positions in read {
            assert_eq!(batch.step().positions, positions, "{window:?}");
            batch.complete(&sampled(&[20]));
        }
    }
}

#[test]
fn a_slot_without_a_page_sits_out_until_it_is_granted_one() {
    let mut batch = Batch::new(LIMITS);
    let prompt = vec![9; PAGE_POSITIONS];
    let mut plan = first_plan();
    plan.admit = vec![admit(1, &prompt, 50)];
    plan.prefill = vec![PrefillChunk { slot: 1, start: 0, len: PAGE_POSITIONS as u32 }];
    batch.apply(&plan).unwrap();
    batch.complete(&sampled(&[20]));
    assert_eq!(batch.boundary(1), Boundary::Idle, "position 64 has no page");
    let grant = vec![PageGrant { slot: 1, first: 1, pages: vec![0] }];
    batch.apply(&Plan { version: 2, steps: 1, grants: grant, decode: vec![1], ..Plan::default() }).unwrap();
    assert_eq!(rows(&batch), [(1, 20, 64, true)]);
    assert_eq!(batch.slot(1).pages(), [3, 0]);
}

#[test]
fn chunks_and_decodes_mix_in_slot_order() {
    let mut batch = Batch::new(LIMITS);
    batch.apply(&first_plan()).unwrap();
    batch.complete(&sampled(&[20]));
    let plan = Plan {
        version: 2,
        steps: 3,
        admit: vec![admit(0, &[30, 31, 32, 33], 5), admit(2, &[40], 5)],
        grants: vec![PageGrant { slot: 2, first: 0, pages: vec![4] }, PageGrant { slot: 0, first: 0, pages: vec![5] }],
        prefill: vec![PrefillChunk { slot: 2, start: 0, len: 1 }, PrefillChunk { slot: 0, start: 0, len: 2 }],
        decode: vec![2, 1],
        ..Plan::default()
    };
    batch.apply(&plan).unwrap();
    assert_eq!(rows(&batch), [(0, 30, 0, false), (0, 31, 1, false), (1, 20, 3, true), (2, 40, 0, true)]);
    assert_eq!(batch.step().samples, [2, 3]);
    assert_eq!(batch.step().segments.len(), 3);
    batch.complete(&sampled(&[21, 41]));
    assert_eq!(rows(&batch), [(1, 21, 4, true), (2, 41, 1, true)], "slot 0 waits for its next chunk");
}

#[test]
fn a_preempted_sequence_comes_back_with_what_it_generated() {
    let mut batch = Batch::new(LIMITS);
    batch.apply(&first_plan()).unwrap();
    batch.complete(&sampled(&[20]));
    batch.complete(&sampled(&[21]));
    let mut back = admit(3, &[10, 11, 12, 20, 21], 5);
    (back.prompt_tokens, back.sequence) = (3, 101);
    let plan = Plan {
        version: 2,
        steps: 4,
        release: vec![1],
        admit: vec![back],
        grants: vec![PageGrant { slot: 3, first: 0, pages: vec![3] }],
        prefill: vec![PrefillChunk { slot: 3, start: 0, len: 5 }],
        decode: vec![3],
        ..Plan::default()
    };
    batch.apply(&plan).unwrap();
    assert_eq!(batch.step().rows.last().map(|r| (r.token, r.position, r.sample)), Some((21, 4, true)));
    assert_eq!(batch.complete(&sampled(&[22])), [Verdict::Token(None)]);
    assert_eq!(batch.slot(3).generated(), [20, 21, 22]);
    batch.complete(&sampled(&[23]));
    assert_eq!(batch.complete(&sampled(&[24])), [Verdict::Token(Some(Finish::Length))]);
    assert!(!batch.slot(1).is_busy());
}

#[test]
fn sequences_that_begin_alike_share_full_pages() {
    let mut batch = Batch::new(LIMITS);
    let (prompt, len) = (vec![9; PAGE_POSITIONS + 1], PAGE_POSITIONS as u32);
    let mut begin = |version, slot, pages: Vec<u32>, start, release| {
        let plan = Plan {
            version,
            steps: 1,
            release,
            admit: vec![admit(slot, &prompt, 50)],
            grants: vec![PageGrant { slot, first: 0, pages: pages.clone() }],
            prefill: vec![PrefillChunk { slot, start, len: len + 1 - start }],
            ..Plan::default()
        };
        batch.apply(&plan).unwrap();
        assert_eq!(batch.step().rows.first().map(|row| (row.slot, row.position)), Some((slot, start)));
        assert_eq!((batch.step().rows.len() as u32, batch.slot(slot).pages()), (len + 1 - start, &pages[..]));
        batch.complete(&sampled(&[20]));
    };
    begin(1, 1, vec![3, 0], 0, vec![]);
    // Beside the first.
    begin(2, 2, vec![3, 5], len, vec![]);
    // On its own, and after all others.
    begin(3, 3, vec![6, 7], 0, vec![]);
    begin(4, 0, vec![3, 4], len, vec![1, 2]);
    let grant = |slot, first, page| vec![PageGrant { slot, first, pages: vec![page] }];
    // What was computed twice is kept once: page 6 is free then.
    let plan = |version, grants| Plan { version, steps: 1, grants, ..Plan::default() };
    batch.apply(&plan(5, grant(3, 0, 3))).unwrap();
    assert_eq!(batch.slot(3).pages(), [3, 7]);
    let next = Plan { decode: vec![3], ..plan(6, grant(3, 2, 6)) };
    batch.apply(&next).unwrap();
    assert_eq!(batch.slot(3).pages(), [3, 7, 6]);
}

/// The page that a sequence did not fill, and how far it has.
#[test]
fn a_sequence_goes_on_in_the_last_page_of_one_that_left() {
    let mut batch = Batch::new(LIMITS);
    let prompt: Vec<u32> = (0..20).collect();
    let plan = |version, start, len, release| Plan {
        version,
        steps: 1,
        release,
        admit: vec![admit(1, &prompt[..(start + len) as usize], 50)],
        grants: vec![PageGrant { slot: 1, first: 0, pages: vec![3] }],
        prefill: vec![PrefillChunk { slot: 1, start, len }],
        ..Plan::default()
    };
    batch.apply(&plan(1, 0, 10, vec![])).unwrap();
    batch.complete(&sampled(&[10]));
    let mut too_far = Batch::new(LIMITS);
    too_far.apply(&plan(1, 0, 10, vec![])).unwrap();
    too_far.complete(&sampled(&[10]));
    let refused = too_far.apply(&plan(2, 11, 4, vec![1])).unwrap_err().to_string();
    assert!(refused.ends_with("it skips 11 positions of page 3, of which 10 were filled"), "{refused}");
    batch.apply(&plan(2, 10, 5, vec![1])).unwrap();
    assert_eq!(batch.step().rows.iter().map(|row| row.position).collect::<Vec<_>>(), [10, 11, 12, 13, 14]);
    batch.complete(&sampled(&[15]));
    // The last row of a prompt is filled even if no token may follow it.
    batch.apply(&plan(3, 15, 4, vec![1])).unwrap();
    assert_eq!(batch.complete(&sampled(&[Sampled::NOTHING])), [Verdict::Nothing]);
    batch.apply(&plan(4, 19, 1, vec![1])).unwrap();
}

/// The next token of a text that repeats itself, but for a token now and then.
fn next(tokens: &[u32]) -> u32 {
    let skips = u32::from(tokens.len().is_multiple_of(41));
    (tokens.last().unwrap() + 1 + skips) % 13
}

/// Runs a request in steps of at most `drafts` drafted tokens, beside another: its tokens, and how many steps it took.
fn run_drafting(drafts: u32, max_tokens: u32, min_tokens: u32) -> (Vec<u32>, usize) {
    let mut batch = Batch::new(LIMITS);
    let mut plan = first_plan();
    plan.admit = vec![admit(1, &[10, 11, 12], max_tokens), admit(3, &[3], 200)];
    plan.admit[0].min_tokens = min_tokens;
    plan.grants = vec![
        PageGrant { slot: 1, first: 0, pages: vec![3, 1, 2] },
        PageGrant { slot: 3, first: 0, pages: vec![5, 6, 7] },
    ];
    plan.prefill.push(PrefillChunk { slot: 3, start: 0, len: 1 });
    (plan.decode, plan.steps) = (vec![1, 3], 500);
    let times = [(1, 1000), (100, 10_900)].map(|(rows, us)| StepTime { rows, us });
    plan.drafts = Drafts { each: drafts, rows: 2 * drafts, times: times.to_vec() };
    batch.apply(&plan).unwrap();
    let mut steps = 0;
    while batch.boundary(1) == Boundary::Step {
        let inputs: Vec<u32> = (batch.step().samples.iter())
            .map(|&row| {
                let input = batch.row_input(row);
                let tokens = [input.prompt, input.generated].concat();
                assert_eq!(input.position as usize, tokens.len());
                assert_eq!(
                    input.suppress.is_empty(),
                    input.generated.len() >= batch.slot(batch.step().rows[row].slot).min_tokens()
                );
                match next(&tokens) {
                    7 if !input.suppress.is_empty() => 8,
                    token => token,
                }
            })
            .collect();
        steps += usize::from(batch.step().segments.iter().any(|segment| segment.slot == 1));
        assert!(batch.step().rows.len() <= LIMITS.max_batch_tokens && inputs.len() <= LIMITS.max_slots);
        batch.complete(&sampled(&inputs));
    }
    (batch.slot(1).generated().to_vec(), steps)
}

#[test]
fn drafts_change_no_token_but_the_number_of_steps() {
    for (max_tokens, min_tokens) in [(150, 150), (150, 0), (7, 7), (1, 0), (400, 400)] {
        let (plain, steps) = run_drafting(0, max_tokens, min_tokens);
        assert_eq!(plain.len(), steps);
        for drafts in [1, 2, 7, 60] {
            let (tokens, fewer) = run_drafting(drafts, max_tokens, min_tokens);
            assert_eq!(tokens, plain, "{drafts} drafts, {max_tokens} tokens, at least {min_tokens}");
            assert!(fewer <= steps && (plain.len() < 100 || 3 * fewer < 2 * steps), "{fewer} steps for {steps}");
        }
    }
}

/// An answer without a repetition, to the same prompt again and again.
#[test]
fn an_answer_that_was_given_before_is_drafted_for_requests_of_its_salt() {
    let next = |tokens: &[u32]| tokens.len() as u32 * 7 % 41;
    let mut batch = Batch::new(LIMITS);
    let mut steps = Vec::new();
    for (version, salt) in (1..).zip(["", "", "mine", "mine", ""]) {
        let mut plan = Plan { version, steps: 100, decode: vec![1], ..Plan::default() };
        plan.release = if version > 1 { vec![1] } else { vec![] };
        plan.admit = vec![Admit { cache_salt: salt.into(), ..admit(1, &[10, 11, 12, 1, 2], 33) }];
        plan.grants = vec![PageGrant { slot: 1, first: 0, pages: vec![0] }];
        plan.prefill = vec![PrefillChunk { slot: 1, start: 0, len: 5 }];
        let times = [(1, 1000), (100, 1900)].map(|(rows, us)| StepTime { rows, us });
        plan.drafts = Drafts { each: 7, rows: 7, times: times.to_vec() };
        batch.apply(&plan).unwrap();
        let mut of_plan = 0;
        while batch.boundary(version) == Boundary::Step {
            let of = |input: RowInput<'_>| next(&[input.prompt, input.generated].concat());
            let inputs: Vec<u32> = batch.step().samples.iter().map(|&row| of(batch.row_input(row))).collect();
            batch.complete(&sampled(&inputs));
            of_plan += 1;
        }
        assert_eq!(batch.slot(1).generated().len(), 33);
        steps.push(of_plan);
    }
    assert_eq!((steps[0], steps[2]), (33, 33), "nobody of the salt has said it before");
    assert!(steps.iter().skip(1).step_by(2).all(|steps| *steps < 12) && steps[4] < 12, "{steps:?}");
}

#[test]
fn every_broken_rule_is_named() {
    type Edit = fn(&mut Plan);
    let edits: [(&str, Edit); 31] = [
        ("plan 4 came where plan 2 follows", |p| p.version = 4),
        ("plan 1 came where plan 2 follows", |p| p.version = 1),
        ("plan 2: steps is 0", |p| p.steps = 0),
        ("slot 4 of 4", |p| p.decode = vec![4]),
        ("slot 9 of 4", |p| p.release = vec![9]),
        ("slot 0 is released, but it is free", |p| p.release = vec![0]),
        ("slot 1 is released, but it is free", |p| (p.release, p.decode) = (vec![1, 1], vec![])),
        ("slot 0 is granted pages, but it is free", |p| {
            p.grants = vec![PageGrant { slot: 0, first: 0, pages: vec![] }]
        }),
        ("slot 0 is prefilled, but it is free", |p| p.prefill = vec![PrefillChunk { slot: 0, start: 0, len: 1 }]),
        ("slot 0 is decoded, but it is free", |p| p.decode = vec![0]),
        ("slot 1, which sequence 101 holds", |p| p.admit = vec![admit(1, &[1], 1)]),
        ("already in slot 1", |p| p.admit = vec![Admit { sequence: 101, ..admit(2, &[1], 1) }]),
        ("prompt_tokens is 0, of 1 tokens", |p| p.admit = vec![Admit { prompt_tokens: 0, ..admit(2, &[1], 1) }]),
        ("prompt_tokens is 2, of 1 tokens", |p| p.admit = vec![Admit { prompt_tokens: 2, ..admit(2, &[1], 1) }]),
        ("256 tokens leave no room in a context of 256", |p| p.admit = vec![admit(2, &[1; 256], 1)]),
        ("1 of at most 1 tokens", |p| p.admit = vec![Admit { prompt_tokens: 1, ..admit(2, &[1, 2], 1) }]),
        ("0 of at most 0 tokens", |p| p.admit = vec![admit(2, &[1], 0)]),
        ("token 100 is not in a vocabulary of 100", |p| p.admit = vec![admit(2, &[100], 1)]),
        ("page 12 of 12", |p| p.grants = vec![PageGrant { slot: 1, first: 0, pages: vec![12] }]),
        ("slot 1 writes page 3, which other slots hold", |p| {
            p.grants = vec![PageGrant { slot: 1, first: 1, pages: vec![3] }]
        }),
        ("from number 2 on: it has 1", |p| p.grants = vec![PageGrant { slot: 1, first: 2, pages: vec![4] }]),
        ("page 4 is not one as full as page 3", |p| p.grants = vec![PageGrant { slot: 1, first: 0, pages: vec![4] }]),
        ("slot 2 writes page 3, which other slots hold", |p| {
            p.admit = vec![admit(2, &[1], 1)];
            p.grants = vec![PageGrant { slot: 2, first: 0, pages: vec![3] }];
            (p.prefill, p.decode) = (vec![PrefillChunk { slot: 2, start: 0, len: 1 }], vec![]);
        }),
        ("slot 2, chunk of 1 from position 64: it skips 64 positions of page 3, of which 3 were filled", |p| {
            p.admit = vec![admit(2, &[1; 65], 1)];
            p.grants = vec![PageGrant { slot: 2, first: 0, pages: vec![3, 4] }];
            p.prefill = vec![PrefillChunk { slot: 2, start: 64, len: 1 }];
        }),
        ("slot 2, chunk of 1 from position 63: it skips 63 positions of page 4, of which 0 were filled", |p| {
            p.admit = vec![admit(2, &[1; 65], 1)];
            p.grants = vec![PageGrant { slot: 2, first: 0, pages: vec![4, 5] }];
            p.prefill = vec![PrefillChunk { slot: 2, start: 63, len: 1 }];
        }),
        ("more pages than a context of 256", |p| {
            p.grants = vec![PageGrant { slot: 1, first: 0, pages: vec![3, 0, 1, 2, 4] }]
        }),
        ("3 positions have been computed", |p| p.prefill = vec![PrefillChunk { slot: 1, start: 0, len: 1 }]),
        ("3 tokens were given", |p| p.prefill = vec![PrefillChunk { slot: 1, start: 3, len: u32::MAX }]),
        ("it is empty", |p| p.prefill = vec![PrefillChunk { slot: 1, start: 3, len: 0 }]),
        ("named twice", |p| p.decode = vec![1, 1]),
        ("only 0 of its 1 tokens", |p| (p.admit, p.decode) = (vec![admit(2, &[1], 1)], vec![2])),
    ];
    for (says, edit) in edits {
        let mut batch = Batch::new(LIMITS);
        batch.apply(&first_plan()).unwrap();
        batch.complete(&sampled(&[20]));
        let mut plan = Plan { version: 2, steps: 1, decode: vec![1], ..Plan::default() };
        edit(&mut plan);
        let fault = batch.apply(&plan).unwrap_err().to_string();
        assert!(fault.contains(says), "{fault:?} does not say {says:?}");
    }
    let prompt = |len| Plan {
        version: 1,
        steps: 1,
        admit: vec![admit(0, &vec![1; 200], 1)],
        grants: vec![PageGrant { slot: 0, first: 0, pages: vec![0, 1] }],
        prefill: vec![PrefillChunk { slot: 0, start: 0, len }],
        ..Plan::default()
    };
    let fault = |plan: &Plan| Batch::new(LIMITS).apply(plan).unwrap_err().to_string();
    assert!(fault(&prompt(97)).contains("97 rows, more than 96"));
    assert!(fault(&prompt(129)).contains("the slot has 2 pages of 64 positions"));
    let mut twice = prompt(8);
    twice.prefill.push(PrefillChunk { slot: 0, start: 8, len: 8 });
    assert!(fault(&twice).contains("has a chunk in this plan already"));
}

/// What a scheduler knows of a slot; makes random plans that keep every rule.
#[derive(Debug, Clone)]
struct Known {
    sequence: u64,
    tokens: Vec<u32>,
    prompt: usize,
    admitted: usize,
    computed: usize,
    pages: Vec<u32>,
}

struct Scheduler {
    rng: u64,
    free_pages: Vec<u32>,
    slots: Vec<Option<Known>>,
    preempted: Vec<Known>,
    sequences: u64,
    version: u64,
}

impl Scheduler {
    fn new(seed: u64) -> Self {
        let free_pages = (0..LIMITS.kv_pages as u32).collect();
        Self { rng: seed, free_pages, slots: vec![None; LIMITS.max_slots], preempted: vec![], sequences: 0, version: 0 }
    }

    /// SplitMix64, below `n`.
    fn below(&mut self, n: usize) -> usize {
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.rng;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn plan(&mut self) -> Plan {
        self.version += 1;
        let mut plan = Plan { version: self.version, steps: 1 + self.below(4) as u32, ..Plan::default() };
        let mut room = LIMITS.max_batch_tokens - LIMITS.max_slots;
        for slot in 0..LIMITS.max_slots as u32 {
            if self.slots[slot as usize].is_some() && self.below(8) == 0 {
                self.release(slot, &mut plan);
            }
            if self.slots[slot as usize].is_none() && self.below(2) == 0 {
                self.admit(slot, &mut plan);
            }
            if self.slots[slot as usize].is_some() {
                self.feed(slot, &mut room, &mut plan);
            }
        }
        plan
    }

    fn release(&mut self, slot: u32, plan: &mut Plan) {
        let known = self.slots[slot as usize].take().unwrap();
        self.free_pages.extend(&known.pages);
        plan.release.push(slot);
        if self.below(2) == 0 {
            self.preempted.push(known);
        }
    }

    fn admit(&mut self, slot: u32, plan: &mut Plan) {
        let known = match self.preempted.pop() {
            Some(known) if known.tokens.len() - known.prompt < 20 && known.tokens.len() < LIMITS.max_context => known,
            _ => {
                self.sequences += 1;
                let tokens: Vec<u32> = (0..1 + self.below(150)).map(|_| self.below(LIMITS.vocab_size) as u32).collect();
                let (prompt, sequence) = (tokens.len(), self.sequences);
                Known { sequence, tokens, prompt, admitted: 0, computed: 0, pages: vec![] }
            }
        };
        let known = Known { admitted: known.tokens.len(), computed: 0, pages: vec![], ..known };
        let mut admit = admit(slot, &known.tokens, 20);
        (admit.sequence, admit.prompt_tokens) = (known.sequence, known.prompt as u32);
        plan.admit.push(admit);
        self.slots[slot as usize] = Some(known);
    }

    fn feed(&mut self, slot: u32, room: &mut usize, plan: &mut Plan) {
        let wanted = 1 + self.below(3);
        let known = self.slots[slot as usize].as_mut().unwrap();
        let most = KvLayout::pages_for(LIMITS.max_context) - known.pages.len();
        let pages = self.free_pages.split_off(self.free_pages.len() - wanted.min(most).min(self.free_pages.len()));
        let first = known.pages.len() as u32;
        known.pages.extend(&pages);
        plan.grants.push(PageGrant { slot, first, pages });
        let missing = known.admitted.saturating_sub(known.computed);
        let paged = known.pages.len() * PAGE_POSITIONS - known.computed.min(known.pages.len() * PAGE_POSITIONS);
        let most = missing.min(*room).min(paged);
        let start = known.computed;
        if missing > 0 {
            if most == 0 {
                return;
            }
            let len = 1 + self.below(most);
            *room -= len;
            plan.prefill.push(PrefillChunk { slot, start: start as u32, len: len as u32 });
            if len < missing {
                return;
            }
        }
        if self.below(4) > 0 {
            plan.decode.push(slot);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    // Two ranks over the same plans and tokens stay equal and agree with what the scheduler follows from outcomes; rows
    // are in order, bounded, paged by pages of the slot alone, and computed exactly once.
    #[test]
    fn batches_fed_alike_stay_equal_and_keep_their_invariants(seed in any::<u64>()) {
        let mut scheduler = Scheduler::new(seed);
        let mut ranks = [Batch::new(LIMITS), Batch::new(LIMITS)];
        for _ in 0..40 {
            let plan = scheduler.plan();
            for rank in &mut ranks {
                rank.apply(&plan).unwrap();
                let last = rank.slots.iter().rposition(Slot::is_busy);
                prop_assert_eq!(rank.in_use, last.map_or(0, |last| last + 1));
            }
            let cut_short = scheduler.below(3) == 0;
            while ranks[0].boundary(scheduler.version) == Boundary::Step {
                prop_assert_eq!(&ranks[0], &ranks[1]);
                let step = ranks[0].step().clone();
                check_step(&ranks[0], &mut scheduler)?;
                let tokens: Vec<u32> = step.samples.iter().map(|_| scheduler.below(LIMITS.vocab_size) as u32).collect();
                let finished: Vec<_> = ranks.iter_mut().map(|rank| rank.complete(&sampled(&tokens)).to_vec()).collect();
                prop_assert_eq!(&finished[0], &finished[1]);
                for (&row, &token) in step.samples.iter().zip(&tokens) {
                    let known = scheduler.slots[step.rows[row].slot as usize].as_mut().unwrap();
                    known.tokens.push(token);
                    prop_assert_eq!(ranks[0].slot(step.rows[row].slot).tokens(), &known.tokens[..]);
                }
                for ((&row, &token), finish) in step.samples.iter().zip(&tokens).zip(&finished[0]) {
                    let known = scheduler.slots[step.rows[row].slot as usize].as_ref().unwrap();
                    let length = known.tokens.len() - known.prompt == 20 || known.tokens.len() == LIMITS.max_context;
                    let expected = if token == 7 { Some(Finish::Stop) } else { length.then_some(Finish::Length) };
                    prop_assert_eq!(*finish, Verdict::Token(expected));
                }
                if cut_short {
                    break;
                }
            }
        }
    }
}

fn check_step(batch: &Batch, scheduler: &mut Scheduler) -> Result<(), TestCaseError> {
    let step = batch.step();
    prop_assert!(!step.rows.is_empty() && step.rows.len() <= LIMITS.max_batch_tokens);
    prop_assert!(step.rows.is_sorted_by_key(|r| (r.slot, r.position)));
    let covered: usize = step.segments.iter().map(|s| s.rows.len()).sum();
    prop_assert_eq!(covered, step.rows.len());
    for segment in &step.segments {
        let known = scheduler.slots[segment.slot as usize].as_mut().unwrap();
        for row in &step.rows[segment.rows.clone()] {
            prop_assert_eq!((row.slot, row.position as usize), (segment.slot, known.computed));
            prop_assert_eq!(row.token, known.tokens[known.computed]);
            known.computed += 1;
            prop_assert_eq!(row.sample, known.computed == known.tokens.len());
        }
        prop_assert!(known.computed <= known.pages.len() * PAGE_POSITIONS);
        prop_assert_eq!(batch.slot(segment.slot).pages(), &known.pages[..]);
    }
    Ok(())
}
