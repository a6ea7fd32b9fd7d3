// A layer of a decoder like Llama's, in bf16 or fp32: the steps before and after its attention, in one call each.
#pragma once

#include <nanobind/nanobind.h>

namespace inlay {

// Adds Product and DecoderLayer to the module; models/few_rows.py makes them, and checks what it gives them.
void bind_decoder(nanobind::module_& m);

}  // namespace inlay
