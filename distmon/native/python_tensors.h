// What is behind a Python tensor; see tensor_places.cpp for how it is found.
#pragma once

#include <Python.h>
#include <c10/core/TensorImpl.h>

// The TensorImpl of a Python tensor, or nullptr when it is not one or only lends it.
const c10::TensorImpl* tensor_of(PyObject* object);

// Whether all its elements lie within its memory.
bool has_elements(const c10::TensorImpl& tensor);
