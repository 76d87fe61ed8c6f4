//! The launches of a matrix pass: a phase of a layer each, in the order of kernels/matrix/layout.cuh.

use super::Pass;
use super::carry::{Behind, Carried};
use super::products::{Cut, Products};
use crate::cuda::kernels::items::Last;
use crate::cuda::weights::layout::Layout;

/// A phase of a pass: its kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Embed,
    Norms,
    QueryKeyValue,
    HeadNorms,
    AttendTiles,
    AttendCutTiles,
    AttendSpans,
    MergeSpans,
    AttentionOut,
    GateUp,
    Down,
    Gather,
    Head,
    HeadChoose,
    Choose,
    QueryKeyValueHalves,
    AttentionOutHalves,
    DownHalves,
    QueryKeyValueQuads,
    AttentionOutQuads,
    DownQuads,
    MeetBegun,
    TellEmbeddings,
    MeetEmbedded,
    JoinOut,
    JoinDown,
    NormsOfJoinedOut,
    NormsOfJoinedDown,
    MeetLogits,
}

impl Phase {
    pub(super) const ALL: [Self; 29] = [
        Self::Embed,
        Self::Norms,
        Self::QueryKeyValue,
        Self::HeadNorms,
        Self::AttendTiles,
        Self::AttendCutTiles,
        Self::AttendSpans,
        Self::MergeSpans,
        Self::AttentionOut,
        Self::GateUp,
        Self::Down,
        Self::Gather,
        Self::Head,
        Self::HeadChoose,
        Self::Choose,
        Self::QueryKeyValueHalves,
        Self::AttentionOutHalves,
        Self::DownHalves,
        Self::QueryKeyValueQuads,
        Self::AttentionOutQuads,
        Self::DownQuads,
        Self::MeetBegun,
        Self::TellEmbeddings,
        Self::MeetEmbedded,
        Self::JoinOut,
        Self::JoinDown,
        Self::NormsOfJoinedOut,
        Self::NormsOfJoinedDown,
        Self::MeetLogits,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Embed => "matrix_embed",
            Self::Norms => "matrix_norms",
            Self::QueryKeyValue => "matrix_qkv",
            Self::HeadNorms => "matrix_head_norms",
            Self::AttendTiles => "matrix_attend_tiles",
            Self::AttendCutTiles => "matrix_attend_cut_tiles",
            Self::AttendSpans => "matrix_attend_spans",
            Self::MergeSpans => "matrix_merge_spans",
            Self::AttentionOut => "matrix_out",
            Self::GateUp => "matrix_gate_up",
            Self::Down => "matrix_down",
            Self::Gather => "matrix_gather",
            Self::Head => "matrix_head",
            Self::HeadChoose => "matrix_head_choose",
            Self::Choose => "matrix_choose",
            Self::QueryKeyValueHalves => "matrix_qkv_halves",
            Self::AttentionOutHalves => "matrix_out_halves",
            Self::DownHalves => "matrix_down_halves",
            Self::QueryKeyValueQuads => "matrix_qkv_quads",
            Self::AttentionOutQuads => "matrix_out_quads",
            Self::DownQuads => "matrix_down_quads",
            Self::MeetBegun => "matrix_meet_begun",
            Self::TellEmbeddings => "matrix_tell_embeddings",
            Self::MeetEmbedded => "matrix_meet_embedded",
            Self::JoinOut => "matrix_join_out",
            Self::JoinDown => "matrix_join_down",
            Self::NormsOfJoinedOut => "matrix_norms_of_joined_out",
            Self::NormsOfJoinedDown => "matrix_norms_of_joined_down",
            Self::MeetLogits => "matrix_meet_logits",
        }
    }

    /// Whether all that it does is to wait for the other ranks, with one block.
    pub(super) fn meets(self) -> bool {
        matches!(self, Self::MeetBegun | Self::MeetEmbedded | Self::MeetLogits)
    }

    /// What it leaves for the other ranks, where copy engines carry that.
    pub(super) fn leaves(self) -> Option<Carried> {
        match self {
            Self::AttentionOut | Self::AttentionOutHalves | Self::AttentionOutQuads => Some(Carried::Sums(Behind::Out)),
            Self::Down | Self::DownHalves | Self::DownQuads => Some(Carried::Sums(Behind::Down)),
            Self::JoinOut => Some(Carried::X(Behind::Out)),
            Self::JoinDown => Some(Carried::X(Behind::Down)),
            _ => None,
        }
    }

    /// The same by blocks that divide tiles so.
    fn cut(self, cut: Cut) -> Self {
        match (self, cut) {
            (Self::QueryKeyValue, Cut::Halves) => Self::QueryKeyValueHalves,
            (Self::AttentionOut, Cut::Halves) => Self::AttentionOutHalves,
            (Self::Down, Cut::Halves) => Self::DownHalves,
            (Self::QueryKeyValue, Cut::Quads) => Self::QueryKeyValueQuads,
            (Self::AttentionOut, Cut::Quads) => Self::AttentionOutQuads,
            (Self::Down, Cut::Quads) => Self::DownQuads,
            (whole, _) => whole,
        }
    }
}

/// A launch of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Step {
    pub(super) phase: Phase,
    pub(super) layer: u32,
    /// Whether only rows that sample have a part in it: it comes behind K and V of the last layer.
    pub(super) samples: bool,
}

/// What decides which launches a pass has, beside its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) layers: u32,
    qk_norm: bool,
    pub(super) products: Products,
    /// Whether there are other ranks.
    group: bool,
}

impl Steps {
    pub(super) fn of(layout: &Layout, products: Products) -> Self {
        let c = &layout.plan().config;
        Self { layers: c.num_layers as u32, qk_norm: c.qk_norm, products, group: layout.ranks() > 1 }
    }

    /// The launches of a pass of so many rows. What it has no items for is left out.
    pub(super) fn phases(&self, rows: u32, pass: &Pass, last: Last) -> Vec<Step> {
        let mut steps = self.body(rows, pass, last);
        steps.extend(self.head(pass, false));
        steps
    }

    /// Of these what comes before the end of the layers. Where no row samples, the last layer ends with K and V.
    pub(super) fn body(&self, rows: u32, pass: &Pass, last: Last) -> Vec<Step> {
        let Self { layers, qk_norm, products, group } = *self;
        let mut steps = Vec::new();
        let mut put = |phases: &[(Phase, bool)], layer, samples| {
            let run = phases.iter().filter(|(_, runs)| *runs);
            steps.extend(run.map(|&(phase, _)| Step { phase, layer, samples }));
        };
        put(
            &[
                (Phase::MeetBegun, group),
                (Phase::TellEmbeddings, group),
                (Phase::MeetEmbedded, group),
                (Phase::Embed, true),
            ],
            0,
            false,
        );
        let qkv = Phase::QueryKeyValue.cut(products.cuts(rows)[0]);
        let attend = self.attend(rows, pass);
        for layer in 0..layers {
            let norms = if layer == 0 { Phase::Norms } else { self.norms()[1] };
            put(&[(norms, true), (qkv, true), (Phase::HeadNorms, qk_norm)], layer, false);
            if layer + 1 < layers {
                put(&attend, layer, false);
            } else if pass.sample_count > 0 {
                put(&self.attend(last.tokens(), &pass.of_last(last)), layer, true);
            }
        }
        steps
    }

    /// What a layer computes behind q, k and v of so many rows, and whether there is any of it.
    fn attend(&self, rows: u32, pass: &Pass) -> [(Phase, bool); 10] {
        let (tiles, cut) = (pass.tile_count > 0, pass.cut != 0);
        let [_, out, _, down] = self.products.cuts(rows);
        [
            (Phase::AttendTiles, tiles && !cut),
            (Phase::AttendCutTiles, tiles && cut),
            (Phase::AttendSpans, pass.span_count > 0 && pass.tile_blocks == 0),
            (Phase::MergeSpans, pass.merge_count > 0),
            (Phase::AttentionOut.cut(out), true),
            (Phase::JoinOut, self.group),
            (self.norms()[0], true),
            (Phase::GateUp, true),
            (Phase::Down.cut(down), true),
            (Phase::JoinDown, self.group),
        ]
    }

    /// And what comes behind: of the rows that sample. `again`: other launches have written logits since the pass
    /// began.
    pub(super) fn head(&self, pass: &Pass, again: bool) -> Vec<Step> {
        let Self { layers, group, .. } = *self;
        let (samples, chooses) = (pass.sample_count > 0, pass.stopped != 0);
        let head = [
            (self.norms()[1], samples),
            (Phase::Gather, samples),
            (Phase::MeetBegun, samples && group && again),
            (Phase::Head, samples && !chooses),
            (Phase::HeadChoose, samples && chooses),
            (Phase::MeetLogits, samples && group),
            (Phase::Choose, samples && chooses),
        ];
        let run = head.into_iter().filter(|(_, runs)| *runs);
        run.map(|(phase, _)| Step { phase, layer: layers, samples: true }).collect()
    }

    /// The norms behind o and behind down.
    fn norms(&self) -> [Phase; 2] {
        match self.group {
            true => [Phase::NormsOfJoinedOut, Phase::NormsOfJoinedDown],
            false => [Phase::Norms; 2],
        }
    }
}

/// What one of two passes that are computed together does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// Its launches in front of o or of down.
    Compute,
    /// That product, whose sums are then carried.
    Tell,
    /// What adds them up and makes x of them, which is then carried.
    Join,
}

/// The layers of two passes in turns: the pass, 0 or 1, and what it does. What one tells and joins is carried while the
/// other computes.
pub(super) fn turns(layers: u32) -> impl Iterator<Item = (usize, Turn)> {
    use Turn::{Compute, Join, Tell};
    // A layer has two such products.
    let of_stage = |stage| {
        let before = (stage > 0).then_some((1, Join));
        [(0, Compute)].into_iter().chain(before).chain([(0, Tell), (1, Compute), (0, Join), (1, Tell)])
    };
    (0..2 * layers).flat_map(of_stage).chain([(1, Join)])
}

/// Names of the kernels.
#[cfg(test)]
pub fn names() -> [&'static str; Phase::ALL.len()] {
    Phase::ALL.map(Phase::name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parameter_is_as_long_as_the_kernels() {
        assert_eq!(size_of::<Pass>(), 7 * 8 + 8 * 4);
        for (place, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(phase as usize, place);
        }
    }

    fn names(steps: &Steps, rows: u32, pass: &Pass, last: Last) -> Vec<(&'static str, u32)> {
        let steps = steps.phases(rows, pass, last).into_iter();
        steps.map(|step| (&step.phase.name()["matrix_".len()..], step.layer)).collect()
    }

    #[test]
    fn a_pass_launches_what_it_has_items_for() {
        let steps = |qk_norm| Steps { layers: 2, qk_norm, products: Products::LLAMA_8B, group: false };
        // The first layer of two.
        let first = |rows, pass: &Pass, qk_norm| {
            let all = names(&steps(qk_norm), rows, pass, Last::default());
            all.into_iter().filter(|(_, layer)| *layer == 0).map(|(name, _)| name).collect::<Vec<_>>()
        };
        let prompt = Pass { tile_count: 3, ..Pass::default() };
        let layer = ["embed", "norms", "qkv", "attend_tiles", "out", "norms", "gate_up", "down"];
        assert_eq!(first(2048, &prompt, false), layer);
        let all = Pass { span_count: 1, merge_count: 1, sample_count: 1, ..prompt };
        let layer = ["norms", "qkv", "head_norms", "attend_tiles", "attend_spans", "merge_spans", "out", "norms"];
        assert_eq!(first(2048, &all, true)[1..9], layer);
        let cut = first(2048, &Pass { cut: 1, merge_count: 9, ..prompt }, false);
        assert_eq!(cut[3..6], ["attend_cut_tiles", "merge_spans", "out"]);
        let beside = first(2048, &Pass { tile_blocks: 2, ..all }, false);
        assert_eq!(beside[3..6], ["attend_tiles", "merge_spans", "out"], "rows that are alone have the other blocks");
        let quads = ["norms", "qkv_halves", "attend_tiles", "out_quads", "norms", "gate_up", "down_quads"];
        assert_eq!(first(128, &prompt, false)[1..], quads);
        let halves = ["norms", "qkv", "attend_tiles", "out_halves", "norms", "gate_up", "down_halves"];
        assert_eq!(first(256, &prompt, false)[1..], halves);
    }

    /// Behind K and V of the last layer there are only rows that sample.
    #[test]
    fn the_last_layer_is_of_rows_that_sample() {
        let steps = Steps { layers: 2, qk_norm: true, products: Products::LLAMA_8B, group: false };
        let of = |pass: &Pass, last| -> Vec<_> {
            let all = names(&steps, 2048, pass, last).into_iter();
            all.skip_while(|(_, layer)| *layer == 0).collect()
        };
        let project = ["norms", "qkv", "head_norms"].map(|name| (name, 1));
        let none = Pass { tile_count: 9, span_count: 1, merge_count: 8, cut: 1, ..Pass::default() };
        assert_eq!(of(&none, Last::default()), project, "no row samples");

        let pass = Pass { sample_count: 2, ..none };
        let last = Last { blocks: 1 << 3 | 1, tiles: 1, merges: 0 };
        let attend = ["attend_cut_tiles", "attend_spans", "out_halves", "norms", "gate_up", "down_halves"];
        let head = |names: &[&'static str]| names.iter().map(|name| (*name, 2)).collect::<Vec<_>>();
        let all = [&project[..], &attend.map(|name| (name, 1)), &head(&["norms", "gather", "head"])].concat();
        assert_eq!(of(&pass, last), all, "two blocks are cut as two are");
        let chooses = Pass { stopped: 1, ..pass };
        let choose = head(&["norms", "gather", "head_choose", "choose"]);
        assert_eq!(of(&chooses, last)[all.len() - 3..], choose);
        for pass in [pass, Pass { tile_blocks: 2, ..pass }] {
            let one = of(&pass, Last { blocks: 1 << 15, tiles: 0, merges: 1 });
            assert_eq!(one[3..6], ["attend_spans", "merge_spans", "out_quads"].map(|name| (name, 1)));
        }

        let samples: Vec<_> = steps.phases(2048, &pass, last).iter().map(|step| step.samples).collect();
        assert!(samples.is_sorted() && samples.iter().filter(|samples| **samples).count() == attend.len() + 3);
    }

    #[test]
    fn two_passes_take_turns_so_that_each_computes_while_the_other_is_carried() {
        let all: Vec<_> = turns(3).collect();
        for pass in [0, 1] {
            let own: Vec<_> = all.iter().filter(|(of, _)| *of == pass).map(|(_, turn)| *turn).collect();
            assert_eq!(own, [Turn::Compute, Turn::Tell, Turn::Join].repeat(6), "two stages a layer");
        }
        // Between a pass's sums and who adds them up, and between that and who reads x, the other computes.
        for (begin, end) in [(Turn::Tell, Turn::Join), (Turn::Join, Turn::Compute)] {
            for (at, &(pass, _)) in all.iter().enumerate().filter(|(_, (_, turn))| *turn == begin) {
                let after = all[at + 1..].iter().take_while(|of| **of != (pass, end));
                let others: Vec<_> = after.filter(|(of, _)| *of != pass).collect();
                // At the end nothing is left to compute.
                assert!(at + 2 >= all.len() || !others.is_empty(), "{pass} {begin:?} at {at}");
            }
        }
        assert_eq!(
            all[..5],
            [(0, Turn::Compute), (0, Turn::Tell), (1, Turn::Compute), (0, Turn::Join), (1, Turn::Tell)]
        );
    }

    #[test]
    fn ranks_meet_around_what_they_write_to_each_other() {
        let pass = Pass { span_count: 1, sample_count: 1, ..Pass::default() };
        let steps = Steps { layers: 1, qk_norm: false, products: Products::LLAMA_8B_RANK, group: true };
        let last = Last { blocks: 1, tiles: 0, merges: 0 };
        let names: Vec<_> = names(&steps, 8, &pass, last).into_iter().map(|(name, _)| name).collect();
        let embed = ["meet_begun", "tell_embeddings", "meet_embedded", "embed", "norms", "qkv_quads", "attend_spans"];
        let layer = ["out", "join_out", "norms_of_joined_out", "gate_up", "down", "join_down", "norms_of_joined_down"];
        assert_eq!(names, [&embed[..], &layer, &["gather", "head", "meet_logits"]].concat());
        let chooses = steps.phases(8, &Pass { stopped: 1, ..pass }, last).into_iter().map(|step| step.phase);
        assert!(chooses.skip(names.len() - 2).eq([Phase::HeadChoose, Phase::MeetLogits, Phase::Choose]));
        let all = steps.phases(8, &pass, last);
        assert!(all.iter().all(|Step { phase, .. }| phase.meets() == phase.name().starts_with("matrix_meet")));
    }
}
