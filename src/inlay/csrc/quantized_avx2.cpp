// AVX2 with FMA: 16 registers of 8 lanes.
#define VL 8
#define MR 4
#define BLOCKS 1
#define INLAY_QUANTIZED quantized_avx2
#include "quantized.inl"
