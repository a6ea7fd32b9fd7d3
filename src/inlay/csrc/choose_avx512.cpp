#define VL 16
#define INLAY_VARIANT avx512
#include "choose.inl"
