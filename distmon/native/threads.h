// Work shared out over a few threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <thread>

#include "forks.h"

// The entry of GNU's OpenMP, where torch runs on it. Right after a training step its threads still
// spin on their cores: a thread of our own would have to wait for one of them, while these begin
// within a microsecond.
extern "C" void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags)
    __attribute__((weak));

// Hands out the numbers below `items` until there are none left.
template <typename Work>
class Turns {
 public:
  Turns(int64_t items, const Work& work) : items_(items), work_(work) {
    std::fegetenv(&arithmetic_);
  }

  // The same from another thread, which may flush denormal numbers where the first one does not.
  void take_as_first() {
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&arithmetic_);
    take();
    std::fesetenv(&own);
  }

  // A thread that comes too late finds nothing to take, and does not touch `work`.
  void take() {
    for (int64_t i = taken_++; i < items_; i = taken_++) {
      try {
        work_(i);
      } catch (...) {
        failed_ = true;  // leaving the thread would end the process
      }
      ++done_;
    }
  }

  bool done() const {
    return done_ >= items_;
  }

  bool failed() const {
    return failed_;
  }

 private:
  const int64_t items_;
  const Work& work_;
  std::fenv_t arithmetic_;
  std::atomic<int64_t> taken_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
};

// On a machine where all cores are busy a new thread may not run before this one has done
// everything; so threads are not waited for, only what they have taken.
template <typename Work>
void run_on_new_threads(const std::shared_ptr<Turns<Work>>& turns, int64_t threads) {
  try {
    for (int64_t i = 1; i < threads; ++i) {
      std::thread([turns] { turns->take(); }).detach();
    }
  } catch (...) {
    // No more threads to be had: those that there are do it, and use `work` until they are done.
  }
  turns->take();
  while (!turns->done()) {
    std::this_thread::yield();
  }
}

// Calls `work(i)` once for every i below `items`, on up to `threads` threads, this one included.
// Who takes which is left to chance, so `work` must write to places of its own. Throws in this
// thread when `work` throws in any.
template <typename Work>
void share_out(int64_t items, int64_t threads, const Work& work) {
  const auto turns = std::make_shared<Turns<Work>>(items, work);
  if (std::min(threads, items) <= 1) {
    turns->take();
  } else if (GOMP_parallel != nullptr && !is_forked()) {
    // As many threads as torch's operators have, whatever there is to do: those that a smaller team
    // leaves over would end, and torch would have to start them again. It waits for all of them; in
    // a forked process for those of its parent, for ever.
    GOMP_parallel(
        [](void* data) { static_cast<Turns<Work>*>(data)->take_as_first(); }, turns.get(),
        static_cast<unsigned>(threads), 0);
  } else {
    run_on_new_threads(turns, std::min(threads, items));
  }
  if (turns->failed()) {
    throw std::runtime_error("a part of the tensors could not be read");
  }
}

// The same for shares of some ten microseconds, as long as it takes to wake a thread: not for a few.
template <typename Work>
void share_out_short(int64_t shares, int64_t threads, const Work& work) {
  constexpr int64_t fewest = 4;
  share_out(shares, shares < fewest ? 1 : threads, work);
}
