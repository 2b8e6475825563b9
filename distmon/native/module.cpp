// The table of functions that Python sees.

#include "native.h"

namespace {

PyMethodDef functions[] = {
    {"locate_tensors", locate_tensors, METH_O,
     "locate_tensors([(tensor, tensor._cdata), ...]) -> bool: whether all keep it in one place."},
    {"read_places", read_places, METH_VARARGS,
     "read_places(parameters, names, of_grad, neighbour, codes, numels, out) -> rows not read."},
    {"take_snapshot", take_snapshot, METH_VARARGS, "Keep the sampled weights as they are now."},
    {"fill_sampled_rows", fill_sampled_rows, METH_VARARGS, "Fill every column of every row."},
    {"fill_exact_columns", fill_exact_columns, METH_VARARGS,
     "Replace the sampled weight and gradient columns by those of all elements."},
    {"add_norm", add_norm, METH_VARARGS,
     "add_norm(gradient, cells) -> bool: whether it could be read and its norm was added."},
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
