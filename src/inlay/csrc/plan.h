// The query rows of a pass and the stored keys that they read: the grouped tables of attention/plan.py, checked.
#pragma once

#include <cstdint>
#include <vector>

namespace inlay {

// Stored keys in adjacent slots and at consecutive positions.
struct Stretch {
  int64_t slot;      // of the first key
  int32_t length;
  int32_t position;  // of the first key, as encoded
  int32_t shift;     // distance from there to the position it is read at
  bool masked;       // a row sees only the keys at or before its own position; otherwise all of them

  int32_t seen_at(int32_t key) const { return position + shift + key; }
};

// A set of query rows, and the keys that exactly these rows read.
struct Block {
  std::vector<int32_t> rows;       // increasing; a row that reads its keys twice is listed twice
  std::vector<Stretch> stretches;  // equal shifts are adjacent
  bool alone = true;               // no other block holds any of these rows

  int64_t keys() const;
  double usual_keys() const;  // about the number that a row sees on average
};

// A plan as passed in; see Plan and Groups in attention/. All numbers are int64.
struct Tables {
  struct Column {
    const int64_t* at;
    int64_t size;
  };
  Column positions, slots;   // of each row
  Column rows, row_first;    // block b has rows[row_first[b]] … rows[row_first[b + 1] - 1]
  const int64_t* stretches;  // (5, stretches): first slot, length, position, shift, masked
  int64_t stretch_count;
  Column stretch_first;
  Column growing;            // stretches that end in a row's own slot, if all rows decode
};

class Plan {
 public:
  // Throws std::invalid_argument if the tables can't be those of a pass, whatever numbers they hold.
  explicit Plan(const Tables& tables);

  // Moves on to the next decode step: every row is one position and one slot further on, and also sees the key that it
  // wrote last. Only for plans in which every row has a stretch that grows.
  void advance();

  const std::vector<Block>& blocks() const { return blocks_; }
  const std::vector<int32_t>& positions() const { return positions_; }  // of the rows
  const std::vector<int64_t>& slots() const { return slots_; }          // slots for the rows' own keys
  // The blocks that hold a row, and its index in each: entries first[row] … first[row + 1] - 1.
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
