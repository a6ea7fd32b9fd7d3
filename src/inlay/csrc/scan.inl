// One version of the scans. The vectors have 16 lanes in every version; the compiler cuts them to the registers' size.
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

bool supported() { return INLAY_SUPPORTED; }

}  // namespace
}  // namespace INLAY_SCAN

#define INLAY_TEXT_OF(x) #x
#define INLAY_TEXT(x) INLAY_TEXT_OF(x)
#define INLAY_JOIN_OF(a, b) a##b
#define INLAY_JOIN(a, b) INLAY_JOIN_OF(a, b)
extern const ScanVariant INLAY_JOIN(INLAY_SCAN, _scan);
const ScanVariant INLAY_JOIN(INLAY_SCAN, _scan) = {
    INLAY_TEXT(INLAY_SCAN), INLAY_SCAN::supported, INLAY_SCAN::delta, INLAY_SCAN::state_space};

}  // namespace inlay
