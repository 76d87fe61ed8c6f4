//! Instructions of compiled kernels (sm_90): whether a warp gives a slot of shared memory back before it has what it
//! read from it.
//!
//! An arrive on an mbarrier overtakes shared-memory loads of its own warp that are still queued, and a bulk copy then
//! overwrites what they have not read (kernels/NOTES.md, "Release only what has been used"). So in front of each arrive
//! all loads must have been waited for, which only the instructions tell. Words of 16 bytes; where what lies in them is
//! found by `nvdisasm -hex` (CUDA 13.0): opcode in bits 0 to 11, the scoreboard that a load counts in 110 to 112, those
//! that an instruction waits for in 116 to 121, its predicate in 12 to 15.

use std::collections::BTreeMap;

const LDS: u64 = 0x984;
const LDSM: u64 = 0x83b;
const SYNCS_ARRIVE: u64 = 0x9a7;
/// Shuffles wait in the same queue: who has a shuffle's value has what was loaded before it, and the compiler counts on
/// that.
const SHFL: [u64; 4] = [0x389, 0x589, 0x989, 0xf89];
/// What nothing follows, if its predicate is always true.
const BRA: u64 = 0x947;
const EXIT: u64 = 0x94d;
const RET: u64 = 0x950;
const ALWAYS: u64 = 7;
const SCOREBOARDS: u64 = 6;
const INSTRUCTION: usize = 16;

/// A kernel's instructions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub kernel: String,
    pub loads: usize,
    pub arrives: usize,
    /// Arrives in front of the data of loads: byte of the code, loads that are still on their way. Only those of
    /// instructions that follow each other: what comes to an arrive by a branch is not seen.
    pub early: Vec<(usize, usize)>,
}

/// What is found in each kernel of a cubin.
pub(super) fn arrives(cubin: &[u8]) -> Vec<Found> {
    kernels(cubin).into_iter().map(|(kernel, code)| Found { kernel, ..found_in(code) }).collect()
}

fn found_in(code: &[u8]) -> Found {
    let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    let mut found = Found::default();
    // Of loads and shuffles on their way: instruction, scoreboard and whether it is a load.
    let mut pending = BTreeMap::new();
    for (index, instruction) in code.chunks_exact(INSTRUCTION).enumerate() {
        let (low, high) = (word(&instruction[..8]), word(&instruction[8..]));
        for board in (0..SCOREBOARDS).filter(|board| high >> 52 >> board & 1 == 1) {
            // They return in order: who waits for one has all that came before it.
            if let Some(last) = pending.iter().rev().find(|(_, (of, _))| *of == board).map(|(index, _)| *index) {
                pending = pending.split_off(&(last + 1));
            }
        }
        match low & 0xfff {
            LDS | LDSM => {
                found.loads += 1;
                pending.insert(index, (high >> 46 & 7, true));
            }
            code if SHFL.contains(&code) => drop(pending.insert(index, (high >> 46 & 7, false))),
            SYNCS_ARRIVE => {
                found.arrives += 1;
                let left = pending.values().filter(|(_, is_load)| *is_load).count();
                found.early.extend((left > 0).then_some((index * INSTRUCTION, left)));
            }
            EXIT | RET if low >> 12 & 15 == ALWAYS => pending.clear(),
            // Neither of lanes that differ nor by a uniform predicate.
            BRA if low >> 12 & 15 == ALWAYS && low >> 32 & 3 == 0 && high >> 20 & 0xfff == 0x038 => pending.clear(),
            _ => {}
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
        let early = |of: &[(u64, u64, u64)]| {
            let code = of.iter().flat_map(|(opcode, waits, counts)| instruction(*opcode, *waits, *counts));
            found_in(&code.collect::<Vec<_>>()).early
        };
        let arrive = (SYNCS_ARRIVE, 0, 7);
        let loads = [(LDS, 0, 7), (LDSM, 0, 2)];
        assert_eq!(early(&[loads[0], loads[1], arrive]), [(32, 2)]);
        assert_eq!(early(&[loads[0], loads[1], (ADD, 1 << 2, 7), arrive]), []);
        assert_eq!(early(&[loads[0], loads[1], (ADD, 1 << 3, 7), arrive]), [(48, 2)], "another scoreboard");
        assert_eq!(early(&[loads[1], (LDS, 0, 3), (ADD, 1 << 2, 7), arrive]), [(48, 1)], "the second load");
        let shuffled = [loads[0], (SHFL[0], 0, 1), (ADD, 1 << 1, 7), arrive];
        assert_eq!(early(&shuffled), []);
        assert_eq!(early(&[shuffled[0], shuffled[1], arrive]), [(32, 1)]);
        // Behind a branch that is not always taken the load is still on its way; behind an exit it is another's.
        assert_eq!(early(&[loads[0], (BRA, 0, 7), arrive]), [(32, 1)]);
        assert_eq!(early(&[loads[0], (EXIT | ALWAYS << 12, 0, 7), arrive]), []);
        assert_eq!(early(&[loads[0], (EXIT, 0, 7), arrive]), [(32, 1)]);
    }
}
