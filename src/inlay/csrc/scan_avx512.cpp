#define INLAY_SCAN avx512
#define INLAY_SUPPORTED INLAY_CPU_AVX512
#include "scan.inl"
