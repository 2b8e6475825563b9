// Whether the threads that torch has started exist in this process.

#include "forks.h"

#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <mutex>

namespace {

std::atomic<bool> forked{false};

// What Linux says: forked, and no program was executed since. Also right where this module was
// loaded after the fork.
bool forked_without_exec() {
  constexpr unsigned long flag = 0x40;  // PF_FORKNOEXEC
  std::FILE* const file = std::fopen("/proc/self/stat", "r");
  if (file == nullptr) {
    return false;
  }
  unsigned long flags = 0;
  // The name of the program, in parentheses, may hold any character: go to the last of them.
  char line[1024] = {};
  const size_t size = std::fread(line, 1, sizeof(line) - 1, file);
  std::fclose(file);
  size_t after = size;
  while (after > 0 && line[after - 1] != ')') {
    --after;
  }
  const int found = std::sscanf(line + after, " %*c %*d %*d %*d %*d %*d %lu", &flags);
  return found == 1 && (flags & flag) != 0;
}

}  // namespace

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    forked = forked_without_exec();
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
  });
}

bool is_forked() {
  return forked;
}
