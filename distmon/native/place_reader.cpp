// PlaceReader: where the weights or gradients of all parameters lie now, without a Python object for
// each gradient. The only file that includes torch's headers; see torch_tensors.h.
//
// A reader holds Python tensors and unpacks them in every read. It must not hold their at::Tensors:
// `torch.utils.swap_tensors` replaces the C++ tensor behind a Python one, and refuses to do so while
// anybody else refers to it.

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "buffers.h"
#include "guard.h"
#include "native.h"
#include "slot_reader.h"
#include "tensor_memory.h"
#include "tensor_row.h"
#include "torch_tensors.h"

namespace {

// Most of the time goes to waiting for memory, because a training step has emptied the caches. So
// each step on the way to a tensor is made for a block of rows before the next step, and prefetches
// what the next one reads.
constexpr size_t block_rows = 32;

class PlaceReader {
 public:
  // Takes over the references to both tuples.
  PlaceReader(PyObject* parameters, PyObject* attributes, const c10::Device& device)
      : parameters_(parameters), attributes_(attributes), device_(device) {}
  PlaceReader(const PlaceReader&) = delete;
  PlaceReader& operator=(const PlaceReader&) = delete;

  ~PlaceReader() {
    Py_DECREF(parameters_);
    Py_DECREF(attributes_);
  }

  // False, with an exception set, when the arrays do not fit.
  bool set_arrays(PyObject* numels, PyObject* out) {
    const Py_ssize_t rows = PyTuple_GET_SIZE(parameters_);
    if (PyTuple_GET_SIZE(attributes_) != rows) {
      PyErr_SetString(PyExc_ValueError, "there must be as many attributes as parameters");
      return false;
    }
    Buffers sizes;
    const auto* const numel = sizes.read<int64_t>(numels, rows);
    out_ = sizes.failed() ? nullptr : buffers_.write<int64_t>(out, rows * columns);
    if (sizes.failed() || buffers_.failed()) {
      return false;
    }
    for (Py_ssize_t i = 0; i < rows; ++i) {
      PyObject* const parameter = PyTuple_GET_ITEM(parameters_, i);
      PyObject* const attribute = PyTuple_GET_ITEM(attributes_, i);
      sources_.push_back(
          {is_tensor(parameter) ? parameter : nullptr, attribute == Py_None ? nullptr : attribute,
           numel[i]});
      has_attributes_ |= attribute != Py_None;
    }
    return true;
  }

  // A list of the rows that it left to Python.
  PyObject* read(bool of_grad) {
    PyObject* unread = PyList_New(0);
    SlotReader slots;
    for (size_t first = 0; unread != nullptr && first < sources_.size(); first += block_rows) {
      const size_t count = std::min(block_rows, sources_.size() - first);
      if (!read_block(first, count, of_grad, slots, unread)) {
        Py_CLEAR(unread);
      }
    }
    return unread;
  }

  PyObject* parameters() const {
    return parameters_;
  }

 private:
  // False only when Python raised.
  bool read_block(size_t first, size_t count, bool of_grad, SlotReader& slots, PyObject* unread) {
    Row rows[block_rows];
    const auto each = [&](const auto& step) {
      for (size_t i = 0; i < count; ++i) {
        step(rows[i]);
      }
    };
    for (size_t i = 0; i < count; ++i) {
      rows[i].begin(sources_[first + i]);
    }
    if (has_attributes_) {
      open_attributes(each, of_grad, slots);
    }
    // No Python code runs from here on.
    each([](Row& row) { row.has_attribute() ? row.find_inner() : row.find_parameter(); });
    if (of_grad) {
      each([](Row& row) { row.has_attribute() ? void() : row.prefetch_autograd(); });
      each([](Row& row) { row.has_attribute() ? void() : row.find_grad(); });
    }
    each([](Row& row) { row.prefetch_storage(); });
    for (size_t i = 0; i < count; ++i) {
      if (!rows[i].write(device_, out_ + (first + i) * columns) && !append(unread, first + i)) {
        return false;
      }
    }
    return true;
  }

  template <typename Each>
  static void open_attributes(const Each& each, bool of_grad, SlotReader& slots) {
    const auto each_with = [&each](const auto& step) {
      each([&step](Row& row) {
        if (row.has_attribute()) {
          step(row);
        }
      });
    };
    if (of_grad) {
      each_with([](Row& row) { row.find_parameter(); });
      each_with([](Row& row) { row.prefetch_autograd(); });
      each_with([](Row& row) { row.find_grad(); });
    }
    each_with([&](Row& row) { row.open_attribute(slots, of_grad); });
  }

  static bool append(PyObject* list, size_t number) {
    PyObject* const item = PyLong_FromSize_t(number);
    const bool appended = item != nullptr && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return appended;
  }

  PyObject* parameters_;  // tuple of tensors; what is not a tensor is left to Python
  PyObject* attributes_;  // tuple of str or None
  c10::Device device_;
  std::vector<Source> sources_;
  bool has_attributes_ = false;
  Buffers buffers_;  // keeps `out_` valid
  int64_t* out_ = nullptr;
};

// The Python object around a reader.
struct ReaderObject {
  PyObject_HEAD
  PlaceReader* reader;
};

PlaceReader& reader_of(PyObject* self) {
  return *reinterpret_cast<ReaderObject*>(self)->reader;
}

PyObject* read_weights(PyObject* self, PyObject*) {
  return guarded([&] { return reader_of(self).read(false); });
}

PyObject* read_grads(PyObject* self, PyObject*) {
  return guarded([&] { return reader_of(self).read(true); });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reader_of(self).parameters());
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<ReaderObject*>(self)->reader;
  PyObject_GC_Del(self);
}

PyMethodDef methods[] = {
    {"read_weights", read_weights, METH_NOARGS, "read_weights() -> rows that were not read"},
    {"read_grads", read_grads, METH_NOARGS, "read_grads() -> rows that were not read"},
    {nullptr, nullptr, 0, nullptr},
};

// Like a tuple it keeps what it was made with, so it has no tp_clear.
PyTypeObject reader_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  // the macro ends with a comma
    .tp_name = "distmon_native.PlaceReader",
    .tp_basicsize = sizeof(ReaderObject),
    .tp_dealloc = deallocate,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Reads where weights or gradients lie; made by place_reader.",
    .tp_traverse = traverse,
    .tp_methods = methods,
};

PyObject* new_reader(PyObject* arguments) {
  PyObject *parameters, *attributes, *device, *numels, *out;
  if (PyType_Ready(&reader_type) < 0 ||
      !PyArg_ParseTuple(
          arguments, "OOO!OO", &parameters, &attributes, &THPDeviceType, &device, &numels, &out)) {
    return nullptr;
  }
  PyObject* const held = PySequence_Tuple(parameters);
  PyObject* const names = held == nullptr ? nullptr : PySequence_Tuple(attributes);
  if (names == nullptr) {
    Py_XDECREF(held);
    return nullptr;
  }
  auto reader = std::make_unique<PlaceReader>(
      held, names, reinterpret_cast<THPDevice*>(device)->device);
  if (!reader->set_arrays(numels, out)) {
    return nullptr;
  }
  auto* const self = PyObject_GC_New(ReaderObject, &reader_type);
  if (self != nullptr) {
    self->reader = reader.release();
    PyObject_GC_Track(self);
  }
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

PyObject* place_reader(PyObject*, PyObject* arguments) {
  return guarded([&] { return new_reader(arguments); });
}

bool find_cpu_memory(PyObject* object, TensorMemory& memory) noexcept {
  try {
    if (!is_tensor(object)) {
      return false;
    }
    const c10::TensorImpl& tensor = *THPVariable_Unpack(object).unsafeGetTensorImpl();
    if (!is_strided_memory(tensor) || !tensor.device().is_cpu() || !tensor.is_contiguous() ||
        !has_elements(tensor) ||
        !find_code(c10::typeMetaToScalarType(tensor.dtype()), memory.code)) {
      return false;
    }
    memory.address = address_of(tensor);
    memory.numel = tensor.numel();
    return true;
  } catch (...) {
    return false;
  }
}
