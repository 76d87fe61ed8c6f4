#include "prompt.cu"
template __global__ void prompt<false>(const __grid_constant__ Params);
