// 64-bit Arm: 32 registers of 4 lanes.
#define VL 4
#define NV 4
#define MR 4
#define INLAY_VARIANT neon
#define INLAY_SUPPORTED true
#include "kernel.inl"
