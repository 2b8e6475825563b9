// Lists of row numbers for Python.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

// A new list; nullptr with an exception set when there is no memory.
inline PyObject* list_of(const std::vector<int64_t>& numbers) {
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(numbers.size()));
  for (size_t i = 0; list != nullptr && i < numbers.size(); ++i) {
    PyObject* const item = PyLong_FromLongLong(numbers[i]);
    if (item == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
  }
  return list;
}
