// AVX-512 with dot products of bf16 pairs.
#define VL 16
#define NV 2
#define MR 8
#define INLAY_PAIRS 1
#define INLAY_VARIANT avx512bf16
#define INLAY_SUPPORTED INLAY_CPU_AVX512BF16
#include "kernel.inl"
