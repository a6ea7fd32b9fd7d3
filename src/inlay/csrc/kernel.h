// The interface of the kernel's versions, one for each instruction set, and their arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "choose.h"
#include "plan.h"
#include "tensors.h"

namespace inlay {

constexpr int kMostDims = 1024;  // largest head_dim

// Cosines and sines of -shift for every shift of a plan, without scaling: (shifts, rotated / 2) each.
struct Turns {
  const int32_t* shifts;
  int count;
  const float* cos;
  const float* sin;
  int half;
};

// A share of one block's work for one KV head: some of its lanes against some of its keys. A lane is one query head of
// one row: lane = index of the row in the block * group + head within the group.
struct Task {
  int32_t block;
  int32_t kv_head;
  int32_t lane_begin, lane_end;
  int32_t key_begin, key_end;  // of the block's keys, in the order of its stretches
  // Index of the partial result. -1: the task sees all keys of its lanes and writes the output itself.
  int64_t partial;
};

// Partial results: output / sum of weights, and log2 of the sum of weights.
struct Partials {
  float* outputs;  // (lanes, head_dim)
  float* sums;     // (lanes,)
};

// Memory that a thread reuses from call to call.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch();
  // Returns at least `bytes` bytes, aligned to a cache line. Earlier contents are lost.
  char* take(size_t bytes);
  size_t bytes() const { return size_; }

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

struct Variant {
  const char* name;
  bool (*supported)();
  int wide_lanes;    // lanes of one tile of the wide kernel
  int tiles;         // most tiles of a task of the wide kernel
  int narrow_lanes;  // up to this many lanes of a block the narrow kernel is faster; 0 if it can't run
  void (*run)(const Call& call, const Plan& plan, const Turns& turns, const Task& task, bool narrow,
              const Partials& partials, Scratch& scratch);
  // Merges the partial results of one row and KV head, adds the sinks, and writes the output.
  void (*merge)(const Call& call, int32_t row, int32_t kv_head, const int64_t* parts, int count,
                const Partials& partials);
  ChooseRow choose_row;  // chooses the token of one row of logits
};

const Variant& variant_by_name(const std::string& name);  // "" for the best one that runs here
int variant_names(const char** names, int most);          // those that run here, best first

}  // namespace inlay
