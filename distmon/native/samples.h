// The sampled elements of tensors, read by the tables of a sample plan; see
// csrc_triton/tables.py, whose tables these are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "element_values.h"
#include "row_layout.h"
#include "running_totals.h"

// Only sampled_rows.cpp includes this file. Internal linkage lets the compiler inline what is called
// once: 3% of the time of an observation.
namespace {

// Rows of the plan's tables, as the caller's arrays hold them.
struct Tables {
  const int64_t* addresses;
  const int64_t* starts;
  const int32_t* widths;
  const int32_t* group_counts;
  int offset_bytes;

  const int64_t* address_row(int64_t row) const {
    return addresses + row * layout::address_columns;
  }
};

// A group of samples is taken in by pieces of this many; the default sample has 128 in a group.
constexpr int piece = 128;
constexpr int run = layout::run;
static_assert(piece % run == 0 && run % lanes == 0);

// Whether a run lies in one piece; not so where a shard ends in it, or in a transposed tensor.
template <typename Offset>
bool is_whole(const Offset* offsets) {
  Offset elsewhere = 0;
  for (Offset i = 0; i < run; ++i) {
    elsewhere |= (offsets[i] - offsets[0]) ^ i;
  }
  return elsewhere == 0;
}

template <typename Offset, typename Element, typename Value>
void gather(const Offset* offsets, int count, Element element, Value* out) {
  int i = 0;
  for (; i + run <= count; i += run) {
    if (is_whole(offsets + i)) {
      const int64_t first = offsets[i];
      for (int k = 0; k < run; ++k) {
        out[i + k] = static_cast<Value>(element(first + k));
      }
    } else {
      for (int k = 0; k < run; ++k) {
        out[i + k] = static_cast<Value>(element(offsets[i + k]));
      }
    }
  }
  for (; i < count; ++i) {
    out[i] = static_cast<Value>(element(offsets[i]));
  }
}

// The sampled elements of one tensor.
class Samples {
 public:
  Samples(int64_t address, int64_t code, int64_t offsets, int offset_bytes, int64_t slots)
      : address_(address),
        code_(code),
        offsets_(offsets),
        wide_(offset_bytes == 8),
        slots_(slots),
        in_runs_(begins_with_run()) {}

  // `count` elements from `slot` on, then `padding` up to a multiple of lanes.
  template <typename Value>
  void read(int64_t slot, int count, Value padding, Value* out) const {
    ask_for_piece(slot + piece);
    with_reader(address_, code_, [&](auto element) {
      if (wide_) {
        gather(reinterpret_cast<const int64_t*>(offsets_) + slot, count, element, out);
      } else {
        gather(reinterpret_cast<const int32_t*>(offsets_) + slot, count, element, out);
      }
    });
    for (int i = count; i % lanes; ++i) {
      out[i] = padding;
    }
  }

  // Samples lie all over memory: most of the time is spent on waiting for them. Inlined, because
  // compilers drop a call that does nothing else.
  __attribute__((always_inline)) void ask_for_piece(int64_t slot) const {
    const int64_t end = std::min(slot + piece, slots_);
    const int step = in_runs_ ? run : 1;
    for (; slot < end; slot += step) {
      const int64_t offset = wide_ ? reinterpret_cast<const int64_t*>(offsets_)[slot]
                                   : reinterpret_cast<const int32_t*>(offsets_)[slot];
      __builtin_prefetch(reinterpret_cast<const char*>(address_) + offset * bytes_of(code_));
    }
  }

 private:
  bool begins_with_run() const {
    if (slots_ < run) {
      return true;
    }
    return wide_ ? is_whole(reinterpret_cast<const int64_t*>(offsets_))
                 : is_whole(reinterpret_cast<const int32_t*>(offsets_));
  }

  int64_t address_, code_, offsets_;
  bool wide_;
  int64_t slots_;
  bool in_runs_;  // of tall matrices single elements are read
};

Samples weights_of(const Tables& tables, int64_t row) {
  const int64_t* place = tables.address_row(row);
  return Samples(
      place[layout::weight], place[layout::weight_code], place[layout::weight_offsets],
      tables.offset_bytes, layout::groups * tables.widths[row]);
}

Samples grads_of(const Tables& tables, int64_t row) {
  const int64_t* place = tables.address_row(row);
  return Samples(
      place[layout::grad], place[layout::grad_code], place[layout::grad_offsets],
      tables.offset_bytes, layout::groups * tables.widths[row]);
}

// Calls `visit(slot, count)` for every piece of used slots, and `next(group)` after each group.
template <typename Visit, typename Next>
void for_each_piece(int64_t width, const int32_t* counts, Visit visit, Next next) {
  for (int group = 0; group < layout::groups; ++group) {
    for (int first = 0; first < counts[group]; first += piece) {
      visit(group * width + first, std::min(piece, counts[group] - first));
    }
    next(group);
  }
}

}  // namespace
