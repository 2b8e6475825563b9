// RowReader: reads the samples of all parameters of a monitor, one call for each phase of a step.
//
// It holds the tables of the plan; the tensors are held by its PlaceReader. Every call finds out anew
// where tensors lie and reads them before any Python code can run, so memory that was freed is never
// read. Rows that only Python can find, and those that are not contiguous, are returned and nothing
// is read; Python places them by `place`, keeps their tensors, and calls again with `placed`.

#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "buffers.h"
#include "element_values.h"
#include "exact_rows.h"
#include "gradient_runs.h"
#include "guard.h"
#include "interpreter_lock.h"
#include "lists.h"
#include "native.h"
#include "places.h"
#include "row_layout.h"
#include "sample_table.h"
#include "sampled_rows.h"

namespace {

// The offsets of a tensor that is not contiguous.
struct StridedTables {
  TablePool samples;
  std::vector<int64_t> runs;
  std::vector<uint8_t> codes;
};

// A tensor that Python has found.
struct Placed {
  int64_t address;
  int64_t dense;  // where all its elements lie side by side
  int64_t code;
  std::unique_ptr<StridedTables> tables;  // nullptr: it is contiguous
};

class RowReader {
 public:
  RowReader() = default;
  RowReader(const RowReader&) = delete;
  RowReader& operator=(const RowReader&) = delete;

  ~RowReader() {
    Py_XDECREF(places_);
  }

  // False with an exception set when the arrays do not fit.
  bool init(PyObject* arguments) {
    PyObject *places, *starts, *widths, *counts, *slots, *snapshot, *half_ulp;
    PyObject *first, *runs, *codes, *numels, *wanted;
    int slot_bytes, value_bytes, run_bytes;
    Py_ssize_t size, run_count;
    if (!PyArg_ParseTuple(
            arguments, "OniOOOOiOOniOOOOO", &places, &size, &slot_bytes, &starts, &widths, &counts,
            &slots, &value_bytes, &snapshot, &half_ulp, &run_count, &run_bytes, &first, &runs,
            &codes, &numels, &wanted)) {
      return false;
    }
    if (!is_place_reader(places)) {
      PyErr_SetString(PyExc_TypeError, "a RowReader is made from a PlaceReader");
      return false;
    }
    places_ = Py_NewRef(places);
    const int64_t rows = places_count(places_);
    value_bytes_ = value_bytes;
    snapshot_ = value_bytes == 8 ? static_cast<void*>(held_.write<double>(snapshot, size))
                                 : held_.write<float>(snapshot, size);
    counts_ = held_.read<int32_t>(counts, rows * layout::groups);
    half_ulp_ = held_.read<double>(half_ulp, rows);
    run_first_ = held_.read<int64_t>(first, rows + 1);
    (run_bytes == 8 ? void(wide_runs_ = held_.read<int64_t>(runs, run_count))
                    : void(narrow_runs_ = held_.read<int32_t>(runs, run_count)));
    run_codes_ = held_.read<uint8_t>(codes, run_count);
    numels_ = held_.read<int64_t>(numels, rows);
    wanted_ = held_.read<uint8_t>(wanted, rows);
    Buffers now;
    const auto* const start = now.read<int64_t>(starts, rows);
    const auto* const width = now.read<int32_t>(widths, rows);
    const auto* const narrow = slot_bytes == 4 ? now.read<int32_t>(slots, size) : nullptr;
    const auto* const wide = slot_bytes == 4 ? nullptr : now.read<int64_t>(slots, size);
    if (held_.failed() || now.failed() || !fits(start, width, size, run_count)) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "the tables do not fit together");
      }
      return false;
    }
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t* const used = counts_ + row * layout::groups;
      tables_.add(
          narrow != nullptr ? entries_from_slots(narrow + start[row], width[row], used)
                            : entries_from_slots(wide + start[row], width[row], used));
    }
    tables_.finish();
    sampled_.resize(rows);
    runs_.resize(rows);
    dense_.resize(2 * rows);
    for (int64_t row = 0; row < rows; ++row) {
      sampled_[row].start = start[row];
      sampled_[row].width = width[row];
      sampled_[row].counts = counts_ + row * layout::groups;
      if (wanted_[row] != 0) {
        whole_.push_back(row);
      }
    }
    return true;
  }

  PyObject* place(PyObject* arguments) {
    int of_grad, offset_bytes;
    Py_ssize_t row;
    long long address, dense, code;
    PyObject *slots, *run_offsets, *run_codes;
    if (!PyArg_ParseTuple(
            arguments, "pnLLLiOOO", &of_grad, &row, &address, &dense, &code, &offset_bytes, &slots,
            &run_offsets, &run_codes)) {
      return nullptr;
    }
    if (row < 0 || row >= rows()) {
      PyErr_SetString(PyExc_IndexError, "there is no such row");
      return nullptr;
    }
    Placed placed = {address, dense, code, nullptr};
    if (slots != Py_None) {
      placed.tables = strided_tables(of_grad, row, offset_bytes, slots, run_offsets, run_codes);
      if (placed.tables == nullptr) {
        return nullptr;
      }
    }
    placed_[{row, of_grad != 0}] = std::move(placed);
    Py_RETURN_NONE;
  }

  // None, or the weights and gradients that have to be placed first.
  PyObject* snapshot(PyObject* arguments) {
    int placed, threads;
    if (!PyArg_ParseTuple(arguments, "pi", &placed, &threads)) {
      return nullptr;
    }
    if (PyObject* const missing = find(false, placed)) {
      return missing;
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    if (value_bytes_ == 8) {
      take_snapshot(sampled_.data(), rows(), threads, static_cast<double*>(snapshot_));
    } else {
      take_snapshot(sampled_.data(), rows(), threads, static_cast<float*>(snapshot_));
    }
    Py_RETURN_NONE;
  }

  // A list of the rows that have no gradient, or a tuple as above.
  PyObject* measure(PyObject* arguments) {
    int placed, threads, bins_in_full, words, count_bits;
    PyObject *applied, *sums, *maxima, *bins, *checksums;
    if (!PyArg_ParseTuple(
            arguments, "pipiiOOOOO", &placed, &threads, &bins_in_full, &words, &count_bits,
            &applied, &sums, &maxima, &bins, &checksums)) {
      return nullptr;
    }
    Buffers buffers;
    const double* const taken = buffers.read<double>(applied, rows());
    const RowOutputs out = {
        buffers.write<double>(sums, rows() * layout::sum_columns),
        buffers.write<float>(maxima, rows() * layout::max_columns),
        {bins == Py_None ? nullptr : buffers.write<double>(bins, rows() * words), words,
         std::ldexp(1.0, count_bits)},
        buffers.write<int64_t>(checksums, rows())};
    if (buffers.failed()) {
      return nullptr;
    }
    if (bins != Py_None && (words <= 0 || layout::bins % words != 0)) {
      PyErr_SetString(PyExc_ValueError, "bins cannot be packed into so many words");
      return nullptr;
    }
    // Before they are found: to keep one may run Python code.
    const auto kept = keep_whole();
    if (PyObject* const missing = find(true, placed)) {
      return missing;
    }
    if (PyErr_Occurred()) {
      return nullptr;
    }
    if (value_bytes_ == 8) {
      fill_sampled_rows(
          sampled_.data(), rows(), threads, static_cast<const double*>(snapshot_), half_ulp_, taken,
          out);
    } else {
      fill_sampled_rows(
          sampled_.data(), rows(), threads, static_cast<const float*>(snapshot_), half_ulp_, taken,
          out);
    }
    fill_gradient_runs(runs_.data(), rows(), threads, taken, out.sums, out.maxima);
    if (!whole_.empty()) {
      fill_in_full(threads, {taken, out.sums, out.maxima, bins_in_full ? out.bins : Bins{}});
    }
    return without_grad();
  }

  PyObject* write_offsets(PyObject* arguments) const {
    Py_ssize_t row;
    PyObject* slots;
    if (!PyArg_ParseTuple(arguments, "nO", &row, &slots)) {
      return nullptr;
    }
    if (row < 0 || row >= rows()) {
      PyErr_SetString(PyExc_IndexError, "there is no such row");
      return nullptr;
    }
    const SampledRow& sampled = sampled_[row];
    Buffers buffers;
    auto* const out = buffers.write<int64_t>(slots, layout::groups * sampled.width);
    if (buffers.failed()) {
      return nullptr;
    }
    write_slots(tables_.row(row), sampled.width, sampled.counts, out);
    Py_RETURN_NONE;
  }

  PyObject* bytes() const {
    const size_t row = sizeof(SampledRow) + sizeof(GradientRow) + 2 * sizeof(int64_t);
    return PyLong_FromLongLong(tables_.bytes() + rows() * static_cast<int64_t>(row));
  }

  PyObject* held() const {
    return places_;
  }

 private:
  bool fits(const int64_t* start, const int32_t* width, int64_t slots, int64_t runs) const {
    const int64_t rows = places_count(places_);
    for (int64_t row = 0; row < rows; ++row) {
      const int32_t* const used = counts_ + row * layout::groups;
      const bool counted = std::all_of(used, used + layout::groups, [&](int32_t count) {
        return count >= 0 && count <= width[row];
      });
      if (!counted || start[row] < 0 || start[row] + layout::groups * width[row] > slots ||
          run_first_[row] > run_first_[row + 1]) {
        return false;
      }
    }
    return run_first_[0] == 0 && run_first_[rows] == runs;
  }

  int64_t rows() const {
    return static_cast<int64_t>(sampled_.size());
  }

  // Finds all weights, and gradients if asked to. nullptr when every row can be read, or with an
  // exception set; else the numbers of the weights and gradients that Python has to place.
  PyObject* find(bool grads, bool placed) {
    if (!placed) {
      placed_.clear();  // of an observation that was interrupted
    }
    std::vector<int64_t> missing[2];
    find_tensors(false, missing[false]);
    if (grads) {
      find_tensors(true, missing[true]);
    }
    if (missing[false].empty() && missing[true].empty()) {
      return nullptr;
    }
    PyObject* const weights = list_of(missing[false]);
    PyObject* const gradients = weights == nullptr ? nullptr : list_of(missing[true]);
    if (gradients == nullptr) {
      Py_XDECREF(weights);
      return nullptr;
    }
    return Py_BuildValue("(NN)", weights, gradients);
  }

  void find_tensors(bool of_grad, std::vector<int64_t>& missing) {
    unread_.clear();
    const int64_t* place = read_places(places_, of_grad, unread_);
    auto next = unread_.begin();
    for (int64_t row = 0; row < rows(); ++row, place += place_columns) {
      const bool unread = next != unread_.end() && *next == row;
      next += unread;
      if (numels_[row] == 0) {
        put(of_grad, row, 0, 0);  // held by other ranks only
        continue;
      }
      if (!unread && place[place_contiguous]) {
        put(of_grad, row, place[place_address], place[place_code]);
        continue;
      }
      const auto found = placed_.find({row, of_grad});
      put(of_grad, row, 0, 0);
      if (found == placed_.end()) {
        missing.push_back(row);
      } else {
        put_placed(of_grad, row, found->second);
      }
    }
  }

  void put_placed(bool of_grad, int64_t row, const Placed& placed) {
    put(of_grad, row, placed.address, placed.code);
    dense_[2 * row + of_grad] = placed.dense;
    if (placed.tables == nullptr) {
      return;
    }
    SampledRow& sampled = sampled_[row];
    (of_grad ? sampled.grad_at : sampled.weight_at) = placed.tables->samples.row(0);
    if (of_grad && runs_[row].count > 0) {
      runs_[row].narrow = nullptr;
      runs_[row].wide = placed.tables->runs.data();
      runs_[row].codes = placed.tables->codes.data();
      runs_[row].count = static_cast<int64_t>(placed.tables->runs.size());
    }
  }

  // Sets where a tensor is, for the offsets of a contiguous one.
  void put(bool of_grad, int64_t row, int64_t address, int64_t code) {
    SampledRow& sampled = sampled_[row];
    dense_[2 * row + of_grad] = address;
    if (!of_grad) {
      sampled.weight = address;
      sampled.weight_code = std::max<int64_t>(code, 0);
      sampled.weight_at = tables_.row(row);
      sampled.grad = 0;  // until it is found, too
      return;
    }
    sampled.grad = address;
    sampled.grad_code = std::max<int64_t>(code, 0);
    sampled.grad_at = tables_.row(row);
    GradientRow& runs = runs_[row];
    const int64_t begin = run_first_[row];
    runs.address = address;
    runs.code = sampled.grad_code;
    runs.count = run_first_[row + 1] - begin;
    runs.narrow = narrow_runs_ == nullptr ? nullptr : narrow_runs_ + begin;
    runs.wide = wide_runs_ == nullptr ? nullptr : wide_runs_ + begin;
    runs.codes = run_codes_ + begin;
  }

  // nullptr with an exception set when the arrays do not fit.
  std::unique_ptr<StridedTables> strided_tables(
      bool of_grad, int64_t row, int offset_bytes, PyObject* slots, PyObject* run_offsets,
      PyObject* run_codes) const {
    const SampledRow& sampled = sampled_[row];
    const int64_t width = sampled.width * layout::groups;
    Buffers buffers;
    auto tables = std::make_unique<StridedTables>();
    const auto* const narrow = offset_bytes == 8 ? nullptr : buffers.read<int32_t>(slots, width);
    const auto* const wide = offset_bytes == 8 ? buffers.read<int64_t>(slots, width) : nullptr;
    const bool has_runs = of_grad && run_first_[row + 1] > run_first_[row];
    const Py_ssize_t count = has_runs ? PyObject_Length(run_offsets) : 0;
    if (count < 0) {
      return nullptr;
    }
    const auto* const offsets = has_runs ? buffers.read<int64_t>(run_offsets, count) : nullptr;
    const auto* const codes = has_runs ? buffers.read<uint8_t>(run_codes, count) : nullptr;
    if (buffers.failed()) {
      return nullptr;
    }
    tables->samples.add(
        wide != nullptr ? entries_from_slots(wide, sampled.width, sampled.counts)
                        : entries_from_slots(narrow, sampled.width, sampled.counts));
    tables->samples.finish();
    tables->runs.assign(offsets, offsets + count);
    tables->codes.assign(codes, codes + count);
    return tables;
  }

  std::shared_ptr<void> keep_whole() const {
    std::vector<int64_t> weights, grads;
    for (const int64_t row : whole_) {
      if (wanted_[row] & whole_weight) {
        weights.push_back(row);
      }
      if (wanted_[row] & whole_grad) {
        grads.push_back(row);
      }
    }
    return keep_tensors(places_, weights, grads);
  }

  void fill_in_full(int threads, const ExactOutputs& out) const {
    std::vector<WholeRow> whole;
    for (const int64_t row : whole_) {
      const SampledRow& at = sampled_[row];
      whole.push_back(
          {row, numels_[row], wanted_[row], dense_[2 * row], at.weight_code, dense_[2 * row + 1],
           at.grad_code});
    }
    const WithoutLock lock;
    fill_exact_columns(whole, threads, out);
  }

  PyObject* without_grad() const {
    std::vector<int64_t> rows;
    for (size_t row = 0; row < sampled_.size(); ++row) {
      if (sampled_[row].grad == 0) {
        rows.push_back(static_cast<int64_t>(row));
      }
    }
    return list_of(rows);
  }

  PyObject* places_ = nullptr;
  Buffers held_;  // keeps the arrays below valid
  void* snapshot_ = nullptr;
  int value_bytes_ = 4;
  const int32_t* counts_ = nullptr;
  const double* half_ulp_ = nullptr;
  const int64_t* run_first_ = nullptr;
  const int32_t* narrow_runs_ = nullptr;
  const int64_t* wide_runs_ = nullptr;
  const uint8_t* run_codes_ = nullptr;
  const int64_t* numels_ = nullptr;
  const uint8_t* wanted_ = nullptr;
  std::vector<int64_t> whole_;  // rows that are read in full
  TablePool tables_;
  std::map<std::pair<int64_t, bool>, Placed> placed_;  // by row, and whether it is the gradient
  std::vector<SampledRow> sampled_;
  std::vector<GradientRow> runs_;
  std::vector<int64_t> dense_;  // by row: address of the weight, and of the gradient, for full passes
  std::vector<int64_t> unread_;
};

struct RowReaderObject {
  PyObject_HEAD
  RowReader* reader;
};

RowReader& reader_of(PyObject* self) {
  return *reinterpret_cast<RowReaderObject*>(self)->reader;
}

PyObject* place(PyObject* self, PyObject* arguments) {
  return guarded([&] { return reader_of(self).place(arguments); });
}

PyObject* snapshot(PyObject* self, PyObject* arguments) {
  return guarded([&] { return reader_of(self).snapshot(arguments); });
}

PyObject* measure(PyObject* self, PyObject* arguments) {
  return guarded([&] { return reader_of(self).measure(arguments); });
}

PyObject* write_offsets(PyObject* self, PyObject* arguments) {
  return guarded([&] { return reader_of(self).write_offsets(arguments); });
}

PyObject* table_bytes(PyObject* self, PyObject*) {
  return guarded([&] { return reader_of(self).bytes(); });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reader_of(self).held());
  return 0;
}

void deallocate(PyObject* self) {
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<RowReaderObject*>(self)->reader;
  PyObject_GC_Del(self);
}

PyMethodDef methods[] = {
    {"place", place, METH_VARARGS, "Place a tensor that was not found."},
    {"snapshot", snapshot, METH_VARARGS, "Keep the sampled weights."},
    {"measure", measure, METH_VARARGS, "Fill every column of every row."},
    {"write_offsets", write_offsets, METH_VARARGS, "Write the offsets of a row's slots."},
    {"table_bytes", table_bytes, METH_NOARGS, "Bytes of the tables made here."},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject reader_type = {
    .ob_base = PyVarObject_HEAD_INIT(nullptr, 0)  // the macro ends with a comma
    .tp_name = "distmon_native.RowReader",
    .tp_basicsize = sizeof(RowReaderObject),
    .tp_dealloc = deallocate,
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_doc = "Reads the samples of all parameters; made by row_reader.",
    .tp_traverse = traverse,
    .tp_methods = methods,
};

PyObject* new_reader(PyObject* arguments) {
  auto reader = std::make_unique<RowReader>();
  if (PyType_Ready(&reader_type) < 0 || !reader->init(arguments)) {
    return nullptr;
  }
  auto* const self = PyObject_GC_New(RowReaderObject, &reader_type);
  if (self != nullptr) {
    self->reader = reader.release();
    PyObject_GC_Track(self);
  }
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

PyObject* row_reader(PyObject*, PyObject* arguments) {
  return guarded([&] { return new_reader(arguments); });
}
