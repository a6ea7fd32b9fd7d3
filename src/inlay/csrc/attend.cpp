#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "parallel.h"

namespace inlay {
namespace {

constexpr int64_t kShortestSplit = 256;  // keys; below this, merging costs more than an idle thread
constexpr size_t kFewRows = 32;          // of a block whose keys are split at fixed places; more than a draft has
constexpr int64_t kFixedSplit = 384;     // keys there, if there are as many KV heads as threads
constexpr int kTasksPerThread = 4;       // with fewer, threads often wait for the last task

// The unit of cost is one key for one lane of the wide kernel. The narrow kernel reads a key from memory at a cost that
// hardly depends on the lanes. The fixed cost of a task is that of loading queries and writing results.
constexpr double kNarrowKey = 24, kFixed = 300;

// Quantizes a row to i8, to nearest, ties to even, like KVStorage.write (attention/storage.py). The largest magnitude
// becomes 127. NaN or infinity gives a NaN scale, so that a broken model shows.
template <class Numbers>
void quantize(const Numbers& numbers, int dims, char* to) {
  constexpr float kLeast = 1e-30f;       // rows not above this become zero, since their factor would be infinite
  constexpr float kWhole = 12582912.0f;  // 1.5 * 2**23: adding it leaves an integer in the low bits
  float most = 0.0f;
  bool finite = true;
  for (int i = 0; i < dims; ++i) {
    const float size = std::fabs(numbers(i));
    finite = finite && size <= std::numeric_limits<float>::max();
    most = size > most ? size : most;
  }
  const float factor = finite && most > kLeast ? 1.0f / most * 127.0f : 0.0f;  // in two steps, like all other versions
  for (int i = 0; i < dims; ++i) {
    const float rounded = (finite ? numbers(i) * factor : 0.0f) + kWhole;
    uint32_t bits;
    std::memcpy(&bits, &rounded, sizeof bits);
    to[i] = static_cast<char>(bits & 0xffu);
  }
  const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : most > kLeast ? most / 127.0f : 0.0f;
  std::memcpy(to + dims, &scale, sizeof scale);
}

}  // namespace

size_t Workspace::bytes() const {
  size_t total = partials_.bytes();
  for (const auto& thread : threads_) total += thread->bytes();
  return total;
}

void Workspace::reserve(int threads) {
  while (static_cast<int>(threads_.size()) < threads) threads_.push_back(std::make_unique<Scratch>());
}

Attention::Attention(Plan plan, const Variant& variant, int threads)
    : plan_(std::move(plan)), variant_(variant), threads_(std::max(1, threads)) {
  for (const Block& block : plan_.blocks())
    for (const Stretch& stretch : block.stretches)
      if (stretch.shift != 0) shifts_.push_back(stretch.shift);
  std::sort(shifts_.begin(), shifts_.end());
  shifts_.erase(std::unique(shifts_.begin(), shifts_.end()), shifts_.end());
}

void Attention::attend(const Call& call, Workspace& workspace) {
  check(call);
  share_out(call, workspace.most_partials());
  find_turns(call);
  workspace.reserve(threads_);
  const size_t floats = static_cast<size_t>(partial_lanes_) * (call.head_dim + 1);
  float* memory = reinterpret_cast<float*>(workspace.partials().take(floats * sizeof(float) + 64));
  const Partials partials{memory, memory + static_cast<size_t>(partial_lanes_) * call.head_dim};
  const Turns turns{shifts_.data(), static_cast<int>(shifts_.size()), cos_.data(), sin_.data(),
                    call.options.rotated / 2};
  const auto rows = static_cast<int64_t>(plan_.positions().size());
  struct Next { std::atomic<size_t> task{0}; std::atomic<int64_t> merge{0}; };
  std::vector<Next> next(slices_.size());
  std::atomic<bool> out_of_memory{false};
  std::vector<int64_t> lanes(static_cast<size_t>(threads_) * static_cast<size_t>(most_parts_));
  run_parallel(threads_, [&](Team& team, int thread) {
    write(call, rows * thread / team.threads(), rows * (thread + 1) / team.threads());
    int64_t* own = lanes.data() + thread * most_parts_;
    for (size_t s = 0; s < slices_.size(); ++s) {
      const Slice& slice = slices_[s];
      team.barrier();
      try {
        for (size_t t; (t = slice.task_begin + next[s].task.fetch_add(1, std::memory_order_relaxed)) < slice.task_end;)
          variant_.run(call, plan_, turns, tasks_[t], cuts_[tasks_[t].block].narrow, partials,
                       workspace.of_thread(thread));
      } catch (const std::bad_alloc&) {
        out_of_memory = true;
      }
      team.barrier();
      constexpr int64_t kAtOnce = 16;
      const auto merges = static_cast<int64_t>(slice.merge_end - slice.merge_begin) * (slice.head_end - slice.head_begin);
      for (int64_t m; (m = next[s].merge.fetch_add(kAtOnce, std::memory_order_relaxed)) < merges;)
        for (int64_t item = m; item < std::min(m + kAtOnce, merges); ++item) merge(call, partials, slice, item, own);
    }
  });
  if (out_of_memory) throw std::bad_alloc();
}

void Attention::check(const Call& call) const {
  if (call.kv_heads < 1 || call.heads % call.kv_heads) throw std::invalid_argument("heads must be a multiple of KV heads");
  if (call.head_dim < 1 || call.head_dim > kMostDims) throw std::invalid_argument("head_dim must be 1 to 1024");
  for (const Heads* heads : {&call.query, &call.key, &call.value, &call.output})
    if (heads->type == Type::i8) throw std::invalid_argument("only the pool's keys and values can be int8");
  if (call.pool_keys.type != call.pool_values.type)
    throw std::invalid_argument("the pool's keys and values are not of one type");
  if (!(call.options.scale >= 0)) throw std::invalid_argument("scores can't be scaled by a negative number");
  if (call.options.window < 0) throw std::invalid_argument("a window must be 1 position or more, or 0 for none");
  if (call.options.rotated > call.head_dim) throw std::invalid_argument("more dimensions are turned than a head has");
  if (!shifts_.empty() && call.options.frequencies == nullptr)
    throw std::invalid_argument("a shift needs rotary positions");
}

void Attention::check_slots(const Call& call) const {
  for (const Block& block : plan_.blocks())
    for (const Stretch& stretch : block.stretches)
      if (stretch.slot < 0 || stretch.slot + stretch.length > call.slots)
        throw std::invalid_argument("a plan reads slots that the pool does not have");
  for (int64_t slot : plan_.slots())
    if (slot < 0 || slot >= call.slots) throw std::invalid_argument("a plan writes slots that the pool does not have");
}

// Turns the plan's blocks into tasks. Done once for all layers of a shape, and again after each advance.
void Attention::share_out(const Call& call, int64_t most_partials) {
  const Shape shape{plan_.version(), call.heads, call.kv_heads, call.head_dim, call.slots, most_partials};
  if (shape == shape_) return;
  check_slots(call);
  double total = 0;
  for (const Block& block : plan_.blocks())
    total += cost_of(is_narrow(block, call), static_cast<int64_t>(block.rows.size()) * call.group(), block.usual_keys()) * call.kv_heads;
  const double most = threads_ == 1 ? total : total / (threads_ * kTasksPerThread);
  cuts_.clear();
  for (const Block& block : plan_.blocks()) cuts_.push_back(cut_of(call, block, most));
  tasks_.clear();
  merges_.clear();
  parts_.clear();
  partial_lanes_ = 0;
  most_parts_ = 0;
  slices_ = slices_of(call, most_partials);
  for (Slice& slice : slices_) fill_slice(call, slice);
  shape_ = shape;  // last: after bad_alloc nothing here is valid
}

bool Attention::is_narrow(const Block& block, const Call& call) const {
  const auto lanes = static_cast<int64_t>(block.rows.size()) * call.group();
  return lanes <= variant_.narrow_lanes && call.head_dim % 16 == 0;
}

double Attention::cost_of(bool narrow, int64_t lanes, double keys) const {
  if (narrow) return kFixed + keys * std::max<double>(kNarrowKey, 4.0 * lanes);
  const int64_t tile = variant_.wide_lanes;
  const int64_t filled = lanes <= tile / 2 ? tile / 2 : (lanes + tile - 1) / tile * tile;
  return kFixed * filled / 4 + static_cast<double>(filled) * keys;
}

// Cuts lanes into shares of a few tiles. The keys of a lone block of few rows are split at fixed places, however many rows
// there are: so a token has the same bits alone and with a draft. Others are split if there would be too few tasks.
Attention::Cut Attention::cut_of(const Call& call, const Block& block, double most) const {
  const int64_t lanes = static_cast<int64_t>(block.rows.size()) * call.group(), keys = block.keys();
  const double usual = block.usual_keys();
  Cut cut{is_narrow(block, call), false, lanes, keys, 1, 0};
  if (!cut.narrow) cut.share = static_cast<int64_t>(variant_.wide_lanes) * variant_.tiles;
  while (!cut.narrow && cut.share > variant_.wide_lanes && cost_of(false, std::min(cut.share, lanes), usual) > most)
    cut.share /= 2;
  cut.cost = cost_of(cut.narrow, std::min(cut.share, lanes), usual);
  if (threads_ > 1 && block.rows.size() <= kFewRows && plan_.blocks().size() == 1)
    cut.keys = std::max(kShortestSplit, kFixedSplit * call.kv_heads / threads_);
  else if (cut.cost > most)
    cut.keys = std::max(kShortestSplit, static_cast<int64_t>(static_cast<double>(keys) * most / cut.cost) + 1);
  cut.splits = (keys + cut.keys - 1) / cut.keys;
  cut.cost /= static_cast<double>(cut.splits);
  cut.direct = block.alone && cut.splits == 1;
  return cut;
}

// One slice if all partial results fit, else slices of a few heads, else of one head and some of the rows.
std::vector<Attention::Slice> Attention::slices_of(const Call& call, int64_t most_partials) const {
  const auto rows = static_cast<int32_t>(plan_.positions().size());
  const auto& member = plan_.membership();
  std::vector<int64_t> lanes(rows, 0);  // of a row's partial results in one KV head
  int64_t all = 0;
  for (int32_t row = 0; row < rows; ++row) {
    for (int32_t m = member.first[row]; m < member.first[row + 1]; ++m)
      if (!cuts_[member.block[m]].direct) lanes[row] += cuts_[member.block[m]].splits * call.group();
    all += lanes[row];
  }
  const int64_t room = std::max<int64_t>(1, most_partials / ((call.head_dim + 1) * static_cast<int64_t>(sizeof(float))));
  const auto heads = static_cast<int>(std::clamp<int64_t>(all ? room / all : call.kv_heads, 1, call.kv_heads));
  std::vector<int32_t> borders{0};
  int64_t held = 0;
  for (int32_t row = 0; row < rows; ++row) {
    if (heads == 1 && held && held + lanes[row] > room) {
      borders.push_back(row);
      held = 0;
    }
    held += lanes[row];
  }
  borders.push_back(rows);
  std::vector<Slice> found;
  for (int head = 0; head < call.kv_heads; head += heads)
    for (size_t b = 0; b + 1 < borders.size(); ++b)
      found.push_back({head, std::min(head + heads, call.kv_heads), borders[b], borders[b + 1], 0, 0, 0, 0});
  return found;
}

void Attention::fill_slice(const Call& call, Slice& slice) {
  slice.task_begin = tasks_.size();
  slice.merge_begin = merges_.size();
  const size_t blocks = cuts_.size();
  partial_.assign(blocks, 0);
  place_.resize(blocks);
  places_.resize(blocks);
  int64_t taken = 0;
  for (size_t b = 0; b < blocks; ++b) {
    const auto& rows = plan_.blocks()[b].rows;
    const auto begin = std::lower_bound(rows.begin(), rows.end(), slice.row_begin);
    const auto end = std::lower_bound(begin, rows.end(), slice.row_end);
    place_[b] = begin - rows.begin();
    places_[b] = end - begin;
    if (begin == end) continue;
    partial_[b] = taken;
    if (!cuts_[b].direct) taken += places_[b] * call.group() * cuts_[b].splits * (slice.head_end - slice.head_begin);
    add_tasks(call, slice, static_cast<int32_t>(b));
  }
  partial_lanes_ = std::max(partial_lanes_, taken);
  sort_tasks(slice.task_begin);
  add_merges(call, slice);
  slice.task_end = tasks_.size();
  slice.merge_end = merges_.size();
}

// Adds the tasks of one block in the current slice.
void Attention::add_tasks(const Call& call, const Slice& slice, int32_t number) {
  const Block& block = plan_.blocks()[number];
  const Cut& cut = cuts_[number];
  const int64_t keys = block.keys(), begin = place_[number] * call.group(), lanes = places_[number] * call.group();
  // heads outermost, so one head's keys stay in the cache
  for (int head = slice.head_begin; head < slice.head_end; ++head)
    for (int64_t split = 0; split < cut.splits; ++split)
      for (int64_t lane = 0; lane < lanes; lane += cut.share) {
        const int64_t end = std::min(lanes, lane + cut.share);
        const int64_t at = partial_[number] + ((head - slice.head_begin) * cut.splits + split) * lanes + lane;
        tasks_.push_back({number, head, static_cast<int32_t>(begin + lane), static_cast<int32_t>(begin + end),
                          static_cast<int32_t>(split * cut.keys),
                          static_cast<int32_t>(std::min(keys, (split + 1) * cut.keys)), cut.direct ? -1 : at});
      }
}

// Sorts tasks, the largest first.
void Attention::sort_tasks(size_t begin) {
  std::stable_sort(tasks_.begin() + static_cast<std::ptrdiff_t>(begin), tasks_.end(),
                   [&](const Task& a, const Task& b) { return cuts_[a.block].cost > cuts_[b.block].cost; });
}

// Lists the partial results of the current slice that make up each of its rows.
void Attention::add_merges(const Call& call, const Slice& slice) {
  const auto& member = plan_.membership();
  for (int32_t row = slice.row_begin; row < slice.row_end; ++row) {
    const auto first = static_cast<int32_t>(parts_.size());
    for (int32_t m = member.first[row]; m < member.first[row + 1]; ++m) {
      const int32_t block = member.block[m];
      if (cuts_[block].direct) continue;
      const int64_t lanes = places_[block] * call.group(), splits = cuts_[block].splits;
      for (int64_t split = 0; split < splits; ++split)
        parts_.push_back({partial_[block] + split * lanes + (member.place[m] - place_[block]) * call.group(),
                          splits * lanes});
    }
    const auto count = static_cast<int32_t>(parts_.size()) - first;
    if (count > 0) merges_.push_back({row, first, count});
    most_parts_ = std::max(most_parts_, count);
  }
}

// Cosines and sines of every shift, computed in double like attention/rope.py.
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
    if (to.type == Type::i8) {
      if (from.type == Type::f32)
        quantize([&](int i) { return reinterpret_cast<const float*>(source)[i]; }, call.head_dim, target);
      else
        quantize([&](int i) { return from_bf16(reinterpret_cast<const uint16_t*>(source)[i]); }, call.head_dim, target);
    } else if (from.type == to.type) {
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

void Attention::merge(const Call& call, const Partials& partials, const Slice& slice, int64_t item,
                      int64_t* lanes) const {
  const int heads = slice.head_end - slice.head_begin;
  const Merge& merge = merges_[slice.merge_begin + item / heads];
  const auto head = static_cast<int32_t>(item % heads);
  for (int32_t p = 0; p < merge.count; ++p) {
    const Part& part = parts_[merge.first + p];
    lanes[p] = part.at + head * part.head_step;
  }
  variant_.merge(call, merge.row, slice.head_begin + head, lanes, merge.count, partials);
}

}  // namespace inlay
