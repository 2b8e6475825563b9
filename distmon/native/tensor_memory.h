// What the kernels need to know of a tensor, without torch's headers: they take most of the time to
// compile, so only place_reader.cpp includes them.
#pragma once

#include <Python.h>

#include <cstdint>

struct TensorMemory {
  int64_t address;
  int64_t code;  // a DtypeCode
  int64_t numel;
};

// Finds the elements of a contiguous tensor on the CPU. False when `object` is not one, or when its
// elements cannot be read by address: sparse, nested, quantized or meta tensors, subclasses with
// their own dispatch, freed storage. Never throws and runs no Python code.
bool find_cpu_memory(PyObject* object, TensorMemory& memory) noexcept;
