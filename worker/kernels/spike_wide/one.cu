#include "wide.cu"
#ifndef ONE_NC
#define ONE_NC 64
#endif
#ifndef ONE_SK
#define ONE_SK 1
#endif
template __global__ void wide<ONE_NC, ONE_SK, true, false>(const __grid_constant__ Params);
