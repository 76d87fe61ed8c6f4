//! The exchange under delays, at the wrap of its epochs, and with ranks that never come.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use super::waiting::reached;
use super::*;
use crate::cpu::team::Placement;
use crate::plan::tree::tree_sum;

const LIMIT: Duration = Duration::from_secs(30);

fn shape(ranks: usize, width: usize) -> Shape {
    Shape { ranks, width, max_rows: 3, max_words: 8, domain: 7 }
}

fn place(step: u64) -> Place {
    Place { step, layer: Some(5), what: "test sum" }
}

fn group(shape: Shape, limit: Duration) -> Vec<Fabric> {
    let mut ranks: Vec<_> = (0..shape.ranks).map(|rank| Fabric::new(shape, rank, limit, true).unwrap()).collect();
    let handles: Vec<_> = ranks.iter().map(|rank| rank.handle().to_owned()).collect();
    ranks.iter_mut().for_each(|rank| rank.join(&handles).unwrap());
    ranks
}

/// What rank `rank` contributes in round `round`: values whose sum shows the order.
fn value(rank: usize, round: usize, place: usize) -> f32 {
    let mixed = (rank * 7919 + round * 104_729 + place * 31) % 1009;
    if mixed.is_multiple_of(3) { mixed as f32 * 1e5 } else { mixed as f32 / 977.0 }
}

/// Sleeps or yields at moments that a counter picks.
pub(in crate::cpu) fn delays(seed: u64) -> Hook {
    let counter = AtomicU64::new(seed);
    Arc::new(move |_| {
        let mixed =
            counter.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 56;
        match mixed {
            0..2 => std::thread::sleep(Duration::from_micros(300)),
            2..40 => std::thread::yield_now(),
            _ => {}
        }
    })
}

#[test]
fn sums_are_the_trees_on_every_rank_across_the_wrap_and_under_delays() {
    for (ranks, threads) in [(1, 2), (2, 2), (4, 1), (16, 1)] {
        // More rounds than epochs before the wrap, for one group; it is what makes `reached` and the parity work for.
        let rounds = if ranks == 4 { 1200 } else { 40 };
        let shape = shape(ranks, 150);
        std::thread::scope(|scope| {
            for mut fabric in group(shape, LIMIT) {
                scope.spawn(move || {
                    fabric.hook = Some(delays(fabric.rank as u64 + 1));
                    let team = Team::new(threads, Placement::Floating, true).unwrap();
                    for round in 0..rounds {
                        let rank = fabric.rank;
                        let produce = |slice: usize, out: &mut [f32]| {
                            out.iter_mut().enumerate().for_each(|(i, out)| *out = value(rank, round, slice * 192 + i));
                        };
                        let consume = |slice: usize, of_ranks: &[&[f32]]| {
                            for i in 0..shape.slice_len() {
                                let sum = |values: Vec<f32>| tree_sum(&values).to_bits();
                                let got = sum(of_ranks.iter().map(|of_rank| of_rank[i]).collect());
                                let expected =
                                    sum((0..ranks).map(|rank| value(rank, round, slice * 192 + i)).collect());
                                assert_eq!(got, expected, "round {round} slice {slice} value {i}");
                            }
                        };
                        fabric.exchange(&team, place(round as u64), &Ahead::nothing(), produce, consume).unwrap();
                        if round % 3 == 0 {
                            let words = fabric.all_gather(&[rank as u32, round as u32], place(round as u64)).unwrap();
                            let expected = (0..ranks as u32).flat_map(|rank| [rank, round as u32]);
                            assert!(words.iter().copied().eq(expected));
                        }
                    }
                    assert_eq!(fabric.epoch, START.wrapping_add(rounds as u32));
                });
            }
        });
    }
}

#[test]
fn order_survives_the_wrap() {
    for epoch in [0, 1, u32::MAX, u32::MAX - 1000, 1 << 31] {
        assert!(reached(epoch, epoch) && reached(epoch.wrapping_add(1), epoch));
        assert!(!reached(epoch.wrapping_sub(1), epoch) && !reached(epoch.wrapping_sub(1000), epoch));
        assert_ne!(epoch % 2, epoch.wrapping_add(1) % 2);
    }
}

#[test]
fn a_rank_that_does_not_come_is_reported() {
    let mut ranks = group(shape(2, 64), Duration::from_millis(50));
    let team = Team::new(2, Placement::Floating, true).unwrap();
    let fault = ranks[0].exchange(&team, place(9), &Ahead::nothing(), |_, _| (), |_, _| ()).unwrap_err();
    let Fault::WaitLimit { rank: 0, peer: 1, step: 9, phase, expected, seen, waited_ms } = fault else {
        panic!("{fault}");
    };
    assert_eq!((phase.as_str(), expected, seen), ("layer 5 test sum", u64::from(START) + 1, u64::from(START)));
    assert!(waited_ms >= 50);
    assert!(matches!(ranks[0].all_gather(&[1], place(9)), Err(Fault::WaitLimit { peer: 1, .. })));
}

#[test]
fn other_groups_are_refused() {
    let make = |shape, rank| Fabric::new(shape, rank, LIMIT, true).unwrap();
    let (mut first, second) = (make(shape(2, 64), 0), make(shape(2, 64), 1));
    let joined = |fabric: &mut Fabric, peer: &str| {
        let handles = [fabric.handle().to_owned(), peer.to_owned()];
        fabric.join(&handles).map_err(|fault| fault.to_string())
    };
    joined(&mut first, second.handle()).unwrap();
    let other_domain = make(Shape { domain: 8, ..shape(2, 64) }, 1);
    assert!(joined(&mut first, other_domain.handle()).unwrap_err().contains("is not the exchange memory of rank 1"));
    let other_width = make(shape(2, 640), 1);
    assert!(joined(&mut first, other_width.handle()).unwrap_err().contains("bytes, not"));
    let wrong_rank = make(shape(2, 64), 0);
    assert!(joined(&mut first, wrong_rank.handle()).unwrap_err().contains("is not the exchange memory of rank 1"));
    assert!(joined(&mut first, "/nowhere").unwrap_err().contains("/nowhere"));
    assert!(first.join(&[]).unwrap_err().to_string().contains("0 handles for 2 ranks"));
}

/// Rank 0 dawdles before it reads the first epoch; rank 1 goes on as far as the protocol lets it. Returns what rank 0
/// then reads of rank 1.
fn read_late(one_buffer: bool) -> f32 {
    let mut ranks = group(shape(2, 64), LIMIT);
    let mut second = ranks.pop().unwrap();
    let mut first = ranks.pop().unwrap();
    (first.one_buffer, second.one_buffer) = (one_buffer, one_buffer);
    first.hook = Some(Arc::new(|moment| {
        if matches!(moment, Moment::Consume(_)) {
            std::thread::sleep(Duration::from_millis(100));
        }
    }));
    let seen = Mutex::new(Vec::new());
    let rounds = |fabric: &mut Fabric, seen: Option<&Mutex<Vec<f32>>>| {
        let team = Team::new(1, Placement::Floating, true).unwrap();
        for round in 1..=2 {
            let produce = |_: usize, out: &mut [f32]| out.fill(round as f32);
            let consume = |_: usize, of_ranks: &[&[f32]]| {
                if let Some(seen) = seen {
                    seen.lock().unwrap().push(of_ranks[1][0]);
                }
            };
            fabric.exchange(&team, place(round), &Ahead::nothing(), produce, consume).unwrap();
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| rounds(&mut second, None));
        rounds(&mut first, Some(&seen));
    });
    seen.into_inner().unwrap()[0]
}

#[test]
fn a_late_reader_needs_the_second_buffer() {
    assert_eq!(read_late(false), 1.0);
    // The control: with one buffer the peer has overwritten it.
    assert_eq!(read_late(true), 2.0);
}
