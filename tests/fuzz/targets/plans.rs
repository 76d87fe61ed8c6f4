//! Plans, as a worker gets them from its server.

use looplane_proto::worker::v1;
use looplane_worker::{
    batch::{Batch, Boundary, Drafting, Limits, Verdict},
    convert,
    sampling::Sampled,
};
use prost::Message;

use crate::pick::Pick;

const LIMITS: Limits = Limits {
    max_slots: 3,
    max_batch_tokens: 70,
    kv_pages: 6,
    max_context: 200,
    vocab_size: 50,
    drafting: Drafting { whole_sizes: true, extra_us: 20 },
    draft_corpus_tokens: 256,
    window: None,
};
/// Steps that are run of one plan.
const MOST_STEPS: usize = 8;

/// Plans, each behind a byte with its length; their numbers are put right. What a plan schedules is within the bounds
/// of the batch, and every row that samples has a verdict. A plan that breaks a rule is named.
pub fn plans(bytes: &[u8]) {
    let mut batch = Batch::new(LIMITS);
    let mut pick = Pick(bytes);
    for version in 1.. {
        if pick.0.is_empty() {
            return;
        }
        let length = usize::from(pick.byte()).min(pick.0.len());
        let (message, rest) = pick.0.split_at(length);
        pick = Pick(rest);
        let Ok(plan) = v1::Plan::decode(message) else { return };
        let applied = convert::plan(v1::Plan { version, ..plan }).and_then(|plan| batch.apply(&plan));
        if let Err(fault) = applied {
            return assert!(fault.to_string().contains(&format!("plan {version}")), "{fault}");
        }
        for drawn in 0..MOST_STEPS as u32 {
            if batch.boundary(version) != Boundary::Step {
                break;
            }
            step(&mut batch, drawn);
        }
    }
}

fn step(batch: &mut Batch, drawn: u32) {
    let step = batch.step();
    assert!(step.rows.len() <= LIMITS.max_batch_tokens && step.samples.len() <= LIMITS.max_batch_tokens, "{step:?}");
    for row in &step.rows {
        assert!((row.position as usize) < LIMITS.max_context && (row.token as usize) < LIMITS.vocab_size, "{row:?}");
        let page = batch.slot(row.slot).pages()[row.position as usize / looplane_worker::plan::PAGE_POSITIONS];
        assert!((page as usize) < LIMITS.kv_pages, "{row:?} on page {page}");
    }
    let samples: Vec<Sampled> = step
        .samples
        .iter()
        .map(|row| {
            let input = batch.row_input(*row);
            let token = match (input.prompt.len() + input.generated.len()) as u32 + drawn {
                sum if sum % 11 == 0 => Sampled::LATE,
                sum if sum % 23 == 0 => Sampled::NOTHING,
                sum => sum % 7,
            };
            Sampled::none(batch.given(*row).unwrap_or(token))
        })
        .collect();
    let verdicts = batch.complete(&samples);
    assert_eq!(verdicts.len(), samples.len());
    for (verdict, sampled) in verdicts.iter().zip(&samples) {
        assert!(!matches!(verdict, Verdict::Token(_)) || (sampled.token as usize) < LIMITS.vocab_size);
    }
}
