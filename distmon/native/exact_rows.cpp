// Weight and gradient columns over every element, read from one end of memory to the other; see
// csrc_triton/exact_stats.py.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "buffers.h"
#include "native.h"
#include "row_layout.h"
#include "running_totals.h"

namespace {

// Sums are folded after every piece and every block, so that no chain of additions is long: 10**9
// elements lose fewer than 14 bits of fp64 at worst.
constexpr int piece = 256;
constexpr int64_t block = 1 << 17;

// Where the columns of a weight or a gradient are.
struct Columns {
  int count, sum, nan, inf, squares;
};
constexpr Columns weight_columns = {
    layout::w_count, layout::w_sum, layout::w_nan, layout::w_inf, layout::w_sq};
constexpr Columns grad_columns = {
    layout::g_count, layout::g_sum, layout::g_nan, layout::g_inf, layout::g_sq};

// Takes in `numel` elements; the histogram may be absent.
template <typename Value>
void add_all(
    int64_t address, int64_t code, int64_t numel, Totals<Value>& totals,
    Histogram<Value>* histogram) {
  Doubles sum = {}, squares = {};
  with_reader(address, code, [&](auto element) {
    for (int64_t begin = 0; begin < numel; begin += block) {
      const int64_t end = std::min(begin + block, numel);
      Doubles block_sum = {}, block_squares = {};
      for (int64_t first = begin; first < end; first += piece) {
        const int count = static_cast<int>(std::min<int64_t>(piece, end - first));
        const int full = (count + lanes - 1) / lanes * lanes;
        Value x[piece];
        for (int i = 0; i < count; ++i) {
          x[i] = static_cast<Value>(element(first + i));
        }
        std::fill(x + count, x + full, std::numeric_limits<Value>::quiet_NaN());
        totals.add(x, full);
        if (histogram != nullptr) {
          histogram->add(x, full);
        }
        block_sum += totals.sum;
        block_squares += totals.squares;
        totals.sum = totals.squares = Doubles{};
      }
      sum += block_sum;
      squares += block_squares;
    }
  });
  totals.sum = sum;
  totals.squares = squares;
}

template <typename Value>
void write_sums(
    Totals<Value>& totals, const Columns& columns, int64_t numel, double factor, double* sums) {
  const int64_t padded = -numel & (lanes - 1);
  sums[columns.count] = static_cast<double>(numel) * factor;
  sums[columns.sum] = times(factor, totals.total());
  sums[columns.nan] = static_cast<double>(totals.nan() - padded) * factor;
  sums[columns.inf] = static_cast<double>(totals.inf()) * factor;
  std::fill_n(sums + columns.squares, layout::groups, 0.0);
  sums[columns.squares] = times(factor, totals.take_squares());
}

template <typename Value>
void fill_weight(int64_t address, int64_t code, int64_t numel, double* sums, float* maxima) {
  Totals<Value> totals;
  add_all<Value>(address, code, numel, totals, nullptr);
  write_sums(totals, weight_columns, numel, 1.0, sums);
  maxima[layout::w_absmax] = totals.largest();
}

template <typename Value>
void fill_grad(
    int64_t address, int64_t code, int64_t numel, double applied, double* sums, float* maxima,
    double* bins) {
  Totals<Value> totals;
  Histogram<Value> histogram;
  add_all<Value>(address, code, numel, totals, bins == nullptr ? nullptr : &histogram);
  write_sums(totals, grad_columns, numel, applied, sums);
  sums[layout::g_zero] = static_cast<double>(totals.zero()) * applied;
  if (applied > 0) {
    maxima[layout::g_max] = totals.highest();
    maxima[layout::g_negmin] = totals.lowest_negated();
  }
  if (bins != nullptr) {
    histogram.write(applied, totals.nan() + totals.inf(), bins);
  }
}

}  // namespace

PyObject* fill_exact_columns(PyObject*, PyObject* arguments) {
  PyObject *addresses, *numels, *applied, *sums, *maxima, *bins;
  Py_ssize_t rows;
  if (!PyArg_ParseTuple(
          arguments, "nOOOOOO", &rows, &addresses, &numels, &applied, &sums, &maxima, &bins)) {
    return nullptr;
  }
  Buffers buffers;
  const auto* place = buffers.read<int64_t>(addresses, rows * layout::address_columns);
  const auto* numel = buffers.read<int64_t>(numels, rows);
  const auto* taken = buffers.read<double>(applied, rows);
  auto* sum = buffers.write<double>(sums, rows * layout::sum_columns);
  auto* maximum = buffers.write<float>(maxima, rows * layout::max_columns);
  auto* bin = bins == Py_None ? nullptr : buffers.write<double>(bins, rows * layout::bins);
  if (buffers.failed()) {
    return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t row = 0; row < rows; ++row) {
    const int64_t code = place[layout::weight_code], grad_code = place[layout::grad_code];
    const auto weight = code == fp64 ? fill_weight<double> : fill_weight<float>;
    weight(place[layout::weight], code, numel[row], sum, maximum);
    if (place[layout::grad] != 0) {
      const auto grad = grad_code == fp64 ? fill_grad<double> : fill_grad<float>;
      grad(place[layout::grad], grad_code, numel[row], taken[row], sum, maximum, bin);
    }
    place += layout::address_columns;
    sum += layout::sum_columns;
    maximum += layout::max_columns;
    bin = bin == nullptr ? nullptr : bin + layout::bins;
  }
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}
