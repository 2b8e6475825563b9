// The norm of one gradient, added to what blocks keep of theirs.

#include <Python.h>

#include <cmath>
#include <cstdint>

#include "buffers.h"
#include "element_values.h"
#include "native.h"
#include "python_tensors.h"
#include "running_totals.h"

namespace {

// Each sum waits for its last addition, so several go on side by side.
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

// A dtype code, or -1 when Python has to look at this tensor.
int64_t code_of(const c10::TensorImpl& tensor) {
  if (tensor.is_python_dispatch() || !tensor.has_storage() || !tensor.device().is_cpu() ||
      !tensor.is_contiguous() || !has_elements(tensor)) {
    return -1;
  }
  switch (c10::typeMetaToScalarType(tensor.dtype())) {
    case c10::ScalarType::Float:
      return fp32;
    case c10::ScalarType::Double:
      return fp64;
    case c10::ScalarType::BFloat16:
      return bf16;
    case c10::ScalarType::Half:
      return fp16;
    default:
      return -1;
  }
}

}  // namespace

PyObject* add_norm(PyObject*, PyObject* arguments) {
  PyObject *gradient, *cells;
  if (!PyArg_ParseTuple(arguments, "OO!", &gradient, &PyList_Type, &cells)) {
    return nullptr;
  }
  const c10::TensorImpl* const tensor = tensor_of(gradient);
  const int64_t code = tensor == nullptr ? -1 : code_of(*tensor);
  bool reachable = code >= 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(cells); ++i) {
    reachable &= PyList_GET_ITEM(cells, i) != Py_None;
  }
  if (!reachable) {
    Py_RETURN_FALSE;
  }
  double norm = 0;
  const int64_t count = tensor->numel();
  with_reader(reinterpret_cast<int64_t>(tensor->data()), code, [&](auto element) {
    norm = std::sqrt(
        code == fp64 ? sum_of_squares<double>(element, count)
                     : sum_of_squares<float>(element, count));
  });
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
