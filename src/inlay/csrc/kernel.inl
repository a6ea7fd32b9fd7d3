// The kernel, compiled once for every instruction set. A variant defines VL (floats in a vector), NV (vectors in a tile
// of lanes), MR (rows of the product that are summed at once) and INLAY_PAIRS (dot products of bf16 pairs), and
// includes this file.
//
// Both phases of ChunkAttention (arXiv 2402.15220, section 3.3) are one procedure here, over tiles of 64 keys:
//   pass 1: scores of the tile's keys; the query is rotated once for each shift
//   pass 2: scale, cap, bias, mask; running maximum and sum of every lane (online softmax)
//   pass 3: weighted sum of the tile's values
// The wide kernel keeps query rows in the lanes of vectors, so that pass 2 needs no sums across lanes. It reads keys
// and values in place, one number (or one bf16 pair) broadcast at a time. The narrow kernel is for a few rows. It keeps
// the head dimension in the lanes, and its time is that of reading the keys and values once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "cpu.h"
#include "kernel.h"

namespace inlay {
namespace INLAY_VARIANT {

// choose.inl, which is compiled separately
void choose_row(const Logits& logits, int64_t row, const RowParams& asked, const Chosen& chosen, Scratch& scratch);

namespace {

#include "simd.h"
#include "tile.h"
#include "wide.h"
#include "narrow.h"

void run(const Call& call, const Plan& plan, const Turns& turns, const Task& task, bool narrow,
         const Partials& partials, Scratch& scratch) {
  const Work work{call, plan, plan.blocks()[task.block], turns, task, partials};
  const Type stored = call.pool_keys.type;
  const bool paired = kPairs && stored != Type::f32 && call.query.type == Type::bf16 && call.head_dim % 2 == 0;
  const bool one = task.lane_end - task.lane_begin <= VL;
  if (narrow) {
    if (stored == Type::f32)
      Narrow<float, false>::run(work, scratch);
    else if (stored == Type::i8)
      paired ? Narrow<int8_t, kPairs>::run(work, scratch) : Narrow<int8_t, false>::run(work, scratch);
    else
      paired ? Narrow<uint16_t, kPairs>::run(work, scratch) : Narrow<uint16_t, false>::run(work, scratch);
  } else if (stored == Type::i8) {
    if (paired)
      one ? Wide<int8_t, kPairs, 1>::run(work, scratch) : Wide<int8_t, kPairs, NV>::run(work, scratch);
    else
      one ? Wide<int8_t, false, 1>::run(work, scratch) : Wide<int8_t, false, NV>::run(work, scratch);
  } else if (stored == Type::f32) {
    one ? Wide<float, false, 1>::run(work, scratch) : Wide<float, false, NV>::run(work, scratch);
  } else if (paired) {
    one ? Wide<uint16_t, kPairs, 1>::run(work, scratch) : Wide<uint16_t, kPairs, NV>::run(work, scratch);
  } else {
    one ? Wide<uint16_t, false, 1>::run(work, scratch) : Wide<uint16_t, false, NV>::run(work, scratch);
  }
}

void merge(const Call& call, int32_t row, int32_t kv_head, const int64_t* parts, int count,
           const Partials& partials) {
  const int d = call.head_dim;
  for (int member = 0; member < call.group(); ++member) {
    const int head = kv_head * call.group() + member;
    const float sink = call.options.sinks ? call.options.sinks[head] * kLog2E : kNothing;
    float top = sink;
    for (int i = 0; i < count; ++i) top = std::max(top, partials.sums[parts[i] + member]);
    float sum = call.options.sinks ? std::exp2(sink - top) : 0.0f;
    float row_sum[kMostDims];
    std::memset(row_sum, 0, d * sizeof(float));
    for (int i = 0; i < count; ++i) {
      const int64_t lane = parts[i] + member;
      if (partials.sums[lane] <= kNothing) continue;  // saw no key; NaN is not skipped
      const float weight = std::exp2(partials.sums[lane] - top);
      sum += weight;
      const float* part = partials.outputs + lane * d;
      for (int i2 = 0; i2 < d; ++i2) row_sum[i2] += weight * part[i2];
    }
    write_row({call.output.at(head, row), call.output.type, sum > 0.0f ? 1.0f / sum : 0.0f}, row_sum, d);
  }
}

bool supported() { return INLAY_SUPPORTED; }

}  // namespace
}  // namespace INLAY_VARIANT

#define INLAY_TEXT_OF(x) #x
#define INLAY_TEXT(x) INLAY_TEXT_OF(x)
#define INLAY_JOIN_OF(a, b) a##b
#define INLAY_JOIN(a, b) INLAY_JOIN_OF(a, b)
extern const Variant INLAY_JOIN(INLAY_VARIANT, _variant);
const Variant INLAY_JOIN(INLAY_VARIANT, _variant) = {
    INLAY_TEXT(INLAY_VARIANT),  INLAY_VARIANT::supported, NV * VL, INLAY_VARIANT::kTiles,
    INLAY_VARIANT::kNarrowLanes, INLAY_VARIANT::run,       INLAY_VARIANT::merge,
    INLAY_VARIANT::choose_row,
};

}  // namespace inlay
