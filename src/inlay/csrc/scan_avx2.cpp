#define INLAY_SCAN avx2
#define INLAY_SUPPORTED (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
#include "scan.inl"
