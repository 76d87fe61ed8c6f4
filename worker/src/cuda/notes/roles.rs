//! What the warps of a traced kernel do from one of their stages to the next: the stages of `reached` in
//! looped_decoder.cu and wide_decoder.cu, in words.

use std::ops::Range;

use super::phase::Phase;
use crate::cuda::kernels::variants::{Design, Variant};

/// A phase in a consumer warp's stages: from, where its input is there if that is noted, to.
pub type Stages = (Phase, usize, Option<usize>, usize);

/// The roles of a kernel.
#[derive(Debug)]
pub struct Roles {
    /// Its first warps: each is in one phase at a time.
    pub consumers: usize,
    /// The warp in whose place, with the LM head, the launch notes its clocks.
    pub clocks: usize,
    /// Phase, and whether that is a wait, in which a step begins: from [`STEP_BEGUN`] to stage 0 of the first layer.
    pub begin: (Phase, bool),
    /// Of a layer, in order.
    pub layer: &'static [Stages],
    /// After the layers.
    pub head: &'static [Stages],
    /// Phases whose waits are noted apart, all of them.
    pub known_waits: &'static [Phase],
    /// What the timeline shows of a multiprocessor.
    pub tracks: [Track; 4],
    /// Of a layer, in order, where they are noted.
    pub exchanges: &'static [ExchangeStages],
    /// The warps that tell other ranks and hear them.
    pub tellers: Range<usize>,
}

/// Ranks add up what each has of a product.
#[derive(Debug)]
pub struct ExchangeStages {
    /// The product's.
    pub phase: Phase,
    /// Of a teller: it has told the last of its sums.
    pub pushed: usize,
    /// It has heard the last of all ranks', and is about to publish them to its GPU.
    pub heard: usize,
    /// Of a consumer: it has them, so its next product begins.
    pub used: usize,
    /// How many layers later that is; the LM head comes after the last.
    pub layers_on: usize,
}

/// A warp in the timeline.
#[derive(Debug)]
pub struct Track {
    /// What the timeline calls it.
    pub name: &'static str,
    /// Its number in the block.
    pub warp: usize,
    /// What its stages are.
    pub shows: Shows,
}

/// What a warp's stages are.
#[derive(Debug)]
pub enum Shows {
    /// A consumer's phases.
    Phases,
    /// What it does from each stage of a layer to the next, and from the first to the second of the LM head. What
    /// begins with "wait" is one, and in the first layer alone.
    Work(&'static [&'static str], &'static str),
    /// What it publishes at each stage.
    Published(&'static [&'static str]),
}

/// A consumer's stage, noted with the LM head, when a step begins.
pub const STEP_BEGUN: usize = 3;

/// Of looped_decoder.cu: 16 consumers, the producer, two warps of the epilogue.
pub static NARROW: Roles = Roles {
    consumers: 16,
    clocks: 16,
    // For the tokens of the step before. The embedding lies within the first layer's q, k and v.
    begin: (Phase::Choose, true),
    layer: &[
        (Phase::QueryKeyValue, 0, Some(1), 2),
        (Phase::Attend, 2, None, 3),
        (Phase::Merge, 3, None, 4),
        (Phase::AttentionOut, 4, Some(5), 6),
        (Phase::GateUp, 6, Some(7), 8),
        (Phase::Down, 8, Some(9), 10),
    ],
    head: &[(Phase::Head, 0, Some(1), 2)],
    // Attention's waits lie within its leaves.
    known_waits: &[Phase::QueryKeyValue, Phase::AttentionOut, Phase::GateUp, Phase::Down, Phase::Head, Phase::Choose],
    tracks: [
        Track {
            name: "stream",
            warp: 16,
            shows: Shows::Work(
                &["stream qkv", "wait for tokens", "stream pages", "stream o", "stream gate/up", "stream down"],
                "stream head",
            ),
        },
        Track { name: "consumer 0 (has attention)", warp: 0, shows: Shows::Phases },
        Track { name: "consumer 15 (merges)", warp: 15, shows: Shows::Phases },
        Track {
            name: "epilogue",
            warp: 17,
            shows: Shows::Published(&["q, k, v", "residual after o", "activation", "residual after down"]),
        },
    ],
    exchanges: &[
        ExchangeStages { phase: Phase::AttentionOut, pushed: 4, heard: 5, used: 7, layers_on: 0 },
        // By q, k and v, or the LM head.
        ExchangeStages { phase: Phase::Down, pushed: 6, heard: 7, used: 1, layers_on: 1 },
    ],
    tellers: 17..19,
};

/// Of wide_decoder.cu: 8 consumers, of which four attend a set of items; two warps that stream, one that fetches
/// activations, one that finds norms.
pub static WIDE: Roles = Roles {
    consumers: 8,
    clocks: 8,
    begin: (Phase::Embed, false),
    layer: &[
        (Phase::QueryKeyValue, 0, None, 1),
        // The peer's partial sums and 1 / rms.
        (Phase::QueryKeyValue, 1, Some(12), 3),
        (Phase::Attend, 3, None, 4),
        (Phase::AttentionOut, 4, None, 6),
        (Phase::GateUp, 6, None, 7),
        (Phase::Down, 7, None, 9),
    ],
    head: &[(Phase::Head, 0, None, 1), (Phase::Choose, 1, None, 2)],
    // Products wait for their inputs piece by piece, attention for its queries item by item.
    known_waits: &[],
    tracks: [
        Track {
            name: "stream",
            warp: 8,
            shows: Shows::Work(&["stream qkv", "stream pages and o", "stream gate/up and down"], "stream head"),
        },
        Track { name: "consumer 0 (first set)", warp: 0, shows: Shows::Phases },
        Track { name: "consumer 7 (second set)", warp: 7, shows: Shows::Phases },
        Track {
            name: "activations",
            warp: 9,
            shows: Shows::Work(&["fetch for qkv and o", "fetch for gate/up and down"], "fetch for head"),
        },
    ],
    exchanges: &[],
    tellers: 0..0,
};

impl Roles {
    /// What the warps of a kernel do, where they are of a loop.
    pub fn of(variant: Variant) -> Option<&'static Self> {
        match variant.design {
            Design::Narrow => Some(&NARROW),
            Design::Wide => Some(&WIDE),
            Design::Matrix | Design::Unlooped { .. } => None,
        }
    }

    /// The phases of a step that its warps tell apart, in order.
    pub fn phases(&self) -> impl Iterator<Item = Phase> {
        let told = self.layer.iter().chain(self.head).map(|stages| stages.0).chain([self.begin.0]);
        let told: Vec<Phase> = told.collect();
        Phase::ALL.into_iter().filter(move |phase| told.contains(phase))
    }
}
