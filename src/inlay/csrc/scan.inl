// One version of the scans. The vectors have 16 lanes in every version; the compiler cuts them to the registers' size.
#include <algorithm>
#include <cstring>

#include "cpu.h"
#include "scan.h"

namespace inlay {
namespace INLAY_SCAN {
namespace {

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));
static_assert(sizeof(Lanes) == kScanLanes * sizeof(float), "one vector for each tile");

inline const Lanes& load(const float* from) { return *reinterpret_cast<const Lanes*>(from); }
inline void store(float* to, const Lanes& lanes) { *reinterpret_cast<Lanes*>(to) = lanes; }

template <bool by_channel>
void delta_tile(const DeltaScan& scan, const Spans& spans, int64_t span, int64_t head, int64_t tile) {
  const int64_t keys = scan.key_width, values = scan.value_width, column = tile * kScanLanes;
  const int64_t key_head = head / (scan.value_heads / scan.key_heads);
  alignas(64) Lanes state[kMostKeyWidth];
  const auto slot = [&](int64_t number) { return scan.pool + (number * scan.value_heads + head) * keys * values + column; };
  const int64_t source = spans.source[span];
  for (int64_t i = 0; i < keys; ++i) state[i] = source < 0 ? Lanes{} : load(slot(source) + i * values);
  for (int64_t piece = spans.first_piece[span]; piece < spans.first_piece[span + 1]; ++piece) {
    for (int64_t row = spans.first[piece]; row < spans.end[piece]; ++row) {
      const int64_t at = row * scan.value_heads + head;
      const float* query = scan.query + (row * scan.key_heads + key_head) * keys;
      const float* key = scan.key + (row * scan.key_heads + key_head) * keys;
      const float* decay = scan.decay + at * scan.decays;
      Lanes seen[4] = {};
      for (int64_t i = 0; i < keys; i += 4)
        for (int j = 0; j < 4; ++j) {
          if (by_channel) state[i + j] *= decay[i + j];
          seen[j] += key[i + j] * state[i + j];
        }
      const float all = by_channel ? 1.0f : *decay;
      const Lanes found = (seen[0] + seen[1]) + (seen[2] + seen[3]);
      const Lanes delta = (load(scan.value + at * values + column) - all * found) * scan.beta[at];
      Lanes sums[4] = {};
      for (int64_t i = 0; i < keys; i += 4)
        for (int j = 0; j < 4; ++j) {
          const Lanes kept = by_channel ? state[i + j] : all * state[i + j];
          state[i + j] = kept + key[i + j] * delta;
          sums[j] += query[i + j] * state[i + j];
        }
      store(scan.out + at * values + column, (sums[0] + sums[1]) + (sums[2] + sums[3]));
    }
    float* target = slot(spans.target[piece]);
    for (int64_t i = 0; i < keys; ++i) store(target + i * values, state[i]);
  }
}

void delta(const DeltaScan& scan, const Spans& spans, int64_t span, int64_t head, int64_t tile) {
  if (scan.decays == 1)
    delta_tile<false>(scan, spans, span, head, tile);
  else
    delta_tile<true>(scan, spans, span, head, tile);
}

void state_space(const StateSpaceScan& scan, const Spans& spans, int64_t span, int64_t head, int64_t channel) {
  const int64_t width = scan.state_width, group = head / (scan.heads / scan.groups);
  const auto slot = [&](int64_t number) {
    return scan.pool + ((number * scan.heads + head) * scan.width + channel) * width;
  };
  const float* before = spans.source[span] < 0 ? nullptr : slot(spans.source[span]);
  for (int64_t piece = spans.first_piece[span]; piece < spans.first_piece[span + 1]; ++piece) {
    float* state = slot(spans.target[piece]);
    for (int64_t i = 0; i < kScanChannels * width; i += kScanLanes)
      store(state + i, before == nullptr ? Lanes{} : load(before + i));
    for (int64_t row = spans.first[piece]; row < spans.end[piece]; ++row) {
      const int64_t at = row * scan.heads + head;
      const float* b = scan.b + (row * scan.groups + group) * width;
      const float* c = scan.c + (row * scan.groups + group) * width;
      const float decay = scan.decay[at], time = scan.time[at];
      for (int64_t i = 0; i < kScanChannels; ++i) {
        const float in = scan.x[at * scan.width + channel + i] * time;
        Lanes sum = {};
        for (int64_t j = 0; j < width; j += kScanLanes) {
          const Lanes next = decay * load(state + i * width + j) + in * load(b + j);
          store(state + i * width + j, next);
          sum += next * load(c + j);
        }
        float total = 0.0f;
        for (int64_t j = 0; j < kScanLanes; ++j) total += sum[j];
        scan.out[at * scan.width + channel + i] = total;
      }
    }
    before = state;
  }
}

typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

// bf16 is the upper half of a float. It is rounded to nearest, ties to even; NaN stays NaN.
inline void widen(Lanes& to, const uint16_t* from) {
  Halves halves;
  std::memcpy(&halves, from, sizeof halves);
  to = reinterpret_cast<Lanes>(__builtin_convertvector(halves, Bits) << 16);
}
inline void widen(Lanes& to, const float* from) { to = load(from); }
inline void narrow(uint16_t* to, const Lanes& lanes) {
  const Bits bits = reinterpret_cast<Bits>(lanes);
  const Bits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Bits number = reinterpret_cast<Bits>(lanes == lanes);
  const Halves halves = __builtin_convertvector((rounded & number) | (((bits >> 16) | 0x40u) & ~number), Halves);
  std::memcpy(to, &halves, sizeof halves);
}
inline void narrow(float* to, const Lanes& lanes) { store(to, lanes); }
inline float widened_one(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
inline float widened_one(float number) { return number; }

// x / (1 + e**-x). The exponential is 2**n * p(f), with a relative error below 2e-7.
inline void silu(Lanes& x) {
  const Lanes limit = Lanes{} + 126.0f, scaled = x * -1.44269504f;
  const Lanes above = scaled > limit ? limit : scaled, power = above < -limit ? -limit : above;
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest integer in the low bits
  const Lanes rounded = power + magic, f = power - (rounded - magic);
  Lanes p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const Integers exponent = (reinterpret_cast<Integers>(rounded) + 127) << 23;
  x = x / (1.0f + p * reinterpret_cast<Lanes>(exponent));
}

template <class T>
void convolve_channels(const Convolution& c, const Spans& spans, int64_t span, int64_t channel) {
  constexpr int64_t kVectors = kConvolved / kScanLanes;
  const int64_t width = std::min(kConvolved, c.channels - channel), vectors = width / kScanLanes;
  const int64_t before = c.kernel - 1;
  const auto slot = [&](int64_t number) { return static_cast<T*>(c.pool) + (number * c.channels + channel) * before; };
  alignas(64) Lanes window[kMostKernel][kVectors] = {}, taps[kMostKernel][kVectors], bias[kVectors] = {};
  for (int64_t k = 0; k < c.kernel; ++k)
    for (int64_t v = 0; v < vectors; ++v) taps[k][v] = load(c.weight + k * c.channels + channel + v * kScanLanes);
  if (c.bias != nullptr)
    for (int64_t v = 0; v < vectors; ++v) bias[v] = load(c.bias + channel + v * kScanLanes);
  if (spans.source[span] >= 0) {
    const T* state = slot(spans.source[span]);
    for (int64_t v = 0; v < vectors; ++v)
      for (int64_t i = 0; i < kScanLanes; ++i)
        for (int64_t k = 0; k < before; ++k) window[k][v][i] = widened_one(state[(v * kScanLanes + i) * before + k]);
  }
  for (int64_t piece = spans.first_piece[span]; piece < spans.first_piece[span + 1]; ++piece) {
    for (int64_t row = spans.first[piece]; row < spans.end[piece]; ++row) {
      const T* x = static_cast<const T*>(c.x) + row * c.stride + channel;
      T* out = static_cast<T*>(c.out) + row * c.channels + channel;
      for (int64_t v = 0; v < vectors; ++v) {
        widen(window[before][v], x + v * kScanLanes);
        Lanes sum = bias[v];
        for (int64_t k = 0; k <= before; ++k) sum += taps[k][v] * window[k][v];
        for (int64_t k = 0; k < before; ++k) window[k][v] = window[k + 1][v];
        if (c.silu) silu(sum);
        narrow(out + v * kScanLanes, sum);
      }
    }
    alignas(64) T kept[kConvolved];
    T* state = slot(spans.target[piece]);
    for (int64_t k = 0; k < before; ++k) {
      for (int64_t v = 0; v < vectors; ++v) narrow(kept + v * kScanLanes, window[k][v]);
      for (int64_t i = 0; i < width; ++i) state[i * before + k] = kept[i];
    }
  }
}

void convolve(const Convolution& convolution, const Spans& spans, int64_t span, int64_t channel) {
  if (convolution.bf16)
    convolve_channels<uint16_t>(convolution, spans, span, channel);
  else
    convolve_channels<float>(convolution, spans, span, channel);
}

bool supported() { return INLAY_SUPPORTED; }

}  // namespace
}  // namespace INLAY_SCAN

#define INLAY_TEXT_OF(x) #x
#define INLAY_TEXT(x) INLAY_TEXT_OF(x)
#define INLAY_JOIN_OF(a, b) a##b
#define INLAY_JOIN(a, b) INLAY_JOIN_OF(a, b)
extern const ScanVariant INLAY_JOIN(INLAY_SCAN, _scan);
const ScanVariant INLAY_JOIN(INLAY_SCAN, _scan) = {
    INLAY_TEXT(INLAY_SCAN), INLAY_SCAN::supported, INLAY_SCAN::delta, INLAY_SCAN::state_space,
    INLAY_SCAN::convolve};

}  // namespace inlay
