// y = x · weightᵀ + bias in bf16 or fp32, with weights in the layout of a checkpoint: nothing is packed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace inlay {

// x: (rows, in), weight: (out, in) contiguous, bias: (out,) or null, y: (rows, out); strides in elements. T: float, or
// uint16_t for bf16.
template <class T>
struct Linear {
  const T* x;
  int64_t x_stride;
  const T* weight;
  const T* bias;
  T* y;
  int64_t y_stride;
  int64_t rows, in, out;
};

// Seconds of a layer on one thread, about: those of reading the weights or of the products.
template <class T>
double seconds_of(const Linear<T>& layer) {
  return static_cast<double>(layer.out * layer.in) *
         std::max(1e-10 * sizeof(T), 4e-11 * static_cast<double>(layer.rows));
}

// Runs a layer on this many threads. See worthwhile in parallel.h.
template <class T>
using RunLinear = void (*)(const Linear<T>& layer, int threads);

void linear_avx512bf16(const Linear<uint16_t>& layer, int threads);
void linear_avx512(const Linear<uint16_t>& layer, int threads);
void linear_avx512(const Linear<float>& layer, int threads);
void linear_avx2(const Linear<uint16_t>& layer, int threads);
void linear_avx2(const Linear<float>& layer, int threads);
void linear_portable(const Linear<uint16_t>& layer, int threads);
void linear_portable(const Linear<float>& layer, int threads);

// The version for an instruction set, or the best one that runs here if `name` is empty. Null if none does.
template <class T>
RunLinear<T> linear_by_name(const std::string& name);

}  // namespace inlay
