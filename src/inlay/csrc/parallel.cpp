#include "parallel.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace inlay {
namespace {

constexpr int kSpins = 150;      // some microseconds; then the core is free for others
constexpr int kYields = 200;     // system calls; then the thread sleeps
constexpr double kAwake = 1e-6;  // seconds until a thread that spins begins a region

void relax(int turn) {
  if (turn > kSpins + kYields) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return;
  }
  if (turn > kSpins) {
    std::this_thread::yield();
    return;
  }
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// With two OpenMP runtimes, a process has two sets of threads that spin while they wait and take each other's cores.
// PyTorch has brought one runtime, so its threads are used if it is found in the process.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
using Number = int (*)();

struct OpenMP {
  Parallel parallel = nullptr;
  Number thread = nullptr;
  Number threads = nullptr;

  OpenMP() {
    parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    thread = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    threads = reinterpret_cast<Number>(dlsym(RTLD_DEFAULT, "omp_get_num_threads"));
  }
  bool found() const { return parallel && thread && threads; }
};

const OpenMP& openmp() {
  static const OpenMP found;
  return found;
}

struct Region {
  const std::function<void(Team&, int)>* body;
  int wanted;
  std::atomic<Team*> team{nullptr};
};

// The runtime may start fewer threads than requested. The first one reports how many there are.
void enter(void* data) {
  auto& region = *static_cast<Region*>(data);
  const int thread = openmp().thread();
  if (thread == 0) region.team.store(new Team(openmp().threads()), std::memory_order_release);
  Team* team;
  for (int turn = 0; !(team = region.team.load(std::memory_order_acquire)); ++turn) relax(turn);
  (*region.body)(*team, thread);
}

// Our own threads, for processes without OpenMP.
class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  void run(int threads, const std::function<void(Team&, int)>& body) {
    std::lock_guard<std::mutex> one_at_a_time(region_);
    Team team(threads);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(workers_.size()) < threads - 1)
        workers_.emplace_back([this, number = static_cast<int>(workers_.size()) + 1, seen = generation_] {
          work(number, seen);
        });
      body_ = &body;
      team_ = &team;
      wanted_ = threads;
      left_ = threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    body(team, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
  }

 private:
  void work(int number, int64_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [&] { return ending_ || generation_ != seen; });
      if (ending_) return;
      seen = generation_;
      if (number >= wanted_) continue;  // not requested; the region and its team may have ended by now
      Team& team = *team_;
      const auto& body = *body_;
      lock.unlock();
      body(team, number);
      lock.lock();
      if (--left_ == 0) done_.notify_one();
    }
  }

  std::mutex region_, mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  const std::function<void(Team&, int)>* body_ = nullptr;
  Team* team_ = nullptr;
  int wanted_ = 0, left_ = 0;
  int64_t generation_ = 0;
  bool ending_ = false;
};

// The threads of run_awake. The first one leads, and the others wait for its regions.
class Crew {
 public:
  explicit Crew(int threads) : threads_(threads) {}

  int threads() const { return threads_; }

  // Runs a region of the first `threads` threads. Only for the leader.
  void run(int threads, const std::function<void(Team&, int)>& body) noexcept {
    Team team(threads);
    body_ = &body;
    team_ = &team;
    working_.store(threads - 1, std::memory_order_relaxed);
    call(threads);
    body(team, 0);
    for (int turn = 0; working_.load(std::memory_order_acquire) > 0; ++turn) relax(turn);
  }

  // Ends `follow` on all other threads.
  void end() { call(0); }

  void follow(int thread) {
    int64_t seen = 0, now;
    while (true) {
      for (int turn = 0; (now = calls_.load(std::memory_order_acquire)) == seen; ++turn) relax(turn);
      seen = now;
      const int64_t threads = now % kCall;
      if (threads == 0) return;
      if (thread >= threads) continue;  // the region may have ended by now
      (*body_)(*team_, thread);
      working_.fetch_sub(1, std::memory_order_release);
    }
  }

 private:
  static constexpr int64_t kCall = int64_t{1} << 32;

  void call(int threads) { calls_.store(++number_ * kCall + threads, std::memory_order_release); }

  const int threads_;
  const std::function<void(Team&, int)>* body_ = nullptr;
  Team* team_ = nullptr;
  int64_t number_ = 0;
  std::atomic<int64_t> calls_{0};  // number of the last call * kCall + its threads, 0 for the end
  std::atomic<int> working_{0};    // followers in the region
};

thread_local Crew* led = nullptr;  // the crew that this thread leads, outside of regions

}  // namespace

void Team::barrier() {
  if (threads_ == 1) return;
  const int round = round_.load(std::memory_order_acquire);
  if (waiting_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
    waiting_.store(0, std::memory_order_relaxed);
    round_.store(round + 1, std::memory_order_release);
    return;
  }
  for (int turn = 0; round_.load(std::memory_order_acquire) == round; ++turn) relax(turn);
}

void run_parallel(int threads, const std::function<void(Team&, int)>& body) {
  if (threads <= 1) {
    Team team(1);
    body(team, 0);
    return;
  }
  if (led != nullptr) {
    Crew* const crew = led;
    led = nullptr;
    crew->run(std::min(threads, crew->threads()), body);
    led = crew;
    return;
  }
  if (openmp().found()) {
    Region region{&body, threads};
    openmp().parallel(enter, &region, static_cast<unsigned>(threads), 0);
    delete region.team.load();
    return;
  }
  static Pool pool;
  pool.run(threads, body);
}

void run_awake(int threads, const std::function<void()>& work) {
  if (threads <= 1 || led != nullptr) return work();
  std::optional<Crew> crew;
  std::atomic<Crew*> made{nullptr};
  std::exception_ptr error;
  run_parallel(threads, [&](Team& team, int thread) {
    if (thread > 0) {
      Crew* found;
      for (int turn = 0; !(found = made.load(std::memory_order_acquire)); ++turn) relax(turn);
      return found->follow(thread);
    }
    led = &crew.emplace(team.threads());
    made.store(led, std::memory_order_release);
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
    led = nullptr;
    crew->end();
  });
  if (error) std::rethrow_exception(error);
}

namespace {

// Seconds of a region without work, when its threads have had nothing to do for a while.
double waking(int threads) {
  using Clock = std::chrono::steady_clock;
  constexpr int kTimes = 9;
  constexpr std::chrono::microseconds kPause(100);
  double seconds[kTimes];
  for (double& each : seconds) {
    const auto before = Clock::now();
    while (Clock::now() - before < kPause) {  // not asleep: this thread computes between regions
    }
    const auto start = Clock::now();
    run_parallel(threads, [](Team&, int) {});
    each = std::chrono::duration<double>(Clock::now() - start).count();
  }
  std::nth_element(seconds, seconds + kTimes / 2, seconds + kTimes);
  return std::min(seconds[kTimes / 2], 1e-4);  // more than this: another process had the processor
}

}  // namespace

int worthwhile(int threads, double seconds) {
  if (threads <= 1) return 1;
  if (led != nullptr) {
    threads = std::min(threads, led->threads());
    return seconds - seconds / threads > kAwake ? threads : 1;
  }
  static const double least = waking(threads);
  return seconds - seconds / threads > least ? threads : 1;
}

const char* threading() { return openmp().found() ? "openmp" : "std"; }

}  // namespace inlay
