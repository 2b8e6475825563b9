// Gradient columns over the runs of gradients that are sampled; see csrc_triton/gradient_runs.py.

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "buffers.h"
#include "element_values.h"
#include "guard.h"
#include "native.h"
#include "row_layout.h"
#include "running_totals.h"

namespace {

constexpr int run = layout::run;
constexpr int ahead = 64;  // runs that are asked for early: each lies in another part of memory

// What one gradient adds up to. Runs are added lane by lane, in vectors of half a run, and lanes are
// folded at the end.
template <typename Value>
class RunTotals {
 public:
  // Takes in a run of `length` elements, with 0 behind them; `code` as in GradientRuns.
  __attribute__((always_inline)) void add(const Value* x, int length, int code) {
    if (length == run && all_finite(x)) {
      add_full(x, code);
    } else {
      add_singly(x, length, code);
    }
  }

  void write(double applied, double* sums, float* maxima) const {
    sums[layout::g_count] = static_cast<double>(count_) * applied;
    sums[layout::g_sum] = times(applied, total(sum_));
    sums[layout::g_nan] = static_cast<double>(nan_) * applied;
    sums[layout::g_inf] = static_cast<double>(inf_) * applied;
    sums[layout::g_zero] = static_cast<double>(zeros()) * applied;
    for (int group = 0; group < layout::groups; ++group) {
      const double by_lane = squares_[layout::groups][group / half][group % half];
      sums[layout::g_sq + group] = times(applied, total(squares_[group]) + by_lane);
    }
    maxima[layout::g_max] = applied > 0 ? highest(high_) : lowest;
    maxima[layout::g_negmin] = applied > 0 ? highest(low_) : lowest;
  }

 private:
  static constexpr int half = run / 2;
  static constexpr float lowest = -std::numeric_limits<float>::infinity();
  static constexpr Value none = -std::numeric_limits<Value>::infinity();
  static_assert(run == layout::groups);
  using Int = IntOf<Value>;
  using Numbers = typename VectorOf<Value, half>::type;
  using Ints = typename VectorOf<Int, half>::type;
  using Wide = typename VectorOf<double, half>::type;

  static const Numbers& half_of(const Value* x, int which) {
    return *reinterpret_cast<const Numbers*>(x + which * half);
  }

  static bool all_finite(const Value* x) {
    const Ints low = (Ints)half_of(x, 0) & Bits<Value>::exponent;
    const Ints high = (Ints)half_of(x, 1) & Bits<Value>::exponent;
    const Ints found = (low == Bits<Value>::exponent) | (high == Bits<Value>::exponent);
    Int any = 0;
    for (int i = 0; i < half; ++i) {
      any |= found[i];
    }
    return any == 0;
  }

  __attribute__((always_inline)) void add_full(const Value* x, int code) {
    // The last line has a group in each lane; a full run by lane begins with the first.
    Wide* const squares = squares_[std::min<int>(code, layout::by_lane)];
    for (int k = 0; k < 2; ++k) {
      const Numbers numbers = half_of(x, k);
      const Wide wide = __builtin_convertvector(numbers, Wide);
      sum_[k] += wide;
      squares[k] += wide * wide;
      zero_[k] -= numbers == 0;  // a comparison gives -1 where it holds
      high_[k] = numbers > high_[k] ? numbers : high_[k];
      low_[k] = -numbers > low_[k] ? -numbers : low_[k];
    }
    count_ += run;
  }

  // Runs that are cut, and those with a number that is not finite.
  void add_singly(const Value* x, int length, int code) {
    for (int i = 0; i < length; ++i) {
      count_ += 1;
      if (!std::isfinite(x[i])) {
        (std::isnan(x[i]) ? nan_ : inf_) += 1;
        continue;
      }
      const int k = i / half, lane = i % half;
      const double wide = static_cast<double>(x[i]);
      sum_[k][lane] += wide;
      zero_[k][lane] += x[i] == 0;
      high_[k][lane] = std::max<Value>(high_[k][lane], x[i]);
      low_[k][lane] = std::max<Value>(low_[k][lane], -x[i]);
      const bool by_lane = code >= layout::by_lane;
      const int group = by_lane ? code - layout::by_lane + i : i;
      squares_[by_lane ? layout::groups : code][group / half][group % half] += wide * wide;
    }
  }

  static double total(const Wide* halves) {
    double sum = 0;
    for (int i = 0; i < run; ++i) {
      sum += halves[i / half][i % half];
    }
    return sum;
  }

  int64_t zeros() const {
    int64_t count = 0;
    for (int i = 0; i < run; ++i) {
      count += zero_[i / half][i % half];
    }
    return count;
  }

  static float highest(const Numbers* halves) {
    Value found = halves[0][0];
    for (int i = 1; i < run; ++i) {
      found = std::max<Value>(found, halves[i / half][i % half]);
    }
    return static_cast<float>(found);
  }

  Wide sum_[2] = {};
  Wide squares_[layout::groups + 1][2] = {};
  Numbers high_[2] = {none - Numbers{}, none - Numbers{}};
  Numbers low_[2] = {none - Numbers{}, none - Numbers{}};
  Ints zero_[2] = {};  // a gradient has fewer than 2^31 runs here
  int64_t count_ = 0, nan_ = 0, inf_ = 0;
};

template <typename Value, typename Offset>
RunTotals<Value> totals_of(
    int64_t address, int64_t code, const Offset* offsets, const uint8_t* codes, int64_t count) {
  const int64_t size = bytes_of(code);
  const auto* memory = reinterpret_cast<const char*>(address);
  RunTotals<Value> totals;
  with_reader(address, code, [&](auto element) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + ahead < count) {
        __builtin_prefetch(memory + offsets[i + ahead] * size);
      }
      const int length = (codes[i] & (run - 1)) + 1;
      Value x[run] = {};
      if (length == run) {
        for (int k = 0; k < run; ++k) {
          x[k] = static_cast<Value>(element(offsets[i] + k));
        }
      } else {
        for (int k = 0; k < length; ++k) {
          x[k] = static_cast<Value>(element(offsets[i] + k));
        }
      }
      totals.add(x, length, codes[i] >> 3);
    }
  });
  return totals;
}

// Where the columns of one gradient go.
struct Row {
  double applied;
  double* sums;
  float* maxima;
};

template <typename Offset>
void fill_row(
    const int64_t* place, const Offset* offsets, const uint8_t* codes, int64_t count, Row row) {
  const int64_t address = place[layout::grad], code = place[layout::grad_code];
  const int64_t read = row.applied > 0 ? count : 0;
  if (code == fp64) {
    totals_of<double>(address, code, offsets, codes, read).write(row.applied, row.sums, row.maxima);
  } else {
    totals_of<float>(address, code, offsets, codes, read).write(row.applied, row.sums, row.maxima);
  }
}

PyObject* fill_from_arrays(PyObject* arguments) {
  PyObject *addresses, *first, *offsets, *codes, *applied, *sums, *maxima;
  int offset_bytes;
  Py_ssize_t rows, runs;
  if (!PyArg_ParseTuple(
          arguments, "nniOOOOOOO", &rows, &runs, &offset_bytes, &addresses, &first, &offsets,
          &codes, &applied, &sums, &maxima)) {
    return nullptr;
  }
  Buffers buffers;
  const auto* places = buffers.read<int64_t>(addresses, rows * layout::address_columns);
  const auto* begins = buffers.read<int64_t>(first, rows + 1);
  const auto* narrow = offset_bytes == 8 ? nullptr : buffers.read<int32_t>(offsets, runs);
  const auto* wide = offset_bytes == 8 ? buffers.read<int64_t>(offsets, runs) : nullptr;
  const auto* kinds = buffers.read<uint8_t>(codes, runs);
  const auto* taken = buffers.read<double>(applied, rows);
  auto* sum = buffers.write<double>(sums, rows * layout::sum_columns);
  auto* maximum = buffers.write<float>(maxima, rows * layout::max_columns);
  if (buffers.failed()) {
    return nullptr;
  }
  for (Py_ssize_t row = 0; row < rows; ++row) {
    const auto* at = places + row * layout::address_columns;
    const int64_t begin = begins[row], count = begins[row + 1] - begin;
    if (count == 0 || at[layout::grad] == 0) {
      continue;
    }
    const Row out = {
        taken[row], sum + row * layout::sum_columns, maximum + row * layout::max_columns};
    if (wide != nullptr) {
      fill_row(at, wide + begin, kinds + begin, count, out);
    } else {
      fill_row(at, narrow + begin, kinds + begin, count, out);
    }
  }
  Py_RETURN_NONE;
}

}  // namespace

PyObject* fill_gradient_runs(PyObject*, PyObject* arguments) {
  return guarded([&] { return fill_from_arrays(arguments); });
}
