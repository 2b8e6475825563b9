// The matrix that went farthest beyond its updates since the last observation; see
// collect/signals/weight_jumps.py, which defines it.

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "buffers.h"
#include "guard.h"
#include "native.h"
#include "row_layout.h"

namespace {

constexpr double tiny = 1e-60;

double finite_or(double value, double otherwise) {
  return std::isfinite(value) ? value : otherwise;
}

double sum_of_groups(const double* first) {
  double sum = 0;
  for (int group = 0; group < layout::groups; ++group) {
    sum += first[group];
  }
  return sum;
}

struct Jump {
  double relative = 0, expected = 0, row = -1;
};

// `before` and `ratios` are replaced by those of now.
template <typename Value>
Jump farthest(
    const Value* snapshot, Py_ssize_t matrices, const int64_t* begins, const int64_t* index,
    const int64_t* rows, const double* sums, double steps, double floor, double* before,
    double* ratios) {
  Jump found;
  double worst = -std::numeric_limits<double>::infinity();
  for (Py_ssize_t i = 0; i < matrices; ++i) {
    double apart = 0, size = 0;
    for (int64_t k = begins[i]; k < begins[i + 1]; ++k) {
      const double now = static_cast<double>(snapshot[index[k]]);
      const double change = now - before[k];
      apart += change * change;
      size += std::max(now * now, before[k] * before[k]);
      before[k] = now;
    }
    const double* const row = sums + rows[i] * layout::sum_columns;
    const double weight = std::max(sum_of_groups(row + layout::w_sq), tiny);
    const double ratio = std::sqrt(sum_of_groups(row + layout::u_sq) / weight);
    const double relative = finite_or(std::sqrt(apart / std::max(size, tiny)), 0.0);
    // `max` may lose a NaN.
    const double higher = std::isnan(ratios[i]) ? ratios[i] : std::max(ratio, ratios[i]);
    const double expected = finite_or(steps * higher, std::numeric_limits<double>::infinity());
    ratios[i] = ratio;
    const double beyond = relative / (expected + floor);
    if (beyond > worst) {
      worst = beyond;
      found = {relative, expected, static_cast<double>(rows[i])};
    }
  }
  return found;
}

PyObject* find(PyObject* arguments) {
  PyObject *snapshot, *begins, *index, *rows, *sums, *before, *ratios;
  Py_ssize_t slots, matrices, kept, parameters;
  int value_bytes;
  double steps, floor;
  if (!PyArg_ParseTuple(
          arguments, "nnnniddOOOOOOO", &slots, &matrices, &kept, &parameters, &value_bytes, &steps,
          &floor, &snapshot, &begins, &index, &rows, &sums, &before, &ratios)) {
    return nullptr;
  }
  Buffers buffers;
  const auto* const narrow = value_bytes == 8 ? nullptr : buffers.read<float>(snapshot, slots);
  const auto* const wide = value_bytes == 8 ? buffers.read<double>(snapshot, slots) : nullptr;
  const auto* const first = buffers.read<int64_t>(begins, matrices + 1);
  const auto* const at = buffers.read<int64_t>(index, kept);
  const auto* const row = buffers.read<int64_t>(rows, matrices);
  const auto* const sum = buffers.read<double>(sums, parameters * layout::sum_columns);
  auto* const old = buffers.write<double>(before, kept);
  auto* const ratio = buffers.write<double>(ratios, matrices);
  if (buffers.failed()) {
    return nullptr;
  }
  // A mistake here would read beyond the snapshot.
  const auto inside = [](const int64_t* each, Py_ssize_t count, int64_t end) {
    return std::all_of(each, each + count, [=](int64_t i) { return i >= 0 && i < end; });
  };
  if (!inside(at, kept, slots) || !inside(row, matrices, parameters) ||
      !inside(first, matrices + 1, kept + 1) || !std::is_sorted(first, first + matrices + 1)) {
    PyErr_SetString(PyExc_IndexError, "an index lies beyond the snapshot");
    return nullptr;
  }
  const Jump jump = wide != nullptr
      ? farthest(wide, matrices, first, at, row, sum, steps, floor, old, ratio)
      : farthest(narrow, matrices, first, at, row, sum, steps, floor, old, ratio);
  return Py_BuildValue("[ddd]", jump.relative, jump.expected, jump.row);
}

}  // namespace

PyObject* farthest_jump(PyObject*, PyObject* arguments) {
  return guarded([&] { return find(arguments); });
}
