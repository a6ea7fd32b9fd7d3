// Code shared by the wide and the narrow kernel: a tile of keys, the running softmax's constants, and the output.

constexpr int kKeys = 64;           // keys of a tile
constexpr int kTiles = 4;           // tiles of lanes in one task: a value is packed once for all of them
constexpr int kNarrowLanes = 8;
constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kNothing = -1e30f;  // below every real score; finite, so that differences are finite too
#ifdef INLAY_PAIRS
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

struct Work {
  const Call& call;
  const Plan& plan;
  const Block& block;
  const Turns& turns;
  const Task& task;
  const Partials& partials;

  int lanes() const { return task.lane_end - task.lane_begin; }
  int row_of(int lane) const { return block.rows[(task.lane_begin + lane) / call.group()]; }
  int head_of(int lane) const { return task.kv_head * call.group() + (task.lane_begin + lane) % call.group(); }
  // The position of a lane's row.
  int32_t position_of(int lane) const { return plan.positions()[row_of(lane)]; }
};

// The first and last position among some lanes' rows.
struct Extent {
  int32_t first = std::numeric_limits<int32_t>::max(), last = std::numeric_limits<int32_t>::min();
  void add(int32_t position) {
    first = std::min(first, position);
    last = std::max(last, position);
  }
};

// Keys of one shift in a tile: entries begin … end - 1.
struct Segment {
  int32_t shift;
  int begin, end;
};

// Up to 64 keys that some row of a task sees. Keys that no row sees are left out, so that the contents of their slots
// never enter a product.
struct Tile {
  int count = 0;
  int segments = 0;
  bool masked = false;  // some lane may not see some key
  const char* keys[kKeys];
  const char* values[kKeys];
  int32_t position[kKeys];
  int32_t from[kKeys], until[kKeys];  // rows at positions from … until - 1 see it
  Segment segment[kKeys];
};

// Iterates over a block's keys in tiles.
class Cursor {
 public:
  Cursor(const Work& work, const Extent& rows) : work_(work), rows_(rows), left_(work.task.key_end - work.task.key_begin) {
    int32_t skip = work.task.key_begin;
    while (skip >= work.block.stretches[stretch_].length) skip -= work.block.stretches[stretch_++].length;
    key_ = skip;
  }

  // Fills the next tile. Returns false if no keys are left.
  bool next(Tile& tile) {
    tile.count = tile.segments = 0;
    tile.masked = false;
    while (left_ > 0 && tile.count < kKeys) take(tile);
    for (int at = tile.count; at % VL; ++at) {  // whole vectors may be read; no row sees the padding
      tile.position[at] = 0;
      tile.from[at] = std::numeric_limits<int32_t>::max();
      tile.until[at] = std::numeric_limits<int32_t>::min();
    }
    return tile.count > 0;
  }

 private:
  void take(Tile& tile) {
    const Stretch& stretch = work_.block.stretches[stretch_];
    const int32_t window = work_.call.options.window;
    int32_t length = std::min<int32_t>({stretch.length - key_, left_, kKeys - tile.count});
    int32_t first = key_, end = key_ + length;
    advance(length, stretch.length);
    if (stretch.masked) end = std::min(end, rows_.last - stretch.seen_at(0) + 1);
    if (window) first = std::max(first, rows_.first - window - stretch.seen_at(0) + 1);
    if (first >= end) return;
    if (tile.segments == 0 || tile.segment[tile.segments - 1].shift != stretch.shift)
      tile.segment[tile.segments++] = {stretch.shift, tile.count, tile.count};
    tile.masked = tile.masked || stretch.masked || window;
    const Heads& keys = work_.call.pool_keys;
    const Heads& values = work_.call.pool_values;
    const char* key = keys.at(work_.task.kv_head, stretch.slot + first);
    const char* value = values.at(work_.task.kv_head, stretch.slot + first);
    const int64_t key_step = keys.row_stride * bytes_of(keys.type), value_step = values.row_stride * bytes_of(values.type);
    for (int32_t i = first; i < end; ++i, key += key_step, value += value_step) {
      const int at = tile.count++;
      const int32_t position = stretch.seen_at(i);
      tile.keys[at] = key;
      tile.values[at] = value;
      tile.position[at] = position;
      tile.from[at] = stretch.masked ? position : std::numeric_limits<int32_t>::min();
      tile.until[at] = window ? position + window : std::numeric_limits<int32_t>::max();
    }
    tile.segment[tile.segments - 1].end = tile.count;
  }

  void advance(int32_t length, int32_t whole) {
    left_ -= length;
    key_ += length;
    if (key_ == whole) {
      ++stretch_;
      key_ = 0;
    }
  }

  const Work& work_;
  const Extent rows_;
  int32_t left_;
  size_t stretch_ = 0;
  int32_t key_ = 0;
};

// Whether a score is changed before the softmax otherwise than by a factor. (A scale of 0 would make NaN of a masked score.)
INLINE bool is_changed(const Options& options) { return options.softcap || options.slopes || options.scale == 0.0f; }

// The factor that makes log2 weights of scores, or of changed scores.
INLINE float factor_of(const Options& options) { return is_changed(options) ? 1.0f : options.scale * kLog2E; }

// A score with soft cap and ALiBi, as log2 weight; distance: positions from the key to the row.
INLINE vf changed(const Options& options, vf score, vf slope, vi distance) {
  if (!is_changed(options)) return score;
  vf s = score * options.scale;
  if (options.softcap) s = options.softcap * tanh_of(s / options.softcap);
  s *= kLog2E;
  if (options.slopes) s -= slope * __builtin_convertvector(distance, vf);
  return s;
}

// Passes all tiles to a kernel in order, each with the next one, so that its memory can be prefetched.
template <class Kernel>
void for_each_tile(const Work& work, const Extent& rows, Kernel& kernel) {
  Cursor cursor(work, rows);
  Tile tiles[2];
  bool more = cursor.next(tiles[0]);
  for (int current = 0; more; current = 1 - current) {
    more = cursor.next(tiles[1 - current]);
    kernel.ahead = more ? &tiles[1 - current] : nullptr;
    kernel.add(tiles[current]);
  }
}

// Prefetches one key, or value, of the next tile.
INLINE void ask_ahead(const Tile* ahead, const char* (Tile::*which)[kKeys], int key, int first, int bytes) {
  if (ahead && key < ahead->count) prefetch((ahead->*which)[key] + first, bytes);
}

INLINE float element(const char* data, Type type, int i) {
  return type == Type::f32 ? reinterpret_cast<const float*>(data)[i]
                           : from_bf16(reinterpret_cast<const uint16_t*>(data)[i]);
}
INLINE vf elements(const char* data, Type type, int i) {
  return type == Type::f32 ? load(reinterpret_cast<const float*>(data) + i)
                           : load(reinterpret_cast<const uint16_t*>(data) + i);
}

// The address of a lane's result, and the factor of its weighted sum.
struct Target {
  char* at;
  Type type;
  float factor;
};

INLINE void write(const Target& to, int i, float number) {
  if (to.type == Type::f32)
    reinterpret_cast<float*>(to.at)[i] = number * to.factor;
  else
    reinterpret_cast<uint16_t*>(to.at)[i] = to_bf16(number * to.factor);
}
INLINE void write(const Target& to, int i, vf numbers) {
  if (to.type == Type::f32) {
    store(reinterpret_cast<float*>(to.at) + i, numbers * to.factor);
  } else {
    const vh rounded = narrowed(numbers * to.factor);
    std::memcpy(to.at + 2 * i, &rounded, sizeof rounded);
  }
}

void write_row(const Target& to, const float* numbers, int d) {
  int i = 0;
  for (; i + VL <= d; i += VL) write(to, i, load(numbers + i));
  for (; i < d; ++i) write(to, i, numbers[i]);
}

// Ends a lane: top and sum are its running maximum (log2) and sum of weights.
Target close_lane(const Work& work, int lane, float top, float sum) {
  const Call& call = work.call;
  const float factor = sum > 0.0f ? 1.0f / sum : 0.0f;
  if (work.task.partial >= 0) {
    const int64_t at = work.task.partial + lane;
    work.partials.sums[at] = sum == 0.0f ? kNothing : top + std::log2(sum);
    return {reinterpret_cast<char*>(work.partials.outputs + at * call.head_dim), Type::f32, factor};
  }
  const int head = work.head_of(lane);
  char* at = call.output.at(head, work.row_of(lane));
  if (!call.options.sinks) return {at, call.output.type, factor};
  const float with_sink = sum + std::exp2(call.options.sinks[head] * kLog2E - top);
  return {at, call.output.type, with_sink > 0.0f ? 1.0f / with_sink : 0.0f};
}

// The row of `turns` for a shift.
INLINE int turn_of(const Turns& turns, int32_t shift) {
  return static_cast<int>(std::lower_bound(turns.shifts, turns.shifts + turns.count, shift) - turns.shifts);
}

#ifdef INLAY_PAIRS
// VL numbers as bf16, each in the low half of its lane, or in the high half.
INLINE __m512i low_halves(const uint16_t* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
INLINE __m512i high_halves(const uint16_t* from) { return _mm512_slli_epi32(low_halves(from), 16); }
INLINE __m512i high_halves(const int8_t* from) { return _mm512_castps_si512((__m512)load(from)); }  // exact in bf16
INLINE __m512i low_halves(const int8_t* from) { return _mm512_srli_epi32(high_halves(from), 16); }

// VL pairs of bf16, left in the low halves.
template <class T>
INLINE __m512i side_by_side(const T* left, const T* right) {
  return _mm512_or_si512(low_halves(left), high_halves(right));
}
#endif

// Allocates parts of a thread's memory.
struct Arena {
  char* at;
  template <class T>
  T* take(size_t count) {
    T* taken = reinterpret_cast<T*>(at);
    at += (count * sizeof(T) + 63) / 64 * 64;
    return taken;
  }
};
