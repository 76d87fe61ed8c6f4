// Weights between memory and the tensor cores: what a fragment holds as operand A, and the scales of its rows.
//
// Of E4M3 a lane has 8 bytes, whose half words hold two weights each: the first (row g) has its sign in bit 15, its
// exponent in bits 10 to 7 and its mantissa in bits 14 to 12; the second (row g + 8) its sign in bit 11, the rest in
// bits 6 to 0. That takes few instructions of the integer pipe to become bf16, which are 2^-120 of the weights; a
// multiplication by 2^115, exact, brings them out of the subnormal range. The other 2^5 is in the scales.
#pragma once

/// Two bf16 that are 2^-120 of two E4M3 into 2^-5 of them.
LP_DEVICE u32 raise_e4m3(u32 pair) { return multiply_bf16x2(pair, 0x79007900u); }
LP_DEVICE Quad from_e4m3(uint2 v) {
  const auto first = [](u32 w) { return raise_e4m3((w & 0x87808780u) | (w >> 8 & 0x00700070u)); };
  const auto second = [](u32 w) { return raise_e4m3(w << 4 & 0x87f087f0u); };
  return Quad{first(v.x), second(v.x), first(v.y), second(v.y)};
}

/// A lane's operand A, from its P::lane_bytes of a fragment of P in shared memory.
template <class P> LP_DEVICE Quad load_weights(u32 address) {
  if constexpr (P::format == Format::kE4m3) return from_e4m3(load_shared_8(address));
  else return load_shared_16(address);
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
