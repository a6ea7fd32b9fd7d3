// The wide kernel: up to kTiles tiles of N * VL lanes. A lane is one head of one query row. T: type in the pool (float,
// uint16_t for bf16, or int8_t with scales). Paired: products of bf16 pairs, summed in fp32. Integers of -127 … 127 are
// exact in bf16, so int8 is not dequantized there: scales of keys are applied to the scores, and scales of values to
// the weights.

template <class T, bool Paired, int N>
struct Wide {
  static constexpr int kLanes = N * VL;
  static constexpr bool kScaled = Paired && std::is_same<T, int8_t>::value;    // read as integers
  static constexpr bool kWidened = !Paired && !std::is_same<T, float>::value;  // a tile is converted to fp32 first

  const Work& work;
  const int d;
  const int tiles;                      // of lanes
  float* queries;                       // (tiles, d, lanes) fp32, at the rows' own positions
  float* turned;                        // the same, rotated for the current shift
  uint32_t* pairs;                      // the same as bf16 pairs, (tiles, d / 2, lanes)
  float* sums;                          // (tiles, d, lanes): weighted values so far
  float* scores;                        // (tiles, kKeys + MR, lanes)
  uint32_t* weights;                    // (kKeys / 2, lanes): one tile's weights as bf16 pairs
  uint32_t* packed;                     // (kKeys / 2, d): the tile's values, two keys side by side
  float* key_floats;                    // (kKeys, d), if keys must be converted to fp32 first
  float* value_floats;
  uint16_t* key_halves;                 // (kKeys, d): integers as bf16
  float key_scales[kKeys], value_scales[kKeys];
  float* top;                           // (tiles, lanes): running maximum, log2
  float* total;                         // (tiles, lanes): running sum
  float* slopes;                        // (tiles, lanes): ALiBi, log2
  int32_t* positions;                   // (tiles, lanes)
  Extent extents[kTiles];
  const float* lane_queries = nullptr;  // input of pass 1: queries or turned
  int32_t shift = 0;
  bool ready = false;
  const Tile* ahead = nullptr;          // the next tile

  static void run(const Work& work, Scratch& scratch) {
    Wide wide(work, scratch);
    wide.load_queries();
    Extent rows;
    for (int t = 0; t < wide.tiles; ++t) {
      rows.add(wide.extents[t].first);
      rows.add(wide.extents[t].last);
    }
    for_each_tile(work, rows, wide);
    wide.finish();
  }

  Wide(const Work& w, Scratch& scratch) : work(w), d(w.call.head_dim), tiles((w.lanes() + kLanes - 1) / kLanes) {
    const size_t lanes = static_cast<size_t>(tiles) * kLanes;
    const size_t floats = 3 * lanes * d + lanes * d / 2 + tiles * (kKeys + MR) * kLanes + kKeys / 2 * kLanes +
                          (Paired ? kKeys / 2 * d : 0) + (kWidened ? 2 * kKeys * d : 0) +
                          (kScaled ? kKeys / 2 * d : 0) + 4 * lanes;
    Arena arena{scratch.take(floats * sizeof(float) + 17 * 64)};
    queries = arena.take<float>(lanes * d);
    turned = arena.take<float>(lanes * d);
    pairs = arena.take<uint32_t>(lanes * d / 2);
    sums = arena.take<float>(lanes * d);
    scores = arena.take<float>(tiles * (kKeys + MR) * kLanes);
    weights = arena.take<uint32_t>(kKeys / 2 * kLanes);
    packed = Paired ? arena.take<uint32_t>(kKeys / 2 * d) : nullptr;
    key_floats = kWidened ? arena.take<float>(kKeys * d) : nullptr;
    value_floats = kWidened ? arena.take<float>(kKeys * d) : nullptr;
    key_halves = kScaled ? arena.take<uint16_t>(kKeys * d) : nullptr;
    top = arena.take<float>(lanes);
    total = arena.take<float>(lanes);
    slopes = arena.take<float>(lanes);
    positions = arena.take<int32_t>(lanes);
  }

  void load_queries() {
    const Call& call = work.call;
    const Type type = call.query.type;
    for (int t = 0; t < tiles; ++t)
      for (int first = 0; first < kLanes; first += VL) {
        const char* from[VL];
        for (int l = 0; l < VL; ++l) {
          const int lane = t * kLanes + first + l;
          const int which = std::min(lane, work.lanes() - 1);  // spare lanes repeat the last one
          const int head = work.head_of(which);
          from[l] = call.query.at(head, work.row_of(which));
          positions[lane] = work.position_of(which);
          slopes[lane] = call.options.slopes ? call.options.slopes[head] * kLog2E : 0.0f;
          extents[t].add(positions[lane]);
        }
        float* to = queries + static_cast<size_t>(t) * d * kLanes + first;
        int i = 0;
        for (; i + VL <= d; i += VL) {
          vf square[VL];
          for (int l = 0; l < VL; ++l) square[l] = elements(from[l], type, i);
          transpose<1>(square);
          for (int e = 0; e < VL; ++e) store(to + (i + e) * kLanes, square[e]);
        }
        for (; i < d; ++i)
          for (int l = 0; l < VL; ++l) to[i * kLanes + l] = element(from[l], type, i);
      }
    for (int lane = 0; lane < tiles * kLanes; ++lane) {
      top[lane] = kNothing;
      total[lane] = 0.0f;
    }
    std::memset(sums, 0, static_cast<size_t>(tiles) * d * kLanes * sizeof(float));
  }

  void add(const Tile& tile) {
    if constexpr (kScaled) pack_keys(tile);
    if constexpr (Paired) pack_values(tile);
    if constexpr (kWidened) widen(tile);
    int counts[kTiles];
    for (int t = 0; t < tiles; ++t) counts[t] = seen_by(tile, extents[t]);
    for (int s = 0; s < tile.segments; ++s) {
      const Segment& segment = tile.segment[s];
      turn(segment.shift);
      for (int t = 0; t < tiles; ++t) score(tile, segment.begin, std::min(segment.end, counts[t]), t);
    }
    for (int t = 0; t < tiles; ++t)
      if (counts[t] > 0) {
        vf decay[N];
        weigh(tile, counts[t], t, decay);
        add_values(tile, counts[t], t, decay);
      }
  }

  // The number of the tile's keys up to the last one that some of these rows see.
  static int seen_by(const Tile& tile, const Extent& rows) {
    if (!tile.masked) return tile.count;
    int count = tile.count;
    while (count > 0 && (tile.from[count - 1] > rows.last || tile.until[count - 1] <= rows.first)) --count;
    return count;
  }

  // Rotates the queries for a shift.
  void turn(int32_t wanted) {
    if (ready && wanted == shift) return;
    shift = wanted;
    ready = true;
    const int half = wanted == 0 ? 0 : work.turns.half;
    const int at = wanted == 0 ? 0 : turn_of(work.turns, wanted);
    const float* cos = work.turns.cos + static_cast<size_t>(at) * half;
    const float* sin = work.turns.sin + static_cast<size_t>(at) * half;
    lane_queries = wanted == 0 ? queries : turned;
    for (int t = 0; t < tiles; ++t) {
      const float* from = queries + static_cast<size_t>(t) * d * kLanes;
      if constexpr (Paired) {
        turn_pairs(cos, sin, half, from, pairs + static_cast<size_t>(t) * d / 2 * kLanes);
      } else if (half > 0) {
        turn_tile(cos, sin, half, from, turned + static_cast<size_t>(t) * d * kLanes);
      }
    }
  }

  // Rotates dimensions a and b of one pair.
  static INLINE void rotate(const float* a, const float* b, float cos, float sin, vf& left, vf& right) {
    const vf x = load(a), y = load(b);
    left = x * cos - y * sin;
    right = y * cos + x * sin;
  }

  void turn_tile(const float* cos, const float* sin, int half, const float* from, float* to) const {
    const bool interleaved = work.call.options.interleaved;
    for (int i = 0; i < half; ++i) {
      const size_t a = static_cast<size_t>(interleaved ? 2 * i : i) * kLanes;
      const size_t b = static_cast<size_t>(interleaved ? 2 * i + 1 : i + half) * kLanes;
      for (int v = 0; v < kLanes; v += VL) {
        vf left, right;
        rotate(from + a + v, from + b + v, cos[i], sin[i], left, right);
        store(to + a + v, left);
        store(to + b + v, right);
      }
    }
    const size_t rotated = static_cast<size_t>(2 * half) * kLanes;
    std::memcpy(to + rotated, from + rotated, (static_cast<size_t>(d) * kLanes - rotated) * sizeof(float));
  }

  // The same, into bf16 pairs of adjacent dimensions.
  void turn_pairs(const float* cos, const float* sin, int half, const float* from, uint32_t* to) const {
    const bool interleaved = work.call.options.interleaved;
    const bool odd = half % 2 != 0;  // then a pair of dimensions holds one of each half
    for (int v = 0; v < kLanes; v += VL) {
      const float* at = from + v;
      uint32_t* out = to + v;
      vf left, right, next_left, next_right;
      if (interleaved) {
        for (int i = 0; i < half; ++i) {
          rotate(at + 2 * i * kLanes, at + (2 * i + 1) * kLanes, cos[i], sin[i], left, right);
          Wide::store_pairs(out + i * kLanes, left, right);
        }
      } else if (!odd) {
        for (int i = 0; i < half; i += 2) {
          rotate(at + i * kLanes, at + (i + half) * kLanes, cos[i], sin[i], left, right);
          rotate(at + (i + 1) * kLanes, at + (i + 1 + half) * kLanes, cos[i + 1], sin[i + 1], next_left, next_right);
          Wide::store_pairs(out + i / 2 * kLanes, left, next_left);
          Wide::store_pairs(out + (i + half) / 2 * kLanes, right, next_right);
        }
      } else {
        for (int i = 0; i < half; ++i) {
          rotate(at + i * kLanes, at + (i + half) * kLanes, cos[i], sin[i], left, right);
          Wide::store_half(out + i / 2 * kLanes, i % 2, left);
          Wide::store_half(out + (i + half) / 2 * kLanes, (i + half) % 2, right);
        }
      }
      for (int i = half; i < d / 2; ++i)
        Wide::store_pairs(out + i * kLanes, load(at + 2 * i * kLanes), load(at + (2 * i + 1) * kLanes));
    }
  }

  // Pass 1: scores of keys begin … end - 1 for one tile of lanes.
  void score(const Tile& tile, int begin, int end, int t) {
    float* to = scores + static_cast<size_t>(t) * (kKeys + MR) * kLanes;
    int key = begin;
    for (; key + MR / 2 < end; key += MR) score_rows<MR>(tile, key, end, t, to + key * kLanes);
    if (key < end) score_rows<MR / 2>(tile, key, end, t, to + key * kLanes);
  }

  // M keys from `key` on. Results after `end` are overwritten later or never read.
  template <int M>
  INLINE void score_rows(const Tile& tile, int key, int end, int t, float* to) const {
    const char* rows[M];
    for (int j = 0; j < M; ++j) rows[j] = key_at(tile, std::min(key + j, end - 1));
    if (t == 0)
      for (int j = key; j < std::min(key + M, end); ++j) ask_ahead(ahead, &Tile::keys, j, 0, d * sizeof(T));
    if constexpr (Paired) {
      float scales[M];
      if constexpr (kScaled)
        for (int j = 0; j < M; ++j) scales[j] = key_scales[std::min(key + j, end - 1)];
      Wide::template multiply_pairs<M>(rows, pairs + static_cast<size_t>(t) * d / 2 * kLanes, scales, to);
    } else
      Wide::template multiply<M>(rows, lane_queries + static_cast<size_t>(t) * d * kLanes, to);
  }

  const char* key_at(const Tile& tile, int key) const {
    if constexpr (kWidened)
      return reinterpret_cast<const char*>(key_floats + static_cast<size_t>(key) * d);
    else if constexpr (kScaled)
      return reinterpret_cast<const char*>(key_halves + static_cast<size_t>(key) * d);
    else
      return tile.keys[key];
  }

  const float* value_at(const Tile& tile, int key) const {
    if constexpr (kWidened)
      return value_floats + static_cast<size_t>(key) * d;
    else
      return reinterpret_cast<const float*>(tile.values[key]);
  }

  template <int M>
  void multiply(const char* const* rows, const float* query, float* to) const {
    const float* key[M];
    for (int j = 0; j < M; ++j) key[j] = reinterpret_cast<const float*>(rows[j]);
    vf sum[M][N] = {};
    for (int i = 0; i < d; ++i, query += kLanes) {
      vf q[N];
      for (int v = 0; v < N; ++v) q[v] = load(query + v * VL);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j)
        for (int v = 0; v < N; ++v) sum[j][v] += key[j][i] * q[v];
    }
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v) store(to + j * kLanes + v * VL, sum[j][v]);
  }

  // Pass 2: from scores to weights, and the factor of the sums so far.
  void weigh(const Tile& tile, int count, int t, vf* decay) {
    const Options& options = work.call.options;
    const float factor = factor_of(options);
    float* score = scores + static_cast<size_t>(t) * (kKeys + MR) * kLanes;
    if (is_changed(options) || needs_mask(tile, count, extents[t])) prepare(tile, count, t, score);
    for (int v = 0; v < N; ++v) {
      const int lane = t * kLanes + v * VL;
      vf highest = load(score + v * VL);
      for (int key = 1; key < count; ++key) highest = larger(highest, load(score + key * kLanes + v * VL));
      const vf before = load(top + lane), now = larger(before, highest * factor);
      decay[v] = exp2_of(before - now);
      store(top + lane, now);
      vf sum = load(total + lane) * decay[v];
      if constexpr (Paired) {
        for (int key = 0; key < count; key += 2) {
          const vf left = exp2_of(load(score + key * kLanes + v * VL) * factor - now);
          const vf right =
              key + 1 < count ? exp2_of(load(score + (key + 1) * kLanes + v * VL) * factor - now) : vf{};
          uint32_t* to = weights + key / 2 * kLanes + v * VL;
          if constexpr (kScaled) {
            sum += left + right;
            store_pairs(to, left * value_scales[key], right * value_scales[std::min(key + 1, count - 1)]);
          } else {
            sum += store_pairs(to, left, right);
          }
        }
      } else {
        for (int key = 0; key < count; ++key) {
          float* at = score + key * kLanes + v * VL;
          const vf weight = exp2_of(load(at) * factor - now);
          sum += weight;
          store(at, weight);
        }
      }
      store(total + lane, sum);
    }
  }

  static bool needs_mask(const Tile& tile, int count, const Extent& rows) {
    if (!tile.masked) return false;
    for (int key = 0; key < count; ++key)
      if (tile.from[key] > rows.first || tile.until[key] <= rows.last) return true;
    return false;
  }

  // Soft cap, ALiBi and mask.
  void prepare(const Tile& tile, int count, int t, float* score) const {
    const vf never = all(-std::numeric_limits<float>::infinity());
    for (int v = 0; v < N; ++v) {
      const vi position = load_int(positions + t * kLanes + v * VL);
      const vf slope = load(slopes + t * kLanes + v * VL);
      for (int key = 0; key < count; ++key) {
        float* at = score + key * kLanes + v * VL;
        const vf s = changed(work.call.options, load(at), slope, position - tile.position[key]);
        store(at, ((position >= tile.from[key]) & (position < tile.until[key])) ? s : never);
      }
    }
  }

  // Pass 3: sums = sums * decay + weights x values.
  void add_values(const Tile& tile, int count, int t, const vf* decay) {
    if (t == 0)
      for (int key = 0; key < count; ++key) ask_ahead(ahead, &Tile::values, key, 0, d * sizeof(T));
    float* to = sums + static_cast<size_t>(t) * d * kLanes;
    const float* weight = scores + static_cast<size_t>(t) * (kKeys + MR) * kLanes;
    int i = 0;
    if constexpr (Paired) {
      for (; i + MR <= d; i += MR) add_pairs<MR>((count + 1) / 2, i, decay, to + i * kLanes);
      for (; i < d; ++i) add_pairs<1>((count + 1) / 2, i, decay, to + i * kLanes);
    } else {
      const float* value[kKeys];
      for (int key = 0; key < count; ++key) value[key] = value_at(tile, key);
      for (; i + MR <= d; i += MR) add_rows<MR>(value, count, i, weight, decay, to + i * kLanes);
      for (; i < d; ++i) add_rows<1>(value, count, i, weight, decay, to + i * kLanes);
    }
  }

  template <int M>
  static void add_rows(const float* const* value, int count, int first, const float* weight, const vf* decay,
                       float* to) {
    vf sum[M][N];
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v) sum[j][v] = load(to + j * kLanes + v * VL) * decay[v];
    for (int key = 0; key < count; ++key, weight += kLanes) {
      const float* at = value[key] + first;
      vf w[N];
      for (int v = 0; v < N; ++v) w[v] = load(weight + v * VL);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j)
        for (int v = 0; v < N; ++v) sum[j][v] += at[j] * w[v];
    }
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v) store(to + j * kLanes + v * VL, sum[j][v]);
  }

  // Without bf16 products: converts a tile's keys and values to fp32.
  void widen(const Tile& tile) {
    for (int key = 0; key < tile.count; ++key) {
      widen_row(tile.keys[key], key_floats + static_cast<size_t>(key) * d);
      widen_row(tile.values[key], value_floats + static_cast<size_t>(key) * d);
    }
  }

  INLINE void widen_row(const char* row, float* to) const {
    const T* from = reinterpret_cast<const T*>(row);
    const float scale = std::is_same<T, int8_t>::value ? scale_of(row, d) : 1.0f;
    int i = 0;
    for (; i + VL <= d; i += VL) store(to + i, load(from + i) * scale);
    for (; i < d; ++i) to[i] = number(from[i]) * scale;
  }
  static float number(uint16_t bits) { return from_bf16(bits); }
  static float number(int8_t whole) { return whole; }
  static float number(float value) { return value; }

  void finish() {
    for (int first = 0; first < work.lanes(); first += VL) {
      const int count = std::min(VL, work.lanes() - first);
      const float* from = sums + static_cast<size_t>(first / kLanes) * d * kLanes + first % kLanes;
      Target to[VL];
      for (int l = 0; l < count; ++l) to[l] = close_lane(work, first + l, top[first + l], total[first + l]);
      int i = 0;
      for (; i + VL <= d; i += VL) {
        vf square[VL];
        for (int e = 0; e < VL; ++e) square[e] = load(from + (i + e) * kLanes);
        transpose<1>(square);
        for (int l = 0; l < count; ++l) write(to[l], i, square[l]);
      }
      for (; i < d; ++i)
        for (int l = 0; l < count; ++l) write(to[l], i, from[i * kLanes + l]);
    }
  }

#ifdef INLAY_PAIRS
  // Stores two vectors as bf16 pairs, left in the low halves. Returns the sum of the rounded numbers.
  static INLINE vf store_pairs(uint32_t* to, vf left, vf right) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i both = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)right, (__m512)left));
    _mm512_storeu_si512(to, both);
    const __m512i high = _mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    return (vf)_mm512_castsi512_ps(_mm512_slli_epi32(both, 16)) + (vf)_mm512_castsi512_ps(high);
  }

  // Stores one half of the pairs and keeps the other.
  static INLINE void store_half(uint32_t* to, int which, vf numbers) {
    uint16_t rounded[VL];
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(rounded), (__m256i)_mm512_cvtneps_pbh((__m512)numbers));
    for (int lane = 0; lane < VL; ++lane) std::memcpy(reinterpret_cast<char*>(to + lane) + 2 * which, rounded + lane, 2);
  }

  static INLINE vf add_products(vf sum, uint32_t pair, __m512i pairs_of_lanes) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)),
                                (__m512bh)pairs_of_lanes);
  }

  template <int M>
  void multiply_pairs(const char* const* rows, const uint32_t* query, const float* scales, float* to) const {
    const char* key[M];
    for (int j = 0; j < M; ++j) key[j] = rows[j];
    vf sum[M][N] = {};
    for (int i = 0; i < d / 2; ++i, query += kLanes) {
      __m512i q[N];
      for (int v = 0; v < N; ++v) q[v] = _mm512_loadu_si512(query + v * VL);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j) {
        uint32_t pair;
        std::memcpy(&pair, key[j] + 4 * i, 4);
        for (int v = 0; v < N; ++v) sum[j][v] = add_products(sum[j][v], pair, q[v]);
      }
    }
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v) store(to + j * kLanes + v * VL, kScaled ? sum[j][v] * scales[j] : sum[j][v]);
  }

  template <int M>
  void add_pairs(int pairs_of_keys, int first, const vf* decay, float* to) const {
    vf sum[M][N];
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v) sum[j][v] = load(to + j * kLanes + v * VL) * decay[v];
    const uint32_t* weight = weights;
    const uint32_t* value = packed + first;
    for (int key = 0; key < pairs_of_keys; ++key, weight += kLanes, value += d) {
      __m512i w[N];
      for (int v = 0; v < N; ++v) w[v] = _mm512_loadu_si512(weight + v * VL);
#pragma GCC unroll 8
      for (int j = 0; j < M; ++j)
        for (int v = 0; v < N; ++v) sum[j][v] = add_products(sum[j][v], value[j], w[v]);
    }
    for (int j = 0; j < M; ++j)
      for (int v = 0; v < N; ++v) store(to + j * kLanes + v * VL, sum[j][v]);
  }

  // Packs values of adjacent keys side by side, so that one product takes two keys. An odd last key is paired with
  // itself.
  void pack_values(const Tile& tile) {
    for (int key = 0; key < tile.count; key += 2) {
      const int next = std::min(key + 1, tile.count - 1);
      const T* left = reinterpret_cast<const T*>(tile.values[key]);
      const T* right = reinterpret_cast<const T*>(tile.values[next]);
      if constexpr (kScaled) {
        value_scales[key] = scale_of(tile.values[key], d);
        value_scales[next] = scale_of(tile.values[next], d);
      }
      uint32_t* to = packed + static_cast<size_t>(key / 2) * d;
      int i = 0;
      for (; i + VL <= d; i += VL)
        _mm512_storeu_si512(to + i, side_by_side(left + i, right + i));
      for (; i < d; ++i) to[i] = bit_of(left[i]) | static_cast<uint32_t>(bit_of(right[i])) << 16;
    }
  }

  // Converts the tile's keys to integers in bf16.
  void pack_keys(const Tile& tile) {
    for (int key = 0; key < tile.count; ++key) {
      key_scales[key] = scale_of(tile.keys[key], d);
      const T* from = reinterpret_cast<const T*>(tile.keys[key]);
      uint16_t* to = key_halves + static_cast<size_t>(key) * d;
      int i = 0;
      for (; i + VL <= d; i += VL)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm512_cvtepi32_epi16(low_halves(from + i)));
      for (; i < d; ++i) to[i] = bit_of(from[i]);
    }
  }

  static uint16_t bit_of(uint16_t bits) { return bits; }
  static uint16_t bit_of(int8_t whole) { return to_bf16(whole); }
#else  // never called: no variant without the instructions is Paired
  static vf store_pairs(uint32_t* to, vf left, vf right);
  static void store_half(uint32_t* to, int which, vf numbers);
  template <int M>
  void multiply_pairs(const char* const* rows, const uint32_t* query, const float* scales, float* to) const;
  template <int M>
  void add_pairs(int pairs_of_keys, int first, const vf* decay, float* to) const;
  void pack_values(const Tile& tile);
  void pack_keys(const Tile& tile);
#endif
};
