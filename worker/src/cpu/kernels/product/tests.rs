//! Products against double precision, against each other, and of weights in groups against the bf16 that they are.

mod groups;

use half::bf16;

use super::*;
use crate::cpu::kernels::isa::FlushDenormals;
use crate::model::format::from_e4m3;

/// Uniform in [-1, 1), from a counter.
fn noise(seed: u64, i: usize) -> f32 {
    let mut z = (seed << 32).wrapping_add(i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z >> 40) as f32) / (1u64 << 23) as f32 - 1.0
}

fn random(seed: u64, len: usize) -> Vec<u16> {
    (0..len).map(|i| bf16::from_f32(noise(seed, i)).to_bits()).collect()
}

fn panel(data: &[u16], tiles: usize, leaves: usize, leaf_pairs: usize) -> Panel<'_> {
    let (format, runs) = (WeightFormat::Bf16, Runs::whole(leaf_pairs));
    Panel::new(bytemuck::cast_slice(data), format, &[], tiles, (leaves, leaf_pairs, runs))
}

fn isas() -> Vec<Isa> {
    Isa::ALL.into_iter().filter(|isa| isa.available()).collect()
}

fn run(isa: Isa, panel: Panel<'_>, x: Columns<'_>) -> Vec<u32> {
    let mut out = vec![f32::NAN; x.count * panel.tiles * LANES];
    let of_inputs = if panel.is_raised() { sums_of_inputs(isa, &panel, &x) } else { Box::default() };
    product(isa, panel, x, &of_inputs, &mut out);
    out.into_iter().map(f32::to_bits).collect()
}

#[test]
fn agrees_with_double_precision() {
    let (tiles, leaves, leaf_pairs) = (7, 4, 24);
    let k = 2 * leaves * leaf_pairs;
    let weights = random(1, tiles * k * LANES);
    let x = random(2, 5 * 2 * k);
    let value = |bits: u16| f64::from(bf16::from_bits(bits).to_f32());
    for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let out =
            run(isa, panel(&weights, tiles, leaves, leaf_pairs), Columns { data: &x, stride: k, count: 5, parts });
        for column in 0..5 {
            for row in 0..tiles * LANES {
                let weight = |i: usize| weights[(row / LANES * k / 2 + i / 2) * LINE + row % LANES * 2 + i % 2];
                let terms = (0..parts * k).map(|i| value(weight(i % k)) * value(x[column * parts * k + i]));
                let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let got = f64::from(f32::from_bits(out[column * tiles * LANES + row]));
                // A rounding for each term, of at most 2^-24 of the running sum, which `size` bounds.
                let bound = size * (parts * k) as f64 * 2f64.powi(-24);
                assert!((got - sum).abs() <= bound, "{isa} {parts} {row} {column}: {got} {sum}");
            }
        }
    }
}

#[test]
fn bits_depend_neither_on_other_columns_nor_on_the_tiles_beside() {
    // A leaf is a block of AMX and a half.
    let (tiles, leaves, leaf_pairs) = (11, 16, 24);
    let k = 2 * leaves * leaf_pairs;
    let weights = random(3, tiles * k * LANES);
    let whole = panel(&weights, tiles, leaves, leaf_pairs);
    for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        let mut x = random(4, MAX_COLUMNS * parts * k);
        let own = x[3 * parts * k..4 * parts * k].to_vec();
        let alone = run(isa, whole.tiles(6, 1), Columns { data: &own, stride: k, count: 1, parts });
        for poison in [false, true] {
            if poison {
                x.fill(bf16::NAN.to_bits());
                x[3 * parts * k..4 * parts * k].copy_from_slice(&own);
            }
            for count in (4..=9).chain([16, 17, 24, 31, 32]) {
                let all = run(isa, whole, Columns { data: &x, stride: k, count, parts });
                assert_eq!(all[3 * tiles * LANES + 6 * LANES..][..LANES], alone, "{isa} {parts} {count}");
            }
        }
    }
}

/// What the module says of blocks: products of even k and of odd k have a sum each, the high and the low part their
/// own.
#[test]
fn amx_adds_blocks_of_even_and_odd_products() {
    if !Isa::Amx.available() {
        eprintln!("skipped: this processor has no AMX, or the system does not let it be used");
        return;
    }
    // A leaf is a block and a half.
    let (tiles, leaves, leaf_pairs) = (5, 4, 24);
    let (leaf, k) = (2 * leaf_pairs, 2 * leaves * leaf_pairs);
    let (weights, x) = (random(12, tiles * k * LANES), random(13, 3 * 2 * k));
    let value = |bits: u16| bf16::from_bits(bits).to_f32();
    for parts in [1, 2] {
        let columns = Columns { data: &x, stride: k, count: 3, parts };
        let got = run(Isa::Amx, panel(&weights, tiles, leaves, leaf_pairs), columns);
        let mut differ_from_one_chain = 0;
        for (column, row) in (0..3).flat_map(|column| (0..tiles * LANES).map(move |row| (column, row))) {
            let weight = |i: usize| value(weights[(row / LANES * k / 2 + i / 2) * LINE + row % LANES * 2 + i % 2]);
            let of_part = |part: usize, i: usize| weight(i) * value(x[(column * parts + part) * k + i]);
            let sum_of_leaf = |of: usize| {
                let of_part = |part: usize| {
                    (of * leaf..(of + 1) * leaf).step_by(LINE).fold(0.0, |sum, first| {
                        let end = (first + LINE).min((of + 1) * leaf);
                        let side =
                            |side: usize| (first + side..end).step_by(2).fold(0.0f32, |sum, i| sum + of_part(part, i));
                        sum + (side(0) + side(1))
                    })
                };
                if parts == 1 { of_part(0) } else { of_part(0) + of_part(1) }
            };
            let sums: Vec<f32> = (0..leaves).map(sum_of_leaf).collect();
            let expected = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            assert_eq!(got[column * tiles * LANES + row], expected.to_bits(), "{parts} {column} {row}");
            let chain = (0..k).fold(0.0f32, |sum, i| (0..parts).fold(sum, |sum, part| sum + of_part(part, i)));
            differ_from_one_chain += usize::from(chain.to_bits() != expected.to_bits());
        }
        assert!(differ_from_one_chain > 3 * tiles * LANES / 2, "{differ_from_one_chain}");
    }
}

#[test]
fn portable_and_avx2_agree_in_every_bit() {
    if !Isa::Avx2.available() {
        eprintln!("skipped: this processor has no AVX2");
        return;
    }
    let _mode = FlushDenormals::enter();
    let (tiles, leaves, leaf_pairs) = (5, 8, 40);
    let k = 2 * leaves * leaf_pairs;
    let (weights, x) = (random(5, tiles * k * LANES), random(6, 3 * 2 * k));
    for parts in [1, 2] {
        let columns = Columns { data: &x, stride: k, count: 3, parts };
        let bits = |isa| run(isa, panel(&weights, tiles, leaves, leaf_pairs), columns);
        assert_eq!(bits(Isa::Portable), bits(Isa::Avx2));
    }
}

/// E4M3 have the bits of bf16 that are 2^-8 of them, in any number of tiles, columns and parts; every value, and in
/// a mode without denormals.
#[test]
fn e4m3_have_the_bits_of_the_same_weights_as_bf16() {
    let _mode = FlushDenormals::enter();
    let (tiles, leaves, leaf_pairs) = (7, 4, 24);
    let k = 2 * leaves * leaf_pairs;
    let bits: Vec<u8> = (0..tiles * k * LANES)
        .map(|i| (noise(9, i).to_bits() >> 8) as u8)
        .map(|bits| if bits & 0x7f == 0x7f { bits ^ 1 } else { bits })
        .collect();
    assert_eq!((0..=255u8).filter(|of| bits.contains(of)).count(), 254);
    let same = |bits: &u8| bf16::from_f32(from_e4m3(*bits).to_f32() / E4M3_RAISED).to_bits();
    let plain: Vec<u16> = bits.iter().map(same).collect();
    let x = random(10, MAX_COLUMNS * 2 * k);
    for (isa, parts) in isas().into_iter().flat_map(|isa| [(isa, 1), (isa, 2)]) {
        for count in (1..=9).chain([17, 32]) {
            let x = Columns { data: &x, stride: k, count, parts };
            let bf16 = panel(&plain, tiles, leaves, leaf_pairs);
            let e4m3 = Panel::new(&bits, WeightFormat::E4m3, &[], tiles, (leaves, leaf_pairs, Runs::whole(leaf_pairs)));
            let mut room = vec![0; plain.len()];
            assert_eq!(run(isa, expand(isa, e4m3, &mut room), x), run(isa, bf16, x), "{isa} {parts} {count}");
            assert_eq!(run(isa, e4m3, x), run(isa, bf16, x), "{isa} {parts} {count}");
            assert_eq!(run(isa, e4m3.tiles(2, 3), x), run(isa, bf16.tiles(2, 3), x), "{isa} {parts} {count}");
        }
    }
}

#[test]
fn leaves_sum_as_the_plans_tree() {
    let (leaves, leaf_pairs) = (16, 3);
    let k = 2 * leaves * leaf_pairs;
    let (weights, x) = (random(7, k * LANES), random(8, k));
    for isa in isas() {
        let columns =
            |leaf: usize| Columns { data: &x[leaf * 2 * leaf_pairs..], stride: 2 * leaf_pairs, count: 1, parts: 1 };
        let mut sums: Vec<f32> = (0..leaves)
            .flat_map(|leaf| {
                let one = panel(&weights[leaf * leaf_pairs * LINE..], 1, 1, leaf_pairs);
                run(isa, one, columns(leaf)).into_iter().map(f32::from_bits)
            })
            .collect();
        let whole = run(isa, panel(&weights, 1, leaves, leaf_pairs), columns(0));
        crate::plan::tree::tree_sum_rows(&mut sums, LANES);
        assert_eq!(whole, sums[..LANES].iter().map(|sum| sum.to_bits()).collect::<Vec<_>>(), "{isa}");
    }
}

#[test]
#[should_panic(expected = "columns of 15 elements end at 16")]
fn a_short_column_is_refused() {
    let weights = random(11, 16 * LANES);
    product(
        Isa::Portable,
        panel(&weights, 1, 1, 8),
        Columns { data: &[0; 15], stride: 16, count: 1, parts: 1 },
        &[],
        &mut [0.0; 16],
    );
}
