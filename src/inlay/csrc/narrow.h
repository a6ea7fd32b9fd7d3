// The narrow kernel: a few lanes, each a query vector along the head dimension. Reading keys and values is the lower
// bound of its time. The head dimension must be a multiple of 16.
//
// The numbers of a lane are added in the order of the wide kernel, so that a row has the same bits in both (but for
// windows and sinks, kernel.md): a score over the head dimension, weights and weighted values key by key, or pair by
// pair. Keys are transposed for this.

// T: see Wide.
template <class T, bool Paired>
struct Narrow {
  static constexpr bool kInteger = std::is_same<T, int8_t>::value;
  static constexpr bool kScaled = Paired && kInteger;  // read as integers: scales of keys are applied to the scores,
                                                       // and scales of values to the weights
  static constexpr int kKeyBytes = kInteger ? kScaleBytes : 0;  // of a key beside its numbers
  static constexpr int kBlock = 4;                     // lanes that share loaded numbers
  static constexpr int kSpan = (VL == 16 ? 2 : 4) * VL;  // keys that are transposed together
  static constexpr int kDims = std::is_same<T, uint16_t>::value && VL <= 8 ? 2 * VL : VL;  // transposed together
  static constexpr int kRow = kKeys + kSpan;           // scores of a lane, with room for a span that begins in the tile
  static constexpr int kSlots = std::max(kNarrowLanes, VL);  // lanes, in whole vectors

  const Work& work;
  const int d, lanes;
  const int width;              // d in whole vectors of pairs
  float* queries;               // (lanes, d)
  float* turned;
  uint16_t* halves;             // rotated, as bf16: (lanes, width), zeros behind d
  uint32_t* pairs;              // (lanes, kRow / 2): weights of adjacent keys as bf16, if Paired,
  float* pair_sums;             // and their sums
  float* sums;                  // (lanes, d)
  float* scores;                // (lanes, kRow)
  float* across;                // (d, keys of a span), if not Paired
  uint16_t* near;               // (VL, width): integers as bf16, if kScaled
  float top[kSlots], total[kSlots];
  float value_scales[kKeys];    // of integers
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

  Narrow(const Work& w, Scratch& scratch)
      : work(w), d(w.call.head_dim), lanes(w.lanes()), width((d + 2 * VL - 1) / (2 * VL) * (2 * VL)) {
    const size_t size = static_cast<size_t>(lanes) * d, wide = static_cast<size_t>(lanes) * width;
    const size_t floats = 3 * size + wide + static_cast<size_t>(lanes) * kRow * (Paired ? 2 : 1) +
                          (Paired ? VL : kSpan) * static_cast<size_t>(width);
    Arena arena{scratch.take(floats * sizeof(float) + 10 * 64)};
    queries = arena.take<float>(size);
    turned = arena.take<float>(size);
    halves = arena.take<uint16_t>(wide);
    sums = arena.take<float>(size);
    scores = arena.take<float>(static_cast<size_t>(lanes) * kRow);
    pairs = Paired ? arena.take<uint32_t>(static_cast<size_t>(lanes) * kRow / 2) : nullptr;
    pair_sums = Paired ? arena.take<float>(static_cast<size_t>(lanes) * kRow / 2) : nullptr;
    across = Paired ? nullptr : arena.take<float>(static_cast<size_t>(kSpan) * d);
    near = kScaled ? arena.take<uint16_t>(static_cast<size_t>(VL) * width) : nullptr;
    for (int lane = 0; lane < lanes; ++lane) {
      const char* from = work.call.query.at(work.head_of(lane), work.row_of(lane));
      for (int i = 0; i < d; i += VL) store(queries + lane * d + i, elements(from, work.call.query.type, i));
    }
    std::fill(top, top + kSlots, kNothing);
    std::fill(total, total + kSlots, 0.0f);
    std::memset(sums, 0, size * sizeof(float));
    std::memset(halves, 0, wide * sizeof(uint16_t));
  }

  void add(const Tile& tile) {
    for (int s = 0; s < tile.segments; ++s) {
      turn(tile.segment[s].shift);
      score(tile, tile.segment[s]);
    }
    if constexpr (kInteger) {
      for (int key = 0; key < tile.count; ++key) value_scales[key] = scale_of(tile.values[key], d);
      std::fill(value_scales + tile.count, value_scales + kKeys, 0.0f);
    }
    float decay[kSlots];
    weigh(tile, decay);
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
      for (int lane = 0; lane < lanes; ++lane)
        for (int i = 0; i < d; i += VL) store(halves + lane * width + i, load(lane_queries + lane * d + i));
  }

  // Pass 1: scores of a segment's keys for all lanes. Results after the segment are overwritten or masked.
  void score(const Tile& tile, const Segment& segment) {
    if constexpr (Paired) {
      for (int key = segment.begin; key < segment.end; key += VL) score_pairs(tile, key, segment.end);
    } else {
      switch (lanes) {
        case 1: return score_few<1>(tile, segment);
        case 2: return score_few<2>(tile, segment);
        case 3: return score_few<3>(tile, segment);
        default: return score_many(tile, segment);
      }
    }
  }

  // B lanes with one vector of keys at a time, which stays in registers.
  template <int B>
  void score_few(const Tile& tile, const Segment& segment) {
    const int step = d / kDims;
    for (int key = segment.begin; key < segment.end; key += VL) {
      const T* from[VL];
      for (int j = 0; j < VL; ++j) from[j] = key_at(tile, std::min(key + j, segment.end - 1));
      vf sum[B] = {};
      for (int i = 0, n = 0; i < d; i += kDims, ++n) {
        for (int j = n; j < VL; j += step)  // spread, because a processor waits for few lines at once
          ask_ahead(ahead, &Tile::keys, key + j, 0, kKeyBytes + d * sizeof(T));
        vf square[kDims];
        lay_across(from, i, square);
        add_dims<B>(square, i, sum, std::make_index_sequence<kDims>());
      }
      for (int b = 0; b < B; ++b) store(scores + b * kRow + key, sum[b]);
    }
  }

  template <int B, size_t... E>
  INLINE void add_dims(const vf* square, int first, vf* sum, std::index_sequence<E...>) const {
    const float* query = lane_queries + first;
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) ((sum[b] += query[b * d + E] * square[E]), ...);
  }

  // All lanes with a span of keys at a time.
  void score_many(const Tile& tile, const Segment& segment) {
    constexpr int V = kSpan / VL;
    for (int key = segment.begin; key < segment.end; key += kSpan) {
      for (int v = 0; v < V; ++v) {
        const T* from[VL];
        for (int j = 0; j < VL; ++j) {
          from[j] = key_at(tile, std::min(key + v * VL + j, segment.end - 1));
          ask_ahead(ahead, &Tile::keys, key + v * VL + j, 0, kKeyBytes + d * sizeof(T));
        }
        for (int i = 0; i < d; i += kDims) {
          vf square[kDims];
          lay_across(from, i, square);
          for (int e = 0; e < kDims; ++e) store(across + ((i + e) * V + v) * VL, square[e]);
        }
      }
      int lane = 0;
      for (; lane + 2 <= lanes; lane += 2) multiply<2, V>(lane, key);
      if (lane < lanes) multiply<1, V>(lane, key);
    }
  }

  static const T* key_at(const Tile& tile, int key) { return reinterpret_cast<const T*>(tile.keys[key]); }

  // Dimensions first … first + kDims - 1 of VL keys, as fp32, each in one vector.
  INLINE void lay_across(const T* const* from, int first, vf* square) const {
    if constexpr (std::is_same<T, uint16_t>::value && VL <= 8) {  // pairs are transposed, and then separated
      vf pairs[VL];
      load_across(from, first / 2, pairs);
      for (int e = 0; e < VL; ++e) {
        square[2 * e] = reinterpret_cast<vf>(reinterpret_cast<vu>(pairs[e]) << 16);
        square[2 * e + 1] = reinterpret_cast<vf>(reinterpret_cast<vu>(pairs[e]) & 0xffff0000u);
      }
    } else if constexpr (std::is_same<T, float>::value) {
      load_across(from, first, square);
    } else {
      for (int j = 0; j < VL; ++j) {
        square[j] = load(from[j] + first);
        if constexpr (kInteger) square[j] *= scale_of(reinterpret_cast<const char*>(from[j]), d);
      }
      transpose<1>(square);
    }
  }

  // B lanes with the keys that lie across.
  template <int B, int V>
  INLINE void multiply(int lane, int key) const {
    vf sum[B][V] = {};
    const float* at = across;
    const float* query = lane_queries + static_cast<size_t>(lane) * d;
    for (int i = 0; i < d; ++i, at += V * VL)
      for (int b = 0; b < B; ++b)
        for (int v = 0; v < V; ++v) sum[b][v] += query[b * d + i] * load(at + v * VL);
    for (int b = 0; b < B; ++b)
      for (int v = 0; v < V; ++v) store(scores + (lane + b) * kRow + key + v * VL, sum[b][v]);
  }

  // One vector of keys with products of bf16 pairs. VL pairs of dimensions at a time stay in registers.
  void score_pairs(const Tile& tile, int key, int end) {
    const char* keys[VL];
    for (int j = 0; j < VL; ++j) keys[j] = tile.keys[std::min(key + j, end - 1)];
    float scales[VL];
    if constexpr (kScaled)
      for (int j = 0; j < VL; ++j) {
        scales[j] = scale_of(keys[j], d);
        ask_ahead(ahead, &Tile::keys, key + j, 0, d * sizeof(T) + kScaleBytes);
        convert(reinterpret_cast<const T*>(keys[j]), near + static_cast<size_t>(j) * width);
        keys[j] = reinterpret_cast<const char*>(near + static_cast<size_t>(j) * width);
      }
    for (int i = 0; i < d / 2; i += VL) {
      vf square[VL];
      if constexpr (!kScaled)
        for (int j = 0; j < VL; ++j) ask_ahead(ahead, &Tile::keys, key + j, 4 * i, 4 * VL);
      if (kScaled || i + VL <= d / 2)
        for (int j = 0; j < VL; ++j) square[j] = load(reinterpret_cast<const float*>(keys[j]) + i);
      else
        for (int j = 0; j < VL; ++j) square[j] = some_pairs(keys[j] + 4 * i, d / 2 - i);
      transpose<1>(square);
      int lane = 0;
      for (; lane + kBlock <= lanes; lane += kBlock) add_pairs<kBlock>(square, lane, i, key);
      switch (lanes - lane) {
        case 3: add_pairs<3>(square, lane, i, key); break;
        case 2: add_pairs<2>(square, lane, i, key); break;
        case 1: add_pairs<1>(square, lane, i, key); break;
      }
    }
    if constexpr (kScaled)
      for (int lane = 0; lane < lanes; ++lane) {
        float* score = scores + lane * kRow + key;
        store(score, load(score) * load(scales));
      }
  }

  // `count` pairs, then zeros.
  INLINE vf some_pairs(const char* from, int count) const {
#ifdef INLAY_PAIRS
    return (vf)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#endif
    return vf{};
  }

  INLINE void convert(const int8_t* from, uint16_t* to) const {
#ifdef INLAY_PAIRS
    for (int i = 0; i < d; i += 2 * VL) {
      const vf high = i + VL < d ? load(from + i + VL) : vf{};
      _mm512_storeu_si512(to + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)load(from + i)));
    }
#endif
  }

  // Adds the products of B lanes with VL pairs of dimensions, from pair `first` on, to the scores of VL keys.
  template <int B>
  INLINE void add_pairs(const vf* square, int lane, int first, int key) const {
#ifdef INLAY_PAIRS
    float* to = scores + lane * kRow + key;
    const uint16_t* query = halves + static_cast<size_t>(lane) * width + 2 * first;
    vf sum[B];
    for (int b = 0; b < B; ++b) sum[b] = first ? load(to + b * kRow) : vf{};
#pragma GCC unroll 16
    for (int e = 0; e < VL; ++e)
      for (int b = 0; b < B; ++b) {
        int pair;
        std::memcpy(&pair, query + static_cast<size_t>(b) * width + 2 * e, 4);
        sum[b] = (vf)_mm512_dpbf16_ps((__m512)sum[b], (__m512bh)square[e], (__m512bh)_mm512_set1_epi32(pair));
      }
    for (int b = 0; b < B; ++b) store(to + b * kRow, sum[b]);
#endif
  }

  // Pass 2: from scores to weights, and the factor of each lane's sums so far.
  void weigh(const Tile& tile, float* decay) {
    const Options& options = work.call.options;
    const float factor = factor_of(options);
    const float never = -std::numeric_limits<float>::infinity();
    const int count = (tile.count + VL - 1) / VL * VL, paired = (tile.count + 2 * VL - 1) / (2 * VL) * (2 * VL);
    float highest[kSlots] = {};
    for (int lane = 0; lane < lanes; ++lane) {
      float* score = scores + lane * kRow;
      std::fill(score + tile.count, score + count, never);
      if (tile.masked || is_changed(options)) prepare(tile, lane, count);
      if constexpr (Paired) std::fill(score + count, score + paired, never);
      vf most = load(score);
      for (int key = VL; key < count; key += VL) most = larger(most, load(score + key));
      highest[lane] = largest_of(most);
    }
    for (int slot = 0; slot < kSlots; slot += VL) {
      const vf before = load(top + slot), now = larger(before, load(highest + slot) * factor);
      store(decay + slot, exp2_of(before - now));
      store(top + slot, now);
    }
    for (int lane = 0; lane < lanes; ++lane) {
      float* score = scores + lane * kRow;
      const vf now = all(top[lane]);
      const auto weight = [&](int key) { return exp2_of(load(score + key) * factor - now); };
      if constexpr (Paired)
        for (int key = 0; key < paired; key += 2 * VL) pair_weights(lane, key, weight(key), weight(key + VL));
      else
        for (int key = 0; key < count; key += VL) store(score + key, weight(key));
    }
    for (int slot = 0; slot < kSlots; slot += VL) store(total + slot, load(total + slot) * load(decay + slot));
  }

  void prepare(const Tile& tile, int lane, int count) {
    const Options& options = work.call.options;
    const vi position = all_int(work.position_of(lane));
    const vf slope = all(options.slopes ? options.slopes[work.head_of(lane)] * kLog2E : 0.0f);
    float* score = scores + lane * kRow;
    for (int key = 0; key < count; key += VL) {
      const vf s = changed(options, load(score + key), slope, position - load_int(tile.position + key));
      const vi seen = (load_int(tile.from + key) <= position) & (load_int(tile.until + key) > position);
      store(score + key, seen ? s : all(-std::numeric_limits<float>::infinity()));
    }
  }

  // Takes the weights of keys `key` … key + 2 * VL - 1 as pairs of adjacent ones, and the sum of each pair. low: those of
  // the first VL keys.
  INLINE void pair_weights(int lane, int key, vf low, vf high) const {
#ifdef INLAY_PAIRS
    const size_t at = (static_cast<size_t>(lane) * kRow + key) / 2;
    if constexpr (kScaled) {
      const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
      store(pair_sums + at, (vf)_mm512_permutex2var_ps((__m512)low, even, (__m512)high) +
                                (vf)_mm512_permutex2var_ps((__m512)low, odd, (__m512)high));
      low *= load(value_scales + key);
      high *= load(value_scales + key + VL);
    }
    const auto both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    _mm512_storeu_si512(pairs + at, both);
    if constexpr (!kScaled)
      store(pair_sums + at, (vf)_mm512_slli_epi32(both, 16) +
                                (vf)_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
#endif
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
    float weights[B];  // their sum is a chain of additions, which costs nothing beside the products
    for (int b = 0; b < B; ++b) weights[b] = total[lane + b];
    for (int b = 0; b < B; ++b)
      for (int c = 0; c < C; ++c) sum[b][c] = load(sums + static_cast<size_t>(lane + b) * d + first + c * VL) * decay[lane + b];
    if constexpr (Paired) {
      add_pairs_of_values(tile, lane, first, weights, sum);
    } else for (int key = 0; key < tile.count; ++key) {
      const T* at = reinterpret_cast<const T*>(tile.values[key]) + first;
      if (lane == 0) ask_ahead(ahead, &Tile::values, key, first * sizeof(T), C * VL * sizeof(T));
      vf value[C];
      for (int c = 0; c < C; ++c) {
        value[c] = load(at + c * VL);
        if constexpr (kInteger) value[c] *= value_scales[key];
      }
      for (int b = 0; b < B; ++b) {
        const float weight = scores[(lane + b) * kRow + key];
        weights[b] += weight;
        for (int c = 0; c < C; ++c) sum[b][c] += weight * value[c];
      }
    }
    for (int b = 0; b < B; ++b)
      for (int c = 0; c < C; ++c) store(sums + static_cast<size_t>(lane + b) * d + first + c * VL, sum[b][c]);
    if (first + C * VL == d)
      for (int b = 0; b < B; ++b) total[lane + b] = weights[b];
  }

  // One product takes the values of two adjacent keys. An odd last key is paired with itself, at a weight of 0.
  template <int B, int C>
  INLINE void add_pairs_of_values(const Tile& tile, int lane, int first, float (&weights)[B], vf (&sum)[B][C]) const {
#ifdef INLAY_PAIRS
    for (int key = 0; key < tile.count; key += 2) {
      const int next = std::min(key + 1, tile.count - 1);
      const T* left = reinterpret_cast<const T*>(tile.values[key]) + first;
      const T* right = reinterpret_cast<const T*>(tile.values[next]) + first;
      if (lane == 0) {
        ask_ahead(ahead, &Tile::values, key, first * sizeof(T), C * VL * sizeof(T));
        ask_ahead(ahead, &Tile::values, key + 1, first * sizeof(T), C * VL * sizeof(T));
      }
      __m512i value[C];
      for (int c = 0; c < C; ++c) value[c] = side_by_side(left + c * VL, right + c * VL);
      for (int b = 0; b < B; ++b) {
        const size_t at = (static_cast<size_t>(lane + b) * kRow + key) / 2;
        weights[b] += pair_sums[at];
        const auto weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[at]));
        for (int c = 0; c < C; ++c) sum[b][c] = (vf)_mm512_dpbf16_ps((__m512)sum[b][c], (__m512bh)value[c], weight);
      }
    }
#endif
  }
};
