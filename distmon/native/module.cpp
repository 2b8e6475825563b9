// The functions that Python sees.

#include "forks.h"
#include "native.h"

namespace {

PyMethodDef functions[] = {
    {"place_reader", place_reader, METH_VARARGS,
     "place_reader(parameters, attributes, device, numels, out) -> PlaceReader"},
    {"row_reader", row_reader, METH_VARARGS, "row_reader(places, ...) -> RowReader"},
    {"add_norm", add_norm, METH_VARARGS,
     "add_norm(gradient, cells) -> bool: whether the gradient was read and its norm added."},
    {"sum_of_squares", sum_of_squares, METH_O,
     "sum_of_squares(tensor) -> float, or None for one that is not plain memory."},
    {"digest", digest, METH_VARARGS,
     "digest(tensor, elements) -> (sum of squares, number for the first elements), or None."},
    {"switch_hooks", switch_hooks, METH_VARARGS,
     "switch_hooks(entries, wanted): put hooks into torch's tables, or remove them."},
    {"farthest_jump", farthest_jump, METH_VARARGS,
     "Distance, expected distance and row of the matrix farthest beyond its updates."},
    {"gain_hooks", gain_hooks, METH_VARARGS, "gain_hooks(blocks, fallback) -> GainHooks"},
    {"idle_lane", idle_lane, METH_VARARGS,
     "idle_lane((before_step, after_step, check, step, prepare), optimizers, ...) -> IdleLane"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "distmon_native", "Loops of distmon over tensors.", 0, functions,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_distmon_native() {
  watch_forks();
  return PyModuleDef_Init(&definition);
}
