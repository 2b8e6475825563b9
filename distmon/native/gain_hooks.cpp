// GainHooks: hooks on tensors that add the norm of their gradient to the blocks that they enter or
// leave. They run in the backward pass without the interpreter, which no hook of Python does.

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <Python.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <functional>
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
#include "pooled.h"
#include "python_tensors.h"
#include "tensor_checks.h"

namespace {

using End = std::pair<int64_t, int64_t>;  // a block, and which side of it

double seconds_now() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// The ends of blocks that a tensor is at. Mostly it leaves one block and enters the next.
using Ends = c10::SmallVector<End, 2>;

// A tensor with a history: which output of which function. After a change in place it is another.
using Origin = std::pair<const torch::autograd::Node*, size_t>;

struct OriginHash {
  size_t operator()(const Origin& origin) const {
    return std::hash<const void*>()(origin.first) ^ origin.second;
  }
};

class GradientHook;

using HookTable = std::unordered_map<
    Origin, GradientHook*, OriginHash, std::equal_to<Origin>,
    PooledAllocator<std::pair<const Origin, GradientHook*>>>;

// What hooks share with the object that has made them, and may outlive it.
struct State {
  std::mutex mutex;  // nothing that is done with it takes the interpreter lock
  std::atomic<bool> armed{false};
  std::vector<std::array<double, 4>> cells;  // by block: norm and count on either side
  HookTable hooked;                          // the hooks that exist
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

// Runs before the function that made the tensor gets its gradient, and lives as long as that
// function. Not `Tensor::register_hook`: that removes the hooks that Python has put on a leaf, and
// cannot be compiled.
class GradientHook : public torch::autograd::FunctionPreHook {
 public:
  GradientHook(std::shared_ptr<State> state, const Origin& origin)
      : state_(std::move(state)), origin_(origin) {}

  ~GradientHook() override {
    const std::lock_guard<std::mutex> guard(state_->mutex);
    const auto known = state_->hooked.find(origin_);
    if (known != state_->hooked.end() && known->second == this) {
      state_->hooked.erase(known);
    }
  }

  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  static void* operator new(size_t) { return Pool<sizeof(GradientHook)>::get().take(); }
  static void operator delete(void* memory) noexcept {
    Pool<sizeof(GradientHook)>::get().give_back(memory);
  }

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (origin_.second < grads.size()) {
      add_gradient(*state_, ends, grads[origin_.second]);
    }
    return grads;
  }

  // A compiled backward pass runs without it: nothing is measured there.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {}

  Ends ends;  // with the mutex of the state only

 private:
  const std::shared_ptr<State> state_;
  const Origin origin_;
};

// Whether the gradient of this tensor can be hooked here. A leaf has no function that made it.
bool is_plain(const at::Tensor& tensor) {
  return is_strided_memory(*tensor.unsafeGetTensorImpl()) && tensor.device().is_cpu() &&
      tensor.requires_grad() && tensor.is_floating_point() && !tensor.is_inference() &&
      at::GradMode::is_enabled() && tensor.grad_fn() != nullptr;
}

struct GainHooks {
  PyObject_HEAD
  std::shared_ptr<State>* state;
};

State& state_of(PyObject* self) {
  return **reinterpret_cast<GainHooks*>(self)->state;
}

// The tensor in an argument or a result of a block, where it is the usual one.
const at::Tensor* find_stream(PyObject* value) {
  if (PyTuple_CheckExact(value) && PyTuple_GET_SIZE(value) > 0) {
    value = PyTuple_GET_ITEM(value, 0);
  }
  return tensor_of(value);
}

void hook_origin(const std::shared_ptr<State>& state, const at::Tensor& tensor, const End& end) {
  torch::autograd::Node* const function = tensor.grad_fn().get();
  const Origin origin = {function, tensor.output_nr()};
  {
    const std::lock_guard<std::mutex> guard(state->mutex);
    const auto known = state->hooked.find(origin);
    if (known != state->hooked.end()) {
      Ends& ends = known->second->ends;
      // A checkpointed block is called again in the backward pass, with the same input.
      if (std::find(ends.begin(), ends.end(), end) == ends.end()) {
        ends.push_back(end);
      }
      return;
    }
  }
  auto hook = std::make_unique<GradientHook>(state, origin);
  GradientHook* const made = hook.get();
  made->ends.push_back(end);
  // Without the lock: when this throws, the hook is destroyed, which takes it.
  function->add_tensor_pre_hook(std::move(hook));
  const std::lock_guard<std::mutex> guard(state->mutex);
  state->hooked.emplace(origin, made);
}

PyObject* hook_value(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "hook takes three arguments");
    return nullptr;
  }
  const auto block = PyLong_AsLongLong(arguments[1]), side = PyLong_AsLongLong(arguments[2]);
  if (PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  const std::shared_ptr<State> state = *reinterpret_cast<GainHooks*>(self)->state;
  if (block < 0 || block >= static_cast<long long>(state->cells.size()) || side < 0 || side > 1) {
    PyErr_SetString(PyExc_IndexError, "there is no such block");
    return nullptr;
  }
  const at::Tensor* const tensor = find_stream(arguments[0]);
  if (tensor == nullptr || !is_plain(*tensor)) {
    Py_RETURN_FALSE;
  }
  hook_origin(state, *tensor, {block, side});
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
  for (const auto& [origin, hook] : state.hooked) {
    // A tensor that lives on keeps its hook; it is measured if a block is called with it again.
    hook->ends.clear();
  }
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

// Writes squared norm and count on both sides of every block, and 1, to a row of five each.
PyObject* put_rows(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  constexpr int64_t columns = 5;
  State& state = state_of(self);
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "put takes two arguments");
    return nullptr;
  }
  TensorMemory memory;
  if (!find_cpu_memory(arguments[0], memory) || memory.code != fp64) {
    Py_RETURN_FALSE;
  }
  Buffers buffers;
  const auto* const rows =
      buffers.read<int64_t>(arguments[1], static_cast<Py_ssize_t>(state.cells.size()));
  if (buffers.failed()) {
    return nullptr;
  }
  for (size_t block = 0; block < state.cells.size(); ++block) {
    if (rows[block] < 0 || rows[block] >= memory.numel / columns) {
      PyErr_SetString(PyExc_IndexError, "there is no such row");
      return nullptr;
    }
  }
  auto* const out = reinterpret_cast<double*>(memory.address);
  std::fill_n(out, memory.numel, 0.0);
  const std::lock_guard<std::mutex> guard(state.mutex);
  for (size_t block = 0; block < state.cells.size(); ++block) {
    const auto& cell = state.cells[block];
    double* const row = out + columns * rows[block];
    for (int side = 0; side < 2; ++side) {
      row[2 * side] = cell[2 * side] * cell[2 * side];
      row[2 * side + 1] = cell[2 * side + 1];
    }
    row[columns - 1] = 1;
  }
  Py_RETURN_TRUE;
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

PyObject* guarded_hook_value(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return hook_value(self, arguments, count); });
}

PyObject* guarded_clear_cells(PyObject* self, PyObject* arguments) {
  return guarded([&] { return clear_cells(self, arguments); });
}

PyObject* guarded_read_cells(PyObject* self, PyObject* out) {
  return guarded([&] { return read_cells(self, out); });
}

PyObject* guarded_put_rows(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return put_rows(self, arguments, count); });
}

PyMethodDef methods[] = {
    {"hook", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(guarded_hook_value)), METH_FASTCALL,
     "hook(value, block, side) -> bool: whether the gradient of its tensor is measured now."},
    {"arm", set_armed, METH_O, "arm(armed): measure gradients, or ignore them."},
    {"take_seconds", take_seconds, METH_NOARGS, "Seconds in hooks since the last call."},
    {"clear", guarded_clear_cells, METH_NOARGS, "Set all norms and counts to 0."},
    {"read", guarded_read_cells, METH_O,
     "read(out): norm and count on both sides of every block, float64 [blocks, 2, 2]."},
    {"put", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(guarded_put_rows)), METH_FASTCALL,
     "put(into, rows) -> bool: write what is sent of every block to its row of a table."},
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
