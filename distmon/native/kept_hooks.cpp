// Hooks of modules and tensors that are removed and put back at every observation.

#include <Python.h>

#include "guard.h"
#include "native.h"

namespace {

// A hook as `KeptHook.entry` has it; all borrowed.
struct Entry {
  PyObject *table, *key, *hook, *first, *extra;

  bool read(PyObject* tuple) {
    return PyArg_ParseTuple(
               tuple, "OOOO!O!", &table, &key, &hook, &PyBool_Type, &first, &PyTuple_Type,
               &extra) != 0;
  }
};

// Sets or removes an item of the table that a weak reference or another callable returns, if the
// table still exists. False with an exception set.
template <typename Change>
bool change(PyObject* reference, const Change& with) {
  PyObject* const table = PyObject_CallNoArgs(reference);
  if (table == nullptr) {
    return false;
  }
  const bool done = table == Py_None || with(table);
  Py_DECREF(table);
  return done;
}

bool remove_item(PyObject* reference, PyObject* key) {
  return change(reference, [&](PyObject* table) {
    if (PyObject_DelItem(table, key) == 0) {
      return true;
    }
    if (PyErr_ExceptionMatches(PyExc_KeyError) == 0) {
      return false;
    }
    PyErr_Clear();  // it was removed before
    return true;
  });
}

bool put_back(const Entry& entry) {
  bool exists = false;
  const bool done = change(entry.table, [&](PyObject* table) {
    exists = true;
    if (PyObject_SetItem(table, entry.key, entry.hook) != 0) {
      return false;
    }
    if (entry.first != Py_True) {
      return true;
    }
    PyObject* const moved = PyObject_CallMethod(table, "move_to_end", "OO", entry.key, Py_False);
    Py_XDECREF(moved);
    return moved != nullptr;
  });
  if (!done || !exists) {
    return done;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entry.extra); ++i) {
    const bool marked = change(PyTuple_GET_ITEM(entry.extra, i), [&](PyObject* marks) {
      return PyObject_SetItem(marks, entry.key, Py_True) == 0;
    });
    if (!marked) {
      return false;
    }
  }
  return true;
}

bool remove(const Entry& entry) {
  if (!remove_item(entry.table, entry.key)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entry.extra); ++i) {
    if (!remove_item(PyTuple_GET_ITEM(entry.extra, i), entry.key)) {
      return false;
    }
  }
  return true;
}

PyObject* switch_all(PyObject* arguments) {
  PyObject* entries;
  int wanted;
  if (!PyArg_ParseTuple(arguments, "O!p", &PyTuple_Type, &entries, &wanted)) {
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entries); ++i) {
    Entry entry;
    if (!entry.read(PyTuple_GET_ITEM(entries, i)) || !(wanted ? put_back(entry) : remove(entry))) {
      return nullptr;
    }
  }
  Py_RETURN_NONE;
}

}  // namespace

PyObject* switch_hooks(PyObject*, PyObject* arguments) {
  return guarded([&] { return switch_all(arguments); });
}
