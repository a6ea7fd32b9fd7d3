// inlay._kernel: the kernel's Python interface. Tensors are passed as addresses with strides; attention/cpu.py checks
// them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "attend.h"
#include "binding.h"
#include "choose_binding.h"
#include "decoder.h"
#include "layers.h"
#include "parallel.h"
#include "scan_binding.h"

namespace nb = nanobind;
using namespace inlay;

namespace {

using Numbers = Column<const int64_t>;

Tables::Column column_of(const Numbers& column) { return {column.data(), static_cast<int64_t>(column.shape(0))}; }

Plan plan_of(const Numbers& positions, const Numbers& slots, const Numbers& rows, const Numbers& row_first,
             const Table<const int64_t>& stretches, const Numbers& stretch_first, const Numbers& growing) {
  if (stretches.shape(0) != 5) throw std::invalid_argument("the stretches of a plan are a table of 5 rows");
  return Plan({column_of(positions), column_of(slots), column_of(rows), column_of(row_first), stretches.data(),
               static_cast<int64_t>(stretches.shape(1)), column_of(stretch_first), column_of(growing)});
}

std::vector<std::string> instruction_sets() {
  const char* names[8];
  const int count = variant_names(names, 8);
  return std::vector<std::string>(names, names + count);
}

// (rows, [(slot, length, position as encoded, shift, masked), …]) of every block.
nb::list described(const Attention& attention) {
  nb::list blocks;
  for (const Block& block : attention.plan().blocks()) {
    nb::list stretches;
    for (const Stretch& s : block.stretches)
      stretches.append(nb::make_tuple(s.slot, s.length, s.position, s.shift, s.masked));
    blocks.append(nb::make_tuple(block.rows, stretches));
  }
  return blocks;
}

}  // namespace

NB_MODULE(_kernel, m) {
  // A thread that still computes when the interpreter ends holds objects. Users get no warning about that.
  nb::set_leak_warnings(false);
  m.doc() = "inlay's compiled CPU kernel";
  m.def("instruction_sets", &instruction_sets, "Names of the versions that run on this processor, best first.");
  m.def("threading", [] { return std::string(threading()); }, "The runtime of the threads: 'openmp' or 'std'.");
  m.def("run_awake", [](int threads, const nb::callable& work) { run_awake(threads, [&] { work(); }); },
        "Calls `work` on this thread. The kernel's calls in it find the threads awake (parallel.h).");

  nb::enum_<Type>(m, "Type", "Of the numbers of a tensor; int8 has a scale behind each row.")
      .value("float32", Type::f32)
      .value("bfloat16", Type::bf16)
      .value("int8", Type::i8);

  nb::class_<Heads>(m, "Heads", "A (heads, rows, head_dim) tensor; strides in elements.")
      .def("__init__",
           [](Heads* self, uint64_t address, Type type, int64_t head_stride, int64_t row_stride) {
             new (self) Heads{reinterpret_cast<char*>(address), type, head_stride, row_stride};
           },
           nb::arg("address"), nb::arg("type"), nb::arg("head_stride"), nb::arg("row_stride"));

  nb::class_<Options>(m, "Options", "How a layer attends; arrays are addresses of fp32 numbers, 0 for none.")
      .def("__init__",
           [](Options* self, float scale, int64_t window, float softcap, uint64_t sinks, uint64_t slopes,
              uint64_t frequencies, int rotated, bool interleaved) {
             constexpr int64_t farther_than_any = 1 << 30;  // so that a position plus a window does not overflow
             new (self) Options{scale, static_cast<int32_t>(std::clamp<int64_t>(window, -1, farther_than_any)), softcap, reinterpret_cast<const float*>(sinks),
                                reinterpret_cast<const float*>(slopes), reinterpret_cast<const float*>(frequencies),
                                rotated, interleaved};
           },
           nb::arg("scale"), nb::arg("window"), nb::arg("softcap"), nb::arg("sinks"), nb::arg("slopes"),
           nb::arg("frequencies"), nb::arg("rotated"), nb::arg("interleaved"));

  nb::class_<Workspace>(m, "Workspace", "Memory that calls work in, one after the other.")
      .def(nb::init<int64_t>(), nb::arg("most_partials"))
      .def_prop_ro("bytes", &Workspace::bytes);

  nb::class_<Attention>(m, "Attention", "A plan as the kernel's work.")
      .def("__init__",
           [](Attention* self, const Numbers& positions, const Numbers& slots, const Numbers& rows,
              const Numbers& row_first, const Table<const int64_t>& stretches, const Numbers& stretch_first,
              const Numbers& growing, const std::string& instruction_set, int threads) {
             const Variant& variant = variant_by_name(instruction_set);
             new (self) Attention(plan_of(positions, slots, rows, row_first, stretches, stretch_first, growing),
                                  variant, threads);
           },
           nb::arg("positions"), nb::arg("slots"), nb::arg("rows"), nb::arg("row_first"), nb::arg("stretches"),
           nb::arg("stretch_first"), nb::arg("growing"), nb::arg("instruction_set"), nb::arg("threads"))
      .def("attend",
           [](Attention& self, Workspace& workspace, const Heads& query, const Heads& key, const Heads& value,
              const Heads& pool_keys, const Heads& pool_values, const Heads& output, int heads, int kv_heads,
              int head_dim, int64_t slots, const Options& options) {
             nb::gil_scoped_release released;
             self.attend({query, key, value, pool_keys, pool_values, output, heads, kv_heads, head_dim, slots, options},
                         workspace);
           })
      .def("advance", &Attention::advance, "One token further on, where every row decodes.")
      .def_prop_ro("rows", [](const Attention& self) { return self.plan().positions().size(); })
      .def("blocks", &described);

  bind_layers(m);
  bind_decoder(m);
  bind_choose(m);
  bind_scan(m);
}
