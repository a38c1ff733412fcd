// Seals, exports, installs and attends on the portable path and prints hashes
// of every bit: agree.sh compares what this program says on two processors.
#include <cstdio>
#include <random>
#include <vector>

#include "attention.h"
#include "hack_format.h"

namespace {

using namespace hack;

template <class T>
std::uint64_t hash(const std::vector<T>& values) {  // FNV-1a
  std::uint64_t state = 0xCBF29CE484222325u;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(T); ++i) state = (state ^ bytes[i]) * 0x100000001B3u;
  return state;
}

// Memory for the planes of `count` pages of one KV head.
struct Pages {
  Pages(const PageFormat& fmt, std::size_t count) {
    for (int i = 0; i < fmt.plane_count; ++i) bytes.emplace_back(count * fmt.planes[i].bytes());
  }
  template <class Planes>
  Planes planes() {
    Planes found;
    for (std::size_t i = 0; i < bytes.size(); ++i) found.at[i] = bytes[i].data();
    return found;
  }
  std::uint64_t all() const {
    std::uint64_t state = 0;
    for (const auto& plane : bytes) state = state * 0x100000001B3u ^ hash(plane);
    return state;
  }

  std::vector<std::vector<std::byte>> bytes;
};

void run(const HackFormat& fmt) {
  constexpr int kHeads = 2, kPages = 5, kGroup = 3;
  std::mt19937 random(7);
  const auto halves = [&](std::size_t count) {  // of magnitude 2^-3 .. 2^1, of either sign
    std::vector<std::uint16_t> x(count);
    for (auto& h : x) h = std::uint16_t(0x3000 + random() % 0x1000 + (random() % 2 << 15));
    return x;
  };
  const std::size_t page_rows = kHeads * fmt.elements();
  const auto k = halves(kPages * page_rows), v = halves(kPages * page_rows);
  const auto open_k = halves(page_rows), open_v = halves(page_rows);
  const Engine engine{portable_operations(), 2};

  Pages native(fmt, kPages * kHeads), wire(fmt, kPages * kHeads), back(fmt, kPages * kHeads);
  const std::int64_t ids[kPages] = {3, 0, 4, 1, 2};
  std::int64_t starts[kPages];
  for (int i = 0; i < kPages; ++i) starts[i] = std::int64_t(i) * fmt.page_tokens;
  const Pool pool{native.planes<Planes>(), kPages, kHeads, 0}, copy{back.planes<Planes>(), kPages, kHeads, 0};
  engine.seal(fmt, 1, pool, {ids, kPages}, starts, k.data(), v.data());
  engine.export_pages(fmt, pool, {ids, kPages}, wire.planes<Planes>());
  engine.install(fmt, copy, {ids, kPages}, wire.planes<ConstPlanes>());

  std::vector<float> q(kHeads * kGroup * fmt.head_dim), out(q.size());
  for (float& x : q) x = float(int(random() % 2001) - 1000) / 500.0f;
  const std::int64_t start = kPages * fmt.page_tokens + 9, one = 1, zero = 0;
  engine.attend(fmt, 1, copy, {open_k.data(), open_v.data(), 1}, {&start, &one, &zero, ids, &zero, 1, kPages},
                {reinterpret_cast<const std::byte*>(q.data()), 0, reinterpret_cast<std::byte*>(out.data()),
                 Dtype::kFloat, nullptr, nullptr, 1, kHeads * kGroup});
  std::printf(
      "D %d Pi %d bits %d/%d stochastic %d asymmetric %d: pages "
      "%016llx wire %016llx attention %016llx %s\n",
      fmt.head_dim, fmt.page_tokens, fmt.k_bits, fmt.v_bits, fmt.stochastic, fmt.asymmetric,
      static_cast<unsigned long long>(native.all()), static_cast<unsigned long long>(wire.all()),
      static_cast<unsigned long long>(hash(out)), native.all() == back.all() ? "round trip exact" : "LOST BITS");
}

}  // namespace

int main() {
  for (const bool stochastic : {false, true}) {
    for (const bool asymmetric : {false, true}) {
      run(HackFormat({64, 32, 2, 2, 32, stochastic, asymmetric, true, asymmetric, false, 11}));
      run(HackFormat({96, 64, 4, 2, 32, stochastic, asymmetric, true, asymmetric, false, 11}));
      run(HackFormat({128, 64, 2, 2, 64, stochastic, asymmetric, true, asymmetric, false, 11}));
      run(HackFormat({64, 64, 8, 8, 64, stochastic, asymmetric, true, asymmetric, false, 11}));
      run(HackFormat({256, 128, 4, 4, 128, stochastic, asymmetric, true, asymmetric, false, 11}));
    }
  }
}
