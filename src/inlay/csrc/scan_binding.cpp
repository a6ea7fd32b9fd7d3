#include "scan_binding.h"

#include <nanobind/stl/string.h>

#include "binding.h"
#include "scan.h"

namespace nb = nanobind;

namespace inlay {
namespace {

using Numbers = Column<const int64_t>;

const float* numbers(uint64_t address) { return reinterpret_cast<const float*>(address); }

// All rows and slots lie within the tensors.
Spans spans_of(const Numbers& first_piece, const Numbers& source, const Numbers& first, const Numbers& end,
               const Numbers& target, int64_t rows, int64_t slots) {
  const auto count = static_cast<int64_t>(source.shape(0)), pieces = static_cast<int64_t>(first.shape(0));
  require(static_cast<int64_t>(first_piece.shape(0)) == count + 1 && end.shape(0) == first.shape(0) &&
              target.shape(0) == first.shape(0),
          "one of each for every span or piece");
  require(first_piece(0) == 0 && first_piece(count) == pieces, "every piece belongs to a span");
  for (int64_t span = 0; span < count; ++span)
    require(first_piece(span) <= first_piece(span + 1) && source(span) >= -1 && source(span) < slots,
            "a span's pieces and its slot");
  for (int64_t piece = 0; piece < pieces; ++piece)
    require(0 <= first(piece) && first(piece) <= end(piece) && end(piece) <= rows && 0 <= target(piece) &&
                target(piece) < slots,
            "a piece's rows and its slot");
  return {count, first_piece.data(), source.data(), first.data(), end.data(), target.data()};
}

}  // namespace

void bind_scan(nb::module_& m) {
  m.def("scan_delta",
        [](uint64_t query, uint64_t key, uint64_t value, uint64_t decay, uint64_t beta, uint64_t pool, uint64_t out,
           int64_t rows, int64_t slots, int64_t key_heads, int64_t value_heads, int64_t key_width, int64_t value_width,
           int64_t decays, const Numbers& first_piece, const Numbers& source, const Numbers& first, const Numbers& end,
           const Numbers& target, const std::string& instruction_set, int threads) {
          require(key_heads > 0 && value_heads % key_heads == 0, "value_heads must be a multiple of key_heads");
          require(key_width > 0 && key_width <= kMostKeyWidth && key_width % 4 == 0, "key_width must be a multiple of 4, at most 256");
          require(value_width > 0 && value_width % kScanLanes == 0, "value_width must be a multiple of 16");
          require(decays == 1 || decays == key_width, "decays must be 1 or key_width");
          const Spans spans = spans_of(first_piece, source, first, end, target, rows, slots);
          const DeltaScan scan{numbers(query),
                               numbers(key),
                               numbers(value),
                               numbers(decay),
                               numbers(beta),
                               reinterpret_cast<float*>(pool),
                               reinterpret_cast<float*>(out),
                               key_heads,
                               value_heads,
                               key_width,
                               value_width,
                               decays};
          const ScanVariant& variant = scan_by_name(instruction_set);
          nb::gil_scoped_release released;
          scan_delta(scan, spans, variant, threads);
        },
        "The gated delta rule over spans of rows.", nb::arg("query"), nb::arg("key"), nb::arg("value"),
        nb::arg("decay"), nb::arg("beta"), nb::arg("pool"), nb::arg("out"), nb::arg("rows"), nb::arg("slots"),
        nb::arg("key_heads"), nb::arg("value_heads"), nb::arg("key_width"), nb::arg("value_width"), nb::arg("decays"),
        nb::arg("first_piece"), nb::arg("source"), nb::arg("first"), nb::arg("end"), nb::arg("target"),
        nb::arg("instruction_set"), nb::arg("threads"));
  m.def("scan_state_space",
        [](uint64_t x, uint64_t decay, uint64_t time, uint64_t b, uint64_t c, uint64_t pool, uint64_t out, int64_t rows,
           int64_t slots, int64_t heads, int64_t width, int64_t groups, int64_t state_width, const Numbers& first_piece,
           const Numbers& source, const Numbers& first, const Numbers& end, const Numbers& target,
           const std::string& instruction_set, int threads) {
          require(groups > 0 && heads % groups == 0, "heads must be a multiple of groups");
          require(width > 0 && width % kScanChannels == 0, "width must be a multiple of 4");
          require(state_width > 0 && state_width % kScanLanes == 0, "state_width must be a multiple of 16");
          const Spans spans = spans_of(first_piece, source, first, end, target, rows, slots);
          const StateSpaceScan scan{numbers(x),
                                    numbers(decay),
                                    numbers(time),
                                    numbers(b),
                                    numbers(c),
                                    reinterpret_cast<float*>(pool),
                                    reinterpret_cast<float*>(out),
                                    heads,
                                    width,
                                    groups,
                                    state_width};
          const ScanVariant& variant = scan_by_name(instruction_set);
          nb::gil_scoped_release released;
          scan_state_space(scan, spans, variant, threads);
        },
        "The state space of Mamba-2 over spans of rows.", nb::arg("x"), nb::arg("decay"), nb::arg("time"),
        nb::arg("b"), nb::arg("c"), nb::arg("pool"), nb::arg("out"), nb::arg("rows"), nb::arg("slots"),
        nb::arg("heads"), nb::arg("width"), nb::arg("groups"), nb::arg("state_width"), nb::arg("first_piece"),
        nb::arg("source"), nb::arg("first"), nb::arg("end"), nb::arg("target"), nb::arg("instruction_set"),
        nb::arg("threads"));
  m.def("convolve",
        [](uint64_t x, uint64_t weight, uint64_t bias, uint64_t pool, uint64_t out, int64_t rows, int64_t slots,
           int64_t channels, int64_t kernel, int64_t stride, bool bf16, bool silu, const Numbers& first_piece,
           const Numbers& source, const Numbers& first, const Numbers& end, const Numbers& target,
           const std::string& instruction_set, int threads) {
          require(channels > 0 && channels % kScanLanes == 0 && stride >= channels, "channels must be a multiple of 16, and stride no less");
          require(kernel > 0 && kernel <= kMostKernel, "kernel must be 1 to 8");
          const Spans spans = spans_of(first_piece, source, first, end, target, rows, slots);
          const Convolution convolution{reinterpret_cast<const void*>(x),
                                        numbers(weight),
                                        numbers(bias),
                                        reinterpret_cast<void*>(pool),
                                        reinterpret_cast<void*>(out),
                                        channels,
                                        kernel,
                                        stride,
                                        bf16,
                                        silu};
          const ScanVariant& variant = scan_by_name(instruction_set);
          nb::gil_scoped_release released;
          convolve(convolution, spans, variant, threads);
        },
        "The causal convolution over spans of rows.", nb::arg("x"), nb::arg("weight"), nb::arg("bias"),
        nb::arg("pool"), nb::arg("out"), nb::arg("rows"), nb::arg("slots"), nb::arg("channels"), nb::arg("kernel"),
        nb::arg("stride"), nb::arg("bf16"), nb::arg("silu"), nb::arg("first_piece"), nb::arg("source"),
        nb::arg("first"), nb::arg("end"), nb::arg("target"), nb::arg("instruction_set"), nb::arg("threads"));
}

}  // namespace inlay
