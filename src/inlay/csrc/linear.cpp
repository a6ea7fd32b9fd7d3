// Chooses the version of the linear layers for this processor.
#include "linear.h"

#include <type_traits>

#include "cpu.h"

namespace inlay {

template <class T>
RunLinear<T> linear_by_name(const std::string& name) {
  const auto asked = [&](const char* own) { return name.empty() || name == own; };
#ifdef INLAY_HAS_AVX2
  if constexpr (std::is_same<T, uint16_t>::value)
    if (asked("avx512bf16") && INLAY_CPU_AVX512BF16) return linear_avx512bf16;
  if (asked("avx512") && INLAY_CPU_AVX512) return linear_avx512;
  if (asked("avx2") && INLAY_CPU_AVX2) return linear_avx2;
#endif
  if (asked("portable")) return linear_portable;
  return nullptr;
}
template RunLinear<uint16_t> linear_by_name(const std::string& name);
template RunLinear<float> linear_by_name(const std::string& name);

}  // namespace inlay
