// Static rANS of order 0 for planes of bytes: wire form `rans` (hackkv/rans_form.py says what the form is).
//
// A plane is `blocks` blocks (KV heads) of rows of `row` bytes. A column is a byte's place in a row of a block: for codes
// that are packed along rows, a channel of a KV head. Columns that are alike share one of at most 16 tables. Symbols are
// nibbles, lower first, or bytes. Numbers are little-endian; a coded plane is, without gaps:
//
//   4 bytes  the plane's size
//   1        0: symbols are nibbles, 1: bytes
//   1        tables T, 1..16
//   2, 2     blocks; row
//   T times  a bit for each symbol, set if it occurs; then its frequency in a varint, without the last one that occurs.
//            All frequencies of a table sum to 2^11 (nibbles) or 2^12 (bytes).
//   if T > 1 the table of each column, in 4 bits, lower first
//   8 * 4    the states that decoding begins with
//   2 each   words that decoding shifts in, in its order
//
// Symbol i of a block is in state i mod 8. Decoding ends with all words read and all states at their lowest value, where
// encoding began; anything else is refused. Arithmetic is in integers, so bytes are the same everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace hack {

// How a plane lies. blocks * row must divide its size.
struct RansGrid {
  std::size_t blocks, row;
};

inline constexpr std::size_t kMostColumns = 4096;  // blocks * row: what encoder and decoder keep is bounded by it

// A coded plane of at most `most` bytes; empty if it needs more. The grid has at most kMostColumns.
std::vector<std::uint8_t> rans_encode(const std::uint8_t* plane, std::size_t size, RansGrid grid, std::size_t most);

// Fills a plane. Raises std::invalid_argument unless `coded` is exactly a plane of that size. Whatever it holds, nothing
// beyond the plane is written, nothing beyond `coded` is read, and tables take at most 256 KiB.
void rans_decode(const std::uint8_t* coded, std::size_t coded_size, std::uint8_t* plane, std::size_t size);

}  // namespace hack
