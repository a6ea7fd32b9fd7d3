// The narrow kernel: a few lanes, each a query vector along the head dimension. Reading keys and values is the lower
// bound of its time. The head dimension must be a multiple of VL (2 * VL if Paired).

// T: see Wide. Integers are not dequantized: scales of keys are applied to the scores, and scales of values to the
// weights.
template <class T, bool Paired>
struct Narrow {
  static constexpr bool kScaled = std::is_same<T, int8_t>::value;
  using Row = std::conditional_t<Paired, uint16_t, float>;  // type of keys in products
  static constexpr bool kConverted = !std::is_same<Row, T>::value;
  static constexpr int kBlock = 4;  // lanes that share loaded numbers
  static constexpr int kRow = kKeys + VL;    // scores of a lane, with room for a vector that begins in the tile

  const Work& work;
  const int d, lanes;
  float* queries;               // (lanes, d)
  float* turned;
  uint16_t* halves;             // rotated, as bf16
  float* sums;                  // (lanes, d)
  float* scores;                // (lanes, kRow)
  Row* near;                    // (VL, d): converted keys, for several lanes
  float top[kNarrowLanes], total[kNarrowLanes];
  const float* lane_queries = nullptr;
  int32_t shift = 0;
  bool ready = false;
  const Tile* ahead = nullptr;  // the next tile

  static void run(const Work& work, Scratch& scratch) {
    Narrow narrow(work, scratch);
    Extent rows;
    for (int lane = 0; lane < narrow.lanes; ++lane) rows.add(work.position_of(lane));
    for_each_tile(work, rows, narrow);
    for (int lane = 0; lane < narrow.lanes; ++lane)
      write_row(close_lane(work, lane, narrow.top[lane], narrow.total[lane]),
                narrow.sums + static_cast<size_t>(lane) * narrow.d, narrow.d);
  }

  Narrow(const Work& w, Scratch& scratch) : work(w), d(w.call.head_dim), lanes(w.lanes()) {
    const size_t size = static_cast<size_t>(lanes) * d;
    Arena arena{scratch.take((4 * size + static_cast<size_t>(lanes) * kRow + (kConverted ? VL * d : 0)) * sizeof(float) +
                              8 * 64)};
    queries = arena.take<float>(size);
    turned = arena.take<float>(size);
    halves = arena.take<uint16_t>(size);
    sums = arena.take<float>(size);
    scores = arena.take<float>(static_cast<size_t>(lanes) * kRow);
    near = kConverted ? arena.take<Row>(static_cast<size_t>(VL) * d) : nullptr;
    for (int lane = 0; lane < lanes; ++lane) {
      const char* from = work.call.query.at(work.head_of(lane), work.row_of(lane));
      for (int i = 0; i < d; ++i) queries[lane * d + i] = element(from, work.call.query.type, i);
      top[lane] = kNothing;
      total[lane] = 0.0f;
    }
    std::memset(sums, 0, size * sizeof(float));
  }

  void add(const Tile& tile) {
    for (int s = 0; s < tile.segments; ++s) {
      turn(tile.segment[s].shift);
      score(tile, tile.segment[s]);
    }
    float decay[kNarrowLanes];
    for (int lane = 0; lane < lanes; ++lane) decay[lane] = weigh(tile, lane);
    if constexpr (kScaled) scale_weights(tile);
    if constexpr (VL == 16) {  // with 32 registers a value is converted once for all lanes
      switch (lanes) {
        case 5: return add_values<5>(tile, 0, decay);
        case 6: return add_values<6>(tile, 0, decay);
        case 7: return add_values<7>(tile, 0, decay);
        case 8: return add_values<8>(tile, 0, decay);
      }
    }
    int lane = 0;
    for (; lane + kBlock <= lanes; lane += kBlock) add_values<kBlock>(tile, lane, decay);
    switch (lanes - lane) {
      case 3: return add_values<3>(tile, lane, decay);
      case 2: return add_values<2>(tile, lane, decay);
      case 1: return add_values<1>(tile, lane, decay);
    }
  }

  void turn(int32_t wanted) {
    if (ready && wanted == shift) return;
    shift = wanted;
    ready = true;
    lane_queries = queries;
    if (shift != 0) {
      const int at = turn_of(work.turns, shift), half = work.turns.half;
      const float* cos = work.turns.cos + static_cast<size_t>(at) * half;
      const float* sin = work.turns.sin + static_cast<size_t>(at) * half;
      const bool interleaved = work.call.options.interleaved;
      for (int lane = 0; lane < lanes; ++lane) {
        const float* from = queries + static_cast<size_t>(lane) * d;
        float* to = turned + static_cast<size_t>(lane) * d;
        for (int i = 0; i < half; ++i) {
          const int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
          to[a] = from[a] * cos[i] - from[b] * sin[i];
          to[b] = from[b] * cos[i] + from[a] * sin[i];
        }
        for (int i = 2 * half; i < d; ++i) to[i] = from[i];
      }
      lane_queries = turned;
    }
    if constexpr (Paired)
      for (int i = 0; i < lanes * d; ++i) halves[i] = to_bf16(lane_queries[i]);
  }

  // Pass 1: one vector of keys at a time for all lanes, while the keys are in the cache.
  void score(const Tile& tile, const Segment& segment) {
    const bool converted = kScaled || (kConverted && lanes > 1);
    for (int key = segment.begin; key < segment.end; key += VL) {
      const char* keys[VL];
      for (int j = 0; j < VL; ++j) keys[j] = tile.keys[std::min(key + j, segment.end - 1)];
      vf scale = all(1.0f);
      if constexpr (kScaled) {
        float scales[VL];
        for (int j = 0; j < VL; ++j) scales[j] = scale_of(keys[j], d);
        scale = load(scales);
      }
      if constexpr (kConverted)
        for (int j = 0; converted && j < VL; ++j) {
          ask_ahead(ahead, &Tile::keys, key + j, 0, d * sizeof(T) + (kScaled ? kScaleBytes : 0));
          convert(reinterpret_cast<const T*>(keys[j]), near + static_cast<size_t>(j) * d);
          keys[j] = reinterpret_cast<const char*>(near + static_cast<size_t>(j) * d);
        }
      for (int lane = 0; lane < lanes; ++lane) {  // results after the segment are overwritten or masked
        const vf product = lane == 0 && !converted ? streamed(keys, key) : products(keys, lane);
        store(scores + lane * kRow + key, kScaled ? product * scale : product);
      }
    }
  }

  INLINE void convert(const T* from, float* to) const {
    for (int i = 0; i < d; i += VL) store(to + i, load(from + i));
  }
  INLINE void convert(const int8_t* from, uint16_t* to) const {
#ifdef INLAY_PAIRS
    for (int i = 0; i < d; i += 2 * VL)
      _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)load(from + i + VL), (__m512)load(from + i)));
#endif
  }

  void scale_weights(const Tile& tile) {
    float scales[kKeys];
    for (int key = 0; key < tile.count; ++key) scales[key] = scale_of(tile.values[key], d);
    for (int lane = 0; lane < lanes; ++lane)
      for (int key = 0; key < tile.count; ++key) scores[lane * kRow + key] *= scales[key];
  }

  // The first lane's query with VL keys, one after another as they arrive from memory.
  INLINE vf streamed(const char* const* keys, int key) const {
    vf sum[VL];
#pragma GCC unroll 16
    for (int j = 0; j < VL; ++j) {
      ask_ahead(ahead, &Tile::keys, key + j, 0, d * sizeof(T));
      vf one = {};
      if constexpr (Paired) {
#ifdef INLAY_PAIRS
        for (int i = 0; i < d; i += 2 * VL)
          one = (vf)_mm512_dpbf16_ps((__m512)one, (__m512bh)_mm512_loadu_si512(keys[j] + 2 * i),
                                     (__m512bh)_mm512_loadu_si512(halves + i));
#endif
      } else {
        for (int i = 0; i < d; i += VL) one += load(reinterpret_cast<const T*>(keys[j]) + i) * load(lane_queries + i);
      }
      sum[j] = one;
    }
    return sum_each(sum);
  }

  // One lane's query with VL keys that are in the cache by now.
  INLINE vf products(const char* const* keys, int lane) const {
    vf sum[VL] = {};
    if constexpr (Paired) {
#ifdef INLAY_PAIRS
      for (int i = 0; i < d; i += 2 * VL) {
        const auto q = (__m512bh)_mm512_loadu_si512(halves + static_cast<size_t>(lane) * d + i);
#pragma GCC unroll 16
        for (int j = 0; j < VL; ++j)
          sum[j] = (vf)_mm512_dpbf16_ps((__m512)sum[j], (__m512bh)_mm512_loadu_si512(keys[j] + 2 * i), q);
      }
#endif
    } else {
      for (int i = 0; i < d; i += VL) {
        const vf q = load(lane_queries + static_cast<size_t>(lane) * d + i);
#pragma GCC unroll 16
        for (int j = 0; j < VL; ++j) sum[j] += load(reinterpret_cast<const Row*>(keys[j]) + i) * q;
      }
    }
    return sum_each(sum);
  }

  // Pass 2 for one lane. Returns the factor of its sums so far.
  float weigh(const Tile& tile, int lane) {
    const Options& options = work.call.options;
    float* score = scores + lane * kRow;
    for (int key = tile.count; key % VL; ++key) score[key] = 0.0f;
    const int count = (tile.count + VL - 1) / VL * VL;
    const int32_t position = work.position_of(lane);
    const float slope = options.slopes ? options.slopes[work.head_of(lane)] * kLog2E : 0.0f;
    vf highest = all(kNothing);
    for (int key = 0; key < count; key += VL) {
      vf s = load(score + key) * options.scale;
      if (options.softcap) s = options.softcap * tanh_of(s / options.softcap);
      s *= kLog2E;
      if (options.slopes) s -= slope * __builtin_convertvector(position - load_int(tile.position + key), vf);
      const vi seen = (load_int(tile.from + key) <= position) & (load_int(tile.until + key) > position);
      s = seen ? s : all(-std::numeric_limits<float>::infinity());
      highest = larger(highest, s);
      store(score + key, s);
    }
    const float now = std::max(top[lane], largest_of(highest));
    const float decay = std::exp2(top[lane] - now);
    vf sum = {};
    for (int key = 0; key < count; key += VL) {
      const vf weight = exp2_of(load(score + key) - now);
      sum += weight;
      store(score + key, weight);
    }
    top[lane] = now;
    total[lane] = total[lane] * decay + sum_of(sum);
    return decay;
  }

  // Pass 3 for B lanes.
  template <int B>
  void add_values(const Tile& tile, int lane, const float* decay) {
    int i = 0;
    constexpr int C = B * 4 > (VL == 16 ? 16 : 12) ? 2 : 4;  // vectors of sums that fit into registers
    for (; i + C * VL <= d; i += C * VL) add_columns<B, C>(tile, lane, i, decay);
    for (; i + VL <= d; i += VL) add_columns<B, 1>(tile, lane, i, decay);
  }

  template <int B, int C>
  INLINE void add_columns(const Tile& tile, int lane, int first, const float* decay) {
    vf sum[B][C];
    for (int b = 0; b < B; ++b)
      for (int c = 0; c < C; ++c) sum[b][c] = load(sums + static_cast<size_t>(lane + b) * d + first + c * VL) * decay[lane + b];
    for (int key = 0; key < tile.count; ++key) {
      const T* at = reinterpret_cast<const T*>(tile.values[key]) + first;
      if (lane == 0) ask_ahead(ahead, &Tile::values, key, first * sizeof(T), C * VL * sizeof(T));
      vf value[C];
      for (int c = 0; c < C; ++c) value[c] = load(at + c * VL);
      for (int b = 0; b < B; ++b) {
        const float weight = scores[(lane + b) * kRow + key];
        for (int c = 0; c < C; ++c) sum[b][c] += weight * value[c];
      }
    }
    for (int b = 0; b < B; ++b)
      for (int c = 0; c < C; ++c) store(sums + static_cast<size_t>(lane + b) * d + first + c * VL, sum[b][c]);
  }
};
