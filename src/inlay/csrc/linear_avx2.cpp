#include <immintrin.h>

#define VL 8
#define LINEAR linear_avx2
#include "linear.inl"
