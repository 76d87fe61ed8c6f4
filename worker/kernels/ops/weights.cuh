// Weights between memory and the tensor cores: what a fragment holds as operand A, and its scales.
//
// Of E4M3 a lane has 8 bytes, whose half words hold two weights each: the first (row g) has its sign in bit 15, its
// exponent in bits 10 to 7 and its mantissa in bits 14 to 12; the second (row g + 8) its sign in bit 11, the rest in
// bits 6 to 0. That takes few instructions of the integer pipe to become bf16 that are 2^-120 of the weights, of which
// the smallest are subnormal. Tensor cores multiply these as they are. The vectors are kRaised of what they are, 2^80,
// so that products are far from the ends of fp32; the other 2^40 are in the scales. Powers of two change no bit.
//
// Of groups a weight is scaled and rounded to bf16, so the bits are those of a bf16 model with these weights, 2^-40 of
// what they are; the vectors are kRaised, 2^40. Four bits in the low ones of a bf16 are a subnormal, a number times
// 2^-133 (and so is what lies four bits higher, 16 times as much), and the scales are 2^93 of what they are, and 2^89
// those of the second row. Then (q - 8) * scale is one fused operation, whose last summand is exact, and so rounds once.
#pragma once

LP_DEVICE Quad from_e4m3(uint2 v) {
  const auto first = [](u32 w) { return (w & 0x87808780u) | (w >> 8 & 0x00700070u); };
  const auto second = [](u32 w) { return w << 4 & 0x87f087f0u; };
  return Quad{first(v.x), second(v.x), first(v.y), second(v.y)};
}

/// What a lane's two rows, g and g + 8, are scaled by in a run that lies at `run` in shared memory.
template <Format FORMAT> struct RunScales {
  LP_DEVICE static RunScales load(u32) { return RunScales{}; }
};
/// Both halves of a word in either half word.
LP_DEVICE u32 twice_low(u32 word) { return __byte_perm(word, word, 0x1010); }
LP_DEVICE u32 twice_high(u32 word) { return __byte_perm(word, word, 0x3232); }
/// A lane's word of a table of 8, one for each g.
LP_DEVICE u32 load_rows(u32 table) { return load_shared_u32(table + (lane_index() >> 2) * 4); }
template <> struct RunScales<Format::kE4m3Groups> {
  u32 first, second;
  LP_DEVICE static RunScales load(u32 run) {
    const u32 scales = load_rows(run);
    return RunScales{twice_low(scales), twice_high(scales)};
  }
};
template <> struct RunScales<Format::kInt4> {
  u32 first, second, first_middle, second_middle;  // scales, and -8 times scales
  LP_DEVICE static RunScales load(u32 run) {
    const u32 scales = load_rows(run), first = twice_low(scales), second = twice_high(scales);
    // -8 * 2^-133, and 16 times as much.
    return RunScales{first, second, multiply_bf16x2(first, 0x80088008u), multiply_bf16x2(second, 0x80808080u)};
  }
  LP_DEVICE u32 of_first(u32 pair) const { return fma_bf16x2(pair, first, first_middle); }
  LP_DEVICE u32 of_second(u32 pair) const { return fma_bf16x2(pair, second, second_middle); }
};
template <> struct RunScales<Format::kInt4Zeros> {
  u32 first, second, first_zero, second_zero;
  LP_DEVICE static RunScales load(u32 run) {
    const u32 scales = load_rows(run), zeros = load_rows(run + 32);
    return RunScales{twice_low(scales), twice_high(scales), twice_low(zeros), twice_high(zeros)};
  }
  LP_DEVICE u32 of_first(u32 pair) const { return multiply_bf16x2(subtract_bf16x2(pair, first_zero), first); }
  LP_DEVICE u32 of_second(u32 pair) const { return multiply_bf16x2(subtract_bf16x2(pair, second_zero), second); }
};

/// A lane's part of a fragment as it is stored, lane_bytes in shared memory.
template <Format FORMAT> struct Stored {  // of four bits
  u32 bits;
  LP_DEVICE static Stored load(u32 address) { return Stored{load_shared_u32(address)}; }
  /// Operand A.
  LP_DEVICE Quad operand(const RunScales<FORMAT>& scales) const {
    const u32 next = bits >> 8;
    return Quad{scales.of_first(bits & 0x000f000fu), scales.of_second(bits & 0x00f000f0u),
                scales.of_first(next & 0x000f000fu), scales.of_second(next & 0x00f000f0u)};
  }
};
template <> struct Stored<Format::kBf16> {
  Quad bits;
  LP_DEVICE static Stored load(u32 address) { return Stored{load_shared_16(address)}; }
  LP_DEVICE Quad operand(const RunScales<Format::kBf16>&) const { return bits; }
};
template <> struct Stored<Format::kE4m3> {
  uint2 bits;
  LP_DEVICE static Stored load(u32 address) { return Stored{load_shared_8(address)}; }
  LP_DEVICE Quad operand(const RunScales<Format::kE4m3>&) const { return from_e4m3(bits); }
};
template <> struct Stored<Format::kE4m3Groups> {
  uint2 bits;
  LP_DEVICE static Stored load(u32 address) { return Stored{load_shared_8(address)}; }
  LP_DEVICE Quad operand(const RunScales<Format::kE4m3Groups>& scales) const {
    const Quad v = from_e4m3(bits);
    return Quad{multiply_bf16x2(v.x, scales.first), multiply_bf16x2(v.y, scales.second),
                multiply_bf16x2(v.z, scales.first), multiply_bf16x2(v.w, scales.second)};
  }
};
/// This lane's part of k16 step `step` of a run of product P at `run`.
template <class P> LP_DEVICE Stored<P::format> load_step(u32 run, int step) {
  return Stored<P::format>::load(run + P::header + step * P::fragment + lane_index() * P::lane_bytes);
}

/// Scale of row `row` of a layer's product, whose scales begin at `first` (Scales).
LP_DEVICE float scale_of(const Launch& launch, u32 layer, int first, int row) {
  return kScaled ? load_constant_f32(launch.scales + (u64)layer * Scales::layer + first + row) : 1;
}
/// The same of the product in front of norm `norm` of the model: o, or down.
LP_DEVICE float scale_before(const Launch& launch, u32 norm, int row) {
  return scale_of(launch, (norm - 1) / 2, norm & 1 ? Scales::out : Scales::down, row);
}
/// A sum of all leaves with its row's scale.
LP_DEVICE float scaled(float sum, float scale) { return kScaled ? sum * scale : sum; }
