// Products of a warpgroup: A in registers, B in shared memory. A chain of them has the bits of a chain of mma.m16n8k16
// (wide/NOTES.md).
#pragma once

/// Descriptor of B at `address`, [group of 8 columns][2 halves of k][8 columns][8 k] bf16: core matrices without
/// swizzle, 128 bytes apart along k and 256 along columns.
LP_DEVICE u64 wgmma_operand(u32 address) {
  return (u64)((address & 0x3ffff) >> 4) | (u64)(128 >> 4) << 16 | (u64)(256 >> 4) << 32;
}
/// Of what lies `bytes` behind an operand.
LP_DEVICE u64 wgmma_operand(u64 operand, u32 bytes) { return operand + (bytes >> 4); }

/// c += A B: A [16 rows][16 k] of each of the four warps as for mma_m16n8k16, B [16 k][N columns], by its descriptor.
/// c[4 j ..] are the results of mma_m16n8k16 for columns 8 j ... Runs on after the call.
template <int N> LP_DEVICE void wgmma(float* c, const Quad& a, u64 b);
template <> LP_DEVICE void wgmma<16>(float* c, const Quad& a, u64 b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7},"
               "{%8,%9,%10,%11},%12,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> LP_DEVICE void wgmma<32>(float* c, const Quad& a, u64 b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
               "{%16,%17,%18,%19},%20,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                 "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}
template <> LP_DEVICE void wgmma<64>(float* c, const Quad& a, u64 b) {
  asm volatile("{\n.reg .pred p;\nsetp.eq.u32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
               "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
               "{%32,%33,%34,%35},%36,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                 "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
                 "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
                 "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b));
}

/// c = A B, or, if `add`, c += A B. A chain begins with a product that does not add.
template <int N> LP_DEVICE void wgmma(float* c, const Quad& a, u64 b, u32 add);
template <> LP_DEVICE void wgmma<16>(float* c, const Quad& a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\nwgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7},"
               "{%8,%9,%10,%11},%12,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(add));
}
template <> LP_DEVICE void wgmma<32>(float* c, const Quad& a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15},"
               "{%16,%17,%18,%19},%20,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                 "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(add));
}
template <> LP_DEVICE void wgmma<64>(float* c, const Quad& a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31},"
               "{%32,%33,%34,%35},%36,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                 "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),
                 "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),
                 "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),
                 "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(add));
}
template <> LP_DEVICE void wgmma<128>(float* c, const Quad& a, u64 b, u32 add) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
               "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,"
               "%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,"
               "%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
               "{%64,%65,%66,%67},%68,p,1,1,0;\n}"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
                 "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]),
                 "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]),
                 "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]),
                 "+f"(c[29]), "+f"(c[30]), "+f"(c[31]), "+f"(c[32]), "+f"(c[33]), "+f"(c[34]), "+f"(c[35]),
                 "+f"(c[36]), "+f"(c[37]), "+f"(c[38]), "+f"(c[39]), "+f"(c[40]), "+f"(c[41]), "+f"(c[42]),
                 "+f"(c[43]), "+f"(c[44]), "+f"(c[45]), "+f"(c[46]), "+f"(c[47]), "+f"(c[48]), "+f"(c[49]),
                 "+f"(c[50]), "+f"(c[51]), "+f"(c[52]), "+f"(c[53]), "+f"(c[54]), "+f"(c[55]), "+f"(c[56]),
                 "+f"(c[57]), "+f"(c[58]), "+f"(c[59]), "+f"(c[60]), "+f"(c[61]), "+f"(c[62]), "+f"(c[63])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(add));
}

/// Before the first product of a group, which reads registers that the warps wrote.
LP_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
/// Ends a group of products.
LP_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Waits until at most GROUPS of the groups that were committed run.
template <int GROUPS> LP_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(GROUPS) : "memory");
}
/// The compiler moves no use of the accumulators across this: it does not know that products run on.
template <int N> LP_DEVICE void pin(float* c) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i])::"memory");
}
