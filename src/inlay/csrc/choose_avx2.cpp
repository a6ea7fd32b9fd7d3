#define VL 8
#define INLAY_VARIANT avx2
#include "choose.inl"
