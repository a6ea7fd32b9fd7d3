// AVX2 with FMA: 16 registers of 8 lanes.
#define VL 8
#define NV 2
#define MR 4
#define INLAY_VARIANT avx2
#define INLAY_SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "kernel.inl"
