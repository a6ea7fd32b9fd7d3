// The layer of quantized.h in vectors of VL lanes, included once for every instruction set.
//
// Outputs are lanes. Few rows or many, a row's sums are those of one group behind the other, so that its outputs do not
// depend on the rows beside it. Up to MR rows are multiplied while the numbers of a weight are in registers: one share of
// work is some blocks of outputs, read from memory once, and from the cache for every MR rows.
#include "quantized.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel.h"
#include "parallel.h"

namespace inlay {
namespace {

#include "simd.h"

constexpr int kHalves = kQuantizedBlock / VL;   // vectors of a block
constexpr int64_t kShare = 4;                   // blocks that many rows go through while they are in the cache
constexpr int64_t kWorth = 1 << 15;             // weights that are worth waking another thread for
constexpr float kNothing = 1e-30f;              // inputs of a group that are all smaller count as zeros
static_assert(kQuantizedBlock % VL == 0);

// sum + the products of two pairs of 16 bits in every lane.
INLINE vi add_products(vi sum, vi a, vi b) {
#if VL == 16 && defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VL == 8 && defined(__AVX2__)
  sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm("" : "+x"(sum));  // GCC would put off the sums until it has no registers left for the products
  return sum;
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// a · b + c, rounded in the same way wherever it stands.
INLINE vf fused(vf a, vf b, vf c) {
#if VL == 16 && defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE void put(float* to, vf v) { store(to, v); }
INLINE void put(uint16_t* to, vf v) {
  const vh half = narrowed(v);
  std::memcpy(to, &half, sizeof half);
}
INLINE float number(const float* from) { return *from; }
INLINE float number(const uint16_t* from) { return from_bf16(*from); }

// What 32 inputs were rounded to: input = scale · number.
struct Group {
  float scale;
  float sum;      // of the rounded inputs
  int32_t start;  // what a sum of products begins with: numbers of 4 bits are 8 too large
};

// Rows of x: numbers (rows, groups · 32), and what belongs to each group (rows, groups).
struct Rounded {
  int16_t* numbers;
  Group* groups;
  int64_t per_row;

  const int16_t* row(int64_t number) const { return numbers + number * per_row * kQuantizedGroup; }
  const Group* of(int64_t number) const { return groups + number * per_row; }
};

template <class T>
INLINE void round_group(const T* from, int16_t* to, Group* group) {
  constexpr int64_t kVectors = kQuantizedGroup / VL;
  typedef int16_t narrow __attribute__((vector_size(VL * 2)));
  vf values[kVectors], top = vf{}, broken = vf{};
  for (int64_t i = 0; i < kVectors; ++i) {
    values[i] = load(from + i * VL);
    top = larger(top, larger(values[i], -values[i]));
    broken += values[i] * 0.0f;
  }
  const float most = largest_of(top);
  const bool sound = sum_of(broken) == 0.0f;  // neither infinite nor no number
  const float by = sound && most > kNothing ? 32767.0f / most : 0.0f;
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest whole number in the low bits
  vi sum = vi{};
  for (int64_t i = 0; i < kVectors; ++i) {
    const vf scaled = sound ? values[i] * by : vf{};
    const vi whole = reinterpret_cast<vi>(scaled + magic) - 0x4b400000;
    sum += whole;
    const narrow numbers = __builtin_convertvector(whole, narrow);
    std::memcpy(to + i * VL, &numbers, sizeof numbers);
  }
  int32_t lanes[VL], total = 0;
  std::memcpy(lanes, &sum, sizeof sum);
  for (const int32_t lane : lanes) total += lane;
  const float scale = !sound ? std::numeric_limits<float>::quiet_NaN() : by == 0.0f ? 0.0f : most / 32767.0f;
  *group = {scale, scale * static_cast<float>(total), -8 * total};
}

template <class T>
void round_row(const Quantized& layer, const Rounded& to, int64_t row) {
  const T* from = static_cast<const T*>(layer.x) + row * layer.x_stride;
  int16_t* numbers = to.numbers + row * to.per_row * kQuantizedGroup;
  Group* groups = to.groups + row * to.per_row;
  const int64_t whole = layer.in / kQuantizedGroup;
  for (int64_t g = 0; g < whole; ++g)
    round_group(from + g * kQuantizedGroup, numbers + g * kQuantizedGroup, groups + g);
  if (whole < to.per_row) {
    float rest[kQuantizedGroup] = {};
    for (int64_t i = whole * kQuantizedGroup; i < layer.in; ++i) rest[i - whole * kQuantizedGroup] = number(from + i);
    round_group(rest, numbers + whole * kQuantizedGroup, groups + whole);
  }
}

INLINE vi words(const char* from) {
  vi v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Pairs of inputs of a row of words: pair number K of them, as numbers of 16 bits.
template <int Bits, int K>
INLINE vi pairs(vi row) {
  if constexpr (Bits == 4) return (row >> (4 * K)) & 0x000f000f;
  typedef int16_t halves __attribute__((vector_size(VL * 4)));
  const auto both = reinterpret_cast<halves>(row);
  return reinterpret_cast<vi>(K == 0 ? (both << 8) >> 8 : both >> 8);
}

// M rows from `row` on times the outputs of one block. Grid: the type of scales in 4 bits.
template <int Bits, class Grid, bool Zeros, int M>
INLINE void multiply(const Quantized& layer, const Rounded& x, int64_t block, int64_t row, vf (*sums)[kHalves]) {
  constexpr int kRows = Bits, kPairs = Bits == 4 ? 4 : 2;  // 4 rows of 4 pairs, or 8 of 2
  constexpr int64_t kRowBytes = kQuantizedBlock * 4, kNumbers = kRows * kRowBytes;
  const int64_t groups = x.per_row, bytes = layer.group_bytes();
  const char* at = layer.weight + block * groups * bytes;
  const int16_t* numbers[M];
  const Group* group[M];
  for (int m = 0; m < M; ++m) {
    numbers[m] = x.row(row + m);
    group[m] = x.of(row + m);
    for (int h = 0; h < kHalves; ++h) sums[m][h] = vf{};
  }
  for (int64_t g = 0; g < groups; ++g, at += bytes) {
    if (M == 1) prefetch(at + 4096, static_cast<int>(bytes));
    vi products[M][kHalves];
    for (int m = 0; m < M; ++m)
      for (int h = 0; h < kHalves; ++h) products[m][h] = all_int(Bits == 4 ? group[m][g].start : 0);
    auto add = [&](int u, auto k) {
      constexpr int kPair = decltype(k)::value;
      vi weights[kHalves];
      for (int h = 0; h < kHalves; ++h) weights[h] = pairs<Bits, kPair>(words(at + u * kRowBytes + h * VL * 4));
      for (int m = 0; m < M; ++m) {
        int32_t pair;
        std::memcpy(&pair, numbers[m] + g * kQuantizedGroup + (u * kPairs + kPair) * 2, sizeof pair);
        for (int h = 0; h < kHalves; ++h) products[m][h] = add_products(products[m][h], weights[h], all_int(pair));
      }
    };
#pragma GCC unroll 8
    for (int u = 0; u < kRows; ++u) {
      add(u, std::integral_constant<int, 0>());
      add(u, std::integral_constant<int, 1>());
      if constexpr (kPairs == 4) {
        add(u, std::integral_constant<int, 2>());
        add(u, std::integral_constant<int, 3>());
      }
    }
    const auto* scales = reinterpret_cast<const Grid*>(at + kNumbers);
    for (int h = 0; h < kHalves; ++h)
      for (int m = 0; m < M; ++m) {
        const vf total = __builtin_convertvector(products[m][h], vf);
        vf& sum = sums[m][h];
        if constexpr (Bits == 4) {
          sum = fused(total, load(scales + h * VL) * group[m][g].scale, sum);
          if constexpr (Zeros) sum = fused(load(scales + kQuantizedBlock + h * VL), all(group[m][g].sum), sum);
        } else {
          sum = fused(total, all(group[m][g].scale), sum);
        }
      }
  }
}

// The same, with what comes behind the sums, into y.
template <int Bits, class Grid, bool Zeros, class T, int M>
void multiply_block(const Quantized& layer, const Rounded& x, int64_t block, int64_t row) {
  vf sums[M][kHalves];
  multiply<Bits, Grid, Zeros, M>(layer, x, block, row, sums);
  const int64_t first = block * kQuantizedBlock, left = layer.out - first;
  for (int m = 0; m < M; ++m) {
    T* to = static_cast<T*>(layer.y) + (row + m) * layer.y_stride + first;
    T part[kQuantizedBlock];
    T* into = left < kQuantizedBlock ? part : to;
    for (int h = 0; h < kHalves; ++h) {
      vf sum = sums[m][h];
      if (Bits == 8) sum *= load(layer.scales + first + h * VL);
      if (layer.bias) sum += load(layer.bias + first + h * VL);
      put(into + h * VL, sum);
    }
    if (left < kQuantizedBlock) std::memcpy(to, part, left * sizeof(T));
  }
}

// Rows from `row` up to `end` times the blocks from `first` up to `last`.
template <int Bits, class Grid, bool Zeros, class T>
void multiply_rows(const Quantized& layer, const Rounded& x, int64_t first, int64_t last, int64_t row, int64_t end) {
  auto tile = [&](auto m) {
    for (int64_t block = first; block < last; ++block)
      multiply_block<Bits, Grid, Zeros, T, decltype(m)::value>(layer, x, block, row);
    row += decltype(m)::value;
  };
  while (end - row >= MR) tile(std::integral_constant<int, MR>());
  if constexpr (MR > 8)
    while (end - row >= 8) tile(std::integral_constant<int, 8>());
  while (end - row >= 4) tile(std::integral_constant<int, 4>());
  while (end - row >= 2) tile(std::integral_constant<int, 2>());
  if (row < end) tile(std::integral_constant<int, 1>());
}

template <int Bits, class Grid, bool Zeros, class T>
void run(const Quantized& layer, int threads) {
  static thread_local Scratch scratch;
  const int64_t groups = layer.groups(), blocks = layer.blocks();
  const int64_t numbers = layer.rows * groups * kQuantizedGroup;
  char* memory = scratch.take(numbers * sizeof(int16_t) + layer.rows * groups * sizeof(Group));
  const Rounded x{reinterpret_cast<int16_t*>(memory), reinterpret_cast<Group*>(memory + numbers * sizeof(int16_t)), groups};
  const bool few = layer.rows <= MR;
  if (few)
    for (int64_t row = 0; row < layer.rows; ++row) round_row<T>(layer, x, row);
  const int64_t worth = std::max<int64_t>(1, layer.out * layer.in * (few ? 1 : layer.rows) / kWorth);
  std::atomic<int64_t> next{0};
  run_parallel(static_cast<int>(std::min<int64_t>(threads, worth)), [&](Team& team, int thread) {
    if (few) {  // one stretch for each thread, read from front to back
      multiply_rows<Bits, Grid, Zeros, T>(layer, x, blocks * thread / team.threads(),
                                          blocks * (thread + 1) / team.threads(), 0, layer.rows);
      return;
    }
    for (int64_t row = layer.rows * thread / team.threads(); row < layer.rows * (thread + 1) / team.threads(); ++row)
      round_row<T>(layer, x, row);
    team.barrier();
    for (int64_t share; (share = next.fetch_add(1, std::memory_order_relaxed)) * kShare < blocks;)
      multiply_rows<Bits, Grid, Zeros, T>(layer, x, share * kShare, std::min(blocks, (share + 1) * kShare), 0,
                                          layer.rows);
  });
}

template <int Bits, class Grid, bool Zeros>
void run_in(const Quantized& layer, int threads) {
  if (layer.type == Type::bf16)
    run<Bits, Grid, Zeros, uint16_t>(layer, threads);
  else
    run<Bits, Grid, Zeros, float>(layer, threads);
}

}  // namespace

void INLAY_QUANTIZED(const Quantized& layer, int threads) {
  if (layer.rows == 0) return;
  if (layer.bits == 8) return run_in<8, float, false>(layer, threads);
  if (layer.grid == Type::bf16)
    (layer.zeros ? run_in<4, uint16_t, true> : run_in<4, uint16_t, false>)(layer, threads);
  else
    (layer.zeros ? run_in<4, float, true> : run_in<4, float, false>)(layer, threads);
}

}  // namespace inlay
