// Random passes for selftest.cpp: parameters, a layer, and memory of exactly the size that the kernel may touch.
#pragma once

#include <cmath>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "kernel.h"

namespace inlay {

struct Random {
  std::mt19937 engine;

  int from(int low, int high) { return std::uniform_int_distribution<int>(low, high)(engine); }
  bool one_in(int n) { return from(1, n) == 1; }
  int of(std::initializer_list<int> choices) { return choices.begin()[from(0, static_cast<int>(choices.size()) - 1)]; }
  float normal() { return std::normal_distribution<float>()(engine); }
};

// (heads, rows, dims) in memory that ends with the last number, or scale.
class Tensor {
 public:
  Tensor(Type type, int heads, int64_t rows, int dims, bool rows_first, int gap) : dims_(dims) {
    const int64_t inner = rows_first ? heads : rows, outer = rows_first ? rows : heads;
    const int64_t width = dims + (type == Type::i8 ? kScaleBytes : 0), step = width + gap, stride = inner * step;
    const int64_t numbers = (outer - 1) * stride + (inner - 1) * step + width;
    heads_ = {nullptr, type, rows_first ? step : stride, rows_first ? stride : step};
    bytes_.reset(new char[numbers * bytes_of(type)]);
    heads_.data = bytes_.get();
    if (type == Type::i8)
      std::memset(heads_.data, 0xff, numbers);  // NaN as a scale
    else
      for (int64_t i = 0; i < numbers; ++i) put(heads_.data + i * bytes_of(type), std::nanf(""));
  }
  const Heads& heads() const { return heads_; }
  void fill(Random& random, int head, int64_t row) {
    if (heads_.type == Type::i8) {
      char* at = heads_.at(head, row);
      for (int i = 0; i < dims_; ++i) at[i] = static_cast<char>(random.from(-127, 127));
      const float scale = 0.02f * static_cast<float>(random.from(0, 2));
      std::memcpy(at + dims_, &scale, sizeof scale);
      return;
    }
    for (int i = 0; i < dims_; ++i) put(heads_.at(head, row) + i * bytes_of(heads_.type), random.normal());
  }
  double get(int head, int64_t row, int i) const {
    const char* at = heads_.at(head, row) + i * bytes_of(heads_.type);
    if (heads_.type == Type::i8)
      return static_cast<double>(*reinterpret_cast<const int8_t*>(at)) * scale_of(heads_.at(head, row), dims_);
    return heads_.type == Type::f32 ? *reinterpret_cast<const float*>(at)
                                    : from_bf16(*reinterpret_cast<const uint16_t*>(at));
  }

 private:
  void put(char* at, float value) {
    if (heads_.type == Type::f32)
      *reinterpret_cast<float*>(at) = value;
    else
      *reinterpret_cast<uint16_t*>(at) = to_bf16(value);
  }

  int dims_;
  Heads heads_;
  std::unique_ptr<char[]> bytes_;
};

// The tables of a pass. Every part has rows at consecutive positions and a block for its own keys; further blocks hold
// the rows of some parts and stretches of stored segments.
struct Asked {
  std::vector<int64_t> positions, own_slots, rows, row_first{0}, stretch_first{0}, growing;
  std::vector<Stretch> stretches;
  std::vector<int64_t> part_first{0};  // rows of part n: part_first[n] … part_first[n + 1] - 1
  int64_t slots = 0;
  std::vector<int64_t> table;  // stretches as the plan takes them

  int row_count() const { return static_cast<int>(positions.size()); }
  void close_block() {
    row_first.push_back(static_cast<int64_t>(rows.size()));
    stretch_first.push_back(static_cast<int64_t>(stretches.size()));
  }
  Tables tables() {
    auto column = [](const std::vector<int64_t>& from) {
      return Tables::Column{from.data(), static_cast<int64_t>(from.size())};
    };
    table.clear();
    for (const Stretch& s : stretches) table.push_back(s.slot);
    for (const Stretch& s : stretches) table.push_back(s.length);
    for (const Stretch& s : stretches) table.push_back(s.position);
    for (const Stretch& s : stretches) table.push_back(s.shift);
    for (const Stretch& s : stretches) table.push_back(s.masked);
    return {column(positions), column(own_slots), column(rows), column(row_first), table.data(),
            static_cast<int64_t>(stretches.size()), column(stretch_first), column(growing)};
  }
};

// Own keys in up to a few runs, each followed by `spare` slots for decode steps.
inline void add_part(Random& random, Asked& asked, int length, int spare) {
  const int start = random.from(0, 2000);
  for (int left = length; left > 0;) {
    const int run = random.one_in(2) ? left : random.from(1, left);
    const int first = start + length - left;
    asked.stretches.push_back({asked.slots, run, first, 0, length > 1});
    for (int i = 0; i < run; ++i) {
      asked.rows.push_back(asked.row_count());
      asked.positions.push_back(first + i);
      asked.own_slots.push_back(asked.slots + i);
    }
    asked.slots += run + spare + random.of({0, 3});
    left -= run;
  }
  if (spare) asked.growing.push_back(static_cast<int64_t>(asked.stretches.size()) - 1);
  asked.part_first.push_back(asked.row_count());
  asked.close_block();
}

inline Asked ask(Random& random, bool decode, bool may_shift, int spare) {
  Asked asked;
  std::vector<Stretch> segments;
  const bool long_keys = random.one_in(4), long_parts = !decode && random.one_in(4);  // reach splits, and many tiles
  for (int n = random.from(1, 5); n > 0; --n) {
    const int length = random.from(1, 90) + (long_keys ? 1200 : 0);
    segments.push_back({asked.slots, length, random.from(0, 300), 0, false});
    asked.slots += length + random.of({0, 0, 7});
  }
  for (int n = random.from(1, 6); n > 0; --n)
    add_part(random, asked, decode ? 1 : random.from(1, long_parts ? 90 : 9), spare);
  for (int n = random.from(0, 4); n > 0; --n) {
    const size_t before = asked.rows.size();
    for (size_t p = 0; p + 1 < asked.part_first.size(); ++p)
      if (!random.one_in(3))
        for (int64_t row = asked.part_first[p]; row < asked.part_first[p + 1]; ++row) asked.rows.push_back(row);
    if (asked.rows.size() == before) continue;
    const int shift = may_shift ? random.of({0, 0, 5, -3, 40}) : 0;
    for (int s = random.from(1, 5); s > 0; --s) {
      Stretch stretch = segments[random.from(0, static_cast<int>(segments.size()) - 1)];
      const int skip = random.one_in(3) ? random.from(0, stretch.length - 1) : 0;  // stretches overlap in part
      stretch = {stretch.slot + skip, stretch.length - skip, stretch.position + skip, shift, random.one_in(3)};
      if (random.one_in(3)) stretch.length = random.from(1, stretch.length);
      asked.stretches.push_back(stretch);
    }
    asked.close_block();
  }
  return asked;
}

struct Layer {
  int kv_heads, heads, dims;
  Type stored, fresh;  // of the pool; of queries, keys and values
  Options options{};
  std::vector<float> sinks, slopes, frequencies;
};

inline Layer layer_of(Random& random) {
  const int group = random.of({1, 1, 2, 3, 4, 5, 6, 7, 8, 16});
  Layer layer{random.from(1, 3), 0, random.of({5, 8, 16, 24, 32, 40, 64, 80, 96, 128, 256}), Type::f32, Type::f32};
  layer.heads = layer.kv_heads * group;
  layer.stored = random.one_in(3) ? Type::i8 : random.one_in(2) ? Type::bf16 : Type::f32;
  layer.fresh = random.one_in(4) ? Type::f32 : layer.stored == Type::i8 ? Type::bf16 : layer.stored;
  for (int head = 0; head < layer.heads; ++head) {
    layer.sinks.push_back(random.normal());
    layer.slopes.push_back(0.02f * static_cast<float>(1 + head));
  }
  Options& options = layer.options;
  options.rotated = random.one_in(3) ? layer.dims / 4 * 2 : layer.dims / 2 * 2;
  for (int i = 0; i < options.rotated / 2; ++i)
    layer.frequencies.push_back(std::pow(100.0f, -2.0f * static_cast<float>(i) / static_cast<float>(options.rotated)));
  options.scale = 1.0f / std::sqrt(static_cast<float>(layer.dims));
  options.window = random.one_in(3) ? random.of({1, 30, 700}) : 0;
  options.softcap = random.one_in(3) ? 2.0f : 0.0f;
  options.sinks = random.one_in(3) ? layer.sinks.data() : nullptr;
  options.slopes = random.one_in(3) ? layer.slopes.data() : nullptr;
  options.frequencies = random.one_in(4) ? nullptr : layer.frequencies.data();
  options.interleaved = random.one_in(2);
  return layer;
}

struct Pass {
  Pass(Random& random, const Asked& asked, const Layer& l)
      : layer(l), query(l.fresh, l.heads, asked.row_count(), l.dims, random.one_in(2), random.of({0, 3})),
        key(l.fresh, l.kv_heads, asked.row_count(), l.dims, random.one_in(2), 0),
        value(l.fresh, l.kv_heads, asked.row_count(), l.dims, random.one_in(2), 0),
        keys(l.stored, l.kv_heads, asked.slots, l.dims, false, 0),
        values(l.stored, l.kv_heads, asked.slots, l.dims, false, 0),
        output(l.fresh, l.heads, asked.row_count(), l.dims, true, 0) {
    std::vector<char> own(asked.slots, 0);
    for (int64_t slot : asked.own_slots) own[slot] = 1;
    for (const Stretch& stretch : asked.stretches)
      for (int head = 0; head < layer.kv_heads; ++head)
        for (int64_t slot = stretch.slot; slot < stretch.slot + stretch.length; ++slot) {
          if (own[slot]) continue;
          keys.fill(random, head, slot);
          values.fill(random, head, slot);
        }
  }
  void draw(Random& random, int rows) {
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < layer.heads; ++head) query.fill(random, head, row);
      for (int head = 0; head < layer.kv_heads; ++head) key.fill(random, head, row), value.fill(random, head, row);
    }
  }
  Call call(int64_t slots) const {
    return {query.heads(), key.heads(),    value.heads(), keys.heads(), values.heads(), output.heads(),
            layer.heads,   layer.kv_heads, layer.dims,    slots,        layer.options};
  }
  const Layer& layer;
  Tensor query, key, value, keys, values, output;
};

}  // namespace inlay
