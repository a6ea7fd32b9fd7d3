// One parallel region: the same function on every thread of a team, with a barrier.
#pragma once

#include <atomic>
#include <functional>

namespace inlay {

class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  int threads() const { return threads_; }
  // Waits until every thread of the team is here.
  void barrier();

 private:
  const int threads_;
  std::atomic<int> waiting_{0};
  std::atomic<int> round_{0};
};

// Runs body(team, thread) on `threads` threads and returns when all have ended. Body must neither throw nor start another
// region.
void run_parallel(int threads, const std::function<void(Team&, int)>& body);

// Runs `work` on this thread. The regions that it runs find up to `threads` threads awake: they wait by spinning for some
// microseconds, then give their cores to others.
void run_awake(int threads, const std::function<void()>& work);

// Returns how many of the threads to use for a region that takes one thread `seconds`: all of them, or one if waking them
// takes longer than they save. Waking a sleeping thread takes some microseconds, and up to 100 in a virtual machine. It
// is measured once in a process. Within run_awake the threads spin, and waking them takes less than a microsecond.
int worthwhile(int threads, double seconds);

// The runtime of the threads: "openmp" (the process's own OpenMP runtime) or "std".
const char* threading();

}  // namespace inlay
