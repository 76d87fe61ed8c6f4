// The model that the tests compute unless the compiler's LP_ defines say another: Llama 3.1 8B, but for its layers and
// the rows of a pass, which each test chooses.
#pragma once
#ifndef LP_HIDDEN
#define LP_HIDDEN 4096
#define LP_HEADS 32
#define LP_KV_HEADS 8
#define LP_HEAD_DIM 128
#define LP_INTERMEDIATE 14336
#define LP_VOCAB 128256
#define LP_QKV_BIAS 0
#define LP_QK_NORM 0
#define LP_TIED 0
#define LP_WINDOW 0
#define LP_EPS 925353388
#define LP_BLOCKS 128
#endif
