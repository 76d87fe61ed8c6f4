//! What a launch of the kernel is given, and what it answers: the same structs as in kernels/layout/launch.cuh.

use bytemuck::{Pod, Zeroable};

use crate::cuda::fabric::MAX_RANKS;

/// [`Row::flags`]: the row's logits are needed.
pub const ROW_SAMPLE: u32 = 1;
/// [`Row::flags`]: several rows of its sequence sample; only the host knows which of their tokens hold.
pub const ROW_SEVERAL: u32 = 2;
/// [`Launch::flags`]: the logits are written to memory.
pub const LAUNCH_LOGITS: u32 = 1;
/// [`Launch::flags`]: one step, whose tokens are left to a launch of the sampler.
pub const LAUNCH_UNDRAWN: u32 = 2;
/// Words of [`Launch::report`].
pub const REPORT_WORDS: usize = 16;
/// In a report: no rank is at fault.
const NOBODY: u32 = u32::MAX;
/// The token of a row that computed nothing in a step.
pub const NO_TOKEN: u32 = u32::MAX;

/// One row of a launch: one token of one sequence. Rows of a sequence are next to each other, positions ascending; in
/// launches of several steps it has one, unless the host gives the rows of each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Row {
    /// Token to embed.
    pub token: u32,
    /// Its position.
    pub position: u32,
    /// Row of the page table.
    pub slot: u32,
    /// First row of the same sequence in this launch.
    pub first_row: u32,
    /// Its position.
    pub first_position: u32,
    /// [`ROW_SAMPLE`], [`ROW_SEVERAL`].
    pub flags: u32,
    /// Past it the row idles.
    pub last_position: u32,
    /// 0
    pub reserved: u32,
}

impl Row {
    /// Computes nothing.
    pub const IDLE: Self = Self {
        token: 0,
        position: 1,
        slot: 0,
        first_row: 0,
        first_position: 1,
        flags: 0,
        last_position: 0,
        reserved: 0,
    };
}

/// The kernel's parameter. Addresses are the GPU's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Launch {
    /// The stream of weights.
    pub weights: u64,
    /// `[2 * layers + 1][hidden]` bf16
    pub gamma: u64,
    /// `[vocab, or the rank's shard of it][hidden]` bf16, or 0 where the LM head is the embedding.
    pub embedding: u64,
    /// `[layers][rows of q, k, v]` f32
    pub bias: u64,
    /// `[layers][rows of q, k, v, of o, of gate and up, of down]` f32; 0 where weights have no scales.
    pub scales: u64,
    /// `[layers][2][head_dim]` f32
    pub qk_norm: u64,
    /// `[positions][head_dim / 2][2]` f32
    pub rope: u64,
    /// The KV pool.
    pub kv: u64,
    /// `[layer][page][kv head][64]` f32
    pub k_scale: u64,
    /// Words of the exchanges.
    pub words: u64,
    /// `[slot][page_stride]` u32
    pub page_table: u64,
    /// `[columns][vocabulary padded to tiles]` f32; of several ranks the same place behind every rank's inbox
    pub logits: u64,
    /// `[row_count]` [`Row`]
    pub rows: u64,
    /// Mapped, of a launch whose host gives the rows of each step behind the first: `[steps][columns]` [`Row`], which
    /// all sample, or idle. Without any that sample the launch ends. Else 0.
    pub fed: u64,
    /// Of wide passes: [`super::deal::Deal::of`] these rows. Else 0.
    pub items: u64,
    /// Of a chain: u32, not 0 once its launches are to do nothing. Else 0.
    pub stopped: u64,
    /// Mapped: `[steps][columns]` of the step's tag << 32 | token.
    pub tokens: u64,
    /// Mapped: `[0]` set by the host to end the launch; `[1]` steps that it runs, once that is known; at the latest
    /// when it ends; `[2]` from the host: tag of the newest step whose rows lie in `fed`.
    pub control: u64,
    /// Mapped: [`REPORT_WORDS`] words, why a wait failed.
    pub report: u64,
    /// Where a timeline goes, or 0.
    pub trace: u64,
    /// Rows.
    pub row_count: u32,
    /// Most steps.
    pub steps: u32,
    /// Tag of the first layer of the first step.
    pub epoch: u32,
    /// Entries of a row of the page table.
    pub page_stride: u32,
    /// Pages of the pool.
    pub kv_pages: u32,
    /// [`LAUNCH_LOGITS`], [`LAUNCH_UNDRAWN`].
    pub flags: u32,
    /// This rank.
    pub rank: u32,
    /// 0
    pub reserved: u32,
    /// What other ranks tell each rank: its words for this kernel, where this GPU sees them; 0 where there is no rank.
    pub inbox: [u64; MAX_RANKS],
}

/// Why a wait in the kernel failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Report {
    /// Thread block.
    pub block: u32,
    /// Thread in it.
    pub thread: u32,
    /// Place in the kernel; [`site_name`] has words for it.
    pub site: u32,
    /// Tag, count or parity waited for; all ones where any data will do, 1 of a barrier that was only to complete.
    pub expected: u32,
    /// What was there.
    pub seen: u32,
    /// The rank that has not spoken, where one was waited for.
    pub missing: Option<u32>,
}

impl Report {
    /// Reads it; `None` if no wait failed.
    pub fn of(words: &[u32; REPORT_WORDS]) -> Option<Self> {
        let [set, block, thread, site, expected, seen, rank, ..] = *words;
        let missing = (rank != NOBODY).then_some(rank);
        (set != 0).then_some(Self { block, thread, site, expected, seen, missing })
    }
}

/// What was waited for at a site of the kernel (kernels/sync/wait.cuh).
pub fn site_name(site: u32) -> &'static str {
    match site {
        1 => "a slot of the ring to be released",
        2 => "an earlier chunk of the stream to land",
        3 => "a chunk of the stream",
        4 => "room for partial sums",
        5 => "partial sums",
        6 => "the tokens of the step before",
        7 => "a slot of activations to be released",
        8 => "activations",
        9 => "1 / rms of a step's columns",
        10 => "the input of attention",
        11 => "a query",
        12 => "K and V of this step",
        13 => "the result of a page",
        14 => "the output of attention",
        15 => "the input of the MLP",
        16 => "the activation of the MLP",
        17 => "the input of the LM head",
        18 => "the best tokens of all blocks",
        19 => "1 / rms of a column, from the block that adds its squares",
        20 => "the sampler's best tokens of all blocks",
        21 => "the sampler's largest values of all blocks",
        22 => "the sampler's sums before a token of all blocks",
        23 => "the sampler's sums of all blocks",
        24 => "the sampler's log-probabilities of all blocks",
        25 => "the sampler's lists of all blocks",
        26 => "the sampler's lists of likely tokens of all blocks",
        27 => "all blocks to pass a layer",
        28 => "its consumers to begin a layer",
        29 => "a layer to be opened",
        30 => "the sums of other ranks",
        31 => "a row of the embedding, from the rank that has it",
        32 => "the best tokens of all ranks",
        33 => "the residual's columns that other ranks have",
        34 => "all ranks to begin the launch, or a step whose rows hosts give",
        35 => "its warps to leave the rows of a step",
        36 => "all ranks to come as far in a pass",
        37 => "the rows of a step, from its host",
        _ => "an unnamed site",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structs_are_as_long_as_the_kernels() {
        assert_eq!((size_of::<Row>(), size_of::<Launch>()), (32, 20 * 8 + 8 * 4 + 16 * 8));
    }

    #[test]
    fn every_site_of_the_kernel_has_a_name() {
        let source = include_str!("../../../kernels/sync/wait.cuh");
        let sites = source.split_once("enum Site").unwrap().1.split_once('{').unwrap().1.split_once('}').unwrap().0;
        let mut number = 0;
        for site in sites.split(',').map(str::trim).filter(|site| !site.is_empty()) {
            number = site.split_once('=').map_or(number + 1, |(_, value)| value.trim().parse().unwrap());
            assert_ne!(site_name(number), "an unnamed site", "{site} ({number})");
        }
        assert_eq!(number, 37);
    }

    #[test]
    fn a_report_that_is_not_set_is_none() {
        let mut words = [0; REPORT_WORDS];
        words[1] = 3;
        assert_eq!(Report::of(&words), None);
        words[..7].copy_from_slice(&[1, 2, 3, 18, 5, 6, NOBODY]);
        let report = Report { block: 2, thread: 3, site: 18, expected: 5, seen: 6, missing: None };
        assert_eq!(Report::of(&words), Some(report));
        words[6] = 2;
        assert_eq!(Report::of(&words), Some(Report { missing: Some(2), ..report }));
    }
}
