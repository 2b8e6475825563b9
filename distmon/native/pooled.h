// Memory for small objects that live from a forward pass to its backward pass. On the heap they would
// lie between the activations: freed activations around them are not joined, and the next ones get
// new pages from the system, in this step and in those after it.
#pragma once

#include <cstddef>
#include <mutex>
#include <new>
#include <vector>

// Memory for objects of one size; kept for the next ones when they are gone.
template <size_t size>
class Pool {
 public:
  static Pool& get() {
    static Pool& pool = *new Pool;  // never destroyed: objects may live until the process ends
    return pool;
  }

  void* take() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (free_.empty()) {
      grow();
    }
    void* const taken = free_.back();
    free_.pop_back();
    return taken;
  }

  void give_back(void* memory) noexcept {
    const std::lock_guard<std::mutex> guard(mutex_);
    free_.push_back(memory);  // there is room: it was reserved when the memory was made
  }

 private:
  static constexpr size_t at_once = 256;
  static constexpr size_t step =
      (size + alignof(std::max_align_t) - 1) / alignof(std::max_align_t) * alignof(std::max_align_t);

  void grow() {
    free_.reserve(made_ + at_once);
    auto* const block = static_cast<char*>(::operator new(at_once * step));
    for (size_t i = 0; i < at_once; ++i) {
      free_.push_back(block + i * step);
    }
    made_ += at_once;
  }

  std::mutex mutex_;
  std::vector<void*> free_;
  size_t made_ = 0;
};

// The same for the containers of the standard library; arrays come from the heap.
template <typename T>
struct PooledAllocator {
  using value_type = T;

  PooledAllocator() = default;
  template <typename Other>
  PooledAllocator(const PooledAllocator<Other>&) noexcept {}  // NOLINT: containers convert it

  T* allocate(size_t count) {
    return static_cast<T*>(
        count == 1 ? Pool<sizeof(T)>::get().take() : ::operator new(count * sizeof(T)));
  }

  void deallocate(T* memory, size_t count) noexcept {
    count == 1 ? Pool<sizeof(T)>::get().give_back(memory) : ::operator delete(memory);
  }

  template <typename Other>
  bool operator==(const PooledAllocator<Other>&) const noexcept {
    return true;
  }
  template <typename Other>
  bool operator!=(const PooledAllocator<Other>&) const noexcept {
    return false;
  }
};
