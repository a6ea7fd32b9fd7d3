#include <immintrin.h>

#define VL 16
#define LINEAR linear_avx512
#include "linear.inl"
