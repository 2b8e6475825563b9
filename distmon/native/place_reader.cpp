// PlaceReader: where the weights or gradients of all parameters lie now, without a Python object for
// each gradient. The only file that includes torch's Python headers; see torch_tensors.h.
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
#include "lists.h"
#include "native.h"
#include "places.h"
#include "python_tensors.h"
#include "slot_reader.h"
#include "tensor_memory.h"
#include "tensor_row.h"
#include "torch_tensors.h"

namespace {

// A tensor that another thread may give other memory to (`tensor.data = ...`): the memory is kept
// as well.
struct KeptTensor {
  explicit KeptTensor(at::Tensor kept)
      : tensor(std::move(kept)),
        storage(tensor.defined() && tensor.has_storage() ? tensor.storage() : c10::Storage()) {}

  at::Tensor tensor;
  c10::Storage storage;
};

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

  // Appends the rows that it left to Python.
  void read(bool of_grad, std::vector<int64_t>& unread) {
    SlotReader slots;
    for (size_t first = 0; first < sources_.size(); first += block_rows) {
      read_block(first, std::min(block_rows, sources_.size() - first), of_grad, slots, unread);
    }
  }

  // Keeps what `read` finds in a row alive.
  void keep(int64_t row, bool of_grad, std::vector<KeptTensor>& kept) {
    const Source& source = sources_.at(row);
    if (source.parameter == nullptr) {
      return;
    }
    at::Tensor tensor = THPVariable_Unpack(source.parameter);
    if (source.attribute == nullptr) {
      kept.emplace_back(of_grad ? grad_of(tensor) : tensor);
      return;
    }
    SlotReader slots;
    PyObject* const outer = of_grad ? THPVariable_Wrap(grad_of(tensor)) : Py_NewRef(source.parameter);
    PyObject* const inner = outer == nullptr ? nullptr : slots.read(outer, source.attribute);
    if (inner != nullptr && is_tensor(inner)) {
      kept.emplace_back(THPVariable_Unpack(inner));
    }
    PyErr_Clear();
    Py_XDECREF(inner);
    Py_XDECREF(outer);
  }

  int64_t rows() const {
    return static_cast<int64_t>(sources_.size());
  }

  const int64_t* out() const {
    return out_;
  }

  PyObject* parameters() const {
    return parameters_;
  }

 private:
  void read_block(
      size_t first, size_t count, bool of_grad, SlotReader& slots, std::vector<int64_t>& unread) {
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
      if (!rows[i].write(device_, out_ + (first + i) * columns)) {
        unread.push_back(static_cast<int64_t>(first + i));
      }
    }
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

PyObject* read(PyObject* self, bool of_grad) {
  std::vector<int64_t> unread;
  reader_of(self).read(of_grad, unread);
  return list_of(unread);
}

PyObject* read_weights(PyObject* self, PyObject*) {
  return guarded([&] { return read(self, false); });
}

PyObject* read_grads(PyObject* self, PyObject*) {
  return guarded([&] { return read(self, true); });
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

bool is_place_reader(PyObject* object) {
  return Py_IS_TYPE(object, &reader_type);
}

int64_t places_count(PyObject* reader) {
  return reader_of(reader).rows();
}

const int64_t* read_places(PyObject* reader, bool of_grad, std::vector<int64_t>& unread) {
  reader_of(reader).read(of_grad, unread);
  return reader_of(reader).out();
}

std::shared_ptr<void> keep_tensors(
    PyObject* reader, const std::vector<int64_t>& weights, const std::vector<int64_t>& grads) {
  auto kept = std::make_shared<std::vector<KeptTensor>>();
  kept->reserve(weights.size() + grads.size());
  for (const int64_t row : weights) {
    reader_of(reader).keep(row, false, *kept);
  }
  for (const int64_t row : grads) {
    reader_of(reader).keep(row, true, *kept);
  }
  return kept;
}

bool find_cpu_memory(PyObject* object, TensorMemory& memory) noexcept {
  try {
    return is_tensor(object) &&
        find_memory(*THPVariable_Unpack(object).unsafeGetTensorImpl(), memory);
  } catch (...) {
    return false;
  }
}

const at::Tensor* tensor_of(PyObject* object) {
  return is_tensor(object) ? &THPVariable_Unpack(object) : nullptr;
}

PyObject* wrap_tensor(const at::Tensor& tensor) {
  return THPVariable_Wrap(tensor);
}
