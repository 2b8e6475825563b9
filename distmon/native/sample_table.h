// Where the samples of a tensor lie: one offset for each run of neighbors, or one for each element
// where a row has single elements, or runs that a shard or strides have cut.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "row_layout.h"

constexpr int run = layout::run;

// The table of one row: entries of its groups, one group after the other, used ones only.
struct SampleTable {
  const int32_t* narrow = nullptr;  // entries below 2**31
  const int64_t* wide = nullptr;    // nullptr, or instead of `narrow`
  int64_t entries = 0;
  bool in_runs = true;

  int64_t operator[](int64_t entry) const {
    return wide != nullptr ? wide[entry] : narrow[entry];
  }

  // Entries that `count` used slots of a group have.
  int64_t entries_of(int64_t count) const {
    return in_runs ? (count + run - 1) / run : count;
  }
};

// Entries of a row, made from an offset for each slot.
struct Entries {
  std::vector<int64_t> offsets;
  bool in_runs = true;
};

// Only the last run of a group may be shorter: it is the last of the parameter.
template <typename Offset>
bool groups_are_runs(const Offset* slots, int64_t width, const int32_t* counts) {
  for (int group = 0; group < layout::groups; ++group) {
    const Offset* const at = slots + group * width;
    for (int64_t i = 0; i < counts[group]; ++i) {
      if (i % run && at[i] != at[i - 1] + 1) {
        return false;
      }
    }
  }
  return true;
}

template <typename Offset>
Entries entries_from_slots(const Offset* slots, int64_t width, const int32_t* counts) {
  Entries entries;
  entries.in_runs = groups_are_runs(slots, width, counts);
  const int step = entries.in_runs ? run : 1;
  for (int group = 0; group < layout::groups; ++group) {
    for (int64_t i = 0; i < counts[group]; i += step) {
      entries.offsets.push_back(slots[group * width + i]);
    }
  }
  return entries;
}

// The opposite: writes the offset of each used slot.
inline void write_slots(
    const SampleTable& table, int64_t width, const int32_t* counts, int64_t* slots) {
  int64_t entry = 0;
  for (int group = 0; group < layout::groups; ++group) {
    for (int64_t i = 0; i < counts[group]; ++i) {
      slots[group * width + i] = table.in_runs ? table[entry + i / run] + i % run : table[entry + i];
    }
    entry += table.entries_of(counts[group]);
  }
}

// The entries of many rows in one piece of memory.
class TablePool {
 public:
  void add(const Entries& row) {
    begins_.push_back(static_cast<int64_t>(all_.size()));
    runs_.push_back(row.in_runs);
    all_.insert(all_.end(), row.offsets.begin(), row.offsets.end());
  }

  // Call it once, after the last `add`.
  void finish() {
    begins_.push_back(static_cast<int64_t>(all_.size()));
    if (all_.empty() || *std::max_element(all_.begin(), all_.end()) + run < INT32_MAX) {
      narrow_.assign(all_.begin(), all_.end());
      all_ = std::vector<int64_t>();
    }
    all_.shrink_to_fit();
  }

  SampleTable row(int64_t row) const {
    SampleTable table;
    const int64_t begin = begins_[row];
    table.entries = begins_[row + 1] - begin;
    table.in_runs = runs_[row];
    if (all_.empty()) {
      table.narrow = narrow_.data() + begin;
    } else {
      table.wide = all_.data() + begin;
    }
    return table;
  }

  int64_t bytes() const {
    return static_cast<int64_t>(
        narrow_.capacity() * sizeof(int32_t) + all_.capacity() * sizeof(int64_t) +
        begins_.capacity() * sizeof(int64_t));
  }

 private:
  std::vector<int64_t> begins_;
  std::vector<bool> runs_;
  std::vector<int64_t> all_;  // empty when `narrow_` has them
  std::vector<int32_t> narrow_;
};
