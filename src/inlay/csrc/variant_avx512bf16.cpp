// AVX-512 with dot products of bf16 pairs.
#define VL 16
#define NV 2
#define MR 8
#define INLAY_PAIRS 1
#define INLAY_VARIANT avx512bf16
#define INLAY_SUPPORTED                                                                  \
  (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512f") &&          \
   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&           \
   __builtin_cpu_supports("avx512vl"))
#include "kernel.inl"
