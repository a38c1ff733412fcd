// Seals, exports, installs and attends on the portable path and prints hashes
// of every bit: agree.sh compares what this program says on two processors.
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "attention.h"
#include "hack_format.h"
#include "level_format.h"

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

constexpr int kHeads = 2;

void run(const PageFormat& fmt, const std::string& named) {
  constexpr int kPages = 5, kGroup = 3;
  std::mt19937 random(7);
  const auto halves = [&](std::size_t count) {  // of magnitude 2^-3 .. 2^1, of either sign
    std::vector<std::uint16_t> x(count);
    for (auto& h : x) h = std::uint16_t(0x3000 + random() % 0x1000 + (random() % 2 << 15));
    return x;
  };
  const std::size_t page_rows = kHeads * fmt.elements();
  const auto k = halves(kPages * page_rows), v = halves(kPages * page_rows);
  const auto open_k = halves(page_rows * fmt.window.pages()), open_v = halves(page_rows * fmt.window.pages());
  const Engine engine{portable_operations(), 2};

  Pages native(fmt, kPages * kHeads), wire(fmt, kPages * kHeads), back(fmt, kPages * kHeads);
  const std::int64_t ids[kPages] = {3, 0, 4, 1, 2};
  std::int64_t starts[kPages];
  for (int i = 0; i < kPages; ++i) starts[i] = std::int64_t(i) * fmt.page_tokens;
  const auto pool_in = [&](Pages& pages) {
    Pool pool{};
    pool.planes = pages.planes<Planes>();
    for (int i = 0; i < fmt.plane_count; ++i) {
      pool.head_bytes[i] = fmt.planes[i].bytes();
      pool.page_bytes[i] = kHeads * pool.head_bytes[i];
    }
    pool.pages = kPages;
    pool.heads = kHeads;
    return pool;
  };
  const Pool pool = pool_in(native), copy = pool_in(back);
  engine.seal(fmt, 1, pool, {ids, kPages}, starts, k.data(), v.data());
  engine.export_pages(fmt, pool, {ids, kPages}, wire.planes<Planes>());
  engine.install(fmt, copy, {ids, kPages}, wire.planes<ConstPlanes>());

  std::vector<float> q(kHeads * kGroup * fmt.head_dim), out(q.size());
  for (float& x : q) x = float(int(random() % 2001) - 1000) / 500.0f;
  const std::int64_t start = kPages * fmt.page_tokens + 9, one = 1, zero = 0;
  engine.attend(fmt, 1, copy, {open_k.data(), open_v.data(), 1}, {&start, &one, &zero, ids, &zero, 1, 1, kPages},
                {reinterpret_cast<const std::byte*>(q.data()), 0, reinterpret_cast<std::byte*>(out.data()),
                 Dtype::kFloat, nullptr, nullptr, 1, kHeads * kGroup});
  std::printf("D %d Pi %d %s: pages %016llx wire %016llx attention %016llx %s\n", fmt.head_dim, fmt.page_tokens,
              named.c_str(), static_cast<unsigned long long>(native.all()),
              static_cast<unsigned long long>(wire.all()), static_cast<unsigned long long>(hash(out)),
              native.all() == back.all() ? "round trip exact" : "LOST BITS");
}

std::string bits(int k, int v) {
  return "bits " + std::to_string(k) + "/" + std::to_string(v);
}

void run(const HackFormat& fmt) {
  run(fmt, bits(fmt.k_bits, fmt.v_bits) + " stochastic " + std::to_string(fmt.stochastic) + " asymmetric " +
               std::to_string(fmt.asymmetric));
}

// Levels, as they are and with feedback whose gains lie on the grid of level_format.py.
void run_levels(int head_dim, int page_tokens, int k_bits, int v_bits, Window window) {
  std::mt19937 random(5);
  std::vector<float> gains(std::size_t(kHeads) * head_dim * head_dim), weights(std::size_t(kHeads) * head_dim);
  std::vector<std::int32_t> pair_gains(gains.size() / 2);
  for (float& w : weights) w = float(1 + random() % 1000) / 256;
  for (std::size_t at = 0; at < gains.size(); ++at) {
    const std::size_t c = at % kGainBlock, i = at / kGainBlock % head_dim, b = at / kGainBlock / head_dim;
    const std::size_t feels = b % (head_dim / kGainBlock) * kGainBlock + c;
    const int steps = i > feels ? int(random() % 257) - 128 : 0;
    gains[at] = float(steps) / 1024;
    auto& pair = pair_gains[(b * (head_dim / 2) + i / 2) * kGainBlock + c];
    pair = std::int32_t(std::uint32_t(pair) | std::uint32_t(std::uint16_t(steps)) << (i % 2 * 16));
  }
  const std::string named = "levels " + bits(k_bits, v_bits) + " sink " + std::to_string(window.sink) + " recent " +
                            std::to_string(window.recent);
  const Feedback feedback{gains.data(), pair_gains.data(), weights.data()};
  for (const bool narrow : {false, true}) {
    const std::string scales = narrow ? " scales of a byte" : "";
    run(LevelFormat(head_dim, page_tokens, k_bits, v_bits, narrow, window, {}, 0), named + scales);
    run(LevelFormat(head_dim, page_tokens, k_bits, v_bits, narrow, window, feedback, kHeads),
        named + scales + " feedback");
  }
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
  run_levels(64, 64, 3, 2, {1, 2});
  run_levels(64, 32, 2, 2, {1, 2});
  run_levels(80, 64, 3, 3, {1, 2});
  run_levels(96, 32, 4, 4, {});
  run_levels(128, 128, 3, 2, {0, 1});
  run_levels(256, 64, 8, 8, {2, 0});
}
