#define INLAY_SCAN avx512
#define INLAY_SUPPORTED (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("fma"))
#include "scan.inl"
