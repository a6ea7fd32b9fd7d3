#include "plan.h"

#include <algorithm>
#include <stdexcept>

namespace inlay {
namespace {

void require(bool fine, const char* otherwise) {
  if (!fine) throw std::invalid_argument(otherwise);
}

bool within(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

// Limits far enough below 2**31 that sums and differences of a few numbers stay below it too.
constexpr int64_t kMostPositions = int64_t{1} << 27, kMostRows = int64_t{1} << 22, kMostSlots = int64_t{1} << 40;

// Checks the borders of the parts of a table: they go from 0 to its size, and no part is empty.
void check_borders(const Tables::Column& first, int64_t size) {
  require(first.size >= 1 && first.at[0] == 0 && first.at[first.size - 1] == size,
          "the blocks of a plan do not cover its tables");
  for (int64_t i = 1; i < first.size; ++i)
    require(first.at[i - 1] < first.at[i] && first.at[i] <= size, "a block of a plan points outside its tables");
}

void check(const Tables& tables) {
  const int64_t rows = tables.positions.size;
  require(within(rows, 1, kMostRows) && tables.slots.size == rows, "a plan has no rows, or more than a pass holds");
  for (int64_t row = 0; row < rows; ++row) {
    require(within(tables.positions.at[row], -kMostPositions, kMostPositions), "a row of a plan is at an impossible position");
    require(within(tables.slots.at[row], 0, kMostSlots), "a row of a plan goes to an impossible slot");
  }
  require(tables.row_first.size == tables.stretch_first.size, "the tables of a plan do not fit each other");
  check_borders(tables.row_first, tables.rows.size);
  check_borders(tables.stretch_first, tables.stretch_count);
  for (int64_t i = 0; i < tables.rows.size; ++i)
    require(within(tables.rows.at[i], 0, rows - 1), "a block of a plan holds a row that is not there");
  for (int64_t s = 0; s < tables.stretch_count; ++s) {
    auto number = [&](int64_t field) { return tables.stretches[field * tables.stretch_count + s]; };
    require(within(number(0), 0, kMostSlots) && within(number(1), 1, kMostPositions) &&
                within(number(2), -kMostPositions, kMostPositions) &&
                within(number(3), -kMostPositions, kMostPositions) && within(number(4), 0, 1),
            "a stretch of a plan lies at impossible slots or positions");
  }
}

}  // namespace

int64_t Block::keys() const {
  int64_t total = 0;
  for (const Stretch& stretch : stretches) total += stretch.length;
  return total;
}

double Block::usual_keys() const {
  double total = 0;
  for (const Stretch& stretch : stretches) total += stretch.length * (stretch.masked ? 0.6 : 1.0);
  return total;
}

Plan::Plan(const Tables& tables) {
  check(tables);
  positions_.assign(tables.positions.at, tables.positions.at + tables.positions.size);
  slots_.assign(tables.slots.at, tables.slots.at + tables.slots.size);
  for (int64_t b = 0; b + 1 < tables.row_first.size; ++b) add_block(tables, b);
  find_members();
  for (int64_t i = 0; i < tables.growing.size; ++i) {
    const int64_t at = tables.growing.at[i], *first = tables.stretch_first.at;
    require(within(at, 0, tables.stretch_count - 1), "a stretch of a plan that is not there can't grow");
    const auto block = std::upper_bound(first, first + tables.stretch_first.size, at) - first - 1;
    growing_.emplace_back(static_cast<int32_t>(block), static_cast<int32_t>(at - first[block]));
  }
}

void Plan::add_block(const Tables& tables, int64_t number) {
  Block block;
  for (int64_t i = tables.row_first.at[number]; i < tables.row_first.at[number + 1]; ++i)
    block.rows.push_back(static_cast<int32_t>(tables.rows.at[i]));
  require(std::is_sorted(block.rows.begin(), block.rows.end()), "the rows of a plan's block are in disorder");
  for (int64_t s = tables.stretch_first.at[number]; s < tables.stretch_first.at[number + 1]; ++s) {
    auto field = [&](int64_t f) { return tables.stretches[f * tables.stretch_count + s]; };
    block.stretches.push_back({field(0), static_cast<int32_t>(field(1)), static_cast<int32_t>(field(2)),
                               static_cast<int32_t>(field(3)), field(4) != 0});
  }
  blocks_.push_back(std::move(block));
}

void Plan::find_members() {
  const size_t rows = positions_.size();
  membership_.first.assign(rows + 1, 0);
  for (const Block& block : blocks_)
    for (int32_t row : block.rows) ++membership_.first[row + 1];
  for (size_t row = 0; row < rows; ++row) membership_.first[row + 1] += membership_.first[row];
  membership_.block.resize(membership_.first[rows]);
  membership_.place.resize(membership_.first[rows]);
  std::vector<int32_t> at(membership_.first.begin(), membership_.first.end() - 1);
  for (size_t b = 0; b < blocks_.size(); ++b) {
    blocks_[b].alone = true;
    for (size_t place = 0; place < blocks_[b].rows.size(); ++place) {
      const int32_t row = blocks_[b].rows[place];
      blocks_[b].alone = blocks_[b].alone && membership_.first[row + 1] - membership_.first[row] == 1;
      membership_.block[at[row]] = static_cast<int32_t>(b);
      membership_.place[at[row]++] = static_cast<int32_t>(place);
    }
  }
  for (size_t row = 0; row < rows; ++row)
    require(membership_.first[row] < membership_.first[row + 1], "a row of a plan reads nothing");
}

void Plan::advance() {
  if (growing_.size() != positions_.size()) throw std::invalid_argument("only a plan of decode steps advances");
  for (auto [block, stretch] : growing_) ++blocks_[block].stretches[stretch].length;
  for (int32_t& position : positions_) ++position;
  for (int64_t& slot : slots_) ++slot;
  ++version_;
}

}  // namespace inlay
