// The tables of a plane in static rANS (rans.h): how they are chosen, written and read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "rans.h"

namespace hack::rans {

inline constexpr std::uint32_t kLowest = 1u << 15;  // states lie in [kLowest, kLowest << 16)
inline constexpr std::size_t kStates = 8;
inline constexpr std::size_t kMostTables = 16;
inline constexpr std::size_t kHeaderBytes = 10;

// The number of symbols in a byte stands for the alphabet: 2 for nibbles, 1 for bytes.
constexpr int bits_of(int per_byte) { return per_byte == 2 ? 11 : 12; }
constexpr std::size_t symbols_of(int per_byte) { return per_byte == 2 ? 16 : 256; }

[[noreturn]] void refuse(const std::string& what);

using Frequencies = std::vector<std::uint32_t>;  // by symbol; 0 where it does not occur

struct Tables {
  int per_byte = 2;
  std::vector<Frequencies> tables;
  std::vector<std::uint8_t> of;  // by column
  std::size_t bytes = 0;         // what tables and symbols take together, estimated
};

// The tables and the alphabet that take the fewest bytes, of a few that are tried.
Tables choose_tables(const std::uint8_t* plane, std::size_t size, RansGrid grid);

// What is left of a coded plane.
class Reader {
 public:
  Reader(const std::uint8_t* at, const std::uint8_t* end) : at_(at), end_(end) {}
  const std::uint8_t* at() const { return at_; }
  const std::uint8_t* end() const { return end_; }
  template <class T>
  T take() {
    if (std::size_t(end_ - at_) < sizeof(T)) refuse("it ends where tables or states are due");
    std::uint64_t number = 0;
    for (std::size_t byte = 0; byte < sizeof(T); ++byte) number |= std::uint64_t(*at_++) << (8 * byte);
    return T(number);
  }

 private:
  const std::uint8_t *at_, *end_;
};

struct Header {
  std::size_t size = 0;
  int per_byte = 2;
  std::size_t tables = 0;
  RansGrid grid{1, 1};
};

// A header of a plane of `size` bytes.
Header read_header(Reader& reader, std::size_t size);
Frequencies read_frequencies(Reader& reader, std::size_t symbols, std::uint32_t total);
std::vector<std::uint8_t> read_choice(Reader& reader, std::size_t columns, std::size_t tables);
void write_frequencies(std::vector<std::uint8_t>& out, const Frequencies& frequencies);

}  // namespace hack::rans
