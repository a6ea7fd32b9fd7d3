// The part of the kernel's own test for linear layers: every version against sums in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "linear.h"
#include "tensors.h"

namespace inlay {

inline bool multiplies(RunLinear run, unsigned seed) {
  std::mt19937 random(seed);
  const auto number = [&](int64_t most) { return static_cast<int64_t>(random() % static_cast<unsigned>(most)) + 1; };
  const int64_t rows = number(random() % 8 ? 70 : 1100), out = number(130);
  const int64_t in = number(random() % 4 ? 90 : random() % 4 ? 600 : 3000);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int64_t count) {
    std::vector<uint16_t> made(static_cast<size_t>(count));
    for (uint16_t& each : made) each = to_bf16(normal(random));
    return made;
  };
  const std::vector<uint16_t> x = numbers(rows * in), weight = numbers(out * in), bias = numbers(out);
  std::vector<uint16_t> y(static_cast<size_t>(rows * out));
  const bool biased = random() % 2;
  run({x.data(), in, weight.data(), biased ? bias.data() : nullptr, y.data(), out, rows, in, out},
      static_cast<int>(number(3)));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t o = 0; o < out; ++o) {
      double sum = biased ? from_bf16(bias[o]) : 0.0;
      for (int64_t i = 0; i < in; ++i)
        sum += static_cast<double>(from_bf16(x[row * in + i])) * static_cast<double>(from_bf16(weight[o * in + i]));
      if (!(std::abs(from_bf16(y[row * out + o]) - sum) <= (1 + std::abs(sum)) / 128)) {
        std::printf("linear, seed %u: row %ld, output %ld\n", seed, static_cast<long>(row), static_cast<long>(o));
        return false;
      }
    }
  return true;
}

// The number of wrong products. Versions that don't run here are left out.
inline int linear_failures(int products, unsigned first) {
  int failures = 0;
  for (const char* name : {"avx512bf16", "avx2", "portable"}) {
    const RunLinear run = linear_by_name(name);
    if (run == nullptr) continue;
    int failed = 0;
    for (int i = 0; i < products; ++i) failed += !multiplies(run, first + static_cast<unsigned>(i));
    std::printf("linear, %s: %d products, %d wrong\n", name, products, failed);
    failures += failed;
  }
  return failures;
}

}  // namespace inlay
