// Items of work, each computed by one thread, and the table of operations that each instruction set fills.
#pragma once

#include <cstring>
#include <string_view>

#include "page_format.h"

namespace hack {

// The coordinates of rows, which key stochastic rounding.
struct Place {
  int layer;
  int head;
  std::int64_t position;
};

enum class Dtype : int { kFloat, kHalf, kBfloat };
constexpr int bytes_of(Dtype dtype) {
  return dtype == Dtype::kFloat ? 4 : 2;
}

// A layer's sealed pages, [N, Hkv, plane] each. Pages need not be adjacent: records may hold other planes between.
struct Pool {
  Planes planes;
  std::size_t page_bytes[kMaxPlanes];  // from a page to the next, by plane
  std::size_t head_bytes[kMaxPlanes];  // from a head to the next
  std::int64_t pages;
  int heads;
  int head_start;  // the model's number of the first head here; it keys stochastic rounding

  [[gnu::always_inline]] Planes page(const PageFormat& fmt, std::int64_t id, int head) const {
    Planes found;
    for (int i = 0; i < fmt.plane_count; ++i)
      found.at[i] = planes.at[i] + std::size_t(id) * page_bytes[i] + std::size_t(head) * head_bytes[i];
    return found;
  }
};

// The rows of a page before and in the batch, of one KV head.
struct ExactRows {
  const std::uint16_t* slot_k;  // rows that the page had before: [old, D]
  const std::uint16_t* slot_v;
  int old;
  const std::uint16_t* k;  // the batch's rows after them, `stride` elements apart; unused in decode
  const std::uint16_t* v;
  std::int64_t stride;
  int total;  // rows to read; 0 for an own page that this item does not read
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

// Attention of `tokens` queries in one page, times the `group` query heads of one KV head, to pages [first, last) of
// `page_ids`, to whole pages that they see exactly and, if `own.total` > 0, to the own page. An own page that rests as
// codes is page `last`. Row r is token r / group, head r % group.
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
  ExactRows earlier[kMostExact];
  int earlier_count;
  ExactRows own;
  int visible;     // own rows that token 0 sees; token i sees i more
  float* partial;  // where a split leaves its state (partial_floats); null: this item is whole and writes `out`
};

// Queries per item: enough to unpack a page's codes once for many, few enough to stay in the first two caches.
inline constexpr int kItemRows = 256;

// State of one row in a split: maximum, weight, sum of values [D].
constexpr std::int64_t partial_floats(const PageFormat& fmt, int rows) {
  return std::int64_t(rows) * (fmt.head_dim + 2);
}

// Splits of one item, `partial_floats` apart, to be merged into the item's `out`.
struct MergeItem {
  const float* partials;
  int splits;
  AttendItem whole;
};

using Attend = void(const PageFormat&, const Pool&, const AttendItem&, std::byte* scratch);

// Rows of x [.., k] times rows [first, last) of a weight w [.., k], to columns [first, last) of out; all of one dtype.
struct ProductItem {
  const std::byte* x;
  std::int64_t x_stride;  // bytes between rows of x
  int rows;
  int k;
  const std::byte* w;
  const std::byte* bias;  // [..], one for every row of w; null: none
  std::int64_t first;
  std::int64_t last;
  std::byte* out;
  std::int64_t out_stride;
};

// Rows of a head times a matrix [D, D], plus a shift [D] unless that is null. Row k of the matrix has the factors of
// channel k of x.
struct TurnItem {
  const float* x;
  std::int64_t x_stride;  // bytes between rows of x
  int rows;
  int head_dim;
  const float* matrix;
  const float* shift;  // null, or out is FP32
  std::byte* out;
  std::int64_t out_stride;
};

inline constexpr int kProductBlock = 64;  // rows of x in an item, at most

inline constexpr int kPairBytes = 1024;  // bytes of 16 rows of x in pairs, for 32 columns (matrix_product.h)

// Rows of x in a tile when an item has `rows` rows: 1, 4, 8 or 16.
constexpr int tile_slots(std::int64_t rows) {
  return rows <= 1 ? 1 : rows <= 4 ? 4 : rows <= 8 ? 8 : kLanes;
}

// Bytes of 16 rows of x in pairs.
constexpr std::int64_t paired_bytes(std::int64_t k) {
  return (k + 31) / 32 * kPairBytes;
}

constexpr std::size_t padded_floats(int n) {
  return std::size_t(n + kLanes - 1) / kLanes * kLanes;
}

// Scratch of an item: its rows of x and some rows of w, in FP32.
constexpr std::size_t product_scratch_bytes(int k) {
  return (kProductBlock + 8) * padded_floats(k) * sizeof(float);
}

inline constexpr int kBlockColumns = 32;  // columns of a weight that share a scale

// Bytes of the codes, scales and, for 4 bits, minima of a block of 16 rows.
constexpr std::int64_t block_bytes(int bits) {
  return kBlockColumns * kLanes * bits / 8 + (bits == 4 ? 2 : 1) * kLanes * 2;
}

// A value of x, for a product with codes of a weight, is rounded to kRowBytes digits in base kDigitBase, the upper one
// first. A block's largest value becomes kLargestValue; with only an upper digit, that digit becomes kLargestDigit.
inline constexpr int kRowBytes = 2;
inline constexpr float kDigitBase = 254;
inline constexpr float kLargestDigit = 127;
inline constexpr float kLargestValue = kLargestDigit * kDigitBase;

// Whether rows, for a product with codes of `bits` bits, keep lower digits only in blocks that stand out.
constexpr bool rounds_coarsely(Dtype dtype, int bits) { return dtype == Dtype::kBfloat && bits == 4; }
// A block stands out if its largest value exceeds kStandsOut times the mean of the largest values of the row's blocks.
inline constexpr float kStandsOut = 2.0f;

// A block of 16 rows of x in two bytes. It fills cache lines, so what lies behind rows of x begins with one too: products
// read their scratch there in whole lines.
struct alignas(64) RowBlock {
  union {
    std::int8_t codes[kRowBytes][kLanes][kBlockColumns];
    std::int16_t words[kLanes][kBlockColumns];  // block_words.h: each four columns in the order 0, 2, 1, 3
  };
  float scales[kLanes];
  float sums[kLanes];                      // of a row's values as rounded
  std::int32_t starts[kRowBytes][kLanes];  // -128 times the sum of a row's codes
  std::uint8_t fine[kLanes];               // whether a row has lower digits; else they are 0

  // Whether one of R rows has lower digits.
  template <int R>
  bool any_fine(int row) const {
    constexpr std::uint8_t none[R] = {};
    return std::memcmp(fine + row, none, R) != 0;
  }
};

// Rows of x in two bytes: [groups of 16 rows, blocks].
struct BlockRows {
  RowBlock* data;
  int blocks;

  static std::size_t bytes(std::int64_t rows, int blocks) {
    return std::size_t((rows + kLanes - 1) / kLanes * blocks) * sizeof(RowBlock);
  }
  RowBlock* group_of(std::int64_t row) const { return data + row / kLanes * blocks; }
};

// Up to kWideTiles tiles of the weight are in scratch memory. A unit that multiplies matrices (block_matrix.h) takes
// kMatrixTiles of them, and forms the sums of kMatrixBlocks blocks at once.
inline constexpr int kWideTiles = 3, kMatrixTiles = 2, kMatrixBlocks = 2;

// Bytes of a tile of the weight with a byte for each code and its numbers in FP32, with room for kMatrixBlocks - 1 more
// blocks.
constexpr std::int64_t wide_tile_bytes(int blocks) {
  return (std::int64_t(blocks) + kMatrixBlocks - 1) * kLanes * (kBlockColumns + 2 * 4);
}

// Bytes of scratch of an item. The scratch lies behind the rows of x, so kMatrixBlocks - 1 blocks past their end are
// readable.
constexpr std::size_t block_scratch_bytes(int blocks) {
  return std::size_t(kWideTiles * wide_tile_bytes(blocks));
}

// Rows [first_row, last_row) of x times tiles [first_tile, last_tile) of 16 rows of a weight w of `outputs` rows.
struct BlockItem {
  BlockRows x;
  const std::byte* w;
  std::int64_t tile_bytes;
  int bits;
  int outputs;
  const std::byte* bias;  // [outputs]; null: none
  std::int64_t first_row;
  std::int64_t last_row;
  std::int64_t first_tile;
  std::int64_t last_tile;
  std::byte* out;
  std::int64_t out_stride;
};

inline constexpr int kChoiceBlock = 32;  // logits that share a largest one and a word of the mask
inline constexpr int kWeightBits = 42;   // the weight of the most probable id is 2 to this power

// Operations on rows of one dtype; rowwise.h, product.h, block_tiles.h and choose.h.
struct RowOperations {
  bool (*round)(const std::byte* row, int n, std::uint16_t* out);
  void (*rotate)(std::byte* row, int heads, int head_dim, const float* turn);
  void (*norm)(std::byte* x, const std::byte* more, const std::byte* weight, int n, float epsilon, std::byte* out);
  void (*gate)(const std::byte* gate, const std::byte* up, int n, std::byte* out);
  std::int64_t (*largest)(const std::byte* row, int n);
  bool (*spread)(const std::byte* row, int n, const std::uint32_t* allowed, double* values, double* tops);
  void (*weigh)(const double* values, std::int64_t count, double peak, double temperature, std::int64_t* weights);
  void (*product)(const ProductItem&, std::byte* scratch);
  void (*widen)(const std::byte* row, int n, bool rounded, float* out);
  void (*store)(const float* row, int n, std::byte* out);
  void (*turn)(const TurnItem&);
  void (*round_blocks)(const std::byte* row, int k, int bits, const BlockRows& out, std::int64_t at);
  void (*block_product)(const BlockItem&, std::byte* scratch);
  void (*unpack_row)(const BlockItem&, std::int64_t row, std::byte* out);
  // Up to `slots` rows of x in the order that `product` asks for. Null: `product` takes rows as they are.
  void (*pair_rows)(const std::byte* x, std::int64_t stride, int rows, int slots, int k, std::byte* out) = nullptr;
};

// Operations of one instruction set on pages of one kind; their format is of that kind. Null: not supported.
struct PageOperations {
  // k, v: one page of one KV head, FP16 [Π, D].
  void (*seal)(const PageFormat&, Place, const std::uint16_t* k, const std::uint16_t* v, const Planes& page,
               std::byte* scratch) = nullptr;
  // `place` is that of the page's first row; rows past the new ones become 0.
  void (*requantize)(const PageFormat&, Place place, const NewRows&, const Planes& page, std::byte* scratch) = nullptr;
  // Wire order to native and back; derived planes are read from the wire page where it has them, else computed.
  void (*install)(const PageFormat&, const ConstPlanes& wire, const Planes& page, std::byte* scratch) = nullptr;
  void (*export_page)(const PageFormat&, const Planes& page, const Planes& wire) = nullptr;
  Attend* attend = nullptr;
  // Bytes of scratch memory that any of these needs for `rows` query rows.
  std::size_t (*scratch_bytes)(const PageFormat&, int rows) = nullptr;
  std::int64_t alone_work = 0;  // pages times tiles of 4 rows that one thread computes while another wakes up
  // Page `id` of one KV head as FP16 rows k, v [Π, D], for the attention of a codec that is not fused.
  void (*read)(const PageFormat&, const Pool&, std::int64_t id, int head, std::uint16_t* k, std::uint16_t* v,
               std::byte* scratch) = nullptr;
};

// Bounds [D] of the keys of two pages that count as one; both are the same page if it counts alone.
struct KeyBounds {
  const std::uint16_t* least[2];
  const std::uint16_t* most[2];
};

// One instruction set. Rivals of the lab have one kind of page and no operations on rows.
struct Operations {
  std::string_view name;
  PageOperations pages[kKinds];  // by Kind
  void (*merge)(const PageFormat&, const MergeItem&);
  // Adds the votes of one query to votes [seen]; scores [whole vectors] are overwritten.
  void (*vote)(float* scores, std::int64_t seen, std::int64_t* votes);
  float (*score_bounds)(const float* q_most, const float* q_least, const KeyBounds&, int head_dim);
  RowOperations rows[3];  // by Dtype
};

const Operations& portable_operations();
const Operations& avx2_operations();
const Operations& avx512_operations();
// AVX-512 VNNI with BF16 products for pages of FP16 rows and queries in bfloat16.
const Operations& avx512_bf16_operations();
// avx512_bf16_operations with AMX for prompts and for products.
const Operations& amx_operations();

// Bytes of scratch memory that every kind needs: queries, their state, scores of a tile.
[[gnu::always_inline]] constexpr std::size_t query_scratch_bytes(const PageFormat& fmt, int rows) {
  const std::size_t padded = std::size_t(rows + 3) / 4 * 4, d = fmt.head_dim;
  const std::size_t queries = padded * 4 * d, state = padded * (4 * d + 8);
  const std::size_t tile = 4 * kLanes * std::size_t(fmt.page_tokens), keys = 4 * fmt.elements();
  return queries + state + tile + keys + 64 * 64;
}

}  // namespace hack
