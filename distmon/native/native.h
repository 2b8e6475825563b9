// The functions of the module, by the file that holds them. None of them throws.
#pragma once

#include <Python.h>

// place_reader.cpp
PyObject* place_reader(PyObject* module, PyObject* arguments);

// sampled_rows.cpp
PyObject* take_snapshot(PyObject* module, PyObject* arguments);
PyObject* fill_sampled_rows(PyObject* module, PyObject* arguments);

// exact_rows.cpp
PyObject* fill_exact_columns(PyObject* module, PyObject* arguments);

// gradient_runs.cpp
PyObject* fill_gradient_runs(PyObject* module, PyObject* arguments);

// gradient_norm.cpp
PyObject* add_norm(PyObject* module, PyObject* arguments);
