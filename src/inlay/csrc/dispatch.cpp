// Chooses the version of the kernel for this processor.
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>

#include "kernel.h"

namespace inlay {

#ifdef INLAY_HAS_AVX512BF16
extern const Variant avx512bf16_variant;
#endif
#ifdef INLAY_HAS_AVX512
extern const Variant avx512_variant;
#endif
#ifdef INLAY_HAS_AVX2
extern const Variant avx2_variant;
#endif
#ifdef INLAY_HAS_NEON
extern const Variant neon_variant;
#endif
extern const Variant portable_variant;

namespace {

const Variant* const kVariants[] = {
#ifdef INLAY_HAS_AVX512BF16
    &avx512bf16_variant,
#endif
#ifdef INLAY_HAS_AVX512
    &avx512_variant,
#endif
#ifdef INLAY_HAS_AVX2
    &avx2_variant,
#endif
#ifdef INLAY_HAS_NEON
    &neon_variant,
#endif
    &portable_variant,
};

}  // namespace

const Variant& variant_by_name(const std::string& name) {
  for (const Variant* variant : kVariants)
    if (variant->supported() && (name.empty() || name == variant->name)) return *variant;
  throw std::invalid_argument("no kernel for the instruction set '" + name + "' runs here");
}

int variant_names(const char** names, int most) {
  int count = 0;
  for (const Variant* variant : kVariants)
    if (variant->supported() && count < most) names[count++] = variant->name;
  return count;
}

Scratch::~Scratch() { std::free(data_); }

char* Scratch::take(size_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes > size_) {
    std::free(data_);
    size_ = 0;
    data_ = static_cast<char*>(std::aligned_alloc(64, bytes));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = bytes;
  }
  return data_;
}

}  // namespace inlay
