// The functions of the module, by the file that holds them.
#pragma once

#include <Python.h>

// tensor_places.cpp
PyObject* locate_tensors(PyObject* module, PyObject* examples);
PyObject* read_places(PyObject* module, PyObject* arguments);

// sampled_rows.cpp
PyObject* take_snapshot(PyObject* module, PyObject* arguments);
PyObject* fill_sampled_rows(PyObject* module, PyObject* arguments);

// exact_rows.cpp
PyObject* fill_exact_columns(PyObject* module, PyObject* arguments);

// gradient_norm.cpp
PyObject* add_norm(PyObject* module, PyObject* arguments);
