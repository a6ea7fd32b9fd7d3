// Choosing tokens, for Python.
#pragma once

#include <nanobind/nanobind.h>

namespace inlay {

// Adds choose and philox to the module; engine/sampler/compiled.py prepares what they are given.
void bind_choose(nanobind::module_& m);

}  // namespace inlay
