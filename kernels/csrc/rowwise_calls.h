// Whole calls of rowwise.h: rows are divided among threads.
#pragma once

#include <span>

#include "work.h"

namespace hack {

// [count, row], `stride` bytes apart; a row's elements are contiguous.
struct Strips {
  std::byte* data;
  std::int64_t count;
  std::int64_t stride;
};

// Destination of decoded rows: the place of row number positions[b] in slot slots[b] of k, v [slots, heads, E·Π, D].
struct OpenRows {
  std::uint16_t* k;
  std::uint16_t* v;
  const std::int64_t* positions;
  const std::int64_t* slots;
  std::int64_t slot_count;
  int heads;
  int page_tokens;
  int head_dim;
  Window window;
};

// Rounds k and v, one row [heads, D] per sequence, to FP16 and writes them. A row with a value that is not finite sets
// its flag in `faulty` instead. Where a place lies outside the slots, throws `std::invalid_argument` and writes
// nothing.
void append(const RowOperations& operations, const OpenRows& open, const Strips& k, const Strips& v, bool* faulty);
// Rounds rows of n values of k and v to FP16 rows of out_k and out_v. If a value of a row is not finite, both rows
// become zeros and `faulty` of the row's sequence is set. counts [batch]: rows of each sequence, one after another.
void narrow(const RowOperations& operations, int threads, const Strips& k, const Strips& v, int n,
            const std::int64_t* counts, std::int64_t batch, std::uint16_t* out_k, std::uint16_t* out_v, bool* faulty);
void rotate(const RowOperations& operations, int threads, const Strips& x, int heads, int head_dim, const float* turns);
// Adds `more` to x if it has data, then normalizes x.
void norm(const RowOperations& operations, int threads, const Strips& x, const Strips& more, const std::byte* weight,
          int n, float epsilon, const Strips& out);
// Rows of x are gate [n] and then up [n], each of `bytes`.
void gate(const RowOperations& operations, int threads, const Strips& x, int n, std::size_t bytes, const Strips& out);
// A call of `count_votes`. Row r of q [heads, rows, D], in units of log2, is row first + r / group of the sequence, and
// sees keys [heads, total, D] up to there. votes [parts, heads, total]: a part of the rows adds to each.
struct VoteCall {
  const float* q;
  const float* keys;
  std::int64_t* votes;
  std::int64_t parts;
  std::int64_t heads;
  std::int64_t rows;
  std::int64_t total;
  std::int64_t first;
  int group;
  int head_dim;
};

void count_votes(const Operations& operations, int threads, const VoteCall& call);

// A call of `select_pages`. Of the `sealed` first pages of tables [batch, width], every KV head lists `counts` first in
// out [batch, heads, width], and then the others, each in the order of the table. Bounds of a pool's pages are rows
// [heads, D]. q [batch, heads · group, D].
struct SelectCall {
  const float* q;
  Strips least;
  Strips most;
  const std::int64_t* tables;
  const std::int64_t* sealed;
  const std::int64_t* counts;
  std::int64_t* out;
  std::int64_t batch;
  std::int64_t heads;
  std::int64_t width;
  int group;
  int head_dim;
  float alpha;
  bool halve;  // pages of the worse half of the pairs come last
};

void select_pages(const Operations& operations, int threads, const SelectCall& call);
// x [count, k] times w [outputs, k], contiguous, plus bias [outputs] unless it is null, to out [count, outputs].
void product(const RowOperations& operations, int threads, const Strips& x, int k, const std::byte* w,
             const std::byte* bias, std::int64_t outputs, const Strips& out);
// A weight [outputs, 32 blocks] as codes (block_tiles.h).
struct BlockWeight {
  const std::byte* data;
  int bits;
  int blocks;
  int outputs;

  std::int64_t tile_bytes() const { return blocks * block_bytes(bits); }
};

// `product` with a weight as codes and x rounded to two bytes.
void product(const RowOperations& operations, int threads, const Strips& x, const BlockWeight& w, const std::byte* bias,
             const Strips& out);
// Rows ids[0], .. of w, or all rows where `ids` is null, to rows of out.
void unpack(const RowOperations& operations, int threads, const BlockWeight& w, const std::int64_t* ids,
            const Strips& out);
// Rows ids[0], .. of x, of `bytes` each, to rows of out.
void take(int threads, const Strips& x, const std::int64_t* ids, std::int64_t bytes, const Strips& out);
// Rows of heads, with the operations and the element size of their dtype.
struct HeadRows {
  Strips strips;
  const RowOperations* operations;
  int bytes;  // of an element

  std::byte* at(std::int64_t row, std::int64_t element) const {
    return strips.data + row * strips.stride + element * bytes;
  }
};

// A turn of the heads of x [count, heads, D]: each times the matrix of its group, of matrices [groups, D, D], plus the
// group's shift, of shift [groups, D], unless it is null. Row k of a matrix has the factors of channel k of x.
struct HeadTurn {
  HeadRows x;
  HeadRows out;
  bool ready;    // x is FP32 and is not rounded
  bool rounded;  // x is rounded to FP16 first
  int heads;
  int head_dim;
  int groups = 1;
  const float* matrices = nullptr;  // null: x only changes its dtype
  const float* shift = nullptr;     // null, or out is FP32
};

void turn_heads(int threads, std::span<const HeadTurn> parts);

}  // namespace hack
