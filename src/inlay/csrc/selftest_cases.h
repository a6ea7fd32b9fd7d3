// Random passes for selftest.cpp: what is asked for, a layer, and memory of exactly the size that the kernel may touch.
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

// (heads, rows, dims) in memory that ends with the last number.
class Tensor {
 public:
  Tensor(Type type, int heads, int64_t rows, int dims, bool rows_first, int gap) : dims_(dims) {
    const int64_t inner = rows_first ? heads : rows, outer = rows_first ? rows : heads;
    const int64_t step = dims + gap, stride = inner * step;
    const int64_t numbers = (outer - 1) * stride + (inner - 1) * step + dims;
    heads_ = {nullptr, type, rows_first ? step : stride, rows_first ? stride : step};
    bytes_.reset(new char[numbers * bytes_of(type)]);
    heads_.data = bytes_.get();
    for (int64_t i = 0; i < numbers; ++i) put(heads_.data + i * bytes_of(type), std::nanf(""));
  }
  const Heads& heads() const { return heads_; }
  void fill(Random& random, int head, int64_t row) {
    for (int i = 0; i < dims_; ++i) put(heads_.at(head, row) + i * bytes_of(heads_.type), random.normal());
  }
  double get(int head, int64_t row, int i) const {
    const char* at = heads_.at(head, row) + i * bytes_of(heads_.type);
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

// What a pass asks for. `long_keys` and `long_spans` reach splits of keys, and spans that keep to themselves.
struct Asked {
  std::vector<SpanIn> spans;
  std::vector<PieceIn> pieces;
  std::vector<RunIn> own;
  int64_t slots = 0;
  int rows = 0;
};

inline Asked ask(Random& random, bool decode, bool may_shift, int spare) {
  Asked asked;
  std::vector<PieceIn> segments;
  const bool long_keys = random.one_in(4), long_spans = !decode && random.one_in(4);
  for (int n = random.from(1, 5); n > 0; --n) {
    const int length = random.from(1, 90) + (long_keys ? 1200 : 0);
    segments.push_back({asked.slots, length, random.from(0, 300), 0});
    asked.slots += length + random.of({0, 0, 7});
  }
  for (int n = random.from(1, 6); n > 0; --n) {
    SpanIn span{random.from(0, 2000), decode ? 1 : random.from(1, long_spans ? 90 : 9), 0, 0, 0, 0};
    span.piece_begin = static_cast<int64_t>(asked.pieces.size());
    for (int p = random.from(0, 4); p > 0; --p) {
      PieceIn piece = segments[random.from(0, static_cast<int>(segments.size()) - 1)];
      const int skip = random.one_in(3) ? random.from(0, static_cast<int>(piece.length) - 1) : 0;  // runs overlap in part
      piece = {piece.first + skip, piece.length - skip, piece.start + skip, may_shift ? random.of({0, 0, 5, -3, 40}) : 0};
      if (random.one_in(3)) piece.length = random.from(1, static_cast<int>(piece.length));
      asked.pieces.push_back(piece);
    }
    span.piece_end = static_cast<int64_t>(asked.pieces.size());
    span.own_begin = static_cast<int64_t>(asked.own.size());
    for (int64_t left = span.length; left > 0;) {
      const int64_t length = random.one_in(2) ? left : random.from(1, static_cast<int>(left));
      asked.own.push_back({asked.slots, length});
      asked.slots += length + spare + random.of({0, 3});
      left -= length;
    }
    span.own_end = static_cast<int64_t>(asked.own.size());
    asked.rows += static_cast<int>(span.length);
    asked.spans.push_back(span);
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
  layer.stored = random.one_in(2) ? Type::bf16 : Type::f32;
  layer.fresh = random.one_in(4) ? Type::f32 : layer.stored;
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
      : layer(l), query(l.fresh, l.heads, asked.rows, l.dims, random.one_in(2), random.of({0, 3})),
        key(l.fresh, l.kv_heads, asked.rows, l.dims, random.one_in(2), 0),
        value(l.fresh, l.kv_heads, asked.rows, l.dims, random.one_in(2), 0),
        keys(l.stored, l.kv_heads, asked.slots, l.dims, false, 0),
        values(l.stored, l.kv_heads, asked.slots, l.dims, false, 0),
        output(l.fresh, l.heads, asked.rows, l.dims, true, 0) {
    for (const PieceIn& piece : asked.pieces)
      for (int head = 0; head < layer.kv_heads; ++head)
        for (int64_t slot = piece.first; slot < piece.first + piece.length; ++slot) {
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
