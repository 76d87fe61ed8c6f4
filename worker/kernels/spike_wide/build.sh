# build.sh: libwide.so, and libnarrow.so from ../spike with the leaves of gate/up and LM head added in ascending order; prints registers and spills
set -e; cd "$(dirname "$0")"; python3 gen.py; F="-std=c++17 -O3 -fmad=false -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC -Xptxas -v ${NVLIB:+-L$NVLIB}"
mkdir -p narrow; cp ../spike/host.cu narrow/
sed -e 's/auto get_set = \[&\](int ssq_buf) {/auto get_set = [\&](int ssq_buf, bool asc = false) {/' -e 's/y\[c\] = tree<16>(v);/y[c] = asc ? ascending(v) : tree<16>(v);/' \
  -e 's/get_set(j == 0 ? 1 : -1)/get_set(j == 0 ? 1 : -1, true)/' -e 's/get_set(j == 0 ? 0 : -1)/get_set(j == 0 ? 0 : -1, true)/' \
  -e 's/^template <int V> struct Int /__device__ __forceinline__ float ascending(const float* v) { float l = 0; for (int i = 0; i < 16; i++) l += v[i]; return l; }\n&/' ../spike/looped_decoder.cu > narrow/looped_decoder.cu
[ "$(grep -c 'ascending\|, true)' narrow/looped_decoder.cu)" -ge 4 ]
[ -n "$SKIP_NARROW" ] || nvcc $F -o libnarrow.so narrow/host.cu > narrow.log 2>&1 || { cat narrow.log; exit 1; }
nvcc $F -o libwide.so host.cu > wide.log 2>&1 || { cat wide.log; exit 1; }
grep -E "Compiling|spill|Used|warn" wide.log | sed 's/ptxas info *://' | grep -A2 -E "wide" | grep -v '^--' | paste - - - | sed -E "s/Compiling entry function//; s/for 'sm_90a'//"
