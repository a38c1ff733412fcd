// What one thread computes at a time, and the table of operations that each instruction set fills.
#pragma once

#include <string_view>

#include "format.h"

namespace hack {

// Where rows stand: the coordinates of stochastic rounding.
struct Place {
  int layer;
  int head;
  std::int64_t position;
};

enum class Dtype : int { kFloat, kHalf, kBfloat };
constexpr int bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat ? 4 : 2;
}

// A layer's pool, [N, Hkv, plane] each.
struct Pool {
  Page base;
  std::int64_t pages;
  int heads;
};

// The rows of a sequence's own page before and in the batch, of one KV head.
struct OwnRows {
  const std::uint16_t* open_k;  // rows that the page had before: [open, D]
  const std::uint16_t* open_v;
  int open;
  const std::uint16_t* k;  // the batch's rows after them, `stride` elements apart; unused in decode
  const std::uint16_t* v;
  std::int64_t stride;
  int total;  // rows to read, 0: this item does not look at the own page
  Place place;
};

// Rows of one KV head that follow the first `old` of a page, `stride` elements apart.
struct NewRows {
  const std::uint16_t* k;
  const std::uint16_t* v;
  std::int64_t stride;
  int old;
  int count;
};

// Attention of `tokens` queries of one page, times the `group` query heads of one KV head, to pages [first, last) of
// `page_ids` and perhaps the own page, which is page `last` where it rests as codes. Row r is token r / group, head
// r % group.
struct AttendItem {
  const std::byte* q;
  std::byte* out;
  Dtype dtype;
  std::int64_t q_stride;    // bytes between tokens of q
  std::int64_t out_stride;  // and of out
  int group;
  int tokens;
  int head;
  const std::int64_t* page_ids;
  std::int64_t first;
  std::int64_t last;
  OwnRows own;
  int visible;     // own rows that token 0 sees; token i sees i more
  float* partial;  // where a split leaves its state (partial_floats); null: this item is whole and writes `out`
};

// Queries per item: enough to unpack a page's codes once for many, few enough to stay in the first two caches.
inline constexpr int kItemRows = 128;

// State of one row in a split: maximum, weight, sum of values [D].
constexpr std::int64_t partial_floats(const Format& fmt, int rows) {
  return std::int64_t(rows) * (fmt.head_dim + 2);
}

// Splits of one item, `partial_floats` apart, to be merged into the item's `out`.
struct MergeItem {
  const float* partials;
  int splits;
  AttendItem whole;
};

inline constexpr int kDotsPerRound = 16;

using Attend = void(const Format&, const Pool&, const AttendItem&, std::byte* scratch);

// Operations on single rows of one dtype; rowwise.h.
struct RowOperations {
  bool (*round)(const std::byte* row, int n, std::uint16_t* out);
  void (*rotate)(std::byte* row, int heads, int head_dim, const float* turn);
  void (*norm)(std::byte* x, const std::byte* more, const std::byte* weight, int n, float epsilon, std::byte* out);
  void (*gate)(const std::byte* gate, const std::byte* up, int n, std::byte* out);
  std::int64_t (*largest)(const std::byte* row, int n);
};

struct Operations {
  std::string_view name;
  // k, v: one page of one KV head, FP16 [Π, D].
  void (*seal)(const Format&, Place, const std::uint16_t* k, const std::uint16_t* v, const Page&, std::byte* scratch);
  // `place` is that of the page's first row; rows past the new ones become 0.
  void (*requantize)(const Format&, Place place, const NewRows&, const Page&, std::byte* scratch);
  // Wire order to native and back; sums are read from the wire page where it has them, else counted.
  void (*install)(const Format&, const ConstPage& wire, const Page&, std::byte* scratch);
  void (*export_page)(const Format&, const Page&, const Page& wire);
  Attend* attend;       // pages of codes
  Attend* attend_rows;  // pages of FP16 rows, FP32 arithmetic
  void (*merge)(const Format&, const MergeItem&);
  // `rounds` times kDotsPerRound integer dots of kVectorBytes products, all in registers and the first cache.
  std::uint32_t (*dots)(std::int64_t rounds);
  RowOperations rows[3];  // by Dtype
};

const Operations& portable_operations();
const Operations& avx2_operations();
const Operations& avx512_operations();
// `attend_rows` on BF16 products, for queries in bfloat16.
Attend* bf16_rows();
// Rivals only attend and merge; their other operations are null.
const Operations& bf16_rival();
const Operations& dequantize_rival();

// Bytes of scratch memory that any operation on this format needs for `rows` query rows.
constexpr std::size_t scratch_bytes(const Format& fmt, int rows) {
  const std::size_t padded = std::size_t(rows + 3) / 4 * 4, d = fmt.head_dim, groups = fmt.k_groups();
  const std::size_t queries = padded * (2 * d + 4 * d + 12 * groups), state = padded * (4 * d + 8);
  const std::size_t pages = (fmt.coded() ? 4 : 8) * fmt.elements(), meta = 4 * (6 * fmt.k_meta() + 6 * d + 256);
  const std::size_t tile = 5 * kLanes * std::size_t(fmt.page_tokens);  // scores and codes of P
  return queries + state + pages + meta + tile + 64 * 64;
}

}  // namespace hack
