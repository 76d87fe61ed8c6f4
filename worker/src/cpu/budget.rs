//! Whether a group fits the machine: asked before memory is filled, so that the answer is a sentence and no OOM kill.
//! The KV cache counts as a whole, though its pages take memory only as sequences come to them.

use std::path::Path;

use crate::decoder::LoadError;

/// The most that a rank has in resident memory beside its [`Needs`]: the program and its libraries, its threads'
/// stacks, what moves messages, the headers of the checkpoint, and the rounding of buffers to huge pages. Measured: 11
/// to 14 MB with one thread.
///
/// So the peak memory of a rank is its shard, what its settings ask for (KV cache, activations, exchange memory) and
/// this constant. Nothing in it grows with the model: mapped weights are given back piece by piece as they are packed,
/// and the pieces in flight (some tens of rows of a tensor for each thread) are gone before a sequence comes to the KV
/// cache.
pub const OVERHEAD_BYTES: u64 = 32 << 20;

/// What one rank fills at most, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Needs {
    /// Packed weights and embedding.
    pub weights: u64,
    /// KV pages, all of them.
    pub kv: u64,
    /// Activations and logits of the longest step, its sequences, and what its rows are sampled with.
    pub activations: u64,
    /// Memory shared with the other ranks.
    pub exchange: u64,
}

impl Needs {
    fn total(&self) -> u64 {
        [self.kv, self.activations, self.exchange, OVERHEAD_BYTES].into_iter().fold(self.weights, u64::saturating_add)
    }

    /// Refuses what `ranks` such ranks, which start at the same time on this machine, cannot have. Without an
    /// `available` nothing is known, and the system decides later.
    ///
    /// # Errors
    /// [`LoadError::TooLarge`] with the numbers, and the option that helps.
    pub fn check(&self, ranks: usize, available: Option<u64>) -> Result<(), LoadError> {
        let needed = self.total().saturating_mul(ranks as u64);
        let Some(available) = available.filter(|available| *available < needed) else { return Ok(()) };
        let Self { weights, kv, activations, exchange } = self;
        let missing = (needed - available).div_ceil(ranks as u64);
        let help = if missing < *kv {
            "lower --kv-memory-mib, or --kv-pages where it is given"
        } else if missing < kv.saturating_add(activations.saturating_add(*exchange)) {
            "lower --kv-memory-mib (or --kv-pages), --max-slots, --max-batch-tokens or --max-context"
        } else {
            "the weights alone do not fit: use a smaller model or a machine with more memory"
        };
        let available = format!(
            "{available} are free here (each of {ranks} ranks: {weights} of weights, {kv} of KV cache, {activations} \
             of activations, {exchange} of exchange memory, {OVERHEAD_BYTES} of everything else); {help}"
        );
        Err(LoadError::TooLarge { what: "the ranks of the group", needed, available })
    }
}

/// Bytes that this machine, and the control groups this process is in, still give; `None` if the system does not say.
pub fn available() -> Option<u64> {
    let of_machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| field(&text, "MemAvailable:"));
    let kib = |count: u64| count.saturating_mul(1024);
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    // Version 2 has one line, `0::/path`; every group on the path bounds those below it.
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let root = Path::new("/sys/fs/cgroup");
    let groups = root.join(path);
    let of_groups = groups.ancestors().take_while(|dir| dir.starts_with(root)).filter_map(|dir| {
        let read = |name: &str| std::fs::read_to_string(dir.join(name)).ok();
        left_in_group(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?)
    });
    of_machine.map(kib).into_iter().chain(of_groups).min()
}

/// What a control group has left: the files' cache that it is charged for does not count, since it goes when memory is
/// short. `None` without a limit.
fn left_in_group(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let cache = ["inactive_file", "active_file"].into_iter().filter_map(|name| field(stat, name)).sum();
    Some(max.saturating_sub(current.saturating_sub(cache)))
}

/// The number after a name that stands at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        if words.next() == Some(name) { words.next()?.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEEDS: Needs = Needs { weights: 1000, kv: 500, activations: 30, exchange: 20 };

    #[test]
    fn all_ranks_of_the_group_count() {
        let rank = 1550 + OVERHEAD_BYTES;
        assert!(NEEDS.check(1, Some(rank)).is_ok() && NEEDS.check(4, Some(4 * rank)).is_ok());
        assert!(NEEDS.check(1, Some(rank - 1)).is_err() && NEEDS.check(4, Some(4 * rank - 1)).is_err());
        assert!(NEEDS.check(16, None).is_ok());
        let absurd = Needs { kv: u64::MAX, ..NEEDS };
        assert!(absurd.check(16, Some(u64::MAX - 1)).is_err());
    }

    #[test]
    fn a_refusal_names_the_numbers_and_what_helps() {
        let told = |available| NEEDS.check(2, Some(available + 2 * OVERHEAD_BYTES)).unwrap_err().to_string();
        let text = told(2500);
        let (needed, free) = (3100 + 2 * OVERHEAD_BYTES, 2500 + 2 * OVERHEAD_BYTES);
        let begin = format!("the ranks of the group need {needed} bytes, but {free} are free here (each of 2 ranks");
        assert!(text.starts_with(&begin), "{text}");
        assert!(text.contains("1000 of weights, 500 of KV cache, 30 of activations, 20 of exchange"), "{text}");
        assert!(text.ends_with("lower --kv-memory-mib, or --kv-pages where it is given"), "{text}");
        assert!(told(2020).contains("--max-slots"), "{}", told(2020));
        assert!(told(2000).contains("the weights alone do not fit"), "{}", told(2000));
    }

    #[test]
    fn what_is_left_is_read_from_what_the_system_says() {
        assert_eq!(field("MemTotal:  9 kB\nMemAvailable:   12345 kB\n", "MemAvailable:"), Some(12345));
        let stat = "anon 100\nfile 70\ninactive_file 40\nactive_file 20\n";
        assert_eq!(left_in_group("1000\n", "300\n", stat), Some(760));
        assert_eq!(left_in_group("200\n", "300\n", stat), Some(0));
        assert_eq!(left_in_group("max\n", "300\n", stat), None);
        assert!(available().is_none_or(|bytes| bytes > 1 << 20));
    }
}
