//! What the kernels of this build compute on this processor, in eight digits of the bit domain.
//!
//! The name of an instruction set does not decide bits: processors order the two halves of `VDPBF16PS` differently, and
//! compilers and libraries are free to change theirs. So every kernel runs here on inputs whose results show the order
//! of operations, single or double rounding and the treatment of denormals, and the domain names the hash of what came
//! out.

use half::bf16;
use sha2::{Digest, Sha256};

use super::attention::{Page, View, attend};
use super::isa::{FlushDenormals, Isa};
use super::lanes::{LANES, LINE};
use super::norm::{head_norm, rms_norm};
use super::product::{Columns, Panel, product, sums_of_inputs};
use crate::math::{exp, ln, silu};
use crate::model::WeightFormat;
use crate::plan::{Leaves, PAGE_POSITIONS, Runs};
use crate::rope::{Rope, rotate};

/// Width of the heads that are rotated and attended with: not a power of two, so that its root is not exact.
const HEAD_DIM: usize = 48;

/// Eight hexadecimal digits of the results of all kernels of `isa`.
pub fn arithmetic(isa: Isa) -> String {
    let mut hasher = Sha256::new();
    for word in probe(isa) {
        hasher.update(word.to_le_bytes());
    }
    hasher.finalize()[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bits of the results, kernel by kernel, in the floating-point mode of the team.
fn probe(isa: Isa) -> Vec<u32> {
    let _mode = FlushDenormals::enter();
    let mut bits: Vec<u32> = products(isa).into_iter().map(f32::to_bits).collect();
    bits.extend(attention(isa).into_iter().map(f32::to_bits));
    let mut values: Vec<f32> = (0..500).map(|i| fp32(40, i)).collect();
    // Past the ends of exp, at zero of either sign, and at values that a mode without denormals turns into zeros.
    values.extend([0.0, -0.0, 90.0, -110.0, -88.0, 1e-39, -1e-39, f32::MIN_POSITIVE, f32::NEG_INFINITY]);
    for value in std::hint::black_box(&values) {
        bits.extend([exp(*value), silu(*value), ln(value.abs())].map(f32::to_bits));
    }
    bits.extend(vectors().into_iter().map(f32::to_bits));
    bits
}

/// Several tiles, columns and leaves, inputs rounded once and split in two, over values of many scales that cancel; the
/// last column's are hardly above nothing.
fn products(isa: Isa) -> Vec<f32> {
    let (tiles, leaves, leaf_pairs, count) = (7, 8, 24, 5);
    let k = 2 * leaves * leaf_pairs;
    let weights: Vec<u16> = (0..tiles * leaves * leaf_pairs * LINE).map(|i| half(1, i)).collect();
    let (data, format) = (bytemuck::cast_slice(&weights), WeightFormat::Bf16);
    let panel = Panel::new(data, format, &[], tiles, (leaves, leaf_pairs, Runs::whole(leaf_pairs)));
    // The same bytes as 4 bits: only sums of inputs are asked for.
    let packed = WeightFormat::Int4 { columns: 32, zeros: true };
    let runs = Runs::new(packed, Leaves { count: leaves, len: 2 * leaf_pairs, padded: 2 * leaf_pairs }, 0);
    let raised = runs.map(|runs| Panel::new(data, packed, &[], 2, (leaves, leaf_pairs, runs)));
    let mut results = Vec::new();
    for parts in [1, 2] {
        let vector = parts * k;
        let column = |i: usize| if i / vector < count - 1 { half(2, i) } else { tiny(2, i) };
        let columns: Vec<u16> = (0..count * vector).map(column).collect();
        let mut out = vec![0.0; count * tiles * LANES];
        product(isa, panel, Columns { data: &columns, stride: k, count, parts }, &[], &mut out);
        results.extend(out);
        let columns = Columns { data: &columns, stride: k, count, parts };
        results.extend(raised.iter().flat_map(|panel| sums_of_inputs(isa, panel, &columns)));
    }
    results
}

/// Three queries over a page and a bit. Two neighbouring positions have the same key and opposite values: what remains
/// of their sum is rounding alone.
fn attention(isa: Isa) -> Vec<f32> {
    let block = HEAD_DIM * PAGE_POSITIONS;
    let (mut keys, mut values) = (vec![0.0; 2 * block], vec![0.0; 2 * block]);
    for (position, dim) in (0..2 * PAGE_POSITIONS).flat_map(|position| (0..HEAD_DIM).map(move |dim| (position, dim))) {
        let (of_page, in_page) = (position / PAGE_POSITIONS * block, position % PAGE_POSITIONS);
        let pair = position / 2 * HEAD_DIM + dim;
        keys[of_page + dim * PAGE_POSITIONS + in_page] = tame(3, pair);
        values[of_page + in_page * HEAD_DIM + dim] = if position % 2 == 0 { tame(4, pair) } else { -tame(4, pair) };
    }
    let queries: Vec<f32> = (0..3 * HEAD_DIM).map(|i| tame(5, i)).collect();
    let page = |i: usize| Page { keys: &keys[i * block..][..block], values: &values[i * block..][..block] };
    let mut out = vec![0.0; queries.len()];
    let view = View { first: 4, last: PAGE_POSITIONS + 19 };
    attend(isa, HEAD_DIM, view, page, &queries, |at, output| out[at..at + output.len()].copy_from_slice(output));
    out
}

/// Angles, rotations and norms.
fn vectors() -> Vec<f32> {
    let rope = Rope::with_theta(500_000.0, HEAD_DIM);
    let mut turns = [[0.0; 2]; HEAD_DIM / 2];
    let mut results = Vec::new();
    for (index, position) in [0, 1, 63, 4095, 131_071].into_iter().enumerate() {
        rope.turns(position, &mut turns);
        results.extend(turns.as_flattened());
        let mut head: Vec<f32> = (0..HEAD_DIM).map(|i| fp32(6, index * HEAD_DIM + i)).collect();
        let weight: Vec<f32> = (0..HEAD_DIM).map(|i| fp32(7, i)).collect();
        head_norm(&mut head, &weight, 1e-6);
        rotate(&mut head, &turns);
        results.extend(head);
    }
    let [row, weight]: [Vec<f32>; 2] = [8, 9].map(|stream| (0..90).map(|i| fp32(stream, i)).collect());
    let leaves = Leaves { count: 3, len: 30, padded: 32 };
    rms_norm(&row, &weight, 1e-5, leaves, |_, values| results.extend_from_slice(values));
    results
}

/// The hash behind all inputs.
fn random(stream: u64, i: usize) -> u64 {
    let mut z = (stream << 32).wrapping_add(i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Of either sign, from 2^-8 to 2^8: neighbours in a sum differ so much in scale that any other order rounds otherwise.
fn fp32(stream: u64, i: usize) -> f32 {
    let z = random(stream, i);
    let exponent = 127 - 8 + (z >> 40) as u32 % 16;
    f32::from_bits((z as u32 & 0x807f_ffff) | exponent << 23)
}

/// [`fp32`] rounded to bf16.
fn half(stream: u64, i: usize) -> u16 {
    bf16::from_f32(fp32(stream, i)).to_bits()
}

/// Of either sign and under 2^-111, denormals among them: products with [`half`] are on both sides of the normal range.
fn tiny(stream: u64, i: usize) -> u16 {
    random(stream, i) as u16 & 0x87ff
}

/// In [-2, 2): scores that weigh many positions.
fn tame(stream: u64, i: usize) -> f32 {
    (random(stream, i) >> 40) as f32 / (1u32 << 22) as f32 - 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn isas() -> Vec<Isa> {
        Isa::ALL.into_iter().filter(|isa| isa.available()).collect()
    }

    #[test]
    fn the_same_kernels_have_the_same_name_and_quickly() {
        for isa in isas() {
            let begun = std::time::Instant::now();
            let name = arithmetic(isa);
            assert!(begun.elapsed().as_millis() < 500, "{isa}: {:?}", begun.elapsed());
            let elsewhere = std::thread::spawn(move || arithmetic(isa)).join().unwrap();
            assert!(name == elsewhere && name.len() == 8, "{name} {elsewhere}");
        }
    }

    #[test]
    fn another_dot_product_has_another_name() {
        if !Isa::Avx512Bf16.available() {
            eprintln!("skipped: this processor has no VDPBF16PS");
            return;
        }
        assert_ne!(arithmetic(Isa::Avx512Bf16), arithmetic(Isa::Portable));
        assert!(products(Isa::Avx512Bf16) != products(Isa::Portable));
    }

    #[test]
    fn the_floating_point_mode_and_the_order_of_k_show() {
        let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let flushed = {
            let _mode = FlushDenormals::enter();
            bits(products(Isa::Portable))
        };
        assert!(flushed != bits(products(Isa::Portable)));
        // The order of the two products of a pair, which is what processors differ in.
        let (mut forward, mut backward) = (0.0f32, 0.0f32);
        let mut differ = 0;
        for pair in (0..400).step_by(2) {
            let product = |i: usize| bf16::from_bits(half(1, i)).to_f32() * bf16::from_bits(half(2, i)).to_f32();
            forward = forward + product(pair) + product(pair + 1);
            backward = backward + product(pair + 1) + product(pair);
            differ += usize::from(forward.to_bits() != backward.to_bits());
        }
        assert!(differ > 100, "{differ}");
    }
}
