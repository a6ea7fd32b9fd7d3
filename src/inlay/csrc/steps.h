// The small steps between the matrix products of a decoder layer. Arguments are addresses of fp32 or bf16 numbers.
#pragma once

#include <cstdint>

namespace inlay {

// Rows of `count` groups of `width` numbers, each group normed alone; strides in elements. Works in place if x is out.
void rms_norm(uint64_t x, uint64_t weight, uint64_t out, bool bf16, int64_t rows, int64_t count, int64_t width,
              int64_t x_stride, int64_t out_stride, float eps, int threads);
// gate_up: (rows, 2 · width), the gate first; out: (rows, width).
void silu_mul(uint64_t gate_up, uint64_t out, bool bf16, int64_t rows, int64_t width, int threads);
// heads: (rows, count, width) in place, with rows `stride` elements apart; cos, sin: (rows, width) fp32.
void rotate(uint64_t heads, uint64_t cos, uint64_t sin, bool bf16, int64_t rows, int64_t count, int64_t width,
            int64_t stride, int threads);
// out = a + b of (rows, width) numbers, rounded once; out may be a or b.
void add(uint64_t a, uint64_t b, uint64_t out, bool bf16, int64_t rows, int64_t width, int threads);

}  // namespace inlay
