// Speeds of loops of integer products, beside that of the products alone.
#pragma once

#include <chrono>
#include <cstdio>

namespace units {

using Kernel = void (*)(const void* line);  // `line` has 192 readable bytes

class Speeds {
 public:
  // `products` are those of two bytes that each kernel makes in a call.
  Speeds(double products, Kernel alone) : products_(products), peak_(per_second(alone)) {}

  // Prints 10^9 products a second on one thread, and the share of what they reach alone.
  void print(const char* what, Kernel kernel) const {
    const double speed = per_second(kernel);
    std::printf("%-48s %4.0f G/s  %3.0f%%\n", what, speed / 1e9, 100 * speed / peak_);
  }

 private:
  double per_second(Kernel kernel) const {
    alignas(64) static const unsigned char line[192] = {};
    double best = 1e9;
    for (int i = 0; i < 400; ++i) {
      const auto began = std::chrono::steady_clock::now();
      kernel(line);
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
      best = took.count() < best ? took.count() : best;
    }
    return products_ / best;
  }

  double products_;
  double peak_;
};

}  // namespace units
