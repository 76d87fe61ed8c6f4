// Weights between memory and the tensor cores: what a fragment holds as operand A, and the scales of its rows.
//
// Of E4M3 a lane has 8 bytes, whose half words hold two weights each: the first (row g) has its sign in bit 15, its
// exponent in bits 10 to 7 and its mantissa in bits 14 to 12; the second (row g + 8) its sign in bit 11, the rest in
// bits 6 to 0. That takes few instructions of the integer pipe to become bf16 that are 2^-120 of the weights, of which
// the smallest are subnormal. Tensor cores multiply these as they are. The vectors are kRaised of what they are, 2^80,
// so that products are far from the ends of fp32; the other 2^40 are in the scales. Powers of two change no bit.
#pragma once

LP_DEVICE Quad from_e4m3(uint2 v) {
  const auto first = [](u32 w) { return (w & 0x87808780u) | (w >> 8 & 0x00700070u); };
  const auto second = [](u32 w) { return w << 4 & 0x87f087f0u; };
  return Quad{first(v.x), second(v.x), first(v.y), second(v.y)};
}

/// A lane's part of a fragment as it is stored, P::lane_bytes in shared memory.
template <Format FORMAT> struct Stored {
  Quad bits;
  LP_DEVICE static Stored load(u32 address) { return Stored{load_shared_16(address)}; }
  /// Operand A.
  LP_DEVICE Quad operand() const { return bits; }
};
template <> struct Stored<Format::kE4m3> {
  uint2 bits;
  LP_DEVICE static Stored load(u32 address) { return Stored{load_shared_8(address)}; }
  LP_DEVICE Quad operand() const { return from_e4m3(bits); }
};
template <class P> LP_DEVICE Quad load_weights(u32 address) { return Stored<P::format>::load(address).operand(); }

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
