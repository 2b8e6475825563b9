// Where tensors lie, read without making a Python object for each of them.
//
// Only c10/core/TensorImpl.h of torch is included: its Python headers take fifteen times as long to
// compile. What is known of torch's Python objects beyond that, the place of the TensorImpl pointer
// in them, is found by `locate_tensors` and compared with what Python says before it is used.

#include <Python.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <structmember.h>

#include <algorithm>
#include <cstdint>
#include <exception>

#include "buffers.h"
#include "native.h"
#include "python_tensors.h"

namespace at {
class TensorBase;
}
// Of libtorch_python; a torch without them refuses to link or to load this file.
extern PyObject* THPVariableClass;
PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace {

// at::Tensor is one such pointer; its own header is the expensive one.
using TensorPointer = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Word of a Python tensor that points to its TensorImpl; 0 until it is found.
Py_ssize_t tensor_word = 0;
constexpr Py_ssize_t first_word = sizeof(PyObject) / sizeof(void*);

constexpr int columns = 3;  // address, dtype code, contiguous
constexpr int64_t no_tensor = -1;

// Most of the time goes to waiting for memory, because a step of training has emptied the caches.
// So each step on the way to a tensor is made for a block of rows before the next one, and what the
// next one reads is asked for in advance.
constexpr Py_ssize_t block_rows = 32;
constexpr size_t cache_line = 64;

void ask_for(const void* address, size_t bytes) {
  for (size_t offset = 0; offset < bytes; offset += cache_line) {
    __builtin_prefetch(static_cast<const char*>(address) + offset);
  }
}

void** words_of(PyObject* object) {
  return reinterpret_cast<void**>(object);
}

}  // namespace

const c10::TensorImpl* tensor_of(PyObject* object) {
  if (!PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass))) {
    return nullptr;
  }
  // Older torch keeps a flag before the pointer: set, it points to somebody else's tensor.
  if (tensor_word > first_word && *reinterpret_cast<bool*>(words_of(object) + first_word)) {
    return nullptr;
  }
  return static_cast<const c10::TensorImpl*>(words_of(object)[tensor_word]);
}

// Whoever frees a storage and keeps the tensor, as FSDP does, leaves an address that is no longer
// one; that of a view does not even look like null.
bool has_elements(const c10::TensorImpl& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) {
      return true;
    }
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  const auto& storage = tensor.unsafe_storage();
  const auto room = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return storage.data() != nullptr && last < room;
}

namespace {

// Reads an attribute that is a slot. Anything else could run Python code, which could free what
// other rows of the block point to.
class SlotReader {
 public:
  ~SlotReader() {
    Py_XDECREF(descriptor_);
  }

  // What is in the slot, borrowed; nullptr when there is no such slot or it is empty.
  PyObject* read(PyObject* owner, PyObject* name) {
    if (Py_TYPE(owner) != type_ || name != name_) {
      find(Py_TYPE(owner), name);
    }
    if (descriptor_ == nullptr) {
      return nullptr;
    }
    const PyMemberDef* slot = reinterpret_cast<PyMemberDescrObject*>(descriptor_)->d_member;
    return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(owner) + slot->offset);
  }

 private:
  void find(PyTypeObject* type, PyObject* name) {
    type_ = type;
    name_ = name;
    Py_CLEAR(descriptor_);
    PyObject* found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name);
    if (found == nullptr) {
      PyErr_Clear();
    } else if (
        Py_IS_TYPE(found, &PyMemberDescr_Type) &&
        reinterpret_cast<PyMemberDescrObject*>(found)->d_member->type == T_OBJECT_EX) {
      descriptor_ = found;
    } else {
      Py_DECREF(found);
    }
  }

  PyTypeObject* type_ = nullptr;
  PyObject* name_ = nullptr;
  PyObject* descriptor_ = nullptr;
};

// One row on its way from a parameter to the tensor that is asked for. Every step begins by reading
// what the step before it asked for.
struct Row {
  PyObject* object = nullptr;               // borrowed
  const c10::TensorImpl* tensor = nullptr;  // nullptr: only Python can tell
  bool missing = false;                     // there is no gradient

  void begin(PyObject* parameter) {
    object = parameter;
    ask_for(object, 2 * cache_line);
  }

  void to_tensor() {
    tensor = object == nullptr ? nullptr : tensor_of(object);
    ask_for(tensor, sizeof(c10::TensorImpl));
  }

  void ask_for_autograd() const {
    if (tensor != nullptr) {
      ask_for(tensor->autograd_meta(), 2 * cache_line);
    }
  }

  void to_grad() {
    if (tensor == nullptr) {
      return;
    }
    const auto& grad = reinterpret_cast<const TensorPointer&>(tensor->grad());
    missing = !grad.defined();
    object = nullptr;
    tensor = missing ? nullptr : grad.get();
    ask_for(tensor, sizeof(c10::TensorImpl));
  }

  // From an object, or a gradient whose object is not known yet, to what is in its slot.
  void into_slot(SlotReader& slots, PyObject* name) {
    PyObject* inner = nullptr;
    if (object != nullptr) {
      inner = slots.read(object, name);
    } else if (tensor != nullptr) {
      // A tensor with a slot was made by Python, so its object lives as long as it does; one that
      // is made only now has none.
      PyObject* owner = THPVariable_Wrap(reinterpret_cast<const at::TensorBase&>(tensor));
      if (owner == nullptr) {
        PyErr_Clear();
      } else {
        inner = slots.read(owner, name);
        Py_DECREF(owner);
      }
    }
    object = inner;
    tensor = nullptr;
    ask_for(object, 2 * cache_line);
  }

  void ask_for_memory() const {
    if (tensor != nullptr && tensor->has_storage()) {
      ask_for(tensor->unsafe_storage().unsafeGetStorageImpl(), 2 * cache_line);
    }
  }

  // False when only Python can tell, as for a sparse tensor, a wrapper around others, or one that
  // does not have the elements that readers will look for where they can read them.
  bool write(
      const signed char* codes, int64_t numel, const c10::Device& device, int64_t* out) const {
    if (missing) {
      out[0] = 0;
      out[1] = no_tensor;
      out[2] = 1;
      return true;
    }
    // Asked first, because an exception of torch collects a whole backtrace.
    if (tensor == nullptr || tensor->is_python_dispatch() || !tensor->has_storage()) {
      return false;
    }
    if (tensor->numel() != numel || tensor->device() != device || !has_elements(*tensor)) {
      return false;
    }
    out[0] = reinterpret_cast<int64_t>(tensor->data());
    out[1] = codes[static_cast<uint8_t>(c10::typeMetaToScalarType(tensor->dtype()))];
    out[2] = tensor->is_contiguous() ? 1 : 0;
    return true;
  }
};

// Fills the rows of one block; False only when Python raised.
bool read_block(
    PyObject** parameters, PyObject** names, Py_ssize_t first, Py_ssize_t count, bool of_grad,
    SlotReader& slots, const signed char* codes, const int64_t* numels, const c10::Device& device,
    int64_t* out, PyObject* unread) {
  Row block[block_rows];
  const auto each = [&](auto step) {
    for (Py_ssize_t i = 0; i < count; ++i) {
      step(block[i], names[i] != Py_None ? names[i] : nullptr);
    }
  };
  for (Py_ssize_t i = 0; i < count; ++i) {
    block[i].begin(parameters[i] == Py_None ? nullptr : parameters[i]);
  }
  if (of_grad) {
    each([](Row& row, PyObject*) { row.to_tensor(); });
    each([](Row& row, PyObject*) { row.ask_for_autograd(); });
    each([](Row& row, PyObject*) { row.to_grad(); });
  }
  each([&](Row& row, PyObject* name) {
    if (name != nullptr) {
      row.into_slot(slots, name);
    }
  });
  each([&](Row& row, PyObject* name) {
    if (name != nullptr || !of_grad) {
      row.to_tensor();
    }
  });
  each([](Row& row, PyObject*) { row.ask_for_memory(); });
  for (Py_ssize_t i = 0; i < count; ++i) {
    bool written = false;
    try {
      written = block[i].write(codes, numels[i], device, out + i * columns);
    } catch (const std::exception&) {
      // Of a kind that torch refuses to read; Python will say what is wrong with it.
    }
    if (!written) {
      PyObject* number = PyLong_FromSsize_t(first + i);
      const bool noted = number != nullptr && PyList_Append(unread, number) == 0;
      Py_XDECREF(number);
      if (!noted) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

PyObject* locate_tensors(PyObject*, PyObject* examples) {
  if (!PyList_Check(examples) || PyList_GET_SIZE(examples) == 0) {
    PyErr_SetString(PyExc_TypeError, "expected a list of (tensor, address of its TensorImpl)");
    return nullptr;
  }
  const auto size = reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_basicsize;
  const auto words = size / static_cast<Py_ssize_t>(sizeof(void*));
  tensor_word = 0;
  for (Py_ssize_t word = first_word; word < std::min(words, first_word + 2); ++word) {
    bool everywhere = true;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(examples); ++i) {
      PyObject* tensor;
      Py_ssize_t address;
      if (!PyArg_ParseTuple(PyList_GET_ITEM(examples, i), "On", &tensor, &address)) {
        return nullptr;
      }
      everywhere &= words_of(tensor)[word] == reinterpret_cast<void*>(address);
    }
    if (everywhere) {
      tensor_word = word;
      Py_RETURN_TRUE;
    }
  }
  Py_RETURN_FALSE;
}

PyObject* read_places(PyObject*, PyObject* arguments) {
  PyObject *parameters, *names;
  int of_grad;
  PyObject *neighbour, *code_table, *numel_table, *out_table;
  if (!PyArg_ParseTuple(
          arguments, "O!O!pOOOO", &PyList_Type, &parameters, &PyList_Type, &names, &of_grad,
          &neighbour, &code_table, &numel_table, &out_table)) {
    return nullptr;
  }
  const Py_ssize_t rows = PyList_GET_SIZE(parameters);
  Buffers buffers;
  const auto* codes = buffers.read<signed char>(code_table, 256);
  const auto* numels = buffers.read<int64_t>(numel_table, rows);
  auto* out = buffers.write<int64_t>(out_table, rows * columns);
  if (buffers.failed()) {
    return nullptr;
  }
  if (tensor_word == 0) {
    PyErr_SetString(PyExc_RuntimeError, "locate_tensors has not found where tensors are kept");
    return nullptr;
  }
  if (PyList_GET_SIZE(names) != rows) {
    PyErr_SetString(PyExc_ValueError, "there must be as many names as parameters");
    return nullptr;
  }
  const c10::TensorImpl* const example = tensor_of(neighbour);
  if (example == nullptr) {
    PyErr_SetString(PyExc_TypeError, "the neighbour must be a tensor");
    return nullptr;
  }
  PyObject* unread = PyList_New(0);
  SlotReader slots;
  for (Py_ssize_t first = 0; unread != nullptr && first < rows; first += block_rows) {
    if (!read_block(
            &PyList_GET_ITEM(parameters, first), &PyList_GET_ITEM(names, first), first,
            std::min(block_rows, rows - first), of_grad != 0, slots, codes, numels + first,
            example->device(), out + first * columns, unread)) {
      Py_CLEAR(unread);
    }
  }
  return unread;
}
