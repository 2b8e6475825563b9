// Keeps C++ exceptions inside the module: one that leaves a function that Python calls ends the
// process.
#pragma once

#include <Python.h>

#include <exception>
#include <new>
#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

// Returns what `body` returns, or nullptr with a Python exception set when it throws.
template <typename Body>
PyObject* guarded(const Body& body) {
  try {
    return body();
#ifdef __GLIBCXX__
  } catch (const abi::__forced_unwind&) {
    throw;  // Python ends a daemon thread this way at exit; swallowing it aborts the process
#endif
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "unknown C++ exception");
  }
  return nullptr;
}
