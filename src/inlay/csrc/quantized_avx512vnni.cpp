// AVX-512 with products of pairs of integers: 32 registers of 16 lanes.
#define VL 16
#define MR 6
#define BLOCKS 2
#define INLAY_QUANTIZED quantized_avx512vnni
#include "quantized.inl"
