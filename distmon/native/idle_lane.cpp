// IdleLane: the steps between observations. Counts a step and keeps its loss and gradient norm, and
// leaves everything else to Python: observed steps, numbers that are not finite, unusual arguments,
// and what is to be prepared for the step at the limit.
//
// What it has counted is taken over by Python before anything there looks at it.

#include <Python.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

#include "element_values.h"
#include "guard.h"
#include "native.h"
#include "tensor_memory.h"

namespace {

// As `time.perf_counter` on Linux.
double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The value of a finite number or tensor of one element on the host; false for anything else.
bool read_number(PyObject* object, double& value) {
  if (PyFloat_Check(object)) {  // also numpy's float64
    value = PyFloat_AS_DOUBLE(object);
    return std::isfinite(value);
  }
  if (PyLong_CheckExact(object)) {
    value = PyLong_AsDouble(object);
    if (value == -1.0 && PyErr_Occurred()) {
      PyErr_Clear();
      return false;
    }
    return true;
  }
  TensorMemory memory;
  if (!find_cpu_memory(object, memory) || memory.numel != 1 || is_fp8(memory.code)) {
    return false;
  }
  with_reader(memory.address, memory.code, [&](auto element) {
    value = static_cast<double>(element(0));
  });
  return std::isfinite(value);
}

// An optional number among the arguments of a step.
struct Given {
  double value = 0;
  bool there = false;

  // False when Python has to read it.
  bool read(PyObject* object) {
    there = object != Py_None;
    return !there || read_number(object, value);
  }
};

struct Arguments {
  Given loss, tokens, samples, grad_norm;
  PyObject* lr = nullptr;  // borrowed
  int64_t step = -1;       // -1: not given

  bool read(PyObject* name, PyObject* value) {
    if (is(name, "loss")) {
      return loss.read(value);
    }
    if (is(name, "tokens")) {
      return tokens.read(value);
    }
    if (is(name, "samples")) {
      return samples.read(value);
    }
    if (is(name, "grad_norm")) {
      return grad_norm.read(value);
    }
    if (is(name, "lr")) {
      lr = value == Py_None ? nullptr : value;
      return lr == nullptr || PyFloat_CheckExact(lr) || PyLong_CheckExact(lr);
    }
    if (is(name, "step")) {
      if (value == Py_None) {
        return true;
      }
      int overflow = 0;
      step = PyLong_CheckExact(value) ? PyLong_AsLongLongAndOverflow(value, &overflow) : -1;
      return step >= 0 && overflow == 0;
    }
    return false;
  }

 private:
  static bool is(PyObject* name, const char* text) {
    return PyUnicode_CompareWithASCIIString(name, text) == 0;
  }
};

constexpr int most_phases = 8;
using PhaseSeconds = std::array<double, most_phases>;  // seconds of one step in each phase

struct Counted {
  int64_t step;
  double loss;
  bool has_loss;
};

// What was counted since Python took it over.
struct Pending {
  std::vector<Counted> steps;
  double last = 0, seconds = 0;
  double tokens = 0, samples = 0;
  double loss_sum = 0, norm = 0;
  int64_t loss_count = 0, norm_reports = 0, reports_of_step = 0, stepped = 0;
  bool has_norm = false, touched = false;
  std::vector<PhaseSeconds> phases;  // of each step, the newest ones

  // Keeps the memory.
  void start_over() {
    Pending fresh;
    fresh.steps.swap(steps);
    fresh.phases.swap(phases);
    fresh.steps.clear();
    fresh.phases.clear();
    *this = std::move(fresh);
  }
};

struct IdleLane {
  PyObject_HEAD
  PyObject* fallback;  // tuple of callables: before_step, after_step, check, step, prepare
  PyObject* lr;        // the newest that was reported, or nullptr
  Pending pending;     // in here, as few pages as possible: after a training step none is in a cache
  bool open;
  bool expects_optimizer;  // a step without one was skipped
  bool in_phases;          // the phases of the steps are measured
  bool in_named;           // in a phase that the trainer has named: hooks begin none
  int phase;               // the current one
  double since;            // when it began
  PhaseSeconds spent;      // of the current step, without the current phase
  int optimizer_phase, other_phase;
  size_t kept_phases;      // steps whose phases are kept
  int64_t completed, stride, limit, optimizers, most_losses;
  bool in_call;            // one that was passed on has not ended
  double call_seconds;     // in such calls, until they are asked for
  double idle_call_seconds;  // in those of them that Python calls idle
  bool call_is_idle;         // the present one
};

enum Entry { before_entry, after_entry, check_entry, step_entry, prepare_entry };

IdleLane& lane_of(PyObject* self) {
  return *reinterpret_cast<IdleLane*>(self);
}

PyObject* call_python(
    IdleLane& lane, Entry entry, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  const double begin = seconds_now();
  const bool is_inner = std::exchange(lane.in_call, true);  // of a function of the user's
  const bool outer_is_idle = std::exchange(lane.call_is_idle, false);
  PyObject* const result =
      PyObject_Vectorcall(PyTuple_GET_ITEM(lane.fallback, entry), values, count, names);
  if (is_inner) {
    lane.call_is_idle = outer_is_idle;
    return result;
  }
  const double seconds = seconds_now() - begin;
  lane.in_call = false;
  lane.call_seconds += seconds;
  lane.idle_call_seconds += lane.call_is_idle ? seconds : 0.0;
  return result;
}

void switch_phase(IdleLane& lane, int phase, double now) {
  lane.spent[lane.phase] += now - lane.since;
  lane.phase = phase;
  lane.since = now;
}

// Begins a phase; false when Python has to.
bool begin_phase(IdleLane& lane, int phase) {
  if (!lane.open) {
    return false;
  }
  if (lane.in_phases && phase != lane.phase) {
    const double begin = seconds_now();
    switch_phase(lane, phase, begin);
    lane.pending.touched = true;
    lane.pending.seconds += seconds_now() - begin;
  }
  return true;
}

void end_phases_of_step(IdleLane& lane, double now) {
  switch_phase(lane, lane.other_phase, now);
  std::vector<PhaseSeconds>& kept = lane.pending.phases;
  if (kept.size() < lane.kept_phases) {
    kept.push_back(lane.spent);  // there is room
  } else if (!kept.empty()) {
    std::rotate(kept.begin(), kept.begin() + 1, kept.end());
    kept.back() = lane.spent;
  }
  lane.spent = {};
}

// As `begin_phase`, for a hook.
bool begin_hook_phase(IdleLane& lane, int phase) {
  return lane.in_named ? lane.open : begin_phase(lane, phase);
}

PyObject* found_inf_name = nullptr;  // set at the first use

// Whether a GradScaler may have told the optimizer to skip its step, as an attribute.
bool may_be_skipped(PyObject* optimizer) {
  if (optimizer == Py_None) {
    return false;
  }
  PyObject** const dict = _PyObject_GetDictPtr(optimizer);
  if (dict == nullptr || *dict == nullptr) {
    return true;
  }
  PyObject* const found = PyDict_GetItemWithError(*dict, found_inf_name);
  PyErr_Clear();
  return found != nullptr && found != Py_None;
}

PyObject* before_step(
    PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  IdleLane& lane = lane_of(self);
  if (names == nullptr && begin_hook_phase(lane, lane.optimizer_phase)) {
    Py_RETURN_NONE;
  }
  // A hook gets the arguments of the step, too.
  return call_python(lane, before_entry, values, count > 1 ? 1 : count, count > 1 ? nullptr : names);
}

PyObject* after_step(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  IdleLane& lane = lane_of(self);
  PyObject* const optimizer = count > 0 ? values[0] : Py_None;
  if (lane.open && names == nullptr && lane.pending.stepped < lane.optimizers &&
      !may_be_skipped(optimizer) && begin_hook_phase(lane, lane.other_phase)) {
    ++lane.pending.stepped;
    lane.pending.touched = true;
    Py_RETURN_NONE;
  }
  return call_python(lane, after_entry, values, count > 1 ? 1 : count, count > 1 ? nullptr : names);
}

bool read_arguments(
    Arguments& given, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  if (count != 0) {
    return false;
  }
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    if (!given.read(PyTuple_GET_ITEM(names, i), values[i])) {
      return false;
    }
  }
  return true;
}

void add_signals(Pending& pending, const Arguments& given) {
  if (given.grad_norm.there) {
    pending.norm = given.grad_norm.value;
    pending.has_norm = true;
    ++pending.norm_reports;
  }
  if (given.loss.there) {
    pending.loss_sum += given.loss.value;
    ++pending.loss_count;
  }
  pending.touched = true;
}

PyObject* check(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  IdleLane& lane = lane_of(self);
  Arguments given;
  if (!lane.open || !read_arguments(given, values, count, names) || given.tokens.there ||
      given.samples.there || given.lr != nullptr || given.step >= 0) {
    return call_python(lane, check_entry, values, count, names);
  }
  add_signals(lane.pending, given);
  Py_RETURN_NONE;
}

PyObject* step(PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  IdleLane& lane = lane_of(self);
  if (!lane.open) {
    return call_python(lane, step_entry, values, count, names);
  }
  const double begin = seconds_now();
  Pending& pending = lane.pending;
  Arguments given;
  const bool readable = read_arguments(given, values, count, names);
  const int64_t number = given.step < 0 ? lane.completed + 1 : given.step;
  const int64_t stride = number - lane.completed;
  if (!readable || stride < 1 || number >= lane.limit ||
      (lane.expects_optimizer && pending.stepped == 0) ||
      static_cast<int64_t>(pending.steps.size()) >= lane.most_losses) {
    return call_python(lane, step_entry, values, count, names);
  }
  pending.steps.push_back({number, given.loss.value, given.loss.there});
  add_signals(pending, given);
  pending.reports_of_step = pending.norm_reports;
  pending.norm_reports = 0;
  pending.tokens += given.tokens.value;
  pending.samples += given.samples.value;
  pending.stepped = 0;
  pending.last = begin;
  lane.completed = number;
  lane.stride = stride;
  if (given.lr != nullptr) {
    Py_XSETREF(lane.lr, Py_NewRef(given.lr));
  }
  const double end = seconds_now();
  if (lane.in_phases) {
    end_phases_of_step(lane, end);
  }
  pending.seconds += end - begin;
  if (number + stride >= lane.limit) {
    return call_python(lane, prepare_entry, nullptr, 0, nullptr);
  }
  Py_RETURN_NONE;
}

PyObject* guarded_check(
    PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return guarded([&] { return check(self, values, count, names); });
}

PyObject* guarded_step(
    PyObject* self, PyObject* const* values, Py_ssize_t count, PyObject* names) {
  return guarded([&] { return step(self, values, count, names); });
}

template <typename Make>
PyObject* list_of(const std::vector<Counted>& steps, const Make& make) {
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(steps.size()));
  for (size_t i = 0; list != nullptr && i < steps.size(); ++i) {
    PyObject* const item = make(steps[i]);
    if (item == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), item);
  }
  return list;
}

PyObject* number_of(const Counted& counted) {
  return PyLong_FromLongLong(counted.step);
}

PyObject* loss_of(const Counted& counted) {
  return counted.has_loss ? PyFloat_FromDouble(counted.loss) : Py_NewRef(Py_None);
}

PyObject* list_of_seconds(const PhaseSeconds& seconds) {
  PyObject* const list = PyList_New(most_phases);
  for (int i = 0; list != nullptr && i < most_phases; ++i) {
    PyObject* const item = PyFloat_FromDouble(seconds[i]);
    if (item == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SET_ITEM(list, i, item);
  }
  return list;
}

// None when phases are not measured; else those of the steps, and how far the current step is.
PyObject* phases_of(const IdleLane& lane, const Pending& pending) {
  if (!lane.in_phases) {
    Py_RETURN_NONE;
  }
  PyObject* const steps = PyList_New(static_cast<Py_ssize_t>(pending.phases.size()));
  for (size_t i = 0; steps != nullptr && i < pending.phases.size(); ++i) {
    PyObject* const item = list_of_seconds(pending.phases[i]);
    if (item == nullptr) {
      Py_DECREF(steps);
      return nullptr;
    }
    PyList_SET_ITEM(steps, static_cast<Py_ssize_t>(i), item);
  }
  PyObject* const spent = steps == nullptr ? nullptr : list_of_seconds(lane.spent);
  if (spent == nullptr) {
    Py_XDECREF(steps);
    return nullptr;
  }
  return Py_BuildValue("(NNid)", steps, spent, lane.phase, lane.since);
}

// None when nothing was counted.
PyObject* take(IdleLane& lane) {
  if (!lane.pending.touched) {
    Py_RETURN_NONE;
  }
  // Taken away first: making objects may run the garbage collector, and with it any Python code.
  const Pending pending = lane.pending;
  lane.pending.start_over();
  PyObject* const lr = std::exchange(lane.lr, nullptr);
  const auto stride = static_cast<long long>(lane.stride);
  PyObject* const steps = list_of(pending.steps, number_of);
  PyObject* const losses = steps == nullptr ? nullptr : list_of(pending.steps, loss_of);
  PyObject* const phases = losses == nullptr ? nullptr : phases_of(lane, pending);
  if (phases == nullptr) {
    Py_XDECREF(losses);
    Py_XDECREF(steps);
    Py_XDECREF(lr);
    return nullptr;
  }
  PyObject* const norm =
      pending.has_norm ? PyFloat_FromDouble(pending.norm) : Py_NewRef(Py_None);
  PyObject* const taken = Py_BuildValue(
      "{sNsNsNsLsdsdsdsdsdsLsNsLsLsLsO}", "steps", steps, "losses", losses, "phases", phases, "stride",
      stride, "last", pending.last, "seconds", pending.seconds,
      "tokens", pending.tokens, "samples", pending.samples, "loss_sum", pending.loss_sum,
      "loss_count", static_cast<long long>(pending.loss_count), "norm", norm, "norm_reports",
      static_cast<long long>(pending.norm_reports), "reports_of_step",
      static_cast<long long>(pending.reports_of_step), "stepped",
      static_cast<long long>(pending.stepped), "lr", lr == nullptr ? Py_None : lr);
  Py_XDECREF(lr);
  return taken;
}

// Python has taken over what was pending, and goes on itself until `open_until`.
PyObject* take_and_shut(PyObject* self, PyObject*) {
  return guarded([&] {
    lane_of(self).open = false;
    return take(lane_of(self));
  });
}

PyObject* take_call_seconds(PyObject* self, PyObject*) {
  IdleLane& lane = lane_of(self);
  return Py_BuildValue(
      "(dd)", std::exchange(lane.call_seconds, 0.0), std::exchange(lane.idle_call_seconds, 0.0));
}

PyObject* call_is_idle(PyObject* self, PyObject*) {
  lane_of(self).call_is_idle = true;
  Py_RETURN_NONE;
}

PyObject* open_until(PyObject* self, PyObject* arguments) {
  long long completed, stride, limit;
  int expects_optimizer, in_phases;
  double since;
  if (!PyArg_ParseTuple(
          arguments, "LLLppd", &completed, &stride, &limit, &expects_optimizer, &in_phases,
          &since)) {
    return nullptr;
  }
  IdleLane& lane = lane_of(self);
  lane.completed = completed;
  lane.stride = stride;
  lane.limit = limit;
  lane.expects_optimizer = expects_optimizer != 0;
  lane.in_phases = in_phases != 0;
  lane.phase = lane.other_phase;
  lane.since = since;
  lane.spent = {};
  lane.open = completed + stride < limit;
  Py_RETURN_NONE;
}

template <typename Begin>
PyObject* mark_phase(PyObject* self, PyObject* phase, const Begin& begin) {
  return guarded([&]() -> PyObject* {
    const long number = PyLong_AsLong(phase);
    if (number < 0 || number >= most_phases) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "there is no such phase");
      }
      return nullptr;
    }
    return PyBool_FromLong(begin(lane_of(self), static_cast<int>(number)));
  });
}

PyObject* mark(PyObject* self, PyObject* phase) {
  return mark_phase(self, phase, begin_phase);
}

PyObject* mark_by_hook(PyObject* self, PyObject* phase) {
  return mark_phase(self, phase, begin_hook_phase);
}

PyObject* set_named(PyObject* self, PyObject* named) {
  lane_of(self).in_named = named == Py_True;
  Py_RETURN_NONE;
}

// -1 when Python knows it.
PyObject* phase(PyObject* self, PyObject*) {
  const IdleLane& lane = lane_of(self);
  return PyLong_FromLong(lane.open && lane.in_phases ? lane.phase : -1);
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(lane_of(self).fallback);
  Py_VISIT(lane_of(self).lr);
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  Py_XDECREF(lane_of(self).fallback);
  Py_XDECREF(lane_of(self).lr);
  lane_of(self).pending.~Pending();
  PyObject_GC_Del(self);
}

int clear(PyObject* self) {
  lane_of(self).open = false;
  Py_CLEAR(lane_of(self).lr);
  return 0;
}

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function))

PyMethodDef methods[] = {
    {"before_step", FAST(before_step), METH_FASTCALL | METH_KEYWORDS, "Before an optimizer step."},
    {"after_step", FAST(after_step), METH_FASTCALL | METH_KEYWORDS, "After an optimizer step."},
    {"check", FAST(guarded_check), METH_FASTCALL | METH_KEYWORDS, "Report loss or norm."},
    {"step", FAST(guarded_step), METH_FASTCALL | METH_KEYWORDS, "Complete a training step."},
    {"take", take_and_shut, METH_NOARGS, "Return what was counted, and leave all to Python."},
    {"open_until", open_until, METH_VARARGS,
     "open_until(completed, stride, limit, expects_optimizer, in_phases, since): count coming "
     "steps; the first one has begun at `since`."},
    {"mark", mark, METH_O, "mark(phase) -> bool: whether the phase begins here."},
    {"mark_by_hook", mark_by_hook, METH_O, "The same, unless the current phase was named."},
    {"set_named", set_named, METH_O, "set_named(named): whether hooks begin no phase."},
    {"take_call_seconds", take_call_seconds, METH_NOARGS,
     "Seconds in calls that were passed on, and in idle ones, since it was last asked."},
    {"call_is_idle", call_is_idle, METH_NOARGS, "Count the present call as an idle one."},
    {"phase", phase, METH_NOARGS, "The current phase; -1 when steps are not counted here."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject lane_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  // the macro ends with a comma
    .tp_name = "distmon_native.IdleLane",
    .tp_basicsize = sizeof(IdleLane),
    .tp_dealloc = deallocate,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Counts steps that are not observed; made by idle_lane.",
    .tp_traverse = traverse,
    .tp_clear = clear,
    .tp_methods = methods,
};

PyObject* new_lane(PyObject* arguments) {
  PyObject* fallback;
  Py_ssize_t optimizers, most_losses, kept_phases;
  int optimizer_phase, other_phase;
  if (PyType_Ready(&lane_type) < 0 ||
      !PyArg_ParseTuple(
          arguments, "O!nnnii", &PyTuple_Type, &fallback, &optimizers, &most_losses, &kept_phases,
          &optimizer_phase, &other_phase)) {
    return nullptr;
  }
  if (PyTuple_GET_SIZE(fallback) != prepare_entry + 1) {
    PyErr_SetString(PyExc_ValueError, "there must be a function for each of the five entries");
    return nullptr;
  }
  if (std::min(optimizer_phase, other_phase) < 0 || kept_phases < 0 ||
      std::max(optimizer_phase, other_phase) >= most_phases) {
    PyErr_SetString(PyExc_ValueError, "there is no such phase");
    return nullptr;
  }
  if (found_inf_name == nullptr) {
    found_inf_name = PyUnicode_InternFromString("found_inf");
    if (found_inf_name == nullptr) {
      return nullptr;
    }
  }
  Pending pending;
  pending.steps.reserve(most_losses);
  pending.phases.reserve(kept_phases);
  auto* const lane = PyObject_GC_New(IdleLane, &lane_type);
  if (lane != nullptr) {
    lane->fallback = Py_NewRef(fallback);
    lane->lr = nullptr;
    new (&lane->pending) Pending(std::move(pending));
    lane->open = lane->expects_optimizer = lane->in_phases = lane->in_named = false;
    lane->phase = lane->other_phase = other_phase;
    lane->since = 0;
    lane->spent = {};
    lane->kept_phases = static_cast<size_t>(kept_phases);
    lane->optimizer_phase = optimizer_phase;
    lane->completed = lane->limit = 0;
    lane->stride = 1;
    lane->optimizers = optimizers;
    lane->most_losses = most_losses;
    lane->call_seconds = lane->idle_call_seconds = 0;
    lane->in_call = lane->call_is_idle = false;
    PyObject_GC_Track(lane);
  }
  return reinterpret_cast<PyObject*>(lane);
}

}  // namespace

PyObject* idle_lane(PyObject*, PyObject* arguments) {
  return guarded([&] { return new_lane(arguments); });
}
