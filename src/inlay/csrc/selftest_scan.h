// Random spans for selftest.cpp: every version of the scans must agree with plain loops in double.
#pragma once

#include <cmath>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "scan.h"
#include "selftest_cases.h"

namespace inlay {

// Spans over rows, and their slots. Every piece has a slot of its own, so that no thread waits for another one.
struct RandomSpans {
  std::vector<int64_t> first_piece{0}, source, first, end, target;
  int64_t rows = 0, slots = 2;

  explicit RandomSpans(Random& random) {
    for (int spans = random.from(1, 4); spans > 0; --spans) {
      source.push_back(random.one_in(3) ? -1 : random.from(0, 1));
      for (int pieces = random.from(1, 3); pieces > 0; --pieces) {
        first.push_back(rows);
        rows += random.of({1, 1, 3, 20});
        end.push_back(rows);
        target.push_back(slots++);
      }
      first_piece.push_back(static_cast<int64_t>(first.size()));
    }
  }

  Spans spans() const {
    return {static_cast<int64_t>(source.size()), first_piece.data(), source.data(), first.data(), end.data(),
            target.data()};
  }
};

inline std::vector<float> random_numbers(Random& random, int64_t count, float scale) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = random.normal() * scale;
  return numbers;
}

inline std::vector<float> random_shares(Random& random, int64_t count) {
  std::vector<float> numbers(count);
  for (float& number : numbers) number = 1.0f / (1.0f + std::exp(-random.normal()));
  return numbers;
}

inline bool alike(const std::vector<float>& found, const std::vector<double>& expected, const char* what) {
  for (size_t i = 0; i < found.size(); ++i)
    if (!(std::abs(found[i] - expected[i]) <= 1e-4 * (1.0 + std::abs(expected[i])))) {
      std::printf("%s: number %zu is %g and should be %g\n", what, i, found[i], expected[i]);
      return false;
    }
  return true;
}

inline bool scans_delta(const ScanVariant& variant, unsigned seed) {
  Random random{std::mt19937(seed)};
  const RandomSpans each(random);
  const int64_t key_heads = random.from(1, 2), value_heads = key_heads * random.from(1, 2);
  const int64_t keys = random.of({4, 8, 32}), values = random.of({16, 48});
  const int64_t decays = random.one_in(2) ? 1 : keys, rows = each.rows;
  const std::vector<float> query = random_numbers(random, rows * key_heads * keys, 0.3f);
  const std::vector<float> key = random_numbers(random, rows * key_heads * keys, 0.3f);
  const std::vector<float> value = random_numbers(random, rows * value_heads * values, 1.0f);
  const std::vector<float> decay = random_shares(random, rows * value_heads * decays);
  const std::vector<float> beta = random_shares(random, rows * value_heads);
  std::vector<float> pool = random_numbers(random, each.slots * value_heads * keys * values, 0.3f);
  std::vector<double> expected_pool(pool.begin(), pool.end()), expected(rows * value_heads * values);
  std::vector<float> out(expected.size(), std::nanf(""));
  for (size_t span = 0; span < each.source.size(); ++span)
    for (int64_t head = 0; head < value_heads; ++head) {
      const auto slot = [&](int64_t number) { return (number * value_heads + head) * keys * values; };
      std::vector<double> state(keys * values, 0.0);
      if (each.source[span] >= 0)
        for (size_t i = 0; i < state.size(); ++i) state[i] = expected_pool[slot(each.source[span]) + i];
      for (int64_t piece = each.first_piece[span]; piece < each.first_piece[span + 1]; ++piece) {
        for (int64_t row = each.first[piece]; row < each.end[piece]; ++row)
          for (int64_t v = 0; v < values; ++v) {
            const int64_t at = row * value_heads + head, from = (row * key_heads + head / (value_heads / key_heads)) * keys;
            double seen = 0, sum = 0;
            for (int64_t k = 0; k < keys; ++k) {
              state[k * values + v] *= decay[at * decays + (decays == 1 ? 0 : k)];
              seen += key[from + k] * state[k * values + v];
            }
            const double delta = (value[at * values + v] - seen) * beta[at];
            for (int64_t k = 0; k < keys; ++k) {
              state[k * values + v] += key[from + k] * delta;
              sum += query[from + k] * state[k * values + v];
            }
            expected[at * values + v] = sum;
          }
        for (size_t i = 0; i < state.size(); ++i) expected_pool[slot(each.target[piece]) + i] = state[i];
      }
    }
  scan_delta({query.data(), key.data(), value.data(), decay.data(), beta.data(), pool.data(), out.data(), key_heads,
              value_heads, keys, values, decays},
             each.spans(), variant, 2);
  return alike(out, expected, "delta output") && alike(pool, expected_pool, "delta state");
}

inline bool scans_state_space(const ScanVariant& variant, unsigned seed) {
  Random random{std::mt19937(seed)};
  const RandomSpans each(random);
  const int64_t groups = random.from(1, 2), heads = groups * random.from(1, 2);
  const int64_t width = random.of({4, 12}), states = random.of({16, 48}), rows = each.rows;
  const std::vector<float> x = random_numbers(random, rows * heads * width, 1.0f);
  const std::vector<float> decay = random_shares(random, rows * heads), time = random_shares(random, rows * heads);
  const std::vector<float> b = random_numbers(random, rows * groups * states, 0.5f);
  const std::vector<float> c = random_numbers(random, rows * groups * states, 0.5f);
  std::vector<float> pool = random_numbers(random, each.slots * heads * width * states, 0.3f);
  std::vector<double> expected_pool(pool.begin(), pool.end()), expected(rows * heads * width);
  std::vector<float> out(expected.size(), std::nanf(""));
  for (size_t span = 0; span < each.source.size(); ++span)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t channel = 0; channel < width; ++channel) {
        const auto slot = [&](int64_t number) { return ((number * heads + head) * width + channel) * states; };
        std::vector<double> state(states, 0.0);
        if (each.source[span] >= 0)
          for (int64_t i = 0; i < states; ++i) state[i] = expected_pool[slot(each.source[span]) + i];
        for (int64_t piece = each.first_piece[span]; piece < each.first_piece[span + 1]; ++piece) {
          for (int64_t row = each.first[piece]; row < each.end[piece]; ++row) {
            const int64_t at = row * heads + head, from = (row * groups + head / (heads / groups)) * states;
            const double in = static_cast<double>(x[at * width + channel]) * time[at];
            double sum = 0;
            for (int64_t i = 0; i < states; ++i) {
              state[i] = decay[at] * state[i] + in * b[from + i];
              sum += state[i] * c[from + i];
            }
            expected[at * width + channel] = sum;
          }
          for (int64_t i = 0; i < states; ++i) expected_pool[slot(each.target[piece]) + i] = state[i];
        }
      }
  scan_state_space({x.data(), decay.data(), time.data(), b.data(), c.data(), pool.data(), out.data(), heads, width,
                    groups, states},
                   each.spans(), variant, 2);
  return alike(out, expected, "state space output") && alike(pool, expected_pool, "state space state");
}

inline bool convolves(const ScanVariant& variant, unsigned seed) {
  Random random{std::mt19937(seed)};
  const RandomSpans each(random);
  const int64_t channels = random.of({16, 48, 144}), kernel = random.from(1, 4), before = kernel - 1, rows = each.rows;
  const int64_t stride = channels + random.of({0, 16});
  const bool silu = random.one_in(2);
  const std::vector<float> x = random_numbers(random, rows * stride, 1.0f);
  const std::vector<float> weight = random_numbers(random, kernel * channels, 1.0f);
  const std::vector<float> bias = random_numbers(random, channels, 1.0f);
  std::vector<float> pool = random_numbers(random, each.slots * channels * before, 1.0f);
  std::vector<double> expected_pool(pool.begin(), pool.end()), expected(rows * channels);
  std::vector<float> out(expected.size(), std::nanf(""));
  for (size_t span = 0; span < each.source.size(); ++span)
    for (int64_t channel = 0; channel < channels; ++channel) {
      const auto slot = [&](int64_t number) { return (number * channels + channel) * before; };
      std::vector<double> window(kernel, 0.0);
      if (each.source[span] >= 0)
        for (int64_t i = 0; i < before; ++i) window[i] = expected_pool[slot(each.source[span]) + i];
      for (int64_t piece = each.first_piece[span]; piece < each.first_piece[span + 1]; ++piece) {
        for (int64_t row = each.first[piece]; row < each.end[piece]; ++row) {
          window[before] = x[row * stride + channel];
          double sum = bias[channel];
          for (int64_t i = 0; i < kernel; ++i) sum += weight[i * channels + channel] * window[i];
          expected[row * channels + channel] = silu ? sum / (1.0 + std::exp(-sum)) : sum;
          for (int64_t i = 0; i < before; ++i) window[i] = window[i + 1];
        }
        for (int64_t i = 0; i < before; ++i) expected_pool[slot(each.target[piece]) + i] = window[i];
      }
    }
  convolve({x.data(), weight.data(), bias.data(), pool.data(), out.data(), channels, kernel, stride, false, silu},
           each.spans(), variant, 2);
  return alike(out, expected, "convolution") && alike(pool, expected_pool, "convolution state");
}

// The number of wrong scans, over all versions that run here.
inline int scan_failures(int scans, unsigned first) {
  int failures = 0;
  for (const char* name : {"portable", "avx2", "avx512"}) {
    const ScanVariant* variant = nullptr;
    try {
      variant = &scan_by_name(name);
    } catch (const std::invalid_argument&) {
      continue;  // not on this processor
    }
    int failed = 0;
    for (int i = 0; i < scans; ++i) {
      failed += !scans_delta(*variant, first + static_cast<unsigned>(i));
      failed += !scans_state_space(*variant, first + static_cast<unsigned>(i));
      failed += !convolves(*variant, first + static_cast<unsigned>(i));
    }
    std::printf("%s: %d scans, %d wrong\n", name, 3 * scans, failed);
    failures += failed;
  }
  return failures;
}

}  // namespace inlay
