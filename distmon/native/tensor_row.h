// One row of a PlaceReader, on its way from a parameter to the memory of its weight or gradient. Each
// step prefetches what the next one reads.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

#include "slot_reader.h"
#include "torch_tensors.h"

// Only place_reader.cpp includes this file. Internal linkage lets the compiler inline what is called
// once.
namespace {

constexpr int columns = 3;  // address, dtype code, contiguous
constexpr int64_t no_tensor = -1;

constexpr size_t cache_line = 64;

void prefetch(const void* address, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += cache_line) {
    __builtin_prefetch(static_cast<const char*>(address) + offset);
  }
}

// What a row is about; both borrowed from the reader.
struct Source {
  PyObject* parameter;  // nullptr: only Python can read this row
  PyObject* attribute;  // of the parameter or its gradient; nullptr: the tensor itself
  int64_t numel;
};

// One row on its way from a parameter to its weight or gradient.
class Row {
 public:
  Row() = default;
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  ~Row() {
    Py_XDECREF(inner_);
  }

  void begin(const Source& source) {
    source_ = &source;
    prefetch(source.parameter, 2 * cache_line);
  }

  bool has_attribute() const {
    return source_->parameter != nullptr && source_->attribute != nullptr;
  }

  void find_parameter() {
    tensor_ = source_->parameter == nullptr ? nullptr : impl_of(source_->parameter);
    prefetch(tensor_, sizeof(c10::TensorImpl));
  }

  void prefetch_autograd() const {
    if (tensor_ != nullptr) {
      prefetch(tensor_->autograd_meta(), 2 * cache_line);
    }
  }

  void find_grad() {
    if (tensor_ != nullptr) {
      const at::Tensor& grad = tensor_->grad();
      missing_ = !grad.defined();
      tensor_ = missing_ ? nullptr : grad.unsafeGetTensorImpl();
      prefetch(tensor_, sizeof(c10::TensorImpl));
    }
  }

  // Gets what the attribute holds. Begins at the parameter again: wrapping a gradient allocates,
  // which may start Python's garbage collection, so no pointer found before is valid after it.
  void open_attribute(SlotReader& slots, bool of_grad) {
    tensor_ = nullptr;
    if (!of_grad) {
      inner_ = slots.read(source_->parameter, source_->attribute);
    } else if (!missing_) {
      PyObject* const grad = THPVariable_Wrap(grad_of(THPVariable_Unpack(source_->parameter)));
      if (grad == nullptr) {
        PyErr_Clear();
        return;
      }
      inner_ = slots.read(grad, source_->attribute);
      Py_DECREF(grad);
    }
    prefetch(inner_, 2 * cache_line);
  }

  void find_inner() {
    tensor_ = inner_ == nullptr || !is_tensor(inner_) ? nullptr : impl_of(inner_);
    prefetch(tensor_, sizeof(c10::TensorImpl));
  }

  void prefetch_storage() const {
    if (tensor_ != nullptr && tensor_->has_storage()) {
      prefetch(tensor_->unsafe_storage().unsafeGetStorageImpl(), 2 * cache_line);
    }
  }

  // False when the row is left to Python: another kind of tensor, or one that has not the elements
  // that the parameter had at first, on the device that it was on.
  bool write(const c10::Device& device, int64_t* out) const noexcept {
    if (missing_) {
      out[0] = 0;
      out[1] = no_tensor;
      out[2] = 1;
      return true;
    }
    try {
      int64_t code;
      if (tensor_ == nullptr || !is_strided_memory(*tensor_) ||
          tensor_->numel() != source_->numel || tensor_->device() != device ||
          !has_elements(*tensor_) ||
          !find_code(c10::typeMetaToScalarType(tensor_->dtype()), code)) {
        return false;
      }
      const int64_t address = address_of(*tensor_);
      out[2] = tensor_->is_contiguous() ? 1 : 0;
      out[1] = code;
      out[0] = address;
      return true;
    } catch (...) {
      return false;  // Python says what is wrong with it
    }
  }

 private:
  static const c10::TensorImpl* impl_of(PyObject* tensor) {
    return THPVariable_Unpack(tensor).unsafeGetTensorImpl();
  }

  const Source* source_ = nullptr;
  PyObject* inner_ = nullptr;                // owned
  const c10::TensorImpl* tensor_ = nullptr;  // borrowed, while no Python code runs
  bool missing_ = false;                     // there is no gradient
};

}  // namespace
