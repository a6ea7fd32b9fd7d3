// Which query rows read which stored keys: the plan of attention/plan.py, grouped for the kernel.
//
// Rows of several sequences that read the same slots at the same shift stand in one block (the chunk-first phase of
// ChunkAttention, arXiv 2402.15220, section 3.3, for sharing sets that need not be prefixes); a block of one
// sequence's rows is sequence-first work. What the rows of a block read is a list of stretches.
#pragma once

#include <cstdint>
#include <vector>

namespace inlay {

// Stored keys side by side in the pool and at consecutive positions.
struct Stretch {
  int64_t slot;      // of the first key
  int32_t length;
  int32_t position;  // of the first key, as encoded
  int32_t shift;     // how far behind that it is read
  bool causal;       // a row sees the keys at or before its own position; otherwise all of them

  int32_t seen_at(int32_t key) const { return position + shift + key; }
};

struct Block {
  std::vector<int32_t> rows;
  std::vector<Stretch> stretches;  // those of one shift stand together
  bool alone;                      // no other block holds any of these rows

  int64_t keys() const;
};

// One stored run as a sequence sees it, and new tokens; see Piece and Span in attention/plan.py.
struct PieceIn { int64_t first, length, start, shift; };
struct SpanIn {
  int64_t start, length;
  int64_t piece_begin, piece_end;  // of its context
  int64_t own_begin, own_end;      // runs of its own slots: (first, length)
};
struct RunIn { int64_t first, length; };

class Plan {
 public:
  // Throws std::invalid_argument where the tables can't be those of a pass, whatever numbers they hold.
  // share: whether rows of several spans may stand in one block; false gives every span work of its own.
  Plan(const std::vector<SpanIn>& spans, const std::vector<PieceIn>& pieces, const std::vector<RunIn>& own, bool share);

  // The next decode step of the same sequences: every row stands one position and one slot further on, and sees
  // what it wrote last. Only for plans whose spans have one row.
  void advance();

  const std::vector<Block>& blocks() const { return blocks_; }
  const std::vector<int32_t>& positions() const { return positions_; }  // of the rows
  const std::vector<int64_t>& slots() const { return slots_; }          // where the rows' own keys go
  // The blocks that hold a row, and where in them it stands: entries first[row] … first[row + 1] - 1.
  struct Membership { std::vector<int32_t> first, block, place; };
  const Membership& membership() const { return membership_; }
  int64_t version() const { return version_; }

 private:
  std::vector<Block> blocks_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  Membership membership_;
  std::vector<std::pair<int32_t, int32_t>> growing_;  // (block, stretch) that ends in its row's own slot
  int64_t version_ = 0;
};

}  // namespace inlay
