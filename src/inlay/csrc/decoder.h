// What a layer of a decoder like Llama's computes before and behind its attention, in bf16, in one call each.
#pragma once

#include <nanobind/nanobind.h>

namespace inlay {

// Adds Product and DecoderLayer to the module; models/few_rows.py makes them, and checks what it gives them.
void bind_decoder(nanobind::module_& m);

}  // namespace inlay
