// Python binding for the scans of recurrent layers.
#pragma once

#include <nanobind/nanobind.h>

namespace inlay {

// Adds scan_delta and scan_state_space to the module; models/mixers/compiled.py prepares their arguments.
void bind_scan(nanobind::module_& m);

}  // namespace inlay
