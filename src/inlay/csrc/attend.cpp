#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>

#include "parallel.h"

namespace inlay {
namespace {

constexpr int64_t kShortestSplit = 256;  // keys: below this, merging costs more than an idle thread
constexpr int kTasksPerThread = 4;       // with fewer, the last task is often waited for

// Cost of one key for one lane of the wide kernel is 1. A key of the narrow kernel is read from memory, whatever the
// lanes; the fixed cost of a task is that of loading queries and writing results.
constexpr double kNarrowKey = 24, kFixed = 300;

}  // namespace

Attention::Attention(Plan plan, const Variant& variant, int threads)
    : plan_(std::move(plan)), variant_(variant), threads_(std::max(1, threads)) {
  for (const Block& block : plan_.blocks())
    for (const Stretch& stretch : block.stretches)
      if (stretch.shift != 0) shifts_.push_back(stretch.shift);
  std::sort(shifts_.begin(), shifts_.end());
  shifts_.erase(std::unique(shifts_.begin(), shifts_.end()), shifts_.end());
  for (int i = 0; i < threads_; ++i) scratch_.push_back(std::make_unique<Scratch>());
}

void Attention::attend(const Call& call) {
  check(call);
  share_out(call);
  find_turns(call);
  const size_t floats = static_cast<size_t>(partial_lanes_) * (call.head_dim + 1);
  float* memory = reinterpret_cast<float*>(partials_.take(floats * sizeof(float) + 64));
  const Partials partials{memory, memory + static_cast<size_t>(partial_lanes_) * call.head_dim};
  const Turns turns{shifts_.data(), static_cast<int>(shifts_.size()), cos_.data(), sin_.data(),
                    call.options.rotated / 2};
  const auto rows = static_cast<int64_t>(plan_.positions().size());
  std::atomic<size_t> next_task{0};
  std::atomic<int64_t> next_merge{0};
  const auto merges = static_cast<int64_t>(merges_.size()) * call.kv_heads;
  std::atomic<bool> out_of_memory{false};
  run_parallel(threads_, [&](Team& team, int thread) {
    write(call, rows * thread / team.threads(), rows * (thread + 1) / team.threads());
    team.barrier();
    try {
      for (size_t t; (t = next_task.fetch_add(1, std::memory_order_relaxed)) < tasks_.size();)
        variant_.run(call, plan_, turns, tasks_[t], narrow_[tasks_[t].block], partials, *scratch_[thread]);
    } catch (const std::bad_alloc&) {
      out_of_memory = true;
    }
    team.barrier();
    constexpr int64_t kAtOnce = 16;
    std::vector<int64_t> lanes;
    for (int64_t m; (m = next_merge.fetch_add(kAtOnce, std::memory_order_relaxed)) < merges;)
      for (int64_t item = m; item < std::min(m + kAtOnce, merges); ++item) merge(call, partials, item, lanes);
  });
  if (out_of_memory) throw std::bad_alloc();
}

void Attention::check(const Call& call) const {
  if (call.kv_heads < 1 || call.heads % call.kv_heads) throw std::invalid_argument("heads must be a multiple of KV heads");
  if (call.head_dim < 1 || call.head_dim > kMostDims) throw std::invalid_argument("head_dim must be 1 to 1024");
  if (!(call.options.scale >= 0)) throw std::invalid_argument("scores can't be scaled by a negative number");
  if (call.options.window < 0) throw std::invalid_argument("a window must be 1 position or more, or 0 for none");
  if (call.options.rotated > call.head_dim) throw std::invalid_argument("more dimensions are turned than a head has");
  if (!shifts_.empty() && call.options.frequencies == nullptr)
    throw std::invalid_argument("a shift needs rotary positions");
}

// Turns the plan's blocks into tasks. Done once for all layers of a shape, and again after each advance.
void Attention::share_out(const Call& call) {
  const Shape shape{plan_.version(), call.heads, call.kv_heads, call.head_dim, call.slots};
  if (shape == shape_) return;
  for (const Block& block : plan_.blocks())
    for (const Stretch& stretch : block.stretches)
      if (stretch.slot < 0 || stretch.slot + stretch.length > call.slots)
        throw std::invalid_argument("a plan reads slots that the pool does not have");
  for (int64_t slot : plan_.slots())
    if (slot < 0 || slot >= call.slots) throw std::invalid_argument("a plan writes slots that the pool does not have");
  const auto blocks = static_cast<int32_t>(plan_.blocks().size());
  tasks_.clear();
  costs_.clear();
  partial_.assign(blocks, -1);
  splits_.assign(blocks, 1);
  narrow_.resize(blocks);
  partial_lanes_ = 0;
  double total = 0;
  for (int32_t b = 0; b < blocks; ++b) {
    const Block& block = plan_.blocks()[b];
    narrow_[b] = is_narrow(block, call);
    total += cost_of(block, narrow_[b], static_cast<int64_t>(block.rows.size()) * call.group(), block.keys()) * call.kv_heads;
  }
  const double most = threads_ == 1 ? total : total / (threads_ * kTasksPerThread);
  for (int32_t b = 0; b < blocks; ++b) cut_block(call, b, most);
  std::vector<size_t> order(tasks_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return costs_[a] > costs_[b]; });
  std::vector<Task> sorted;
  for (size_t i : order) sorted.push_back(tasks_[i]);
  tasks_.swap(sorted);
  collect_merges(call);
  shape_ = shape;  // last: after bad_alloc nothing here is believed
}

bool Attention::is_narrow(const Block& block, const Call& call) const {
  const auto lanes = static_cast<int64_t>(block.rows.size()) * call.group();
  return lanes <= variant_.narrow_lanes && call.head_dim % 16 == 0;
}

double Attention::cost_of(const Block& block, bool narrow, int64_t lanes, int64_t keys) const {
  if (narrow) return kFixed + static_cast<double>(keys) * std::max<double>(kNarrowKey, 4.0 * lanes);
  const int64_t tile = variant_.wide_lanes;
  const bool causal = !block.stretches.empty() && block.stretches.back().causal;
  const int64_t filled = lanes <= tile / 2 ? tile / 2 : (lanes + tile - 1) / tile * tile;
  return kFixed * filled / 4 + static_cast<double>(filled) * static_cast<double>(keys) * (causal ? 0.6 : 1.0);
}

// One block's tasks: lanes in shares of a few tiles, and keys in splits where there would be too few tasks.
void Attention::cut_block(const Call& call, int32_t number, double most) {
  const Block& block = plan_.blocks()[number];
  const int64_t lanes = static_cast<int64_t>(block.rows.size()) * call.group(), keys = block.keys();
  int64_t share = narrow_[number] ? lanes : static_cast<int64_t>(variant_.wide_lanes) * variant_.tiles;
  while (!narrow_[number] && share > variant_.wide_lanes && cost_of(block, narrow_[number], std::min(share, lanes), keys) > most)
    share /= 2;
  const double cost = cost_of(block, narrow_[number], std::min(share, lanes), keys);
  int64_t splits = 1;
  if (cost > most) splits = std::min<int64_t>(static_cast<int64_t>(std::ceil(cost / most)), keys / kShortestSplit);
  splits = std::max<int64_t>(splits, 1);
  splits_[number] = static_cast<int32_t>(splits);
  const bool direct = block.alone && splits == 1;
  if (!direct) {
    partial_[number] = partial_lanes_;
    partial_lanes_ += lanes * splits * call.kv_heads;
  }
  for (int head = 0; head < call.kv_heads; ++head)
    for (int64_t split = 0; split < splits; ++split)
      for (int64_t lane = 0; lane < lanes; lane += share) {
        const int64_t at = direct ? -1 : partial_[number] + (head * splits + split) * lanes + lane;
        tasks_.push_back({number, head, static_cast<int32_t>(lane), static_cast<int32_t>(std::min(lanes, lane + share)),
                          static_cast<int32_t>(keys * split / splits), static_cast<int32_t>(keys * (split + 1) / splits),
                          at});
        costs_.push_back(cost / splits);
      }
}

// Which partial results make up each row.
void Attention::collect_merges(const Call& call) {
  merges_.clear();
  parts_.clear();
  const auto& member = plan_.membership();
  for (size_t row = 0; row < plan_.positions().size(); ++row) {
    const auto first = static_cast<int32_t>(parts_.size());
    for (int32_t m = member.first[row]; m < member.first[row + 1]; ++m) {
      const int32_t block = member.block[m];
      if (partial_[block] < 0) continue;
      const auto lanes = static_cast<int64_t>(plan_.blocks()[block].rows.size()) * call.group();
      for (int64_t split = 0; split < splits_[block]; ++split)
        parts_.push_back({partial_[block] + split * lanes + static_cast<int64_t>(member.place[m]) * call.group(),
                          splits_[block] * lanes});
    }
    const auto count = static_cast<int32_t>(parts_.size()) - first;
    if (count > 0) merges_.push_back({static_cast<int32_t>(row), first, count});
  }
}

// Cosines and sines of every shift, in double, as models/rope.py has them.
void Attention::find_turns(const Call& call) {
  const Options& options = call.options;
  if (shifts_.empty()) return;
  const size_t half = options.rotated / 2;
  if (frequencies_.size() == half && std::equal(frequencies_.begin(), frequencies_.end(), options.frequencies)) return;
  frequencies_.assign(options.frequencies, options.frequencies + half);
  cos_.resize(shifts_.size() * half);
  sin_.resize(shifts_.size() * half);
  for (size_t s = 0; s < shifts_.size(); ++s)
    for (size_t i = 0; i < half; ++i) {
      const double angle = -static_cast<double>(shifts_[s]) * static_cast<double>(frequencies_[i]);
      cos_[s * half + i] = static_cast<float>(std::cos(angle));
      sin_[s * half + i] = static_cast<float>(std::sin(angle));
    }
}

// Stores new keys and values of rows first … last - 1.
void Attention::write(const Call& call, int64_t first, int64_t last) const {
  auto copy = [&](const Heads& from, const Heads& to, int head, int64_t row) {
    const char* source = from.at(head, row);
    char* target = to.at(head, plan_.slots()[row]);
    if (from.type == to.type) {
      std::memcpy(target, source, static_cast<size_t>(call.head_dim) * bytes_of(to.type));
    } else if (to.type == Type::bf16) {
      for (int i = 0; i < call.head_dim; ++i)
        reinterpret_cast<uint16_t*>(target)[i] = to_bf16(reinterpret_cast<const float*>(source)[i]);
    } else {
      for (int i = 0; i < call.head_dim; ++i)
        reinterpret_cast<float*>(target)[i] = from_bf16(reinterpret_cast<const uint16_t*>(source)[i]);
    }
  };
  for (int head = 0; head < call.kv_heads; ++head)
    for (int64_t row = first; row < last; ++row) {
      copy(call.key, call.pool_keys, head, row);
      copy(call.value, call.pool_values, head, row);
    }
}

void Attention::merge(const Call& call, const Partials& partials, int64_t item, std::vector<int64_t>& lanes) const {
  const Merge& merge = merges_[item / call.kv_heads];
  const auto head = static_cast<int32_t>(item % call.kv_heads);
  lanes.clear();
  for (int32_t p = merge.first; p < merge.first + merge.count; ++p)
    lanes.push_back(parts_[p].at + head * parts_[p].head_step);
  variant_.merge(call, merge.row, head, lanes.data(), merge.count, partials);
}

}  // namespace inlay
