// Python binding for choosing tokens.
#pragma once

#include <nanobind/nanobind.h>

namespace inlay {

// Adds choose and philox to the module; sampling/compiled.py prepares their arguments.
void bind_choose(nanobind::module_& m);

}  // namespace inlay
