#define INLAY_SCAN avx2
#define INLAY_SUPPORTED INLAY_CPU_AVX2
#include "scan.inl"
