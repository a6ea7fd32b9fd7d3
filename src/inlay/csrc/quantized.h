// y = x · weightᵀ + bias with weights in 4 or 8 bits. The inputs of a row are rounded to 16 bits for weights of 8 and to 8
// for weights of 4, with one scale for every 32 of them, and multiplied as whole numbers; sums of 32 products are exact.
//
// A weight lies in blocks of 16 outputs, and in a block by groups of 32 inputs: the numbers of a group, and in 4 bits
// the 16 scales and, where there are any, the 16 zeros behind them, so that one stream is read from front to back.
// Numbers are words of 32 bits, one for each output of the block, one row of 16 words behind the other:
//   4 bits: row u of 4 holds inputs 8u … 8u + 7 as 0 … 15; the low half of byte k is input 8u + k, the high half input
//           8u + 4 + k. A weight is (number - 8) · scale + zero.
//   8 bits: row u of 8 holds inputs 4u … 4u + 3; byte 0 is the first, byte 2 the second, byte 1 the third, byte 3 the
//           fourth. A weight is number · scale of its output.
#pragma once

#include <cstdint>

#include "tensors.h"

namespace inlay {

constexpr int64_t kQuantizedGroup = 32;  // inputs
constexpr int64_t kQuantizedBlock = 16;  // outputs

// x: (rows, in), y: (rows, out), both of one type; strides in elements. Groups that `in` does not fill, and blocks that
// `out` does not fill, are filled up with numbers that mean nothing.
struct Quantized {
  const void* x;
  int64_t x_stride;
  const char* weight;
  const float* scales;  // (out, filled up), in 8 bits; else null
  const float* bias;    // (out, filled up), or null
  void* y;
  int64_t y_stride;
  int64_t rows, in, out;
  int bits;             // 4 or 8
  Type type;            // of x and y
  Type grid;            // of scales and zeros in 4 bits
  bool zeros;           // whether there are any, in 4 bits

  int64_t groups() const { return (in + kQuantizedGroup - 1) / kQuantizedGroup; }
  int64_t blocks() const { return (out + kQuantizedBlock - 1) / kQuantizedBlock; }
  int64_t group_bytes() const {
    if (bits == 8) return kQuantizedBlock * kQuantizedGroup;
    return kQuantizedBlock * (kQuantizedGroup / 2 + bytes_of(grid) * (zeros ? 2 : 1));
  }
};

using QuantizedLinear = void (*)(const Quantized& layer, int threads);

// Numbers of some outputs, (out, in) bytes one row behind the other, 0 … 15 or -127 … 127, into whole blocks that lie
// from `to` on, `group_bytes` for each group; what is behind a group's numbers is left as it is.
void pack_quantized(const uint8_t* numbers, char* to, int64_t out, int64_t in, int bits, int64_t group_bytes,
                    int threads);

// The version for an instruction set, or for null the best one that runs here; null where that is none.
QuantizedLinear quantized_by_name(const char* name);

}  // namespace inlay
