// The small steps between the matrix products of a decoder layer, and the unpacking of 4-bit weights.
#pragma once

#include <nanobind/nanobind.h>

namespace inlay {

// Adds rms_norm, silu_mul, rotate and unpack_int4 to the module; models/ops.py checks what it gives them.
void bind_layers(nanobind::module_& m);

}  // namespace inlay
