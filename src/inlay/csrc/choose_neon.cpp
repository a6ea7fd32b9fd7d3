#define VL 4
#define INLAY_VARIANT neon
#include "choose.inl"
