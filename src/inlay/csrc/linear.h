// y = x · weightᵀ + bias in bf16, with weights in the layout of a checkpoint: nothing is packed.
#pragma once

#include <algorithm>
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

// Seconds of a layer on one thread, about: those of reading the weights or of the products.
inline double seconds_of(const Linear& layer) {
  return static_cast<double>(layer.out * layer.in) * std::max(2e-10, 4e-11 * static_cast<double>(layer.rows));
}

// Runs a layer on this many threads. See worthwhile in parallel.h.
using RunLinear = void (*)(const Linear& layer, int threads);

void linear_avx512bf16(const Linear& layer, int threads);
void linear_avx2(const Linear& layer, int threads);
void linear_portable(const Linear& layer, int threads);

// The version for an instruction set, or the best one that runs here if `name` is null. Null if it does not run here.
RunLinear linear_by_name(const char* name);

}  // namespace inlay
