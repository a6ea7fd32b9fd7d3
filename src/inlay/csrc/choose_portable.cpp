#define VL 4
#define INLAY_VARIANT portable
#include "choose.inl"
