// What a PlaceReader has to say, without torch's headers.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>
#include <vector>

// Columns of a place.
constexpr int place_columns = 3, place_address = 0, place_code = 1, place_contiguous = 2;

bool is_place_reader(PyObject* object);

int64_t places_count(PyObject* reader);

// The place of every weight or gradient now, valid until the next call. Appends the rows that only
// Python can read, whose places are undefined. May throw.
const int64_t* read_places(PyObject* reader, bool of_grad, std::vector<int64_t>& unread);

// Keeps the tensors of these rows alive while other threads may run. Needs the interpreter lock, at
// the end too. May throw.
std::shared_ptr<void> keep_tensors(
    PyObject* reader, const std::vector<int64_t>& weights, const std::vector<int64_t>& grads);
