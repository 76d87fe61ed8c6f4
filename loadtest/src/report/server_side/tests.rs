use super::*;
use crate::client::record::RequestRecord;
use crate::figures::server_side::Range;
use crate::figures::tally::Window;
use crate::load::conduct::Conduct;
use crate::testing::markup::{elements, within};
use crate::testing::records::record;
use crate::testing::reports;
use std::time::Duration;

/// What Looplane says after so many seconds at a step every 10 ms.
fn said(seconds: f64, running: u32, kv_usage: f64) -> (f64, Snapshot) {
    let (steps, step_seconds) = (100.0 * seconds, 0.5 * seconds);
    let text = format!(
        "looplane_num_requests_running {running}\nlooplane_kv_cache_usage_perc {kv_usage}\n\
         looplane_step_duration_seconds_count {steps}\nlooplane_step_duration_seconds_sum {step_seconds}\n\
         looplane_step_wait_seconds_sum {}\nlooplane_step_rows_sum {}\nlooplane_decode_rows_total {}\n\
         looplane_step_read_bytes_total {}\nlooplane_generation_tokens_total {}\n\
         looplane_time_to_first_token_seconds_count {}\nlooplane_time_to_first_token_seconds_sum {}\n",
        step_seconds / 10.0,
        8.0 * steps,
        6.0 * steps,
        1e8 * steps,
        5.0 * steps,
        2.0 * seconds,
        0.05 * seconds,
    );
    (seconds, Snapshot::read(&text).expect("Looplane's names"))
}

fn series() -> Series {
    let said = vec![said(0.0, 0, 0.0), said(1.0, 4, 0.2), said(2.0, 6, 0.4), said(3.0, 5, 0.9), said(3.4, 0, 0.0)];
    Series { said, missed: 0, read_limit_gb_s: Some(40.0) }
}

#[test]
fn figures_are_of_the_part_that_counts() {
    let figures = Figures::of(&series(), (0.0, 3.3));
    let near =
        |value: Option<f64>, want: f64| assert!(value.is_some_and(|v| (v - want).abs() < 1e-9), "{value:?} {want}");
    near(Some(figures.length_s), 3.4);
    near(figures.mean_step_ms, 5.0);
    near(figures.steps_per_s, 100.0);
    near(figures.busy_share, 0.5);
    near(figures.rank_wait_share, 0.1);
    near(figures.rows_per_step, 8.0);
    near(figures.decode_rows_per_step, 6.0);
    near(figures.generation_throughput, 500.0);
    // 100 MB in 5 ms.
    near(figures.read_gb_s, 20.0);
    near(figures.share_of_read_limit, 0.5);
    near(figures.mean_ttft_ms, 25.0);
    assert_eq!(figures.running, Some(Range { mean: 5.0, most: 6.0 }), "neither before nor after");
    assert_eq!(
        (figures.waiting, figures.preemptions, figures.mean_itl_ms),
        (None, None, None),
        "what was not said is not made up"
    );
    let part = Figures::of(&series(), (1.5, 2.5));
    assert_eq!(part.kv_cache_usage, Some(Range { mean: 0.4, most: 0.4 }));
    near(Some(part.length_s), 2.0);
    let moment = Figures::of(&Series { said: vec![said(0.0, 0, 0.0), said(0.4, 3, 0.1)], ..series() }, (0.0, 0.3));
    assert_eq!(moment.running, None, "nobody looked while it ran");
    near(moment.mean_step_ms, 5.0);
}

#[test]
fn a_server_that_began_to_count_again_gives_no_figures() {
    let said = vec![said(5.0, 0, 0.0), said(1.0, 4, 0.2), said(2.0, 6, 0.4)];
    let figures = Figures::of(&Series { said, ..series() }, (5.0, 2.0));
    assert_eq!((figures.mean_step_ms, figures.generation_throughput, figures.share_of_read_limit), (None, None, None));
}

#[test]
fn tables_json_and_page_say_what_is_known() {
    let mut tally = Tally::new(Window { from_ns: 0, to_ns: 3_300_000_000 }, None);
    tally.add(&record(0, 0, &[3000, 3300]));
    let words = Figures::of(&series(), (0.0, 3.3)).in_words(&tally);
    let of = |name: &str| {
        words.iter().find(|row| row.0 == name).unwrap_or_else(|| panic!("no {name} in {words:?}")).1.as_str()
    };
    assert_eq!(
        of("step"),
        "5.000 ms in the mean, 100.0 a second, 50.0 % of the time in steps, 10.0 % of that for other ranks"
    );
    assert_eq!(of("rows of a step"), "8.00 in the mean: 6.00 that decode, 2.00 of prompts");
    assert_eq!(of("KV cache in use"), "50.0 % in the mean, at most 90.0 %");
    assert_eq!(of("read in steps"), "20.0 GB/s, 50.0 % of the read limit (40.0 GB/s)");
    assert!(words.iter().all(|row| row.0 != "in the queue" && row.0 != "preempted"));
    let report = Report { server_side: Some(ServerSide::Seen(series())), ..reports::report(tally) };
    let json = report.to_json()["server_side"].clone();
    assert_eq!((&json["mean_step_ms"], &json["mean_itl_ms"]), (&5.0.into(), &serde_json::Value::Null));
    assert_eq!(json["timeline"]["running"].as_array().map(Vec::len), Some(5));
    let page = section(&report).into_string();
    let drawn = elements(&page);
    within(&drawn);
    assert_eq!(
        drawn.iter().filter(|element| element.name == "polyline").count(),
        3,
        "no line of who waits, nobody said"
    );
    assert!(page.contains("<th>step</th><td>5.000 ms") && page.contains("with Looplane's names, 5 times"));
}

#[test]
fn the_clients_figures_say_where_they_are_not_of_every_request() {
    let words_after = |conduct| {
        let mut tally = Tally::new(Window { from_ns: 0, to_ns: 3_300_000_000 }, None);
        let record = record(0, 0, &[3000, 3300]);
        tally.add(&record);
        tally.add(&RequestRecord { conduct, ..record });
        let words = Figures::of(&series(), (0.0, 3.3)).in_words(&tally);
        ["tokens generated", "time to first token"].map(|name| {
            let row = words.iter().find(|row| row.0 == name).unwrap_or_else(|| panic!("no {name} in {words:?}"));
            row.1.contains(", of the requests without a fault: ")
        })
    };
    assert_eq!(words_after(Conduct::Usual), [false, false]);
    assert_eq!(words_after(Conduct::HangUp(Duration::from_secs(1))), [true, true]);
}

#[test]
fn a_server_of_which_nothing_follows_or_nothing_is_known_is_said_to() {
    let page = |side| {
        let report = Report { server_side: Some(side), ..reports::report(Tally::default()) };
        (section(&report).into_string(), report.to_json()["server_side"].clone())
    };
    let silent = Series { said: vec![said(0.0, 0, 0.0)], missed: 3, read_limit_gb_s: None };
    let (silent, _) = page(ServerSide::Seen(silent));
    assert!(silent.contains("<th>figures</th><td>none: it answered too few questions"), "{silent}");
    let (unknown, json) = page(ServerSide::Unknown("it has no /metrics".into()));
    assert!(unknown.contains("Not known: it has no /metrics") && json["unknown"] == "it has no /metrics", "{json}");
}
