// Memory of the simulated devices, and pinned host memory.
//
// A device address cannot be read by the host (PROT_NONE); its bytes lie at a fixed distance that
// only this extension knows. Freed memory is handed out again at once to the stream that it was
// allocated on, as torch's caching allocator does, and later where `record_stream` was called.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstring>
#include <map>

#include "runtime.h"

namespace simulated {

constexpr size_t DEVICE_BYTES = size_t(8) << 30;
constexpr unsigned char POISON = 0xff;  // a NaN in every floating dtype of 16 bits and more

struct DeviceSpace {
  char* addresses = nullptr;
  ptrdiff_t distance = 0;  // from an address to its bytes
  size_t used = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
};
struct Block {
  size_t bytes;
  int device;
  int64_t stream;
  std::vector<int64_t> other_streams;
};
struct Parked {  // freed, but other streams may still use it
  char* address;
  Block block;
  std::vector<EventPointer> until;
};

inline DeviceSpace spaces[DEVICES];
inline std::map<char*, Block> blocks;
inline std::multimap<std::tuple<int, int64_t, size_t>, char*> free_blocks;
inline std::vector<Parked> parked;

inline c10::Device cuda(int index) {
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}

inline void* mapping(int protection) {
  void* found = mmap(
      nullptr, DEVICE_BYTES, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(found != MAP_FAILED, "simulated CUDA: mmap failed");
  return found;
}

inline DeviceSpace& space_of(int device) {
  DeviceSpace& space = spaces[device];
  if (space.addresses) return space;
  char* bytes = static_cast<char*>(mapping(PROT_READ | PROT_WRITE));
  // Triton's interpreter reads addresses on the host.
  bool readable = getenv("SIMULATED_CUDA_READABLE") != nullptr;
  space.addresses = readable ? bytes : static_cast<char*>(mapping(PROT_NONE));
  space.distance = bytes - space.addresses;
  return space;
}

inline void reuse_parked() {
  for (size_t i = 0; i < parked.size();) {
    Parked& each = parked[i];
    bool done = true;
    for (auto& event : each.until) done &= event->reached >= 1;
    if (done) {
      free_blocks.insert({{each.block.device, each.block.stream, each.block.bytes}, each.address});
      parked.erase(parked.begin() + static_cast<ptrdiff_t>(i));
    } else {
      i++;
    }
  }
}

inline void free_device(void* pointer) {
  if (!pointer) return;
  Locked locked;
  auto found = blocks.find(static_cast<char*>(pointer));
  if (found == blocks.end()) return;
  auto [address, block] = *found;
  blocks.erase(found);
  auto& stats = spaces[block.device].stats;
  stats.allocated_bytes[0].decrease(block.bytes);
  stats.allocation[0].decrease(1);
  if (capturing) return;  // a graph keeps the memory that it was captured with
  Parked freed{address, block, {}};
  for (int64_t stream : block.other_streams) {
    freed.until.push_back(std::make_shared<Event>());
    record_event(freed.until.back(), block.device, stream);
  }
  parked.push_back(std::move(freed));
  reuse_parked();
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    int device = current_device;
    if (!size) return {nullptr, nullptr, &free_device, cuda(device)};
    Locked locked;
    DeviceSpace& space = space_of(device);
    int64_t stream = current_stream[device];
    size_t bytes = (size + 511) / 512 * 512;
    reuse_parked();
    char* address;
    auto found = free_blocks.find({device, stream, bytes});
    if (found != free_blocks.end()) {
      address = found->second;
      free_blocks.erase(found);
    } else {
      address = space.addresses + space.used;
      space.used += bytes;
      TORCH_CHECK_WITH(OutOfMemoryError, space.used <= DEVICE_BYTES, "simulated CUDA out of memory");
      space.stats.reserved_bytes[0].increase(bytes);
      std::memset(address + space.distance, POISON, bytes);  // for streams that do not wait
    }
    blocks[address] = Block{bytes, device, stream, {}};
    space.stats.allocated_bytes[0].increase(bytes);
    space.stats.allocation[0].increase(1);
    Job poison;
    poison.name = "poison";
    poison.run = [address, bytes, distance = space.distance] {
      std::memset(address + distance, POISON, bytes);
    };
    enqueue(device, stream, std::move(poison));
    return {address, address, &free_device, cuda(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "simulated CUDA: copy_data");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Locked locked;
    auto found = blocks.find(static_cast<char*>(data.get()));
    if (found != blocks.end() && found->second.stream != stream.id())
      found->second.other_streams.push_back(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Locked locked;
    return spaces[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Locked locked;
    spaces[device].stats.allocated_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Locked locked;
    return {DEVICE_BYTES - spaces[device].used, DEVICE_BYTES};
  }
};
inline DeviceAllocator device_allocator;

inline std::map<char*, size_t> pinned;

inline void free_pinned(void* pointer) {
  Locked locked;
  auto found = pinned.find(static_cast<char*>(pointer));
  if (found == pinned.end()) return;
  munmap(pointer, found->second);
  pinned.erase(found);
}

inline bool is_pinned(const void* pointer) {
  Locked locked;
  auto address = static_cast<char*>(const_cast<void*>(pointer));
  auto after = pinned.upper_bound(address);
  if (after == pinned.begin()) return false;
  auto [first, bytes] = *std::prev(after);
  return address < first + bytes;
}

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    Locked locked;
    not_while_capturing("cudaHostAlloc");
    size_t bytes = (size + 4096) / 4096 * 4096;
    void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(found != MAP_FAILED, "simulated CUDA: mmap failed");
    std::memset(found, POISON, bytes);
    pinned[static_cast<char*>(found)] = bytes;
    return {found, found, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* into, const void* from, size_t bytes) const override {
    std::memcpy(into, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator pinned_allocator;

}  // namespace simulated
