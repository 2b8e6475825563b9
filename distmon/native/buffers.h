// Python's arrays as pointers, checked once and released at the end of a call.
#pragma once

#include <Python.h>

#include <vector>

class Buffers {
 public:
  Buffers() = default;
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;

  ~Buffers() {
    for (auto& view : views_) {
      PyBuffer_Release(&view);
    }
  }

  // An exception is set: one of the arrays is not what it should be.
  bool failed() const {
    return failed_;
  }

  template <typename Item>
  const Item* read(PyObject* array, Py_ssize_t items) {
    return static_cast<const Item*>(get(array, PyBUF_C_CONTIGUOUS, sizeof(Item), items));
  }

  template <typename Item>
  Item* write(PyObject* array, Py_ssize_t items) {
    return static_cast<Item*>(
        get(array, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE, sizeof(Item), items));
  }

 private:
  void* get(PyObject* array, int flags, size_t item_bytes, Py_ssize_t items) {
    Py_buffer view;
    if (failed_ || PyObject_GetBuffer(array, &view, flags) != 0) {
      failed_ = true;
      return nullptr;
    }
    views_.push_back(view);
    const auto bytes = static_cast<Py_ssize_t>(item_bytes);
    if (view.itemsize != bytes || view.len != bytes * items) {
      failed_ = true;
      PyErr_Format(
          PyExc_ValueError, "table %zd must have %zd items of %zd bytes, not %zd of %zd",
          static_cast<Py_ssize_t>(views_.size()), items, bytes,
          view.itemsize ? view.len / view.itemsize : 0, view.itemsize);
      return nullptr;
    }
    return view.buf;
  }

  std::vector<Py_buffer> views_;
  bool failed_ = false;
};
