// One layer's attention: the work of a plan, shared out to threads.
#pragma once

#include <memory>
#include <vector>

#include "kernel.h"
#include "plan.h"
#include "tensors.h"

namespace inlay {

// A plan with what the kernel keeps between layers and steps: tasks, turns of the query, memory.
class Attention {
 public:
  Attention(Plan plan, const Variant& variant, int threads);

  // Stores the call's keys and values in their slots, then attends. Rows of the call are rows of the plan.
  void attend(const Call& call);
  void advance() { plan_.advance(); }
  const Plan& plan() const { return plan_; }

 private:
  struct Shape {
    int64_t version;
    int heads, kv_heads, head_dim;
    int64_t slots;
    bool operator==(const Shape& o) const {
      return version == o.version && heads == o.heads && kv_heads == o.kv_heads && head_dim == o.head_dim &&
             slots == o.slots;
    }
  };
  struct Merge {
    int32_t row;
    int32_t first, count;  // entries of parts_, for KV head 0
  };

  void check(const Call& call) const;
  void share_out(const Call& call);
  void cut_block(const Call& call, int32_t block, double most);
  void collect_merges(const Call& call);
  void find_turns(const Call& call);
  void write(const Call& call, int64_t first, int64_t last) const;
  void merge(const Call& call, const Partials& partials, int64_t item, std::vector<int64_t>& lanes) const;
  double cost_of(const Block& block, bool narrow, int64_t lanes, int64_t keys) const;
  bool is_narrow(const Block& block, const Call& call) const;

  Plan plan_;
  const Variant& variant_;
  int threads_;
  Shape shape_{-1, 0, 0, 0, 0};
  std::vector<Task> tasks_;
  std::vector<double> costs_;
  std::vector<char> narrow_;              // of every block
  // Where partial results lie: of block b, KV head h, split s the lanes from
  // partial_[b] + (h * splits_[b] + s) * lanes of the block; -1 where there are none.
  std::vector<int64_t> partial_;
  std::vector<int32_t> splits_;
  std::vector<Merge> merges_;
  struct Part { int64_t at, head_step; };
  std::vector<Part> parts_;
  int64_t partial_lanes_ = 0;
  Scratch partials_;
  std::vector<std::unique_ptr<Scratch>> scratch_;
  std::vector<int32_t> shifts_;
  std::vector<float> cos_, sin_;
  std::vector<float> frequencies_;        // that cos_ and sin_ were made from
};

}  // namespace inlay
