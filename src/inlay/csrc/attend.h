// The attention of one layer: the work of a plan, divided among threads.
#pragma once

#include <memory>
#include <vector>

#include "kernel.h"
#include "plan.h"
#include "tensors.h"

namespace inlay {

// Scratch memory for attention calls that run one after the other: partial results, and each thread's own memory.
// Partial results take at most `most_partials` bytes, or those of one row if that is more. A call with more results is
// processed in slices of its heads and, if needed, of its rows.
class Workspace {
 public:
  explicit Workspace(int64_t most_partials) : most_partials_(most_partials) {}

  int64_t most_partials() const { return most_partials_; }
  // Bytes that are allocated now.
  size_t bytes() const;
  Scratch& partials() { return partials_; }
  Scratch& of_thread(int thread) { return *threads_[thread]; }
  void reserve(int threads);

 private:
  const int64_t most_partials_;
  Scratch partials_;
  std::vector<std::unique_ptr<Scratch>> threads_;
};

// A plan with the state that the kernel keeps between layers and steps: tasks, and rotations of the query.
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
  // How a block is divided, the same in every slice.
  struct Cut {
    bool narrow, direct;  // direct: its tasks write the output themselves
    int64_t share;        // lanes of a task
    int64_t keys;         // keys of a split; the last one may have fewer
    int64_t splits;
    double cost;          // cost of one task
  };
  // Heads and rows with partial results in memory at the same time, and their ranges of tasks_ and merges_.
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
  // lanes: room for the most parts of a row.
  void merge(const Call& call, const Partials& partials, const Slice& slice, int64_t item, int64_t* lanes) const;
  double cost_of(bool narrow, int64_t lanes, double keys) const;
  bool is_narrow(const Block& block, const Call& call) const;

  Plan plan_;
  const Variant& variant_;
  int threads_;
  Shape shape_{-1, 0, 0, 0, 0, 0};
  std::vector<Cut> cuts_;  // one for each block
  std::vector<Slice> slices_;
  std::vector<Task> tasks_;
  // Positions of partial results in the current slice, in lanes. Block b, KV head h and split s begin at partial_[b] +
  // (h * splits + s) * lanes, where lanes are those of the block in the slice. The first lane is that of row place_[b]
  // of the block.
  std::vector<int64_t> partial_;
  std::vector<int64_t> place_, places_;
  std::vector<Merge> merges_;
  struct Part { int64_t at, head_step; };
  std::vector<Part> parts_;
  int64_t partial_lanes_ = 0;       // those of the largest slice
  int32_t most_parts_ = 0;          // of one row
  std::vector<int32_t> shifts_;
  std::vector<float> cos_, sin_;
  std::vector<float> frequencies_;  // the frequencies of cos_ and sin_
};

}  // namespace inlay
