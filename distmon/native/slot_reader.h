// Reads the tensor that another one holds in a slot, as a DTensor holds its `_local_tensor`.
#pragma once

#include <Python.h>

// Reads attributes that are slots of the object's class. Any other attribute could be a property,
// which runs Python code. Finds the slot once for objects of the same class in a row.
class SlotReader {
 public:
  SlotReader() = default;
  SlotReader(const SlotReader&) = delete;
  SlotReader& operator=(const SlotReader&) = delete;

  ~SlotReader() {
    Py_XDECREF(slot_);
  }

  // A new reference; nullptr when the class has no such slot, or when it is empty.
  PyObject* read(PyObject* owner, PyObject* name) {
    if (Py_TYPE(owner) != type_ || name != name_) {
      find(Py_TYPE(owner), name);
    }
    if (slot_ == nullptr) {
      return nullptr;
    }
    PyObject* const found =
        Py_TYPE(slot_)->tp_descr_get(slot_, owner, reinterpret_cast<PyObject*>(type_));
    if (found == nullptr) {
      PyErr_Clear();
    }
    return found;
  }

 private:
  void find(PyTypeObject* type, PyObject* name) {
    type_ = type;
    name_ = name;
    Py_CLEAR(slot_);
    PyObject* const found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
    if (found == nullptr) {
      PyErr_Clear();
    } else if (Py_IS_TYPE(found, &PyMemberDescr_Type)) {
      slot_ = found;
    } else {
      Py_DECREF(found);
    }
  }

  PyTypeObject* type_ = nullptr;
  PyObject* name_ = nullptr;
  PyObject* slot_ = nullptr;
};
