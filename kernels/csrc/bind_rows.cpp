// Operations on rows between the pages: norm, rotation, gate, append, products.
#include <nanobind/nanobind.h>

#include "arrays.h"
#include "bindings.h"
#include "rowwise_calls.h"

namespace hack {
namespace {
namespace bound {  // named like what they call

// A weight [outputs, k] as codes.
BlockWeight codes_of(nb::handle tensor, std::int64_t outputs, std::int64_t k) {
  const Array weight(tensor, "weight");
  const std::int64_t blocks = k / kBlockColumns, tiles = (outputs + kLanes - 1) / kLanes;
  const int bits = weight.shape(2) == std::size_t(block_bytes(4)) ? 4 : 8;
  expect_shape(weight, {std::size_t(tiles), std::size_t(blocks), std::size_t(block_bytes(bits))});
  if (weight.type() != Type::kByte) refuse("weight must be uint8");
  if (k % kBlockColumns) refuse("weight has the wrong shape for x");
  return {static_cast<const std::byte*>(weight.data()), bits, int(blocks), int(outputs)};
}

// Writes row b of k, v [B, heads, D], number starts[b] of its sequence, to its place in slot slots[b]. A row that is
// not finite in FP16 is not written; faulty[b] is set instead.
void append(const Kernels& kernels, nb::handle open_k, nb::handle open_v, nb::handle starts, nb::handle slots,
            nb::handle k, nb::handle v, int sink, int recent, nb::handle faulty) {
  const Array keys(open_k, "open_k"), values(open_v, "open_v");
  if (keys.ndim() != 4 || keys.size() == 0) refuse("open_k has four dimensions, none of them 0");
  expect_shape(values, keys.shape());
  const RowArray k_rows(k, "k"), v_rows(v, "v");
  const std::size_t batch = std::size_t(k_rows.strips().count), heads = keys.shape(1), d = keys.shape(3);
  k_rows.expect(k_rows, std::int64_t(heads * d));
  v_rows.expect(k_rows, std::int64_t(heads * d));
  const Window window = make_window(sink, recent);
  if (keys.shape(2) % std::size_t(window.pages()) != 0) refuse("open_k has other pages than the window");
  const OpenRows open{elements<std::uint16_t>(keys, Type::kHalf, keys.size()),
                      elements<std::uint16_t>(values, Type::kHalf, keys.size()),
                      integers(Array(starts, "starts"), batch),
                      integers(Array(slots, "slots"), batch),
                      std::int64_t(keys.shape(0)),
                      int(heads),
                      int(keys.shape(2)) / window.pages(),
                      int(d),
                      window};
  auto* flags = elements<bool>(Array(faulty, "faulty"), Type::kBool, batch);
  perform([=, &operations = kernels.rows_of(k_rows)] {
    hack::append(operations, open, k_rows.strips(), v_rows.strips(), flags);
  });
}

// Writes rows of k, v [T, H, D] in FP16. A row that is not finite becomes zeros and sets its sequence in faulty [B].
void narrow(const Kernels& kernels, nb::handle k, nb::handle v, nb::handle counts, nb::handle faulty, nb::handle out_k,
            nb::handle out_v) {
  const RowArray k_rows(k, "k"), v_rows(v, "v");
  v_rows.expect(k_rows, k_rows.elements());
  const Array sequences(counts, "counts"), to_k(out_k, "out_k"), to_v(out_v, "out_v");
  const std::size_t rows = std::size_t(k_rows.strips().count), size = rows * std::size_t(k_rows.elements());
  const std::int64_t* each = integers(sequences, sequences.size());
  std::size_t covered = 0;
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    if (each[b] < 0) refuse("counts has a negative number");
    covered += std::size_t(each[b]);
  }
  if (covered != rows) refuse("counts cover " + std::to_string(covered) + " rows; k has " + std::to_string(rows));
  auto* flags = elements<bool>(Array(faulty, "faulty"), Type::kBool, sequences.size());
  auto* narrow_k = elements<std::uint16_t>(to_k, Type::kHalf, size);
  auto* narrow_v = elements<std::uint16_t>(to_v, Type::kHalf, size);
  perform([=, &kernels, batch = std::int64_t(sequences.size())] {
    hack::narrow(kernels.rows_of(k_rows), kernels.threads(), k_rows.strips(), v_rows.strips(), int(k_rows.elements()),
                 each, batch, narrow_k, narrow_v, flags);
  });
}

// Rotates the first `heads` heads of rows of x [T, H, D] by turns [T, D], in place.
void rotate(const Kernels& kernels, nb::handle x, int heads, nb::handle turns) {
  const RowArray rows(x, "x");
  const std::size_t d = std::size_t(rows.inner()), count = std::size_t(rows.strips().count);
  const auto* angles = elements<const float>(Array(turns, "turns"), Type::kFloat, count * d);
  if (d % 2 || heads < 1 || heads > rows.elements() / rows.inner()) refuse("x lacks heads, or head_dim is odd");
  perform([=, &kernels] {
    hack::rotate(kernels.rows_of(rows), kernels.threads(), rows.strips(), heads, int(d), angles);
  });
}

// Adds `more` [T, n] to rows of x [T, n] in place, unless it is None. Writes the rows' norm with weight [n] to out [T,
// n].
void norm(const Kernels& kernels, nb::handle x, nb::handle more, nb::handle weight, float epsilon, nb::handle out) {
  const RowArray rows(x, "x"), to(out, "out");
  Strips added{};
  if (!more.is_none()) {
    const RowArray terms(more, "more");
    terms.expect(rows, rows.elements());
    added = terms.strips();
  }
  const Array weights(weight, "weight");
  to.expect(rows, rows.elements());
  if (float_dtype(weights.type(), "weight") != rows.dtype() || std::int64_t(weights.size()) != rows.elements())
    refuse("weight has the wrong shape or dtype for x");
  perform([=, &kernels, scale = static_cast<const std::byte*>(weights.data())] {
    hack::norm(kernels.rows_of(rows), kernels.threads(), rows.strips(), added, scale, int(rows.elements()), epsilon,
               to.strips());
  });
}

// silu(gate) * up: rows of x [T, 2 n], which are gate [n] and then up [n], to out [T, n].
void gate(const Kernels& kernels, nb::handle x, nb::handle out) {
  const RowArray rows(x, "x"), to(out, "out");
  if (rows.elements() % 2) refuse("x has an odd number of columns");
  const std::int64_t n = rows.elements() / 2;
  to.expect(rows, n);
  perform([=, &kernels] {
    hack::gate(kernels.rows_of(rows), kernels.threads(), rows.strips(), int(n),
               std::size_t(n) * bytes_of(rows.dtype()), to.strips());
  });
}

// Rows of x [T, k] times rows of weight [n, k], plus bias [n] unless it is None, to out [T, n].
void product(const Kernels& kernels, nb::handle x, nb::handle weight, nb::handle bias, nb::handle out) {
  const RowArray rows(x, "x"), to(out, "out");
  const Array weights(weight, "weight");
  const std::int64_t k = rows.elements(), n = to.elements();
  to.expect(rows, n);
  expect_shape(weights, {std::size_t(n), std::size_t(k)});
  if (float_dtype(weights.type(), "weight") != rows.dtype()) refuse("weight has the wrong dtype for x");
  const std::byte* added = nullptr;
  if (!bias.is_none()) added = elements<const std::byte>(Array(bias, "bias"), weights.type(), std::size_t(n));
  perform([=, &kernels, numbers = static_cast<const std::byte*>(weights.data())] {
    hack::product(kernels.rows_of(rows), kernels.threads(), rows.strips(), int(k), numbers, added, n, to.strips());
  });
}

// `product` with a weight as codes (block_weight.py): [tiles, blocks, bytes].
void block_product(const Kernels& kernels, nb::handle x, nb::handle weight, nb::handle bias, nb::handle out) {
  const RowArray rows(x, "x"), to(out, "out");
  const BlockWeight codes = codes_of(weight, to.elements(), rows.elements());
  to.expect(rows, codes.outputs);
  const std::byte* added = nullptr;
  if (!bias.is_none()) {
    const Array more(bias, "bias");
    if (float_dtype(more.type(), "bias") != rows.dtype()) refuse("bias has the wrong dtype for x");
    added = elements<const std::byte>(more, more.type(), std::size_t(codes.outputs));
  }
  if (rows.strips().count == 0) return;
  perform([=, &kernels] {
    hack::product(kernels.rows_of(rows), kernels.threads(), rows.strips(), codes, added, to.strips());
  });
}

// A matrix [outputs, k], given as numbers or, in a tensor of three dimensions, as codes. It multiplies rows.
class Matrix {
 public:
  Matrix(nb::handle weight, const RowArray& like, std::int64_t outputs, std::int64_t k) : outputs_(outputs), k_(k) {
    const Array numbers(weight, "weight");
    if (numbers.ndim() == 3) {
      codes_ = codes_of(weight, outputs, k);
      return;
    }
    expect_shape(numbers, {std::size_t(outputs), std::size_t(k)});
    if (float_dtype(numbers.type(), "weight") != like.dtype()) refuse("weight has the wrong dtype for x");
    numbers_ = static_cast<const std::byte*>(numbers.data());
  }

  void multiply(const RowOperations& operations, int threads, const Strips& x, const Strips& out) const {
    if (numbers_ == nullptr) return hack::product(operations, threads, x, codes_, nullptr, out);
    hack::product(operations, threads, x, int(k_), numbers_, nullptr, outputs_, out);
  }

 private:
  std::int64_t outputs_, k_;
  const std::byte* numbers_ = nullptr;
  BlockWeight codes_{};
};

// The part of a layer after its attention, which gave mixed [T, m]. In turn: matrix `out` [n, m], norm, matrix
// `gate_up` [2 f, n], gate and matrix `down` [n, f]. The results of `out` and `down` are added to x [T, n]; argument
// out [T, n] gets the norm of x for the next layer. room: [T, n + 3 f].
void finish_layer(const Kernels& kernels, nb::handle x, nb::handle mixed, nb::tuple matrices, nb::handle norm_weight,
                  nb::handle next_norm, float epsilon, nb::handle room, nb::handle out) {
  const RowArray rows(x, "x"), heads(mixed, "mixed"), space(room, "room"), to(out, "out");
  const std::int64_t n = rows.elements(), ffn = (space.elements() - n) / 3;
  to.expect(rows, n);
  heads.expect(rows, heads.elements());
  space.expect(rows, n + 3 * ffn);
  if (nb::len(matrices) != 3) refuse("matrices are out, gate_up and down");
  const Matrix after(matrices[0], rows, n, heads.elements()), wide(matrices[1], rows, 2 * ffn, n);
  const Matrix down(matrices[2], rows, n, ffn);
  const auto scale_of = [&](nb::handle tensor) {
    const Array norm(tensor, "norm");
    if (float_dtype(norm.type(), "norm") != rows.dtype() || std::int64_t(norm.size()) != n)
      refuse("norm has the wrong shape or dtype for x");
    return static_cast<const std::byte*>(norm.data());
  };
  const std::byte *scale = scale_of(norm_weight), *next_scale = scale_of(next_norm);
  if (rows.strips().count == 0) return;
  const std::int64_t bytes = bytes_of(rows.dtype());
  const auto from = [&](std::int64_t column) {
    return Strips{space.strips().data + column * bytes, space.strips().count, space.strips().stride};
  };
  const Strips more = from(0), both = from(n), gated = from(n + 2 * ffn);
  perform([=, &kernels] {
    const RowOperations& operations = kernels.rows_of(rows);
    const int threads = kernels.threads();
    const auto norm = [&](const std::byte* weight) {
      hack::norm(operations, threads, rows.strips(), more, weight, int(n), epsilon, to.strips());
    };
    after.multiply(operations, threads, heads.strips(), more);
    norm(scale);
    wide.multiply(operations, threads, to.strips(), both);
    hack::gate(operations, threads, both, int(ffn), std::size_t(ffn * bytes), gated);
    down.multiply(operations, threads, gated, more);
    norm(next_scale);
  });
}

void expect_within(const std::int64_t* ids, std::int64_t count, std::int64_t end) {
  for (std::int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= end) refuse("ids lie outside the rows");
}

// Rows `ids` of a weight of `count` rows, or all rows where `ids` is None, to out [rows, k].
void unpack(const Kernels& kernels, nb::handle weight, std::int64_t count, nb::handle ids, nb::handle out) {
  const RowArray to(out, "out");
  const BlockWeight codes = codes_of(weight, count, to.elements());
  const std::int64_t rows = to.strips().count;
  const std::int64_t* chosen = nullptr;
  if (!ids.is_none()) chosen = integers(Array(ids, "ids"), std::size_t(rows));
  else if (rows != count) refuse("out has the wrong shape for weight");
  if (rows == 0) return;
  perform([=, &kernels] {
    if (chosen != nullptr) expect_within(chosen, rows, count);
    hack::unpack(kernels.rows_of(to), kernels.threads(), codes, chosen, to.strips());
  });
}

// Rows `ids` of a table [N, n] to out [rows, n].
void take(const Kernels& kernels, nb::handle table, nb::handle ids, nb::handle out) {
  const RowArray from(table, "table"), to(out, "out");
  if (from.dtype() != to.dtype() || from.elements() != to.elements()) refuse("out has the wrong shape or dtype");
  const std::int64_t* chosen = integers(Array(ids, "ids"), std::size_t(to.strips().count));
  perform([=, &kernels] {
    expect_within(chosen, to.strips().count, from.strips().count);
    hack::take(kernels.threads(), from.strips(), chosen, from.elements() * bytes_of(from.dtype()), to.strips());
  });
}

HeadRows head_rows(const Kernels& kernels, const RowArray& rows) {
  return {rows.strips(), &kernels.rows_of(rows), bytes_of(rows.dtype())};
}

// Heads of rows x [T, H, D] times matrices [G, D, D], plus shift [G, D] unless it is None, to out [T, H, D]. Row k of a
// matrix has the factors of channel k. Without matrices x only changes its dtype. With `rounded`, x is rounded to FP16
// first.
HeadTurn head_turn(const Kernels& kernels, nb::handle x, nb::handle matrices, nb::handle shift, bool rounded,
                   nb::handle out) {
  const RowArray rows(x, "x"), to(out, "out");
  if (to.strips().count != rows.strips().count || to.elements() != rows.elements()) refuse("out has the wrong shape");
  const std::size_t d = std::size_t(rows.inner()), heads = std::size_t(rows.elements()) / d;
  const bool wide = rows.dtype() == Dtype::kFloat && !rounded, plain = to.dtype() == Dtype::kFloat;
  HeadTurn part{head_rows(kernels, rows), head_rows(kernels, to), wide, rounded, int(heads), int(d)};
  if (matrices.is_none()) {
    if (!shift.is_none()) refuse("a shift is added to what matrices turn");
    return part;
  }
  const Array turns(matrices, "matrices");
  const std::size_t groups = turns.shape(0);
  expect_shape(turns, {groups, d, d});
  if (groups == 0 || heads % groups) refuse("matrices do not divide the heads of x");
  part.groups = int(groups);
  part.matrices = elements<const float>(turns, Type::kFloat, groups * d * d);
  if (!shift.is_none()) {
    if (!plain) refuse("out must be float32 where a shift is added");
    part.shift = elements<const float>(Array(shift, "shift"), Type::kFloat, groups * d);
  }
  return part;
}

// Several head turns, each a tuple (x, matrices, shift, rounded, out).
void turn_heads(const Kernels& kernels, nb::tuple parts) {
  std::vector<HeadTurn> turns;
  for (const nb::handle each : parts) {
    const auto part = nb::cast<nb::tuple>(each);
    if (nb::len(part) != 5) refuse("a part has x, matrices, shift, rounded and out");
    turns.push_back(head_turn(kernels, part[0], part[1], part[2], nb::cast<bool>(part[3]), part[4]));
  }
  perform([&kernels, turns = std::move(turns)] { hack::turn_heads(kernels.threads(), turns); });
}

}  // namespace bound
}  // namespace

void bind_rows(nb::class_<Kernels>& kernels) {
  using namespace nb::literals;
  kernels.def("append", bound::append)
      .def("narrow", bound::narrow)
      .def("rotate", bound::rotate)
      .def("norm", bound::norm, "x"_a, "more"_a.none(), "weight"_a, "epsilon"_a, "out"_a)
      .def("gate", bound::gate)
      .def("product", bound::product, "x"_a, "weight"_a, "bias"_a.none(), "out"_a)
      .def("block_product", bound::block_product, "x"_a, "weight"_a, "bias"_a.none(), "out"_a)
      .def("finish_layer", bound::finish_layer)
      .def("take", bound::take)
      .def("unpack", bound::unpack, "weight"_a, "count"_a, "ids"_a.none(), "out"_a)
      .def("turn_heads", bound::turn_heads);
}

}  // namespace hack
