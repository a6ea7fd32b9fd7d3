// The arguments of one attention call: plain pointers with strides. No tensor library is needed here.
#pragma once

#include <cstdint>
#include <cstring>

namespace inlay {

// i8: a row of the pool as integers of -127 … 127, followed by one fp32 scale, the value of 1.
enum class Type { f32, bf16, i8 };

constexpr int kScaleBytes = 4;

inline int bytes_of(Type type) { return type == Type::f32 ? 4 : type == Type::bf16 ? 2 : 1; }

inline float scale_of(const char* row, int dims) {
  float scale;
  std::memcpy(&scale, row + dims, sizeof scale);
  return scale;
}

inline float from_bf16(uint16_t bits) {
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// (heads, rows, head_dim) with head_dim contiguous; strides in elements. For i8 an element is a byte, also in scales.
struct Heads {
  char* data;
  Type type;
  int64_t head_stride;
  int64_t row_stride;

  char* at(int64_t head, int64_t row) const {
    return data + (head * head_stride + row * row_stride) * bytes_of(type);
  }
};

// How a layer attends; see AttentionOptions in attention/backend.py. Absent parts are null, zero or false.
struct Options {
  float scale;
  int32_t window;            // 0: none
  float softcap;             // 0: none
  const float* sinks;        // (heads,), natural units
  const float* slopes;       // (heads,), ALiBi
  const float* frequencies;  // (rotated / 2,), radians per position
  int rotated;               // leading dimensions that a shift rotates
  bool interleaved;
};

struct Call {
  Heads query;                   // (heads, rows, head_dim), at the rows' positions
  Heads key, value;              // (kv_heads, rows, head_dim), of the same rows
  Heads pool_keys, pool_values;  // (kv_heads, slots, head_dim), both of one type; the other tensors are fp32 or bf16
  Heads output;                  // (heads, rows, head_dim)
  int heads, kv_heads, head_dim;
  int64_t slots;                 // slots of the pool
  Options options;

  int group() const { return heads / kv_heads; }
};

}  // namespace inlay
