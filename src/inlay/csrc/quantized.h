// y = x · weightᵀ + bias with weights in 4 or 8 bits. The inputs of a row are rounded to 16 bits for 8-bit weights and
// to 8 bits for 4-bit weights, with one scale for every 32 of them. They are multiplied as integers; sums of 32
// products are exact.
//
// A weight is stored in blocks of 16 outputs, and a block in groups of 32 inputs. A group has its numbers and, if scales
// are not of whole outputs, the 16 scales and any 16 zeros after them, so that one stream is read from front to back.
// Numbers are words of 32 bits, one for each output of the block, in consecutive rows of 16 words:
//   4 bits: row u of 4 holds inputs 8u … 8u + 7 as 0 … 15; the low half of byte k is input 8u + k, the high half input
//           8u + 4 + k. A weight is (number - 8) · scale + zero.
//   8 bits: row u of 8 holds inputs 4u … 4u + 3; byte 0 is the first, byte 2 the second, byte 1 the third, byte 3 the
//           fourth. A weight is number · scale of its output, or of its group.
#pragma once

#include <cstdint>
#include <string>

#include "tensors.h"

namespace inlay {

constexpr int64_t kQuantizedGroup = 32;  // inputs
constexpr int64_t kQuantizedBlock = 16;  // outputs

// x: (rows, in), y: (rows, out), both of one type; strides in elements. Incomplete groups of `in` and blocks of `out`
// are padded with arbitrary numbers.
struct Quantized {
  const void* x;
  int64_t x_stride;
  const char* weight;
  const float* scales;  // (out, padded), in 8 bits; null for scales of groups
  const float* bias;    // (out, padded), or null
  void* y;
  int64_t y_stride;
  int64_t rows, in, out;
  int bits;             // 4 or 8
  Type type;            // of x and y
  Type grid;            // of groups' scales and zeros; f32 in 8 bits
  bool zeros;           // 4 bits: there are zeros

  int64_t groups() const { return (in + kQuantizedGroup - 1) / kQuantizedGroup; }
  int64_t blocks() const { return (out + kQuantizedBlock - 1) / kQuantizedBlock; }
  int64_t group_bytes() const {
    return kQuantizedBlock * (kQuantizedGroup * bits / 8 + (scales ? 0 : bytes_of(grid) * (zeros ? 2 : 1)));
  }
};

// Seconds of a layer on one thread, about.
inline double seconds_of(const Quantized& layer) {
  return 5e-11 * static_cast<double>(layer.out * layer.in * layer.rows);
}

// Runs a layer on this many threads. See worthwhile in parallel.h.
using QuantizedLinear = void (*)(const Quantized& layer, int threads);

// Packs numbers of some outputs, (out, in) contiguous bytes, 0 … 15 or -127 … 127, into whole blocks from `to` on. Each
// group takes `group_bytes`; the bytes after a group's numbers are left unchanged.
void pack_quantized(const uint8_t* numbers, char* to, int64_t out, int64_t in, int bits, int64_t group_bytes,
                    int threads);

// The version for an instruction set, or the best one that runs here if `name` is empty. Null if none does.
QuantizedLinear quantized_by_name(const std::string& name);

}  // namespace inlay
