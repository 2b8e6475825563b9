// All sampled columns of all parameters in one pass over the plan's tables; see
// csrc_triton/sampled_stats.py, whose tables and meaning these are.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "buffers.h"
#include "native.h"
#include "row_layout.h"
#include "running_totals.h"

namespace {

// Rows of the plan's tables, as the caller's arrays hold them.
struct Tables {
  const int64_t* addresses;
  const int64_t* starts;
  const int32_t* widths;
  const int32_t* group_counts;
  int offset_bytes;

  const int64_t* address_row(int64_t row) const {
    return addresses + row * layout::address_columns;
  }
};

struct Outputs {
  double* sums;
  float* maxima;
  double* bins;  // nullptr: no histogram
  int64_t* checksums;
};

// A group of samples is taken in by pieces of this many; the default sample has 128 in a group.
constexpr int piece = 128;
constexpr int run = layout::run;
static_assert(piece % run == 0 && run % lanes == 0);

// Whether a run lies in one piece; not so where a shard ends in it, or in a transposed tensor.
template <typename Offset>
bool is_whole(const Offset* offsets) {
  Offset elsewhere = 0;
  for (Offset i = 0; i < run; ++i) {
    elsewhere |= (offsets[i] - offsets[0]) ^ i;
  }
  return elsewhere == 0;
}

template <typename Offset, typename Element, typename Value>
void gather(const Offset* offsets, int count, Element element, Value* out) {
  int i = 0;
  for (; i + run <= count; i += run) {
    if (is_whole(offsets + i)) {
      const int64_t first = offsets[i];
      for (int k = 0; k < run; ++k) {
        out[i + k] = static_cast<Value>(element(first + k));
      }
    } else {
      for (int k = 0; k < run; ++k) {
        out[i + k] = static_cast<Value>(element(offsets[i + k]));
      }
    }
  }
  for (; i < count; ++i) {
    out[i] = static_cast<Value>(element(offsets[i]));
  }
}

// The sampled elements of one tensor.
class Samples {
 public:
  Samples(int64_t address, int64_t code, int64_t offsets, int offset_bytes, int64_t slots)
      : address_(address), code_(code), offsets_(offsets), wide_(offset_bytes == 8), slots_(slots) {}

  // `count` elements from `slot` on, then `padding` up to a multiple of lanes.
  template <typename Value>
  void read(int64_t slot, int count, Value padding, Value* out) const {
    ask_for_piece(slot + piece);
    with_reader(address_, code_, [&](auto element) {
      if (wide_) {
        gather(reinterpret_cast<const int64_t*>(offsets_) + slot, count, element, out);
      } else {
        gather(reinterpret_cast<const int32_t*>(offsets_) + slot, count, element, out);
      }
    });
    for (int i = count; i % lanes; ++i) {
      out[i] = padding;
    }
  }

  // Samples lie all over memory: most of the time is spent on waiting for them. Inlined, because
  // compilers drop a call that does nothing else.
  __attribute__((always_inline)) void ask_for_piece(int64_t slot) const {
    const int64_t end = std::min(slot + piece, slots_);
    for (; slot < end; slot += run) {
      const int64_t offset = wide_ ? reinterpret_cast<const int64_t*>(offsets_)[slot]
                                   : reinterpret_cast<const int32_t*>(offsets_)[slot];
      __builtin_prefetch(reinterpret_cast<const char*>(address_) + offset * bytes_of(code_));
    }
  }

 private:
  int64_t address_, code_, offsets_;
  bool wide_;
  int64_t slots_;
};

Samples weights_of(const Tables& tables, int64_t row) {
  const int64_t* place = tables.address_row(row);
  return Samples(
      place[layout::weight], place[layout::weight_code], place[layout::weight_offsets],
      tables.offset_bytes, layout::groups * tables.widths[row]);
}

Samples grads_of(const Tables& tables, int64_t row) {
  const int64_t* place = tables.address_row(row);
  return Samples(
      place[layout::grad], place[layout::grad_code], place[layout::grad_offsets],
      tables.offset_bytes, layout::groups * tables.widths[row]);
}

// Calls `visit(slot, count)` for every piece of used slots, and `next(group)` after each group.
template <typename Visit, typename Next>
void for_each_piece(int64_t width, const int32_t* counts, Visit visit, Next next) {
  for (int group = 0; group < layout::groups; ++group) {
    for (int first = 0; first < counts[group]; first += piece) {
      visit(group * width + first, std::min(piece, counts[group] - first));
    }
    next(group);
  }
}

template <typename Value>
void snapshot_row(const Tables& tables, int64_t row, Value* snapshot) {
  const int64_t width = tables.widths[row];
  Value* const kept = snapshot + tables.starts[row];
  const Samples weights = weights_of(tables, row);
  for_each_piece(
      width, tables.group_counts + row * layout::groups,
      [&](int64_t slot, int count) {
        Value w[piece];
        weights.read(slot, count, Value(0), w);
        std::copy_n(w, count, kept + slot);  // unused slots are never read
      },
      [](int) {});
}

// What one step changed: its sums, and what of it rounding may have swallowed.
template <typename Value>
struct Updates {
  using Int = IntOf<Value>;
  Totals<Value> totals;
  Vector<Int> lost = {};
  LaneSums bound;

  // `moved` may hold anything; `w` and `g` have 0 where they were not finite.
  void add(Value* moved, const Value* w, const Value* g, int count) {
    Vector<Int> now_lost = {};
    for (int i = 0; i < count; i += lanes) {
      const Vector<Int> bits = (Vector<Int>)block_at(moved + i);
      const Vector<Int> finite = (bits & ~Bits<Value>::sign) < Bits<Value>::exponent;
      block_at(moved + i) = (Vector<Value>)(bits & finite);
      now_lost -= gone(moved + i, w + i, g + i);
    }
    if (sum_of_lanes<Int>(now_lost) > 0) {  // hardly ever, in fp32
      lost += now_lost;
      add_bound(moved, w, g, count);
    }
    totals.add(moved, count);
  }

 private:
  // -1 where a weight did not move although it has a gradient.
  static Vector<Int> gone(const Value* moved, const Value* w, const Value* g) {
    return (block_at(g) != 0) & (block_at(w) != 0) & (block_at(moved) == 0);
  }

  void add_bound(const Value* moved, const Value* w, const Value* g, int count) {
    for (int i = 0; i < count; i += lanes) {
      // The exponent bits alone are the power of two at or below |w|.
      Value power[lanes];
      block_at(power) = (Vector<Value>)(
          (Vector<Int>)block_at(w + i) & Bits<Value>::exponent & gone(moved + i, w + i, g + i));
      bound.add_squares(power);
    }
  }
};

template <typename Value>
uint64_t checksum_of(const Value* x, const int64_t* multipliers, int count) {
  uint64_t sum = 0;
  for (int i = 0; i < count; ++i) {
    const auto bits = static_cast<int64_t>(bit_cast<IntOf<Value>>(x[i]));
    sum += static_cast<uint64_t>(bits) * static_cast<uint64_t>(multipliers[i]);
  }
  return sum;
}

template <typename Value>
void fill_row(
    const Tables& tables, int64_t row, const Value* snapshot, const int64_t* multipliers,
    double half_ulp, double taken, const Outputs& out) {
  const int64_t* place = tables.address_row(row);
  const int64_t width = tables.widths[row];
  const Value* const kept = snapshot + tables.starts[row];
  const double graded = place[layout::grad] != 0 ? taken : 0.0;
  const Samples weights = weights_of(tables, row), grads = grads_of(tables, row);

  double* const sums = out.sums + row * layout::sum_columns;
  std::fill_n(sums, layout::sum_columns, 0.0);
  constexpr Value nan = std::numeric_limits<Value>::quiet_NaN();
  Totals<Value> w_totals, g_totals;
  Updates<Value> updates;
  Histogram<Value, int32_t> histogram;  // nobody samples 2^31 elements
  int64_t used = 0, padded = 0;
  uint64_t checksum = 0;
  for_each_piece(
      width, tables.group_counts + row * layout::groups,
      [&](int64_t slot, int count) {
        Value w[piece], g[piece], moved[piece];
        const int full = (count + lanes - 1) / lanes * lanes;
        weights.read(slot, count, nan, w);
        checksum += checksum_of(w, multipliers + slot, count);
        for (int i = 0; i < count; ++i) {
          moved[i] = w[i] - kept[slot + i];
        }
        std::fill(moved + count, moved + full, Value(0));
        w_totals.add(w, full);
        if (graded > 0) {
          grads.read(slot, count, nan, g);
          g_totals.add(g, full);
          if (out.bins != nullptr) {
            histogram.add(g, full);
          }
        } else {
          std::fill_n(g, full, Value(0));
        }
        updates.add(moved, w, g, full);
        used += count;
        padded += full - count;
      },
      [&](int group) {
        sums[layout::w_sq + group] = w_totals.take_squares();
        sums[layout::g_sq + group] = times(graded, g_totals.take_squares());
        sums[layout::u_sq + group] = times(taken, updates.totals.take_squares());
      });

  sums[layout::w_count] = static_cast<double>(used);
  sums[layout::w_sum] = w_totals.total();
  sums[layout::w_nan] = static_cast<double>(w_totals.nan() - padded);
  sums[layout::w_inf] = static_cast<double>(w_totals.inf());
  sums[layout::u_count] = static_cast<double>(used) * taken;
  sums[layout::u_sum] = times(taken, updates.totals.total());
  constexpr float lowest = Totals<float>::lowest;
  float* const maxima = out.maxima + row * layout::max_columns;
  maxima[layout::w_absmax] = w_totals.largest();
  maxima[layout::g_max] = graded > 0 ? g_totals.highest() : lowest;
  maxima[layout::g_negmin] = graded > 0 ? g_totals.lowest_negated() : lowest;
  maxima[layout::u_absmax] = taken > 0 ? updates.totals.largest() : lowest;
  const int64_t nonfinite = g_totals.nan() + g_totals.inf();
  if (graded > 0) {
    const int64_t nonzero = used + padded - nonfinite - g_totals.zero();
    sums[layout::g_count] = static_cast<double>(used) * graded;
    sums[layout::g_sum] = g_totals.total() * graded;
    sums[layout::g_nan] = static_cast<double>(g_totals.nan() - padded) * graded;
    sums[layout::g_inf] = static_cast<double>(g_totals.inf()) * graded;
    sums[layout::g_zero] = static_cast<double>(g_totals.zero()) * graded;
    sums[layout::u_graded] = static_cast<double>(nonzero) * graded;
    sums[layout::u_lost] = static_cast<double>(sum_of_lanes<IntOf<Value>>(updates.lost)) * graded;
    sums[layout::u_lost_bound_sq] =
        updates.bound.total() * (half_ulp * half_ulp) * graded;
  }
  if (out.bins != nullptr) {
    histogram.write(graded, nonfinite, out.bins + row * layout::bins);
  }
  out.checksums[row] = static_cast<int64_t>(checksum);
}

}  // namespace

PyObject* take_snapshot(PyObject*, PyObject* arguments) {
  PyObject *addresses, *starts, *widths, *group_counts, *snapshot;
  int offset_bytes, value_bytes;
  Py_ssize_t rows, slots;
  if (!PyArg_ParseTuple(
          arguments, "nniiOOOOO", &rows, &slots, &offset_bytes, &value_bytes, &addresses, &starts,
          &widths, &group_counts, &snapshot)) {
    return nullptr;
  }
  Buffers buffers;
  const Tables tables = {
      buffers.read<int64_t>(addresses, rows * layout::address_columns),
      buffers.read<int64_t>(starts, rows), buffers.read<int32_t>(widths, rows),
      buffers.read<int32_t>(group_counts, rows * layout::groups), offset_bytes};
  const auto keep_in = [&](auto* kept) {
    for (Py_ssize_t row = 0; row < rows && !buffers.failed(); ++row) {
      if (row + 1 < rows) {
        weights_of(tables, row + 1).ask_for_piece(0);
      }
      snapshot_row(tables, row, kept);
    }
  };
  if (value_bytes == sizeof(double)) {
    keep_in(buffers.write<double>(snapshot, slots));
  } else {
    keep_in(buffers.write<float>(snapshot, slots));
  }
  return buffers.failed() ? nullptr : Py_NewRef(Py_None);
}

PyObject* fill_sampled_rows(PyObject*, PyObject* arguments) {
  PyObject *addresses, *starts, *widths, *group_counts, *snapshot;
  PyObject *half_ulp, *multipliers, *applied, *sums, *maxima, *bins, *checksums;
  int offset_bytes, value_bytes;
  Py_ssize_t rows, slots, widest;
  if (!PyArg_ParseTuple(
          arguments, "nniiOOOOOnOOOOOOO", &rows, &slots, &offset_bytes, &value_bytes, &addresses,
          &starts, &widths, &group_counts, &snapshot, &widest, &half_ulp, &multipliers, &applied,
          &sums, &maxima, &bins, &checksums)) {
    return nullptr;
  }
  Buffers buffers;
  const Tables tables = {
      buffers.read<int64_t>(addresses, rows * layout::address_columns),
      buffers.read<int64_t>(starts, rows), buffers.read<int32_t>(widths, rows),
      buffers.read<int32_t>(group_counts, rows * layout::groups), offset_bytes};
  const auto* halves = buffers.read<double>(half_ulp, rows);
  const auto* factors = buffers.read<int64_t>(multipliers, widest * layout::groups);
  const auto* taken = buffers.read<double>(applied, rows);
  const Outputs out = {
      buffers.write<double>(sums, rows * layout::sum_columns),
      buffers.write<float>(maxima, rows * layout::max_columns),
      bins == Py_None ? nullptr : buffers.write<double>(bins, rows * layout::bins),
      buffers.write<int64_t>(checksums, rows)};
  const auto compare_with = [&](const auto* kept) {
    for (Py_ssize_t row = 0; row < rows && !buffers.failed(); ++row) {
      if (row + 1 < rows) {
        weights_of(tables, row + 1).ask_for_piece(0);
        grads_of(tables, row + 1).ask_for_piece(0);
      }
      fill_row(tables, row, kept, factors, halves[row], taken[row], out);
    }
  };
  if (value_bytes == sizeof(double)) {
    compare_with(buffers.read<double>(snapshot, slots));
  } else {
    compare_with(buffers.read<float>(snapshot, slots));
  }
  return buffers.failed() ? nullptr : Py_NewRef(Py_None);
}
