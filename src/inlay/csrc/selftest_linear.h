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

inline float real(float number) { return number; }
inline float real(uint16_t number) { return from_bf16(number); }
inline void set(float& to, float value) { to = value; }
inline void set(uint16_t& to, float value) { to = to_bf16(value); }

template <class T>
bool multiplies(RunLinear<T> run, unsigned seed) {
  std::mt19937 random(seed);
  const auto number = [&](int64_t most) { return static_cast<int64_t>(random() % static_cast<unsigned>(most)) + 1; };
  const int64_t rows = number(random() % 8 ? 70 : 1100), out = number(130);
  const int64_t in = number(random() % 4 ? 90 : random() % 4 ? 600 : 3000);
  std::normal_distribution<float> normal;
  const auto numbers = [&](int64_t count) {
    std::vector<T> made(static_cast<size_t>(count));
    for (T& each : made) set(each, normal(random));
    return made;
  };
  const std::vector<T> x = numbers(rows * in), weight = numbers(out * in), bias = numbers(out);
  std::vector<T> y(static_cast<size_t>(rows * out));
  const bool biased = random() % 2;
  run({x.data(), in, weight.data(), biased ? bias.data() : nullptr, y.data(), out, rows, in, out},
      static_cast<int>(number(3)));
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t o = 0; o < out; ++o) {
      double sum = biased ? real(bias[o]) : 0.0, size = std::abs(sum);
      for (int64_t i = 0; i < in; ++i) {
        const double product = static_cast<double>(real(x[row * in + i])) * static_cast<double>(real(weight[o * in + i]));
        sum += product;
        size += std::abs(product);
      }
      const double rounding = sizeof(T) == 2 ? (1 + std::abs(sum)) / 128 : (1 + size) * 1e-6;
      if (!(std::abs(real(y[row * out + o]) - sum) <= rounding)) {
        std::printf("linear, seed %u: row %ld, output %ld\n", seed, static_cast<long>(row), static_cast<long>(o));
        return false;
      }
    }
  return true;
}

template <class T>
int linear_failures_in(const char* type, int products, unsigned first) {
  int failures = 0;
  for (const char* name : {"avx512bf16", "avx512", "avx2", "portable"}) {
    const RunLinear<T> run = linear_by_name<T>(name);
    if (run == nullptr) continue;
    int failed = 0;
    for (int i = 0; i < products; ++i) failed += !multiplies<T>(run, first + static_cast<unsigned>(i));
    std::printf("linear in %s, %s: %d products, %d wrong\n", type, name, products, failed);
    failures += failed;
  }
  return failures;
}

// The number of wrong products. Versions that don't run here are left out.
inline int linear_failures(int products, unsigned first) {
  return linear_failures_in<uint16_t>("bf16", products, first) + linear_failures_in<float>("fp32", products, first);
}

}  // namespace inlay
