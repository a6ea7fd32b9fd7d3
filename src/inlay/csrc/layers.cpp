#include "layers.h"

#include <nanobind/stl/string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "binding.h"
#include "linear.h"
#include "parallel.h"
#include "quantized.h"
#include "steps.h"
#include "tensors.h"

namespace nb = nanobind;

// Each function is compiled for every instruction set, and one version is chosen when the library is loaded. The
// compiler splits vectors of 16 floats if registers are narrower. GCC 11 does not know the x86-64 levels here, and only
// glibc chooses functions at load time.
#if defined(__x86_64__) && defined(__GLIBC__) && __GNUC__ >= 12 && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

namespace inlay {
namespace {

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions alone
#endif
#define VL 16
#include "simd.h"

constexpr double kNumber = 4e-10;  // seconds for one number of a row, about

// Cuts rows into equal shares for the threads that pay.
template <class Body>
void share_rows(int threads, int64_t rows, int64_t numbers_per_row, const Body& body) {
  const int worth = worthwhile(threads, kNumber * static_cast<double>(rows * numbers_per_row));
  run_parallel(static_cast<int>(std::min<int64_t>(worth, rows)), [&](Team& team, int thread) {
    body(rows * thread / team.threads(), rows * (thread + 1) / team.threads());
  });
}

// Rows of `count` adjacent groups of `width` numbers; strides in elements.
struct Norm {
  const void* x;
  const void* weight;
  void* out;
  int64_t count, width, x_stride, out_stride;
  float eps;
};

template <class T>
INLINE void norm_group(const T* x, const T* weight, T* out, int64_t width, float eps) {
  vf squares[2] = {vf{}, vf{}};
  const int64_t whole = width / VL * VL;
  for (int64_t i = 0; i < whole; i += VL) {
    const vf v = load(x + i);
    squares[(i / VL) % 2] += v * v;
  }
  float lanes[VL], sum = 0.0f;
  store(lanes, squares[0] + squares[1]);
  for (const float lane : lanes) sum += lane;
  for (int64_t i = whole; i < width; ++i) sum += number(x + i) * number(x + i);
  const float factor = 1.0f / std::sqrt(sum / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < whole; i += VL) store(out + i, load(x + i) * factor * load(weight + i));
  for (int64_t i = whole; i < width; ++i) put(out + i, number(x + i) * factor * number(weight + i));
}

template <class T>
INLINE void norm_rows(const Norm& norm, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row)
    for (int64_t group = 0; group < norm.count; ++group)
      norm_group(static_cast<const T*>(norm.x) + row * norm.x_stride + group * norm.width,
                 static_cast<const T*>(norm.weight),
                 static_cast<T*>(norm.out) + row * norm.out_stride + group * norm.width, norm.width, norm.eps);
}

CLONES void norm_f32(const Norm& norm, int64_t begin, int64_t end) { norm_rows<float>(norm, begin, end); }
CLONES void norm_bf16(const Norm& norm, int64_t begin, int64_t end) { norm_rows<uint16_t>(norm, begin, end); }

template <class T>
INLINE void silu_rows(const T* gate_up, T* out, int64_t width, int64_t begin, int64_t end) {
  const int64_t whole = width / VL * VL;
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = gate_up + row * 2 * width;
    const T* up = gate + width;
    T* to = out + row * width;
    for (int64_t i = 0; i < whole; i += VL) {
      const vf g = load(gate + i);
      store(to + i, g / (1.0f + exp2_of(g * -1.4426950408889634f)) * load(up + i));
    }
    for (int64_t i = whole; i < width; ++i)
      put(to + i, number(gate + i) / (1.0f + std::exp(-number(gate + i))) * number(up + i));
  }
}

CLONES void silu_f32(const float* gate_up, float* out, int64_t width, int64_t begin, int64_t end) {
  silu_rows(gate_up, out, width, begin, end);
}
CLONES void silu_bf16(const uint16_t* gate_up, uint16_t* out, int64_t width, int64_t begin, int64_t end) {
  silu_rows(gate_up, out, width, begin, end);
}

struct Turned {
  void* heads;  // (rows, count, width), in place
  const float* cos;
  const float* sin;  // (rows, width), the halves alike
  int64_t count, width, stride;
};

template <class T>
INLINE void turn_rows(const Turned& turned, int64_t begin, int64_t end) {
  const int64_t half = turned.width / 2, whole = half / VL * VL;
  for (int64_t row = begin; row < end; ++row) {
    const float* cos = turned.cos + row * turned.width;
    const float* sin = turned.sin + row * turned.width;
    for (int64_t head = 0; head < turned.count; ++head) {
      T* low = static_cast<T*>(turned.heads) + row * turned.stride + head * turned.width;
      T* high = low + half;
      for (int64_t i = 0; i < whole; i += VL) {
        const vf a = load(low + i), b = load(high + i), c = load(cos + i), s = load(sin + i);
        store(low + i, a * c - b * s);
        store(high + i, b * c + a * s);
      }
      for (int64_t i = whole; i < half; ++i) {
        const float a = number(low + i), b = number(high + i);
        put(low + i, a * cos[i] - b * sin[i]);
        put(high + i, b * cos[i] + a * sin[i]);
      }
    }
  }
}

CLONES void turn_f32(const Turned& turned, int64_t begin, int64_t end) { turn_rows<float>(turned, begin, end); }
CLONES void turn_bf16(const Turned& turned, int64_t begin, int64_t end) { turn_rows<uint16_t>(turned, begin, end); }

template <class T>
INLINE void add_numbers(const T* a, const T* b, T* out, int64_t count) {
  const int64_t whole = count / VL * VL;
  for (int64_t i = 0; i < whole; i += VL) store(out + i, load(a + i) + load(b + i));
  for (int64_t i = whole; i < count; ++i) put(out + i, number(a + i) + number(b + i));
}

CLONES void add_f32(const float* a, const float* b, float* out, int64_t count) { add_numbers(a, b, out, count); }
CLONES void add_bf16(const uint16_t* a, const uint16_t* b, uint16_t* out, int64_t count) {
  add_numbers(a, b, out, count);
}

// PyTorch's 4-bit weights: blocks of 64 outputs, in which each input has 32 bytes. Byte j holds output j in its low
// half and output j + 32 in its high half. The value is (number - 8) * scale + zero.
struct Int4 {
  const uint8_t* packed;     // (outputs / 64, inputs, 32)
  const void* scales_zeros;  // (inputs / group, outputs, 2), in the type of the weights
  void* weights;             // (inputs, columns): the requested blocks, side by side
  int64_t inputs, outputs, group, first_block, columns;
};

template <class T>
INLINE void unpack_blocks(const Int4& int4, int64_t begin, int64_t end) {
  typedef uint8_t bytes __attribute__((vector_size(VL)));
  for (int64_t block = begin; block < end; ++block) {
    const int64_t source = int4.first_block + block;
    const uint8_t* from = int4.packed + source * int4.inputs * 32;
    T* to = static_cast<T*>(int4.weights) + block * 64;
    for (int64_t k = 0; k < int4.inputs; k += int4.group) {
      alignas(64) float scales[64], offsets[64];
      const T* pairs = static_cast<const T*>(int4.scales_zeros) + (k / int4.group * int4.outputs + source * 64) * 2;
      for (int n = 0; n < 64; ++n) {
        scales[n] = number(pairs + 2 * n);
        offsets[n] = number(pairs + 2 * n + 1) - 8.0f * scales[n];
      }
      for (int64_t i = k; i < k + int4.group; ++i) {
        for (int part = 0; part < 2; ++part) {
          bytes both;
          std::memcpy(&both, from + i * 32 + part * VL, sizeof both);
          const vf low = __builtin_convertvector(__builtin_convertvector(both & 15, vi), vf);
          const vf high = __builtin_convertvector(__builtin_convertvector(both >> 4, vi), vf);
          const int n = part * VL;
          store(to + i * int4.columns + n, low * load(scales + n) + load(offsets + n));
          store(to + i * int4.columns + n + 32, high * load(scales + n + 32) + load(offsets + n + 32));
        }
      }
    }
  }
}

CLONES void unpack_f32(const Int4& int4, int64_t begin, int64_t end) { unpack_blocks<float>(int4, begin, end); }
CLONES void unpack_bf16(const Int4& int4, int64_t begin, int64_t end) { unpack_blocks<uint16_t>(int4, begin, end); }

// Reads memory in four streams, each prefetched 4 KiB ahead. The sum keeps the compiler from removing the reads.
INLINE vi read_all(const int32_t* from, int64_t count) {
  constexpr int kStreams = 4, kAhead = 1 << 10;
  const int64_t each = count / kStreams / VL * VL;
  vi sums[kStreams] = {};
  for (int64_t i = 0; i < each; i += VL)
    for (int s = 0; s < kStreams; ++s) {
      vi v;
      std::memcpy(&v, from + s * each + i, sizeof v);
      __builtin_prefetch(from + s * each + i + kAhead);
      sums[s] += v;
    }
  return sums[0] + sums[1] + sums[2] + sums[3];
}

CLONES void read_share(const int32_t* from, int64_t count, int32_t* sums) {
  const vi sum = read_all(from, count);
  std::memcpy(sums, &sum, sizeof sum);
}


void unpack_int4(uint64_t packed, uint64_t scales_zeros, uint64_t weights, bool bf16, int64_t inputs, int64_t outputs,
                 int64_t group, int64_t first_block, int64_t blocks, int threads) {
  const Int4 int4{at<uint8_t>(packed), at<void>(scales_zeros), at<void>(weights), inputs, outputs, group,
                  first_block,         blocks * 64};
  share_rows(threads, blocks, inputs * 64,
             [&](int64_t begin, int64_t end) { (bf16 ? unpack_bf16 : unpack_f32)(int4, begin, end); });
}

template <class T>
void multiply_in(uint64_t x, int64_t x_stride, uint64_t weight, uint64_t bias, uint64_t y, int64_t rows, int64_t in,
                 int64_t out, const std::string& instruction_set, int threads) {
  const RunLinear<T> run = linear_by_name<T>(instruction_set);
  if (run == nullptr) throw std::invalid_argument("no linear layer for the instruction set '" + instruction_set + "'");
  const Linear<T> layer{at<T>(x), x_stride, at<T>(weight), at<T>(bias), at<T>(y), out, rows, in, out};
  run(layer, worthwhile(threads, seconds_of(layer)));
}

void multiply(uint64_t x, int64_t x_stride, uint64_t weight, uint64_t bias, uint64_t y, int64_t rows, int64_t in,
              int64_t out, bool bf16, const std::string& instruction_set, int threads) {
  (bf16 ? multiply_in<uint16_t> : multiply_in<float>)(x, x_stride, weight, bias, y, rows, in, out, instruction_set,
                                                      threads);
}

void pack_numbers(uint64_t numbers, uint64_t to, int64_t out, int64_t in, int bits, int64_t group_bytes, int threads) {
  pack_quantized(at<uint8_t>(numbers), at<char>(to), out, in, bits, group_bytes, threads);
}

void multiply_quantized(uint64_t x, int64_t x_stride, uint64_t weight, uint64_t scales, uint64_t bias, uint64_t y,
                        int64_t rows, int64_t in, int64_t out, int bits, bool bf16, bool bf16_grid, bool zeros,
                        const std::string& instruction_set, int threads) {
  const QuantizedLinear run = quantized_by_name(instruction_set);
  if (run == nullptr) throw std::invalid_argument("no quantized layer for the instruction set '" + instruction_set + "'");
  const Quantized layer{at<void>(x), x_stride, at<char>(weight), at<float>(scales), at<float>(bias), at<void>(y), out,
                        rows, in, out, bits, bf16 ? Type::bf16 : Type::f32, bf16_grid ? Type::bf16 : Type::f32, zeros};
  run(layer, worthwhile(threads, seconds_of(layer)));
}

// Reads memory and does nothing else. Benchmarks measure the read rate with it.
int32_t read(uint64_t address, int64_t bytes, int threads) {
  std::atomic<int32_t> total{0};
  const int64_t count = bytes / 4;
  run_parallel(threads, [&](Team& team, int thread) {
    const int64_t first = count * thread / team.threads(), end = count * (thread + 1) / team.threads();
    int32_t sums[VL];
    read_share(at<int32_t>(address) + first, end - first, sums);
    for (const int32_t sum : sums) total.fetch_add(sum, std::memory_order_relaxed);
  });
  return total;
}

// Moves memory in use to huge pages if the system has some, so that long streams of reads need fewer address
// translations. Nothing changes if it has none, or if the memory is that of a file.
void use_huge_pages(uint64_t address, int64_t bytes) {
#if defined(__linux__)
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, Linux 6.1
  constexpr uint64_t kPage = 4096;
  const uint64_t first = (address + kPage - 1) / kPage * kPage, end = (address + bytes) / kPage * kPage;
  if (first < end) madvise(at<void>(first), end - first, kCollapse);
#else
  (void)address, (void)bytes;
#endif
}

}  // namespace

void rms_norm(uint64_t x, uint64_t weight, uint64_t out, bool bf16, int64_t rows, int64_t count, int64_t width,
              int64_t x_stride, int64_t out_stride, float eps, int threads) {
  const Norm norm{at<void>(x), at<void>(weight), at<void>(out), count, width, x_stride, out_stride, eps};
  share_rows(threads, rows, count * width,
             [&](int64_t begin, int64_t end) { (bf16 ? norm_bf16 : norm_f32)(norm, begin, end); });
}

void silu_mul(uint64_t gate_up, uint64_t out, bool bf16, int64_t rows, int64_t width, int threads) {
  share_rows(threads, rows, width, [&](int64_t begin, int64_t end) {
    if (bf16)
      silu_bf16(at<uint16_t>(gate_up), at<uint16_t>(out), width, begin, end);
    else
      silu_f32(at<float>(gate_up), at<float>(out), width, begin, end);
  });
}

void rotate(uint64_t heads, uint64_t cos, uint64_t sin, bool bf16, int64_t rows, int64_t count, int64_t width,
            int64_t stride, int threads) {
  const Turned turned{at<void>(heads), at<float>(cos), at<float>(sin), count, width, stride};
  share_rows(threads, rows, count * width,
             [&](int64_t begin, int64_t end) { (bf16 ? turn_bf16 : turn_f32)(turned, begin, end); });
}

void add(uint64_t a, uint64_t b, uint64_t out, bool bf16, int64_t rows, int64_t width, int threads) {
  share_rows(threads, rows, width, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * width, count = (end - begin) * width;
    if (bf16)
      add_bf16(at<uint16_t>(a) + first, at<uint16_t>(b) + first, at<uint16_t>(out) + first, count);
    else
      add_f32(at<float>(a) + first, at<float>(b) + first, at<float>(out) + first, count);
  });
}

void bind_layers(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  m.def("linear_supported",
        [](const std::string& name, bool bf16) {
          return bf16 ? linear_by_name<uint16_t>(name) != nullptr : linear_by_name<float>(name) != nullptr;
        },
        "Whether a version of linear runs here, in bf16 or in fp32.");
  m.def("linear", &multiply, released(), "A linear layer in bf16 or fp32; bias 0 for none.");
  m.def("quantized_supported",
        [](const std::string& name) { return quantized_by_name(name) != nullptr; },
        "Whether a version of quantized_linear runs here; an empty name asks for one that is worth it.");
  m.def("pack_quantized", &pack_numbers, released(), "Numbers of some outputs as quantized_linear reads them.");
  m.def("quantized_linear", &multiply_quantized, released(), "A linear layer in 4 or 8 bits (quantized.h); 0 for none.");
  m.def("use_huge_pages", &use_huge_pages, released(), "Move memory to huge pages, where the system has some.");
  m.def("read", &read, released(), "The wrapped sum of memory's 32-bit numbers but the last few: to time reading.");
  m.def("rms_norm", &rms_norm, released(), "RMSNorm of groups of numbers within rows.");
  m.def("silu_mul", &silu_mul, released(), "silu(gate) * up, gate and up side by side in a row.");
  m.def("rotate", &rotate, released(), "Rotary embedding of heads, in place.");
  m.def("unpack_int4", &unpack_int4, released(), "Blocks of 64 outputs of PyTorch's 4-bit weights, transposed.");
}

}  // namespace inlay
