// Kind::kHuffman: when a page is opened, its codes are decoded into a thread's scratch memory, a byte each. Queries
// read these bytes. Nothing else of a page is ever decoded (KVComp).
#pragma once

#include "group_pages.h"
#include "huffman_format.h"

namespace hack {

// A slice of a page's stream: the next bit to read, and the place of its symbols.
struct Slice {
  std::uint32_t at;
  std::uint8_t* out;
  std::uint8_t* end;
};

inline constexpr int kSideBySide = 4;
inline constexpr int kMostAtOnce = 4;  // symbols of an entry
inline constexpr int kLookups = 4;     // look-ups for which one word has enough bits

// Makes `count` look-ups. The slice must have at least `count` times `kMostAtOnce` symbols to come. Reads stay before
// bit `last` + 64.
template <class S, int count>
[[gnu::always_inline]] inline void look_up(const std::uint8_t* coded, std::uint32_t last, const std::int64_t* lookup,
                                           Slice& slice) {
  slice.at = slice.at < last ? slice.at : last;
  std::uint64_t word, used = 0;
  std::memcpy(&word, coded + slice.at / 8, sizeof word);
  word >>= slice.at % 8;
  unrolled<count>([&](auto) __attribute__((always_inline)) {
    const std::uint64_t entry = std::uint64_t(lookup[word & ((1 << kLookupBits) - 1)]);
    const auto symbols = std::uint32_t(entry >> 8);
    std::memcpy(slice.out, &symbols, sizeof symbols);
    slice.out += entry >> 56;
    word >>= entry & 63;
    used += entry;  // the lowest 8 bits hold the sum of lengths and do not overflow
  });
  slice.at += used & 0xFF;
}

template <class S>
[[gnu::always_inline]] inline void decode_end(const std::uint8_t* coded, std::uint32_t last,
                                              const std::int64_t* lookup, Slice& slice) {
  while (slice.end - slice.out >= kMostAtOnce) look_up<S, 1>(coded, last, lookup, slice);
  while (slice.out < slice.end) {
    const std::uint32_t at = slice.at < last ? slice.at : last;
    std::uint32_t word;
    std::memcpy(&word, coded + at / 8, sizeof word);
    const std::int64_t entry = lookup[word >> at % 8 & ((1 << kLookupBits) - 1)];
    *slice.out++ = std::uint8_t(entry >> 8);
    slice.at = at + std::uint32_t(entry >> 40 & 0xFF);
  }
}

// The codes [elements] of K or V of a page. Any bytes decode to some codes: foreign sizes, books and bits do no harm.
template <class S>
void decode_codes(const HuffmanFormat& fmt, const HuffmanSide& of, const ConstHuffman& side, std::uint8_t* codes) {
  const std::size_t elements = fmt.elements(), count = elements / kSlices;
  const std::uint32_t last = 8 * std::uint32_t(of.coded_bytes() - kSlackBytes);
  const int book = side.book[0] < of.books ? side.book[0] : of.books - 1;
  const std::int64_t* lookup = of.lookup + (std::size_t(book) << kLookupBits);
  std::uint32_t at = 0;
  for (int first = 0; first < kSlices; first += kSideBySide) {
    Slice slices[kSideBySide];
    for (int i = 0; i < kSideBySide; ++i) {
      slices[i] = {at, codes + (first + i) * count, codes + (first + i + 1) * count};
      at = std::min(last, at + 8 * std::uint32_t(std::uint16_t(side.sizes[first + i])));
    }
    const auto least = [&] {
      std::ptrdiff_t fewest = slices[0].end - slices[0].out;
      for (int i = 1; i < kSideBySide; ++i) fewest = std::min(fewest, slices[i].end - slices[i].out);
      return fewest / (kLookups * kMostAtOnce);
    };
    for (std::ptrdiff_t rounds = least(); rounds > 0; rounds = least())
      for (; rounds > 0; --rounds)
        unrolled<kSideBySide>([&](auto i)
                                  __attribute__((always_inline)) { look_up<S, kLookups>(side.coded, last, lookup, slices[i]); });
    for (Slice& slice : slices) decode_end<S>(side.coded, last, lookup, slice);
  }
  const auto centre = std::uint8_t(std::min<int>(side.book[1], of.symbols - 1)), symbols = std::uint8_t(of.symbols);
  for (std::size_t i = 0; i < elements; ++i) {
    const auto code = std::uint8_t(codes[i] + centre);
    codes[i] = code >= symbols ? std::uint8_t(code - symbols) : code;
  }
}

// K or V of the open page: c·s + n·s, as `GroupRows` reads it.
struct OpenCodes {
  std::uint8_t* codes;
  GroupFactors factors;  // of channels, or of rows
};

template <class S>
class HuffmanPages {
 public:
  static constexpr int kRestingRows = 8;

  HuffmanPages(const PageFormat& format, const Pool& pool, int head, Arena<S>& arena)
      : fmt_(as_huffman(format)), pool_(pool), head_(head), k_(take(arena)), v_(take(arena)) {}

  void open(std::int64_t id, std::int64_t next) {
    const auto page = pool_.page(fmt_, id, head_), later = pool_.page(fmt_, next, head_);
    open_side(fmt_.k, huffman_side<ConstHuffman>(page, 0), huffman_side<ConstHuffman>(later, 0), k_);
    open_side(fmt_.v, huffman_side<ConstHuffman>(page, 1), huffman_side<ConstHuffman>(later, 1), v_);
  }
  template <class Use>
  [[gnu::always_inline]] void with_keys(Use use) const {
    with_reader(fmt_.k, k_, use);
  }
  template <class Use>
  [[gnu::always_inline]] void with_values(Use use) const {
    with_reader(fmt_.v, v_, use);
  }

 private:
  OpenCodes take(Arena<S>& arena) const {
    const auto most = std::size_t(std::max(fmt_.head_dim, fmt_.page_tokens));
    return {arena.template take<std::uint8_t>(fmt_.elements()),
            {arena.template take<float>(most), arena.template take<float>(most)}};
  }

  void open_side(const HuffmanSide& of, const ConstHuffman& side, const ConstHuffman& next, const OpenCodes& to) const {
    for (std::size_t i = 0; i < of.coded_bytes(); i += 64) fetch(next.coded + i);
    decode_codes<S>(fmt_, of, side, to.codes);
    const int units = fmt_.units(of);
    for (int i = 0; i < std::max(units, fmt_.page_tokens); ++i) {
      const int unit = units == 1 ? 0 : std::min(i, units - 1);
      to.factors.scale[i] = half_to_float(side.step[unit]);
      to.factors.minimum[i] = float(side.first[unit]) * to.factors.scale[i];
    }
  }

  template <class Use>
  [[gnu::always_inline]] void with_reader(const HuffmanSide& of, const OpenCodes& from, Use use) const {
    const int d = fmt_.head_dim;
    const auto with = [&](auto by_channel, int row_groups) __attribute__((always_inline)) {
      const GroupRows<S, 8, by_channel> reader{
          {from.codes, nullptr, d}, from.factors.scale, from.factors.minimum, row_groups, 31};
      use(reader, reader);
    };
    if (of.unit == Unit::kChannel) return with(std::true_type{}, d);
    with(std::false_type{}, 1);
  }

  const HuffmanFormat& fmt_;
  const Pool& pool_;
  int head_;
  OpenCodes k_, v_;
};

// Least and largest of each unit of x [Π, D].
template <class S>
void find_ranges(const HuffmanFormat& fmt, Unit unit, const float* x, float* low, float* high) {
  const int n = fmt.page_tokens, d = fmt.head_dim;
  if (unit == Unit::kChannel) {
    for (int c = 0; c < d; c += kLanes) {
      auto least = S::load(x + c), most = least;
      for (int t = 1; t < n; ++t) {
        const auto each = S::load(x + t * d + c);
        least = S::min(each, least);
        most = S::max(each, most);
      }
      S::store(low + c, least);
      S::store(high + c, most);
    }
    return;
  }
  const int rows = unit == Unit::kBlock ? n : 1;
  for (int t = 0; t < n; t += rows) {
    const float* first = x + t * d;
    auto least = S::load(first), most = least;
    for (int i = kLanes; i < rows * d; i += kLanes) {
      least = S::min(S::load(first + i), least);
      most = S::max(S::load(first + i), most);
    }
    low[t / rows] = S::reduce_min(least);
    high[t / rows] = S::reduce_max(most);
  }
}

// Steps and first numbers of units, for one rung.
template <class S>
void find_steps(int units, float rung, const float* low, const float* high, const Huffman& to, float* step,
                std::int32_t* first) {
  for (int i = 0; i < units; ++i) {
    const float largest = -low[i] > high[i] ? -low[i] : high[i];
    const float wanted = std::max((high[i] - low[i]) * rung, largest * 0x1p-14f);
    const std::uint16_t half = float_to_half_up(wanted < 65504.0f ? wanted : 65504.0f);
    to.step[i] = half == 0 ? 0x3C00 : half;
    step[i] = half_to_float(to.step[i]);
    alignas(64) std::int32_t nearest[kLanes];
    S::store_int(nearest, S::nearest(S::splat(low[i] / step[i])));
    first[i] = nearest[0];
    to.first[i] = std::int16_t(first[i]);
  }
}

// Codes [Π, D] of x [Π, D].
template <class S>
void find_codes(const HuffmanFormat& fmt, Unit unit, const float* x, const float* step, const std::int32_t* first,
                std::uint8_t* codes) {
  const int d = fmt.head_dim;
  alignas(64) std::int32_t less[kMaxHeadDim];
  const int units = unit == Unit::kBlock ? 1 : unit == Unit::kChannel ? d : fmt.page_tokens;
  for (int i = 0; i < units; ++i) less[i] = -first[i];
  for (int t = 0; t < fmt.page_tokens; ++t) {
    const int row = unit == Unit::kToken ? t : 0;
    for (int c = 0; c < d; c += kLanes) {
      const bool by_channel = unit == Unit::kChannel;
      const auto steps = by_channel ? S::load(step + c) : S::splat(step[row]);
      const auto from = by_channel ? S::load_int(less + c) : S::splat_int(less[row]);
      const auto number = S::nearest(S::div(S::load(x + t * d + c), steps));
      S::store_low_bytes(codes + t * d + c, S::add_int(number, from));
    }
  }
}

struct Choice {
  std::int64_t bits;
  int book;
  int centre;
};

// The book and the centre with the fewest bits, the first of equals.
template <class S>
Choice choose_book(const HuffmanSide& of, const std::uint8_t* codes, std::size_t elements) {
  std::int32_t seen[4][256] = {};  // four counters in turn, so that equal codes do not wait for one another
  for (std::size_t i = 0; i < elements; i += 4)
    for (int j = 0; j < 4; ++j) ++seen[j][codes[i + j]];
  std::int32_t all[kMostSymbols];
  for (int c = 0; c < of.symbols; ++c) all[c] = seen[0][c] + seen[1][c] + seen[2][c] + seen[3][c];
  Choice best{std::int64_t(1) << 62, 0, 0};
  for (int book = 0; book < of.books; ++book) {
    std::int32_t bits[2 * kMostSymbols];  // of symbol i mod A
    for (int i = 0; i < 2 * of.symbols; ++i) bits[i] = of.codes[book * of.symbols + i % of.symbols] >> 16;
    for (int centre = 0; centre < of.symbols; ++centre) {
      const std::int32_t* from = bits + of.symbols - centre;
      std::int32_t sum = 0;
      for (int c = 0; c < of.symbols; ++c) sum += all[c] * from[c];
      if (sum < best.bits) best = {sum, book, centre};
    }
  }
  return best;
}

template <class S>
void encode_codes(const HuffmanSide& of, const Choice& choice, const std::uint8_t* codes, std::size_t elements,
                  const Huffman& to) {
  std::uint32_t entries[256] = {};
  for (int c = 0; c < of.symbols; ++c)
    entries[c] = std::uint32_t(
        of.codes[choice.book * of.symbols + (c < choice.centre ? c + of.symbols : c) - choice.centre]);
  to.book[0] = std::uint8_t(choice.book);
  to.book[1] = std::uint8_t(choice.centre);
  std::memset(to.coded, 0, of.coded_bytes());
  std::uint8_t* out = to.coded;
  const std::size_t count = elements / kSlices;
  for (int slice = 0; slice < kSlices; ++slice, codes += count) {
    const std::uint8_t* begin = out;
    std::uint64_t word = 0;
    unsigned held = 0;  // bits of the word
    for (std::size_t i = 0; i < count; i += 4) {
      unrolled<4>([&](auto j) __attribute__((always_inline)) {
        const std::uint32_t entry = entries[codes[i + j]];
        word |= std::uint64_t(entry & 0xFFFF) << held;
        held += entry >> 16;
      });
      std::memcpy(out, &word, sizeof word);
      out += held / 8;
      word >>= held & ~7u;
      held %= 8;
    }
    out += held != 0;
    to.sizes[slice] = std::int16_t(out - begin);
  }
}

// Quantizes and codes K or V of a page; reference/huffman.py has the definition.
template <class S>
void seal_huffman_side(const HuffmanFormat& fmt, const HuffmanSide& of, const std::uint16_t* rows, const Huffman& to,
                       Arena<S> arena) {
  const std::size_t elements = fmt.elements();
  float* x = arena.template take<float>(elements);
  auto* codes = arena.template take<std::uint8_t>(elements);
  alignas(64) float low[kMaxHeadDim], high[kMaxHeadDim], step[kMaxHeadDim];
  alignas(64) std::int32_t first[kMaxHeadDim];
  for (std::size_t i = 0; i < elements; i += kLanes) S::store(x + i, S::load_half(rows + i));
  find_ranges<S>(fmt, of.unit, x, low, high);
  Choice choice{};
  for (int rung = 0; rung < of.rung_count; ++rung) {
    find_steps<S>(fmt.units(of), of.rungs[rung], low, high, to, step, first);
    find_codes<S>(fmt, of.unit, x, step, first, codes);
    choice = choose_book<S>(of, codes, elements);
    if (choice.bits <= of.room) break;
  }
  if (choice.bits > of.room) {  // the last rung fits, unless rows are not finite
    std::memset(codes, 0, elements);
    choice = {};
  }
  encode_codes<S>(of, choice, codes, elements, to);
}

template <class S>
void seal_huffman(const PageFormat& format, Place, const std::uint16_t* k, const std::uint16_t* v, const Planes& planes,
                  std::byte* scratch) {
  const HuffmanFormat& fmt = as_huffman(format);
  seal_huffman_side<S>(fmt, fmt.k, k, huffman_side<Huffman>(planes, 0), Arena<S>(scratch));
  seal_huffman_side<S>(fmt, fmt.v, v, huffman_side<Huffman>(planes, 1), Arena<S>(scratch));
}

template <class S>
constexpr std::size_t huffman_scratch_bytes(const PageFormat& format, int rows) {
  const std::size_t factors = 16 * std::size_t(std::max(format.head_dim, format.page_tokens));
  return rows_scratch_bytes<S>(format, rows) + factors + 2 * format.elements() + 64 * 8;
}

template <class S>
constexpr PageOperations huffman_operations() {
  return reading_operations<S, HuffmanPages<S>>(seal_huffman<S>, huffman_scratch_bytes<S>, 8);
}

}  // namespace hack
