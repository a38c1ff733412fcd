// Seals, exports, installs and attends on the portable path and prints hashes of every bit: agree.sh compares what this
// program says on two processors.
#include <cstdio>
#include <random>
#include <vector>

#include "attention.h"

namespace {

using namespace hack;

template <class T>
std::uint64_t hash(const std::vector<T>& values) {  // FNV-1a
  std::uint64_t state = 0xCBF29CE484222325u;
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(values.data());
  for (std::size_t i = 0; i < values.size() * sizeof(T); ++i) state = (state ^ bytes[i]) * 0x100000001B3u;
  return state;
}

// The planes of `count` pages of one KV head.
struct Planes {
  Planes(const Format& fmt, std::size_t count)
      : k_codes(count * fmt.k_code_bytes()),
        v_codes(count * fmt.v_code_bytes()),
        k_sums(count * fmt.k_meta() * 2),
        v_sums(count * fmt.v_meta() * 2),
        k_min(count * fmt.k_meta()),
        k_scale(k_min),
        v_min(count * fmt.v_meta()),
        v_scale(v_min),
        sums(fmt.sums_at_rest()) {}

  Page page() {
    return {k_codes.data(), k_min.data(), k_scale.data(), sums ? k_sums.data() : nullptr,
            v_codes.data(), v_min.data(), v_scale.data(), sums ? v_sums.data() : nullptr};
  }
  std::uint64_t all() const { return hash(k_codes) ^ hash(v_codes) ^ hash(k_min) ^ hash(k_scale) ^ hash(v_scale); }

  std::vector<std::uint8_t> k_codes, v_codes, k_sums, v_sums;
  std::vector<std::uint16_t> k_min, k_scale, v_min, v_scale;
  bool sums;
};

void run(const Format& fmt) {
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
  const Engine engine{portable_operations(), nullptr, 2};

  Planes native(fmt, kPages * kHeads), wire(fmt, kPages * kHeads), back(fmt, kPages * kHeads);
  const std::int64_t ids[kPages] = {3, 0, 4, 1, 2};
  std::int64_t starts[kPages];
  for (int i = 0; i < kPages; ++i) starts[i] = std::int64_t(i) * fmt.page_tokens;
  const Pool pool{native.page(), kPages, kHeads}, copy{back.page(), kPages, kHeads};
  engine.seal(fmt, 1, pool, {ids, kPages}, starts, k.data(), v.data());
  engine.export_pages(fmt, pool, {ids, kPages}, wire.page());
  const Page from = wire.page();
  engine.install(
      fmt, copy, {ids, kPages},
      {from.k_codes, from.k_min, from.k_scale, from.k_sums, from.v_codes, from.v_min, from.v_scale, from.v_sums});

  std::vector<float> q(kHeads * kGroup * fmt.head_dim), out(q.size());
  for (float& x : q) x = float(int(random() % 2001) - 1000) / 500.0f;
  const std::int64_t start = kPages * fmt.page_tokens + 9, one = 1, zero = 0;
  engine.attend(fmt, 1, copy, {open_k.data(), open_v.data(), 1}, {&start, &one, &zero, ids, &zero, 1, kPages},
                {reinterpret_cast<const std::byte*>(q.data()), 0, reinterpret_cast<std::byte*>(out.data()),
                 Dtype::kFloat, nullptr, nullptr, 1, kHeads * kGroup});
  std::printf("D %d Pi %d bits %d/%d stochastic %d asymmetric %d: pages %016llx wire %016llx attention %016llx %s\n",
              fmt.head_dim, fmt.page_tokens, fmt.k_bits, fmt.v_bits, fmt.stochastic, fmt.asymmetric,
              static_cast<unsigned long long>(native.all()), static_cast<unsigned long long>(wire.all()),
              static_cast<unsigned long long>(hash(out)),
              native.all() == back.all() ? "round trip exact" : "LOST BITS");
}

}  // namespace

int main() {
  for (const bool stochastic : {false, true}) {
    for (const bool asymmetric : {false, true}) {
      run({64, 32, 2, 2, 32, stochastic, asymmetric, true, asymmetric, false, 11});
      run({96, 64, 4, 2, 32, stochastic, asymmetric, true, asymmetric, false, 11});
      run({128, 64, 2, 2, 64, stochastic, asymmetric, true, asymmetric, false, 11});
      run({256, 128, 4, 4, 128, stochastic, asymmetric, true, asymmetric, false, 11});
    }
  }
}
