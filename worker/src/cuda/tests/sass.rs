//! Instructions of compiled kernels (sm_90): whether a warp gives a slot of shared memory back before it has what it
//! read from it.
//!
//! An arrive on an mbarrier overtakes shared-memory loads of its own warp that are still queued, and a bulk copy then
//! overwrites what they have not read (kernels/NOTES.md, "Release only what has been used"). So in front of each arrive
//! all loads must have been waited for, which only the instructions tell. Words of 16 bytes; where what lies in them is
//! found by `nvdisasm -hex` (CUDA 13.0): opcode in bits 0 to 11, the scoreboard that a load counts in 110 to 112, those
//! that an instruction waits for in 116 to 121, a branch's way in 16 to 23 and 34 to 81, in fours of bytes.

use std::collections::{BTreeMap, HashSet};

const LDS: u64 = 0x984;
const LDSM: u64 = 0x83b;
const SYNCS_ARRIVE: u64 = 0x9a7;
/// Shuffles wait in the same queue: who has a shuffle's value has what was loaded before it, and the compiler counts on
/// that.
const SHFL: [u64; 4] = [0x389, 0x589, 0x989, 0xf89];
/// Branches and calls, and where threads that have parted come together.
const WITH_TARGETS: [u64; 3] = [0x947, 0x944, 0x945];
const SCOREBOARDS: u64 = 6;
const INSTRUCTION: usize = 16;

/// Arrives of a cubin that are in front of the data of loads, as `kernel+byte: loads`. Loads that come to it by a
/// branch are not seen.
pub(super) fn early_arrives(cubin: &[u8]) -> Vec<String> {
    let of = |(kernel, code): (String, &[u8])| {
        let found = early_in(code).into_iter();
        found.map(move |(byte, loads)| format!("{kernel}+{byte:#x}: {loads} loads")).collect::<Vec<_>>()
    };
    kernels(cubin).into_iter().flat_map(of).collect()
}

/// (byte of the arrive, loads that are still on their way).
fn early_in(code: &[u8]) -> Vec<(usize, usize)> {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let instructions: Vec<_> = code.chunks_exact(INSTRUCTION).map(|of| (word(&of[..8]), word(&of[8..]))).collect();
    let opcode = |low: u64| low & 0xfff;
    let targets: HashSet<i64> = (1..)
        .zip(&instructions)
        .filter(|(_, (low, _))| WITH_TARGETS.contains(&opcode(*low)))
        .map(|(next, (low, high))| {
            let way = ((high & 0x3_ffff) << 30 | low >> 34) << 8 | low >> 16 & 0xff;
            next + ((way << 8) as i64 >> 8) * 4 / INSTRUCTION as i64
        })
        .collect();
    // Of loads and shuffles on their way: instruction, scoreboard and whether it is a load.
    let (mut loads, mut found) = (BTreeMap::new(), Vec::new());
    for (index, (low, high)) in instructions.iter().enumerate() {
        if targets.contains(&(index as i64)) {
            loads.clear();
        }
        for board in (0..SCOREBOARDS).filter(|board| high >> 52 >> board & 1 == 1) {
            // They return in order: who waits for one has all that came before it.
            if let Some(last) = loads.iter().rev().find(|(_, (of, _))| *of == board).map(|(index, _)| *index) {
                loads = loads.split_off(&(last + 1));
            }
        }
        let code = opcode(*low);
        if [LDS, LDSM].contains(&code) || SHFL.contains(&code) {
            loads.insert(index, (high >> 46 & 7, !SHFL.contains(&code)));
        } else if code == SYNCS_ARRIVE {
            let left = loads.values().filter(|(_, is_load)| *is_load).count();
            found.extend((left > 0).then_some((index * INSTRUCTION, left)));
        }
    }
    found
}

/// The code of each kernel: its name and its section of the ELF file.
fn kernels(cubin: &[u8]) -> Vec<(String, &[u8])> {
    const HEADER: usize = 64;
    let number = |at: usize, bytes: usize| {
        cubin[at..at + bytes].iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte))
    };
    let (headers, count, names) = (number(0x28, 8), number(0x3c, 2), number(0x3e, 2));
    let section = |index: usize| {
        let at = headers + index * HEADER;
        let begin = number(at + 0x18, 8);
        (number(at, 4), begin, begin + number(at + 0x20, 8))
    };
    let (_, names, _) = section(names);
    let named = (0..count).map(|index| {
        let (name, begin, end) = section(index);
        let bytes = cubin[names + name..].split(|byte| *byte == 0).next().expect("a name ends");
        (String::from_utf8_lossy(bytes).into_owned(), begin, end)
    });
    named.filter_map(|(name, begin, end)| Some((name.strip_prefix(".text.")?.to_owned(), &cubin[begin..end]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An instruction that waits for the scoreboards of a mask, and counts in one (7: in none).
    fn instruction(opcode: u64, waits: u64, counts: u64) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&opcode.to_le_bytes());
        bytes[8..].copy_from_slice(&(waits << 52 | counts << 46).to_le_bytes());
        bytes
    }

    #[test]
    fn an_arrive_in_front_of_the_data_is_found() {
        const ADD: u64 = 0x221;
        let code = |of: &[(u64, u64, u64)]| {
            of.iter().flat_map(|(opcode, waits, counts)| instruction(*opcode, *waits, *counts)).collect::<Vec<_>>()
        };
        let arrive = (SYNCS_ARRIVE, 0, 7);
        let loads = [(LDS, 0, 7), (LDSM, 0, 2)];
        assert_eq!(early_in(&code(&[loads[0], loads[1], arrive])), [(32, 2)]);
        assert_eq!(early_in(&code(&[loads[0], loads[1], (ADD, 1 << 2, 7), arrive])), []);
        assert_eq!(early_in(&code(&[loads[0], loads[1], (ADD, 1 << 3, 7), arrive])), [(48, 2)], "another scoreboard");
        assert_eq!(early_in(&code(&[loads[1], (LDS, 0, 3), (ADD, 1 << 2, 7), arrive])), [(48, 1)], "the second load");
        let shuffled = [loads[0], (SHFL[0], 0, 1), (ADD, 1 << 1, 7), arrive];
        assert_eq!(early_in(&code(&shuffled)), []);
        assert_eq!(early_in(&code(&[shuffled[0], shuffled[1], arrive])), [(32, 1)]);
        // A branch from behind the arrive to it: what lies before is another way.
        let back = 0x947 | 0xf8 << 16 | 0x3fff_ffff << 34;
        let mut looped = code(&[loads[1], arrive, (back, 0, 7)]);
        looped[2 * INSTRUCTION + 8..].copy_from_slice(&0x3_ffff_u64.to_le_bytes());
        assert_eq!(early_in(&looped), []);
    }
}
