// What torch asks of a device: current device and stream, events, generators, the CUDA hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "memory.h"

namespace simulated {

inline int index_of(c10::Device device) {
  return device.index() < 0 ? current_device : device.index();
}
inline void set_current_device(int index) {
  TORCH_CHECK(index < DEVICES, "simulated CUDA: invalid device ordinal ", index);
  if (index >= 0) current_device = index;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
  static EventPointer& event_of(void* handle) { return *static_cast<EventPointer*>(handle); }
  static void must_not_be_captured(const EventPointer& event) {
    TORCH_CHECK(!event->captured, "simulated CUDA: the event was captured in a graph");
  }

 public:
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return cuda(current_device); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }

  c10::Stream getStream(c10::Device device) const override {
    int index = index_of(device);
    return c10::Stream(c10::Stream::UNSAFE, cuda(index), current_stream[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, cuda(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    Locked locked;
    int index = index_of(device);
    TORCH_CHECK(stream_count[index] < STREAMS, "simulated CUDA: too many streams");
    draw_speed(streams[index][stream_count[index]]);
    return c10::Stream(c10::Stream::UNSAFE, cuda(index), stream_count[index]++);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override {
    return getNewStream(device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Locked locked;
    not_while_capturing("cudaStreamQuery");
    advance(locked.lock());
    const Stream& asked = streams[stream.device_index()][stream.id()];
    return asked.jobs.empty() && !asked.busy;
  }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing != nullptr; }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_stream(stream.device_index(), stream.id(), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    wait_for_device(device, "device");
  }

  void destroyEvent(void* handle, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventPointer*>(handle);
  }
  void record(
      void** handle, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag)
      const override {
    Locked locked;
    if (!*handle) *handle = new EventPointer(std::make_shared<Event>());
    record_event(event_of(*handle), stream.device_index(), stream.id());
  }
  void block(void* handle, const c10::Stream& stream) const override {
    if (!handle) return;
    Locked locked;
    make_stream_wait(event_of(handle), stream.device_index(), stream.id());
  }
  bool queryEvent(void* handle) const override {
    if (!handle) return true;
    Locked locked;
    not_while_capturing("cudaEventQuery");
    auto event = event_of(handle);
    must_not_be_captured(event);
    advance(locked.lock());
    // A host that polls for long lets time pass.
    if (++event->asked % POLLS == 0)
      run_until(locked.lock(), event->device, event->stream, [&] {
        return event->reached >= event->recorded;
      });
    return event->reached >= event->recorded;
  }
  void synchronizeEvent(void* handle) const override {
    if (!handle) return;
    Locked locked;
    not_while_capturing("cudaEventSynchronize");
    auto event = event_of(handle);
    must_not_be_captured(event);
    auto version = event->recorded;
    if (event->reached < version) count_wait("event");
    run_until(
        locked.lock(), event->device, event->stream, [&] { return event->reached >= version; });
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    Locked locked;
    must_not_be_captured(event_of(begin));
    must_not_be_captured(event_of(end));
    return event_of(end)->milliseconds - event_of(begin)->milliseconds;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator.recordStream(data, stream);
  }
};

class Generator final : public at::CPUGeneratorImpl {
 public:
  explicit Generator(int index) {
    device_ = cuda(index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
  }
};

inline const at::Generator& default_generator(int index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return generators[index < 0 ? current_device : index];
}

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return DEVICES; }
  c10::DeviceIndex deviceCount() const override { return DEVICES; }
  c10::DeviceIndex current_device() const override { return simulated::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }
  void deviceSynchronize(c10::DeviceIndex index) const override { wait_for_device(index, "device"); }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    for (int i = 0; i < DEVICES; i++) {
      auto offset = static_cast<char*>(pointer) - spaces[i].addresses;
      if (spaces[i].addresses && offset >= 0 && offset < ptrdiff_t(DEVICE_BYTES)) return cuda(i);
    }
    return c10::Device(c10::kCPU);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? simulated::current_device : index);
  }
};

// DDP wants a timer of the device; it has nothing to tell.
class NoTimer final : public c10d::Timer {
 public:
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return {}; }
  void record(Event) override {}
};

}  // namespace simulated

namespace at {
using simulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}  // namespace at
namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::NoTimer)
}
namespace c10::impl {
using SimulatedGuard = simulated::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)
}  // namespace c10::impl
