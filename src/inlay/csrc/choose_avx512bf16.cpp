#define VL 16
#define INLAY_VARIANT avx512bf16
#include "choose.inl"
