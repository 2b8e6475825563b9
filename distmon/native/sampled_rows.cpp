// All sampled columns of all parameters in one pass.

#include "sampled_rows.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "element_values.h"
#include "row_layout.h"
#include "running_totals.h"
#include "threads.h"

namespace {

// A group of samples is taken in by pieces of this many; the default sample has 128 in a group.
constexpr int piece = 128;
static_assert(piece % run == 0 && piece % lanes == 0);

// Entries that are asked for early: samples lie all over memory, so most of the time is spent on
// waiting for them. It made no difference whether 16 or 256.
constexpr int64_t ahead = 64;

// Asks for the memory of the samples in the order in which they are read, over the ends of rows.
class Prefetcher {
 public:
  Prefetcher(const SampledRow* rows, int64_t count, bool grads)
      : rows_(rows), count_(count), grads_(grads) {
    advance(ahead);
  }

  void advance(int64_t entries) {
    while (entries > 0 && row_ < count_) {
      const SampledRow& row = rows_[row_];
      const int64_t here = std::min(entries, row.weight_at.entries - entry_);
      ask(row.weight, row.weight_code, row.weight_at, here);
      if (grads_ && row.grad != 0) {
        ask(row.grad, row.grad_code, row.grad_at, here);
      }
      entries -= here;
      entry_ += here;
      if (entry_ == row.weight_at.entries) {
        entry_ = 0;
        ++row_;
      }
    }
  }

 private:
  // Inlined, because compilers drop a call that does nothing else.
  __attribute__((always_inline)) void ask(
      int64_t address, int64_t code, const SampleTable& table, int64_t entries) const {
    const auto* const memory = reinterpret_cast<const char*>(address);
    const int64_t size = bytes_of(code), end = std::min(entry_ + entries, table.entries);
    for (int64_t i = entry_; i < end; ++i) {
      __builtin_prefetch(memory + table[i] * size);
    }
  }

  const SampledRow* rows_;
  int64_t count_;
  bool grads_;
  int64_t row_ = 0, entry_ = 0;
};

// Reads `count` elements from `entry` on, then `padding` up to a multiple of lanes.
template <typename Value>
void read_samples(
    int64_t address, int64_t code, const SampleTable& table, int64_t entry, int count,
    Value padding, Value* out) {
  with_reader(address, code, [&](auto element) {
    if (!table.in_runs) {
      for (int i = 0; i < count; ++i) {
        out[i] = static_cast<Value>(element(table[entry + i]));
      }
      return;
    }
    int i = 0;
    for (; i + run <= count; i += run, ++entry) {
      const int64_t first = table[entry];
      for (int k = 0; k < run; ++k) {
        out[i + k] = static_cast<Value>(element(first + k));
      }
    }
    for (int k = 0; i + k < count; ++k) {
      out[i + k] = static_cast<Value>(element(table[entry] + k));
    }
  });
  for (int i = count; i % lanes; ++i) {
    out[i] = padding;
  }
}

// A piece of the used slots of one group.
struct Piece {
  int64_t slot;          // in the row of the snapshot
  int64_t group, first;  // the same slot within its group
  int64_t weight_entry, grad_entry;
  int count;
};

// Calls `visit(piece)` for every piece, and `next(group)` after each group.
template <typename Visit, typename Next>
void for_each_piece(const SampledRow& row, Visit visit, Next next) {
  int64_t weight_entry = 0, grad_entry = 0;
  for (int group = 0; group < layout::groups; ++group) {
    const int64_t used = row.counts[group];
    for (int64_t first = 0; first < used; first += piece) {
      visit(Piece{
          group * row.width + first, group, first,
          weight_entry + row.weight_at.entries_of(first),
          grad_entry + row.grad_at.entries_of(first),
          static_cast<int>(std::min<int64_t>(piece, used - first))});
    }
    weight_entry += row.weight_at.entries_of(used);
    grad_entry += row.grad_at.entries_of(used);
    next(group);
  }
}

// What one step changed: its sums, and what of it rounding may have swallowed.
template <typename Value>
struct Updates {
  using Int = IntOf<Value>;
  Totals<Value> totals;
  Vector<Int> lost = {};
  LaneSums bound;

  // `moved` may hold anything; `w` and `g` have 0 where they were not finite.
  void add(Value* moved, const Value* w, const Value* g, int count) {
    Vector<Int> now_lost = {};
    for (int i = 0; i < count; i += lanes) {
      const Vector<Int> bits = (Vector<Int>)block_at(moved + i);
      const Vector<Int> finite = (bits & ~Bits<Value>::sign) < Bits<Value>::exponent;
      block_at(moved + i) = (Vector<Value>)(bits & finite);
      now_lost -= gone(moved + i, w + i, g + i);
    }
    if (sum_of_lanes<Int>(now_lost) > 0) {  // hardly ever, in fp32
      lost += now_lost;
      add_bound(moved, w, g, count);
    }
    totals.add(moved, count);
  }

 private:
  // -1 where a weight did not move although it has a gradient.
  static Vector<Int> gone(const Value* moved, const Value* w, const Value* g) {
    return (block_at(g) != 0) & (block_at(w) != 0) & (block_at(moved) == 0);
  }

  void add_bound(const Value* moved, const Value* w, const Value* g, int count) {
    for (int i = 0; i < count; i += lanes) {
      // The exponent bits alone are the power of two at or below |w|.
      Value power[lanes];
      block_at(power) = (Vector<Value>)(
          (Vector<Int>)block_at(w + i) & Bits<Value>::exponent & gone(moved + i, w + i, g + i));
      bound.add_squares(power);
    }
  }
};

// A fixed odd number for each slot of a row; see `odd_multipliers` in torch_probe.py.
uint64_t odd_multiplier(int64_t group, int64_t slot) {
  const uint64_t z = 0x9E3779B97F4A7C15 * static_cast<uint64_t>(slot * layout::groups + group + 1);
  return ((z ^ (z >> 29)) * 0xBF58476D1CE4E5B9) | 1;
}

template <typename Value>
uint64_t checksum_of(const Value* x, int64_t group, int64_t first, int count) {
  uint64_t sum = 0;
  for (int i = 0; i < count; ++i) {
    const auto bits = static_cast<int64_t>(bit_cast<IntOf<Value>>(x[i]));
    sum += static_cast<uint64_t>(bits) * odd_multiplier(group, first + i);
  }
  return sum;
}

// Everything that is added up over the samples of one parameter.
template <typename Value>
struct SampleTotals {
  Totals<Value> weights, grads;
  Updates<Value> updates;
  Histogram<Value, int32_t> histogram;  // a sample has fewer than 2^31 elements
  int64_t used = 0;    // samples
  int64_t padded = 0;  // NaNs that only fill up vectors
  uint64_t checksum = 0;

  int64_t nonfinite_grads() const {
    return grads.nan() + grads.inf();
  }
};

// How much of a row counts: 1 or 0 where its step was applied or not.
struct Factors {
  double updates;
  double grads;  // 0 without a gradient, too
  double half_ulp;
};

// Writes the columns other than those of single groups, which `sums` has already.
template <typename Value>
void write_sums(const SampleTotals<Value>& totals, const Factors& factors, double* sums) {
  const auto& w = totals.weights;
  const auto& g = totals.grads;
  const auto& updates = totals.updates;
  const auto used = static_cast<double>(totals.used);
  sums[layout::w_count] = used;
  sums[layout::w_sum] = w.total();
  sums[layout::w_nan] = static_cast<double>(w.nan() - totals.padded);
  sums[layout::w_inf] = static_cast<double>(w.inf());
  sums[layout::u_count] = used * factors.updates;
  sums[layout::u_sum] = times(factors.updates, updates.totals.total());
  const double counted = factors.grads;
  if (counted > 0) {
    const int64_t finite = totals.used + totals.padded - totals.nonfinite_grads();
    sums[layout::g_count] = used * counted;
    sums[layout::g_sum] = g.total() * counted;
    sums[layout::g_nan] = static_cast<double>(g.nan() - totals.padded) * counted;
    sums[layout::g_inf] = static_cast<double>(g.inf()) * counted;
    sums[layout::g_zero] = static_cast<double>(g.zero()) * counted;
    sums[layout::u_graded] = static_cast<double>(finite - g.zero()) * counted;
    sums[layout::u_lost] = static_cast<double>(sum_of_lanes<IntOf<Value>>(updates.lost)) * counted;
    sums[layout::u_lost_bound_sq] =
        updates.bound.total() * (factors.half_ulp * factors.half_ulp) * counted;
  }
}

template <typename Value>
void write_maxima(const SampleTotals<Value>& totals, const Factors& factors, float* maxima) {
  constexpr float lowest = Totals<float>::lowest;
  maxima[layout::w_absmax] = totals.weights.largest();
  maxima[layout::g_max] = factors.grads > 0 ? totals.grads.highest() : lowest;
  maxima[layout::g_negmin] = factors.grads > 0 ? totals.grads.lowest_negated() : lowest;
  maxima[layout::u_absmax] = factors.updates > 0 ? totals.updates.totals.largest() : lowest;
}

template <typename Value>
void fill_row(
    const SampledRow& row, const Value* kept, double half_ulp, double taken, const RowOutputs& out,
    Prefetcher& prefetcher) {
  const Factors factors = {taken, row.grad != 0 ? taken : 0.0, half_ulp};
  double* const sums = out.sums;
  std::fill_n(sums, layout::sum_columns, 0.0);
  constexpr Value nan = std::numeric_limits<Value>::quiet_NaN();
  SampleTotals<Value> totals;
  for_each_piece(
      row,
      [&](const Piece& at) {
        Value w[piece], g[piece], moved[piece];
        const int count = at.count, full = (count + lanes - 1) / lanes * lanes;
        prefetcher.advance(row.weight_at.entries_of(count));
        read_samples(row.weight, row.weight_code, row.weight_at, at.weight_entry, count, nan, w);
        totals.checksum += checksum_of(w, at.group, at.first, count);
        for (int i = 0; i < count; ++i) {
          moved[i] = w[i] - kept[at.slot + i];
        }
        std::fill(moved + count, moved + full, Value(0));
        totals.weights.add(w, full);
        if (factors.grads > 0) {
          read_samples(row.grad, row.grad_code, row.grad_at, at.grad_entry, count, nan, g);
          totals.grads.add(g, full);
          if (out.bins.words != nullptr) {
            totals.histogram.add(g, full);
          }
        } else {
          std::fill_n(g, full, Value(0));
        }
        totals.updates.add(moved, w, g, full);
        totals.used += count;
        totals.padded += full - count;
      },
      [&](int group) {
        sums[layout::w_sq + group] = totals.weights.take_squares();
        sums[layout::g_sq + group] = times(factors.grads, totals.grads.take_squares());
        sums[layout::u_sq + group] = times(taken, totals.updates.totals.take_squares());
      });
  write_sums(totals, factors, sums);
  write_maxima(totals, factors, out.maxima);
  if (out.bins.words != nullptr) {
    totals.histogram.write(factors.grads, totals.nonfinite_grads(), out.bins);
  }
  *out.checksums = static_cast<int64_t>(totals.checksum);
}

// Calls `work(first, end)` for rows that follow each other, on so many threads. A share has about so
// many entries: few enough for all threads to end together, and enough for the first of them, which
// nobody has asked for early, to count little.
template <typename Work>
void share_out_rows(const SampledRow* rows, int64_t count, int threads, const Work& work) {
  constexpr int64_t share = 1024;
  std::vector<int64_t> firsts = {0};
  int64_t entries = 0;
  for (int64_t row = 0; row < count; ++row) {
    if (entries >= share) {
      firsts.push_back(row);
      entries = 0;
    }
    entries += rows[row].weight_at.entries;
  }
  const auto shares = static_cast<int64_t>(firsts.size());
  firsts.push_back(count);
  share_out_short(shares, threads, [&](int64_t i) { work(firsts[i], firsts[i + 1]); });
}

template <typename Value>
void keep_row(const SampledRow& row, Value* kept, Prefetcher& prefetcher) {
  for_each_piece(
      row,
      [&](const Piece& at) {
        Value w[piece];
        prefetcher.advance(row.weight_at.entries_of(at.count));
        read_samples(
            row.weight, row.weight_code, row.weight_at, at.weight_entry, at.count, Value(0), w);
        std::copy_n(w, at.count, kept + at.slot);  // unused slots are never read
      },
      [](int) {});
}

}  // namespace

template <typename Value>
void take_snapshot(const SampledRow* rows, int64_t count, int threads, Value* snapshot) {
  share_out_rows(rows, count, threads, [&](int64_t first, int64_t end) {
    Prefetcher prefetcher(rows + first, end - first, false);
    for (int64_t i = first; i < end; ++i) {
      keep_row(rows[i], snapshot + rows[i].start, prefetcher);
    }
  });
}

template <typename Value>
void fill_sampled_rows(
    const SampledRow* rows, int64_t count, int threads, const Value* snapshot,
    const double* half_ulp, const double* applied, const RowOutputs& out) {
  share_out_rows(rows, count, threads, [&](int64_t first, int64_t end) {
    Prefetcher prefetcher(rows + first, end - first, true);
    for (int64_t i = first; i < end; ++i) {
      const RowOutputs here = {
          out.sums + i * layout::sum_columns, out.maxima + i * layout::max_columns,
          out.bins.of_row(i), out.checksums + i};
      fill_row(
          rows[i], snapshot + rows[i].start, half_ulp[i], applied[i], here, prefetcher);
    }
  });
}

template void take_snapshot(const SampledRow*, int64_t, int, float*);
template void take_snapshot(const SampledRow*, int64_t, int, double*);
template void fill_sampled_rows(
    const SampledRow*, int64_t, int, const float*, const double*, const double*, const RowOutputs&);
template void fill_sampled_rows(
    const SampledRow*, int64_t, int, const double*, const double*, const double*,
    const RowOutputs&);
