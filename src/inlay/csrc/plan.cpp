#include "plan.h"

#include <algorithm>
#include <map>
#include <stdexcept>
#include <tuple>

namespace inlay {
namespace {

// A span with this many rows fills the kernel's tiles by itself and gains nothing from company.
constexpr int64_t kLongSpan = 64;

using Range = std::pair<int32_t, int32_t>;  // rows: first, behind the last
using Rows = std::vector<Range>;

// Pieces on one line agree on which position a slot has, and on how it is read.
struct Line {
  int64_t shift, offset;  // offset: position - slot
  int64_t owner;          // the long span it belongs to, or -1 for all short ones
  bool causal;

  auto key() const { return std::tie(owner, causal, shift, offset); }
  bool operator<(const Line& other) const { return key() < other.key(); }
  bool operator==(const Line& other) const { return key() == other.key(); }
};

struct Reading {
  Line line;
  int64_t first, end;  // slots
  Range rows;
};

void require(bool fine, const char* otherwise) {
  if (!fine) throw std::invalid_argument(otherwise);
}

bool within(int64_t value, int64_t low, int64_t high) { return low <= value && value <= high; }

// Numbers so far below 2**31 that sums and differences of a few of them are, too.
constexpr int64_t kMostPositions = int64_t{1} << 27, kMostRows = int64_t{1} << 22, kMostSlots = int64_t{1} << 40;

void check_tables(const std::vector<SpanIn>& spans, const std::vector<PieceIn>& pieces, const std::vector<RunIn>& own) {
  const auto read = static_cast<int64_t>(pieces.size()), written = static_cast<int64_t>(own.size());
  int64_t rows = 0;
  for (const SpanIn& span : spans) {
    require(within(span.length, 1, kMostRows), "a span of a plan has no tokens, or more than a pass holds");
    require((rows += span.length) <= kMostRows, "a plan has more rows than a pass holds");
    require(within(span.start, -kMostPositions, kMostPositions), "a span of a plan starts at an impossible position");
    require(within(span.piece_begin, 0, span.piece_end) && span.piece_end <= read && within(span.own_begin, 0, span.own_end) &&
                span.own_end <= written,
            "a span of a plan points outside its tables");
  }
  for (const PieceIn& piece : pieces)
    require(within(piece.first, 0, kMostSlots) && within(piece.length, 0, kMostPositions) &&
                within(piece.start, -kMostPositions, kMostPositions) &&
                within(piece.shift, -kMostPositions, kMostPositions),
            "a piece of a plan lies at impossible slots or positions");
  for (const RunIn& run : own)
    require(within(run.first, 0, kMostSlots) && within(run.length, 1, kMostSlots),
            "a run of a plan's own slots is impossible");
}

void join(Rows& rows, Range range) {
  if (!rows.empty() && rows.back().second == range.first)
    rows.back().second = range.second;
  else
    rows.push_back(range);
}

std::vector<Reading> readings_of(const std::vector<SpanIn>& spans, const std::vector<PieceIn>& pieces,
                                 const std::vector<RunIn>& own, bool share) {
  std::vector<Reading> found;
  int64_t row = 0;
  for (size_t number = 0; number < spans.size(); ++number) {
    const SpanIn& span = spans[number];
    const int64_t owner = share && span.length < kLongSpan ? -1 : static_cast<int64_t>(number);
    auto read = [&](const PieceIn& piece, bool causal, int64_t first, int64_t last) {
      if (piece.length <= 0 || first == last) return;
      found.push_back({{piece.shift, piece.start - piece.first, owner, causal}, piece.first,
                       piece.first + piece.length, {static_cast<int32_t>(first), static_cast<int32_t>(last)}});
    };
    for (int64_t p = span.piece_begin; p < span.piece_end; ++p) read(pieces[p], false, row, row + span.length);
    int64_t done = 0;  // own keys: the diagonal, and what lies below it
    for (int64_t r = span.own_begin; r < span.own_end && done < span.length; ++r) {
      const int64_t length = std::min(own[r].length, span.length - done);
      const PieceIn piece{own[r].first, length, span.start + done, 0};
      read(piece, length > 1, row + done, row + done + length);
      read(piece, false, row + done + length, row + span.length);
      done += length;
    }
    if (done < span.length) throw std::invalid_argument("a span has fewer slots than tokens");
    row += span.length;
  }
  return found;
}

// Cuts the readings of one line at each other's borders, and hands every part to the block of the rows that read it.
template <class Emit>
void overlay(const Reading* begin, const Reading* end, Emit&& emit) {
  std::vector<int64_t> borders;
  for (auto r = begin; r != end; ++r) borders.insert(borders.end(), {r->first, r->end});
  std::sort(borders.begin(), borders.end());
  borders.erase(std::unique(borders.begin(), borders.end()), borders.end());
  std::vector<const Reading*> active;
  auto next = begin;
  for (size_t b = 0; b + 1 < borders.size(); ++b) {
    active.erase(std::remove_if(active.begin(), active.end(), [&](auto* r) { return r->end <= borders[b]; }),
                 active.end());
    for (; next != end && next->first == borders[b]; ++next) active.push_back(next);
    if (active.empty()) continue;
    std::vector<Range> ranges;
    for (auto* r : active) ranges.push_back(r->rows);
    std::sort(ranges.begin(), ranges.end());
    Rows rows;
    for (const Range& range : ranges) join(rows, range);
    emit(rows, begin->line, borders[b], borders[b + 1]);
  }
}

void add_stretch(std::vector<Stretch>& stretches, const Line& line, int64_t first, int64_t end) {
  const auto position = static_cast<int32_t>(first + line.offset);
  const auto length = static_cast<int32_t>(end - first);
  if (!stretches.empty()) {
    Stretch& last = stretches.back();
    if (last.shift == line.shift && last.causal == line.causal && last.slot + last.length == first &&
        last.position + last.length == position) {
      last.length += length;
      return;
    }
  }
  stretches.push_back({first, length, position, static_cast<int32_t>(line.shift), line.causal});
}

}  // namespace

int64_t Block::keys() const {
  int64_t total = 0;
  for (const Stretch& stretch : stretches) total += stretch.length;
  return total;
}

Plan::Plan(const std::vector<SpanIn>& spans, const std::vector<PieceIn>& pieces, const std::vector<RunIn>& own,
           bool share) {
  check_tables(spans, pieces, own);
  bool decoding = true;
  for (const SpanIn& span : spans) {
    decoding = decoding && span.length == 1;
    for (int64_t i = 0; i < span.length; ++i) positions_.push_back(static_cast<int32_t>(span.start + i));
    int64_t left = span.length;
    for (int64_t r = span.own_begin; r < span.own_end && left > 0; ++r)
      for (int64_t i = 0; i < own[r].length && left > 0; ++i, --left) slots_.push_back(own[r].first + i);
  }
  std::vector<Reading> readings = readings_of(spans, pieces, own, share);
  std::sort(readings.begin(), readings.end(), [](const Reading& a, const Reading& b) {
    return std::tie(a.line, a.first, a.rows) < std::tie(b.line, b.first, b.rows);
  });
  std::map<std::pair<int64_t, Rows>, int32_t> by_rows;  // (owner, rows) -> block
  for (size_t begin = 0, end; begin < readings.size(); begin = end) {
    for (end = begin + 1; end < readings.size() && readings[end].line == readings[begin].line;) ++end;
    overlay(readings.data() + begin, readings.data() + end,
            [&](const Rows& rows, const Line& line, int64_t first, int64_t last) {
              auto [found, is_new] = by_rows.try_emplace({line.owner, rows}, static_cast<int32_t>(blocks_.size()));
              if (is_new) {
                blocks_.emplace_back();
                for (const Range& range : rows)
                  for (int32_t row = range.first; row < range.second; ++row) blocks_.back().rows.push_back(row);
              }
              add_stretch(blocks_[found->second].stretches, line, first, last);
            });
  }
  for (Block& block : blocks_)  // one shift's stretches together: a query is turned once for all of them
    std::stable_sort(block.stretches.begin(), block.stretches.end(),
                     [](const Stretch& a, const Stretch& b) { return a.shift < b.shift; });

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
  if (!decoding) return;
  for (size_t b = 0; b < blocks_.size(); ++b)
    for (size_t s = 0; s < blocks_[b].stretches.size(); ++s) {
      const Stretch& stretch = blocks_[b].stretches[s];
      if (blocks_[b].rows.size() == 1 && stretch.shift == 0 &&
          stretch.slot + stretch.length - 1 == slots_[blocks_[b].rows[0]])
        growing_.emplace_back(static_cast<int32_t>(b), static_cast<int32_t>(s));
    }
}

void Plan::advance() {
  if (growing_.size() != positions_.size()) throw std::invalid_argument("only a plan of decode steps advances");
  for (auto [block, stretch] : growing_) ++blocks_[block].stretches[stretch].length;
  for (int32_t& position : positions_) ++position;
  for (int64_t& slot : slots_) ++slot;
  ++version_;
}

}  // namespace inlay
