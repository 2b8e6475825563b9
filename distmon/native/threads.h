// Work shared out over a few threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

// Calls `work(i)` once for every i below `items`, on up to `threads` threads, this one included.
// Who takes which is left to chance, so `work` must write to places of its own. Throws in this
// thread when `work` throws in any.
//
// On a machine where all cores are busy a new thread may not run before this one has done
// everything; so threads are not waited for, only what they have taken.
template <typename Work>
void share_out(int64_t items, int64_t threads, const Work& work) {
  struct Progress {
    std::atomic<int64_t> taken{0};
    std::atomic<int64_t> done{0};
    std::atomic<bool> failed{false};
  };
  const auto progress = std::make_shared<Progress>();
  // A thread that comes too late finds nothing to take, and does not touch `work`.
  const auto take_turns = [items, progress, &work] {
    for (int64_t i = progress->taken++; i < items; i = progress->taken++) {
      try {
        work(i);
      } catch (...) {
        progress->failed = true;  // leaving the thread would end the process
      }
      ++progress->done;
    }
  };
  try {
    for (int64_t i = 1; i < threads && i < items; ++i) {
      std::thread(take_turns).detach();
    }
  } catch (...) {
    // No more threads to be had: those that there are do it, and use `work` until they are done.
  }
  take_turns();
  while (progress->done < items) {
    std::this_thread::yield();
  }
  if (progress->failed) {
    throw std::runtime_error("a part of the tensors could not be read");
  }
}
