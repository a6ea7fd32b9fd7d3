// Chooses the version of the quantized layer for this processor, and packs weights in the layout of all versions.
#include "quantized.h"

#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "parallel.h"

namespace inlay {

#ifdef INLAY_HAS_AVX2
void quantized_avx2(const Quantized& layer, int threads);
void quantized_avx512vnni(const Quantized& layer, int threads);
#endif
void quantized_portable(const Quantized& layer, int threads);

namespace {

// A word of 8 inputs in 4 bits, or of 4 inputs in 8 bits.
uint32_t word4(const uint8_t* n) {
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(n[i] | n[i + 4] << 4) << 8 * i;
  return word;
}
uint32_t word8(const uint8_t* n) {
  return n[0] | static_cast<uint32_t>(n[2]) << 8 | static_cast<uint32_t>(n[1]) << 16 | static_cast<uint32_t>(n[3]) << 24;
}

void pack_block(const uint8_t* numbers, char* to, int64_t rows, int64_t in, int bits, int64_t group_bytes) {
  const int64_t groups = (in + kQuantizedGroup - 1) / kQuantizedGroup, each = bits == 4 ? 8 : 4;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * kQuantizedGroup, left = std::min(kQuantizedGroup, in - first);
      uint8_t part[kQuantizedGroup] = {};
      std::memcpy(part, numbers + row * in + first, left);
      for (int64_t u = 0; u * each < kQuantizedGroup; ++u) {
        const uint32_t word = bits == 4 ? word4(part + u * each) : word8(part + u * each);
        std::memcpy(to + g * group_bytes + (u * kQuantizedBlock + row) * 4, &word, 4);
      }
    }
}

}  // namespace

void pack_quantized(const uint8_t* numbers, char* to, int64_t out, int64_t in, int bits, int64_t group_bytes,
                    int threads) {
  const int64_t blocks = (out + kQuantizedBlock - 1) / kQuantizedBlock;
  const int64_t groups = (in + kQuantizedGroup - 1) / kQuantizedGroup;
  const int64_t worth = std::max<int64_t>(1, out * in >> 16);  // numbers that pay for waking another thread
  run_parallel(static_cast<int>(std::min<int64_t>({threads, blocks, worth})), [&](Team& team, int thread) {
    for (int64_t b = blocks * thread / team.threads(); b < blocks * (thread + 1) / team.threads(); ++b)
      pack_block(numbers + b * kQuantizedBlock * in, to + b * groups * group_bytes,
                 std::min(kQuantizedBlock, out - b * kQuantizedBlock), in, bits, group_bytes);
  });
}

QuantizedLinear quantized_by_name(const std::string& name) {
  const auto asked = [&](const char* own) { return name.empty() || name == own; };
#ifdef INLAY_HAS_AVX2
  if (asked("avx512vnni") && INLAY_CPU_AVX512VNNI) return quantized_avx512vnni;
  if (asked("avx2") && INLAY_CPU_AVX2) return quantized_avx2;
#endif
  if (name == "portable") return quantized_portable;  // PyTorch's own is faster
  return nullptr;
}

}  // namespace inlay
