// Four lanes, for any processor: the version that the others are tested against.
#define VL 4
#define MR 4
#define BLOCKS 1
#define INLAY_QUANTIZED quantized_portable
#include "quantized.inl"
