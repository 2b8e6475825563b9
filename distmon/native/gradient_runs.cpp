// Gradient columns over the runs of gradients that are sampled.

#include "gradient_runs.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "element_values.h"
#include "row_layout.h"
#include "run_totals.h"
#include "running_totals.h"

namespace {

constexpr int64_t ahead = 32;  // runs that are asked for early: each is in another part of memory

bool is_read(const GradientRow& row, double applied) {
  return row.count > 0 && row.address != 0 && applied > 0;
}

// Asks for the first runs of a row; the row itself asks for the others.
void ask_for_first(const GradientRow& row) {
  const auto* const memory = reinterpret_cast<const char*>(row.address);
  for (int64_t i = 0; i < std::min(ahead, row.count); ++i) {
    const int64_t offset = row.wide != nullptr ? row.wide[i] : row.narrow[i];
    __builtin_prefetch(memory + offset * bytes_of(row.code));
  }
}

template <typename Value, typename Offset>
RunTotals<Value> totals_of(const GradientRow& row, const Offset* offsets, int64_t count) {
  using Numbers = typename RunTotals<Value>::Numbers;
  const int64_t size = bytes_of(row.code);
  const auto* const memory = reinterpret_cast<const char*>(row.address);
  const bool as_it_is = row.code == (std::is_same_v<Value, double> ? fp64 : fp32);
  RunTotals<Value> totals;
  with_reader(row.address, row.code, [&](auto element) {
    totals.add(count, row.codes, [&](int64_t i, int length, Numbers& x) {
      if (i + ahead < count) {
        __builtin_prefetch(memory + offsets[i + ahead] * size);
      }
      const int64_t first = offsets[i];
      if (length == run && as_it_is) {
        std::memcpy(&x, memory + first * size, sizeof(x));
        return;
      }
      Value numbers[run] = {};
      for (int k = 0; k < length; ++k) {
        numbers[k] = static_cast<Value>(element(first + k));
      }
      std::memcpy(&x, numbers, sizeof(x));
    });
  });
  return totals;
}

template <typename Value>
void fill_row(const GradientRow& row, double applied, double* sums, float* maxima) {
  const int64_t count = is_read(row, applied) ? row.count : 0;
  if (row.wide != nullptr) {
    totals_of<Value>(row, row.wide, count).write(applied, sums, maxima);
  } else {
    totals_of<Value>(row, row.narrow, count).write(applied, sums, maxima);
  }
}

}  // namespace

void fill_gradient_runs(
    const GradientRow* rows, int64_t count, const double* applied, double* sums, float* maxima) {
  for (int64_t i = 0; i < count; ++i) {
    const GradientRow& row = rows[i];
    if (i + 1 < count && is_read(rows[i + 1], applied[i + 1])) {
      ask_for_first(rows[i + 1]);
    }
    if (row.count == 0 || row.address == 0) {
      continue;
    }
    double* const row_sums = sums + i * layout::sum_columns;
    float* const row_maxima = maxima + i * layout::max_columns;
    if (row.code == fp64) {
      fill_row<double>(row, applied[i], row_sums, row_maxima);
    } else {
      fill_row<float>(row, applied[i], row_sums, row_maxima);
    }
  }
}
