// Typed pieces of a thread's scratch memory, 64-byte aligned.
#pragma once

#include <cstddef>

namespace hack {

template <class S>  // a parameter only so that units for different processors share no compiled copy
class Arena {
 public:
  explicit Arena(std::byte* memory) : next_(memory) {}

  template <class T>
  T* take(std::size_t count) {
    T* piece = reinterpret_cast<T*>(next_);
    next_ += (count * sizeof(T) + 63) / 64 * 64;
    return piece;
  }

 private:
  std::byte* next_;
};

}  // namespace hack
