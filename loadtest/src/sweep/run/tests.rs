use super::*;
use crate::client::metrics::Snapshot;
use crate::figures::tally::Window;
use crate::report::contents::Report;
use crate::run::mock::{Fault, Mock};
use crate::run::watch::{Series, ServerSide};
use crate::sweep::figures::How;
use crate::sweep::predict::Scaling;
use crate::testing::markup::{Element, elements, stands_alone, within};
use crate::testing::{reports, runs};
use serde_json::json;
use std::time::Duration;

fn parse(line: &str) -> SweepArgs {
    runs::parse(&format!("--out /tmp/x {line}")).expect("valid options")
}

fn level(load: usize, output_throughput: f64, mean_tpot_ms: f64) -> serde_json::Value {
    json!({
        "load": load, "completed": 100, "failed": 0, "request_throughput": output_throughput / 128.0,
        "output_throughput": output_throughput, "mean_tpot_ms": mean_tpot_ms, "median_ttft_ms": 11.0,
        "p99_ttft_ms": 14.0, "p99_itl_ms": 2.0 * mean_tpot_ms, "p99_client_lag_ms": 0.2, "mean_context": 192.0,
        "file": "x.json",
    })
}

fn size(tp: u32, levels: Vec<serde_json::Value>) -> serde_json::Value {
    let traffic =
        json!({"weight_bytes": 15e9 / f64::from(tp), "position_bytes": 131072.0 / f64::from(tp), "read_gb_s": 4600.0});
    json!({"tp": tp, "not_measured": null, "ready_s": 1.5, "measured": levels, "predicted": [], "traffic": traffic})
}

/// A sweep of a machine with four GPUs.
fn on_gpus() -> Sweep {
    let lacking = |tp: u32| {
        json!({"tp": tp, "not_measured": "this machine has 4 GPUs", "ready_s": null, "measured": [], "predicted": [],
               "traffic": null})
    };
    let point = |name: &str, streams: u32| json!({"name": name, "pacing": format!("closed loop, {streams} at a time, 10s"), "streams": streams});
    let sweep = json!({
        "version": "0.1.0", "date": "20240229-235900", "model": "<llama>", "device": "cuda", "processor": "NVIDIA H200",
        "cores": 64, "gpus": 4, "threads": null, "settings": [["seed", "0"]],
        "loads": [point("1 stream", 1), point("8 streams", 8), point("32 streams", 32)],
        "sizes": [
            size(1, vec![level(0, 290.0, 3.35), level(1, 2000.0, 3.8), level(2, 6000.0, 4.8)]),
            size(2, vec![level(0, 520.0, 1.86), level(1, 3600.0, 2.1), level(2, 9800.0, 2.9)]),
            size(4, vec![level(0, 870.0, 1.09), level(1, 5500.0, 1.35), level(2, 14000.0, 2.0)]),
            lacking(8),
            lacking(16),
        ],
        "notes": [],
    });
    serde_json::from_value(sweep).expect("the fields of a report")
}

/// As `looplane scaling` would have calculated for it; 16 GPUs cannot be cut so.
fn scaling() -> Scaling {
    let steps =
        [(1, 1, 3.3), (2, 1, 1.82), (4, 1, 1.0), (8, 1, 0.69), (1, 8, 3.6), (2, 8, 2.06), (4, 8, 1.26), (8, 8, 1.09)];
    let steps = steps.map(|(tp, batch, step_ms)| {
        json!({"tensor_parallel": tp, "batch": batch, "bytes": 15e9 / f64::from(tp), "step_ms": step_ms})
    });
    let refused = [json!({"model": "x", "tensor_parallel": 16, "reason": "it does not divide the heads"})];
    let compared = [(3.33, 3.30, true), (1.08, 1.00, false), (1.30, 1.26, false)].map(|(measured_ms, calculated_ms, fitted)| {
        json!({"measured_ms": measured_ms, "calculated_ms": calculated_ms, "fitted": fitted})
    });
    serde_json::from_value(json!({"read_gb_s": 4600.0, "compared": compared, "predicted": steps, "refused": refused}))
        .expect("its fields")
}

fn predicted() -> Sweep {
    let mut sweep = on_gpus();
    predict(&mut sweep, &scaling());
    sweep
}

#[test]
fn ratios_are_over_the_smallest_size_that_was_measured() {
    let rows = on_gpus().rows(0);
    assert_eq!(rows.iter().map(|row| row.layout.tp).collect::<Vec<_>>(), [1, 2, 4]);
    assert_eq!(rows.iter().map(|row| row.speed_up.expect("a base")).collect::<Vec<_>>(), [1.0, 520.0 / 290.0, 3.0]);
    assert_eq!(rows[2].efficiency, Some(0.75));
    assert_eq!((rows[2].tokens_per_s_a_socket, rows[2].tokens_per_s_a_user), (217.5, Some(1e3 / 1.09)));
    // 15 GB and 192 positions in 3.35 ms, of 4600 GB/s.
    let share = (15e9 + 131072.0 * 192.0) / 3.35e6 / 4600.0;
    assert!((rows[0].read_share.expect("benched") - share).abs() < 1e-12);
    let mut from_two = on_gpus();
    from_two.sizes.remove(0);
    let rows = from_two.rows(0);
    assert_eq!((rows[0].speed_up, rows[0].efficiency), (Some(1.0), Some(1.0)));
    assert_eq!(rows[1].efficiency, Some(870.0 / 520.0 / 2.0));
}

#[test]
fn predictions_are_fitted_on_one_and_two_and_tested_on_four() {
    let sweep = predicted();
    let rows = sweep.rows(0);
    assert_eq!(rows.iter().map(|row| row.how).collect::<Vec<_>>()[2..], [How::Measured, How::Predicted]);
    // What is fitted goes through its points: 1000 / 290 - 3.30 and 1000 / 520 - 1.82 leave nothing fixed or negative.
    for row in &rows[..2] {
        assert!(row.model_error.is_some_and(|error| error.abs() < 1e-9) && row.model_fitted, "{row:?}");
    }
    let error = rows[2].model_error.expect("predicted as well");
    let shared = 2.0 * ((1e3 / 290.0 - 3.30) - (1e3 / 520.0 - 1.82));
    let fixed = 1e3 / 290.0 - 3.30 - shared;
    assert!(
        (error - (1e3 / (1.00 + fixed + shared / 4.0) / 870.0 - 1.0)).abs() < 1e-9 && !rows[2].model_fitted,
        "{error}"
    );
    assert_eq!(sweep.worst_error().map(|worst| worst >= error.abs()), Some(true));
    // On 8 GPUs no faster than its steps.
    assert!(rows[3].tokens_per_s < 1e3 / 0.69 && rows[3].tokens_per_s > 870.0, "{:?}", rows[3]);
    assert!(sweep.rows(2).iter().all(|row| row.how == How::Measured && row.model_error.is_none()));
    let notes = sweep.notes.join("\n");
    assert!(
        notes.contains("32 streams: not predicted") && notes.contains("TP 16: not predicted: it does not divide"),
        "{notes}"
    );
    let mut without_two = on_gpus();
    without_two.sizes.remove(1);
    predict(&mut without_two, &scaling());
    assert!(without_two.rows(0).iter().all(|row| row.how == How::Measured));
    assert!(without_two.notes[0].contains("takes measured sizes 1 and 2"), "{:?}", without_two.notes);
    let mut of_one_token = on_gpus();
    of_one_token.sizes[1].measured[0].mean_tpot_ms = None;
    predict(&mut of_one_token, &scaling());
    let first = &of_one_token.notes[0];
    assert_eq!(first, "1 stream: not predicted, as answers of one token have no time between tokens");
}

#[tokio::test]
async fn a_missing_prediction_is_noted_only_where_a_size_was_not_measured() {
    let (plan, mut sweep) = plan(&parse("--tp 4 --device cpu")).expect("valid");
    let plan = Plan { device: Device::Cuda, ..plan };
    sweep.sizes = on_gpus().sizes.into_iter().filter(|size| size.layout.tp == 4).collect();
    plan.predict(&mut sweep, &CancellationToken::new()).await.expect("nothing to predict");
    sweep.sizes.extend(on_gpus().sizes.into_iter().filter(|size| size.layout.tp == 8));
    let why = plan.predict(&mut sweep, &CancellationToken::new()).await.expect_err("8 is not measured").to_string();
    assert!(why.contains("measured sizes 1 and 2"), "{why}");
}

/// Puts the first load that `line` describes on `mock`.
async fn loaded(mock: Mock, folder: &Path, line: &str) -> (Level, Sweep) {
    let mock = mock.serve().await;
    let args = SweepArgs { out: folder.into(), ..parse(&format!("{line} --device cpu --prompt-tokens 6")) };
    let (plan, mut sweep) = plan(&args).expect("valid");
    let level =
        plan.put_load(&mock.base, Layout::group(2), 0, &plan.loads[0], &mut sweep, &CancellationToken::new()).await;
    (level.expect("it answers"), sweep)
}

#[tokio::test]
async fn a_load_keeps_what_the_server_says_of_itself_and_notes_of_its_beginning() {
    let folder = tempfile::tempdir().expect("a temporary directory");
    let line = "--concurrency 2 --requests 4 --max-tokens 3 --quiet";
    let mock = Mock { fault: Fault::NoUsage, ..Default::default() };
    let (level, sweep) = loaded(mock, folder.path(), line).await;
    assert_eq!((level.completed, level.worker_losses), (4, None), "the mock has no workers");
    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(folder.path().join(&level.file)).expect("kept")).expect("JSON");
    assert_eq!(report["server_side"]["names"], "vLLM");
    let last = sweep.notes.last().expect("prompts cannot be sized");
    assert!(last.starts_with("TP 2, 2 streams: prompts have a word for each token"), "{last}");

    let said = [0, 2].map(|losses| {
        let text = format!("looplane_worker_losses_total {losses}\n");
        (f64::from(losses), Snapshot::read(&text).expect("Looplane's name"))
    });
    let side = ServerSide::Seen(Series { said: said.into(), missed: 0, read_limit_gb_s: None });
    let report = Report { server_side: Some(side), ..reports::report(Tally::default()) };
    assert_eq!(Level::new(0, &report, "x.json".into()).worker_losses, Some(2.0));
}

/// Replicas of one GPU and of two, of which 2x1 was measured.
fn with_replicas() -> Sweep {
    let mut sweep = on_gpus();
    let layout = |replicas: u32, tp: u32, levels: Vec<serde_json::Value>| -> Size {
        let mut size = size(tp, levels);
        (size["replicas"], size["traffic"]) = (json!(replicas), json!(null));
        serde_json::from_value(size).expect("a size")
    };
    sweep.sizes.push(layout(2, 1, vec![level(0, 280.0, 3.4), level(1, 4000.0, 3.5)]));
    sweep.sizes.push(layout(4, 2, vec![]));
    sweep.sizes.push(layout(8, 1, vec![]));
    sweep.sizes.sort_by_key(|size| (size.layout.sockets(), size.layout.replicas));
    predict(&mut sweep, &scaling());
    predict_replicas(&mut sweep);
    sweep
}

#[test]
fn replicas_are_calculated_from_one_under_its_share_of_the_streams() {
    let sweep = with_replicas();
    let row = |load: usize, layout: &str| sweep.rows(load).into_iter().find(|row| row.layout.in_short() == layout);
    // 8 streams on 8 replicas are one on each.
    let (one, eight) = (row(0, "1x1").expect("measured"), row(1, "8x1").expect("calculated"));
    assert_eq!((eight.how, eight.tokens_per_s, eight.tpot_ms), (How::Predicted, 8.0 * one.tokens_per_s, one.tpot_ms));
    assert_eq!(eight.read_share, one.read_share);
    // Four streams on each of two: no load of this sweep, but measured; two on each of four: neither.
    let two = row(1, "2x1").expect("measured");
    assert_eq!((two.how, two.tokens_per_s_a_socket, two.model_error), (How::Measured, 2000.0, None));
    assert!(row(1, "4x2").is_none());
    // 32 on four: eight on each.
    assert_eq!(row(2, "4x2").expect("calculated").tokens_per_s, 4.0 * row(1, "1x2").expect("measured").tokens_per_s);
    let notes = sweep.notes.join("\n");
    assert!(notes.contains("4 x TP 2, 1 stream; 4 x TP 2, 8 streams; 8 x TP 1, 1 stream"), "{notes}");
    assert!(!notes.contains("2 x TP 1, 8 streams"), "{notes}");
    let mut on_cpus = Sweep { device: Device::Cpu, ..with_replicas() };
    on_cpus.sizes.iter_mut().for_each(|size| size.predicted.clear());
    predict_replicas(&mut on_cpus);
    assert!(on_cpus.sizes.iter().all(|size| size.predicted.is_empty()));
}

#[test]
fn layouts_of_as_many_sockets_are_compared_and_none_with_itself() {
    let sweep = with_replicas();
    let choices: Vec<_> = sweep.choices().iter().map(|choice| table::choice_cells(&sweep, choice)).collect();
    let of = |load: &str, sockets: &str| choices.iter().find(|cells| cells[0] == load && cells[1] == sockets);
    let [_, _, most, fastest] = of("8 streams", "2").expect("1x2 and 2x1");
    assert_eq!(most, "2x1: 4000.0 / s, measured");
    assert!(fastest.starts_with("1x2: ") && fastest.ends_with(" ms, measured"), "{fastest}");
    assert!(of("1 stream", "4").is_none() && of("8 streams", "8").is_some(), "{choices:?}");
    assert!(on_gpus().choices().is_empty());
    let page = page(&sweep);
    assert!(page.contains("Which layout for which load") && page.contains("2x1: 4000.0 / s, measured"));
    stands_alone(&page);
    within(&elements(&page));
    assert!(sweep.to_string().contains("Which layout for which load"));
    assert!(!super::page(&on_gpus()).contains("Which layout"));
}

#[test]
fn the_table_tells_measured_from_predicted() {
    let text = predicted().to_string();
    let row = |layout: &str| -> Vec<&str> {
        let begins = format!("{layout:>6} ");
        let line = text.lines().find(|line| line.starts_with(&begins)).expect("a row");
        line.split_whitespace().collect()
    };
    assert_eq!(row("1x1")[..8], ["1x1", "290.0", "1.00", "100", "%", "290.0", "298.5", "3.350"]);
    assert_eq!(row("1x1").last(), Some(&"measured"));
    assert_eq!(row("1x8")[row("1x8").len() - 2..], ["*", "predicted"]);
    assert!(!text.lines().any(|line| line.starts_with("  1x16 ")));
    assert!(text.contains("/s a GPU") && text.contains("TP 16 is not measured: this machine has 4 GPUs"), "{text}");
    assert!(text.contains("note: the model's largest error on sizes that were measured"), "{text}");
}

#[test]
fn the_file_holds_what_was_measured_and_what_follows_from_it() {
    let sweep = predicted();
    let file = sweep.to_json().expect("JSON");
    assert_eq!(file["rows"].as_array().map(Vec::len), Some(3), "a list for each load");
    let row = &file["rows"][0][3];
    assert_eq!((&row["tp"], &row["how"], &row["model_error"]), (&json!(8), &json!("predicted"), &json!(null)));
    assert_eq!(file["rows"][0][2]["efficiency"], 0.75);
    let read: Sweep = serde_json::from_value(file).expect("a report is read back");
    assert_eq!(read.to_string(), sweep.to_string());
}

#[test]
fn the_page_tells_measured_from_predicted_and_holds_all_it_needs() {
    let page = super::page(&predicted());
    let drawn = elements(&page);
    within(&drawn);
    stands_alone(&page);
    let count = |of: &dyn Fn(&Element) -> bool| drawn.iter().filter(|element| of(element)).count();
    assert_eq!(count(&|e| e.name == "svg"), 3 + 3 + 1);
    assert!(page.contains("Scaling of &lt;llama&gt;") && page.contains("2024-02-29 23:59 UTC"));
    let legends: Vec<&str> = drawn.iter().filter(|e| e.class() == "legend").map(|e| e.text.as_str()).collect();
    assert_eq!(legends[..3], ["measured", "predicted", "linear"]);
    assert_eq!(legends[legends.len() - 4..], ["TP 1", "TP 2", "TP 4", "TP 8, predicted"]);
    // Discs of three sizes; rings of four, as those that were measured are predicted as well.
    let first: Vec<&str> = drawn.iter().filter(|e| e.name == "circle").take(7).map(|e| e.class()).collect();
    assert_eq!(
        first,
        ["mark s0", "mark s0", "mark s0", "mark hollow s1", "mark hollow s1", "mark hollow s1", "mark hollow s1"]
    );
    assert!(page.contains("plot wide curves dash3"));
    assert_eq!(count(&|e| e.name == "tr" && e.class() == "unlike"), 2, "8 GPUs under two loads");
    assert!(count(&|e| e.class().starts_with("mark hollow s3")) == 2);
    let empty = super::page(&Sweep { sizes: Vec::new(), model: None, ..on_gpus() });
    elements(&empty);
    assert!(empty.contains("Nothing has been measured"));
}

#[test]
fn workers_without_a_core_of_their_own_are_no_scaling() {
    let mut sweep = Sweep { device: Device::Cpu, cores: 2, gpus: 0, threads: Some(1), ..on_gpus() };
    sweep.sizes[0].measured[0].failed = 3;
    sweep.sizes[1].measured.truncate(2);
    sweep.sizes[1].not_measured = Some("stopped by the user".into());
    sweep.sizes[1].measured[1].p99_client_lag_ms = Some(7.5);
    sweep.sizes[0].measured[1].worker_losses = Some(2.0);
    sweep.sizes[0].measured[2].worker_losses = Some(0.0);
    assert_eq!(
        sweep.rows(0).iter().map(|row| row.how).collect::<Vec<_>>(),
        [How::Measured, How::Measured, How::Overhead]
    );
    let (text, page) = (sweep.to_string(), super::page(&sweep));
    assert!(text.contains(" * more workers than cores\n") && text.contains("/s a worker"), "{text}");
    assert!(text.contains("TP 1, 1 stream: 3 of 103 requests failed, see x.json"), "{text}");
    assert!(text.contains("TP 2 is measured under 2 of 3 loads: stopped by the user"), "{text}");
    assert!(text.contains("late by 7.5 ms or more at TP 2, 8 streams"), "{text}");
    let died = "TP 1, 8 streams: workers died under this load (2 times)";
    assert!(text.contains(died) && page.contains(died) && text.matches("workers died").count() == 1, "{text}");
    assert_eq!(sweep.to_json().expect("JSON")["sizes"][0]["measured"][1]["worker_losses"], 2.0);
    within(&elements(&page));
    assert!(page.contains("more than cores") && page.contains("TP 4 on 2 cores") && page.contains("workers</text>"));
    assert!(!page.contains("predicted"));
}

#[test]
fn a_sweep_is_a_few_closed_loops_unless_told_otherwise() {
    let args = parse("--tp 2,1,2 --model /m --device cpu --max-tokens 64 -- --max-slots 4");
    let (begun, sweep) = plan(&args).expect("valid");
    assert_eq!(args.layouts(), [1, 2].map(Layout::group));
    let names: Vec<&str> = sweep.loads.iter().map(|load| load.name.as_str()).collect();
    assert_eq!(names, ["1 stream", "8 streams", "32 streams"]);
    assert_eq!(sweep.loads[1].pacing, "closed loop, 8 at a time, 30s");
    assert!(
        begun
            .loads
            .iter()
            .all(|load| load.ignore_eos && load.model.is_none() && load.warmup == Some(load.max_concurrency() as u64))
    );
    assert_eq!(begun.window, Window { from_ns: 0, to_ns: 30_000_000_000 });
    let threads = (sweep.cores / 2).max(1).to_string();
    let serve: Vec<&str> = begun.serve.iter().filter_map(|word| word.to_str()).collect();
    assert_eq!(serve, ["--device", "cpu", "--port", "0", "--threads", &threads, "--model", "/m", "--max-slots", "4"]);
    let open = plan(&parse("--rate 5 --requests 20 --device cpu")).expect("valid").1;
    assert_eq!(
        (open.loads.len(), open.loads[0].streams, open.loads[0].name.as_str()),
        (1, None, "5 requests a second")
    );
    let one = plan(&parse("--concurrency 4 --device cpu")).expect("valid").1;
    assert_eq!((one.loads.len(), one.loads[0].streams), (1, Some(4)));
    let warmups =
        |line: &str| -> Vec<u64> { plan(&parse(line)).expect("valid").0.loads.iter().map(LoadArgs::warmup).collect() };
    assert_eq!(warmups("--device cpu --warmup 0"), [0, 0, 0], "as it was asked for");
    assert_eq!(warmups("--device cpu --rate 5"), [0]);
}

#[test]
fn options_that_do_not_fit_a_sweep_are_refused() {
    for line in
        ["--layout 3x3", "--layout 1x1 --tp 2", "--tp 3", "--tp x", "--concurrencies 0", "--concurrencies 1,2 --rate 5"]
    {
        assert!(runs::parse::<SweepArgs>(&format!("--out /tmp/x {line}")).is_err(), "{line}");
    }
    let refusal = |line: &str| plan(&parse(line)).err().expect(line).to_string();
    assert!(refusal("--target http://h:1").contains("starts its own servers"));
    assert!(refusal("--json x.json").contains("--out"));
    assert!(refusal("--runs 3").contains("of a single load"));
    assert!(refusal("--half-open 3").contains("without sweep"));
    assert!(refusal("--read-limit 40").contains("from the bench"));
    assert!(refusal("--device cuda").contains("no GPU"));
    let mut on_gpu = parse("--threads 2");
    on_gpu.machine.gpus = 1;
    assert!(plan(&on_gpu).err().expect("GPUs").to_string().contains("--threads is of CPUs"));
}

/// A program that does as this one does on two GPUs: serves (by the mock), measures and calculates.
const PRODUCT: &str = r#"#!/bin/sh
echo "$@" >> "$FOLDER/asked"
case "$1" in
serve) echo "Listening $MOCK (HTTP and gRPC)"; exec sleep 300 ;;
bench) figures='{"processor": "a GPU", "read": {"best_gb_s": 4600.0}, "batches": [
    {"batch": 8, "mean_context": 200.0, "weight_bytes": 15e9, "kv_bytes": 2e8}]}' ;;
scaling) figures="$SCALING" ;;
esac
while [ "$1" != --json ]; do shift; done
echo "$figures" > "$2"
"#;

#[tokio::test]
async fn sizes_beyond_the_machines_gpus_are_predicted_from_its_own_bench() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().expect("a temporary directory");
    let mock = Mock { ttft: Duration::from_millis(5), itl: Duration::from_millis(2), ..Default::default() };
    let mock = mock.serve().await;
    let step = |tp: u32, step_ms: f64| json!({"tensor_parallel": tp, "batch": 1, "bytes": 15e9, "step_ms": step_ms});
    let steps = [step(1, 1.8), step(2, 1.7), step(4, 1.6)];
    let scaling = json!({"read_gb_s": 4600.0, "compared": [], "predicted": steps, "refused": []}).to_string();
    let product = folder.path().join("looplane");
    let script = PRODUCT.replace("$FOLDER", &folder.path().display().to_string()).replace("$MOCK", &mock.base);
    fs::write(&product, script.replace("\"$SCALING\"", &format!("'{scaling}'"))).expect("a script");
    fs::set_permissions(&product, fs::Permissions::from_mode(0o755)).expect("it is ours");

    let mut args = parse("--tp 1,2,4 --concurrencies 1,16 --requests 20 --prompt-tokens 6 --max-tokens 10 --model /m");
    args.out = folder.path().into();
    args.machine.gpus = 2;
    let (mut plan, mut sweep) = plan(&args).expect("valid");
    plan.looplane = product.clone();
    plan.commands.as_mut().expect("a model").looplane = product;
    plan.run(&args.layouts(), &mut sweep, &CancellationToken::new()).await.expect("sizes 1 and 2 are measured");

    let asked = fs::read_to_string(folder.path().join("asked")).expect("it was asked");
    let asked: Vec<&str> = asked.lines().collect();
    assert_eq!(asked.len(), 5, "{asked:?}");
    assert_eq!(asked[0], "serve --until-stdin-closes --tp 1 --device cuda --port 0 --model /m");
    assert!(asked[3].starts_with("bench --model /m --device cuda --tp 2 --batch 1,2,4,8,16 --context "), "{asked:?}");
    let files = [1, 2].map(|tp| folder.path().join(format!("bench-tp{tp}.json")).display().to_string()).join(" ");
    assert!(asked[4].starts_with(&format!("scaling {files} --model /m --batch 1 --context ")), "{asked:?}");
    let rows = sweep.rows(0);
    assert_eq!(
        rows.iter().map(|row| (row.layout.tp, row.how)).collect::<Vec<_>>(),
        [(1, How::Measured), (2, How::Measured), (4, How::Predicted)],
        "{:?}",
        sweep.notes
    );
    assert!(rows[0].read_share.is_some() && rows[2].tokens_per_s < 1e3 / 1.6, "{rows:?}");
    assert_eq!(sweep.rows(1).len(), 2, "16 streams are not predicted");
    let kept: Sweep =
        serde_json::from_slice(&fs::read(folder.path().join(JSON_FILE)).expect("kept")).expect("a report");
    assert_eq!((kept.to_string(), kept.processor.as_deref()), (sweep.to_string(), Some("a GPU")));
}
