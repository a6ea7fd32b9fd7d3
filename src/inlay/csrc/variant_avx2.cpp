// AVX2 with FMA: 16 registers of 8 lanes.
#define VL 8
#define NV 2
#define MR 4
#define INLAY_VARIANT avx2
#define INLAY_SUPPORTED INLAY_CPU_AVX2
#include "kernel.inl"
