// GainHooks: hooks on tensors that add the norm of their gradient to the blocks that they enter or
// leave. They run in the backward pass without the interpreter, which no hook of Python does.

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "buffers.h"
#include "element_values.h"
#include "gradient_norm.h"
#include "guard.h"
#include "native.h"
#include "python_tensors.h"
#include "tensor_checks.h"

namespace {

using End = std::pair<int64_t, int64_t>;  // a block, and which side of it

double seconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// The ends of blocks that a tensor is at; shared by its hook and the table of hooked tensors, and
// changed with the mutex of the state only.
using Ends = std::vector<End>;

// A tensor that has a hook. The weak pointer keeps its memory from being used for another tensor.
struct Hooked {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  uint32_t version;  // after a change in place it has another gradient
  std::shared_ptr<Ends> ends;
};

// What hooks share with the object that has made them, and may outlive it.
struct State {
  std::mutex mutex;  // nothing that is done with it takes the interpreter lock
  std::atomic<bool> armed{false};
  std::vector<std::array<double, 4>> cells;  // by block: norm and count on either side
  std::unordered_map<const c10::TensorImpl*, Hooked> hooked;
  std::vector<std::shared_ptr<Ends>> earlier;  // of tensors that were changed in place since
  PyObject* fallback = nullptr;  // callable(gradient, ends); set with the interpreter lock only
  double seconds = 0;            // that the hooks took

  void add(const Ends& ends, double norm, double begin) {
    const std::lock_guard<std::mutex> guard(mutex);
    seconds += seconds_now() - begin;
    for (const auto& [block, side] : ends) {
      auto& cell = cells[block];
      cell[2 * side] = std::hypot(cell[2 * side], norm);
      cell[2 * side + 1] += 1;
    }
  }

  Ends copy(const Ends& ends) {
    const std::lock_guard<std::mutex> guard(mutex);
    return ends;
  }
};

int raise_again(void* exception) {
  auto* const object = static_cast<PyObject*>(exception);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(object)), object);
  Py_DECREF(object);
  return -1;
}

// Clears the error that is set. One that is not an Exception came from a signal handler of the
// user, such as that of Ctrl-C: it is raised again where the main thread runs Python next.
void forget_error() {
  if (PyErr_Occurred() == nullptr || PyErr_ExceptionMatches(PyExc_Exception) != 0) {
    PyErr_Clear();
    return;
  }
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  if (value != nullptr && Py_AddPendingCall(raise_again, value) != 0) {
    Py_DECREF(value);
    PyErr_SetInterrupt();
  }
}

// Lets Python add a gradient that is not plain memory. What goes wrong there is its own business.
void leave_to_python(const State& state, const Ends& ends, const at::Tensor& gradient) {
  struct Lock {
    PyGILState_STATE state = PyGILState_Ensure();
    ~Lock() { PyGILState_Release(state); }
  } const lock;
  if (state.fallback != nullptr) {
    PyObject* const callable = Py_NewRef(state.fallback);
    PyObject* const tensor = wrap_tensor(gradient);
    PyObject* const list = PyList_New(0);
    for (const auto& [block, side] : ends) {
      PyObject* const end = list == nullptr ? nullptr : Py_BuildValue("(LL)", block, side);
      if (end != nullptr) {
        PyList_Append(list, end);
        Py_DECREF(end);
      }
    }
    if (tensor != nullptr && list != nullptr) {
      Py_XDECREF(PyObject_CallFunctionObjArgs(callable, tensor, list, nullptr));
    }
    forget_error();
    Py_XDECREF(list);
    Py_XDECREF(tensor);
    Py_DECREF(callable);
  }
}

void add_gradient(State& state, const Ends& ends, const at::Tensor& gradient) {
  try {
    if (!state.armed || !gradient.defined()) {
      return;
    }
    const double begin = seconds_now();
    TensorMemory memory;
    if (find_memory(*gradient.unsafeGetTensorImpl(), memory) && !is_fp8(memory.code)) {
      state.add(ends, norm_of(memory), begin);
    } else if (const Ends copied = state.copy(ends); !copied.empty()) {
      leave_to_python(state, copied, gradient);
    }
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    throw;  // Python ends a daemon thread this way at exit; swallowing it aborts the process
#endif
  } catch (...) {
    // A hook never ends the backward pass of the user.
  }
}

// Runs before the function that made the tensor gets its gradient. Not `Tensor::register_hook`: that
// removes the hooks that Python has put on a leaf, and cannot be compiled.
class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(std::shared_ptr<State> state, std::shared_ptr<Ends> ends, size_t output)
      : state_(std::move(state)), ends_(std::move(ends)), output_(output) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (output_ < grads.size()) {
      add_gradient(*state_, *ends_, grads[output_]);
    }
    return grads;
  }

  // A compiled backward pass runs without it: nothing is measured there.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

 private:
  const std::shared_ptr<State> state_;
  const std::shared_ptr<Ends> ends_;
  const size_t output_;
};

// Whether the gradient of this tensor can be hooked here. A leaf has no function that made it.
bool is_plain(const at::Tensor& tensor) {
  return is_strided_memory(*tensor.unsafeGetTensorImpl()) && tensor.device().is_cpu() &&
      tensor.requires_grad() && !tensor.is_inference() && tensor.grad_fn() != nullptr;
}

struct GainHooks {
  PyObject_HEAD
  std::shared_ptr<State>* state;
};

State& state_of(PyObject* self) {
  return **reinterpret_cast<GainHooks*>(self)->state;
}

PyObject* hook_tensor(PyObject* self, PyObject* arguments) {
  PyObject* object;
  long long block, side;
  if (!PyArg_ParseTuple(arguments, "OLL", &object, &block, &side)) {
    return nullptr;
  }
  const std::shared_ptr<State> state = *reinterpret_cast<GainHooks*>(self)->state;
  if (block < 0 || block >= static_cast<long long>(state->cells.size()) || side < 0 || side > 1) {
    PyErr_SetString(PyExc_IndexError, "there is no such block");
    return nullptr;
  }
  const at::Tensor* const tensor = tensor_of(object);
  if (tensor == nullptr || !is_plain(*tensor)) {
    Py_RETURN_FALSE;
  }
  const auto version = static_cast<uint32_t>(tensor->_version());
  const c10::TensorImpl* const key = tensor->unsafeGetTensorImpl();
  const auto known = state->hooked.find(key);
  const End end = {block, side};
  const std::lock_guard<std::mutex> guard(state->mutex);
  if (known != state->hooked.end() && !known->second.tensor.expired()) {
    Ends& ends = *known->second.ends;
    if (known->second.version == version) {
      // A checkpointed block is called again in the backward pass, with the same input.
      if (std::find(ends.begin(), ends.end(), end) == ends.end()) {
        ends.push_back(end);
      }
      Py_RETURN_TRUE;
    }
    state->earlier.push_back(known->second.ends);
  }
  auto ends = std::make_shared<Ends>(1, end);
  tensor->grad_fn()->add_tensor_pre_hook(
      std::make_unique<GradientHook>(state, ends, tensor->output_nr()));
  state->hooked.insert_or_assign(
      key,
      Hooked{
          c10::weak_intrusive_ptr<c10::TensorImpl>(tensor->getIntrusivePtr()), version,
          std::move(ends)});
  Py_RETURN_TRUE;
}

PyObject* set_armed(PyObject* self, PyObject* armed) {
  const int wanted = PyObject_IsTrue(armed);
  if (wanted < 0) {
    return nullptr;
  }
  state_of(self).armed = wanted != 0;
  Py_RETURN_NONE;
}

PyObject* clear_cells(PyObject* self, PyObject*) {
  State& state = state_of(self);
  const std::lock_guard<std::mutex> guard(state.mutex);
  for (auto each = state.hooked.begin(); each != state.hooked.end();) {
    // A tensor that lives on keeps its hook; it is measured if a block is called with it again.
    each->second.ends->clear();
    each = each->second.tensor.expired() ? state.hooked.erase(each) : std::next(each);
  }
  for (const auto& ends : state.earlier) {
    ends->clear();
  }
  state.earlier.clear();
  std::fill(state.cells.begin(), state.cells.end(), std::array<double, 4>{});
  Py_RETURN_NONE;
}

PyObject* read_cells(PyObject* self, PyObject* out) {
  State& state = state_of(self);
  Buffers buffers;
  auto* const cells = buffers.write<double>(out, static_cast<Py_ssize_t>(4 * state.cells.size()));
  if (buffers.failed()) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(state.mutex);
  for (size_t block = 0; block < state.cells.size(); ++block) {
    std::copy_n(state.cells[block].data(), 4, cells + 4 * block);
  }
  Py_RETURN_NONE;
}

PyObject* take_seconds(PyObject* self, PyObject*) {
  State& state = state_of(self);
  const std::lock_guard<std::mutex> guard(state.mutex);
  return PyFloat_FromDouble(std::exchange(state.seconds, 0.0));
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(state_of(self).fallback);
  return 0;
}

int clear(PyObject* self) {
  Py_CLEAR(state_of(self).fallback);
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  state_of(self).armed = false;
  delete reinterpret_cast<GainHooks*>(self)->state;
  PyObject_GC_Del(self);
}

PyObject* guarded_hook_tensor(PyObject* self, PyObject* arguments) {
  return guarded([&] { return hook_tensor(self, arguments); });
}

PyObject* guarded_clear_cells(PyObject* self, PyObject* arguments) {
  return guarded([&] { return clear_cells(self, arguments); });
}

PyObject* guarded_read_cells(PyObject* self, PyObject* out) {
  return guarded([&] { return read_cells(self, out); });
}

PyMethodDef methods[] = {
    {"hook", guarded_hook_tensor, METH_VARARGS,
     "hook(tensor, block, side) -> bool: whether its gradient is measured now."},
    {"arm", set_armed, METH_O, "arm(armed): measure gradients, or ignore them."},
    {"take_seconds", take_seconds, METH_NOARGS, "Seconds in hooks since the last call."},
    {"clear", guarded_clear_cells, METH_NOARGS, "Set all norms and counts to 0."},
    {"read", guarded_read_cells, METH_O,
     "read(out): norm and count on both sides of every block, float64 [blocks, 2, 2]."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject hooks_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  // the macro ends with a comma
    .tp_name = "distmon_native.GainHooks",
    .tp_basicsize = sizeof(GainHooks),
    .tp_dealloc = deallocate,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Adds the norms of gradients to blocks; made by gain_hooks.",
    .tp_traverse = traverse,
    .tp_clear = clear,
    .tp_methods = methods,
};

PyObject* new_hooks(PyObject* arguments) {
  Py_ssize_t blocks;
  PyObject* fallback;
  if (PyType_Ready(&hooks_type) < 0 || !PyArg_ParseTuple(arguments, "nO", &blocks, &fallback)) {
    return nullptr;
  }
  if (blocks < 0) {
    PyErr_SetString(PyExc_ValueError, "the number of blocks is negative");
    return nullptr;
  }
  auto state = std::make_unique<std::shared_ptr<State>>(std::make_shared<State>());
  (*state)->cells.resize(blocks);
  auto* const self = PyObject_GC_New(GainHooks, &hooks_type);
  if (self != nullptr) {
    (*state)->fallback = Py_NewRef(fallback);
    self->state = state.release();
    PyObject_GC_Track(self);
  }
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

PyObject* gain_hooks(PyObject*, PyObject* arguments) {
  return guarded([&] { return new_hooks(arguments); });
}
