// The lock of the Python interpreter.
#pragma once

#include <Python.h>

// Lets other Python threads run while it lives.
class WithoutLock {
 public:
  WithoutLock() : state_(PyEval_SaveThread()) {}
  WithoutLock(const WithoutLock&) = delete;
  WithoutLock& operator=(const WithoutLock&) = delete;

  ~WithoutLock() noexcept(false) {  // Python may end the thread here
    PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};
