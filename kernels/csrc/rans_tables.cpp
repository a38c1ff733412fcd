#include "rans_tables.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <stdexcept>

namespace hack::rans {

void refuse(const std::string& what) { throw std::invalid_argument("rans: " + what); }

namespace {

constexpr std::size_t kTries[] = {1, 16};  // numbers of tables
constexpr std::size_t kMostOfBytes = 1;    // tables of bytes are large
constexpr int kRounds = 2;
constexpr int kLog = 8;         // fraction bits of a logarithm
constexpr int kCountBits = 13;  // a count below 2^13 times a cost below 2^14, 16 times, fits into 31 bits

// log2 of 1..4095 in steps of 2^-kLog, from integers alone: libraries differ in the last bit.
const std::array<std::uint16_t, 4096> kLogs = [] {
  std::array<std::uint16_t, 4096> logs{};
  for (std::uint32_t n = 1; n < logs.size(); ++n) {
    std::uint32_t log = std::uint32_t(std::bit_width(n)) - 1;
    std::uint64_t mantissa = (std::uint64_t(n) << 30) >> log;  // in [2^30, 2^31)
    for (int bit = 0; bit < kLog; ++bit) {
      mantissa = (mantissa * mantissa) >> 30;
      const std::uint64_t carry = mantissa >> 31;
      log = log << 1 | std::uint32_t(carry);
      mantissa >>= carry;
    }
    logs[n] = std::uint16_t(log);
  }
  return logs;
}();

// log2(n), n > 0, in steps of 2^-kLog.
std::uint32_t log_of(std::uint64_t n) {
  const int beyond = std::max(0, int(std::bit_width(n)) - 12);
  return kLogs[n >> beyond] + (std::uint32_t(beyond) << kLog);
}

// Counts of symbols by column, [columns][symbols].
struct Counts {
  std::size_t symbols, columns;
  std::vector<std::uint32_t> of;
  std::uint32_t* column(std::size_t at) { return of.data() + at * symbols; }
  const std::uint32_t* column(std::size_t at) const { return of.data() + at * symbols; }
};

Counts count_bytes(const std::uint8_t* plane, std::size_t size, RansGrid grid) {
  Counts counts{256, grid.blocks * grid.row, std::vector<std::uint32_t>(256 * grid.blocks * grid.row)};
  const std::size_t block_bytes = size / grid.blocks;
  for (std::size_t block = 0; block < grid.blocks; ++block) {
    std::uint32_t* of = counts.column(block * grid.row);
    const std::uint8_t* bytes = plane + block * block_bytes;
    for (std::size_t row = 0; row < block_bytes; row += grid.row)
      for (std::size_t column = 0; column < grid.row; ++column) ++of[256 * column + bytes[row + column]];
  }
  return counts;
}

Counts nibbles_of(const Counts& bytes) {
  Counts counts{16, bytes.columns, std::vector<std::uint32_t>(16 * bytes.columns)};
  for (std::size_t column = 0; column < bytes.columns; ++column)
    for (std::uint32_t high = 0; high < 16; ++high)
      for (std::uint32_t low = 0; low < 16; ++low) {
        const std::uint32_t count = bytes.column(column)[16 * high + low];
        counts.column(column)[low] += count;
        counts.column(column)[high] += count;
      }
  return counts;
}

// Counts scaled to a sum of `total`. Every symbol that occurs keeps 1 or more.
Frequencies scaled(const std::uint64_t* counts, std::size_t symbols, std::uint32_t total) {
  std::uint64_t all = 0;
  for (std::size_t symbol = 0; symbol < symbols; ++symbol) all += counts[symbol];
  Frequencies found(symbols);
  std::uint32_t sum = 0;
  for (std::size_t symbol = 0; symbol < symbols; ++symbol)
    if (counts[symbol]) {
      found[symbol] = std::max(1u, std::uint32_t((counts[symbol] * total + all / 2) / all));
      sum += found[symbol];
    }
  for (; sum > total; --sum) --*std::max_element(found.begin(), found.end());
  *std::max_element(found.begin(), found.end()) += total - sum;
  return found;
}

std::size_t varint_bytes(std::uint32_t number) { return number < 128 ? 1 : 2; }

std::size_t written_bytes(const Frequencies& frequencies) {
  std::size_t bytes = frequencies.size() / 8, last = 0;
  for (const std::uint32_t frequency : frequencies)
    if (frequency) bytes += last = varint_bytes(frequency);
  return bytes - last;
}

// Columns in clusters of like counts: Lloyd's rounds with a symbol's cost as the distance, from columns far apart.
class Clusters {
 public:
  Clusters(const Counts& counts, std::size_t tables) : counts_(counts), of_(counts.columns) {
    std::uint32_t most = 1;
    for (const std::uint32_t count : counts.of) most = std::max(most, count);
    const int shift = std::max(0, int(std::bit_width(most)) - kCountBits);
    small_.resize(counts.of.size());
    for (std::size_t at = 0; at < small_.size(); ++at) small_[at] = std::int16_t(counts.of[at] >> shift);
    best_.assign(counts.columns, std::numeric_limits<std::int64_t>::max());
    add_all();
    for (std::size_t table = 1; table < tables && table < counts.columns; ++table) add_farthest();
    for (int round = 0; round < kRounds && tables > 1; ++round) {
      sum_up();
      best_.assign(counts.columns, std::numeric_limits<std::int64_t>::max());
      for (std::size_t table = 0; table < costs_.size(); ++table) assign(table);
    }
    sum_up();
  }

  // The tables that columns use.
  Tables tables(int per_byte) const {
    Tables found;
    found.per_byte = per_byte;
    found.of.resize(of_.size());
    const int bits = bits_of(per_byte);
    std::uint64_t cost = 0;
    std::vector<std::uint8_t> name(sums_.size());
    for (std::size_t table = 0; table < sums_.size(); ++table) {
      if (std::find(of_.begin(), of_.end(), table) == of_.end()) continue;
      name[table] = std::uint8_t(found.tables.size());
      found.tables.push_back(scaled(sums_[table].data(), counts_.symbols, 1u << bits));
      const Frequencies& frequencies = found.tables.back();
      found.bytes += written_bytes(frequencies);
      for (std::size_t symbol = 0; symbol < counts_.symbols; ++symbol)
        if (frequencies[symbol])
          cost += sums_[table][symbol] * ((std::uint32_t(bits) << kLog) - log_of(frequencies[symbol]));
    }
    for (std::size_t column = 0; column < of_.size(); ++column) found.of[column] = name[of_[column]];
    if (found.tables.size() > 1) found.bytes += (of_.size() + 1) / 2;
    found.bytes += std::size_t(cost >> (kLog + 3));
    return found;
  }

 private:
  using Costs = std::vector<std::int16_t>;

  void add_all() {
    sum_up();
    assign(0);
  }

  // A cluster around the column that its cluster serves worst: the column's counts, and a few of all others.
  void add_farthest() {
    std::int64_t worst = -1;
    std::size_t farthest = 0;
    for (std::size_t column = 0; column < of_.size(); ++column) {
      const std::int64_t loss = best_[column] - own_cost(column);
      if (loss > worst) worst = loss, farthest = column;
    }
    std::vector<std::uint64_t> seed(counts_.symbols);
    for (std::size_t symbol = 0; symbol < seed.size(); ++symbol)
      seed[symbol] = std::uint64_t(counts_.column(farthest)[symbol]) * of_.size() * 8 + sums_[0][symbol];
    sums_.push_back(seed);
    costs_.push_back(costs_of(seed));
    assign(costs_.size() - 1);
  }

  std::int64_t own_cost(std::size_t column) {
    if (own_.empty()) own_.assign(of_.size(), -1);
    if (own_[column] < 0) {
      std::vector<std::uint64_t> own(counts_.column(column), counts_.column(column) + counts_.symbols);
      own_[column] = cost_of(column, costs_of(own));
    }
    return own_[column];
  }

  void sum_up() {
    const std::size_t tables = std::max<std::size_t>(1, costs_.size());
    sums_.assign(tables, std::vector<std::uint64_t>(counts_.symbols));
    for (std::size_t column = 0; column < of_.size(); ++column)
      for (std::size_t symbol = 0; symbol < counts_.symbols; ++symbol)
        sums_[of_[column]][symbol] += counts_.column(column)[symbol];
    costs_.clear();
    for (const auto& sum : sums_) costs_.push_back(costs_of(sum));
  }

  // Bits of each symbol. One that does not occur costs more than any that does.
  Costs costs_of(const std::vector<std::uint64_t>& counts) const {
    std::uint64_t all = 1;
    for (const std::uint64_t count : counts) all += count;
    const std::uint32_t log = log_of(all);
    Costs costs(counts.size());
    for (std::size_t symbol = 0; symbol < costs.size(); ++symbol)
      costs[symbol] = std::int16_t(counts[symbol] ? log - log_of(counts[symbol]) : log + (2u << kLog));
    return costs;
  }

  std::int64_t cost_of(std::size_t column, const Costs& costs) const {
    const std::int16_t* counts = small_.data() + column * counts_.symbols;
    std::int64_t cost = 0;
    for (std::size_t at = 0; at < counts_.symbols; at += 16) {
      std::int32_t sum = 0;
      for (std::size_t symbol = at; symbol < at + 16; ++symbol) sum += std::int32_t(counts[symbol]) * costs[symbol];
      cost += sum;
    }
    return cost;
  }

  void assign(std::size_t table) {
    for (std::size_t column = 0; column < of_.size(); ++column) {
      const std::int64_t cost = cost_of(column, costs_[table]);
      if (cost < best_[column]) best_[column] = cost, of_[column] = std::uint8_t(table);
    }
  }

  const Counts& counts_;
  std::vector<std::int16_t> small_;  // counts in kCountBits
  std::vector<std::uint8_t> of_;
  std::vector<std::int64_t> best_, own_;
  std::vector<std::vector<std::uint64_t>> sums_;
  std::vector<Costs> costs_;
};

}  // namespace

Tables choose_tables(const std::uint8_t* plane, std::size_t size, RansGrid grid) {
  const Counts bytes = count_bytes(plane, size, grid), nibbles = nibbles_of(bytes);
  Tables best;
  best.bytes = std::numeric_limits<std::size_t>::max();
  for (const int per_byte : {2, 1})
    for (const std::size_t tables : kTries) {
      if (per_byte == 1 && tables > kMostOfBytes) continue;
      if (tables > 1 && bytes.columns == 1) continue;
      Tables found = Clusters(per_byte == 2 ? nibbles : bytes, tables).tables(per_byte);
      if (found.bytes < best.bytes) best = std::move(found);
    }
  return best;
}

Header read_header(Reader& reader, std::size_t size) {
  Header header;
  header.size = reader.take<std::uint32_t>();
  if (header.size != size) refuse(std::to_string(header.size) + " bytes where " + std::to_string(size) + " are due");
  const auto alphabet = reader.take<std::uint8_t>();
  if (alphabet > 1) refuse("alphabet " + std::to_string(alphabet) + " is unknown");
  header.per_byte = alphabet == 0 ? 2 : 1;
  header.tables = reader.take<std::uint8_t>();
  if (header.tables < 1 || header.tables > kMostTables) refuse(std::to_string(header.tables) + " tables");
  header.grid.blocks = reader.take<std::uint16_t>();
  header.grid.row = reader.take<std::uint16_t>();
  const std::size_t columns = header.grid.blocks * header.grid.row;
  if (columns < 1 || columns > kMostColumns || size % columns != 0)
    refuse(std::to_string(columns) + " columns in " + std::to_string(size) + " bytes");
  return header;
}

Frequencies read_frequencies(Reader& reader, std::size_t symbols, std::uint32_t total) {
  Frequencies found(symbols);
  std::size_t last = symbols;
  for (std::size_t at = 0; at < symbols; at += 8) {
    const auto bits = reader.take<std::uint8_t>();
    for (std::size_t bit = 0; bit < 8; ++bit)
      if (bits >> bit & 1) found[last = at + bit] = 1;
  }
  if (last == symbols) refuse("a table has no symbol");
  std::uint32_t sum = 0;
  for (std::size_t symbol = 0; symbol < last; ++symbol) {
    if (!found[symbol]) continue;
    std::uint32_t frequency = reader.take<std::uint8_t>();
    if (frequency > 127) frequency = (frequency & 127) | std::uint32_t(reader.take<std::uint8_t>()) << 7;
    found[symbol] = frequency;
    sum += frequency;
    if (frequency < 1 || sum >= total) refuse("frequencies of a table do not sum to " + std::to_string(total));
  }
  found[last] = total - sum;
  return found;
}

std::vector<std::uint8_t> read_choice(Reader& reader, std::size_t columns, std::size_t tables) {
  std::vector<std::uint8_t> found(columns);
  if (tables == 1) return found;
  for (std::size_t at = 0; at < columns; at += 2) {
    const auto two = reader.take<std::uint8_t>();
    found[at] = two & 15;
    if (at + 1 < columns) found[at + 1] = two >> 4;
  }
  if (*std::max_element(found.begin(), found.end()) >= tables) refuse("a column has a table that is not there");
  return found;
}

void write_frequencies(std::vector<std::uint8_t>& out, const Frequencies& frequencies) {
  std::size_t last = 0;
  for (std::size_t at = 0; at < frequencies.size(); at += 8) {
    std::uint8_t bits = 0;
    for (std::size_t bit = 0; bit < 8; ++bit)
      if (frequencies[at + bit]) bits |= std::uint8_t(1u << bit), last = at + bit;
    out.push_back(bits);
  }
  for (std::size_t symbol = 0; symbol < last; ++symbol) {
    const std::uint32_t frequency = frequencies[symbol];
    if (!frequency) continue;
    out.push_back(std::uint8_t(frequency < 128 ? frequency : frequency | 128));
    if (frequency >= 128) out.push_back(std::uint8_t(frequency >> 7));
  }
}

}  // namespace hack::rans
