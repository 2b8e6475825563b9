// Python's tensors as torch's. Only place_reader.cpp includes this file: python_variable.h takes longer
// to compile than everything else together.
#pragma once

#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include "tensor_checks.h"

inline bool is_tensor(PyObject* object) {
  // Not THPVariable_Check: that may call an `__instancecheck__` written in Python.
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(THPVariableClass)) != 0;
}
