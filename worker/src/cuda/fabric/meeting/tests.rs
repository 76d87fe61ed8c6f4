//! The meeting on the host, with shared memory in the place of the GPU's.

use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use rustix::fs::{MemfdFlags, memfd_create};

use super::super::header::tests::header;
use super::*;

const LIMIT: Duration = Duration::from_secs(30);

/// A descriptor that says whose it is, and which of the two.
fn descriptor(rank: usize, which: usize) -> OwnedFd {
    let file = memfd_create("looplane-test", MemfdFlags::CLOEXEC).unwrap();
    rustix::io::write(&file, &[rank as u8, which as u8]).unwrap();
    file
}

fn content(descriptor: &OwnedFd) -> [u8; 2] {
    let mut bytes = [0; 2];
    assert_eq!(rustix::io::pread(descriptor, &mut bytes, 0), Ok(2));
    bytes
}

fn handles(ranks: &[Meeting]) -> Vec<String> {
    ranks.iter().map(Meeting::handle).collect()
}

/// A rank of `ranks` joins with its header and descriptors.
fn join(
    meeting: Meeting,
    rank: usize,
    ranks: usize,
    handles: &[String],
    limit: Duration,
) -> Result<Vec<Arrival>, MeetingError> {
    let own = [descriptor(rank, 0), descriptor(rank, 1)];
    meeting.exchange((rank, ranks), &header(rank, ranks), own.each_ref().map(AsFd::as_fd), handles, limit)
}

/// Leaves a message at a socket, of a process that is no rank.
fn leave(handle: &str, message: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let stranger = socket().unwrap();
    let name = handle.strip_prefix(KIND).unwrap();
    rustix::net::connect(&stranger, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors)));
    rustix::net::sendmsg(&stranger, &[IoSlice::new(message)], &mut control, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn every_rank_gets_everybodys_descriptors_in_whatever_order_they_join() {
    for ranks in [2, 3, 16] {
        let meetings: Vec<_> = (0..ranks).map(|_| Meeting::open().unwrap()).collect();
        let handles = handles(&meetings);
        std::thread::scope(|scope| {
            for (rank, meeting) in meetings.into_iter().enumerate() {
                let handles = &handles;
                scope.spawn(move || {
                    std::thread::sleep(Duration::from_millis((rank * 7 % 5) as u64));
                    let arrivals = join(meeting, rank, ranks, handles, LIMIT).unwrap();
                    let mut came: Vec<_> = arrivals.iter().map(|arrival| arrival.rank).collect();
                    came.sort_unstable();
                    assert!(came.into_iter().eq((0..ranks).filter(|other| *other != rank)));
                    for arrival in arrivals {
                        assert_eq!(arrival.header, header(arrival.rank, ranks));
                        let contents = arrival.descriptors.each_ref().map(content);
                        assert_eq!(contents, [0, 1].map(|which| [arrival.rank as u8, which]));
                    }
                });
            }
        });
    }
}

#[test]
fn ranks_that_do_not_join_are_named() {
    let mut meetings: Vec<_> = (0..4).map(|_| Meeting::open().unwrap()).collect();
    let handles = handles(&meetings);
    let last = meetings.pop().unwrap();
    let limit = Duration::from_millis(300);
    std::thread::scope(|scope| {
        scope.spawn(|| join(last, 3, 4, &handles, limit).unwrap_err());
        let error = join(meetings.remove(0), 0, 4, &handles, limit).unwrap_err();
        let told = error.to_string();
        assert!(told.starts_with("ranks 1, 2 did not join within 300ms"), "{told}");
    });
    // Their sockets are there, so that it was not those that were missed.
    assert_eq!(meetings.len(), 2);
}

#[test]
fn a_rank_that_has_ended_is_told_at_once() {
    let (first, second) = (Meeting::open().unwrap(), Meeting::open().unwrap());
    let handles = [first.handle(), second.handle()];
    drop(second);
    let told = join(first, 0, 2, &handles, LIMIT).unwrap_err().to_string();
    assert!(told.contains("rank 1 is not reached at fd:looplane-") && told.contains("its worker has ended"), "{told}");
}

#[test]
fn a_rank_may_go_once_it_has_left_its_message() {
    let (first, second) = (Meeting::open().unwrap(), Meeting::open().unwrap());
    let handles = [first.handle(), second.handle()];
    leave(&handles[0], bytemuck::bytes_of(&header(1, 2)), &[descriptor(1, 0).as_fd(), descriptor(1, 1).as_fd()]);
    let arrivals = join(first, 0, 2, &handles, LIMIT).unwrap();
    assert_eq!(arrivals[0].descriptors.each_ref().map(content), [[1, 0], [1, 1]]);
    // And this rank's message lies there for it.
    let own = header(1, 2);
    assert_eq!(second.next(&own, Instant::now() + LIMIT).unwrap().unwrap().rank, 0);
}

#[test]
fn handles_of_another_group_or_build_are_refused() {
    let told = |handles: &dyn Fn(&str) -> Vec<String>| {
        let meeting = Meeting::open().unwrap();
        let handles = handles(&meeting.handle());
        join(meeting, 0, 2, &handles, LIMIT).unwrap_err().to_string()
    };
    let too_few = told(&|own| vec![own.into()]);
    assert!(too_few.contains("1 handles came for 2 ranks"), "{too_few}");
    let misplaced = told(&|own| vec!["fd:looplane-00".into(), own.into()]);
    assert!(misplaced.contains("not in its place"), "{misplaced}");
    for strange in ["", "/proc/1/fd/3", "fd:somebody-else", "fabric:00", "fd:looplane-"] {
        let refusal = told(&|own| vec![own.into(), strange.into()]);
        assert!(refusal.contains("rank 1") && refusal.contains(strange), "{refusal}");
    }
    let long = format!("fd:looplane-{}", "0".repeat(200));
    assert!(told(&|own| vec![own.into(), long.clone()]).contains("names no socket"));
}

#[test]
fn messages_that_are_not_of_another_rank_of_the_group_are_refused() {
    let told = |messages: &[(&[u8], usize)]| {
        let (meeting, other) = (Meeting::open().unwrap(), Meeting::open().unwrap());
        let all = [descriptor(1, 0), descriptor(1, 1), descriptor(1, 2)];
        for (message, descriptors) in messages {
            let some: Vec<_> = all[..*descriptors].iter().map(AsFd::as_fd).collect();
            leave(&meeting.handle(), message, &some);
        }
        let handles = [meeting.handle(), other.handle()];
        join(meeting, 0, 2, &handles, Duration::from_millis(300)).unwrap_err().to_string()
    };
    let good = bytemuck::bytes_of(&header(1, 2)).to_vec();
    let longer = [good.as_slice(), &[0]].concat();
    let (other_group, own) = (header(1, 4), header(0, 2));
    let pid = format!("process {}", std::process::id());
    for (message, descriptors, says) in [
        (&good[..], 0, "rank 1 sent 0 descriptors, not 2"),
        (&good, 1, "rank 1 sent 1 descriptors, not 2"),
        (&good, 3, "descriptors, not 2"),
        (&good[..40], 2, "a message of 40 bytes came, not of 72"),
        (&longer, 2, "a message of 73 bytes came"),
        (bytemuck::bytes_of(&other_group), 2, "rank 1 of 4 ranks came"),
        (bytemuck::bytes_of(&own), 2, "rank 0 of 2 ranks came"),
    ] {
        let refusal = told(&[(message, descriptors)]);
        assert!(refusal.contains(says) && refusal.contains(&pid), "{refusal}");
    }
}

#[test]
fn two_of_one_number_are_refused() {
    let mut meetings: Vec<_> = (0..3).map(|_| Meeting::open().unwrap()).collect();
    let handles = handles(&meetings);
    for _ in 0..2 {
        leave(&handles[0], bytemuck::bytes_of(&header(1, 3)), &[descriptor(1, 0).as_fd(), descriptor(1, 1).as_fd()]);
    }
    let told = join(meetings.remove(0), 0, 3, &handles, LIMIT).unwrap_err().to_string();
    assert!(told.contains("two workers say that they are rank 1"), "{told}");
}

#[test]
fn who_connects_and_says_nothing_does_not_hold_the_meeting_up_for_ever() {
    let (first, second) = (Meeting::open().unwrap(), Meeting::open().unwrap());
    let handles = [first.handle(), second.handle()];
    let silent = socket().unwrap();
    let name = handles[0].strip_prefix(KIND).unwrap();
    rustix::net::connect(&silent, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    let told = join(first, 0, 2, &handles, Duration::from_millis(200)).unwrap_err().to_string();
    assert!(told.contains("it connected and said nothing"), "{told}");
}

/// Runs `work` on a thread that belongs to another user; `None` where this process may not make one.
fn as_another_user<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    let nobody = rustix::process::Uid::from_raw(65534);
    let run = || match rustix::thread::set_thread_res_uid(nobody, nobody, nobody) {
        Ok(()) => Some(work()),
        Err(errno) => {
            eprintln!("skipped: this process may not become another user ({errno})");
            None
        }
    };
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[test]
fn other_users_are_sent_away_and_not_given_anything() {
    let (first, second) = (Meeting::open().unwrap(), Meeting::open().unwrap());
    let handles = [first.handle(), second.handle()];
    let (message, given) = (header(1, 2), [descriptor(1, 0), descriptor(1, 1)]);
    let left = as_another_user(|| {
        leave(&handles[0], bytemuck::bytes_of(&message), &given.each_ref().map(AsFd::as_fd));
        Meeting::open().unwrap()
    });
    let Some(theirs) = left else { return };
    // The message of a rank that another user left is not taken for one.
    let told = join(first, 0, 2, &handles, Duration::from_millis(200)).unwrap_err().to_string();
    assert!(told.starts_with("rank 1 did not join"), "{told}");
    // Another user's socket gets nothing.
    let own = Meeting::open().unwrap();
    let handles = [own.handle(), theirs.handle()];
    let told = join(own, 0, 2, &handles, Duration::from_millis(200)).unwrap_err().to_string();
    assert!(told.contains("the socket of rank 1 belongs to user 65534"), "{told}");
}

/// Set: this process is rank 1, and the handle of rank 0 is this.
const CHILD: &str = "LOOPLANE_TEST_MEETING_RANK_0";

#[test]
fn what_a_rank_handed_over_outlives_its_process() {
    let meeting = Meeting::open().unwrap();
    if let Ok(handle) = std::env::var(CHILD) {
        let own = meeting.handle();
        eprintln!("{own}");
        let arrivals = join(meeting, 1, 2, &[handle, own], LIMIT).unwrap();
        assert_eq!(arrivals[0].descriptors.each_ref().map(content), [[0, 0], [0, 1]]);
        eprintln!("taken");
        std::thread::sleep(LIMIT);
        panic!("nobody has killed rank 1");
    }
    let name = "cuda::fabric::meeting::tests::what_a_rank_handed_over_outlives_its_process";
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", name, "--nocapture"]).env(CHILD, meeting.handle());
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let mut says = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let handles = [meeting.handle(), says.next().unwrap()];
    let arrivals = join(meeting, 0, 2, &handles, LIMIT).unwrap();
    assert_eq!(says.next().as_deref(), Some("taken"));
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(arrivals[0].descriptors.each_ref().map(content), [[1, 0], [1, 1]]);
}

#[test]
fn names_are_not_used_twice() {
    let names: std::collections::HashSet<_> = (0..100).map(|_| Meeting::open().unwrap().handle()).collect();
    assert_eq!(names.len(), 100);
    assert!(names.iter().all(|name| name.len() == KIND.len() + NAME.len() + 2 * NAME_BYTES));
}
