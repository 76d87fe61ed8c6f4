//! Ranks that write to each other's memory: on one GPU, on two where there are, and with one of them killed.

use std::ffi::c_void;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use cudarc::driver::result;

use super::gpu::gpu;
use crate::cuda::device::gpu::{Gpu, Stream};
use crate::cuda::device::memory::DeviceBuffer;
use crate::cuda::error::checked;
use crate::cuda::fabric::{Fabric, Group, MAX_RANKS, survey};
use crate::cuda::kernels::cache::Cache;
use crate::cuda::kernels::compile::{Compiler, Program};
use crate::cuda::kernels::module::Module;
use crate::cuda::{CudaError, probe};
use crate::decoder::Fault;

const LIMIT: Duration = Duration::from_secs(30);
/// Threads of the kernel, each of which has a word in every exchange.
const WORDS: usize = 1024;
const BLOCK: usize = 256;
const ROUNDS: u32 = 2000;
/// Bytes of an inbox: [2 buffers][ranks][words] of 16.
const INBOX: usize = 2 * MAX_RANKS * WORDS * 16;

/// Every thread pushes a tagged word to all ranks and takes theirs, round after round, as the looped kernel does.
/// A thread overwrites in round n + 2 what it pushed in n, after it has seen the words of n + 1 of all ranks, which
/// they pushed after they had taken those of n.
const SOURCE: &str = r#"
struct Peers { unsigned long long inbox[16]; };

extern "C" __global__ void exchange(Peers peers, unsigned rank, unsigned ranks, unsigned words, unsigned rounds,
                                    unsigned long long* sums) {
    unsigned word = blockIdx.x * blockDim.x + threadIdx.x;
    unsigned long long sum = 0;
    for (unsigned round = 1; round <= rounds; round++) {
        unsigned long long buffer = (unsigned long long)(round & 1) * ranks * words;
        unsigned value = rank * 1000003u + round * 7919u + word;
        for (unsigned peer = 0; peer < ranks; peer++) {
            unsigned long long place = peers.inbox[peer] + 16 * (buffer + rank * words + word);
            asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};"
                         :: "l"(place), "r"(value), "r"(~value), "r"(round), "r"(0) : "memory");
        }
        for (unsigned peer = 0; peer < ranks; peer++) {
            unsigned long long place = peers.inbox[rank] + 16 * (buffer + peer * words + word);
            unsigned got = 0, inverse = 0, tag = 0, zero = 0;
            for (unsigned polls = 0; tag != round; polls++) {
                asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(got), "=r"(inverse), "=r"(tag), "=r"(zero) : "l"(place) : "memory");
                if (polls == 20000000u) { sums[word] = ~0ull; return; }
            }
            if (got != ~inverse) { sums[word] = ~1ull; return; }
            sum += (unsigned long long)(peer + 1) * got;
        }
    }
    sums[word] = sum;
}
"#;

/// What a thread of the kernel ends with.
fn sum(ranks: u32, word: u32) -> u64 {
    let value =
        |rank: u32, round: u32| rank.wrapping_mul(1_000_003).wrapping_add(round.wrapping_mul(7919)).wrapping_add(word);
    let of_round = |round| (0..ranks).map(|rank| u64::from(rank + 1) * u64::from(value(rank, round))).sum::<u64>();
    (1..=ROUNDS).map(of_round).sum()
}

fn group_of(rank: usize, ranks: usize) -> Group {
    Group { rank, ranks, plan: "tests of the fabric".into() }
}

/// Ranks on these GPUs, joined.
fn group(ordinals: &[usize], bytes: usize) -> Vec<Fabric> {
    let ranks = ordinals.len();
    let new = |(rank, ordinal): (usize, &usize)| {
        Fabric::new(&Gpu::open(*ordinal).unwrap(), group_of(rank, ranks), bytes, LIMIT).unwrap()
    };
    let mut group: Vec<_> = ordinals.iter().enumerate().map(new).collect();
    let handles: Vec<_> = group.iter().map(Fabric::handle).collect();
    std::thread::scope(|scope| {
        let joining: Vec<_> = group.iter_mut().map(|rank| scope.spawn(|| rank.join(&handles))).collect();
        joining.into_iter().for_each(|rank| rank.join().unwrap().unwrap_or_else(|fault| panic!("{fault}")));
    });
    group
}

/// The kernel on a rank's GPU, to its end: what its threads summed.
#[allow(unsafe_code)]
fn exchange(
    fabric: &Fabric,
    gpu: &Arc<Gpu>,
    (rank, ranks): (u32, u32),
    ready: &Barrier,
) -> Result<Vec<u64>, CudaError> {
    let program = Program { name: "fabric test", source: SOURCE, headers: &[], defines: Vec::new() };
    let (binary, _) = Compiler::find()?.build(&program, &Cache::from_environment())?;
    let module = Module::load(gpu, &binary.cubin)?;
    let function = module.function("exchange", 0)?;
    let (stream, sums) = (Stream::new(gpu)?, DeviceBuffer::zeroed(gpu, WORDS * 8)?);
    let mut peers = fabric.addresses();
    let (mut rank, mut ranks, mut words, mut rounds, mut out) = (rank, ranks, WORDS as u32, ROUNDS, sums.address());
    let mut parameters = [
        (&raw mut peers).cast::<c_void>(),
        (&raw mut rank).cast(),
        (&raw mut ranks).cast(),
        (&raw mut words).cast(),
        (&raw mut rounds).cast(),
        (&raw mut out).cast(),
    ];
    let (blocks, threads) = ((WORDS / BLOCK) as u32, BLOCK as u32);
    // Ranks on one GPU share its context: what is taken or loaded there waits for the kernels that run.
    ready.wait();
    // SAFETY: the parameters have the kernel's types; the inboxes have the words that it writes, and the sums theirs.
    let launched =
        unsafe { result::launch_kernel(function, (blocks, 1, 1), (threads, 1, 1), 0, stream.raw, &mut parameters) };
    checked("cuLaunchKernel", launched)?;
    stream.wait()?;
    let mut found = vec![0; WORDS];
    sums.read(0, &mut found)?;
    Ok(found)
}

/// Ranks on these GPUs push words to each other from their kernels, all at the same time.
fn kernels_reach_each_other(ordinals: &[usize]) {
    let group = group(ordinals, INBOX);
    let ranks = group.len() as u32;
    let expected: Vec<_> = (0..WORDS as u32).map(|word| sum(ranks, word)).collect();
    let ready = Barrier::new(ordinals.len());
    std::thread::scope(|scope| {
        for (rank, (fabric, ordinal)) in group.iter().zip(ordinals).enumerate() {
            let (expected, ready) = (&expected, &ready);
            scope.spawn(move || {
                let gpu = Gpu::open(*ordinal).unwrap();
                let found =
                    exchange(fabric, &gpu, (rank as u32, ranks), ready).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(&found, expected, "rank {rank} of {ranks} on GPU {ordinal}");
            });
        }
    });
}

/// Whether there are two GPUs; says so where there are not.
fn two_gpus() -> bool {
    let second = probe(1);
    if let Err(why) = &second {
        eprintln!("skipped: {why}");
    }
    second.is_ok()
}

#[test]
fn kernels_of_ranks_on_one_gpu_reach_each_other() {
    if gpu() {
        kernels_reach_each_other(&[0, 0]);
        kernels_reach_each_other(&[0, 0, 0, 0]);
    }
}

#[test]
fn kernels_of_ranks_on_two_gpus_reach_each_other() {
    if gpu() && two_gpus() {
        kernels_reach_each_other(&[0, 1]);
        kernels_reach_each_other(&[1, 0]);
        // Two ranks on each.
        kernels_reach_each_other(&[0, 1, 1, 0]);
    }
}

#[test]
fn inboxes_are_zeros_and_each_rank_has_its_own() {
    if !gpu() {
        return;
    }
    let other = usize::from(two_gpus());
    // Not a whole number of granules.
    let mut group = group(&[0, other, 0], 3 * 1000 * 1000);
    let bytes = group[0].inbox(0).bytes();
    assert!(bytes >= 3_000_000 && group.iter().all(|rank| (0..3).all(|owner| rank.inbox(owner).bytes() == bytes)));
    for rank in &group {
        for owner in 0..3 {
            assert!(rank.inbox(owner).read(0, bytes).iter().all(|byte| *byte == 0));
        }
        let addresses = rank.addresses();
        assert!(addresses[..3].iter().all(|address| *address != 0) && addresses[3..] == [0; MAX_RANKS - 3]);
    }
    // Rank r leaves 16 r + owner at byte r of every inbox, its own included, and at the last but r.
    for (rank, fabric) in group.iter().enumerate() {
        for owner in 0..3 {
            fabric.inbox(owner).write(rank, &[(16 * rank + owner) as u8]);
            fabric.inbox(owner).write(bytes - 1 - rank, &[(16 * rank + owner) as u8]);
        }
    }
    for fabric in &group {
        for owner in 0..3 {
            let expected = [0, 1, 2].map(|rank| (16 * rank + owner) as u8);
            assert_eq!(fabric.inbox(owner).read(0, 3), expected);
            assert_eq!(fabric.inbox(owner).read(bytes - 3, 3), [expected[2], expected[1], expected[0]]);
        }
    }
    std::thread::scope(|scope| {
        for (rank, fabric) in group.iter_mut().enumerate() {
            scope.spawn(move || assert_eq!(fabric.agree(0, 100 - rank as u64).unwrap(), 98));
        }
    });
}

#[test]
fn ranks_of_different_plans_do_not_join() {
    if !gpu() {
        return;
    }
    let gpu = Gpu::open(0).unwrap();
    let other = Group { plan: "another plan".into(), ..group_of(1, 2) };
    let mut ranks = [group_of(0, 2), other].map(|group| Fabric::new(&gpu, group, 4096, LIMIT).unwrap());
    let handles = ranks.each_ref().map(Fabric::handle);
    std::thread::scope(|scope| {
        let joining = ranks.each_mut().map(|rank| scope.spawn(|| rank.join(&handles)));
        for (rank, joined) in joining.into_iter().enumerate() {
            let fault = joined.join().unwrap().unwrap_err();
            assert!(fault.to_string().contains(&format!("rank {} has loaded another model", 1 - rank)), "{fault}");
        }
    });
}

#[test]
fn a_survey_finds_what_is_there_and_names_what_is_not() {
    // On a machine without a GPU, too.
    let refusal = survey(0, 1000).unwrap_err();
    assert!(matches!(refusal, CudaError::NoDriver | CudaError::NoDevice { .. } | CudaError::Call { .. }), "{refusal}");
    if gpu() {
        survey(0, 1).unwrap();
        if two_gpus() {
            survey(0, 2).unwrap();
        }
    }
}

/// Set: this process is rank 1, and the handle of rank 0 is this.
const CHILD: &str = "LOOPLANE_TEST_FABRIC_RANK_0";
/// In front of what rank 1 tells rank 0.
const HANDLE: &str = "handle of rank 1: ";
const WRITTEN: &str = "rank 1 has written";
/// Large enough to be seen among what else a GPU's memory is used for.
const LARGE: usize = 1 << 30;

/// Rank 1, a process of its own: writes to both inboxes, says so, and is killed.
fn be_killed(handle: String, ordinal: usize) {
    let mut fabric = Fabric::new(&Gpu::open(ordinal).unwrap(), group_of(1, 2), LARGE, LIMIT).unwrap();
    eprintln!("{HANDLE}{}", fabric.handle());
    fabric.join(&[handle, fabric.handle()]).unwrap_or_else(|fault| panic!("{fault}"));
    fabric.inbox(0).write(100, b"to rank 0");
    fabric.inbox(1).write(LARGE - 100, b"of rank 1");
    eprintln!("{WRITTEN}");
    std::thread::sleep(Duration::from_secs(120));
    panic!("nobody has killed rank 1");
}

/// Waits until the child says `what`, and returns the rest of that line.
fn heard(child: &mut impl BufRead, what: &str) -> String {
    let mut told = String::new();
    for line in child.lines() {
        let line = line.unwrap();
        if let Some((_, rest)) = line.split_once(what) {
            return rest.to_owned();
        }
        told = told + &line + "\n";
    }
    panic!("rank 1 ended without {what:?}:\n{told}");
}

#[test]
fn a_killed_rank_breaks_no_mapping_and_leaves_no_memory_behind() {
    if !gpu() {
        return;
    }
    let ordinal = usize::from(two_gpus());
    if let Ok(handle) = std::env::var(CHILD) {
        return be_killed(handle, ordinal);
    }
    // Open throughout, so that what a context takes is in both figures.
    let theirs = Gpu::open(ordinal).unwrap();
    let free = || theirs.memory().unwrap().0;
    let mut fabric = Fabric::new(&Gpu::open(0).unwrap(), group_of(0, 2), LARGE, Duration::from_millis(200)).unwrap();
    let before = free();
    let name = "cuda::tests::fabric::a_killed_rank_breaks_no_mapping_and_leaves_no_memory_behind";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, fabric.handle());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut says = BufReader::new(child.stderr.take().unwrap());
    let handle = heard(&mut says, HANDLE);
    fabric.join(&[fabric.handle(), handle]).unwrap_or_else(|fault| panic!("{fault}"));
    heard(&mut says, WRITTEN);
    let both = |fabric: &Fabric| {
        assert_eq!(fabric.inbox(0).read(100, 9), b"to rank 0");
        assert_eq!(fabric.inbox(1).read(LARGE - 100, 9), b"of rank 1");
    };
    both(&fabric);
    child.kill().unwrap();
    child.wait().unwrap();

    both(&fabric);
    fabric.inbox(1).write(0, b"after its end");
    assert_eq!(fabric.inbox(1).read(0, 13), b"after its end");
    let fault = fabric.agree(7, 1).unwrap_err();
    assert!(matches!(fault, Fault::WaitLimit { rank: 0, peer: 1, step: 7, .. }), "{fault}");
    // The mapping keeps the inbox, and the inbox only.
    let half = LARGE as u64 / 2;
    let came_to = |expected: u64| {
        let begun = Instant::now();
        while free().abs_diff(expected) > half {
            assert!(begun.elapsed() < LIMIT, "{} bytes are free, not about {expected}", free());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    came_to(before - LARGE as u64);
    drop(fabric);
    came_to(if ordinal == 0 { before + LARGE as u64 } else { before });
}
