// Random rows of logits for selftest.cpp: every instruction set must choose like the portable one.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "choose.h"
#include "selftest_cases.h"

namespace inlay {

// Rows of one pass, in memory that ends with the last number.
class Rows {
 public:
  explicit Rows(Random& random) : count_(random.from(1, 6)), width_(random.of({1, 7, 300, 4096, 5000, 40003})) {
    const float scale = random.of({0, 1, 1, 1, 20});
    const bool halves = random.one_in(3);
    logits_.resize(count_ * width_ * (halves ? 2 : 4));
    for (int64_t i = 0; i < count_ * width_; ++i) {
      const float logit = random.one_in(50) ? -std::numeric_limits<float>::infinity() : random.normal() * scale;
      const uint16_t half = to_bf16(logit);
      halves ? std::memcpy(logits_.data() + 2 * i, &half, 2) : std::memcpy(logits_.data() + 4 * i, &logit, 4);
    }
    type_ = halves ? Type::bf16 : Type::f32;
    for (int row = 0; row < count_; ++row) {
      draws_.push_back(uint64_t{random.engine()} << 32 | random.engine());
      inverse_.push_back(random.of({0, 1, 1, 3}) * 0.7f);
      min_p_.push_back(random.one_in(3) ? 0.02f : 0.0f);
      top_k_.push_back(random.of({0, 0, 1, 40, 3000}));
      top_p_.push_back(random.of({1, 5, 95, 100}) / 100.0);
      penalties_.insert(penalties_.end(), {1.2f, 0.5f, -0.3f});
      for (int some = random.from(0, 3); some > 0; --some) {
        ids_.push_back(random.from(-1, width_));
        numbers_.push_back(static_cast<float>(some));
      }
      first_.push_back(static_cast<int64_t>(ids_.size()));
      guided_.push_back(random.one_in(4) ? row : -1);
    }
    words_ = (width_ + 31) / 32;
    for (int64_t i = 0; i < count_ * words_; ++i) bits_.push_back(static_cast<uint32_t>(random.engine()));
  }

  std::vector<int64_t> chosen(const Variant& variant, int threads) const {
    const Lists lists{first_.data(), ids_.data()};
    const RowParams asked{draws_.data(), inverse_.data(), min_p_.data(),  top_k_.data(),  top_p_.data(),
                          penalties_.data(), lists,       lists,          numbers_.data(), lists,
                          numbers_.data(), guided_.data(), bits_.data(),  words_};
    std::vector<int64_t> tokens(count_);
    std::vector<float> raw(count_), best(count_);
    choose({logits_.data(), type_, count_, width_, width_}, asked, {tokens.data(), raw.data(), best.data()},
           variant.choose_row, threads);
    for (int row = 0; row < count_; ++row)
      if (std::isfinite(best[row]) && (tokens[row] < 0 || tokens[row] >= width_)) tokens[row] = -2;  // never right
    return tokens;
  }

 private:
  int64_t count_;
  int width_;
  Type type_;
  std::vector<char> logits_;
  std::vector<uint64_t> draws_;
  std::vector<float> inverse_, min_p_, penalties_, numbers_;
  std::vector<int64_t> top_k_, ids_, first_{0}, guided_;
  std::vector<double> top_p_;
  std::vector<uint32_t> bits_;
  int64_t words_;
};

}  // namespace inlay
