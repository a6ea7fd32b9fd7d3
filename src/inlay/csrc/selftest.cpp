// The kernel's own test, without Python: every instruction set against plain loops, on random plans.
//
//   selftest [plans] [first seed]
//
// Made for the sanitizers (make asan, make tsan) and for machines where no PyTorch runs. All memory has exactly the
// size that the kernel may touch and is NaN where nothing was stored, so that a stray read shows without them too.
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>

#include "attend.h"
#include "parallel.h"
#include "selftest_cases.h"
#include "selftest_choose.h"
#include "selftest_linear.h"
#include "selftest_scan.h"

using namespace inlay;

namespace {

// The reference result of one row and head, in double.
class Naive {
 public:
  Naive(const Pass& pass, int head, int row, int64_t position)
      : pass_(pass), options_(pass.layer.options), head_(head), row_(row), position_(position),
        sums_(pass.layer.dims, 0.0) {}

  void see(const Stretch& stretch) {
    const std::vector<double> query = turned(stretch.shift);
    const int kv_head = head_ / (pass_.layer.heads / pass_.layer.kv_heads), dims = pass_.layer.dims;
    for (int32_t i = 0; i < stretch.length; ++i) {
      const int64_t slot = stretch.slot + i, distance = position_ - stretch.seen_at(i);
      if ((options_.window && distance >= options_.window) || (stretch.masked && distance < 0)) continue;
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
  void add(double score) {  // sets weight_, and rescales the sums so far
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

// Checks some hundred rows and heads; every output must be a number.
double worst(const Asked& asked, const Pass& pass, int skip) {
  double most = 0;
  int turn = 0;
  for (int row = 0; row < asked.row_count(); ++row)
    for (int head = 0; head < pass.layer.heads; ++head) {
      for (int d = 0; d < pass.layer.dims; ++d)
        if (!std::isfinite(pass.output.get(head, row, d))) return std::numeric_limits<double>::infinity();
      if (turn++ % skip) continue;
      Naive naive(pass, head, row, asked.positions[row]);
      for (size_t b = 0; b + 1 < asked.row_first.size(); ++b) {
        const auto begin = asked.rows.begin();
        if (!std::binary_search(begin + asked.row_first[b], begin + asked.row_first[b + 1], row)) continue;
        for (int64_t s = asked.stretch_first[b]; s < asked.stretch_first[b + 1]; ++s) naive.see(asked.stretches[s]);
      }
      const std::vector<double> expected = naive.result();
      for (int d = 0; d < pass.layer.dims; ++d)
        most = std::max(most, std::abs(pass.output.get(head, row, d) - expected[d]));
    }
  return most;
}

// Advances by one token.
void step(Asked& asked) {
  for (int64_t stretch : asked.growing) ++asked.stretches[stretch].length;
  for (int64_t& position : asked.positions) ++position;
  for (int64_t& slot : asked.own_slots) ++slot;
}

bool check(const Variant& variant, unsigned seed) {
  Random random{std::mt19937(seed)};
  const Layer layer = layer_of(random);
  const bool decode = random.one_in(3);
  const int steps = decode ? random.from(1, 4) : 1, threads = random.of({1, 2, 2, 5});
  Asked asked = ask(random, decode, layer.options.frequencies != nullptr, decode ? steps : 0);
  Pass pass(random, asked, layer);
  Attention attention(Plan(asked.tables()), variant, threads);
  Workspace workspace(random.of({1, 4096, 1 << 16, 1 << 26}));  // small values make slices of heads and of rows
  const double allowed = layer.fresh == Type::bf16 ? 4e-2 : 2e-4;
  for (int done = 0; done < steps; ++done) {
    if (done) {
      attention.advance();
      step(asked);
    }
    pass.draw(random, asked.row_count());
    attention.attend(pass.call(asked.slots), workspace);
    const double off = worst(asked, pass, asked.row_count() * layer.heads / 60 + 1);
    if (off <= allowed) continue;
    std::printf("%s: seed %u, step %d: off by %g, allowed %g (%d rows, %d of %d heads of %d, %s pool, %d threads)\n",
                variant.name, seed, done, off, allowed, asked.row_count(), layer.kv_heads, layer.heads, layer.dims,
                layer.stored == Type::f32 ? "fp32" : layer.stored == Type::i8 ? "int8" : "bf16", threads);
    return false;
  }
  return true;
}

// Invalid tables must be rejected before they are used.
bool refuses_nonsense(unsigned seed) {
  Random random{std::mt19937(seed)};
  Asked asked = ask(random, false, true, 0);
  const int64_t numbers[] = {-1, std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                             int64_t{1} << 32, (int64_t{1} << 32) + 1};
  const int64_t nonsense = numbers[random.from(0, 4)];
  Tables tables = asked.tables();
  const bool negative_is_fine = nonsense == -1;  // of positions and shifts
  switch (random.from(negative_is_fine ? 1 : 0, 6)) {
    case 0: asked.positions.back() = nonsense; break;
    case 1: asked.own_slots.back() = nonsense; break;
    case 2: asked.rows.back() = nonsense; break;
    case 3: asked.row_first.back() = nonsense; break;
    case 4: asked.stretch_first.back() = nonsense; break;
    case 5: asked.table[tables.stretch_count * random.of({0, 1, 4})] = nonsense; break;
    case 6: asked.table[tables.stretch_count * (negative_is_fine ? 0 : random.of({2, 3}))] = nonsense; break;
  }
  const Layer layer = layer_of(random);
  Asked empty;
  empty.slots = asked.slots;
  empty.positions = asked.positions;
  Pass pass(random, empty, layer);
  Workspace workspace(1 << 20);
  try {
    Attention attention(Plan(tables), variant_by_name(""), 1);
    attention.attend(pass.call(asked.slots), workspace);
  } catch (const std::invalid_argument&) {
    return true;
  }
  std::printf("nonsense of seed %u was not refused\n", seed);
  return false;
}

// Every row gets a token of its vocabulary, the same from every version and any number of threads.
bool chooses_alike(const Variant& variant, unsigned seed) {
  Random random{std::mt19937(seed)};
  const Rows rows(random);
  const std::vector<int64_t> expected = rows.chosen(variant_by_name("portable"), 1);
  const bool valid = std::find(expected.begin(), expected.end(), -2) == expected.end();
  if (valid && rows.chosen(variant, random.of({1, 2, 5})) == expected) return true;
  std::printf("%s: rows of seed %u get other tokens\n", variant.name, seed);
  return false;
}

// The processor time of this thread so far, in seconds.
double busy_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// A thread that waits for another one leaves its core to others, however long that takes.
bool waits_idle() {
  constexpr double kWait = 0.5;
  double busy = 0.0;
  run_parallel(2, [&](Team& team, int thread) {
    if (thread == 1) std::this_thread::sleep_for(std::chrono::duration<double>(kWait));
    const double before = busy_seconds();
    team.barrier();
    if (thread == 0) busy = busy_seconds() - before;
  });
  if (busy < 0.2 * kWait) return true;
  std::printf("a thread that waited %.1f s was busy for %.2f s\n", kWait, busy);
  return false;
}

// Every thread of a crew runs each region once, in their order, also after an exception and if two threads ask for one.
bool runs_awake() {
  constexpr int kRegions = 2000, kThreads = 3;
  const auto lead = [](bool* right) {
    for (const bool fails : {false, true}) {
      int caught = 0;
      std::atomic<int> entered{0};
      std::atomic<bool> in_order{true};
      try {
        run_awake(kThreads, [&] {
          for (int region = 0; region < kRegions; ++region) {
            const int threads = 1 + region % kThreads;
            run_parallel(threads, [&](Team& team, int) {
              const int before = entered.load();
              team.barrier();
              entered.fetch_add(1);
              if (before != region * kThreads) in_order = false;
            });
            if (entered.exchange((region + 1) * kThreads) != region * kThreads + threads) in_order = false;
          }
          run_awake(kThreads, [] { run_parallel(kThreads, [](Team& team, int) { team.barrier(); }); });
          if (fails) throw std::runtime_error("on purpose");
        });
      } catch (const std::runtime_error&) {
        ++caught;
      }
      *right = *right && in_order && caught == fails && entered == kRegions * kThreads;
    }
  };
  bool here = true, there = true;
  std::thread beside(lead, &there);
  lead(&here);
  beside.join();
  if (!here || !there) std::printf("regions of a crew did not run once on each of their threads\n");
  return here && there;
}

// A thread that has no region to run leaves its core to others, too.
bool follows_idle() {
  static constexpr double kWait = 0.5;
  const std::clock_t before = std::clock();  // the processor time of all threads
  run_awake(2, [] { std::this_thread::sleep_for(std::chrono::duration<double>(kWait)); });
  const double busy = static_cast<double>(std::clock() - before) / CLOCKS_PER_SEC;
  if (busy < 0.2 * kWait) return true;
  std::printf("a crew without work for %.1f s was busy for %.2f s\n", kWait, busy);
  return false;
}

}  // namespace

int main(int argc, char** argv) {
  const int plans = argc > 1 ? std::atoi(argv[1]) : 300;
  const unsigned first = argc > 2 ? static_cast<unsigned>(std::atoi(argv[2])) : 1;
  const char* names[8];
  const int count = variant_names(names, 8);
  std::printf("threads of: %s\n", threading());
  int failures = !waits_idle() + !follows_idle() + !runs_awake() + scan_failures(plans, first) + linear_failures(plans, first);
  for (int i = 0; i < plans; ++i) failures += !refuses_nonsense(first + static_cast<unsigned>(i));
  for (int n = 0; n < count; ++n) {
    const Variant& variant = variant_by_name(names[n]);
    int failed = 0;
    for (int i = 0; i < plans; ++i) failed += !chooses_alike(variant, first + static_cast<unsigned>(i));
    auto half = [&](int begin, int* bad) {  // two callers at once, like two engines in one process
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
