// Chooses the version of the scans for this processor, and divides their work among threads.
#include "scan.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#include "parallel.h"

namespace inlay {

#ifdef INLAY_HAS_AVX512
extern const ScanVariant avx512_scan;
#endif
#ifdef INLAY_HAS_AVX2
extern const ScanVariant avx2_scan;
#endif
extern const ScanVariant portable_scan;

namespace {

const ScanVariant* const kVariants[] = {
#ifdef INLAY_HAS_AVX512
    &avx512_scan,
#endif
#ifdef INLAY_HAS_AVX2
    &avx2_scan,
#endif
    &portable_scan,
};

constexpr int64_t kShare = 1 << 16;  // updates of a state that pay for waking another thread

int64_t rows_of(const Spans& spans) {
  int64_t rows = 0;
  for (int64_t piece = 0; piece < spans.first_piece[spans.count]; ++piece) rows += spans.end[piece] - spans.first[piece];
  return rows;
}

// Calls body(span, head, part) for all of them, on threads that take one after the other.
template <class Body>
void for_each(const Spans& spans, int64_t heads, int64_t parts, int64_t updates, int threads, const Body& body) {
  const int64_t tasks = spans.count * heads * parts, worth = std::max<int64_t>(1, updates / kShare);
  std::atomic<int64_t> next{0};
  run_parallel(static_cast<int>(std::min<int64_t>({threads, tasks, worth})), [&](Team&, int) {
    for (int64_t task; (task = next.fetch_add(1)) < tasks;)
      body(task / (heads * parts), task / parts % heads, task % parts);
  });
}

}  // namespace

const ScanVariant& scan_by_name(const std::string& name) {
  for (const ScanVariant* variant : kVariants)
    if (variant->supported() && (name.empty() || name == variant->name)) return *variant;
  throw std::invalid_argument("no scan for the instruction set '" + name + "' runs here");
}

void scan_delta(const DeltaScan& scan, const Spans& spans, const ScanVariant& variant, int threads) {
  const int64_t tiles = scan.value_width / kScanLanes;
  const int64_t updates = rows_of(spans) * scan.value_heads * scan.key_width * scan.value_width;
  for_each(spans, scan.value_heads, tiles, updates, threads, [&](int64_t span, int64_t head, int64_t tile) {
    variant.delta(scan, spans, span, head, tile);
  });
}

void scan_state_space(const StateSpaceScan& scan, const Spans& spans, const ScanVariant& variant, int threads) {
  const int64_t parts = scan.width / kScanChannels;
  const int64_t updates = rows_of(spans) * scan.heads * scan.width * scan.state_width;
  for_each(spans, scan.heads, parts, updates, threads, [&](int64_t span, int64_t head, int64_t part) {
    variant.state_space(scan, spans, span, head, part * kScanChannels);
  });
}

void convolve(const Convolution& convolution, const Spans& spans, const ScanVariant& variant, int threads) {
  const int64_t blocks = (convolution.channels + kConvolved - 1) / kConvolved;
  const int64_t updates = rows_of(spans) * convolution.channels * convolution.kernel;
  for_each(spans, 1, blocks, updates, threads, [&](int64_t span, int64_t, int64_t block) {
    variant.convolve(convolution, spans, span, block * kConvolved);
  });
}

}  // namespace inlay
