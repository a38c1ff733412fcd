#include "thread_pool.h"

#include <pthread.h>

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

namespace hack {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr int kSpins = 4096;  // some tens of microseconds: less than it takes to sleep and be woken

// How long a thread of the pool stays awake after its work: longer than a decode step takes from one call to the next.
constexpr std::chrono::nanoseconds kAwake{60'000};
// A yield that takes longer than kShared has let another thread run. The pool's threads then sleep at once in some later
// waits, one for each kWakeUp that the yield took: about what a wait awake saves. A thread that runs now and then, such as
// an event loop's, costs a few wake-ups. Beside a thread that never stops, the pool's threads sleep nearly always.
constexpr std::chrono::nanoseconds kShared{15'000};
constexpr std::chrono::nanoseconds kWakeUp{10'000};
constexpr std::int64_t kMostAsleep = 1024;  // calls, even if the machine stood still for hours
constexpr int kPauses = 16;  // from one yield to the next

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

class ThreadPool {
 public:
  void run(int threads, std::int64_t count, Task task) {
    const std::unique_lock caller(callers_, std::try_to_lock);
    const int helpers = int(threads < count ? threads : count) - 1;
    if (helpers <= 0 || !caller.owns_lock()) {
      for (std::int64_t i = 0; i < count; ++i) task(i);
      return;
    }
    open(helpers, count, task);
    work(count, task);
    close();
  }

 private:
  void open(int helpers, std::int64_t count, Task& task) {
    const std::lock_guard lock(mutex_);
    for (; spawned_ < helpers; ++spawned_) std::thread([this] { serve(); }).detach();
    next_.store(0, std::memory_order_relaxed);
    task_ = &task;
    count_ = count;
    places_ = helpers;
    for (int i = spawned_ - asleep_; i < helpers; ++i) wake_.notify_one();
  }

  void close() {
    std::unique_lock lock(mutex_);
    places_ = 0;  // a thread that wakes late finds nothing to join
    lock.unlock();
    for (int i = 0; i < kSpins && active_.load(std::memory_order_acquire) > 0; ++i) pause();
    lock.lock();
    done_.wait(lock, [this] { return active_ == 0; });
  }

  void work(std::int64_t count, const Task& task) {
    for (std::int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) task(i);
  }

  // Waits awake until there is work. Gives up after a short time, or when another thread wants the processor.
  void wait_awake() {
    if (calls_asleep_.load(std::memory_order_relaxed) > 0) {
      calls_asleep_.fetch_sub(1, std::memory_order_relaxed);
      return;
    }
    using Clock = std::chrono::steady_clock;
    const auto began = Clock::now();
    for (auto now = began; now - began < kAwake;) {
      for (int i = 0; i < kPauses; ++i) {
        if (places_.load(std::memory_order_acquire) > 0) return;
        pause();
      }
      const auto before = Clock::now();
      sched_yield();
      now = Clock::now();
      if (now - before <= kShared) continue;
      return calls_asleep_.store(int(std::min((now - before) / kWakeUp, kMostAsleep)), std::memory_order_relaxed);
    }
  }

  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (places_ == 0) {
        lock.unlock();
        wait_awake();
        lock.lock();
      }
      ++asleep_;
      wake_.wait(lock, [this] { return places_ > 0; });
      --asleep_;
      --places_;
      ++active_;
      const Task& task = *task_;
      const std::int64_t count = count_;
      lock.unlock();
      work(count, task);
      lock.lock();
      if (--active_ == 0) done_.notify_one();
    }
  }

  std::mutex callers_;  // held by the caller whose task runs
  std::mutex mutex_;    // guards what follows
  std::condition_variable wake_;
  std::condition_variable done_;
  const Task* task_ = nullptr;
  std::int64_t count_ = 0;
  std::atomic<int> places_{0};  // written under the mutex
  int asleep_ = 0;
  std::atomic<int> calls_asleep_{0};
  std::atomic<int> active_{0};
  int spawned_ = 0;
  std::atomic<std::int64_t> next_{0};
};

// Never destroyed: its threads may outlive static destruction. A forked child starts anew, for threads do not fork.
ThreadPool* process_pool = nullptr;

ThreadPool& pool() {
  static const bool ready = [] {
    process_pool = new ThreadPool;
    pthread_atfork(nullptr, nullptr, [] { process_pool = new ThreadPool; });
    return true;
  }();
  static_cast<void>(ready);
  return *process_pool;
}

struct Scratch {
  ~Scratch() { ::operator delete(memory, kAlignment); }
  std::byte* memory = nullptr;
  std::size_t size = 0;
};

}  // namespace

void parallel_for(int threads, std::int64_t count, Task task) {
  pool().run(threads, count, task);
}

std::byte* thread_scratch(std::size_t bytes) {
  thread_local Scratch scratch;
  if (scratch.size < bytes) {
    ::operator delete(scratch.memory, kAlignment);
    scratch.memory = nullptr;
    scratch.memory = static_cast<std::byte*>(::operator new(bytes, kAlignment));
    scratch.size = bytes;
  }
  return scratch.memory;
}

}  // namespace hack
