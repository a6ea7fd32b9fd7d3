// Four lanes, for processors without their own version.
#define VL 4
#define NV 2
#define MR 4
#define INLAY_VARIANT portable
#define INLAY_SUPPORTED true
#include "kernel.inl"
