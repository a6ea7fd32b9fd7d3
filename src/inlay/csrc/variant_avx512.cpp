// AVX-512: 32 registers of 16 lanes.
#define VL 16
#define NV 2
#define MR 8
#define INLAY_VARIANT avx512
#define INLAY_SUPPORTED INLAY_CPU_AVX512
#include "kernel.inl"
