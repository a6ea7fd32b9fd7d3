// Chooses the version of the linear layers for this processor.
#include "linear.h"

#include <cstring>

namespace inlay {

RunLinear linear_by_name(const char* name) {
  const auto asked = [name](const char* own) { return name == nullptr || std::strcmp(name, own) == 0; };
#ifdef INLAY_HAS_AVX2
  if (asked("avx512bf16") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    return linear_avx512bf16;
  if (asked("avx2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return linear_avx2;
#endif
  return asked("portable") ? linear_portable : nullptr;
}

}  // namespace inlay
