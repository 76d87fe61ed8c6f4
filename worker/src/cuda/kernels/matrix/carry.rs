//! What copy engines carry between the ranks of a group while another pass multiplies: sums of o and of down to the
//! rank that adds them up, and x to all (kernels/matrix/ranks.cuh).

use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use crate::cuda::device::gpu::{Event, Gpu, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::kernels::launch::Launch;
use crate::cuda::kernels::module::Module;
use crate::cuda::weights::layout::Layout;

/// Bytes of a rank's word of a meet: a tag, and what kernels say beside it.
const MEET_WORD: u64 = 16;

/// What the source says of where that lies in the words of a pass, in this order. All in bytes, but for tokens and
/// parts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Places {
    x: u64,
    x_block: u64,
    partial: u64,
    outgoing: u64,
    part: u64,
    run: u64,
    block_tokens: u64,
    run_tokens: u64,
    out: Exchange,
    down: Exchange,
}

/// What ranks exchange behind o or behind down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct Exchange {
    /// Words, one of each rank, that say that its sums are there, and its x.
    sums_there: u64,
    x_there: u64,
    /// Parts of its sums.
    parts: u64,
}

/// The product in front of an exchange.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Behind {
    /// o.
    Out,
    /// down.
    Down,
}

/// What a launch leaves for the other ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Carried {
    /// What the product has summed, for who adds it up.
    Sums(Behind),
    /// x of the tokens that this rank has added up, for all.
    X(Behind),
}

/// A copy to another rank: bytes of this rank's words from `from` on, to those of `rank` from `to` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Copy {
    rank: usize,
    from: u64,
    to: u64,
    bytes: u64,
}

/// What goes from a rank where.
#[derive(Debug, Clone, Copy)]
struct Routes {
    places: Places,
    rank: usize,
    ranks: usize,
}

impl Routes {
    /// Runs of tokens that a rank adds up of a pass of so many rows, one behind the other: whole blocks.
    fn own_runs(&self, rows: u32) -> u64 {
        let Places { block_tokens, run_tokens, .. } = self.places;
        u64::from(rows).div_ceil(block_tokens).div_ceil(self.ranks as u64) * (block_tokens / run_tokens)
    }

    /// Those that a rank has: of the last ones fewer, or none.
    fn runs_of(&self, rows: u32, rank: usize) -> u64 {
        let (most, all) = (self.own_runs(rows), u64::from(rows).div_ceil(self.places.run_tokens));
        all.saturating_sub(rank as u64 * most).min(most)
    }

    /// The other ranks. Each begins with the next one, so that no two send to the same.
    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, ranks) = (self.rank, self.ranks);
        (1..ranks).map(move |distance| (rank + distance) % ranks)
    }

    fn exchange(&self, behind: Behind) -> Exchange {
        match behind {
            Behind::Out => self.places.out,
            Behind::Down => self.places.down,
        }
    }

    /// The copies of a pass of so many rows.
    fn of(&self, what: Carried, rows: u32) -> Vec<Copy> {
        match what {
            Carried::Sums(behind) => self.sums(behind, rows).collect(),
            Carried::X(_) => self.x(rows).collect(),
        }
    }

    /// Which word of the others says that they are there, and the layer of whose launches it is waited for.
    fn told(&self, what: Carried, layer: u32) -> (u64, u32) {
        let own = self.rank as u64 * MEET_WORD;
        match what {
            Carried::Sums(behind) => (self.exchange(behind).sums_there + own, layer),
            Carried::X(Behind::Out) => (self.places.out.x_there + own, layer),
            // The norms behind down are the next layer's.
            Carried::X(Behind::Down) => (self.places.down.x_there + own, layer + 1),
        }
    }

    /// What a product has summed, to who adds it up.
    fn sums(&self, behind: Behind, rows: u32) -> impl Iterator<Item = Copy> + use<> {
        let Self { places: Places { partial, outgoing, part, run, .. }, rank: own, .. } = *self;
        let (routes, parts) = (*self, self.exchange(behind).parts);
        let copies = self.others().flat_map(move |rank| {
            (0..parts).map(move |of| Copy {
                rank,
                from: outgoing + (rank as u64 * parts + of) * part,
                to: partial + (own as u64 * parts + of) * part,
                bytes: routes.runs_of(rows, rank) * run,
            })
        });
        copies.filter(|copy| copy.bytes > 0)
    }

    /// x of the tokens that this rank adds up, to all.
    fn x(&self, rows: u32) -> impl Iterator<Item = Copy> + use<> {
        let Places { x, x_block, block_tokens, run_tokens, .. } = self.places;
        let bytes = |runs: u64| (runs * run_tokens).div_ceil(block_tokens) * x_block;
        let at = x + self.rank as u64 * bytes(self.own_runs(rows));
        let bytes = bytes(self.runs_of(rows, self.rank));
        let copies = self.others().map(move |rank| Copy { rank, from: at, to: at, bytes });
        copies.filter(|copy| copy.bytes > 0)
    }
}

/// A rank's copies to the others.
#[derive(Debug)]
pub struct Carrier {
    /// Of copies, beside that of the launches.
    copies: Stream,
    event: Event,
    routes: Routes,
}

impl Carrier {
    /// Of the kernels in a module.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn new(gpu: &Arc<Gpu>, layout: &Layout, module: &Module) -> Result<Self, CudaError> {
        let places = module.constant("matrix_decoder_carried")?;
        let routes = Routes { places, rank: layout.rank().rank, ranks: layout.ranks() };
        Ok(Self { copies: Stream::new(gpu)?, event: Event::new(gpu)?, routes })
    }

    /// Runs of tokens that a rank adds up of a pass of so many rows, one behind the other.
    pub fn own_runs(&self, rows: u32) -> u32 {
        self.routes.own_runs(rows) as u32
    }

    /// Carries what a launch of layer `layer` leaves for the other ranks, and tells them. `stream`: where it was put
    /// last.
    ///
    /// # Errors
    /// The driver refuses.
    ///
    /// # Safety
    /// `launch` is what the kernel was given, and what it points to stays until the stream has come that far.
    #[allow(unsafe_code)]
    pub unsafe fn carry(&self, stream: &Stream, launch: &Launch, what: Carried, layer: u32) -> Result<(), CudaError> {
        stream.record(&self.event)?;
        self.copies.wait_for(&self.event)?;
        for Copy { rank, from, to, bytes } in self.routes.of(what, launch.row_count) {
            // SAFETY: the kernels have both ranges there, in memory as the caller vouches.
            unsafe { self.copies.copy(launch.inbox[rank] + to, launch.words + from, bytes as usize)? };
        }
        let (word, layer) = self.routes.told(what, layer);
        let words: Vec<u64> = self.routes.others().map(|rank| launch.inbox[rank] + word).collect();
        // SAFETY: words of the other ranks' inboxes, which stay as the caller vouches.
        unsafe { self.copies.write_words(&words, launch.epoch + layer) }
    }

    /// What is put into the stream from now on begins when all is carried.
    ///
    /// # Errors
    /// The driver refuses.
    pub fn end(&self, stream: &Stream) -> Result<(), CudaError> {
        self.copies.record(&self.event)?;
        stream.wait_for(&self.event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places that lie far apart: blocks of 128 tokens, runs of 32, two parts of o and one of down.
    fn routes(rank: usize, ranks: usize) -> Routes {
        let out = Exchange { sums_there: 1000, x_there: 2000, parts: 2 };
        let places = Places {
            x: 1 << 40,
            x_block: 1000,
            partial: 2 << 40,
            outgoing: 3 << 40,
            part: 1 << 30,
            run: 10,
            block_tokens: 128,
            run_tokens: 32,
            out,
            down: Exchange { sums_there: 3000, x_there: 4000, parts: 1 },
        };
        Routes { places, rank, ranks }
    }

    /// As kernels/matrix/layout.cuh says: `owner_of` and `place_of_run` of a run, `sums_byte` of who has summed it.
    #[test]
    fn every_run_goes_to_who_adds_it_up_and_its_x_to_all() {
        for (ranks, rows) in [(2, 2048), (4, 2048), (4, 1300), (4, 130), (4, 1), (8, 1000), (16, 2048), (16, 900)] {
            let carried = routes(0, ranks).own_runs(rows);
            let mut owned = vec![0; ranks];
            (0..u64::from(rows).div_ceil(32)).for_each(|run| owned[(run / carried) as usize] += 1);
            for own in 0..ranks {
                let routes = routes(own, ranks);
                for (behind, parts) in [(Behind::Out, 2), (Behind::Down, 1)] {
                    let mut sent = routes.of(Carried::Sums(behind), rows);
                    sent.sort_by_key(|copy| (copy.rank, copy.from));
                    let others = (0..ranks).filter(|rank| *rank != own && owned[*rank] > 0);
                    let expected = others.flat_map(|rank| {
                        (0..parts).map(move |part| (rank, rank as u64 * parts + part, own as u64 * parts + part))
                    });
                    let copy = |(rank, from, to): (usize, u64, u64)| Copy {
                        rank,
                        from: (3 << 40) + (from << 30),
                        to: (2 << 40) + (to << 30),
                        bytes: owned[rank] * 10,
                    };
                    assert_eq!(sent, expected.map(copy).collect::<Vec<_>>(), "{own} of {ranks}, {rows} rows");
                }
                let (at, blocks) = (own as u64 * carried / 4, owned[own].div_ceil(4));
                let sent = routes.of(Carried::X(Behind::Down), rows);
                assert_eq!(sent.len(), if owned[own] > 0 { ranks - 1 } else { 0 });
                for copy in sent {
                    assert_eq!((copy.from, copy.to), ((1 << 40) + at * 1000, (1 << 40) + at * 1000));
                    assert_eq!(copy.bytes, blocks * 1000, "{own} of {ranks}, {rows} rows");
                }
            }
        }
    }

    #[test]
    fn each_exchange_has_a_word_of_each_rank_and_norms_behind_down_are_the_next_layers() {
        let all = [Carried::Sums(Behind::Out), Carried::X(Behind::Out)];
        let all = all.into_iter().chain([Carried::Sums(Behind::Down), Carried::X(Behind::Down)]);
        let told: Vec<_> = all.map(|what| routes(3, 4).told(what, 7)).collect();
        assert_eq!(told, [(1048, 7), (2048, 7), (3048, 7), (4048, 8)]);
    }

    #[test]
    fn ranks_that_send_at_the_same_time_send_to_different_ones() {
        for turn in 0..3 {
            let mut to: Vec<_> = (0..4).map(|rank| routes(rank, 4).x(2048).nth(turn).unwrap().rank).collect();
            to.sort_unstable();
            assert_eq!(to, [0, 1, 2, 3]);
        }
    }
}
