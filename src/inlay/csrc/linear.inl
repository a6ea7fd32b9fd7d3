// Linear layers for processors that multiply fp32 alone: bf16 numbers are widened to fp32, and sums rounded once.
// Included by the versions that define VL, the floats of a vector, and LINEAR, the name of the function.
//
// Up to 3 rows: weight rows are read once and widened in registers. Reading the weights is the lower bound of the time.
// Up to 48 rows: the same for 2 outputs at a time (3 with AVX-512), in shares that wait in the second-level cache for
// groups of up to 5 rows (8). Reading the weights is the lower bound of one group, and the products that of more.
// More rows: rows of x are the lanes of vectors, as in linear_avx512bf16.cpp. A block of weights is widened once for all
// rows. It lies in the second-level cache, and one number at a time is broadcast to 16 rows (32). The products are the
// lower bound.
// The numbers of a row are added in the same order up to 48 rows, so a token has the same bits alone and with a draft.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#include "kernel.h"
#include "linear.h"
#include "parallel.h"
#include "tensors.h"

namespace inlay {
namespace {

#include "simd.h"

constexpr bool kManyRegisters = VL == 16;           // 32 in place of 16
constexpr int64_t kSome = 48;                       // rows up to which weights are widened in registers
constexpr int kGroupRows = kManyRegisters ? 8 : 5;  // rows and
constexpr int kGroupOuts = kManyRegisters ? 3 : 2;  // outputs whose sums fill the registers
// Inputs at a time: those of a group fill most of the first-level cache.
constexpr int64_t kStretch = kManyRegisters ? 736 : 1216;
constexpr int64_t kMostOuts = 48;                    // outputs of one share
constexpr int64_t kSharesEach = 4;                   // shares of one thread, at least: a slow thread takes fewer
constexpr int64_t kTile = kManyRegisters ? 32 : 16;  // rows of x that are lanes at the same time
constexpr int kTileOuts = kManyRegisters ? 12 : 6;   // outputs whose sums for a tile fill the registers
constexpr int64_t kHalf = kTile / 2;                 // rows of the last tile, if it has no more
constexpr int64_t kBlock = 256;                      // inputs at a time: a tile's fill at most the first-level cache
constexpr int64_t kOuts = 48;                        // outputs of one share of work: whole groups of 6, 12 and 24
constexpr int64_t kRows = 512;  // rows at a time, so that the sums of a share stay in the second-level cache
template <class T>  // weights of one share, for kGroupOuts: two shares fit the second-level cache
constexpr int64_t kShare = (1 << 15) / sizeof(T);
template <class T>
constexpr int64_t kLine = 64 / sizeof(T);  // numbers of a cache line
template <class T>
constexpr int64_t kAhead = 64 * kLine<T>;  // weights between a product and the prefetched ones

// Outputs at a time of M rows, up to 3. Two hide that each addition waits for the last. Vectors of 16 have few additions:
// there, a single row of fp32 is faster with one, whose weights are read from front to back.
template <int M, class T>
constexpr int kTogether = VL == 16 && sizeof(T) == 4 && M == 1 ? 1 : 2;

constexpr int64_t kPairs = 2 * VL;  // the numbers of a Pair

// Two vectors of adjacent numbers. Those of bf16 are the even ones and the odd ones, which are the fastest to widen.
struct Pair {
  vf low, high;
};

INLINE Pair pair_at(const float* from) { return {load(from), load(from + VL)}; }
INLINE Pair pair_at(const uint16_t* from) {
  vu pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return {reinterpret_cast<vf>(pairs << 16), reinterpret_cast<vf>(pairs & 0xffff0000u)};
}

// The last `count` numbers of a row, then zeros.
template <class T>
INLINE Pair last_pair(const T* from, int64_t count) {
  T last[kPairs] = {};
  std::memcpy(last, from, static_cast<size_t>(count) * sizeof(T));
  return pair_at(last);
}

int64_t padded(int64_t in) { return (in + kPairs - 1) / kPairs * kPairs; }

float* floats(Scratch& scratch, int64_t count) {
  return reinterpret_cast<float*>(scratch.take(static_cast<size_t>(count) * sizeof(float)));
}

// Rows of x in fp32, in groups that are multiplied together. Group g has the rows from first(g) up to first(g + 1). Every
// kPairs inputs of its R rows lie together: the lower vectors of all rows, then the higher ones; zeros behind the last
// input.
struct Groups {
  const float* numbers;
  int64_t rows, width, count;

  int64_t first(int64_t g) const { return rows * g / count; }
  const float* at(int64_t g, int64_t input) const {
    return numbers + first(g) * width + input * (first(g + 1) - first(g));
  }
};

template <class T>
Groups grouped(const Linear<T>& layer, int64_t most, Scratch& scratch) {
  const int64_t width = padded(layer.in), whole = layer.in / kPairs * kPairs;
  float* to = floats(scratch, layer.rows * width);
  const Groups groups{to, layer.rows, width, (layer.rows + most - 1) / most};
  for (int64_t g = 0; g < groups.count; ++g)
    for (int64_t i = 0; i < layer.in; i += kPairs) {
      const int64_t first = groups.first(g), rows = groups.first(g + 1) - first;
      for (int64_t r = 0; r < rows; ++r, to += VL) {
        const T* from = layer.x + (first + r) * layer.x_stride + i;
        const Pair pair = i < whole ? pair_at(from) : last_pair(from, layer.in - whole);
        store(to, pair.low);
        store(to + rows * VL, pair.high);
      }
      to += rows * VL;
    }
  return groups;
}

// kTogether outputs of M rows. x: one of Groups. Numbers are added in the order of multiply_group.
template <int M, class T>
INLINE void dot(const Linear<T>& layer, const float* x, int64_t first, int64_t outs) {
  constexpr int kBlocks = (M == 1 ? 64 : 32) / kPairs;  // pairs at a time: whole cache lines
  constexpr int O = kTogether<M, T>;
  const int64_t all = O * layer.in, ahead = O == 1 ? kAhead<T> : (kAhead<T> + all - 1) / all * all;
  const T* weight[O];
  for (int o = 0; o < O; ++o) weight[o] = layer.weight + (first + std::min<int64_t>(o, outs - 1)) * layer.in;
  float sums[O][M] = {};
  for (int64_t input = 0; input < layer.in; input += kStretch) {
    const int64_t end = std::min(input + kStretch, layer.in), whole = input + (end - input) / kPairs * kPairs;
    vf sum[O][M] = {};
    auto add = [&](int64_t i, auto pair_of) {
      Pair pairs[O];
      for (int o = 0; o < O; ++o) pairs[o] = pair_of(weight[o] + i);
      for (int half = 0; half < 2; ++half)
        for (int m = 0; m < M; ++m) {
          const vf number = load(x + i * M + (half * M + m) * VL);
          for (int o = 0; o < O; ++o) sum[o][m] += number * (half ? pairs[o].high : pairs[o].low);
        }
    };
    int64_t i = input;
    for (; i + kPairs * kBlocks <= whole; i += kPairs * kBlocks) {
      for (int line = 0; line < kPairs * kBlocks; line += kLine<T>)
        for (int o = 0; o < O; ++o) __builtin_prefetch(weight[o] + ahead + i + line, 0, 2);
#pragma GCC unroll 8
      for (int64_t block = i; block < i + kPairs * kBlocks; block += kPairs)
        add(block, [](const T* from) { return pair_at(from); });
    }
    for (; i < whole; i += kPairs) add(i, [](const T* from) { return pair_at(from); });
    if (whole < end) add(whole, [&](const T* from) { return last_pair(from, end - whole); });
    for (int o = 0; o < O; ++o)
      for (int m = 0; m < M; ++m) sums[o][m] += sum_adjacent(sum[o][m]);
  }
  for (int64_t o = 0; o < outs; ++o) {
    const float bias = layer.bias ? number(layer.bias + first + o) : 0.0f;
    for (int m = 0; m < M; ++m) put(layer.y + m * layer.y_stride + first + o, sums[o][m] + bias);
  }
}

template <int M, class T>
void few_rows(const Linear<T>& layer, int threads) {
  static thread_local Scratch scratch;
  const float* x = grouped(layer, M, scratch).numbers;
  run_parallel(threads, [&](Team& team, int thread) {
    const int64_t end = layer.out * (thread + 1) / team.threads();
    for (int64_t out = layer.out * thread / team.threads(); out < end; out += kTogether<M, T>)
      dot<M>(layer, x, out, std::min<int64_t>(kTogether<M, T>, end - out));
  });
}

// The same number, kept in a register. GCC would read it from memory for each product.
INLINE vf kept(vf number) {
#if defined(__AVX512F__)
  asm("" : "+v"(number));
#elif defined(__AVX__)
  asm("" : "+x"(number));
#endif
  return number;
}

// Adds the products of O outputs and a group of R rows, for some inputs, to sums (O, layer.rows).
template <int O, int R, class T>
INLINE void multiply_group(const Linear<T>& layer, const float* x, const T* weight, int64_t inputs, float* sums,
                           Ahead* ahead) {
  constexpr int kSums = (O * R + VL - 1) / VL * VL;
  vf sum[kSums] = {};
  Pair pairs[O];
  auto add = [&] {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      vf weights[O];
      for (int o = 0; o < O; ++o) weights[o] = half ? pairs[o].high : pairs[o].low;
      for (int r = 0; r < R; ++r, x += VL) {
        const vf number = kept(load(x));
        for (int o = 0; o < O; ++o) sum[o * R + r] += number * weights[o];
      }
    }
  };
  const int64_t whole = inputs / kPairs * kPairs;
  for (int64_t i = 0; i < whole; i += kPairs) {
    if (i % kLine<T> == 0)
      for (int64_t line = 0; line < kPairs; line += kLine<T>) ahead->fetch();
    for (int o = 0; o < O; ++o) pairs[o] = pair_at(weight + o * layer.in + i);
    add();
  }
  if (whole < inputs) {
    for (int o = 0; o < O; ++o) pairs[o] = last_pair(weight + o * layer.in + whole, inputs - whole);
    add();
  }
  float each[kSums];
  for (int i = 0; i < kSums; i += VL) store(each + i, sum_each(sum + i));
  for (int o = 0; o < O; ++o)
    for (int r = 0; r < R; ++r) sums[o * layer.rows + r] += each[o * R + r];
}

// The same for all outputs of a share.
template <int R, class T>
void multiply_share(const Linear<T>& layer, const float* x, const T* weight, int64_t outs, int64_t inputs,
                    float* sums, Ahead* ahead) {
  int64_t out = 0;
  for (; out + kGroupOuts <= outs; out += kGroupOuts)
    multiply_group<kGroupOuts, R>(layer, x, weight + out * layer.in, inputs, sums + out * layer.rows, ahead);
  for (; out < outs; ++out)
    multiply_group<1, R>(layer, x, weight + out * layer.in, inputs, sums + out * layer.rows, ahead);
}

template <class T>
void some_rows(const Linear<T>& layer, int threads) {
  static thread_local Scratch scratch;
  const Groups groups = grouped(layer, kGroupRows, scratch);
  const int64_t rows = layer.rows, in = layer.in;
  const int64_t pairs = std::min(kShare<T> / in, layer.out / kGroupOuts / (kSharesEach * threads));
  const int64_t outs = std::clamp(pairs * kGroupOuts, int64_t{kGroupOuts}, kMostOuts);
  const int lines = static_cast<int>((kGroupOuts + groups.count - 1) / groups.count);
  std::atomic<int64_t> next{0};
  run_parallel(threads, [&](Team&, int) {
    float sums[kMostOuts * kSome];
    const auto take = [&] { return std::min(outs * next.fetch_add(1, std::memory_order_relaxed), layer.out); };
    const auto at = [&](int64_t out) {
      return reinterpret_cast<const char*>(layer.weight + std::min(out, layer.out) * in);
    };
    for (int64_t first = take(), after; first < layer.out; first = after) {
      const int64_t count = std::min(outs, layer.out - first);
      after = take();
      Ahead ahead{at(after), at(after + outs), lines};
      std::fill(sums, sums + count * rows, 0.0f);
      for (int64_t input = 0; input < in; input += kStretch) {
        const int64_t inputs = std::min(kStretch, in - input);
        const T* weight = layer.weight + first * in + input;
        for (int64_t g = 0; g < groups.count; ++g) {
          const float* x = groups.at(g, input);
          float* to = sums + groups.first(g);
          switch (groups.first(g + 1) - groups.first(g)) {
#if VL == 16
            case 8: multiply_share<8>(layer, x, weight, count, inputs, to, &ahead); break;
            case 7: multiply_share<7>(layer, x, weight, count, inputs, to, &ahead); break;
            case 6: multiply_share<6>(layer, x, weight, count, inputs, to, &ahead); break;
#endif
            case 5: multiply_share<5>(layer, x, weight, count, inputs, to, &ahead); break;
            case 4: multiply_share<4>(layer, x, weight, count, inputs, to, &ahead); break;
            default: multiply_share<3>(layer, x, weight, count, inputs, to, &ahead);
          }
        }
      }
      for (int64_t j = 0; j < count; ++j) {
        const float bias = layer.bias ? number(layer.bias + first + j) : 0.0f;
        for (int64_t row = 0; row < rows; ++row)
          put(layer.y + row * layer.y_stride + first + j, sums[j * rows + row] + bias);
      }
    }
  });
}

// Rows of x as lanes: (inputs, lanes) in fp32 for every tile of kTile rows. A tile of at most kHalf rows has kHalf lanes.
struct Lanes {
  float* numbers;
  int64_t rows, in;

  int64_t tiles() const { return (rows + kTile - 1) / kTile; }
  int64_t width(int64_t tile) const { return rows - tile * kTile > kHalf ? kTile : kHalf; }
  float* at(int64_t tile, int64_t input) const { return numbers + tile * kTile * in + input * width(tile); }
};

// Packs VL rows from `first` on into their lanes. Rows behind the last are zeros.
template <class T>
void pack(const Linear<T>& layer, const Lanes& lanes, int64_t first) {
  const int64_t tile = first / kTile, width = lanes.width(tile), whole = layer.in / VL * VL;
  float* to = lanes.at(tile, 0) + first % kTile;
  for (int64_t i = 0; i < layer.in; i += VL) {
    vf square[VL];
    for (int l = 0; l < VL; ++l) {
      T last[VL] = {};
      const T* from = layer.x + (first + l) * layer.x_stride + i;
      if (first + l >= layer.rows) {
        from = last;
      } else if (i >= whole) {
        std::memcpy(last, from, static_cast<size_t>(layer.in - whole) * sizeof(T));
        from = last;
      }
      square[l] = load(from);
    }
    transpose<1>(square);
    for (int64_t e = 0; e < std::min<int64_t>(VL, layer.in - i); ++e) store(to + (i + e) * width, square[e]);
  }
}

// Widens inputs of outputs first … first + count - 1: (count, kBlock) fp32. Outputs behind the last are zeros.
template <class T>
void widen(const Linear<T>& layer, int64_t first, int64_t count, int64_t input, int64_t inputs, float* to) {
  for (int64_t j = 0; j < count; ++j, to += kBlock) {
    if (first + j >= layer.out) {
      std::fill(to, to + inputs, 0.0f);
      continue;
    }
    const T* from = layer.weight + (first + j) * layer.in + input;
    int64_t i = 0;
    for (; i + VL <= inputs; i += VL) {
      if (i % kLine<T> == 0) __builtin_prefetch(from + i + kBlock, 0, 2);  // of the next block
      store(to + i, load(from + i));
    }
    for (; i < inputs; ++i) to[i] = number(from + i);
  }
}

// Adds the products of some inputs to M outputs of N vectors of lanes. weight: (M, kBlock), sums: (M, lanes).
template <int N, int M>
INLINE void multiply(const float* x, const float* weight, int64_t inputs, float* sums) {
  vf sum[M][N];
  for (int j = 0; j < M; ++j)
    for (int v = 0; v < N; ++v) sum[j][v] = load(sums + (j * N + v) * VL);
  for (int64_t i = 0; i < inputs; ++i, x += N * VL) {
    vf lanes[N];
    for (int v = 0; v < N; ++v) lanes[v] = load(x + v * VL);
#pragma GCC unroll 12
    for (int j = 0; j < M; ++j) {
      const vf number = all(weight[j * kBlock + i]);
      for (int v = 0; v < N; ++v) sum[j][v] += lanes[v] * number;
    }
  }
  for (int j = 0; j < M; ++j)
    for (int v = 0; v < N; ++v) store(sums + (j * N + v) * VL, sum[j][v]);
}

// Writes outputs first … end - 1 of one tile, from lanes to rows.
template <class T>
void write(const Linear<T>& layer, int64_t first, int64_t end, int64_t tile, int64_t width, const float* sums) {
  for (int64_t out = first; out < end; out += VL)
    for (int64_t lane = 0; lane < width; lane += VL) {
      vf square[VL];
      for (int e = 0; e < VL; ++e) {
        const int64_t at = std::min(out + e, end - 1);
        square[e] = load(sums + (at - first) * width + lane) + (layer.bias ? number(layer.bias + at) : 0.0f);
      }
      transpose<1>(square);
      const int64_t row = tile * kTile + lane;
      for (int64_t l = 0; l < std::min<int64_t>(VL, layer.rows - row); ++l) {
        T* to = layer.y + (row + l) * layer.y_stride + out;
        if (end - out >= VL) {
          store(to, square[l]);
        } else {
          T last[VL];
          store(last, square[l]);
          std::memcpy(to, last, static_cast<size_t>(end - out) * sizeof(T));
        }
      }
    }
}

// Outputs first … first + outs - 1 of all rows. sums: room for tiles * outs * kTile numbers.
template <class T>
void share(const Linear<T>& layer, const Lanes& lanes, int64_t first, int64_t outs, float* sums) {
  alignas(64) float weight[kOuts * kBlock];
  const int64_t size = outs * kTile;  // sums of a tile
  std::fill(sums, sums + lanes.tiles() * size, 0.0f);
  for (int64_t input = 0; input < layer.in; input += kBlock) {
    const int64_t inputs = std::min(kBlock, layer.in - input);
    widen(layer, first, outs, input, inputs, weight);
    for (int64_t tile = 0; tile < lanes.tiles(); ++tile) {
      const float* x = lanes.at(tile, input);
      float* to = sums + tile * size;
      if (lanes.width(tile) == kTile)
        for (int64_t out = 0; out < outs; out += kTileOuts)
          multiply<kTile / VL, kTileOuts>(x, weight + out * kBlock, inputs, to + out * kTile);
      else
        for (int64_t out = 0; out < outs; out += 2 * kTileOuts)
          multiply<kHalf / VL, 2 * kTileOuts>(x, weight + out * kBlock, inputs, to + out * kHalf);
    }
  }
  for (int64_t tile = 0; tile < lanes.tiles(); ++tile)
    write(layer, first, std::min(first + outs, layer.out), tile, lanes.width(tile), sums + tile * size);
}

// At most kRows rows.
template <class T>
void many_rows(const Linear<T>& layer, int threads) {
  static thread_local Scratch scratch;
  Lanes lanes{nullptr, layer.rows, layer.in};
  const int64_t numbers = lanes.tiles() * kTile * layer.in;
  const int64_t groups = (layer.rows + kHalf - 1) / kHalf;
  const int64_t outs = layer.out < 4 * kOuts * threads ? kOuts / 2 : kOuts;  // small shares are spread more evenly
  const int64_t sums = lanes.tiles() * outs * kTile;  // of one thread
  lanes.numbers = floats(scratch, numbers + threads * sums);
  std::atomic<int64_t> next{0};
  run_parallel(threads, [&](Team& team, int thread) {
    for (int64_t g = groups * thread / team.threads(); g < groups * (thread + 1) / team.threads(); ++g)
      for (int64_t row = g * kHalf; row < (g + 1) * kHalf; row += VL) pack(layer, lanes, row);
    team.barrier();
    for (int64_t first; (first = outs * next.fetch_add(1, std::memory_order_relaxed)) < layer.out;)
      share(layer, lanes, first, outs, lanes.numbers + numbers + thread * sums);
  });
}

template <class T>
void run(const Linear<T>& layer, int threads) {
  if (layer.rows > kRows) {  // so that the memory for lanes and sums has a bound
    for (int64_t row = 0; row < layer.rows; row += kRows) {
      Linear<T> part = layer;
      part.x += row * layer.x_stride;
      part.y += row * layer.y_stride;
      part.rows = std::min(kRows, layer.rows - row);
      run(part, threads);
    }
    return;
  }
  switch (layer.rows) {
    case 0: return;
    case 1: return few_rows<1>(layer, threads);
    case 2: return few_rows<2>(layer, threads);
    case 3: return few_rows<3>(layer, threads);
    default: layer.rows <= kSome ? some_rows(layer, threads) : many_rows(layer, threads);
  }
}

}  // namespace

void LINEAR(const Linear<uint16_t>& layer, int threads) { run(layer, threads); }
void LINEAR(const Linear<float>& layer, int threads) { run(layer, threads); }

}  // namespace inlay
