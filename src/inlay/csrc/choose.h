// Choosing the token of every row of a pass: what the kernel is given, and what it finds.
// engine/sampler/ has the same in plain PyTorch and numpy: that is the specification, and every number is the same.
#pragma once

#include <cstdint>

#include "tensors.h"

namespace inlay {

// Numbers of every row, one row's behind the other's: row r has those at first[r] … first[r + 1] - 1.
// An id outside the vocabulary is no token, and changes nothing.
struct Lists {
  const int64_t* first;  // (rows + 1,)
  const int64_t* ids;
};

// What is asked of the rows; arrays of (rows,) where nothing else is said.
struct RowParams {
  const uint64_t* draws;       // 64 random bits each
  const float* inverse;        // of the temperature; 0 for the most probable token
  const float* min_p;
  const int64_t* top_k;        // 0: none
  const double* top_p;
  const float* penalties;      // (rows, 3): repetition, frequency, presence
  Lists forbidden;
  Lists biased;
  const float* biases;         // as biased.ids
  Lists seen;                  // what the penalties count
  const float* counts;         // as seen.ids
  const int64_t* guided;       // which row of bits; -1: none
  const uint32_t* bits;        // (guided rows, words): which tokens may come, the lowest bit first
  int64_t words;
};

struct Chosen {
  int64_t* tokens;  // meaningless where best is no finite number
  float* raw;       // the row's greatest logit, NaN where it holds one
  float* best;      // the same of what it was adjusted to
};

struct Logits {
  const char* data;
  Type type;
  int64_t rows, vocabulary, stride;  // of a row, in elements

  const char* row(int64_t number) const { return data + number * stride * bytes_of(type); }
};

// One row; scratch: memory of the thread.
class Scratch;
using ChooseRow = void (*)(const Logits& logits, int64_t row, const RowParams& asked, const Chosen& chosen,
                           Scratch& scratch);

// All rows, each on one of so many threads.
void choose(const Logits& logits, const RowParams& asked, const Chosen& chosen, ChooseRow choose_row, int threads);

// 64 random bits for each: the first number of the block behind `step` of Philox 4x64-10 under the seed.
void philox(const uint64_t* seeds, const uint64_t* steps, uint64_t* bits, int64_t count);

}  // namespace inlay
