// The norm of one gradient, added to the sums of the blocks that it lies between.

#include "gradient_norm.h"

#include <Python.h>

#include <cmath>
#include <cstdint>

#include "buffers.h"
#include "guard.h"
#include "native.h"
#include "running_totals.h"
#include "tensor_memory.h"

namespace {

// Each sum waits for its last addition, so several are kept side by side.
constexpr int chains = 4;
constexpr int64_t piece = chains * lanes;

template <typename Value, typename Element>
double sum_of_squares(Element element, int64_t count) {
  LaneSums sums[chains];
  Value x[piece];
  int64_t first = 0;
  for (; first + piece <= count; first += piece) {
    for (int i = 0; i < piece; ++i) {
      x[i] = static_cast<Value>(element(first + i));
    }
    for (int chain = 0; chain < chains; ++chain) {
      sums[chain].add_squares(x + chain * lanes);
    }
  }
  double total = 0;
  for (; first < count; ++first) {
    const double value = element(first);
    total += value * value;
  }
  for (const auto& sum : sums) {
    total += sum.total();
  }
  return total;
}

}  // namespace

double norm_of(const TensorMemory& memory) {
  double norm = 0;
  with_reader(memory.address, memory.code, [&](auto element) {
    norm = std::sqrt(
        memory.code == fp64 ? sum_of_squares<double>(element, memory.numel)
                            : sum_of_squares<float>(element, memory.numel));
  });
  return norm;
}

namespace {

bool all_present(PyObject* cells) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(cells); ++i) {
    if (PyList_GET_ITEM(cells, i) == Py_None) {
      return false;
    }
  }
  return true;
}

PyObject* add_to_cells(PyObject* arguments) {
  PyObject *gradient, *cells;
  if (!PyArg_ParseTuple(arguments, "OO!", &gradient, &PyList_Type, &cells)) {
    return nullptr;
  }
  TensorMemory memory;
  if (!all_present(cells) || !find_cpu_memory(gradient, memory) || is_fp8(memory.code)) {
    Py_RETURN_FALSE;
  }
  const double norm = norm_of(memory);
  Buffers buffers;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(cells); ++i) {
    auto* const cell = buffers.write<double>(PyList_GET_ITEM(cells, i), 2);
    if (buffers.failed()) {
      return nullptr;
    }
    cell[0] = std::hypot(cell[0], norm);
    cell[1] += 1;
  }
  Py_RETURN_TRUE;
}

}  // namespace

PyObject* add_norm(PyObject*, PyObject* arguments) {
  return guarded([&] { return add_to_cells(arguments); });
}

PyObject* sum_of_squares(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    TensorMemory memory;
    if (!find_cpu_memory(tensor, memory) || is_fp8(memory.code)) {
      Py_RETURN_NONE;
    }
    const double norm = norm_of(memory);
    return PyFloat_FromDouble(norm * norm);
  });
}
