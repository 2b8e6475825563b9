// All sampled columns of all parameters in one pass; see csrc_triton/sampled_stats.py, which defines
// them.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "buffers.h"
#include "guard.h"
#include "native.h"
#include "row_layout.h"
#include "running_totals.h"
#include "samples.h"

namespace {

struct Outputs {
  double* sums;
  float* maxima;
  double* bins;  // nullptr: no histogram
  int64_t* checksums;
};

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

// Everything that is added up over the samples of one parameter.
template <typename Value>
struct SampleTotals {
  Totals<Value> weights, grads;
  Updates<Value> updates;
  Histogram<Value, int32_t> histogram;  // nobody samples 2^31 elements
  int64_t used = 0;    // samples
  int64_t padded = 0;  // NaNs that only fill up vectors
  uint64_t checksum = 0;

  int64_t nonfinite_grads() const {
    return grads.nan() + grads.inf();
  }
};

// How much of a row counts: 1 or 0 where its step was applied or not.
struct Factors {
  double updates;
  double grads;  // 0 without a gradient, too
  double half_ulp;
};

// Writes the columns other than those of single groups, which `sums` has already.
template <typename Value>
void write_sums(const SampleTotals<Value>& totals, const Factors& factors, double* sums) {
  const auto& w = totals.weights;
  const auto& g = totals.grads;
  const auto& updates = totals.updates;
  const auto used = static_cast<double>(totals.used);
  sums[layout::w_count] = used;
  sums[layout::w_sum] = w.total();
  sums[layout::w_nan] = static_cast<double>(w.nan() - totals.padded);
  sums[layout::w_inf] = static_cast<double>(w.inf());
  sums[layout::u_count] = used * factors.updates;
  sums[layout::u_sum] = times(factors.updates, updates.totals.total());
  const double counted = factors.grads;
  if (counted > 0) {
    const int64_t finite = totals.used + totals.padded - totals.nonfinite_grads();
    sums[layout::g_count] = used * counted;
    sums[layout::g_sum] = g.total() * counted;
    sums[layout::g_nan] = static_cast<double>(g.nan() - totals.padded) * counted;
    sums[layout::g_inf] = static_cast<double>(g.inf()) * counted;
    sums[layout::g_zero] = static_cast<double>(g.zero()) * counted;
    sums[layout::u_graded] = static_cast<double>(finite - g.zero()) * counted;
    sums[layout::u_lost] = static_cast<double>(sum_of_lanes<IntOf<Value>>(updates.lost)) * counted;
    sums[layout::u_lost_bound_sq] =
        updates.bound.total() * (factors.half_ulp * factors.half_ulp) * counted;
  }
}

template <typename Value>
void write_maxima(const SampleTotals<Value>& totals, const Factors& factors, float* maxima) {
  constexpr float lowest = Totals<float>::lowest;
  maxima[layout::w_absmax] = totals.weights.largest();
  maxima[layout::g_max] = factors.grads > 0 ? totals.grads.highest() : lowest;
  maxima[layout::g_negmin] = factors.grads > 0 ? totals.grads.lowest_negated() : lowest;
  maxima[layout::u_absmax] = factors.updates > 0 ? totals.updates.totals.largest() : lowest;
}

// Of the checksum: a line for each group. They do not depend on how wide a row is on this rank.
struct Multipliers {
  const int64_t* table;
  int64_t widest;

  const int64_t* at(int64_t slot, int64_t width) const {
    return table + slot / width * widest + slot % width;
  }
};

template <typename Value>
void fill_row(
    const Tables& tables, int64_t row, const Value* snapshot, const Multipliers& multipliers,
    double half_ulp, double taken, const Outputs& out) {
  const Factors factors = {
      taken, tables.address_row(row)[layout::grad] != 0 ? taken : 0.0, half_ulp};
  const Value* const kept = snapshot + tables.starts[row];
  const Samples weights = weights_of(tables, row), grads = grads_of(tables, row);
  double* const sums = out.sums + row * layout::sum_columns;
  std::fill_n(sums, layout::sum_columns, 0.0);
  constexpr Value nan = std::numeric_limits<Value>::quiet_NaN();
  SampleTotals<Value> totals;
  for_each_piece(
      tables.widths[row], tables.group_counts + row * layout::groups,
      [&](int64_t slot, int count) {
        Value w[piece], g[piece], moved[piece];
        const int full = (count + lanes - 1) / lanes * lanes;
        weights.read(slot, count, nan, w);
        totals.checksum += checksum_of(w, multipliers.at(slot, tables.widths[row]), count);
        for (int i = 0; i < count; ++i) {
          moved[i] = w[i] - kept[slot + i];
        }
        std::fill(moved + count, moved + full, Value(0));
        totals.weights.add(w, full);
        if (factors.grads > 0) {
          grads.read(slot, count, nan, g);
          totals.grads.add(g, full);
          if (out.bins != nullptr) {
            totals.histogram.add(g, full);
          }
        } else {
          std::fill_n(g, full, Value(0));
        }
        totals.updates.add(moved, w, g, full);
        totals.used += count;
        totals.padded += full - count;
      },
      [&](int group) {
        sums[layout::w_sq + group] = totals.weights.take_squares();
        sums[layout::g_sq + group] = times(factors.grads, totals.grads.take_squares());
        sums[layout::u_sq + group] = times(taken, totals.updates.totals.take_squares());
      });
  write_sums(totals, factors, sums);
  write_maxima(totals, factors, out.maxima + row * layout::max_columns);
  if (out.bins != nullptr) {
    totals.histogram.write(
        factors.grads, totals.nonfinite_grads(), out.bins + row * layout::bins);
  }
  out.checksums[row] = static_cast<int64_t>(totals.checksum);
}

PyObject* snapshot_arrays(PyObject* arguments) {
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
      buffers.read<int64_t>(starts, rows),
      buffers.read<int32_t>(widths, rows),
      buffers.read<int32_t>(group_counts, rows * layout::groups),
      offset_bytes};
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

PyObject* fill_arrays(PyObject* arguments) {
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
      buffers.read<int64_t>(starts, rows),
      buffers.read<int32_t>(widths, rows),
      buffers.read<int32_t>(group_counts, rows * layout::groups),
      offset_bytes};
  const auto* halves = buffers.read<double>(half_ulp, rows);
  const Multipliers factors = {
      buffers.read<int64_t>(multipliers, widest * layout::groups), widest};
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

}  // namespace

PyObject* take_snapshot(PyObject*, PyObject* arguments) {
  return guarded([&] { return snapshot_arrays(arguments); });
}

PyObject* fill_sampled_rows(PyObject*, PyObject* arguments) {
  return guarded([&] { return fill_arrays(arguments); });
}
