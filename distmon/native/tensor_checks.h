// Questions to torch tensors, through torch's own C++ API.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "element_values.h"
#include "tensor_memory.h"

// The gradient, undefined where there is none. Tensor::grad() would also warn about non-leaf tensors.
inline const at::Tensor& grad_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->grad();
}

// The code of a dtype that the kernels read; false for others.
inline bool find_code(c10::ScalarType type, int64_t& code) {
  switch (type) {
    case c10::ScalarType::Float:
      code = fp32;
      return true;
    case c10::ScalarType::BFloat16:
      code = bf16;
      return true;
    case c10::ScalarType::Half:
      code = fp16;
      return true;
    case c10::ScalarType::Double:
      code = fp64;
      return true;
    case c10::ScalarType::Float8_e4m3fn:
      code = fp8_e4m3;
      return true;
    case c10::ScalarType::Float8_e5m2:
      code = fp8_e5m2;
      return true;
    default:
      return false;
  }
}

// Whether the tensor's own memory is all there is to it. Asked before anything that throws for other
// kinds, because an exception of torch collects a backtrace, which takes milliseconds.
inline bool is_strided_memory(const c10::TensorImpl& tensor) {
  return !tensor.is_python_dispatch() && tensor.has_storage() && !tensor.is_nested() &&
      tensor.layout() == c10::kStrided && !tensor.key_set().has(c10::DispatchKey::Negative);
}

// Whether all elements lie within the storage. FSDP frees a storage and keeps the tensor, whose
// address is then invalid; the address of a view of it is not even null.
inline bool has_elements(const c10::TensorImpl& tensor) {
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

inline int64_t address_of(const c10::TensorImpl& tensor) {
  return reinterpret_cast<int64_t>(tensor.data());
}

// As `find_cpu_memory`, of a tensor. May throw.
inline bool find_memory(const c10::TensorImpl& tensor, TensorMemory& memory) {
  if (!is_strided_memory(tensor) || !tensor.device().is_cpu() || !tensor.is_contiguous() ||
      !has_elements(tensor) ||
      !find_code(c10::typeMetaToScalarType(tensor.dtype()), memory.code)) {
    return false;
  }
  memory.address = address_of(tensor);
  memory.numel = tensor.numel();
  return true;
}
