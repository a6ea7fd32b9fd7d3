// Linear layers with AVX-512's products of bf16 pairs, summed in fp32.
//
// Up to 24 rows: weight rows are read once, and multiplied by up to 8 rows of x while they are in registers. The next
// rows of x find the weights in the cache. Long rows of x are cut into stretches, so that they stay in the first-level
// cache for several groups of outputs. Up to about 8 rows, reading the weights is the lower bound of the time. The numbers
// of a row are added in the same order whatever the number of rows, so a token has the same bits alone and with a draft.
// More rows: as in the attention kernel, rows of x are the lanes of vectors (pairs of inputs side by side, 16 to 64
// rows), and one pair of a weight row at a time is broadcast to all of them. The products are the lower bound. Weights
// are read once for every 64 rows.
#include "linear.h"

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "kernel.h"
#include "parallel.h"
#include "tensors.h"

namespace inlay {
namespace {

#define VL 16
#include "simd.h"

using Layer = Linear<uint16_t>;

constexpr int64_t kFew = 4;         // with more rows, several groups of outputs share a stretch of inputs
constexpr int64_t kSome = 24;       // rows up to which a broadcast of each pair of weights takes longer than loading it
constexpr int64_t kBlock = 8;       // rows of x at a time up to kSome
constexpr int64_t kStretch = 1216;  // inputs at a time: those of a block fill half of the first-level cache
constexpr int64_t kGroups = 8;      // groups of outputs that one stretch of a block is multiplied by in turn
constexpr int64_t kDistance = 2;    // groups between a product and the prefetched weights, at least
constexpr int64_t kTile = 64;       // rows of x that are lanes at the same time
constexpr int64_t kOuts = 48;       // outputs of one share of work: whole groups of 6, 8 and 12
constexpr int64_t kNone = -1;

INLINE __m512bh pairs_at(const uint16_t* from, __mmask32 which) {
  return (__m512bh)_mm512_maskz_loadu_epi16(which, from);
}

template <int M, int J>
constexpr int kSums = (M * J + VL - 1) / VL * VL;  // of a group and M rows: output j of row m is at j * M + m

// Adds the products of a group of J outputs and M rows of x, for some inputs, to sums. x: the rows in turns, 32 inputs of
// each. Behind the last output, a group repeats it.
template <int M, int J>
INLINE void multiply_group(const Layer& layer, const uint16_t* x, int64_t first, int64_t input, int64_t inputs,
                           float* sums, Ahead* ahead) {
  const uint16_t* weight[J];
  for (int j = 0; j < J; ++j) weight[j] = layer.weight + std::min(first + j, layer.out - 1) * layer.in + input;
  __m512 sum[kSums<M, J>];
#pragma GCC unroll 32
  for (int s = 0; s < (kSums<M, J>); ++s) sum[s] = _mm512_setzero_ps();
  auto add = [&](const __m512i* w) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m, x += 32) {
      const __m512i rows = _mm512_loadu_si512(x);
#pragma GCC unroll 8
      for (int j = 0; j < J; ++j)
        sum[j * M + m] = _mm512_dpbf16_ps(sum[j * M + m], (__m512bh)rows, (__m512bh)w[j]);
    }
  };
  int64_t i = 0;
  __m512i w[J];
  for (; i + 32 <= inputs; i += 32) {
    ahead->fetch();
#pragma GCC unroll 8
    for (int j = 0; j < J; ++j) w[j] = _mm512_loadu_si512(weight[j] + i);
    add(w);
  }
  if (i < inputs) {
    for (int j = 0; j < J; ++j) w[j] = _mm512_maskz_loadu_epi16((1u << (inputs - i)) - 1, weight[j] + i);
    add(w);
  }
#pragma GCC unroll 2
  for (int s = 0; s < (kSums<M, J>); s += VL) {
    vf some[VL];
#pragma GCC unroll 16
    for (int e = 0; e < VL; ++e) some[e] = (vf)sum[s + e];
    store(sums + s, load(sums + s) + sum_each(some));
  }
}

// Writes the outputs of a group and M rows from `row` on.
template <int M, int J>
INLINE void write_group(const Layer& layer, int64_t first, int64_t row, const float* sums) {
  const int64_t outs = std::min<int64_t>(J, layer.out - first), rows = std::min<int64_t>(M, layer.rows - row);
  alignas(64) uint16_t each[kSums<M, J>];
#pragma GCC unroll 2
  for (int s = 0; s < (kSums<M, J>); s += VL)
    _mm256_store_si256((__m256i*)(each + s), (__m256i)_mm512_cvtneps_pbh((__m512)load(sums + s)));
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t j = 0; j < outs; ++j) layer.y[(row + m) * layer.y_stride + first + j] = each[j * M + m];
}

template <int M, int J>
void some_rows(const Layer& layer, int threads) {
  static thread_local Scratch scratch;
  const int64_t blocks = (layer.rows + M - 1) / M, lines = (layer.in + 31) / 32;
  const int64_t stretches = (layer.in + kStretch - 1) / kStretch, stretch = (lines + stretches - 1) / stretches * 32;
  const int64_t groups = (layer.out + J - 1) / J;
  const int64_t most = M > kFew && stretches > 1 ? kGroups : 1;  // groups of one share
  auto* packed = reinterpret_cast<uint16_t*>(scratch.take(blocks * M * lines * 64));
  run_parallel(threads, [&](Team& team, int thread) {
    for (int64_t row = blocks * M * thread / team.threads(); row < blocks * M * (thread + 1) / team.threads(); ++row) {
      const uint16_t* from = layer.x + std::min(row, layer.rows - 1) * layer.x_stride;
      uint16_t* to = packed + (row / M * lines * M + row % M) * 32;
      for (int64_t line = 0; line < lines; ++line, from += 32, to += M * 32) {
        const int64_t left = layer.in - 32 * line;
        _mm512_storeu_si512(to, (__m512i)pairs_at(from, left >= 32 ? ~0u : (1u << left) - 1));
      }
    }
    team.barrier();
    alignas(64) float sums[kGroups * kSome / kBlock][kSums<M, J>];
    const int64_t last = groups * (thread + 1) / team.threads();
    const auto at = [&](int64_t group) {
      return reinterpret_cast<const char*>(layer.weight + std::min(group * J, layer.out) * layer.in);
    };
    int64_t begin = groups * thread / team.threads();
    // one row alone reads its weights from front to back, and needs none fetched
    const int fetched = M == 1 ? 0 : static_cast<int>((J + blocks - 1) / blocks);
    Ahead ahead{at(begin + std::max(most, kDistance)), nullptr, fetched};
    for (; begin < last; begin += most) {
      const int64_t end = std::min(begin + most, last);
      ahead.end = at(std::min(begin + most + std::max(most, kDistance), last));
      for (int64_t group = begin; group < end; ++group)
        for (int64_t block = 0; block < blocks; ++block) {
          float* to = sums[(group - begin) * blocks + block];
          std::memset(to, 0, sizeof sums[0]);
          for (int64_t j = 0; layer.bias && j < std::min<int64_t>(J, layer.out - group * J); ++j)
            std::fill(to + j * M, to + (j + 1) * M, from_bf16(layer.bias[group * J + j]));
        }
      for (int64_t input = 0; input < layer.in; input += stretch)
        for (int64_t block = 0; block < blocks; ++block)
          for (int64_t group = begin; group < end; ++group)
            multiply_group<M, J>(layer, packed + (block * lines * 32 + input) * M, group * J, input,
                              std::min(stretch, layer.in - input), sums[(group - begin) * blocks + block], &ahead);
      for (int64_t group = begin; group < end; ++group)
        for (int64_t block = 0; block < blocks; ++block)
          write_group<M, J>(layer, group * J, block * M, sums[(group - begin) * blocks + block]);
    }
  });
}

// Rows of x as lanes: (pairs of inputs, lanes) for every tile of up to kTile rows.
struct Lanes {
  uint32_t* pairs;
  int64_t rows, in;

  int64_t pair_count() const { return (in + 1) / 2; }
  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
  int64_t vectors(int64_t tile) const { return (std::min(kTile, rows - tile * kTile) + VL - 1) / VL; }
  uint32_t* tile(int64_t number) const { return pairs + number * pair_count() * kTile; }
};

// Packs sixteen rows from `first` on into their lanes.
void pack(const Layer& layer, const Lanes& lanes, int64_t first) {
  const int64_t tile = first / kTile, width = lanes.vectors(tile) * VL, count = lanes.pair_count();
  uint32_t* to = lanes.tile(tile) + first % kTile;
  for (int64_t p = 0; p < count; p += VL) {
    const int64_t left = layer.in - 2 * p;
    const auto which = static_cast<__mmask32>(left >= 32 ? ~0u : (1u << left) - 1);
    vf square[VL];
    for (int l = 0; l < VL; ++l)
      square[l] = first + l < layer.rows
                      ? (vf)_mm512_castsi512_ps(_mm512_maskz_loadu_epi16(which, layer.x + (first + l) * layer.x_stride + 2 * p))
                      : vf{};
    transpose<1>(square);
    for (int64_t e = 0; e < std::min<int64_t>(VL, count - p); ++e)
      std::memcpy(to + (p + e) * width, &square[e], sizeof(vf));
  }
}

// M outputs from `first` on for one tile of N vectors of lanes: (M, lanes) fp32. Meanwhile the M weight rows from
// `after` on are prefetched into the first-level cache; kNone for none.
template <int N, int M>
INLINE void multiply(const Layer& layer, const uint32_t* x, int64_t first, int64_t after, float* to) {
  const uint16_t* weight[M];
  for (int j = 0; j < M; ++j) weight[j] = layer.weight + std::min(first + j, layer.out - 1) * layer.in;
  const bool ahead = after != kNone;
  const uint16_t* next = layer.weight + std::max<int64_t>(after, 0) * layer.in;  // rows are contiguous
  __m512 sum[M][N];
  for (int j = 0; j < M; ++j)
    for (int v = 0; v < N; ++v) sum[j][v] = _mm512_setzero_ps();
  const int64_t whole = layer.in / 2;
  for (int64_t i = 0; i < whole; ++i, x += N * VL) {
    __m512i lanes[N];
    for (int v = 0; v < N; ++v) lanes[v] = _mm512_loadu_si512(x + v * VL);
    if (ahead && i % 16 == 0)
      for (int j = 0; j < M; ++j) __builtin_prefetch(next + M * 2 * i + 32 * j, 0, 3);
#pragma GCC unroll 12
    for (int j = 0; j < M; ++j) {
      int pair;
      std::memcpy(&pair, weight[j] + 2 * i, 4);
      const auto both = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < N; ++v) sum[j][v] = _mm512_dpbf16_ps(sum[j][v], both, (__m512bh)lanes[v]);
    }
  }
  if (layer.in % 2)  // the last input has no partner
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v)
        sum[j][v] = _mm512_dpbf16_ps(sum[j][v], (__m512bh)_mm512_set1_epi32(weight[j][layer.in - 1]),
                                     (__m512bh)_mm512_loadu_si512(x + v * VL));
  for (int j = 0; j < M; ++j)
    for (int v = 0; v < N; ++v) _mm512_storeu_ps(to + (j * N + v) * VL, sum[j][v]);
}

// Writes outputs first … end - 1 of one tile, from lanes to rows.
void write(const Layer& layer, int64_t first, int64_t end, int64_t tile, int64_t width, const float* sums) {
  for (int64_t out = first; out < end; out += VL) {
    const auto which = static_cast<__mmask16>(end - out >= VL ? ~0u : (1u << (end - out)) - 1);
    for (int64_t lane = 0; lane < width; lane += VL) {
      vf square[VL];
      for (int e = 0; e < VL; ++e) {
        const int64_t at = std::min(out + e, end - 1);
        square[e] = load(sums + (at - first) * width + lane) + (layer.bias ? from_bf16(layer.bias[at]) : 0.0f);
      }
      transpose<1>(square);
      const int64_t row = tile * kTile + lane;
      for (int64_t l = 0; l < std::min<int64_t>(VL, layer.rows - row); ++l)
        _mm256_mask_storeu_epi16(layer.y + (row + l) * layer.y_stride + out, which,
                                 (__m256i)_mm512_cvtneps_pbh((__m512)square[l]));
    }
  }
}

// after: the first output of this thread's next share, or kNone.
template <int N, int M>
void multiply_tile(const Layer& layer, const Lanes& lanes, int64_t first, int64_t end, int64_t tile, int64_t after) {
  alignas(64) float sums[kOuts * N * VL];
  for (int64_t out = first; out < end; out += M) {
    const int64_t next = out + M < end ? out + M : after;
    multiply<N, M>(layer, lanes.tile(tile), out, tile == 0 && next + M <= layer.out ? next : kNone,
                   sums + (out - first) * N * VL);
  }
  write(layer, first, end, tile, N * VL, sums);
}

void many_rows(const Layer& layer, int threads) {
  static thread_local Scratch scratch;
  Lanes lanes{nullptr, layer.rows, layer.in};
  lanes.pairs = reinterpret_cast<uint32_t*>(scratch.take(lanes.tiles() * lanes.pair_count() * kTile * sizeof(uint32_t)));
  const int64_t groups = (layer.rows + VL - 1) / VL, shares = (layer.out + kOuts - 1) / kOuts;
  std::atomic<int64_t> next{0};
  run_parallel(threads, [&](Team& team, int thread) {
    for (int64_t g = groups * thread / team.threads(); g < groups * (thread + 1) / team.threads(); ++g)
      pack(layer, lanes, g * VL);
    team.barrier();
    auto take = [&] { return next.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t share = take(), following; share < shares; share = following) {
      following = take();  // taken early, so that its weights can be prefetched
      const int64_t first = share * kOuts, end = std::min(first + kOuts, layer.out);
      const int64_t after = following < shares ? following * kOuts : kNone;
      for (int64_t tile = 0; tile < lanes.tiles(); ++tile) switch (lanes.vectors(tile)) {
          case 1: multiply_tile<1, 12>(layer, lanes, first, end, tile, after); break;
          case 2: multiply_tile<2, 8>(layer, lanes, first, end, tile, after); break;
          case 3: multiply_tile<3, 8>(layer, lanes, first, end, tile, after); break;
          default: multiply_tile<4, 6>(layer, lanes, first, end, tile, after);
        }
    }
  });
}

}  // namespace

void linear_avx512bf16(const Layer& layer, int threads) {
  if (layer.rows == 0) return;
  if (layer.rows > kSome) return many_rows(layer, threads);
  const int64_t blocks = (layer.rows + kBlock - 1) / kBlock;
  switch ((layer.rows + blocks - 1) / blocks) {  // rows of a block, and as many outputs as the registers hold sums for
    case 1: return some_rows<1, 1>(layer, threads);
    case 2: return some_rows<2, 4>(layer, threads);
    case 3: return some_rows<3, 4>(layer, threads);
    case 4: return some_rows<4, 4>(layer, threads);
    case 5: return some_rows<5, 4>(layer, threads);
    case 6: return some_rows<6, 4>(layer, threads);
    case 7: return some_rows<7, 3>(layer, threads);
    default: some_rows<kBlock, 3>(layer, threads);
  }
}

}  // namespace inlay
