// Operations of recurrent layers: the causal convolution, the gated delta rule, and the state space of Mamba-2. Tensors
// are contiguous, and fp32 unless noted. models/mixers/operations.py has the same in PyTorch. That is the specification.
//
// Columns of a delta state, and rows of a Mamba-2 state, do not touch each other. So a task is a few of them over all
// tokens of a span, and they stay in the first-level cache.
#pragma once

#include <cstdint>
#include <string>

namespace inlay {

// Spans of rows, each cut into pieces. The state behind a piece is written to a slot of the pool. A later piece goes on
// with the state of the piece before it.
struct Spans {
  int64_t count;
  const int64_t* first_piece;  // (count + 1,)
  const int64_t* source;       // (count,): the slot of the state in front of the span, -1 for zeros
  const int64_t* first;        // (pieces,): first row
  const int64_t* end;          // (pieces,): row behind the last one
  const int64_t* target;       // (pieces,): slot
};

// Gated delta rule (arXiv 2412.06464): S = d · S + k ⊗ β (v − k · d · S), output q · S.
struct DeltaScan {
  const float* query;  // (rows, key_heads, key_width), normed and scaled
  const float* key;    // (rows, key_heads, key_width)
  const float* value;  // (rows, value_heads, value_width)
  const float* decay;  // (rows, value_heads, decays)
  const float* beta;   // (rows, value_heads)
  float* pool;         // (slots, value_heads, key_width, value_width)
  float* out;          // (rows, value_heads, value_width)
  int64_t key_heads, value_heads, key_width, value_width;
  int64_t decays;      // 1, or key_width for one decay of each channel of the key
};

// Mamba-2 (arXiv 2405.21060): S = a · S + dt x ⊗ b, output S · c.
struct StateSpaceScan {
  const float* x;      // (rows, heads, width)
  const float* decay;  // (rows, heads): exp(dt · A)
  const float* time;   // (rows, heads): dt
  const float* b;      // (rows, groups, state_width)
  const float* c;      // (rows, groups, state_width)
  float* pool;         // (slots, heads, width, state_width)
  float* out;          // (rows, heads, width)
  int64_t heads, width, groups, state_width;
};

// Causal convolution of each channel over its own tokens. A state is the last kernel - 1 inputs of each channel.
struct Convolution {
  const void* x;         // (rows, channels), fp32 or bf16
  const float* weight;   // (kernel, channels), the tap of the newest token last
  const float* bias;     // (channels,), or null
  void* pool;            // (slots, channels, kernel - 1), as x
  void* out;             // (rows, channels), as x
  int64_t channels, kernel, stride;  // stride: numbers from one row of x to the next
  bool bf16, silu;
};

constexpr int64_t kConvolved = 64;      // channels of a task
constexpr int64_t kMostKernel = 8;
constexpr int64_t kScanLanes = 16;      // value_width, state_width and channels are multiples of it
constexpr int64_t kScanChannels = 4;    // width is a multiple of it
constexpr int64_t kMostKeyWidth = 256;  // key_width is at most this, and a multiple of 4

// The versions for an instruction set.
struct ScanVariant {
  const char* name;
  bool (*supported)();
  // One tile of kScanLanes columns of a head's state, over one span.
  void (*delta)(const DeltaScan& scan, const Spans& spans, int64_t span, int64_t head, int64_t tile);
  // kScanChannels rows of a head's state, over one span.
  void (*state_space)(const StateSpaceScan& scan, const Spans& spans, int64_t span, int64_t head, int64_t channel);
  // kConvolved channels, or the last ones, over one span.
  void (*convolve)(const Convolution& convolution, const Spans& spans, int64_t span, int64_t channel);
};

// "" for the best one that runs here.
const ScanVariant& scan_by_name(const std::string& name);

void scan_delta(const DeltaScan& scan, const Spans& spans, const ScanVariant& variant, int threads);
void scan_state_space(const StateSpaceScan& scan, const Spans& spans, const ScanVariant& variant, int threads);
void convolve(const Convolution& convolution, const Spans& spans, const ScanVariant& variant, int threads);

}  // namespace inlay
