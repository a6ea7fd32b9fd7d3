// Chooses the token of one row, compiled once for every instruction set; see choose.h. No vocabulary is sorted:
//   pass 1: the largest logit, and the largest of each block. Greedy rows end here.
//   pass 2: weights, and their sums over groups of tokens. Rows with only temperature and min-p draw from these.
//   list:   the few tokens that reach a bound derived from the blocks' largest logits. Top-k, and most rows with top-p,
//           are decided among them.
//   pass 3: for flat rows with top-p, a histogram of the weights. Only the tokens of two of its buckets are listed.
// Weights are integers, so that sums do not depend on the order. The file is compiled without contraction of products
// and sums. Every operation is one of IEEE's, and gives the same bits as PyTorch (sampling/plain.py).
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "choose.h"
#include "kernel.h"

namespace inlay {
namespace INLAY_VARIANT {
namespace {

#include "simd.h"

typedef int64_t vl __attribute__((vector_size(VL * 8)));

constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kMost = std::numeric_limits<float>::max();
constexpr int64_t kGroup = 4096;  // tokens with a common sum of weights; its VL blocks are columns of lanes
constexpr int64_t kShortList = 128, kCrowd = 4096;  // tokens of a short list; the most with ties
constexpr int kBuckets = 2048;                      // of the histogram
constexpr int kTables = 2;                          // parts of the histogram: neighbours often share a bucket
constexpr int64_t kBatch = 512;                     // logits that are added to the histogram at a time
constexpr int64_t kSorted = 256;                    // up to this many items are sorted instead of divided
constexpr int kParts = 256;                         // parts that items are divided into
constexpr float kLeastLog = -64.0f;                 // far below any log with a weight

struct Item {
  float value;
  uint32_t id;
  int64_t weight;
};

// A thread's memory, for rows of one width.
struct Room {
  float* adjusted;     // (vocabulary,)
  float* values;       // (vocabulary,)
  float* maxima;       // (groups * VL,)
  int64_t* sums;       // (groups,)
  int64_t* histogram;  // (kTables, kBuckets)
  Item* items;         // (vocabulary,)
  Item* others;        // (vocabulary,)

  static int64_t groups(int64_t vocabulary) { return (vocabulary + kGroup - 1) / kGroup; }

  Room(Scratch& scratch, int64_t vocabulary) {
    const int64_t row = (vocabulary + VL) * 4, groups = Room::groups(vocabulary);
    const int64_t sizes[] = {row, row, groups * VL * 4, groups * 8, kTables * kBuckets * 8, vocabulary * 16,
                             vocabulary * 16};
    int64_t bytes = 0, at[7];
    for (int i = 0; i < 7; ++i) {
      at[i] = bytes;
      bytes += (sizes[i] + 63) / 64 * 64;
    }
    char* from = scratch.take(bytes);
    adjusted = reinterpret_cast<float*>(from + at[0]);
    values = reinterpret_cast<float*>(from + at[1]);
    maxima = reinterpret_cast<float*>(from + at[2]);
    sums = reinterpret_cast<int64_t*>(from + at[3]);
    histogram = reinterpret_cast<int64_t*>(from + at[4]);
    items = reinterpret_cast<Item*>(from + at[5]);
    others = reinterpret_cast<Item*>(from + at[6]);
  }
};

INLINE uint32_t bits_of(vi mask) {
#if VL == 16 && defined(__AVX512F__)
  return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask));
#elif VL == 8 && defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(mask)));
#else
  uint32_t bits = 0;
  for (int lane = 0; lane < VL; ++lane) bits |= static_cast<uint32_t>(mask[lane] & 1) << lane;
  return bits;
#endif
}

INLINE vf largest(vf a, vf b) {  // b if a is NaN
#if VL == 16 && defined(__AVX512F__)
  return reinterpret_cast<vf>(_mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
#elif VL == 8 && defined(__AVX2__)
  return reinterpret_cast<vf>(_mm256_max_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b)));
#else
  return larger(a, b);
#endif
}

// A row of logits, vector by vector. The last one is padded with -inf.
template <class T>
struct Row {
  const T* data;
  int64_t width;

  INLINE vf at(int64_t i) const {
    if (i + VL <= width) return load(data + i);
    float some[VL];
    for (int lane = 0; lane < VL; ++lane) some[lane] = i + lane < width ? number(data + i + lane) : kNone;
    return load(some);
  }
};

// --- weights ------------------------------------------------------------------------------------------------------

// The parameters of one row's weights.
struct Scale {
  float best, inverse, min_p;
};

// The exponential of numbers up to 0, from IEEE operations alone, to 2 units in the last place (Cephes, expf).
template <class V, class I>
INLINE V exp_of(V x) {
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest integer in the low bits
  const V shifted = x * 1.44269504088896341f + magic;
  const V whole = shifted - magic;
  const V r = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  V y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = (y * (r * r) + r) + 1.0f;
  I bits, exponent;
  std::memcpy(&bits, &y, sizeof y);
  std::memcpy(&exponent, &shifted, sizeof shifted);
  bits += exponent << 23;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

INLINE vf log_of(vf value, const Scale& scale) { return largest((value - scale.best) * scale.inverse, all(kLeastLog)); }

// The weight relative to the largest one; 0 if min-p excludes the token.
INLINE vf ratio_of(vf log, const Scale& scale) {
  const vf ratio = exp_of<vf, vi>(log);
  return ratio >= scale.min_p ? ratio : vf{};
}

// Weights in units of 2**-40 of the largest one, as 2**20 * high + low.
struct Weights {
  vi high, low;
};
INLINE Weights weights_of(vf ratio) {
  const vf scaled = ratio * 1048576.0f;
  const vi high = __builtin_convertvector(scaled, vi);
  return {high, __builtin_convertvector((scaled - __builtin_convertvector(high, vf)) * 1048576.0f, vi)};
}

inline int64_t weight_of(float value, const Scale& scale) {
  const float log = std::max((value - scale.best) * scale.inverse, kLeastLog);
  const float ratio = exp_of<float, uint32_t>(log);
  return ratio >= scale.min_p ? static_cast<int64_t>(ratio * 1099511627776.0f) : 0;
}

INLINE int64_t total_of(vi v) {
  int32_t lanes[VL];
  std::memcpy(lanes, &v, sizeof v);
  int64_t total = 0;
  for (const int32_t lane : lanes) total += lane;
  return total;
}

// --- passes over a row --------------------------------------------------------------------------------------------

// Pass 1. Returns the largest logit, or NaN if the row has one. maxima: (groups * VL,).
template <class T>
float survey(const Row<T>& row, float* maxima) {
  vi damaged = {};
  vf best = all(kNone);
  for (int64_t begin = 0; begin < row.width; begin += kGroup) {
    const int64_t end = std::min(row.width, begin + kGroup), whole = begin + (end - begin) / (4 * VL) * (4 * VL);
    vf tops[4] = {all(kNone), all(kNone), all(kNone), all(kNone)};
    for (int64_t i = begin; i < whole; i += 4 * VL)
#pragma GCC unroll 4
      for (int part = 0; part < 4; ++part) {
        const vf v = load(row.data + i + part * VL);
        damaged |= v != v;
        tops[part] = largest(v, tops[part]);
      }
    for (int64_t i = whole; i < end; i += VL) {
      const vf v = row.at(i);
      damaged |= v != v;
      tops[0] = largest(v, tops[0]);
    }
    const vf top = largest(largest(tops[0], tops[1]), largest(tops[2], tops[3]));
    store(maxima + begin / kGroup * VL, top);
    best = largest(top, best);
  }
  return bits_of(damaged) ? std::numeric_limits<float>::quiet_NaN() : largest_of(best);
}

// The lowest token id with the largest logit.
template <class T>
int64_t first_best(const Row<T>& row, const float* maxima, float best) {
  int64_t begin = 0;
  while (!bits_of(load(maxima + begin / kGroup * VL) == best)) begin += kGroup;
  for (int64_t i = begin;; i += VL)
    if (const uint32_t found = bits_of(row.at(i) == best)) return i + __builtin_ctz(found);
}

// Pass 2. Returns the sum of all weights. sums: (groups,).
template <class T>
int64_t sum_weights(const Row<T>& row, const Scale& scale, int64_t* sums) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < row.width; begin += kGroup) {
    vi high = {}, low = {};
    const int64_t end = std::min(row.width, begin + kGroup);
    for (int64_t i = begin; i < end; i += VL) {
      const Weights weights = weights_of(ratio_of(log_of(row.at(i), scale), scale));
      high += weights.high;
      low += weights.low;
    }
    total += sums[begin / kGroup] = (total_of(high) << 20) + total_of(low);
  }
  return total;
}

// The n-th largest of the blocks' largest logits: at least n tokens reach it. -inf if there are fewer blocks.
float bound(const float* maxima, int64_t blocks, int64_t n, float* room) {
  if (n >= blocks) return kNone;
  std::copy(maxima, maxima + blocks, room);
  std::nth_element(room, room + n - 1, room + blocks, [](float a, float b) { return a > b; });
  return room[n - 1];
}

// Lists the tokens of a row with logits from least to most, by id, without -inf, and returns their number. Stops soon
// after `enough` tokens. Weights are not set.
template <class T>
int64_t list(const Row<T>& row, float least, float most, Item* items, int64_t enough) {
  const vf low = all(std::max(least, std::numeric_limits<float>::lowest())), high = all(most);
  int64_t count = 0;
  const auto within = [&](vf v) { return (v >= low) & (v <= high); };
  const auto take = [&](uint32_t found, int64_t i) {
    for (; found; found &= found - 1) {
      const int64_t id = i + __builtin_ctz(found);
      items[count++] = {number(row.data + id), static_cast<uint32_t>(id), 0};
    }
  };
  const int64_t whole = row.width / (4 * VL) * (4 * VL);
  for (int64_t i = 0; i < whole && count <= enough; i += 4 * VL) {
    vi found[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) found[part] = within(load(row.data + i + part * VL));
    if (!bits_of(found[0] | found[1] | found[2] | found[3])) continue;
    for (int part = 0; part < 4; ++part) take(bits_of(found[part]), i + part * VL);
  }
  for (int64_t i = whole; i < row.width && count <= enough; i += VL) take(bits_of(within(row.at(i))), i);
  return count;
}

// Sets the weights of the items, drops those without weight, and returns how many are left.
int64_t weigh(Item* items, int64_t count, const Scale& scale) {
  int64_t left = 0, weight = 0;
  float value = std::numeric_limits<float>::quiet_NaN();
  for (int64_t i = 0; i < count; ++i) {
    if (items[i].value != value) weight = weight_of(value = items[i].value, scale);  // many may tie
    if (weight) items[left++] = {value, items[i].id, weight};
  }
  return left;
}

int64_t mass_of(const Item* items, int64_t count) {
  int64_t mass = 0;
  for (int64_t i = 0; i < count; ++i) mass += items[i].weight;
  return mass;
}

// --- selection by weight ------------------------------------------------------------------------------------------

// The item at which the sum of weights, by falling value and rising id, first reaches a limit.
struct Reached {
  int64_t token;
  int64_t sum;  // up to and including it
};

// The nucleus: the first tokens with weights that reach a share of the total.
struct Share {
  double limit;
  bool operator()(int64_t sum) const { return static_cast<double>(sum) >= limit; }
};
// A draw: the token with the target in its interval of 0 … total - 1.
struct Target {
  int64_t target;
  bool operator()(int64_t sum) const { return sum > target; }
};

INLINE bool comes_first(const Item& a, const Item& b) { return a.value != b.value ? a.value > b.value : a.id < b.id; }

template <class Limit>
Reached walk(const Item* items, int64_t count, int64_t sum, const Limit& reached) {
  for (int64_t i = 0; i < count; ++i) {
    sum += items[i].weight;
    if (reached(sum)) return {items[i].id, sum};
  }
  return {items[count - 1].id, sum};
}

// items: by id; overwritten. sum: that of the items before them. Divides the items by value and continues with one part
// alone.
template <class Limit>
Reached select(Item* items, int64_t count, int64_t sum, const Limit& reached) {
  while (count > kSorted) {
    float high = items[0].value, low = high;
    for (int64_t i = 1; i < count; ++i) {
      high = std::max(high, items[i].value);
      low = std::min(low, items[i].value);
    }
    if (high == low) return walk(items, count, sum, reached);
    const double width = (kParts - 1) / (static_cast<double>(high) - low);
    const auto part_of = [&](const Item& item) {
      return static_cast<int>((static_cast<double>(high) - item.value) * width);
    };
    int64_t parts[kParts] = {};
    for (int64_t i = 0; i < count; ++i) parts[part_of(items[i])] += items[i].weight;
    int part = 0;
    while (part < kParts - 1 && !reached(sum + parts[part])) sum += parts[part++];
    int64_t left = 0;
    for (int64_t i = 0; i < count; ++i)
      if (part_of(items[i]) == part) items[left++] = items[i];
    count = left;
  }
  std::sort(items, items + count, comes_first);
  return walk(items, count, sum, reached);
}

int64_t target_of(uint64_t draw, int64_t total) {
  return static_cast<int64_t>((static_cast<unsigned __int128>(draw) * static_cast<uint64_t>(total)) >> 64);
}

// Draws a token from a list: first the nucleus, top_p of total, then the draw within it.
int64_t draw_listed(Room& room, int64_t count, int64_t total, double top_p, int64_t mass, uint64_t draw) {
  Item* items = room.items;
  if (count <= kSorted) {
    std::sort(items, items + count, comes_first);
    if (top_p < 1) mass = walk(items, count, 0, Share{top_p * static_cast<double>(total)}).sum;
    return walk(items, count, 0, Target{target_of(draw, mass)}).token;
  }
  if (top_p < 1) {
    std::copy(items, items + count, room.others);
    mass = select(room.others, count, 0, Share{top_p * static_cast<double>(total)}).sum;
  }
  return select(items, count, 0, Target{target_of(draw, mass)}).token;
}

// --- the ways to draw ---------------------------------------------------------------------------------------------

// Draws by id, over all weights.
template <class T>
int64_t draw_by_id(const Row<T>& row, const Scale& scale, const Room& room, int64_t total, uint64_t draw) {
  int64_t target = target_of(draw, total), group = 0;
  while (target >= room.sums[group]) target -= room.sums[group++];
  for (int64_t i = group * kGroup;; i += VL) {
    const Weights weights = weights_of(ratio_of(log_of(row.at(i), scale), scale));
    const int64_t sum = (total_of(weights.high) << 20) + total_of(weights.low);
    if (target >= sum) {
      target -= sum;
      continue;
    }
    for (int lane = 0;; ++lane) {
      const int64_t weight = (static_cast<int64_t>(weights.high[lane]) << 20) + weights.low[lane];
      if (target < weight) return i + lane;
      target -= weight;
    }
  }
}

template <class T>
int64_t draw_top_k(const Row<T>& row, const Scale& scale, Room& room, int64_t top_k, double top_p, uint64_t draw) {
  const int64_t blocks = Room::groups(row.width) * VL;
  int64_t count = list(row, bound(room.maxima, blocks, top_k, room.values), kMost, room.items, row.width);
  if (count > top_k) {  // all that tie with the k-th are kept
    for (int64_t i = 0; i < count; ++i) room.values[i] = room.items[i].value;
    std::nth_element(room.values, room.values + top_k - 1, room.values + count, [](float a, float b) { return a > b; });
    const float least = room.values[top_k - 1];
    count = std::remove_if(room.items, room.items + count, [&](const Item& item) { return item.value < least; }) -
            room.items;
  }
  count = weigh(room.items, count, scale);
  const int64_t mass = mass_of(room.items, count);
  return draw_listed(room, count, mass, top_p, mass, draw);
}

// Buckets of logarithms, from 0 downwards. The last one takes everything below.
struct Buckets {
  float per_unit;

  INLINE vi of(vf log) const {
    return __builtin_convertvector(smaller(log * -per_unit, all(static_cast<float>(kBuckets - 1))), vi);
  }
  int of(float value, const Scale& scale) const {
    const float log = std::max((value - scale.best) * scale.inverse, kLeastLog);
    return static_cast<int>(std::min(log * -per_unit, static_cast<float>(kBuckets - 1)));
  }
  // All logits of a bucket lie between these bounds, with half a bucket to spare.
  std::pair<float, float> around(int bucket, const Scale& scale) const {
    const double width = 1.0 / (static_cast<double>(per_unit) * scale.inverse);
    const auto least = static_cast<float>(scale.best - (bucket + 1.5) * width);
    const auto most = static_cast<float>(scale.best - (bucket - 0.5) * width);
    return {bucket == kBuckets - 1 ? kNone : std::nextafter(least, kNone), std::nextafter(most, -kNone)};
  }
};

// Pass 3. Sums weights by bucket into the histogram's first table, and returns the total.
template <class T>
int64_t fill_histogram(const Row<T>& row, const Scale& scale, const Buckets& buckets, int64_t* histogram) {
  std::fill(histogram, histogram + kTables * kBuckets, 0);
  alignas(64) int64_t weight[kBatch];
  alignas(64) int32_t bucket[kBatch];
  for (int64_t begin = 0; begin < row.width; begin += kBatch) {
    const int count = static_cast<int>(std::min(kBatch, row.width - begin));
    for (int i = 0; i < count; i += VL) {
      const vf log = log_of(row.at(begin + i), scale);
      const Weights weights = weights_of(ratio_of(log, scale));
      const vl wide = (__builtin_convertvector(weights.high, vl) << 20) + __builtin_convertvector(weights.low, vl);
      const vi at = buckets.of(log);
      std::memcpy(weight + i, &wide, sizeof wide);
      std::memcpy(bucket + i, &at, sizeof at);
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i)
      histogram[i % kTables * kBuckets + static_cast<uint32_t>(bucket[i])] += weight[i];
  }
  int64_t total = 0;
  for (int b = 0; b < kBuckets; ++b) {
    for (int table = 1; table < kTables; ++table) histogram[b] += histogram[table * kBuckets + b];
    total += histogram[b];
  }
  return total;
}

template <class T, class Limit>
Reached reach(const Row<T>& row, const Scale& scale, const Buckets& buckets, Room& room, const Limit& reached) {
  int64_t sum = 0;
  int bucket = 0;
  while (bucket < kBuckets - 1 && !reached(sum + room.histogram[bucket])) sum += room.histogram[bucket++];
  const auto [least, most] = buckets.around(bucket, scale);
  const int64_t count = list(row, least, most, room.items, row.width);
  const auto elsewhere = [&, bucket = bucket](const Item& item) { return buckets.of(item.value, scale) != bucket; };
  const int64_t there = std::remove_if(room.items, room.items + count, elsewhere) - room.items;
  return select(room.items, weigh(room.items, there, scale), sum, reached);
}

template <class T>
int64_t draw_flat(const Row<T>& row, const Scale& scale, Room& room, double top_p, uint64_t draw) {
  // In a normal distribution, all numbers lie within six times the distance from the largest number to a typical
  // block's largest.
  const int64_t blocks = Room::groups(row.width) * VL;
  const float usual = bound(room.maxima, blocks, blocks / 2, room.values);
  const float span = std::min(std::max((scale.best - usual) * scale.inverse * 6.0f, 1e-6f), 28.0f);
  const Buckets buckets{kBuckets / span};
  const int64_t total = fill_histogram(row, scale, buckets, room.histogram);
  const int64_t mass = reach(row, scale, buckets, room, Share{top_p * static_cast<double>(total)}).sum;
  return reach(row, scale, buckets, room, Target{target_of(draw, mass)}).token;
}

// Estimates, by the other weights in two groups, if the listed tokens are too few for a share of the total.
template <class T>
bool seems_flat(const Row<T>& row, const Scale& scale, Room& room, double top_p, int64_t count, int64_t mass) {
  if (row.width < 8 * kGroup) return false;
  const int64_t begin = row.width / 2, end = begin + 2 * kGroup;
  int64_t others = sum_weights(Row<T>{row.data + begin, end - begin}, scale, room.sums);
  for (int64_t i = 0; i < count; ++i)
    if (room.items[i].id >= begin && room.items[i].id < end) others -= room.items[i].weight;
  const double total = mass + static_cast<double>(others) * row.width / (end - begin);
  return !Share{top_p * total}(mass);
}

template <class T>
int64_t draw_top_p(const Row<T>& row, const Scale& scale, Room& room, double top_p, uint64_t draw) {
  const float least = bound(room.maxima, Room::groups(row.width) * VL, kShortList, room.values);
  const int64_t enough = kCrowd;
  int64_t count = list(row, least, kMost, room.items, enough);
  if (count > enough) return draw_flat(row, scale, room, top_p, draw);
  count = weigh(room.items, count, scale);
  const int64_t mass = mass_of(room.items, count);
  if (seems_flat(row, scale, room, top_p, count, mass)) return draw_flat(row, scale, room, top_p, draw);
  const int64_t total = sum_weights(row, scale, room.sums);
  if (Share{top_p * static_cast<double>(total)}(mass)) return draw_listed(room, count, total, top_p, mass, draw);
  return draw_flat(row, scale, room, top_p, draw);
}

template <class T>
int64_t choose_from(const Row<T>& row, const RowParams& asked, int64_t number, float best, Room& room) {
  const float inverse = asked.inverse[number];
  if (inverse == 0) return first_best(row, room.maxima, best);
  const Scale scale{best, inverse, asked.min_p[number]};
  const int64_t top_k = asked.top_k[number];
  const double top_p = asked.top_p[number];
  const uint64_t draw = asked.draws[number];
  if (top_k > 0 && top_k < row.width) return draw_top_k(row, scale, room, top_k, top_p, draw);
  if (top_p < 1) return draw_top_p(row, scale, room, top_p, draw);
  return draw_by_id(row, scale, room, sum_weights(row, scale, room.sums), draw);
}

// --- what changes logits beforehand, in the order of row.py -------------------------------------------------------

bool is_adjusted(const RowParams& asked, int64_t row) {
  for (const Lists* lists : {&asked.forbidden, &asked.biased, &asked.seen})
    if (lists->first[row] < lists->first[row + 1]) return true;
  return asked.guided[row] >= 0;
}

void mask(float* logits, int64_t width, const uint32_t* bits) {
  for (int64_t i = 0; i < width; ++i)
    if (!(bits[i / 32] >> (i % 32) & 1)) logits[i] = kNone;
}

void adjust(float* logits, int64_t width, const RowParams& asked, int64_t row) {
  if (asked.guided[row] >= 0) mask(logits, width, asked.bits + asked.guided[row] * asked.words);
  const auto each = [&](const Lists& lists, auto change) {
    for (int64_t i = lists.first[row]; i < lists.first[row + 1]; ++i)
      if (lists.ids[i] >= 0 && lists.ids[i] < width) change(logits[lists.ids[i]], i);
  };
  each(asked.forbidden, [](float& logit, int64_t) { logit = kNone; });
  each(asked.biased, [&](float& logit, int64_t i) { logit += asked.biases[i]; });
  const float* penalties = asked.penalties + 3 * row;
  each(asked.seen, [&](float& logit, int64_t i) {
    logit = logit > 0 ? logit / penalties[0] : logit * penalties[0];
    logit = (logit - penalties[1] * asked.counts[i]) - penalties[2] * static_cast<float>(asked.counts[i] > 0);
  });
}

template <class T>
void choose_row_of(const Row<T>& row, int64_t number, const RowParams& asked, const Chosen& chosen, Scratch& scratch) {
  Room room(scratch, row.width);
  float best = chosen.raw[number] = survey(row, room.maxima);
  const bool damaged = !(best < std::numeric_limits<float>::infinity());
  if (is_adjusted(asked, number) && !damaged) {
    for (int64_t i = 0; i < row.width; ++i) room.adjusted[i] = inlay::INLAY_VARIANT::number(row.data + i);
    adjust(room.adjusted, row.width, asked, number);
    const Row<float> adjusted{room.adjusted, row.width};
    best = chosen.best[number] = survey(adjusted, room.maxima);
    chosen.tokens[number] = std::isfinite(best) ? choose_from(adjusted, asked, number, best, room) : 0;
    return;
  }
  chosen.best[number] = best;
  chosen.tokens[number] = std::isfinite(best) ? choose_from(row, asked, number, best, room) : 0;
}

}  // namespace

void choose_row(const Logits& logits, int64_t row, const RowParams& asked, const Chosen& chosen, Scratch& scratch) {
  const char* data = logits.row(row);
  if (logits.type == Type::bf16)
    choose_row_of(Row<uint16_t>{reinterpret_cast<const uint16_t*>(data), logits.vocabulary}, row, asked, chosen, scratch);
  else
    choose_row_of(Row<float>{reinterpret_cast<const float*>(data), logits.vocabulary}, row, asked, chosen, scratch);
}

}  // namespace INLAY_VARIANT
}  // namespace inlay
