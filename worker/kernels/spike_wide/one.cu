#include "wide.cu"
#ifndef ONE_NC
#define ONE_NC 64
#endif
template __global__ void wide<ONE_NC, 1, true, false>(const __grid_constant__ Params);
