// Python's tensors as torch's, without the headers that this takes; see torch_tensors.h.
#pragma once

#include <Python.h>

namespace at {
class Tensor;
}

// The tensor behind a Python object, borrowed from it; nullptr when it is no tensor.
const at::Tensor* tensor_of(PyObject* object);

// A new reference, or nullptr with an exception set. May throw.
PyObject* wrap_tensor(const at::Tensor& tensor);
