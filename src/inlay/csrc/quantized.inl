// The layer of quantized.h in vectors of VL lanes, included once for every instruction set.
//
// Outputs are lanes. A row's sums add up its groups in order, whatever the number of rows, so its outputs do not depend
// on the other rows. Up to MR rows times BLOCKS blocks are multiplied at a time. A broadcast takes as long as two
// products, so each word of inputs must serve two vectors of outputs. One share of work is a few blocks of outputs,
// read once from memory and then from the cache for every MR rows.
#include "quantized.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel.h"
#include "parallel.h"

namespace inlay {
namespace {

#include "simd.h"

constexpr int kHalves = kQuantizedBlock / VL;  // vectors of a block
constexpr int64_t kShare = 4;                  // blocks that many rows pass through while they are in the cache
constexpr int64_t kFew = 12;                   // rows up to which one thread rounds them all
constexpr float kNothing = 1e-30f;             // a group counts as zeros if no input is above this
static_assert(kQuantizedBlock % VL == 0);

// Adds the products of two pairs of 16 bits in every lane to sum.
INLINE vi add_products(vi sum, vi a, vi b) {
#if VL == 16 && defined(__AVX512VNNI__)
  return (vi)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VL == 8 && defined(__AVX2__)
  sum += (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  asm("" : "+x"(sum));  // GCC would delay the sums until no registers are left for the products
  return sum;
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// The same for four bytes; those of `a` are 0 … 15. A group's sum starts with begun() and ends with ended(): AVX2 keeps
// it in halves of 16 bits, which have room for 32 products of up to 15 · 127.
INLINE vi add_quads(vi sum, vi a, vi b) {
#if VL == 16 && defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif VL == 8 && defined(__AVX2__)
  sum = (vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)a, (__m256i)b));
  asm("" : "+x"(sum));  // as above
  return sum;
#else
  return sum + (a & 255) * (b << 24 >> 24) + (a >> 8 & 255) * (b << 16 >> 24) + (a >> 16 & 255) * (b << 8 >> 24) +
         (a >> 24) * (b >> 24);
#endif
}
INLINE vi begun([[maybe_unused]] int32_t start) {
#if VL == 8 && defined(__AVX2__)
  return vi{};
#else
  return all_int(start);
#endif
}
INLINE vi ended(vi sum, [[maybe_unused]] int32_t start) {
#if VL == 8 && defined(__AVX2__)
  return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + start;
#else
  return sum;
#endif
}

// a · b + c, rounded in the same way everywhere.
INLINE vf fused(vf a, vf b, vf c) {
#if VL == 16 && defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VL == 8 && defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// A rounded group of 32 inputs: input = scale · number.
struct Group {
  float scale;
  float sum;      // of the rounded inputs
  int32_t start;  // initial value of a sum of products: 4-bit numbers are stored plus 8
};

// Rows of x as words of 32 bits, in tiles of up to MR rows that are multiplied together. A group of a tile of M rows
// has kNumbers words for each row: pairs of 16 bits or, for 4-bit weights, quads of 8. Then follow the scale, the sum
// and the start of each row, so one address with constant offsets reaches all of them.
template <int Bits>
struct Words {
  using Number = std::conditional_t<Bits == 4, int8_t, int16_t>;
  static constexpr int kMost = Bits == 4 ? 127 : 32767;
  static constexpr int kNumbers = kQuantizedGroup * sizeof(Number) / 4, kScale = kNumbers, kSum = kNumbers + 1,
                       kStart = kNumbers + 2, kAll = kNumbers + 3;
};

template <int Bits>
struct Rounded {
  int32_t* words;
  int64_t groups;

  int32_t* tile(int64_t first) const { return words + first * groups * Words<Bits>::kAll; }
};

// The number of rows of the next tile when `left` rows are left.
INLINE int64_t tile_rows(int64_t left) {
  for (const int64_t rows : {MR, 4, 3, 2})
    if (rows <= MR && left >= rows) return rows;
  return 1;
}

template <int Bits, class T>
INLINE void round_group(const T* from, typename Words<Bits>::Number* to, Group* group) {
  constexpr int64_t kVectors = kQuantizedGroup / VL;
  constexpr float kMost = Words<Bits>::kMost;
  typedef typename Words<Bits>::Number narrow __attribute__((vector_size(VL * sizeof(*to))));
  vf values[kVectors], top = vf{}, broken = vf{};
  for (int64_t i = 0; i < kVectors; ++i) {
    values[i] = load(from + i * VL);
    top = larger(top, larger(values[i], -values[i]));
    broken += values[i] * 0.0f;
  }
  const float most = largest_of(top);
  const bool sound = sum_of(broken) == 0.0f;  // no NaN or infinity
  const float by = sound && most > kNothing ? kMost / most : 0.0f;
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest integer in the low bits
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
  const float scale = !sound ? std::numeric_limits<float>::quiet_NaN() : by == 0.0f ? 0.0f : most / kMost;
  *group = {scale, scale * static_cast<float>(total), -8 * total};
}

// Rounds one row into a tile of M rows, as its row m.
template <int Bits, class T>
void round_row(const Quantized& layer, const T* from, int32_t* to, int64_t M, int64_t m) {
  using W = Words<Bits>;
  for (int64_t first = 0; first < layer.in; first += kQuantizedGroup, to += W::kAll * M) {
    alignas(64) typename W::Number numbers[kQuantizedGroup];
    Group group;
    if (layer.in - first >= kQuantizedGroup) {
      round_group<Bits>(from + first, numbers, &group);
    } else {
      float rest[kQuantizedGroup] = {};
      for (int64_t i = first; i < layer.in; ++i) rest[i - first] = number(from + i);
      round_group<Bits>(rest, numbers, &group);
    }
    for (int w = 0; w < W::kNumbers; ++w)
      std::memcpy(to + w * M + m, reinterpret_cast<const char*>(numbers) + 4 * w, 4);
    std::memcpy(to + W::kScale * M + m, &group.scale, 4);
    std::memcpy(to + W::kSum * M + m, &group.sum, 4);
    to[W::kStart * M + m] = group.start;
  }
}

// Rounds rows from `begin` up to `end`, each into its tile.
template <int Bits, class T>
void round_rows(const Quantized& layer, const Rounded<Bits>& to, int64_t begin, int64_t end) {
  for (int64_t first = 0, rows; first < end; first += rows) {
    rows = tile_rows(layer.rows - first);
    for (int64_t row = std::max(begin, first); row < std::min(end, first + rows); ++row)
      round_row<Bits>(layer, static_cast<const T*>(layer.x) + row * layer.x_stride, to.tile(first), rows, row - first);
  }
}

// The same address, hidden from the optimizer. Values read from it are not kept in registers, which are needed
// elsewhere.
INLINE const char* afresh(const char* from) {
#if VL == 16
  asm("" : "+r"(from));
#endif
  return from;
}

INLINE vi words(const char* from) {
  vi v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

// Numbers of a row of words, in the order of the inputs: word K of them, as bytes of 0 … 15 or pairs of 16 bits.
template <int Bits, int K>
INLINE vi numbers_of(vi row) {
  if constexpr (Bits == 4) return (row >> (4 * K)) & 0x0f0f0f0f;
  typedef int16_t halves __attribute__((vector_size(VL * 4)));
  const auto both = reinterpret_cast<halves>(row);
  return reinterpret_cast<vi>(K == 0 ? (both << 8) >> 8 : both >> 8);
}

// A word of a tile, as a float.
INLINE float real_at(const int32_t* from) {
  float number;
  std::memcpy(&number, from, sizeof number);
  return number;
}

// In place of a type of scales: each output has one scale, applied at the end.
struct ByOutput {};

// Multiplies a tile of M rows by the outputs of B blocks. Grid: the type of the groups' scales, or ByOutput.
template <int Bits, class Grid, bool Zeros, int M, int B>
INLINE void multiply(const Quantized& layer, const int32_t* x, int64_t block, int64_t ahead,
                     vf (*into)[B * kHalves]) {
  using W = Words<Bits>;
  constexpr int kRows = Bits, kEach = W::kNumbers / kRows;  // rows of words, and words of x for each row
  static_assert(kEach == 2);
  constexpr int kVectors = B * kHalves;
  constexpr int64_t kRowBytes = kQuantizedBlock * 4, kNumbers = kRows * kRowBytes;
  constexpr bool kGrouped = !std::is_same<Grid, ByOutput>::value;
  constexpr int64_t kBytes = kNumbers + (kGrouped ? kQuantizedBlock * sizeof(Grid) * (Zeros ? 2 : 1) : 0);
  const int64_t groups = layer.groups();
  const char* at[B];
  for (int b = 0; b < B; ++b) at[b] = layer.weight + (block + b) * groups * kBytes;
  vf sums[M][kVectors];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < kVectors; ++v) sums[m][v] = vf{};
  for (int64_t g = 0; g < groups; ++g, x += W::kAll * M) {
    if (ahead)
      for (int b = 0; b < B; ++b) prefetch(at[b] + ahead, kBytes);
    vi products[M][kVectors];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < kVectors; ++v) products[m][v] = Bits == 4 ? begun(x[W::kStart * M + m]) : vi{};
    auto add = [&](int u, auto k) {
      constexpr int kWord = decltype(k)::value;
      vi weights[kVectors];
      for (int v = 0; v < kVectors; ++v)
        weights[v] = numbers_of<Bits, kWord>(words(afresh(at[v / kHalves]) + u * kRowBytes + v % kHalves * VL * 4));
      for (int m = 0; m < M; ++m) {
        const vi both = all_int(x[(u * kEach + kWord) * M + m]);
        for (int v = 0; v < kVectors; ++v)
          products[m][v] = (Bits == 4 ? add_quads : add_products)(products[m][v], weights[v], both);
      }
    };
#pragma GCC unroll 8
    for (int u = 0; u < kRows; ++u) {
      add(u, std::integral_constant<int, 0>());
      add(u, std::integral_constant<int, 1>());
    }
    for (int v = 0; v < kVectors; ++v) {
      vf scale = all(1.0f), zero = vf{};
      if constexpr (kGrouped) {
        const auto* scales = reinterpret_cast<const Grid*>(at[v / kHalves] + kNumbers) + v % kHalves * VL;
        scale = load(scales);
        if constexpr (Zeros) zero = load(scales + kQuantizedBlock);
      }
      for (int m = 0; m < M; ++m) {
        const vi whole = Bits == 4 ? ended(products[m][v], x[W::kStart * M + m]) : products[m][v];
        const vf total = __builtin_convertvector(whole, vf);
        sums[m][v] = fused(total, scale * real_at(x + W::kScale * M + m), sums[m][v]);
        if constexpr (Zeros) sums[m][v] = fused(zero, all(real_at(x + W::kSum * M + m)), sums[m][v]);
      }
    }
    for (int b = 0; b < B; ++b) at[b] += kBytes;
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < kVectors; ++v) into[m][v] = sums[m][v];
}

// The same, then scales and bias are applied and y is written.
template <int Bits, class Grid, bool Zeros, class T, int M, int B>
void multiply_blocks(const Quantized& layer, const int32_t* x, int64_t block, int64_t row) {
  // The first tile reads weights from memory. Prefetch far ahead in a single stream, else the next blocks.
  const int64_t ahead = row > 0 ? 0 : B == 1 ? 4096 : B * layer.groups() * layer.group_bytes();
  vf sums[M][B * kHalves];
  multiply<Bits, Grid, Zeros, M, B>(layer, x, block, ahead, sums);
  for (int b = 0; b < B; ++b) {
    const int64_t first = (block + b) * kQuantizedBlock, left = layer.out - first;
    for (int m = 0; m < M; ++m) {
      T* to = static_cast<T*>(layer.y) + (row + m) * layer.y_stride + first;
      T part[kQuantizedBlock];
      T* into = left < kQuantizedBlock ? part : to;
      for (int h = 0; h < kHalves; ++h) {
        vf sum = sums[m][b * kHalves + h];
        if constexpr (std::is_same<Grid, ByOutput>::value) sum *= load(layer.scales + first + h * VL);
        if (layer.bias) sum += load(layer.bias + first + h * VL);
        store(into + h * VL, sum);
      }
      if (left < kQuantizedBlock) std::memcpy(to, part, left * sizeof(T));
    }
  }
}

// Multiplies all rows by the blocks from `first` up to `last`.
template <int Bits, class Grid, bool Zeros, class T>
void multiply_rows(const Quantized& layer, const Rounded<Bits>& x, int64_t first, int64_t last) {
  int64_t row = 0;
  auto tile = [&](auto m) {
    constexpr int M = decltype(m)::value, B = M > 1 ? BLOCKS : 1;  // a single row is read in one stream
    int64_t block = first;
    for (; block + B <= last; block += B)
      multiply_blocks<Bits, Grid, Zeros, T, M, B>(layer, x.tile(row), block, row);
    for (; block < last; ++block) multiply_blocks<Bits, Grid, Zeros, T, M, 1>(layer, x.tile(row), block, row);
    row += M;
  };
  while (row < layer.rows) switch (tile_rows(layer.rows - row)) {
      case MR: tile(std::integral_constant<int, MR>()); break;
#if MR > 4
      case 4: tile(std::integral_constant<int, 4>()); break;
#endif
      case 3: tile(std::integral_constant<int, 3>()); break;
      case 2: tile(std::integral_constant<int, 2>()); break;
      default: tile(std::integral_constant<int, 1>());
    }
}

template <int Bits, class Grid, bool Zeros, class T>
void run(const Quantized& layer, int threads) {
  static thread_local Scratch scratch;
  const int64_t groups = layer.groups(), blocks = layer.blocks();
  const auto words = static_cast<int64_t>(layer.rows * groups * Words<Bits>::kAll * sizeof(int32_t));
  const Rounded<Bits> x{reinterpret_cast<int32_t*>(scratch.take(words)), groups};
  const bool few = layer.rows <= kFew;
  if (few) round_rows<Bits, T>(layer, x, 0, layer.rows);
  std::atomic<int64_t> next{0};
  run_parallel(threads, [&](Team& team, int thread) {
    const int64_t number = thread, all = team.threads();
    if (few)  // one stretch for each thread, read from front to back
      return multiply_rows<Bits, Grid, Zeros, T>(layer, x, blocks * number / all, blocks * (number + 1) / all);
    round_rows<Bits, T>(layer, x, layer.rows * number / all, layer.rows * (number + 1) / all);
    team.barrier();
    for (int64_t share; (share = next.fetch_add(1, std::memory_order_relaxed)) * kShare < blocks;)
      multiply_rows<Bits, Grid, Zeros, T>(layer, x, share * kShare, std::min(blocks, (share + 1) * kShare));
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
  if (layer.bits == 8)
    return (layer.scales ? run_in<8, ByOutput, false> : run_in<8, float, false>)(layer, threads);
  if (layer.grid == Type::bf16)
    (layer.zeros ? run_in<4, uint16_t, true> : run_in<4, uint16_t, false>)(layer, threads);
  else
    (layer.zeros ? run_in<4, float, true> : run_in<4, float, false>)(layer, threads);
}

}  // namespace inlay
