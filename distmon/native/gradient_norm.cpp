// The norm of one gradient, added to the sums of the blocks that it lies between.

#include "gradient_norm.h"

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

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

namespace {

// A number for the first elements of a tensor, by their bytes; 0 when all of these are 0. Equal
// bytes have equal numbers, and others the same one by chance only.
uint64_t number_for(const TensorMemory& memory, int64_t elements) {
  const auto* const bytes = reinterpret_cast<const unsigned char*>(memory.address);
  const int64_t count = std::min(elements, memory.numel) * bytes_of(memory.code);
  uint64_t hash = 1469598103934665603u;  // FNV-1a, by words of 8 bytes
  bool any = false;
  for (int64_t at = 0; at < count; at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min<int64_t>(8, count - at));
    any = any || word != 0;
    hash = (hash ^ word) * 1099511628211u;
    hash ^= hash >> 29;
  }
  return any ? hash | 1u : 0;
}

}  // namespace

PyObject* digest(PyObject*, PyObject* arguments) {
  return guarded([&]() -> PyObject* {
    PyObject* tensor;
    Py_ssize_t elements;
    if (!PyArg_ParseTuple(arguments, "On", &tensor, &elements)) {
      return nullptr;
    }
    TensorMemory memory;
    if (!find_cpu_memory(tensor, memory) || is_fp8(memory.code)) {
      Py_RETURN_NONE;
    }
    const double norm = norm_of(memory);
    return Py_BuildValue(
        "dK", norm * norm, static_cast<unsigned long long>(number_for(memory, elements)));
  });
}
