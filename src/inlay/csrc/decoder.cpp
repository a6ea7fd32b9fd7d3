#include "decoder.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

#include "attend.h"
#include "kernel.h"
#include "linear.h"
#include "parallel.h"
#include "quantized.h"
#include "steps.h"

namespace nb = nanobind;

namespace inlay {
namespace {

template <class T>
T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}
uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

// A bf16 linear layer with any kind of weight. Rows are contiguous.
class Product {
 public:
  Product(const Linear& layer, RunLinear run) : layer_(layer), direct_(run) {}
  Product(const Quantized& layer, QuantizedLinear run) : layer_(layer), quantized_(run) {}

  int64_t in() const {
    return std::visit([](const auto& layer) { return layer.in; }, layer_);
  }
  int64_t out() const {
    return std::visit([](const auto& layer) { return layer.out; }, layer_);
  }

  // x: (rows, in), y: (rows, out).
  void operator()(const uint16_t* x, uint16_t* y, int64_t rows, int threads) const {
    if (const auto* stored = std::get_if<Linear>(&layer_)) {
      Linear layer = *stored;
      layer.x = x, layer.x_stride = layer.in, layer.y = y, layer.y_stride = layer.out, layer.rows = rows;
      direct_(layer, worthwhile(threads, seconds_of(layer)));
    } else {
      Quantized layer = std::get<Quantized>(layer_);
      layer.x = x, layer.x_stride = layer.in, layer.y = y, layer.y_stride = layer.out, layer.rows = rows;
      quantized_(layer, worthwhile(threads, seconds_of(layer)));
    }
  }

 private:
  std::variant<Linear, Quantized> layer_;
  RunLinear direct_ = nullptr;
  QuantizedLinear quantized_ = nullptr;
};

Product direct_product(uint64_t weight, uint64_t bias, int64_t in, int64_t out, const std::string& instruction_set) {
  const RunLinear run = linear_by_name(instruction_set.empty() ? nullptr : instruction_set.c_str());
  if (run == nullptr) throw std::invalid_argument("no linear layer for the instruction set '" + instruction_set + "'");
  return Product(Linear{nullptr, in, at<uint16_t>(weight), at<uint16_t>(bias), nullptr, out, 0, in, out}, run);
}

Product quantized_product(uint64_t weight, uint64_t scales, uint64_t bias, int64_t in, int64_t out, int bits,
                          bool bf16_grid, bool zeros, const std::string& instruction_set) {
  const QuantizedLinear run = quantized_by_name(instruction_set.empty() ? nullptr : instruction_set.c_str());
  if (run == nullptr) throw std::invalid_argument("ask quantized_supported() first");
  return Product({nullptr, in, at<char>(weight), at<float>(scales), at<float>(bias), nullptr, out, 0, in, out, bits,
                  Type::bf16, bf16_grid ? Type::bf16 : Type::f32, zeros},
                 run);
}

// The attention of one layer in one pass: the plan, and the layer's stored keys and values.
struct Stored {
  Attention& attention;
  Workspace& workspace;
  const Heads &keys, &values;
  int64_t slots;
  const Options& options;
};

// RMSNorm's weight, (width,) in bf16; null for no norm.
struct Norm {
  const uint16_t* weight;
  float eps;

  void operator()(const uint16_t* x, uint16_t* out, int64_t rows, int64_t count, int64_t width, int64_t stride,
                  int threads) const {
    rms_norm(address_of(x), address_of(weight), address_of(out), true, rows, count, width, stride, stride, eps, threads);
  }
};

class DecoderLayer {
 public:
  DecoderLayer(const Product& qkv, const Product& out, const Product& gate_up, const Product& down, Norm before_attention,
               Norm before_mlp, Norm of_query, Norm of_key, int64_t heads, int64_t kv_heads, int64_t head_dim)
      : qkv_(qkv), out_(out), gate_up_(gate_up), down_(down), before_attention_(before_attention),
        before_mlp_(before_mlp), of_query_(of_query), of_key_(of_key), heads_(heads), kv_heads_(kv_heads),
        head_dim_(head_dim) {
    const int64_t width = qkv.in();
    if (qkv.out() != (heads + 2 * kv_heads) * head_dim || out.in() != heads * head_dim || out.out() != width ||
        gate_up.in() != width || gate_up.out() != 2 * down.in() || down.out() != width)
      throw std::invalid_argument("the products of a decoder's layer do not fit each other");
  }

  // x: (rows, width) → qkv: (rows, heads + 2 · kv_heads, head_dim), with queries and keys rotated. cos, sin: (rows,
  // head_dim).
  void before(const uint16_t* x, const float* cos, const float* sin, uint16_t* qkv, int64_t rows, int threads) const {
    static thread_local Scratch scratch;
    const int64_t width = qkv_.in(), step = qkv_.out();
    auto* normed = reinterpret_cast<uint16_t*>(scratch.take(rows * width * 2));
    before_attention_(x, normed, rows, 1, width, width, threads);
    qkv_(normed, qkv, rows, threads);
    uint16_t* keys = qkv + heads_ * head_dim_;
    if (of_query_.weight) of_query_(qkv, qkv, rows, heads_, head_dim_, step, threads);
    if (of_key_.weight) of_key_(keys, keys, rows, kv_heads_, head_dim_, step, threads);
    rotate(address_of(qkv), address_of(cos), address_of(sin), true, rows, heads_ + kv_heads_, head_dim_, step, threads);
  }

  // Runs the whole layer. x: (rows, width), replaced by the layer's output.
  void run(uint16_t* x, const float* cos, const float* sin, int64_t rows, int threads, const Stored& stored) const {
    static thread_local Scratch scratch;
    const int64_t step = qkv_.out(), wide = heads_ * head_dim_;
    auto* qkv = reinterpret_cast<uint16_t*>(scratch.take(rows * (step + wide) * 2));
    uint16_t* attended = qkv + rows * step;
    before(x, cos, sin, qkv, rows, threads);
    const auto heads = [&](uint16_t* from, int64_t stride) {
      return Heads{reinterpret_cast<char*>(from), Type::bf16, head_dim_, stride};
    };
    stored.attention.attend(
        {heads(qkv, step), heads(qkv + wide, step), heads(qkv + wide + kv_heads_ * head_dim_, step), stored.keys,
         stored.values, heads(attended, wide), static_cast<int>(heads_), static_cast<int>(kv_heads_),
         static_cast<int>(head_dim_), stored.slots, stored.options},
        stored.workspace);
    behind(x, attended, x, rows, threads);
  }

  // x: (rows, width), the input of `before`; attended: (rows, heads, head_dim) → y: (rows, width), the layer's output. y
  // may be x.
  void behind(const uint16_t* x, const uint16_t* attended, uint16_t* y, int64_t rows, int threads) const {
    static thread_local Scratch scratch;
    const int64_t width = qkv_.in(), inner = down_.in();
    auto* part = reinterpret_cast<uint16_t*>(scratch.take(rows * (width + 3 * inner) * 2));
    uint16_t *gate_up = part + rows * width, *active = gate_up + rows * 2 * inner;
    out_(attended, part, rows, threads);
    add_bf16(x, part, y, rows * width);
    before_mlp_(y, part, rows, 1, width, width, threads);
    gate_up_(part, gate_up, rows, threads);
    silu_mul(address_of(gate_up), address_of(active), true, rows, inner, threads);
    down_(active, part, rows, threads);
    add_bf16(y, part, y, rows * width);
  }

 private:
  Product qkv_, out_, gate_up_, down_;
  Norm before_attention_, before_mlp_, of_query_, of_key_;
  int64_t heads_, kv_heads_, head_dim_;
};

// The layers of a model with their keys and values in one pool.
class Decoder {
 public:
  void add(const DecoderLayer& layer, const Heads& keys, const Heads& values, int64_t slots, const Options& options) {
    layers_.push_back({layer, keys, values, slots, options});
  }

  // Runs all layers. x: (rows, width), replaced by the last one's output. cos, sin: (rows, head_dim).
  void run(uint16_t* x, const float* cos, const float* sin, int64_t rows, int threads, Attention& attention,
           Workspace& workspace) const {
    for (const Layer& each : layers_)
      each.layer.run(x, cos, sin, rows, threads,
                     {attention, workspace, each.keys, each.values, each.slots, each.options});
  }

 private:
  struct Layer {
    DecoderLayer layer;
    Heads keys, values;
    int64_t slots;
    Options options;
  };
  std::vector<Layer> layers_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  using released = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Product>(m, "Product", "A linear layer in bf16 with its weight; made of addresses, 0 for none.");
  m.def("direct_product", &direct_product, "One whose weight is bf16 (linear.h).");
  m.def("quantized_product", &quantized_product, "One whose weight has 4 or 8 bits (quantized.h).");
  nb::class_<DecoderLayer>(m, "DecoderLayer", "What a layer computes before and behind its attention.")
      .def("__init__",
           [](DecoderLayer* self, const Product& qkv, const Product& out, const Product& gate_up, const Product& down,
              uint64_t before_attention, uint64_t before_mlp, float eps, uint64_t of_query, uint64_t of_key,
              float head_eps, int64_t heads, int64_t kv_heads, int64_t head_dim) {
             const auto norm = [](uint64_t weight, float own) { return Norm{at<uint16_t>(weight), own}; };
             new (self) DecoderLayer(qkv, out, gate_up, down, norm(before_attention, eps), norm(before_mlp, eps),
                                     norm(of_query, head_eps), norm(of_key, head_eps), heads, kv_heads, head_dim);
           })
      .def("before",
           [](const DecoderLayer& self, uint64_t x, uint64_t cos, uint64_t sin, uint64_t qkv, int64_t rows, int threads) {
             self.before(at<uint16_t>(x), at<float>(cos), at<float>(sin), at<uint16_t>(qkv), rows, threads);
           },
           released())
      .def("behind",
           [](const DecoderLayer& self, uint64_t x, uint64_t attended, uint64_t y, int64_t rows, int threads) {
             self.behind(at<uint16_t>(x), at<uint16_t>(attended), at<uint16_t>(y), rows, threads);
           },
           released());
  nb::class_<Decoder>(m, "Decoder", "All layers of a model, attention included; made of addresses.")
      .def(nb::init<>())
      .def("add", &Decoder::add, "Adds the next layer.")
      .def("run",
           [](const Decoder& self, uint64_t x, uint64_t cos, uint64_t sin, int64_t rows, int threads,
              Attention& attention, Workspace& workspace) {
             self.run(at<uint16_t>(x), at<float>(cos), at<float>(sin), rows, threads, attention, workspace);
           },
           released(), "Runs all layers in place.");
}

}  // namespace inlay
