#include "decoder.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "attend.h"
#include "binding.h"
#include "kernel.h"
#include "linear.h"
#include "parallel.h"
#include "quantized.h"
#include "steps.h"
#include "tensors.h"

namespace nb = nanobind;

namespace inlay {
namespace {

uint64_t address_of(const void* memory) { return reinterpret_cast<uint64_t>(memory); }

// A linear layer with any kind of weight. Inputs and outputs are of one type, bf16 or fp32, and rows are contiguous.
class Product {
 public:
  template <class Layer>
  Product(const Layer& layer, void (*run)(const Layer&, int), Type type)
      : in_(layer.in), out_(layer.out), type_(type), run_([layer, run](const char* x, char* y, int64_t rows, int threads) {
          Layer own = layer;
          own.x = reinterpret_cast<decltype(own.x)>(x), own.y = reinterpret_cast<decltype(own.y)>(y);
          own.x_stride = own.in, own.y_stride = own.out, own.rows = rows;
          run(own, worthwhile(threads, seconds_of(own)));
        }) {}

  int64_t in() const { return in_; }
  int64_t out() const { return out_; }
  Type type() const { return type_; }

  // x: (rows, in), y: (rows, out).
  void operator()(const char* x, char* y, int64_t rows, int threads) const { run_(x, y, rows, threads); }

 private:
  int64_t in_, out_;
  Type type_;
  std::function<void(const char* x, char* y, int64_t rows, int threads)> run_;
};

template <class T>
Product direct_in(Type type, uint64_t weight, uint64_t bias, int64_t in, int64_t out, const std::string& instruction_set) {
  const RunLinear<T> run = linear_by_name<T>(instruction_set);
  if (run == nullptr) throw std::invalid_argument("no linear layer for the instruction set '" + instruction_set + "'");
  return Product(Linear<T>{nullptr, in, at<T>(weight), at<T>(bias), nullptr, out, 0, in, out}, run, type);
}

Product direct_product(uint64_t weight, uint64_t bias, int64_t in, int64_t out, bool bf16,
                       const std::string& instruction_set) {
  return bf16 ? direct_in<uint16_t>(Type::bf16, weight, bias, in, out, instruction_set)
              : direct_in<float>(Type::f32, weight, bias, in, out, instruction_set);
}

Product quantized_product(uint64_t weight, uint64_t scales, uint64_t bias, int64_t in, int64_t out, int bits,
                          bool bf16_grid, bool zeros, const std::string& instruction_set) {
  const QuantizedLinear run = quantized_by_name(instruction_set);
  if (run == nullptr) throw std::invalid_argument("no quantized layer for the instruction set '" + instruction_set + "'");
  const Quantized layer{nullptr, in,  at<char>(weight), at<float>(scales), at<float>(bias), nullptr, out,  0,
                        in,      out, bits,             Type::bf16,        bf16_grid ? Type::bf16 : Type::f32, zeros};
  return Product(layer, run, layer.type);
}

// The attention of one layer in one pass: the plan, and the layer's stored keys and values.
struct Stored {
  Attention& attention;
  Workspace& workspace;
  const Heads &keys, &values;
  int64_t slots;
  const Options& options;
};

// RMSNorm's weight, (width,) in the layer's type; null for no norm.
struct Norm {
  const char* weight;
  float eps;
};

class DecoderLayer {
 public:
  DecoderLayer(const Product& qkv, const Product& out, const Product& gate_up, const Product& down, Norm before_attention,
               Norm before_mlp, Norm of_query, Norm of_key, int64_t heads, int64_t kv_heads, int64_t head_dim)
      : qkv_(qkv), out_(out), gate_up_(gate_up), down_(down), before_attention_(before_attention),
        before_mlp_(before_mlp), of_query_(of_query), of_key_(of_key), heads_(heads), kv_heads_(kv_heads),
        head_dim_(head_dim), type_(qkv.type()) {
    const int64_t width = qkv.in();
    if (qkv.out() != (heads + 2 * kv_heads) * head_dim || out.in() != heads * head_dim || out.out() != width ||
        gate_up.in() != width || gate_up.out() != 2 * down.in() || down.out() != width)
      throw std::invalid_argument("the products of a decoder's layer do not fit each other");
    if (out.type() != type_ || gate_up.type() != type_ || down.type() != type_)
      throw std::invalid_argument("the products of a decoder's layer have different types");
  }

  // x: (rows, width) → qkv: (rows, heads + 2 · kv_heads, head_dim), with queries and keys rotated. cos, sin: (rows,
  // head_dim).
  void before(const char* x, const float* cos, const float* sin, char* qkv, int64_t rows, int threads) const {
    static thread_local Scratch scratch;
    const int64_t width = qkv_.in(), step = qkv_.out();
    char* normed = scratch.take(bytes(rows * width));
    norm(before_attention_, x, normed, rows, 1, width, width, threads);
    qkv_(normed, qkv, rows, threads);
    char* keys = qkv + bytes(heads_ * head_dim_);
    if (of_query_.weight) norm(of_query_, qkv, qkv, rows, heads_, head_dim_, step, threads);
    if (of_key_.weight) norm(of_key_, keys, keys, rows, kv_heads_, head_dim_, step, threads);
    rotate(address_of(qkv), address_of(cos), address_of(sin), bf16(), rows, heads_ + kv_heads_, head_dim_, step, threads);
  }

  // Runs the whole layer. x: (rows, width), replaced by the layer's output.
  void run(char* x, const float* cos, const float* sin, int64_t rows, int threads, const Stored& stored) const {
    static thread_local Scratch scratch;
    const int64_t step = qkv_.out(), wide = heads_ * head_dim_;
    char* qkv = scratch.take(bytes(rows * (step + wide)));
    char* attended = qkv + bytes(rows * step);
    before(x, cos, sin, qkv, rows, threads);
    const auto heads = [&](char* from, int64_t stride) { return Heads{from, type_, head_dim_, stride}; };
    stored.attention.attend(
        {heads(qkv, step), heads(qkv + bytes(wide), step), heads(qkv + bytes(wide + kv_heads_ * head_dim_), step),
         stored.keys, stored.values, heads(attended, wide), static_cast<int>(heads_), static_cast<int>(kv_heads_),
         static_cast<int>(head_dim_), stored.slots, stored.options},
        stored.workspace);
    behind(x, attended, x, rows, threads);
  }

  // x: (rows, width), the input of `before`; attended: (rows, heads, head_dim) → y: (rows, width), the layer's output. y
  // may be x.
  void behind(const char* x, const char* attended, char* y, int64_t rows, int threads) const {
    static thread_local Scratch scratch;
    const int64_t width = qkv_.in(), inner = down_.in();
    char* part = scratch.take(bytes(rows * (width + 3 * inner)));
    char *gate_up = part + bytes(rows * width), *active = gate_up + bytes(rows * 2 * inner);
    out_(attended, part, rows, threads);
    add(address_of(x), address_of(part), address_of(y), bf16(), rows, width, threads);
    norm(before_mlp_, y, part, rows, 1, width, width, threads);
    gate_up_(part, gate_up, rows, threads);
    silu_mul(address_of(gate_up), address_of(active), bf16(), rows, inner, threads);
    down_(active, part, rows, threads);
    add(address_of(y), address_of(part), address_of(y), bf16(), rows, width, threads);
  }

 private:
  bool bf16() const { return type_ == Type::bf16; }
  int64_t bytes(int64_t numbers) const { return numbers * bytes_of(type_); }

  // Rows of `count` groups of `width` numbers, `stride` numbers apart.
  void norm(Norm norm, const char* x, char* out, int64_t rows, int64_t count, int64_t width, int64_t stride,
            int threads) const {
    rms_norm(address_of(x), address_of(norm.weight), address_of(out), bf16(), rows, count, width, stride, stride, norm.eps,
             threads);
  }

  Product qkv_, out_, gate_up_, down_;
  Norm before_attention_, before_mlp_, of_query_, of_key_;
  int64_t heads_, kv_heads_, head_dim_;
  Type type_;
};

// The layers of a model with their keys and values in one pool.
class Decoder {
 public:
  void add(const DecoderLayer& layer, const Heads& keys, const Heads& values, int64_t slots, const Options& options) {
    layers_.push_back({layer, keys, values, slots, options});
  }

  // Runs all layers. x: (rows, width), replaced by the last one's output. cos, sin: (rows, head_dim).
  void run(char* x, const float* cos, const float* sin, int64_t rows, int threads, Attention& attention,
           Workspace& workspace) const {
    run_awake(threads, [&] {
      for (const Layer& each : layers_)
        each.layer.run(x, cos, sin, rows, threads,
                       {attention, workspace, each.keys, each.values, each.slots, each.options});
    });
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
  nb::class_<Product>(m, "Product", "A linear layer with its weight, in bf16 or fp32; made of addresses, 0 for none.")
      .def_prop_ro("bf16", [](const Product& self) { return self.type() == Type::bf16; });
  m.def("direct_product", &direct_product, "A Product with its weight in the type of its inputs (linear.h).");
  m.def("quantized_product", &quantized_product, "A Product in bf16 with its weight in 4 or 8 bits (quantized.h).");
  nb::class_<DecoderLayer>(m, "DecoderLayer", "What a layer computes before and behind its attention.")
      .def("__init__",
           [](DecoderLayer* self, const Product& qkv, const Product& out, const Product& gate_up, const Product& down,
              uint64_t before_attention, uint64_t before_mlp, float eps, uint64_t of_query, uint64_t of_key,
              float head_eps, int64_t heads, int64_t kv_heads, int64_t head_dim) {
             const auto norm = [](uint64_t weight, float own) { return Norm{at<char>(weight), own}; };
             new (self) DecoderLayer(qkv, out, gate_up, down, norm(before_attention, eps), norm(before_mlp, eps),
                                     norm(of_query, head_eps), norm(of_key, head_eps), heads, kv_heads, head_dim);
           })
      .def("before",
           [](const DecoderLayer& self, uint64_t x, uint64_t cos, uint64_t sin, uint64_t qkv, int64_t rows, int threads) {
             self.before(at<char>(x), at<float>(cos), at<float>(sin), at<char>(qkv), rows, threads);
           },
           released())
      .def("behind",
           [](const DecoderLayer& self, uint64_t x, uint64_t attended, uint64_t y, int64_t rows, int threads) {
             self.behind(at<char>(x), at<char>(attended), at<char>(y), rows, threads);
           },
           released());
  nb::class_<Decoder>(m, "Decoder", "All layers of a model, attention included; made of addresses.")
      .def(nb::init<>())
      .def("add", &Decoder::add, "Adds the next layer.")
      .def("run",
           [](const Decoder& self, uint64_t x, uint64_t cos, uint64_t sin, int64_t rows, int threads,
              Attention& attention, Workspace& workspace) {
             self.run(at<char>(x), at<float>(cos), at<float>(sin), rows, threads, attention, workspace);
           },
           released(), "Runs all layers in place.");
}

}  // namespace inlay
