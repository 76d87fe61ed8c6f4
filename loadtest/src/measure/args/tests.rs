use super::*;
use crate::args::{LoadtestArgs, LoadtestCommand};
use crate::load::pacing::{Extent, Pacing, RateArg};
use crate::testing::runs;

fn parse(line: &str) -> Result<LoadArgs, clap::Error> {
    runs::parse::<LoadtestArgs>(line).map(|args| args.load)
}

#[test]
fn defaults_are_a_small_closed_loop() {
    let args = parse("").expect("no option is required");
    assert!(matches!(args.pacing(0), Ok(Pacing::Closed { concurrency: 8 })));
    assert_eq!(args.extent(), Extent::Requests(100));
    assert_eq!(args.timeout, Duration::from_secs(120));
    assert_eq!((args.max_concurrency(), args.shape()), (8, None));
}

#[test]
fn a_rate_makes_an_open_loop() {
    let args = parse("--rate 2.5 --duration 90s --arrivals gamma --burstiness 0.5 --max-in-flight 7").expect("valid");
    assert!(matches!(args.pacing(0), Ok(Pacing::Open { max_in_flight: 7, .. })));
    assert_eq!(args.extent(), Extent::Duration(Duration::from_secs(90)));
    assert_eq!((args.max_concurrency(), args.shape()), (7, Some(0.5)));
    assert_eq!(args.pacing_in_words(), "open loop, 2.5 a second (gamma, burstiness 0.5), 90s");
}

#[test]
fn contradictions_are_refused() {
    assert!(parse("--requests 5 --duration 5s").is_err());
    assert!(parse("--concurrency 5 --rate 5").is_err());
    for line in ["--requests 0", "--concurrency 0", "--max-tokens 0", "--rate x", "--timeout 0", "--duration 25h"] {
        assert!(parse(line).is_err(), "{line}");
    }
    for line in ["--burstiness 2", "--rate 1 --burstiness 2", "--arrivals gamma --burstiness 2"] {
        let refused = parse(line).expect("each alone is valid").pacing(0).map(|_| ());
        assert_eq!(refused, Err(ArgsError::BurstinessWithoutGamma), "{line}");
    }
    let rate = parse("--rate 0").expect("a number").pacing(0).map(|_| ());
    assert_eq!(rate, Err(ArgsError::Arrivals(ArrivalError::Rate(0.0))));
}

#[test]
fn a_ramp_needs_a_length_and_a_trace_has_its_own_pace() {
    let ramp = parse("--rate 1..20 --duration 60s").expect("valid");
    assert!(ramp.pacing(0).is_ok());
    assert_eq!(ramp.pacing_in_words(), "open loop, 1..20 a second (Poisson), 60s");
    let rate = RateArg { from_per_s: 1.0, to_per_s: 20.0 };
    assert_eq!((ramp.rate, rate.mean_per_s()), (Some(rate), 10.5));
    let endless = parse("--rate 1..20").expect("a rate").pacing(0).map(|_| ());
    assert_eq!(endless, Err(ArgsError::RampWithoutDuration(rate)));
    let trace = parse("--trace t.jsonl").expect("valid");
    assert_eq!((trace.max_concurrency(), trace.pacing_in_words().as_str()), (512, "trace t.jsonl, to its end"));
    for line in
        ["--trace t --rate 5", "--trace t --concurrency 5", "--trace t --requests 5", "--rate 1..", "--rate ..2"]
    {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn turns_follow_each_other_in_a_closed_loop_of_chats() {
    let chats = parse("--turns 3 --concurrency 2 --requests 6").expect("valid");
    assert!(chats.pacing(0).is_ok());
    assert_eq!(chats.pacing_in_words(), "closed loop, 2 chats of 3 turns at a time, 6 requests");
    for line in ["--turns 3 --rate 5", "--turns 3 --trace t", "--turns 3 --endpoint completions"] {
        let refused = parse(line).expect("each alone is valid").pacing(0).map(|_| ());
        assert_eq!(refused, Err(ArgsError::TurnsWithoutChat), "{line}");
    }
}

#[test]
fn lengths_and_shares_are_checked() {
    let args = parse("--prompt-tokens 64..256 --max-tokens lognormal:200,0.8,16..4096 --shared-prefix 0.5");
    assert_eq!(args.expect("valid").max_tokens.longest(), 4096);
    for line in ["--prompt-tokens 9..3", "--shared-prefix 1.5", "--shared-prefix nan", "--min-tokens 0"] {
        assert!(parse(line).is_err(), "{line}");
    }
}

#[test]
fn what_is_left_out_leaves_something() {
    let window = |line: &str| parse(line).expect(line).window();
    let s = 1_000_000_000;
    assert_eq!(window(""), Ok(Window::default()));
    assert_eq!(window("--exclude-start 5s"), Ok(Window { from_ns: 5 * s, to_ns: u64::MAX }));
    let both = window("--duration 60s --exclude-start 5s --exclude-end 10s");
    assert_eq!(both, Ok(Window { from_ns: 5 * s, to_ns: 50 * s }));
    assert_eq!(window("--exclude-end 5s"), Err(ArgsError::EndOfOpenRun));
    for line in ["--exclude-start 60s", "--exclude-end 70s", "--exclude-start 30s --exclude-end 30s"] {
        assert_eq!(window(&format!("--duration 60s {line}")), Err(ArgsError::NothingCounted), "{line}");
    }
}

#[test]
fn a_comparison_takes_two_files_and_no_load() {
    let command = runs::parse::<LoadtestArgs>("compare a.json b.json").expect("valid").command;
    assert!(matches!(command, Some(LoadtestCommand::Compare(_))));
    for line in ["compare a.json", "compare a.json b.json c.json", "--rate 5 compare a.json b.json"] {
        assert!(parse(line).is_err(), "{line}");
    }
}
