#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "rowwise_calls.h"
#include "thread_pool.h"

namespace hack {
namespace {

constexpr std::int64_t kBlockElements = 1 << 15;  // elements that one thread computes while another wakes up
constexpr std::int64_t kBlockProducts = 1 << 19;  // products that it computes in that time
constexpr std::int64_t kBlockDots = 1 << 11;      // products of a block of codes with a row of x, in that time
constexpr std::int64_t kReadingDots = 8;          // such products that take as long as reading a block of codes
constexpr std::int64_t kTilesTogether = 6;        // tiles of a weight in a group: a multiple of what a row of x takes
constexpr std::int64_t kCodedRows = 256;          // rows of x in bytes that stay in the second-level cache
constexpr std::int64_t kFewOutputs = 48;          // the fewest outputs for which a block of rows of x is worth reading
constexpr std::int64_t kVoteRows = 16;            // queries whose scores for all keys are held at once
constexpr std::int64_t kMatrixOutputs = 64;       // rows of a weight that a matrix unit takes at a time

// Blocks of rows of x in a product.
std::int64_t blocks_of(std::int64_t rows) {
  return (rows + kProductBlock - 1) / kProductBlock;
}

// The number of parts to divide work into: `wanted`, rounded up to as many for each thread, and at most `most`.
std::int64_t evenly(int threads, std::int64_t wanted, std::int64_t most) {
  const std::int64_t parts = wanted <= 1 ? 1 : (wanted + threads - 1) / threads * threads;
  return parts < most ? parts : most;
}

template <class Function>
void for_rows(int threads, std::int64_t rows, std::int64_t row_elements, Function function) {
  const std::int64_t block = row_elements < kBlockElements ? kBlockElements / row_elements : 1;
  const std::int64_t blocks = (rows + block - 1) / block;
  parallel_for(blocks > 1 ? threads : 1, blocks, [&](std::int64_t i) {
    const std::int64_t end = (i + 1) * block < rows ? (i + 1) * block : rows;
    for (std::int64_t row = i * block; row < end; ++row) function(row);
  });
}

// Rows of x as `pair_rows` orders them, in groups of 16. Zeros fill two or more groups up to an even number.
Strips paired_rows(const RowOperations& operations, int threads, const Strips& x, int k) {
  const std::int64_t least = (x.count + kLanes - 1) / kLanes, count = least == 1 ? 1 : (least + 1) / 2 * 2;
  const std::int64_t stride = paired_bytes(k);
  const Strips pairs{thread_scratch(std::size_t(count * stride)), count, stride};
  for_rows(threads, count, stride, [&](std::int64_t i) {
    const std::int64_t row = i * kLanes, left = x.count - row;
    const int slots = tile_slots(x.count - row / kProductBlock * kProductBlock);
    operations.pair_rows(x.data + row * x.stride, x.stride, int(left < slots ? left : slots), slots, k,
                         pairs.data + i * stride);
  });
  return pairs;
}

}  // namespace

void append(const RowOperations& operations, const OpenRows& open, const Strips& k, const Strips& v, bool* faulty) {
  for (std::int64_t b = 0; b < k.count; ++b)
    if (open.slots[b] < 0 || open.slots[b] >= open.slot_count || open.positions[b] < 0)
      throw std::invalid_argument("sequence " + std::to_string(b) + " has a bad position or a slot outside the pool");
  const std::int64_t d = open.head_dim, row = open.heads * d;
  auto* keys = reinterpret_cast<std::uint16_t*>(thread_scratch(std::size_t(2 * row) * sizeof(std::uint16_t)));
  auto* values = keys + row;
  for (std::int64_t b = 0; b < k.count; ++b) {
    const bool finite = operations.round(k.data + b * k.stride, int(row), keys) &
                        operations.round(v.data + b * v.stride, int(row), values);
    if (!finite) {
      faulty[b] = true;
      continue;
    }
    const std::int64_t page = open.positions[b] / open.page_tokens;
    for (int h = 0; h < open.heads; ++h) {
      const std::int64_t slot = (open.slots[b] * open.heads + h) * open.window.pages() + open.window.place(page);
      const std::int64_t at = (slot * open.page_tokens + open.positions[b] % open.page_tokens) * d;
      std::memcpy(open.k + at, keys + h * d, 2 * std::size_t(d));
      std::memcpy(open.v + at, values + h * d, 2 * std::size_t(d));
    }
  }
}

void narrow(const RowOperations& operations, int threads, const Strips& k, const Strips& v, int n,
            const std::int64_t* counts, std::int64_t batch, std::uint16_t* out_k, std::uint16_t* out_v, bool* faulty) {
  std::vector<std::uint8_t> bad(std::size_t(k.count));
  for_rows(threads, k.count, 2 * std::int64_t(n), [&](std::int64_t row) {
    std::uint16_t *to_k = out_k + row * n, *to_v = out_v + row * n;
    const bool k_finite = operations.round(k.data + row * k.stride, n, to_k);
    const bool v_finite = operations.round(v.data + row * v.stride, n, to_v);
    if (k_finite && v_finite) return;
    std::memset(to_k, 0, 2 * std::size_t(n));
    std::memset(to_v, 0, 2 * std::size_t(n));
    bad[row] = 1;
  });
  const std::uint8_t* row = bad.data();
  for (std::int64_t b = 0; b < batch; row += counts[b++])
    for (std::int64_t i = 0; i < counts[b]; ++i) faulty[b] |= row[i] != 0;
}

void rotate(const RowOperations& operations, int threads, const Strips& x, int heads, int head_dim,
            const float* turns) {
  for_rows(threads, x.count, std::int64_t(heads) * head_dim, [&](std::int64_t row) {
    operations.rotate(x.data + row * x.stride, heads, head_dim, turns + row * head_dim);
  });
}

void norm(const RowOperations& operations, int threads, const Strips& x, const Strips& more, const std::byte* weight,
          int n, float epsilon, const Strips& out) {
  for_rows(threads, x.count, n, [&](std::int64_t row) {
    const std::byte* added = more.data == nullptr ? nullptr : more.data + row * more.stride;
    operations.norm(x.data + row * x.stride, added, weight, n, epsilon, out.data + row * out.stride);
  });
}

void gate(const RowOperations& operations, int threads, const Strips& x, int n, std::size_t bytes, const Strips& out) {
  for_rows(threads, x.count, 2 * std::int64_t(n), [&](std::int64_t row) {
    const std::byte* gates = x.data + row * x.stride;
    operations.gate(gates, gates + bytes, n, out.data + row * out.stride);
  });
}

void count_votes(const Operations& operations, int threads, const VoteCall& call) {
  const RowOperations& rows = operations.rows[int(Dtype::kFloat)];
  const std::int64_t blocks = (call.rows + kVoteRows - 1) / kVoteRows, d = call.head_dim;
  const std::int64_t row_bytes = d * std::int64_t(sizeof(float));
  const std::size_t stride = padded_floats(int(call.total)), scratch = product_scratch_bytes(call.head_dim);
  parallel_for(threads, call.parts * call.heads, [&](std::int64_t i) {
    const std::int64_t part = i / call.heads, head = i % call.heads;
    std::byte* room = thread_scratch(scratch + kVoteRows * stride * sizeof(float));
    auto* scores = reinterpret_cast<float*>(room + scratch);
    const float *q = call.q + head * call.rows * d, *keys = call.keys + head * call.total * d;
    std::int64_t* votes = call.votes + i * call.total;
    for (std::int64_t block = part; block < blocks; block += call.parts) {
      const std::int64_t begin = block * kVoteRows;
      const std::int64_t count = call.rows - begin < kVoteRows ? call.rows - begin : kVoteRows;
      const auto seen = [&](std::int64_t row) { return call.first + (begin + row) / call.group + 1; };
      rows.product({reinterpret_cast<const std::byte*>(q + begin * d), row_bytes, int(count), call.head_dim,
                    reinterpret_cast<const std::byte*>(keys), nullptr, 0, seen(count - 1),
                    reinterpret_cast<std::byte*>(scores), std::int64_t(stride * sizeof(float))},
                   room);
      for (std::int64_t row = 0; row < count; ++row) operations.vote(scores + row * stride, seen(row), votes);
    }
  });
}

void product(const RowOperations& operations, int threads, const Strips& x, int k, const std::byte* w,
             const std::byte* bias, std::int64_t outputs, const Strips& out) {
  if (x.count == 0) return;
  const bool paired = operations.pair_rows != nullptr;
  const Strips pairs = paired ? paired_rows(operations, threads, x, k) : Strips{};
  const std::int64_t rows = x.count < kProductBlock ? x.count : kProductBlock;
  const std::int64_t alone = kBlockProducts / ((paired ? (rows + kLanes - 1) / kLanes : rows) * k);
  const std::int64_t least = alone < kFewOutputs ? kFewOutputs : alone;
  const std::int64_t columns = paired ? (least + kMatrixOutputs - 1) / kMatrixOutputs * kMatrixOutputs : least;
  const std::int64_t across = (outputs + columns - 1) / columns, down = blocks_of(x.count);
  parallel_for(across * down > 1 ? threads : 1, across * down, [&](std::int64_t i) {
    const std::int64_t row = i / across * kProductBlock, first = i % across * columns;
    const std::int64_t last = first + columns < outputs ? first + columns : outputs;
    const int count = int(x.count - row < kProductBlock ? x.count - row : kProductBlock);
    const std::byte* from = paired ? pairs.data + row / kLanes * pairs.stride : x.data + row * x.stride;
    operations.product({from, paired ? pairs.stride : x.stride, count, k, w, bias, first, last,
                        out.data + row * out.stride, out.stride},
                       paired ? nullptr : thread_scratch(product_scratch_bytes(k)));
  });
}

void product(const RowOperations& operations, int threads, const Strips& x, const BlockWeight& w, const std::byte* bias,
             const Strips& out) {
  const std::int64_t k = std::int64_t(w.blocks) * kBlockColumns, tiles = (w.outputs + kLanes - 1) / kLanes;
  const std::size_t rounded = BlockRows::bytes(x.count, w.blocks);
  auto* blocks = reinterpret_cast<RowBlock*>(thread_scratch(rounded + block_scratch_bytes(w.blocks)));
  const BlockRows rows{blocks, w.blocks};
  for_rows(threads, x.count, k, [&](std::int64_t row) {
    operations.round_blocks(x.data + row * x.stride, int(k), w.bits, rows, row);
  });
  const std::int64_t down = (x.count + kCodedRows - 1) / kCodedRows;
  const std::int64_t dots = (x.count * kRowBytes + kReadingDots) * tiles * w.blocks;
  const std::int64_t groups = (tiles + kTilesTogether - 1) / kTilesTogether;
  const std::int64_t parts = evenly(threads, dots / kBlockDots / down, groups);
  parallel_for(threads, parts * down, [&](std::int64_t i) {
    const std::int64_t row = i / parts * kCodedRows, part = i % parts;
    const std::int64_t last_row = row + kCodedRows < x.count ? row + kCodedRows : x.count;
    // The scratch lies behind the rows of x, because the calling thread keeps these in its own scratch memory.
    std::byte* scratch = thread_scratch(rounded + block_scratch_bytes(w.blocks)) + rounded;
    const std::int64_t tile = part * groups / parts * kTilesTogether;
    const std::int64_t last_tile = (part + 1) * groups / parts * kTilesTogether;
    operations.block_product({rows, w.data, w.tile_bytes(), w.bits, w.outputs, bias, row, last_row, tile,
                              last_tile < tiles ? last_tile : tiles, out.data, out.stride},
                             scratch);
  });
}

void unpack(const RowOperations& operations, int threads, const BlockWeight& w, const std::int64_t* ids,
            const Strips& out) {
  const BlockItem item{{nullptr, w.blocks}, w.data, w.tile_bytes(), w.bits, w.outputs, nullptr, 0, 0, 0, 0, nullptr, 0};
  for_rows(threads, out.count, std::int64_t(w.blocks) * kBlockColumns, [&](std::int64_t row) {
    operations.unpack_row(item, ids == nullptr ? row : ids[row], out.data + row * out.stride);
  });
}

void take(int threads, const Strips& x, const std::int64_t* ids, std::int64_t bytes, const Strips& out) {
  for_rows(threads, out.count, bytes, [&](std::int64_t row) {
    std::memcpy(out.data + row * out.stride, x.data + ids[row] * x.stride, std::size_t(bytes));
  });
}

namespace {

// Turns head `head` of `rows` rows from `row` on.
void turn_block(const HeadTurn& part, std::int64_t head, std::int64_t row, int rows) {
  const int d = part.head_dim;
  const std::byte* x = part.x.at(row, head * d);
  std::byte* out = part.out.at(row, head * d);
  std::int64_t stride = part.x.strips.stride;
  const std::int64_t out_stride = part.out.strips.stride;
  if (!part.ready) {
    const std::int64_t wide_stride = std::int64_t(padded_floats(d) * sizeof(float));
    std::byte* wide = thread_scratch(std::size_t(rows * wide_stride));
    for (int r = 0; r < rows; ++r)
      part.x.operations->widen(x + r * stride, d, part.rounded, reinterpret_cast<float*>(wide + r * wide_stride));
    x = wide;
    stride = wide_stride;
  }
  if (part.matrices == nullptr) {
    for (int r = 0; r < rows; ++r)
      part.out.operations->store(reinterpret_cast<const float*>(x + r * stride), d, out + r * out_stride);
    return;
  }
  const std::int64_t group = head / (part.heads / part.groups);
  const float* shift = part.shift == nullptr ? nullptr : part.shift + group * d;
  part.out.operations->turn({reinterpret_cast<const float*>(x), stride, rows, d, part.matrices + group * d * d, shift,
                             out, out_stride});
}

}  // namespace

void turn_heads(int threads, std::span<const HeadTurn> parts) {
  std::int64_t items = 0, products = 0;
  for (const HeadTurn& part : parts) {
    items += blocks_of(part.x.strips.count) * part.heads;
    products += part.matrices == nullptr ? 0 : part.x.strips.count * part.heads * part.head_dim * part.head_dim;
  }
  parallel_for(products <= kBlockProducts ? 1 : threads, items, [&](std::int64_t i) {
    const HeadTurn* part = parts.data();
    for (; i >= blocks_of(part->x.strips.count) * part->heads; ++part)
      i -= blocks_of(part->x.strips.count) * part->heads;
    const std::int64_t row = i / part->heads * kProductBlock, left = part->x.strips.count - row;
    turn_block(*part, i % part->heads, row, int(left < kProductBlock ? left : kProductBlock));
  });
}

}  // namespace hack
