// Choosing the token of every row of a pass: the kernel's input and output. sampling/ has the same in plain
// PyTorch and numpy. That is the specification, and every number is the same.
#pragma once

#include <cstdint>

#include "tensors.h"

namespace inlay {

// Numbers of all rows, concatenated: row r has those at first[r] … first[r + 1] - 1. An id outside the vocabulary is
// ignored.
struct Lists {
  const int64_t* first;  // (rows + 1,)
  const int64_t* ids;
};

// The sampling parameters of the rows, (rows,) each unless noted.
struct RowParams {
  const uint64_t* draws;   // 64 random bits each
  const float* inverse;    // 1 / temperature; 0: take the most probable token
  const float* min_p;
  const int64_t* top_k;    // 0: none
  const double* top_p;
  const float* penalties;  // (rows, 3): repetition, frequency, presence
  Lists forbidden;
  Lists biased;
  const float* biases;     // one for each of biased.ids
  Lists seen;              // the tokens that penalties apply to
  const float* counts;     // one for each of seen.ids
  const int64_t* guided;   // the row of bits to use; -1: none
  const uint32_t* bits;    // (guided rows, words): the allowed tokens, lowest bit first
  int64_t words;
};

struct Chosen {
  int64_t* tokens;  // meaningless if best is not finite
  float* raw;       // the row's largest logit, NaN if it has one
  float* best;      // the same after adjustments
};

struct Logits {
  const char* data;
  Type type;
  int64_t rows, vocabulary, stride;  // stride of a row, in elements

  const char* row(int64_t number) const { return data + number * stride * bytes_of(type); }
};

// Chooses one row's token. scratch: memory of the thread.
class Scratch;
using ChooseRow = void (*)(const Logits& logits, int64_t row, const RowParams& asked, const Chosen& chosen,
                           Scratch& scratch);

// Chooses all rows on up to `threads` threads, each row on one of them.
void choose(const Logits& logits, const RowParams& asked, const Chosen& chosen, ChooseRow choose_row, int threads);

// 64 random bits for each pair: the first number of the block after `step` of Philox 4x64-10 under the seed.
void philox(const uint64_t* seeds, const uint64_t* steps, uint64_t* bits, int64_t count);

}  // namespace inlay
