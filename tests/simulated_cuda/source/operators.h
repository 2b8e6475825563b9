// Operators on tensors of the simulated devices.
//
// An operator runs on meta tensors at once, for the shapes of its results, and its CPU kernel is
// launched on the bytes of the device memory. One that has no shapes before it has run (nonzero)
// waits, as it does on a GPU.
#pragma once
#include <ATen/EmptyTensor.h>
#include <ATen/core/stack.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "device.h"

namespace simulated {
using at::IntArrayRef;
using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

inline bool is_simulated(const Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::CUDA;
}

// As on devices without float64: nothing of it can be made there, nor converted to it on the way
// to the host.
inline bool without_float64 = std::getenv("SIMULATED_CUDA_NO_FLOAT64") != nullptr;

inline void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(
      !(without_float64 && dtype == c10::ScalarType::Double),
      "simulated CUDA: this device does not support float64");
}

inline Tensor new_tensor(int device, IntArrayRef sizes, IntArrayRef strides, c10::ScalarType dtype) {
  check_dtype(dtype);
  c10::DeviceGuard guard(cuda(device));
  return at::detail::empty_strided_generic(
      sizes, strides, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype);
}

// The CPU tensor over the bytes of a device tensor. It does not own them: memory that is freed
// before the job runs is read as whatever it holds then.
inline Tensor bytes_of(const Tensor& tensor) {
  auto* address = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  auto distance = spaces[tensor.device().index()].distance;
  c10::DataPtr data(address ? address + distance : nullptr, c10::Device(c10::kCPU));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(
      tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

// Apply `change` to every tensor of an argument or result.
template <class F>
IValue map_tensors(const IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& each : value.toTensorList().vec()) changed.push_back(change(each));
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const auto& each : value.toOptionalTensorVector())
      changed.push_back(each ? std::optional<Tensor>(change(*each)) : std::nullopt);
    return changed;
  }
  return value;
}

// ---------------------------------------------------------------- copies

inline void poison(Tensor host) {
  WithoutModes guard;
  if (host.is_floating_point() || host.is_complex())
    host.fill_(std::numeric_limits<double>::quiet_NaN());
  else if (host.scalar_type() != at::kBool)
    host.fill_(-77);
}

inline Tensor host_view(const Tensor& tensor) {
  WithoutModes guard;
  return tensor.detach();
}

inline void copy_between_devices(const Tensor& into, const Tensor& from) {
  int target = into.device().index(), source = from.device().index();
  Tensor a = bytes_of(into), b = bytes_of(from).expand_as(a);
  auto order = [](int first, int then) {
    Locked locked;
    auto event = std::make_shared<Event>();
    record_event(event, first, current_stream[first]);
    make_stream_wait(event, then, current_stream[then]);
  };
  if (source != target) order(target, source);
  launch(source, [a, b]() mutable { a.copy_(b); }, "copy");
  if (source != target) order(source, target);
}

inline void copy_to_host(const Tensor& into, const Tensor& from, bool non_blocking) {
  int device = from.device().index();
  if (into.scalar_type() != from.scalar_type()) check_dtype(into.scalar_type());
  Tensor host = host_view(into), bytes = bytes_of(from).expand_as(host);
  bool queued = non_blocking && is_pinned(into.storage().data());
  if (queued) poison(host);
  launch(device, [host, bytes]() mutable { host.copy_(bytes); }, "copy to host");
  if (!queued) wait_for_stream(device, current_stream[device], "blocking copy to host");
}

inline void copy_from_host(const Tensor& into, const Tensor& from, bool non_blocking) {
  int device = into.device().index();
  bool pinned = is_pinned(from.storage().data());
  Tensor bytes = bytes_of(into), host = host_view(from);
  if (!pinned) {
    WithoutModes guard;
    host = host.clone();  // the driver has its own copy of pageable memory when the call returns
  }
  host = host.expand_as(bytes);
  launch(device, [bytes, host]() mutable { bytes.copy_(host); }, "copy from host");
  if (!non_blocking)
    wait_for_stream(device, current_stream[device], "blocking copy from host");
  else if (!pinned) {
    Locked locked;
    not_while_capturing("cudaMemcpyAsync from pageable memory");
    count_wait("copy from pageable memory");
  }
}

inline Tensor& copy_(Tensor& into, const Tensor& from, bool non_blocking) {
  if (into.numel() == 0) return into;
  if (is_simulated(into) && is_simulated(from))
    copy_between_devices(into, from);
  else if (is_simulated(from))
    copy_to_host(into, from, non_blocking);
  else
    copy_from_host(into, from, non_blocking);
  return into;
}

inline Tensor copy_from(const Tensor& from, const Tensor& into, bool non_blocking) {
  Tensor target = into;
  copy_(target, from, non_blocking);
  return into;
}

inline at::Scalar local_scalar_dense(const Tensor& tensor) {
  int device = tensor.device().index();
  wait_for_stream(device, current_stream[device], "_local_scalar_dense");
  WithoutModes guard;
  return bytes_of(tensor).item();
}

// ---------------------------------------------------------------- creation, views, storages

inline Tensor empty(
    IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_dtype(c10::dtype_or_default(dtype));
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      sizes, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    IntArrayRef sizes, IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  int index = index_of(c10::device_or_default(device));
  return new_tensor(index, sizes, strides, c10::dtype_or_default(dtype));
}

inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  int device = storage.device().index();
  c10::DeviceGuard guard(cuda(device));
  auto data = device_allocator.allocate(bytes);
  auto* from = static_cast<char*>(const_cast<void*>(storage.data()));
  auto* into = static_cast<char*>(data.get());
  size_t kept = std::min(bytes, storage.nbytes());
  if (from && into && kept)
    launch(
        device,
        [=, distance = spaces[device].distance] {
          std::memcpy(into + distance, from + distance, kept);
        },
        "resize");
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

inline const Tensor& resize_(
    const Tensor& tensor, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  return tensor;
}

inline void record_stream(Tensor& tensor, at::Stream stream) {
  device_allocator.recordStream(tensor.storage().data_ptr(), stream);
}
inline Tensor as_strided(
    const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::cpu::as_strided(tensor, sizes, strides, offset);
}
inline Tensor view(const Tensor& tensor, IntArrayRef sizes) {
  return at::native::view(tensor, sizes);
}
inline Tensor reshape_alias(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::_reshape_alias(tensor, sizes, strides);
}
inline Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return at::native::set_tensor_(tensor, source);
}
inline Tensor& set_storage(Tensor& tensor, at::Storage source) {
  return at::native::set_(tensor, source);
}
inline Tensor& set_storage_offset(
    Tensor& tensor, at::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  return at::cpu::set_(tensor, source, offset, sizes, strides);
}

// ---------------------------------------------------------------- every other operator

// One call of an operator, prepared for the CPU and for meta tensors.
class Call {
  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  std::vector<IValue> args_;
  Stack host_args_, meta_args_;
  std::optional<uint64_t> seed_;  // of the default CPU generator, for an operator that takes none
  int device_ = -1;

 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(c10::toString(schema_.operator_name())) {
    size_t count = schema_.arguments().size();
    args_.assign(stack->end() - static_cast<ptrdiff_t>(count), stack->end());
    torch::jit::drop(*stack, count);
    find_device();
    bool takes_generator = false;
    for (size_t i = 0; i < count; i++) {
      const auto& type = schema_.arguments()[i].type();
      bool generator = type->kind() == c10::TypeKind::GeneratorType ||
          (type->kind() == c10::TypeKind::OptionalType &&
           type->expectRef<c10::OptionalType>().getElementType()->kind() ==
               c10::TypeKind::GeneratorType);
      takes_generator |= generator;
      host_args_.push_back(generator ? IValue(seeded(args_[i])) : for_host(args_[i]));
      meta_args_.push_back(generator ? IValue() : for_meta(args_[i]));
    }
    if (!takes_generator && op.hasTag(at::Tag::nondeterministic_seeded)) seed_ = next_seed({});
  }

  void run(Stack* stack) {
    Stack shapes = meta_args_;
    bool known = true;
    try {
      WithoutModes guard;
      op_.callBoxed(&shapes);
    } catch (const std::exception& error) {
      known = false;
      if (getenv("SIMULATED_CUDA_DEBUG"))
        fprintf(stderr, "no shapes of %s: %.300s\n", name_.c_str(), error.what());
    }
    if (known)
      launch_later(shapes, stack);
    else
      run_now(stack);
  }

 private:
  void find_device() {
    bool from_host = false;
    auto look = [&](const Tensor& tensor) {
      if (is_simulated(tensor)) {
        int index = tensor.device().index();
        TORCH_CHECK(
            device_ < 0 || device_ == index,
            "Expected all tensors to be on the same device, but found at least two devices, cuda:",
            device_, " and cuda:", index, " (", name_, ")");
        device_ = index;
      } else if (tensor.defined() && tensor.dim() > 0) {
        from_host = true;
      }
      return tensor;
    };
    for (auto& arg : args_) map_tensors(arg, look);
    for (auto& arg : args_)
      if (device_ < 0 && arg.isDevice() && arg.toDevice().is_cuda())
        device_ = index_of(arg.toDevice());
    if (device_ < 0) device_ = current_device;
    if (!from_host) return;
    TORCH_CHECK(
        name_.find("index") != std::string::npos,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:",
        device_, " and cpu! (", name_, ")");
    Locked locked;
    count_wait("index from host");
  }

  // A kernel draws from numbers that were fixed at its launch, like an offset into Philox.
  uint64_t next_seed(const IValue& given) {
    auto generator = given.isGenerator() ? given.toGenerator() : default_generator(device_);
    std::lock_guard<std::mutex> guard(generator.mutex());
    return generator.get<at::CPUGeneratorImpl>()->random64();
  }
  at::Generator seeded(const IValue& given) {
    auto made = at::make_generator<at::CPUGeneratorImpl>(next_seed(given));
    return made;
  }

  static IValue on(const IValue& value, c10::DeviceType type) {
    return value.isDevice() && value.toDevice().is_cuda() ? IValue(c10::Device(type)) : value;
  }
  static IValue for_host(const IValue& value) {
    return on(
        map_tensors(
            value,
            [](const Tensor& t) {
              WithoutModes guard;
              return is_simulated(t) ? bytes_of(t) : t.defined() ? t.detach().clone() : t;
            }),
        c10::kCPU);
  }
  static IValue for_meta(const IValue& value) {
    return on(
        map_tensors(
            value,
            [](const Tensor& t) {
              WithoutModes guard;
              if (!t.defined() || (!is_simulated(t) && t.dim() == 0)) return t;
              return at::empty_strided(t.sizes(), t.strides(), t.options().device(c10::kMeta));
            }),
        c10::kMeta);
  }

  // The argument that a result is or views; -1 for a new tensor.
  int aliased(const c10::Argument& result) const {
    if (!result.alias_info()) return -1;
    for (size_t i = 0; i < args_.size(); i++) {
      const auto* info = schema_.arguments()[i].alias_info();
      if (info && info->beforeSets() == result.alias_info()->beforeSets())
        return static_cast<int>(i);
    }
    return -1;
  }

  void resize_outputs() {
    for (size_t i = 0; i < args_.size(); i++) {
      if (!schema_.arguments()[i].is_out() || !args_[i].isTensor() || !meta_args_[i].isTensor())
        continue;
      auto out = args_[i].toTensor();
      auto shape = meta_args_[i].toTensor();
      if (out.sizes() == shape.sizes()) continue;
      resize_(out, shape.sizes(), {});
      out.unsafeGetTensorImpl()->set_sizes_and_strides(shape.sizes(), shape.strides());
      host_args_[i] = bytes_of(out);
    }
  }

  void launch_later(const Stack& shapes, Stack* stack) {
    resize_outputs();
    std::vector<IValue> targets;
    bool computes = schema_.returns().empty();
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      const auto& result = schema_.returns()[i];
      int source = aliased(result);
      if (source >= 0) {
        bool written = result.alias_info()->isWrite();
        computes |= written;
        stack->push_back(written ? args_[source] : view_like(args_[source], shapes[i]));
        targets.emplace_back();
        continue;
      }
      computes = true;
      auto made = map_tensors(shapes[i], [&](const Tensor& shape) {
        return shape.defined() && shape.is_meta()
            ? new_tensor(device_, shape.sizes(), shape.strides(), shape.scalar_type())
            : shape;
      });
      stack->push_back(made);
      targets.push_back(map_tensors(
          made, [](const Tensor& t) { return is_simulated(t) ? bytes_of(t) : t; }));
    }
    if (!computes) return;
    launch(
        device_,
        [op = op_, args = host_args_, targets, seed = seed_]() mutable {
          with_seed(seed, [&] { op.callBoxed(&args); });
          for (size_t i = 0; i < targets.size(); i++) fill(targets[i], args[i]);
        },
        name_);
  }

  static IValue view_like(const IValue& base, const IValue& shape) {
    if (!base.isTensor() || !shape.isTensor()) return base;
    auto from = base.toTensor();
    auto like = shape.toTensor();
    return at::cpu::as_strided(
        from, like.sizes(), like.strides(), from.storage_offset() + like.storage_offset());
  }

  static void fill(const IValue& target, const IValue& result) {
    if (target.isTensor() && target.toTensor().defined()) {
      target.toTensor().copy_(result.toTensor());
    } else if (target.isTensorList()) {
      auto targets = target.toTensorVector();
      auto results = result.toTensorVector();
      for (size_t i = 0; i < targets.size(); i++)
        if (targets[i].defined()) targets[i].copy_(results[i]);
    }
  }

  template <class F>
  static void with_seed(std::optional<uint64_t> seed, F run) {
    if (!seed) return run();
    auto generator = at::detail::getDefaultCPUGenerator();
    auto before = generator.get_state();
    generator.set_current_seed(*seed);
    run();
    generator.set_state(before);
  }

  void run_now(Stack* stack) {
    wait_for_stream(device_, current_stream[device_], name_);
    WithoutModes guard;
    Stack results = host_args_;
    with_seed(seed_, [&] { op_.callBoxed(&results); });
    for (size_t i = 0; i < schema_.returns().size(); i++) {
      int source = aliased(schema_.returns()[i]);
      if (source >= 0) {
        stack->push_back(args_[source]);
        continue;
      }
      stack->push_back(map_tensors(results[i], [&](const Tensor& computed) {
        if (!computed.defined()) return computed;
        auto made =
            new_tensor(device_, computed.sizes(), computed.strides(), computed.scalar_type());
        auto bytes = bytes_of(made);
        launch(device_, [bytes, computed]() mutable { bytes.copy_(computed); }, "result");
        return made;
      }));
    }
  }
};

inline void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  Call(op, stack).run(stack);
}

}  // namespace simulated
