// Integer products of a page's codes with rows in lanes (lanes.h).
#pragma once

#include "lane_products.h"
#include "lanes.h"
#include "level_format.h"

namespace hack {

// Codes are bytes as they are, rows are signed bytes.
template <class S>
class CodeLanes {
 public:
  using Unit = NoUnit;

  // Bytes of codes [n, elements] for `arrange`.
  static constexpr std::size_t bytes(int n, int elements) { return std::size_t(n) * elements; }
  // Words of a row of a tile. Words past its elements are unused.
  static constexpr int depth(int elements) { return lane_rows(elements / kQuad); }
  // A level is step · (byte - offset).
  static constexpr float step(int) { return 1; }
  static constexpr float offset(int bits) { return zero_point(bits); }
  static constexpr bool centred(int) { return false; }  // whether the offset is 0

  // Codes in [elements / 4][n / 16] vectors to the order of `products`.
  static void arrange(const std::uint8_t* wide, int, int n, int elements, std::uint8_t* out) {
    std::memcpy(out, wide, bytes(n, elements));
  }
  // out [n, NV, 16] = codes [n, elements] · rows [elements / 4, NV, 16, 4]
  template <int bits, int NV>
  static void products(const std::uint8_t* codes, int n, int elements, const std::uint8_t* rows, std::int32_t* out) {
    lane_products<CodeUnit<S, bits>, S::kLaneRows, NV, false>({words_of_codes(codes), 1, n}, n, elements / kQuad, rows, out);
  }

 private:
  static const std::uint32_t* words_of_codes(const std::uint8_t* codes) {
    return reinterpret_cast<const std::uint32_t*>(codes);
  }
};

}  // namespace hack
