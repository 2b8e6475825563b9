// The functions that Python sees.

#include "native.h"

namespace {

PyMethodDef functions[] = {
    {"place_reader", place_reader, METH_VARARGS,
     "place_reader(parameters, attributes, device, numels, out) -> PlaceReader"},
    {"take_snapshot", take_snapshot, METH_VARARGS, "Copy the sampled weights."},
    {"fill_sampled_rows", fill_sampled_rows, METH_VARARGS, "Fill every column of every row."},
    {"fill_exact_columns", fill_exact_columns, METH_VARARGS,
     "Replace sampled columns of chosen weights and gradients by those of all elements."},
    {"fill_gradient_runs", fill_gradient_runs, METH_VARARGS,
     "Replace the sampled gradient columns by those of the runs of gradients."},
    {"add_norm", add_norm, METH_VARARGS,
     "add_norm(gradient, cells) -> bool: whether the gradient was read and its norm added."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "distmon_native", "Loops of distmon over tensors.", 0, functions,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit_distmon_native() {
  return PyModuleDef_Init(&definition);
}
