// Vectors of VL floats, in the vector extensions of GCC and Clang. Included once by each variant, inside its namespace.

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));
typedef int8_t vb __attribute__((vector_size(VL)));

#define INLINE inline __attribute__((always_inline))

INLINE vf load(const float* from) {
  vf v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
INLINE vi load_int(const int32_t* from) {
  vi v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
INLINE void store(float* to, vf v) { std::memcpy(to, &v, sizeof v); }
INLINE vf load(const uint16_t* from) {  // bf16
#if defined(__AVX512F__)  // GCC would widen halves of the vector and join them
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#elif defined(__AVX2__)
  return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16);
#else
  vh v;
  std::memcpy(&v, from, sizeof v);
  return reinterpret_cast<vf>(__builtin_convertvector(v, vu) << 16);
#endif
}
INLINE vf load(const int8_t* from) {  // as integers
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  vb v;
  std::memcpy(&v, from, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, vi), vf);
#endif
}
INLINE vf all(float x) { return x - vf{}; }
INLINE vi all_int(int32_t x) { return x - vi{}; }
INLINE vf larger(vf a, vf b) { return a > b ? a : b; }  // b if one is NaN
INLINE vf smaller(vf a, vf b) { return a < b ? a : b; }

// Folds a vector to its half until one number is left.
template <int Width, class Fold>
INLINE float fold(const float* from, Fold both) {
  if constexpr (Width == 1) {
    return from[0];
  } else {
    typedef float half __attribute__((vector_size(Width * 2)));
    half low, high;
    std::memcpy(&low, from, sizeof low);
    std::memcpy(&high, from + Width / 2, sizeof high);
    float folded[Width / 2];
    const half result = both(low, high);
    std::memcpy(folded, &result, sizeof result);
    return fold<Width / 2>(folded, both);
  }
}
INLINE float sum_of(vf v) {
  float numbers[VL];
  store(numbers, v);
  return fold<VL>(numbers, [](auto a, auto b) { return a + b; });
}
INLINE float largest_of(vf v) {
  float numbers[VL];
  store(numbers, v);
  return fold<VL>(numbers, [](auto a, auto b) { return a > b ? a : b; });
}

// Transposes VL vectors of VL floats.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define INLAY_SHUFFLES 1
#endif
#endif
#ifdef INLAY_SHUFFLES
template <int W, size_t... E>
INLINE vf mix_low(vf a, vf b, std::index_sequence<E...>) {
  return __builtin_shufflevector(a, b, (E & W ? VL + E - W : E)...);
}
template <int W, size_t... E>
INLINE vf mix_high(vf a, vf b, std::index_sequence<E...>) {
  return __builtin_shufflevector(a, b, (E & W ? VL + E : E + W)...);
}
template <int W>
INLINE void transpose(vf* rows) {
  if constexpr (W < VL) {
#pragma GCC unroll 16
    for (int i = 0; i < VL; ++i)
      if ((i & W) == 0) {
        const vf a = rows[i], b = rows[i + W];
        rows[i] = mix_low<W>(a, b, std::make_index_sequence<VL>());
        rows[i + W] = mix_high<W>(a, b, std::make_index_sequence<VL>());
      }
    transpose<2 * W>(rows);
  }
}
// The sums of VL vectors, in their order.
template <int W = 1>
INLINE vf sum_each(vf* rows) {
  if constexpr (W == VL) {
    return rows[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < VL; i += 2 * W)
      rows[i] = mix_low<W>(rows[i], rows[i + W], std::make_index_sequence<VL>()) +
                mix_high<W>(rows[i], rows[i + W], std::make_index_sequence<VL>());
    return sum_each<2 * W>(rows);
  }
}
// The sum of one vector, added in the order of sum_each.
template <int W = 1>
INLINE float sum_adjacent(vf row) {
  if constexpr (W == VL)
    return row[0];
  else
    return sum_adjacent<2 * W>(row + mix_high<W>(row, row, std::make_index_sequence<VL>()));
}
#else
template <int W>
void transpose(vf* rows) {
  for (int i = 0; i < VL; ++i)
    for (int j = 0; j < i; ++j) {
      const float kept = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = kept;
    }
}
template <int W = 1>
vf sum_each(vf* rows) {
  vf sums;
  for (int i = 0; i < VL; ++i) sums[i] = sum_of(rows[i]);
  return sums;
}
inline float sum_adjacent(vf row) { return sum_of(row); }
#endif

// Element first + e of VL rows, taken as 32 bits each, goes to square[e].
template <class T>
INLINE void load_across(const T* const* from, int first, vf* square) {
  const float* rows[VL];
  for (int j = 0; j < VL; ++j) rows[j] = reinterpret_cast<const float*>(from[j]);
#if defined(__AVX2__) && !defined(__AVX512F__)  // halves are joined as they are loaded: only cheap shuffles are left
#pragma GCC unroll 2
  for (int part = 0; part < 2; ++part) {
    __m256 both[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j)
      both[j] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(rows[j] + first + 4 * part)),
                                     _mm_loadu_ps(rows[j + 4] + first + 4 * part), 1);
    const __m256d a = (__m256d)_mm256_unpacklo_ps(both[0], both[1]), b = (__m256d)_mm256_unpacklo_ps(both[2], both[3]);
    const __m256d c = (__m256d)_mm256_unpackhi_ps(both[0], both[1]), e = (__m256d)_mm256_unpackhi_ps(both[2], both[3]);
    square[4 * part] = (vf)_mm256_unpacklo_pd(a, b);
    square[4 * part + 1] = (vf)_mm256_unpackhi_pd(a, b);
    square[4 * part + 2] = (vf)_mm256_unpacklo_pd(c, e);
    square[4 * part + 3] = (vf)_mm256_unpackhi_pd(c, e);
  }
#else
  for (int j = 0; j < VL; ++j) square[j] = load(rows[j] + first);
  transpose<1>(square);
#endif
}

// To bf16, to nearest, ties to even; NaN stays NaN.
INLINE vh narrowed(vf v) {
  const vu bits = reinterpret_cast<vu>(v);
  const vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(v == v ? rounded : (bits >> 16) | 0x40u, vh);
}

INLINE void store(uint16_t* to, vf v) {  // as bf16
  const vh half = narrowed(v);
  std::memcpy(to, &half, sizeof half);
}

// One number in fp32 or bf16.
INLINE float number(const float* from) { return *from; }
INLINE float number(const uint16_t* from) { return from_bf16(*from); }
INLINE void put(float* to, float value) { *to = value; }
INLINE void put(uint16_t* to, float value) { *to = to_bf16(value); }

// Prefetches memory. The address need not be valid.
INLINE void prefetch(const char* from, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

// 2**x with a relative error below 2e-7; 0 where x < -126. NaN stays NaN, so that a broken model shows.
INLINE vf exp2_of(vf x) {
  const vf low = all(-126.0f), high = all(126.0f);
  const vi nothing = x < low;
  x = smaller(high, larger(low, x));
  const float magic = 12582912.0f;  // 1.5 * 2**23: adding it leaves the nearest integer in the low bits
  const vf rounded = x + magic;
  const vf f = x - (rounded - magic);  // in [-0.5, 0.5]
  vf p = f * 1.5403530e-4f + 1.3333558e-3f;
  p = p * f + 9.6181291e-3f;
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  const vi power = (reinterpret_cast<vi>(rounded) << 23) + 0x3f800000;
  // a product, because a sum of bits turns some NaN into numbers
  return nothing ? vf{} : p * reinterpret_cast<vf>(power);
}

INLINE vf tanh_of(vf x) {
  const vf e = exp2_of(smaller(all(20.0f), larger(all(-20.0f), x)) * 2.8853900817779268f);  // exp(2x)
  return 1.0f - 2.0f / (e + 1.0f);
}

// Weights that are multiplied later, fetched into the second-level cache line by line.
struct Ahead {
  const char* at;
  const char* end;
  int lines;  // for every cache line of a product's inputs

  INLINE void fetch() {
    for (int i = 0; i < lines && at < end; ++i, at += 64) __builtin_prefetch(at, 0, 2);
  }
};
