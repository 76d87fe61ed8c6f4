use super::*;
use crate::client::target::Target;
use crate::load::arrivals::{ArrivalProcess, Arrivals, Rate};
use crate::load::conduct::Conducts;
use crate::load::lengths::Lengths;
use crate::load::pacing::{Extent, Pacing};
use crate::load::shapes::Shapes;
use crate::run::mock::{Fault, Mock};
use crate::run::workload::{Endpoint, Workload};

fn workload(base: &str, timeout: Duration) -> Arc<Workload> {
    let target = Target::new(base, None, timeout).expect("the mock's address is valid");
    let shapes = Shapes::Drawn { prompt: Lengths::Constant(4), output: Lengths::Constant(2), seed: 0 };
    let plain = Workload::plain(target, "mock", shapes, timeout);
    Arc::new(Workload { endpoint: Endpoint::Completions, ignore_eos: true, ..plain })
}

fn closed(concurrency: usize, extent: Extent) -> Load {
    Load { pacing: Pacing::Closed { concurrency }, extent, first_index: 100, conducts: Conducts::default() }
}

fn open(rate_per_s: f64, max_in_flight: usize, extent: Extent) -> Load {
    let arrivals =
        Box::new(Arrivals::new(ArrivalProcess::Constant, 1.0, Rate::constant(rate_per_s), 0).expect("in range"));
    Load { pacing: Pacing::Open { arrivals, max_in_flight }, extent, first_index: 0, conducts: Conducts::default() }
}

/// The records of a run against `base` that is stopped when `stop` is, and most requests in flight.
async fn records_of(base: &str, load: Load, timeout: Duration, stop: CancellationToken) -> (Vec<RequestRecord>, usize) {
    let mut running = start(workload(base, timeout), load, stop);
    let mut records = Vec::new();
    while let Some(record) = running.records.recv().await {
        records.push(record);
    }
    (records, running.meter.peak_in_flight())
}

async fn run(base: &str, load: Load) -> (Vec<RequestRecord>, usize) {
    records_of(base, load, Duration::from_secs(20), CancellationToken::new()).await
}

#[tokio::test]
async fn a_closed_loop_sends_all_and_keeps_to_its_concurrency() {
    let mock = Mock { ttft: Duration::from_millis(20), ..Mock::default() }.serve().await;
    let (records, peak) = run(&mock.base, closed(3, Extent::Requests(10))).await;
    assert!(records.iter().all(|record| record.failure.is_none()));
    let mut indices: Vec<u64> = records.iter().map(|record| record.index).collect();
    indices.sort_unstable();
    assert_eq!((indices, peak), ((100..110).collect::<Vec<_>>(), 3));
    let requests = mock.requests();
    assert_eq!(requests.len(), 10);
    assert!(requests.iter().all(|r| r["ignore_eos"] == true && r["stream_options"]["include_usage"] == true));
    assert!(requests.iter().all(|r| r["model"] == "mock" && r["prompt"].is_string() && r["max_tokens"] == 2));
}

#[tokio::test]
async fn an_open_loop_sends_at_its_due_times() {
    let mock = Mock { ttft: Duration::from_millis(200), ..Mock::default() }.serve().await;
    let (records, _) = run(&mock.base, open(50.0, 64, Extent::Duration(Duration::from_millis(500)))).await;
    assert_eq!(records.len(), 25, "50 a second for half a second, though each answer takes 0.2 s");
    for record in &records {
        assert_eq!(record.failure, None);
        assert_eq!(record.intended_ns, record.index * 20_000_000);
        assert!(record.sent_ns >= record.intended_ns);
    }
}

/// The test of coordinated omission: the server stands still from 0.3 s to 1.1 s, and only four requests may be in
/// flight. Every request that was due in that time must show the wait until the end of the stall.
#[tokio::test]
async fn a_stall_shows_in_every_request_that_was_due_in_it() {
    let (from, to) = (Duration::from_millis(300), Duration::from_millis(1100));
    let mock = Mock { fault: Fault::Stall(from, to), ..Mock::default() }.serve().await;
    let (records, _) = run(&mock.base, open(50.0, 4, Extent::Duration(Duration::from_millis(1200)))).await;
    assert_eq!(records.len(), 60);

    // The mock's clock starts with the first request that it sees, a little after the run's: the stall begins and
    // ends that much later. Requests due in its first 400 ms are left out, the timer's millisecond is allowed for.
    let tolerance_ns = 5_000_000;
    let (from_ns, to_ns) = (from.as_nanos() as u64 + 400_000_000, to.as_nanos() as u64);
    let due_in_stall: Vec<_> = records.iter().filter(|r| (from_ns..to_ns).contains(&r.intended_ns)).collect();
    for record in &due_in_stall {
        let latency_ns = record.ended_ns - record.intended_ns;
        assert!(latency_ns + tolerance_ns >= to_ns - record.intended_ns, "{record:?}");
    }
    assert_eq!(due_in_stall.len(), 20);

    // Control: the service time hides the stall from all but those few that were in flight when it began.
    let long_service = records.iter().filter(|r| r.ended_ns - r.sent_ns > 300_000_000).count();
    assert!((1..=8).contains(&long_service), "{long_service} requests show the stall in their service time");
}

#[tokio::test]
async fn due_requests_that_find_no_slot_are_counted_as_not_sent() {
    let mock = Mock { ttft: Duration::from_secs(60), ..Mock::default() }.serve().await;
    let load = open(20.0, 1, Extent::Requests(10));
    let (records, _) = records_of(&mock.base, load, Duration::from_millis(200), CancellationToken::new()).await;
    assert_eq!(records.len(), 10, "every request is accounted for");
    let count = |failure: Failure| records.iter().filter(|r| r.failure == Some(failure.clone())).count();
    assert!(count(Failure::NotSent) > 0 && count(Failure::Timeout) > 0);
    assert_eq!(count(Failure::NotSent) + count(Failure::Timeout), 10);
}

#[tokio::test]
async fn a_stop_ends_both_loops_at_once_and_accounts_for_what_was_in_flight() {
    let mock = Mock { ttft: Duration::from_secs(60), ..Mock::default() }.serve().await;
    for load in [closed(5, Extent::Requests(1000)), open(20.0, 64, Extent::Duration(Duration::from_secs(60)))] {
        let stop = CancellationToken::new();
        let stopping = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            stop.cancel();
        };
        let ended = records_of(&mock.base, load, Duration::from_secs(60), stop.clone());
        let ended = async { tokio::time::timeout(Duration::from_secs(10), ended).await.expect("stops at once") };
        let ((records, _), ()) = tokio::join!(ended, stopping);
        assert!((1..=5).contains(&records.len()), "{} records", records.len());
        assert!(records.iter().all(|r| r.failure == Some(Failure::Interrupted)));
    }
}

#[tokio::test]
async fn a_dead_server_is_not_hammered() {
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let base = format!("http://{}", unused.local_addr().expect("bound"));
    drop(unused);
    let (records, _) = run(&base, closed(2, Extent::Duration(Duration::from_millis(250)))).await;
    assert!((2..=12).contains(&records.len()), "{} refusals in a quarter of a second", records.len());
    assert!(records.iter().all(|r| matches!(r.failure, Some(Failure::Connect(_)))));
}
