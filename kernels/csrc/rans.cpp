#include "rans.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "rans_tables.h"

namespace hack {
namespace {

using namespace rans;

// What encoding a symbol takes. Its quotient by the frequency is a product with a reciprocal, exact below 2^31.
struct Step {
  std::uint32_t limit, reciprocal, bias;
  std::uint16_t complement, shift;
};

Step step_of(std::uint32_t start, std::uint32_t frequency, int bits) {
  Step step{};
  step.limit = ((kLowest >> bits) << 16) * frequency;
  step.complement = std::uint16_t((1u << bits) - frequency);
  if (frequency < 2) {
    step.reciprocal = ~0u;
    step.bias = start + (1u << bits) - 1;
  } else {
    const int shift = std::bit_width(frequency - 1);
    step.reciprocal = std::uint32_t(((std::uint64_t(1) << (shift + 31)) + frequency - 1) / frequency);
    step.shift = std::uint16_t(shift - 1);
    step.bias = start;
  }
  return step;
}

// Words from the back of a buffer to its front.
class Stack {
 public:
  Stack(std::uint8_t* begin, std::uint8_t* end) : begin_(begin), at_(end) {}
  bool has(std::size_t words) const { return std::size_t(at_ - begin_) >= 2 * words; }
  const std::uint8_t* at() const { return at_; }
  void push(std::uint32_t& state, const Step& step) {
    if (state >= step.limit) {
      at_ -= 2;
      at_[0] = std::uint8_t(state);
      at_[1] = std::uint8_t(state >> 8);
      state >>= 16;
    }
    const auto quotient = std::uint32_t((std::uint64_t(state) * step.reciprocal) >> 32) >> step.shift;
    state += step.bias + quotient * step.complement;
  }

 private:
  std::uint8_t* begin_;
  std::uint8_t* at_;
};

template <int kPerByte>
bool push_all(const std::uint8_t* plane, std::size_t size, RansGrid grid, const std::vector<const Step*>& steps,
              std::array<std::uint32_t, kStates>& states, Stack& stack) {
  const std::size_t block_bytes = size / grid.blocks;
  for (std::size_t block = grid.blocks; block-- > 0;) {
    const std::uint8_t* bytes = plane + block * block_bytes;
    const Step* const* columns = steps.data() + block * grid.row;
    for (std::size_t row_at = block_bytes; row_at > 0;) {
      row_at -= grid.row;
      if (!stack.has(kPerByte * grid.row)) return false;  // every symbol may take a word
      for (std::size_t column = grid.row; column-- > 0;) {
        const std::size_t at = row_at + column;
        const Step* of = columns[column];
        if constexpr (kPerByte == 2) {
          stack.push(states[(2 * at + 1) % kStates], of[bytes[at] >> 4]);
          stack.push(states[2 * at % kStates], of[bytes[at] & 15]);
        } else {
          stack.push(states[at % kStates], of[bytes[at]]);
        }
      }
    }
  }
  return true;
}

template <class T>
void put(std::vector<std::uint8_t>& out, T number) {
  for (std::size_t byte = 0; byte < sizeof(T); ++byte) out.push_back(std::uint8_t(number >> (8 * byte)));
}

// A slot of a table: symbol in bits 0..7, the slot less the symbol's first in 8..19, frequency - 1 in 20..31.
template <int kBits>
void fill_slots(const Frequencies& frequencies, std::uint32_t* slots) {
  for (std::size_t symbol = 0; symbol < frequencies.size(); ++symbol) {
    const std::uint32_t frequency = frequencies[symbol], first = std::uint32_t(symbol) | (frequency - 1) << 20;
    for (std::uint32_t bias = 0; bias < frequency; ++bias) slots[bias] = first | bias << 8;
    slots += frequency;
  }
}

struct Words {
  const std::uint8_t *at, *end;
};

template <int kBits>
inline std::uint32_t pop(std::uint32_t& state, const std::uint32_t* slots) {
  const std::uint32_t slot = slots[state & ((1u << kBits) - 1)];
  state = ((slot >> 20) + 1) * (state >> kBits) + ((slot >> 8) & 0xfff);
  return slot & 0xff;
}

// Shifts a word in where it is due. Two bytes may be read.
inline void refill(std::uint32_t& state, const std::uint8_t*& at) {
  const std::uint32_t shifted = state << 16 | std::uint32_t(at[0]) | std::uint32_t(at[1]) << 8;
  const std::uint32_t due = state < kLowest, mask = 0 - due;  // no branch: which states are due is noise
  state ^= (state ^ shifted) & mask;
  at += 2 * due;
}

inline void refill_safely(std::uint32_t& state, Words& words) {
  if (state >= kLowest) return;
  if (words.end - words.at < 2) refuse("words are missing: it ends before all symbols are decoded");
  refill(state, words.at);
}

// The bytes of a block. `columns` has kStates entries beyond its row, which repeat its first.
template <int kPerByte>
void pop_block(std::uint8_t* bytes, std::size_t count, std::size_t row, const std::uint32_t* const* columns,
               std::array<std::uint32_t, kStates>& states, Words& words) {
  constexpr int kBits = bits_of(kPerByte);
  constexpr std::size_t kGroup = kStates / kPerByte;
  std::uint32_t x[kStates];
  std::copy(states.begin(), states.end(), x);
  std::size_t at = 0, column = 0;
  const std::uint8_t* next = words.at;
  for (; at + kGroup <= count && std::size_t(words.end - next) >= 2 * kStates; at += kGroup) {
    for (std::size_t byte = 0; byte < kGroup; ++byte) {
      const std::uint32_t* slots = columns[column + byte];
      if constexpr (kPerByte == 2) {
        const std::uint32_t low = pop<kBits>(x[2 * byte], slots), high = pop<kBits>(x[2 * byte + 1], slots);
        bytes[at + byte] = std::uint8_t(low | high << 4);
        refill(x[2 * byte], next);
        refill(x[2 * byte + 1], next);
      } else {
        bytes[at + byte] = std::uint8_t(pop<kBits>(x[byte], slots));
        refill(x[byte], next);
      }
    }
    column += kGroup;
    while (column >= row) column -= row;
  }
  words.at = next;
  for (std::size_t symbol = at * kPerByte; at < count; ++at) {
    std::uint32_t found = 0;
    for (int part = 0; part < kPerByte; ++part, ++symbol) {
      std::uint32_t& state = x[symbol % kStates];
      found |= pop<kBits>(state, columns[column]) << (4 * part);
      refill_safely(state, words);
    }
    bytes[at] = std::uint8_t(found);
    if (++column == row) column = 0;
  }
  std::copy(x, x + kStates, states.begin());
}

template <int kPerByte>
void pop_all(Reader& reader, const Header& header, std::uint8_t* plane) {
  constexpr int kBits = bits_of(kPerByte);
  const RansGrid grid = header.grid;
  std::vector<std::uint32_t> slots(header.tables << kBits);
  for (std::size_t table = 0; table < header.tables; ++table)
    fill_slots<kBits>(read_frequencies(reader, symbols_of(kPerByte), 1u << kBits), slots.data() + (table << kBits));
  const std::vector<std::uint8_t> chosen = read_choice(reader, grid.blocks * grid.row, header.tables);
  std::array<std::uint32_t, kStates> states;
  for (std::uint32_t& state : states) {
    state = reader.take<std::uint32_t>();
    if (state < kLowest || state >= kLowest << 16) refuse("a state lies outside its range");
  }
  Words words{reader.at(), reader.end()};
  std::vector<const std::uint32_t*> columns(grid.row + kStates);
  const std::size_t block_bytes = header.size / grid.blocks;
  for (std::size_t block = 0; block < grid.blocks; ++block) {
    for (std::size_t column = 0; column < columns.size(); ++column)
      columns[column] = slots.data() + (std::size_t(chosen[block * grid.row + column % grid.row]) << kBits);
    pop_block<kPerByte>(plane + block * block_bytes, block_bytes, grid.row, columns.data(), states, words);
  }
  if (words.at != words.end) refuse(std::to_string(words.end - words.at) + " bytes are left where none are due");
  for (const std::uint32_t state : states)
    if (state != kLowest) refuse("a state does not end where encoding began");
}

}  // namespace

std::vector<std::uint8_t> rans_encode(const std::uint8_t* plane, std::size_t size, RansGrid grid, std::size_t most) {
  std::vector<std::uint8_t> out;
  const Tables chosen = choose_tables(plane, size, grid);
  if (chosen.bytes + 4 * kStates + kHeaderBytes >= most) return out;
  const int per_byte = chosen.per_byte, bits = bits_of(per_byte);
  put(out, std::uint32_t(size));
  put(out, std::uint8_t(per_byte == 1));
  put(out, std::uint8_t(chosen.tables.size()));
  put(out, std::uint16_t(grid.blocks));
  put(out, std::uint16_t(grid.row));
  std::vector<Step> steps;
  for (const Frequencies& frequencies : chosen.tables) {
    write_frequencies(out, frequencies);
    std::uint32_t start = 0;
    for (const std::uint32_t frequency : frequencies) {
      steps.push_back(step_of(start, frequency, bits));
      start += frequency;
    }
  }
  if (chosen.tables.size() > 1)
    for (std::size_t at = 0; at < chosen.of.size(); at += 2)
      out.push_back(std::uint8_t(chosen.of[at] | (at + 1 < chosen.of.size() ? chosen.of[at + 1] << 4 : 0)));
  std::vector<const Step*> columns;
  for (const std::uint8_t table : chosen.of) columns.push_back(steps.data() + table * symbols_of(per_byte));
  std::array<std::uint32_t, kStates> states;
  states.fill(kLowest);
  // A row is begun if every symbol of it may take a word.
  std::vector<std::uint8_t> buffer(most + 2 * per_byte * grid.row);
  std::uint8_t* end = buffer.data() + buffer.size();
  Stack stack(buffer.data(), end);
  const bool fits = per_byte == 2 ? push_all<2>(plane, size, grid, columns, states, stack)
                                  : push_all<1>(plane, size, grid, columns, states, stack);
  for (const std::uint32_t state : states) put(out, state);
  if (!fits || out.size() + std::size_t(end - stack.at()) > most) return {};
  out.insert(out.end(), stack.at(), const_cast<const std::uint8_t*>(end));
  return out;
}

void rans_decode(const std::uint8_t* coded, std::size_t coded_size, std::uint8_t* plane, std::size_t size) {
  Reader reader(coded, coded + coded_size);
  const Header header = read_header(reader, size);
  if (header.per_byte == 2)
    pop_all<2>(reader, header, plane);
  else
    pop_all<1>(reader, header, plane);
}

}  // namespace hack
