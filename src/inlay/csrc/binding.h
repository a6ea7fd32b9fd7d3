// What the parts of the Python interface share.
#pragma once

#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

namespace inlay {

template <class T>
using Column = nanobind::ndarray<T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;
template <class T>
using Table = nanobind::ndarray<T, nanobind::ndim<2>, nanobind::c_contig, nanobind::device::cpu>;

// Throws invalid_argument with `rule` if it does not hold.
inline void require(bool holds, const char* rule) {
  if (!holds) throw std::invalid_argument(rule);
}

template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

}  // namespace inlay
