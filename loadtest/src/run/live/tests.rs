use std::sync::Arc;

use super::*;
use crate::client::record::{Failure, RequestRecord};
use crate::load::conduct::Conduct;
use crate::load::pacing::Extent;

/// A meter's clock and streams, by hand.
fn answer(meter: &Arc<Meter>, chunks_ms: &[u64], failure: Option<Failure>) {
    let mut record = RequestRecord::new(0, 0, 0);
    record.watch = Some(meter.clone());
    meter.begin();
    for ms in chunks_ms {
        record.add_chunk(ms * 1_000_000).expect("few chunks");
    }
    record.completion_tokens = Some(2 * chunks_ms.len() as u64);
    record.failure = failure;
    meter.end(&record);
}

#[test]
fn requests_whose_client_misbehaved_are_over_too_but_neither_ok_nor_failed() {
    let look = look_after(1, |_, meter| {
        answer(meter, &[1], None);
        for failure in [None, Some(Failure::Cancelled), Some(Failure::Interrupted)] {
            let mut record = RequestRecord::new(0, 0, 0);
            (record.conduct, record.failure) = (Conduct::HangUp(Duration::from_secs(1)), failure);
            meter.begin();
            meter.end(&record);
        }
    });
    let requests = Extent::Requests(3);
    assert_eq!((look.share(requests), look.progress(requests).as_str()), (1.0, "3 of 3 requests, 0 s"));
    assert!(look.counts().starts_with("1 ok, 0 failed, 0 in flight; "), "{}", look.counts());
}

fn look_after(looks: u32, each: impl Fn(u32, &Arc<Meter>)) -> Look {
    let (meter, mut recent) = (Arc::new(Meter::default()), Recent { looks: VecDeque::new() });
    let mut last = None;
    for look in 1..=looks {
        each(look, &meter);
        last = Some(recent.look(&meter, f64::from(look) / f64::from(LOOKS_A_SECOND)));
    }
    last.expect("a look")
}

#[test]
fn rates_and_times_are_of_the_last_five_seconds() {
    // Ten seconds of slow answers, then five of fast ones, one of each at every look.
    let look = look_after(75, |look, meter| {
        answer(meter, if look <= 50 { &[500, 900] } else { &[100, 120] }, None);
    });
    assert_eq!(look.ended, (75, 0));
    assert!((look.answers_per_s - 5.0).abs() < 1e-9, "{}", look.answers_per_s);
    assert!((look.tokens_per_s - 20.0).abs() < 1e-9, "two tokens a chunk: {}", look.tokens_per_s);
    // The ends of the coarse histogram's classes that hold 100 and 20 ms.
    assert_eq!(look.times(), "TTFT p50 100.1 p99 100.1 ms, ITL p50 20.1 p99 20.1 ms");
}

#[test]
fn a_run_that_has_just_begun_is_counted_from_its_start() {
    let look = look_after(2, |_, meter| answer(meter, &[10, 20, 30], None));
    assert!((look.answers_per_s - 5.0).abs() < 1e-9, "two answers in 0.4 s: {}", look.answers_per_s);
    let nothing = look_after(1, |_, _| ());
    assert_eq!(nothing.times(), "TTFT -, ITL -");
    assert_eq!(nothing.counts(), "0 ok, 0 failed, 0 in flight; 0.0 requests/s, 0.0 tokens/s");
}

#[test]
fn progress_is_of_requests_or_of_time_and_says_what_is_waited_for() {
    let look = look_after(10, |look, meter| {
        if look <= 4 {
            answer(meter, &[1], (look == 1).then_some(Failure::Truncated));
        }
        if look == 5 {
            meter.begin();
        }
    });
    let requests = Extent::Requests(16);
    assert_eq!((look.share(requests), look.progress(requests).as_str()), (0.25, "4 of 16 requests, 2 s"));
    let seconds = Extent::Duration(Duration::from_secs(8));
    assert_eq!((look.share(seconds), look.progress(seconds).as_str()), (0.25, "2 of 8 s"));
    let over = Extent::Duration(Duration::from_secs(1));
    assert_eq!((look.share(over), look.progress(over).as_str()), (1.0, "2 s, waiting for the last 1"));
    assert!(look.text(requests, "; ").starts_with("4 of 16 requests, 2 s; 3 ok, 1 failed, 1 in flight; "));
}

#[test]
fn the_block_fits_a_terminal_of_80_columns() {
    let look = look_after(25, |_, meter| (0..200).for_each(|_| answer(meter, &[98_765, 109_876], None)));
    let block = look.text(Extent::Requests(100_000), "\n  ");
    let bar = "run 10 of 10 [".len() + 24 + "] ".len();
    for (line, indent) in block.lines().zip([bar, 0, 0]) {
        assert!(indent + line.chars().count() <= 80, "{line}");
    }
    assert_eq!(block.lines().count(), 3);
}
