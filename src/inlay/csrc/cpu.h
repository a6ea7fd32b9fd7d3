// What the processor has, for each set of compiler flags in CMakeLists.txt. Macros, because an inline function could be
// compiled with those flags.
#pragma once

#define INLAY_CPU_AVX2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#define INLAY_CPU_AVX512                                                        \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&   \
   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && INLAY_CPU_AVX2)
#define INLAY_CPU_AVX512BF16 (__builtin_cpu_supports("avx512bf16") && INLAY_CPU_AVX512)
#define INLAY_CPU_AVX512VNNI (__builtin_cpu_supports("avx512vnni") && INLAY_CPU_AVX512)
