// The norm of all elements of a tensor.
#pragma once

#include "tensor_memory.h"

// Of a tensor of any dtype but fp8. Does not throw.
double norm_of(const TensorMemory& memory);
