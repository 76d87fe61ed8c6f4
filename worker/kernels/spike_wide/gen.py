"""Writes wgmma.inc: the wgmma wrappers (A in registers, B in shared memory), one per number of columns."""
def one(n):
    r = n // 2
    d = ",".join(f"%{i}" for i in range(r))
    cons = ", ".join(f'"+f"(c[{i}])' for i in range(r))
    return (f'template <> __device__ __forceinline__ void wgmma<{n}>(float* c, const Word& a, u64 desc) {{\n'
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.eq.u32 p, 0, 0;\\nwgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{d}}}, '
            f'{{%{r},%{r+1},%{r+2},%{r+3}}}, %{r+4}, p, 1, 1, 0;\\n}}"\n    : {cons} : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(desc));\n}}\n')
open("wgmma.inc", "w").write("// Written by gen.py.\ntemplate <int N> __device__ __forceinline__ void wgmma(float* c, const Word& a, u64 desc);\n" + "".join(one(n) for n in (8, 16, 32, 64, 128)))
