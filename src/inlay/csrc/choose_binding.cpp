#include "choose_binding.h"

#include <nanobind/stl/string.h>

#include <initializer_list>

#include "binding.h"
#include "choose.h"
#include "kernel.h"

namespace nb = nanobind;

namespace inlay {
namespace {

Lists lists_of(const Column<const int64_t>& first, const Column<const int64_t>& ids, int64_t rows) {
  require(static_cast<int64_t>(first.shape(0)) == rows + 1 && first(0) == 0,
          "a table of lists must have one border more than rows, from 0");
  for (int64_t row = 0; row < rows; ++row) require(first(row) <= first(row + 1), "the borders of lists must not fall");
  require(first(rows) == static_cast<int64_t>(ids.shape(0)), "the last border of lists must be the number of tokens");
  return {first.data(), ids.data()};
}

void choose_tokens(uint64_t address, bool bf16, int64_t stride, const Column<const uint64_t>& draws,
                   const Column<const float>& inverse, const Column<const float>& min_p,
                   const Column<const int64_t>& top_k, const Column<const double>& top_p,
                   const Table<const float>& penalties, const Column<const int64_t>& forbidden_first,
                   const Column<const int64_t>& forbidden, const Column<const int64_t>& biased_first,
                   const Column<const int64_t>& biased, const Column<const float>& biases,
                   const Column<const int64_t>& seen_first, const Column<const int64_t>& seen,
                   const Column<const float>& counts, const Column<const int64_t>& guided,
                   const Table<const uint32_t>& bits, int64_t vocabulary, const Column<int64_t>& tokens,
                   const Column<float>& raw, const Column<float>& best, const std::string& instruction_set,
                   int threads) {
  const size_t rows = tokens.shape(0);
  for (const size_t length : {draws.shape(0), inverse.shape(0), min_p.shape(0), top_k.shape(0), top_p.shape(0),
                              penalties.shape(0), guided.shape(0), raw.shape(0), best.shape(0)})
    require(length == rows, "each column must have one number for every row");
  const auto count = static_cast<int64_t>(rows), words = static_cast<int64_t>(bits.shape(1));
  require(penalties.shape(1) == 3 && biases.shape(0) == biased.shape(0) && counts.shape(0) == seen.shape(0),
          "biases and counts must have one number for each of their tokens");
  require(vocabulary > 0 && vocabulary <= (int64_t{1} << 22) && stride >= vocabulary,
          "vocabulary must be 1 to 2^22, and stride at least as much");
  for (int64_t row = 0; row < count; ++row)
    require(guided(row) < static_cast<int64_t>(bits.shape(0)) && (guided(row) < 0 || words * 32 >= vocabulary),
            "a guided row must name a row of bits, with a bit for each token");
  const RowParams asked{draws.data(),
                        inverse.data(),
                        min_p.data(),
                        top_k.data(),
                        top_p.data(),
                        penalties.data(),
                        lists_of(forbidden_first, forbidden, count),
                        lists_of(biased_first, biased, count),
                        biases.data(),
                        lists_of(seen_first, seen, count),
                        counts.data(),
                        guided.data(),
                        bits.data(),
                        words};
  const Variant& variant = variant_by_name(instruction_set);
  const Logits logits{reinterpret_cast<const char*>(address), bf16 ? Type::bf16 : Type::f32, count, vocabulary, stride};
  nb::gil_scoped_release released;
  choose(logits, asked, {tokens.data(), raw.data(), best.data()}, variant.choose_row, threads);
}

void random_bits(const Column<const uint64_t>& seeds, const Column<const uint64_t>& steps,
                 const Column<uint64_t>& bits) {
  require(seeds.shape(0) == bits.shape(0) && steps.shape(0) == bits.shape(0),
          "seeds, steps and bits must have one number for each draw");
  philox(seeds.data(), steps.data(), bits.data(), static_cast<int64_t>(bits.shape(0)));
}

}  // namespace

void bind_choose(nb::module_& m) {
  m.def("choose", &choose_tokens, "A token for every row of logits.", nb::arg("address"), nb::arg("bf16"),
        nb::arg("stride"), nb::arg("draws"), nb::arg("inverse"), nb::arg("min_p"), nb::arg("top_k"), nb::arg("top_p"),
        nb::arg("penalties"), nb::arg("forbidden_first"), nb::arg("forbidden"), nb::arg("biased_first"),
        nb::arg("biased"), nb::arg("biases"), nb::arg("seen_first"), nb::arg("seen"), nb::arg("counts"),
        nb::arg("guided"), nb::arg("bits"), nb::arg("vocabulary"), nb::arg("tokens"), nb::arg("raw"), nb::arg("best"),
        nb::arg("instruction_set"), nb::arg("threads"));
  m.def("philox", &random_bits, "64 random bits for each seed and step.", nb::arg("seeds"), nb::arg("steps"),
        nb::arg("bits"));
}

}  // namespace inlay
