// The kernel's own test, without Python: every instruction set against plain loops, on random plans.
//
//   selftest [plans] [first seed]
//
// Made for the sanitizers (make asan, make tsan) and for machines where no PyTorch runs. All memory has exactly the
// size that the kernel may touch and is NaN where nothing was stored, so that a stray read shows without them too.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

#include "attend.h"
#include "parallel.h"
#include "selftest_cases.h"

using namespace inlay;

namespace {

// One row and head by the book, in double.
class Naive {
 public:
  Naive(const Pass& pass, int head, int row, int64_t position)
      : pass_(pass), options_(pass.layer.options), head_(head), row_(row), position_(position),
        sums_(pass.layer.dims, 0.0) {}

  void see(const PieceIn& piece) {
    const std::vector<double> query = turned(piece.shift);
    const int kv_head = head_ / (pass_.layer.heads / pass_.layer.kv_heads), dims = pass_.layer.dims;
    for (int64_t i = 0; i < piece.length; ++i) {
      const int64_t slot = piece.first + i, distance = position_ - (piece.start + piece.shift + i);
      if (options_.window && distance >= options_.window) continue;
      double score = 0;
      for (int d = 0; d < dims; ++d) score += query[d] * pass_.keys.get(kv_head, slot, d);
      score *= options_.scale;
      if (options_.softcap) score = options_.softcap * std::tanh(score / options_.softcap);
      if (options_.slopes) score -= options_.slopes[head_] * static_cast<double>(distance);
      add(score);
      for (int d = 0; d < dims; ++d) sums_[d] += weight_ * pass_.values.get(kv_head, slot, d);
    }
  }
  std::vector<double> result() {
    if (options_.sinks) add(options_.sinks[head_]);
    for (double& sum : sums_) sum /= total_;
    return sums_;
  }

 private:
  void add(double score) {  // sets weight_, and rescales what was summed before
    const double top = std::max(top_, score), decay = std::exp(top_ - top);
    for (double& sum : sums_) sum *= decay;
    weight_ = std::exp(score - top);
    total_ = total_ * decay + weight_;
    top_ = top;
  }
  std::vector<double> turned(int64_t shift) const {
    std::vector<double> query;
    for (int d = 0; d < pass_.layer.dims; ++d) query.push_back(pass_.query.get(head_, row_, d));
    const int half = options_.rotated / 2;
    for (int i = 0; shift && i < half; ++i) {
      const double angle = -static_cast<double>(shift) * options_.frequencies[i];
      double& a = query[options_.interleaved ? 2 * i : i];
      double& b = query[options_.interleaved ? 2 * i + 1 : i + half];
      const double left = a, right = b;
      a = left * std::cos(angle) - right * std::sin(angle);
      b = right * std::cos(angle) + left * std::sin(angle);
    }
    return query;
  }

  const Pass& pass_;
  const Options& options_;
  const int head_, row_;
  const int64_t position_;
  std::vector<double> sums_;
  double top_ = -1e300, total_ = 0, weight_ = 0;
};

// Of some hundred rows and heads; every output must be a number.
double worst(const Asked& asked, const Pass& pass, int skip) {
  double most = 0;
  int row = 0, turn = 0;
  for (const SpanIn& span : asked.spans)
    for (int64_t i = 0; i < span.length; ++i, ++row)
      for (int head = 0; head < pass.layer.heads; ++head) {
        for (int d = 0; d < pass.layer.dims; ++d)
          if (!std::isfinite(pass.output.get(head, row, d))) return std::numeric_limits<double>::infinity();
        if (turn++ % skip) continue;
        Naive naive(pass, head, row, span.start + i);
        for (int64_t p = span.piece_begin; p < span.piece_end; ++p) naive.see(asked.pieces[p]);
        int64_t seen = 0;
        for (int64_t r = span.own_begin; r < span.own_end && seen <= i; seen += asked.own[r++].length)
          naive.see({asked.own[r].first, std::min(asked.own[r].length, i + 1 - seen), span.start + seen, 0});
        const std::vector<double> expected = naive.result();
        for (int d = 0; d < pass.layer.dims; ++d)
          most = std::max(most, std::abs(pass.output.get(head, row, d) - expected[d]));
      }
  return most;
}

// One token further on: what was its own becomes context.
void step(Asked& asked) {
  std::vector<PieceIn> pieces;
  for (SpanIn& span : asked.spans) {
    const auto begin = static_cast<int64_t>(pieces.size());
    for (int64_t p = span.piece_begin; p < span.piece_end; ++p) pieces.push_back(asked.pieces[p]);
    RunIn& own = asked.own[span.own_begin];
    pieces.push_back({own.first++, 1, span.start++, 0});
    span.piece_begin = begin;
    span.piece_end = static_cast<int64_t>(pieces.size());
  }
  asked.pieces.swap(pieces);
}

bool check(const Variant& variant, unsigned seed) {
  Random random{std::mt19937(seed)};
  const Layer layer = layer_of(random);
  const bool decode = random.one_in(3), share = !random.one_in(4);
  const int steps = decode ? random.from(1, 4) : 1, threads = random.of({1, 2, 2, 5});
  Asked asked = ask(random, decode, layer.options.frequencies != nullptr, decode ? steps : 0);
  Pass pass(random, asked, layer);
  Attention attention(Plan(asked.spans, asked.pieces, asked.own, share), variant, threads);
  const double allowed = layer.fresh == Type::bf16 ? 4e-2 : 2e-4;
  for (int done = 0; done < steps; ++done) {
    if (done) {
      attention.advance();
      step(asked);
    }
    pass.draw(random, asked.rows);
    attention.attend(pass.call(asked.slots));
    const double off = worst(asked, pass, asked.rows * layer.heads / 60 + 1);
    if (off <= allowed) continue;
    std::printf("%s: seed %u, step %d: off by %g, allowed %g (%d rows, %d of %d heads of %d, %s pool, %d threads)\n",
                variant.name, seed, done, off, allowed, asked.rows, layer.kv_heads, layer.heads, layer.dims,
                layer.stored == Type::f32 ? "fp32" : "bf16", threads);
    return false;
  }
  return true;
}

// Tables of nonsense are refused, and neither read nor believed.
bool refuses_nonsense(unsigned seed) {
  Random random{std::mt19937(seed)};
  Asked asked = ask(random, false, true, 0);
  asked.pieces.push_back({0, 1, 0, 0});
  ++asked.spans.back().piece_end;
  const int64_t numbers[] = {-1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                             int64_t{1} << 32, (int64_t{1} << 32) + 1};
  const int64_t nonsense = numbers[random.from(0, 4)];
  auto last = [](auto& table, int number) { return reinterpret_cast<int64_t*>(&table.back()) + number; };
  const bool negative_is_fine = nonsense == -1;  // of starts and shifts
  switch (random.from(0, 2)) {
    case 0: *last(asked.spans, random.from(negative_is_fine ? 1 : 0, 5)) = nonsense; break;
    case 1: *last(asked.pieces, random.from(0, negative_is_fine ? 1 : 3)) = nonsense; break;
    case 2: *last(asked.own, 0) = nonsense; break;  // more slots than tokens are fine
  }
  const Layer layer = layer_of(random);
  Pass pass(random, Asked{{}, {}, {}, asked.slots, asked.rows}, layer);
  try {
    Attention attention(Plan(asked.spans, asked.pieces, asked.own, true), variant_by_name(nullptr), 1);
    attention.attend(pass.call(asked.slots));
  } catch (const std::invalid_argument&) {
    return true;
  }
  std::printf("nonsense of seed %u was not refused\n", seed);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const int plans = argc > 1 ? std::atoi(argv[1]) : 300;
  const unsigned first = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  const char* names[8];
  const int count = variant_names(names, 8);
  std::printf("threads of: %s\n", threading());
  int failures = 0;
  for (int i = 0; i < plans; ++i) failures += !refuses_nonsense(first + static_cast<unsigned>(i));
  for (int n = 0; n < count; ++n) {
    const Variant& variant = variant_by_name(names[n]);
    int failed = 0;
    auto half = [&](int begin, int* bad) {  // two callers at once, as two engines of one process are
      for (int i = begin; i < plans; i += 2) *bad += !check(variant, first + static_cast<unsigned>(i));
    };
    int other = 0;
    std::thread beside(half, 1, &other);
    half(0, &failed);
    beside.join();
    std::printf("%s: %d plans, %d wrong\n", variant.name, plans, failed + other);
    failures += failed + other;
  }
  return failures == 0 ? 0 : 1;
}
