// One layer's attention: the work of a plan, shared out to threads.
#pragma once

#include <memory>
#include <vector>

#include "kernel.h"
#include "plan.h"
#include "tensors.h"

namespace inlay {

// Memory that calls of attention work in, one after the other: partial results, and what each thread keeps to itself.
// Partial results take at most `most_partials` bytes (one row's, where that alone is more): a call whose results are
// larger goes over its heads, and if need be its rows, in slices.
class Workspace {
 public:
  explicit Workspace(int64_t most_partials) : most_partials_(most_partials) {}

  int64_t most_partials() const { return most_partials_; }
  // What it holds now.
  size_t bytes() const;
  Scratch& partials() { return partials_; }
  Scratch& of_thread(int thread) { return *threads_[thread]; }
  void reserve(int threads);

 private:
  const int64_t most_partials_;
  Scratch partials_;
  std::vector<std::unique_ptr<Scratch>> threads_;
};

// A plan with what the kernel keeps between layers and steps: tasks, and turns of the query.
class Attention {
 public:
  Attention(Plan plan, const Variant& variant, int threads);

  // Stores the call's keys and values in their slots, then attends. Rows of the call are rows of the plan.
  void attend(const Call& call, Workspace& workspace);
  void advance() { plan_.advance(); }
  const Plan& plan() const { return plan_; }

 private:
  struct Shape {
    int64_t version;
    int heads, kv_heads, head_dim;
    int64_t slots, most_partials;
    bool operator==(const Shape& o) const {
      return version == o.version && heads == o.heads && kv_heads == o.kv_heads && head_dim == o.head_dim &&
             slots == o.slots && most_partials == o.most_partials;
    }
  };
  // How a block is worked on, whatever the slice.
  struct Cut {
    bool narrow, direct;     // direct: its tasks write the output themselves
    int64_t share;           // lanes of a task
    int64_t splits;          // of its keys
    double cost;             // of a task
  };
  // Heads and rows whose partial results lie in memory at the same time, with entries of tasks_ and merges_.
  struct Slice {
    int head_begin, head_end;
    int32_t row_begin, row_end;
    size_t task_begin, task_end, merge_begin, merge_end;
  };
  struct Merge {
    int32_t row;
    int32_t first, count;  // entries of parts_, for the slice's first KV head
  };

  void check(const Call& call) const;
  void check_slots(const Call& call) const;
  void share_out(const Call& call, int64_t most_partials);
  Cut cut_of(const Call& call, const Block& block, double most) const;
  std::vector<Slice> slices_of(const Call& call, int64_t most_partials) const;
  void fill_slice(const Call& call, Slice& slice);
  void add_tasks(const Call& call, const Slice& slice, int32_t block);
  void add_merges(const Call& call, const Slice& slice);
  void sort_tasks(size_t begin);
  void find_turns(const Call& call);
  void write(const Call& call, int64_t first, int64_t last) const;
  void merge(const Call& call, const Partials& partials, const Slice& slice, int64_t item, std::vector<int64_t>& lanes) const;
  double cost_of(bool narrow, int64_t lanes, double keys) const;
  bool is_narrow(const Block& block, const Call& call) const;

  Plan plan_;
  const Variant& variant_;
  int threads_;
  Shape shape_{-1, 0, 0, 0, 0, 0};
  std::vector<Cut> cuts_;                 // of every block
  std::vector<Slice> slices_;
  std::vector<Task> tasks_;
  // Where partial results of the current slice lie: of block b, KV head h, split s the lanes from
  // partial_[b] + (h * splits + s) * lanes of the block in the slice, of which the first is that of place_[b].
  std::vector<int64_t> partial_;
  std::vector<int64_t> place_, places_;
  std::vector<Merge> merges_;
  struct Part { int64_t at, head_step; };
  std::vector<Part> parts_;
  int64_t partial_lanes_ = 0;             // of the largest slice
  std::vector<int32_t> shifts_;
  std::vector<float> cos_, sin_;
  std::vector<float> frequencies_;        // that cos_ and sin_ were made from
};

}  // namespace inlay
