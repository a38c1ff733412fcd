// One small pool of threads per process. Idle threads sleep, because several nodes may share a machine. Between calls
// that follow closely, as in a decode step, threads wait awake, unless another thread wants the processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hack {

// A borrowed `void(std::int64_t index)`; it must outlive the call it is passed to, and must not throw.
class Task {
 public:
  template <class Function>
  Task(const Function& function)
      : object_(&function),
        call_([](const void* object, std::int64_t index) { (*static_cast<const Function*>(object))(index); }) {}

  void operator()(std::int64_t index) const { call_(object_, index); }

 private:
  const void* object_;
  void (*call_)(const void*, std::int64_t);
};

// Calls task(0) .. task(count - 1) on up to `threads` threads, the caller's among them, and returns when all are done.
// While another caller uses the pool, a second one works alone: it is never blocked and never oversubscribes.
void parallel_for(int threads, std::int64_t count, Task task);

// This thread's scratch memory, 64-byte aligned; the next call may move it.
std::byte* thread_scratch(std::size_t bytes);

}  // namespace hack
