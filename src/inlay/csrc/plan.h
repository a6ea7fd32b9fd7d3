// Which query rows read which stored keys: the grouped tables of attention/grouping.py, checked.
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
  bool masked;       // a row sees the keys at or before its own position; otherwise all of them

  int32_t seen_at(int32_t key) const { return position + shift + key; }
};

// A set of query rows, and what just these rows read.
struct Block {
  std::vector<int32_t> rows;       // increasing; one that reads its keys twice stands twice
  std::vector<Stretch> stretches;  // those of one shift stand together
  bool alone = true;               // no other block holds any of these rows

  int64_t keys() const;
  double usual_keys() const;  // as many as a row sees on average, about
};

// A plan as it comes from outside; see Plan and Groups in attention/. All numbers are int64.
struct Tables {
  struct Column {
    const int64_t* at;
    int64_t size;
  };
  Column positions, slots;         // of the rows
  Column rows, row_first;          // those of block b: rows[row_first[b]] … rows[row_first[b + 1] - 1]
  const int64_t* stretches;        // (5, stretches): first slot, length, position, shift, masked
  int64_t stretch_count;
  Column stretch_first;
  Column growing;                  // stretches that end in a row's own slot, where all rows decode
};

class Plan {
 public:
  // Throws std::invalid_argument where the tables can't be those of a pass, whatever numbers they hold.
  explicit Plan(const Tables& tables);

  // The next decode step of the same sequences: every row stands one position and one slot further on, and sees
  // what it wrote last. Only for plans in which every row has a stretch that grows.
  void advance();

  const std::vector<Block>& blocks() const { return blocks_; }
  const std::vector<int32_t>& positions() const { return positions_; }  // of the rows
  const std::vector<int64_t>& slots() const { return slots_; }          // where the rows' own keys go
  // The blocks that hold a row, and where in them it stands: entries first[row] … first[row + 1] - 1.
  struct Membership { std::vector<int32_t> first, block, place; };
  const Membership& membership() const { return membership_; }
  int64_t version() const { return version_; }

 private:
  void add_block(const Tables& tables, int64_t number);
  void find_members();

  std::vector<Block> blocks_;
  std::vector<int32_t> positions_;
  std::vector<int64_t> slots_;
  Membership membership_;
  std::vector<std::pair<int32_t, int32_t>> growing_;  // (block, stretch)
  int64_t version_ = 0;
};

}  // namespace inlay
