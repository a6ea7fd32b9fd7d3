#include "choose.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>

#include "kernel.h"
#include "parallel.h"

namespace inlay {
namespace {

constexpr int64_t kShare = 1 << 15;  // logits that pay for waking another thread

}  // namespace

void choose(const Logits& logits, const RowParams& asked, const Chosen& chosen, ChooseRow choose_row, int threads) {
  const int64_t worth = std::max<int64_t>(1, logits.rows * logits.vocabulary / kShare);
  std::atomic<int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failing;
  run_parallel(static_cast<int>(std::min<int64_t>({threads, logits.rows, worth})), [&](Team&, int) {
    static thread_local Scratch scratch;
    try {
      for (int64_t row; (row = next.fetch_add(1)) < logits.rows;) choose_row(logits, row, asked, chosen, scratch);
    } catch (...) {  // out of memory
      std::lock_guard<std::mutex> lock(failing);
      failure = std::current_exception();
    }
  });
  if (failure) std::rethrow_exception(failure);
}

// Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Like numpy, it increments the counter before
// it makes a block.
void philox(const uint64_t* seeds, const uint64_t* steps, uint64_t* bits, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    uint64_t block[4] = {steps[i] + 1, steps[i] + 1 == 0 ? 1u : 0u, 0, 0}, key[2] = {seeds[i], 0};
    for (int round = 0; round < 10; ++round) {
      const auto one = static_cast<unsigned __int128>(0xD2E7470EE14C6C93u) * block[0];
      const auto other = static_cast<unsigned __int128>(0xCA5A826395121157u) * block[2];
      const uint64_t mixed[4] = {static_cast<uint64_t>(other >> 64) ^ block[1] ^ key[0], static_cast<uint64_t>(other),
                                 static_cast<uint64_t>(one >> 64) ^ block[3] ^ key[1], static_cast<uint64_t>(one)};
      std::copy(mixed, mixed + 4, block);
      key[0] += 0x9E3779B97F4A7C15u;
      key[1] += 0xBB67AE8584CAA73Bu;
    }
    bits[i] = block[0];
  }
}

}  // namespace inlay
