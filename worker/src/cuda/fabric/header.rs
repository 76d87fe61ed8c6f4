//! What a rank says of itself when it hands its memory to the others.

use bytemuck::{Pod, Zeroable};
use sha2::{Digest, Sha256};

use super::group::Group;
use super::topology::Uuid;

/// Bytes of a header in a message.
pub const BYTES: usize = size_of::<Header>();
const MAGIC: u32 = u32::from_le_bytes(*b"LPfb");
/// Raised when a message changes: ranks of different builds must not meet.
const VERSION: u32 = 1;

/// The bytes in front of a rank's descriptors, as they travel between processes of one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Header {
    magic: u32,
    version: u32,
    ranks: u32,
    rank: u32,
    /// Of the inbox.
    bytes: u64,
    /// Of the GPU that holds it.
    pub gpu: Uuid,
    /// SHA-256 of what all ranks have to agree on.
    plan: [u8; 32],
}

const _: () = assert!(BYTES == 72, "no padding, so that every byte is a field's");

impl Header {
    /// Of a rank whose inbox of `bytes` is on `gpu`.
    pub fn new(group: &Group, bytes: u64, gpu: Uuid) -> Self {
        Self {
            magic: MAGIC,
            version: VERSION,
            ranks: group.ranks as u32,
            rank: group.rank as u32,
            bytes,
            gpu,
            plan: Sha256::digest(&group.plan).into(),
        }
    }

    /// Which rank of this one's group a message is of.
    ///
    /// # Errors
    /// Why it is of none, in words.
    pub fn peer(&self, message: &[u8]) -> Result<(usize, Self), String> {
        let strange = |what: String| format!("{what}: all workers have to be of one build of Looplane");
        if message.len() != BYTES {
            return Err(strange(format!("a message of {} bytes came, not of {BYTES}", message.len())));
        }
        let of: Self = bytemuck::pod_read_unaligned(message);
        if (of.magic, of.version) != (MAGIC, VERSION) {
            let [found, expected] = [(of.magic, of.version), (MAGIC, VERSION)].map(|(a, b)| format!("{a:#x}.{b}"));
            return Err(strange(format!("a message of kind {found} came, not {expected}")));
        }
        let rank = of.rank;
        if of.ranks != self.ranks || rank >= self.ranks || rank == self.rank {
            return Err(format!(
                "rank {rank} of {} ranks came, not another of {}: the server has mixed two groups up",
                of.ranks, self.ranks
            ));
        }
        if of.plan != self.plan {
            return Err(format!("rank {rank} has loaded another model, or for other settings or kernels"));
        }
        if of.bytes != self.bytes {
            return Err(format!("rank {rank} has an inbox of {} bytes, not of {}", of.bytes, self.bytes));
        }
        Ok((rank as usize, of))
    }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    pub fn header(rank: usize, ranks: usize) -> Header {
        Header::new(&Group { rank, ranks, plan: "a plan".into() }, 4096, [rank as u8; 16])
    }

    #[test]
    fn another_rank_of_the_group_is_taken_and_nobody_else() {
        let own = header(0, 2);
        assert_eq!(own.peer(bytemuck::bytes_of(&header(1, 2))), Ok((1, header(1, 2))));
        let refusal = |other: Header| own.peer(bytemuck::bytes_of(&other)).unwrap_err();
        let good = header(1, 2);
        for (other, says) in [
            (Header { magic: 1, ..good }, "of one build"),
            (Header { version: 9, ..good }, "of one build"),
            (header(0, 2), "rank 0 of 2 ranks came, not another of 2"),
            (header(2, 2), "rank 2 of 2 ranks came"),
            (header(1, 4), "rank 1 of 4 ranks came, not another of 2"),
            (Header { bytes: 8192, ..good }, "rank 1 has an inbox of 8192 bytes, not of 4096"),
            (Header { plan: [0; 32], ..good }, "rank 1 has loaded another model"),
        ] {
            assert!(refusal(other).contains(says), "{}", refusal(other));
        }
        let other_plan = Group { rank: 1, ranks: 2, plan: "another plan".into() };
        assert!(refusal(Header::new(&other_plan, 4096, [0; 16])).contains("another model"));
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
            prop_assert!(header(0, 2).peer(&bytes).is_err());
        }

        #[test]
        fn no_byte_but_those_of_the_gpu_may_differ(at in 0..BYTES, by in 1..=255_u8) {
            let mut bytes = bytemuck::bytes_of(&header(1, 3)).to_vec();
            bytes[at] ^= by;
            // Rank 1 may become rank 2 of 3.
            let gpu = std::mem::offset_of!(Header, gpu);
            let another_rank = at == std::mem::offset_of!(Header, rank) && by == 3;
            prop_assert_eq!(header(0, 3).peer(&bytes).is_ok(), (gpu..gpu + 16).contains(&at) || another_rank);
        }
    }
}
