// The functions of the module, by the file that holds them. None of them throws.
#pragma once

#include <Python.h>

// place_reader.cpp
PyObject* place_reader(PyObject* module, PyObject* arguments);

// row_reader.cpp
PyObject* row_reader(PyObject* module, PyObject* arguments);

// gradient_norm.cpp
PyObject* add_norm(PyObject* module, PyObject* arguments);
PyObject* sum_of_squares(PyObject* module, PyObject* tensor);
PyObject* digest(PyObject* module, PyObject* arguments);

// gain_hooks.cpp
PyObject* gain_hooks(PyObject* module, PyObject* arguments);

// kept_hooks.cpp
PyObject* switch_hooks(PyObject* module, PyObject* arguments);

// weight_jumps.cpp
PyObject* farthest_jump(PyObject* module, PyObject* arguments);

// idle_lane.cpp
PyObject* idle_lane(PyObject* module, PyObject* arguments);
