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
// those of the second row. Then (q - 8) * scale is one fused operation, whose last summand is exact; it rounds once.
#pragma once

LP_DEVICE Quad from_e4m3(u32 low, u32 high) {
  const auto first = [](u32 w) { return (w & 0x87808780u) | (w >> 8 & 0x00700070u); };
  const auto second = [](u32 w) { return w << 4 & 0x87f087f0u; };
  return Quad{first(low), second(low), first(high), second(high)};
}
/// A lane's word of a table of 8, one for each g.
LP_DEVICE u32 load_rows(u32 table, u32 lane) { return load_shared_u32(table + (lane >> 2) * 4); }

/// How a lane's part of a fragment, the words at `stored`, becomes operand A: with the scales of its two rows, g and
/// g + 8, a bf16 each of a word, in a run that lies at `run` in shared memory.
template <Format FORMAT> struct RunScales;
template <> struct RunScales<Format::kBf16> {
  LP_DEVICE static RunScales load(u32, u32 = 0) { return RunScales{}; }
  LP_DEVICE Quad operand(const u32* stored) const { return Quad{stored[0], stored[1], stored[2], stored[3]}; }
};
template <> struct RunScales<Format::kE4m3> {
  LP_DEVICE static RunScales load(u32, u32 = 0) { return RunScales{}; }
  LP_DEVICE Quad operand(const u32* stored) const { return from_e4m3(stored[0], stored[1]); }
};
template <> struct RunScales<Format::kE4m3Groups> {
  u32 scales;
  LP_DEVICE static RunScales load(u32 run, u32 lane = lane_index()) { return RunScales{load_rows(run, lane)}; }
  LP_DEVICE Quad operand(const u32* stored) const {
    const Quad v = from_e4m3(stored[0], stored[1]);
    const u32 first = low_twice(scales), second = high_twice(scales);
    return Quad{multiply_bf16x2(v.x, first), multiply_bf16x2(v.y, second), multiply_bf16x2(v.z, first),
                multiply_bf16x2(v.w, second)};
  }
};
/// Four bits: `first` and `second` make bf16 of two weights of a row each.
template <class F, class S> LP_DEVICE Quad from_int4(u32 word, const F& first, const S& second) {
  const u32 next = word >> 8;
  return Quad{first(word & 0x000f000fu), second(word & 0x00f000f0u), first(next & 0x000f000fu),
              second(next & 0x00f000f0u)};
}
template <> struct RunScales<Format::kInt4> {
  u32 scales, middles;  // -8 times scales
  LP_DEVICE static RunScales load(u32 run, u32 lane = lane_index()) {
    const u32 scales = load_rows(run, lane);
    return RunScales{scales, multiply_bf16x2(scales, 0x80808008u)};  // -8 * 2^-133, and 16 times as much
  }
  LP_DEVICE Quad operand(const u32* stored) const {
    return from_int4(
        stored[0], [&](u32 pair) { return fma_bf16x2(pair, low_twice(scales), low_twice(middles)); },
        [&](u32 pair) { return fma_bf16x2(pair, high_twice(scales), high_twice(middles)); });
  }
};
template <> struct RunScales<Format::kInt4Zeros> {
  u32 scales, zeros;
  LP_DEVICE static RunScales load(u32 run, u32 lane = lane_index()) {
    return RunScales{load_rows(run, lane), load_rows(run + 32, lane)};
  }
  LP_DEVICE Quad operand(const u32* stored) const {
    const auto of = [](u32 pair, u32 zero, u32 scale) { return multiply_bf16x2(subtract_bf16x2(pair, zero), scale); };
    return from_int4(
        stored[0], [&](u32 pair) { return of(pair, low_twice(zeros), low_twice(scales)); },
        [&](u32 pair) { return of(pair, high_twice(zeros), high_twice(scales)); });
  }
};

/// This lane's parts of the fragments of a run of product P, its k16 steps ascending. They lie in pieces: steps whose
/// parts are 16 bytes together, or what the run has, a lane's next to each other.
template <class P> struct StoredRun {
  static constexpr int step_words = P::lane_bytes / 4, piece_words = step_words * P::piece_steps;
  u32 words[step_words * P::run_steps];

  LP_DEVICE static StoredRun load(u32 run, u32 lane = lane_index()) {
    StoredRun to;
#pragma unroll
    for (int i = 0; i < step_words * P::run_steps; i += piece_words) {
      const u32 piece = run + P::header + (i * 32 + lane * piece_words) * 4;
      if constexpr (piece_words == 4) {
        const Quad v = load_shared_16(piece);
        to.words[i] = v.x, to.words[i + 1] = v.y, to.words[i + 2] = v.z, to.words[i + 3] = v.w;
      } else if constexpr (piece_words == 2) {
        const uint2 v = load_shared_8(piece);
        to.words[i] = v.x, to.words[i + 1] = v.y;
      } else {
        to.words[i] = load_shared_u32(piece);
      }
    }
    return to;
  }
  LP_DEVICE Quad operand(int step, const RunScales<P::format>& scales) const {
    return scales.operand(words + step * step_words);
  }
};

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
