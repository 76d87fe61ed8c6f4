# build.sh LIB.so [-DEARLY_RELEASE | -DCOLUMN_MAJOR_WORDS | -DMUTE | -DABLATE]: builds, then prints registers and spills of each variant
set -e; cd "$(dirname "$0")"; O=${1:-$PWD/libspike.so}; shift || true
nvcc -std=c++17 -O3 -fmad=false -gencode=arch=compute_90a,code=sm_90a -shared -Xcompiler -fPIC -Xptxas -v ${NVLIB:+-L$NVLIB} "$@" -o $O host.cu > $O.log 2>&1 || { cat $O.log; exit 1; }
grep -E "Compiling|spill|Used" $O.log | grep -A2 looped | sed 's/ptxas info *://' | paste - - - | sed -E 's/.*looped_decoderI(\S+)Ev6Params.*sm_90a.( *)/\1 /'; rm $O.log
