// y = x · weightᵀ + bias in bf16, with weights in the layout of a checkpoint: nothing is packed.
#pragma once

#include <cstdint>

namespace inlay {

// x: (rows, in), weight: (out, in) contiguous, bias: (out,) or null, y: (rows, out); strides in elements.
struct Linear {
  const uint16_t* x;
  int64_t x_stride;
  const uint16_t* weight;
  const uint16_t* bias;
  uint16_t* y;
  int64_t y_stride;
  int64_t rows, in, out;
};

// True if this processor multiplies pairs of bf16.
bool linear_supported();
void linear(const Linear& layer, int threads);

}  // namespace inlay
