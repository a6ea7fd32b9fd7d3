// AVX-512: 32 registers of 16 lanes.
#define VL 16
#define NV 2
#define MR 8
#define INLAY_VARIANT avx512
#define INLAY_SUPPORTED                                                                  \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&            \
   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#include "kernel.inl"
