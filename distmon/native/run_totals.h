// What the runs of one gradient add up to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "element_values.h"
#include "row_layout.h"
#include "running_totals.h"
#include "sample_table.h"

namespace {


constexpr int half = run / 2;
static_assert(run == layout::groups);

// Vectors of a run. Not `VectorOf`, which may alias other memory: the compiler then writes every sum
// to memory after every run, which takes twenty times as long.
template <typename Item, int items>
struct Lanes {
  typedef Item type __attribute__((vector_size(items * sizeof(Item))));
};

template <typename Value>
class RunTotals {
 public:
  using Int = IntOf<Value>;
  using Numbers = typename Lanes<Value, run>::type;
  using Ints = typename Lanes<Int, run>::type;
  using Narrow = typename Lanes<Value, half>::type;
  using Wide = typename Lanes<double, half>::type;

  // Takes in `count` runs; `read(i, numbers)` reads run i, and `codes` are those of GradientRuns.
  template <typename Read>
  void add(int64_t count, const uint8_t* codes, const Read& read) {
    Wide low_sum = {}, high_sum = {};
    Ints zeros = {};
    Numbers high = none - Numbers{}, low = none - Numbers{};
    int64_t taken = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int length = (codes[i] & (run - 1)) + 1;
      Numbers x;
      read(i, length, x);
      const Ints bits = (Ints)x & Bits<Value>::exponent;
      if (__builtin_expect(length < run || any(bits == Bits<Value>::exponent), 0)) {
        add_singly(x, length, codes[i] >> 3);
        continue;
      }
      Narrow halves[2];
      std::memcpy(halves, &x, sizeof(x));
      const Wide first = __builtin_convertvector(halves[0], Wide);
      const Wide second = __builtin_convertvector(halves[1], Wide);
      low_sum += first;
      high_sum += second;
      Wide* const squares = squares_[std::min<int>(codes[i] >> 3, layout::by_lane)];
      squares[0] += first * first;
      squares[1] += second * second;
      zeros -= x == 0;
      high = x > high ? x : high;
      low = -x > low ? -x : low;
      ++taken;
    }
    count_ += taken * run;
    for (int i = 0; i < run; ++i) {
      sum_ += i < half ? low_sum[i] : high_sum[i - half];
      zero_ += zeros[i];
      high_ = std::max<Value>(high_, high[i]);
      low_ = std::max<Value>(low_, low[i]);
    }
  }

  // Takes in what another has taken in after this one.
  void add(const RunTotals& other) {
    for (int group = 0; group <= layout::by_lane; ++group) {
      squares_[group][0] += other.squares_[group][0];
      squares_[group][1] += other.squares_[group][1];
    }
    sum_ += other.sum_;
    high_ = std::max(high_, other.high_);
    low_ = std::max(low_, other.low_);
    count_ += other.count_;
    nan_ += other.nan_;
    inf_ += other.inf_;
    zero_ += other.zero_;
  }

  void write(double applied, double* sums, float* maxima) const {
    constexpr float lowest = -std::numeric_limits<float>::infinity();
    sums[layout::g_count] = static_cast<double>(count_) * applied;
    sums[layout::g_sum] = times(applied, sum_);
    sums[layout::g_nan] = static_cast<double>(nan_) * applied;
    sums[layout::g_inf] = static_cast<double>(inf_) * applied;
    sums[layout::g_zero] = static_cast<double>(zero_) * applied;
    for (int group = 0; group < layout::groups; ++group) {
      double squares = squares_[layout::by_lane][group / half][group % half];
      for (int i = 0; i < run; ++i) {
        squares += squares_[group][i / half][i % half];
      }
      sums[layout::g_sq + group] = times(applied, squares);
    }
    maxima[layout::g_max] = applied > 0 ? static_cast<float>(high_) : lowest;
    maxima[layout::g_negmin] = applied > 0 ? static_cast<float>(low_) : lowest;
  }

 private:
  static constexpr Value none = -std::numeric_limits<Value>::infinity();

  static bool any(const Ints& found) {
    uint64_t words[sizeof(Ints) / 8];
    std::memcpy(words, &found, sizeof(found));
    uint64_t all = 0;
    for (const uint64_t word : words) {
      all |= word;
    }
    return all != 0;
  }

  // Runs that are cut, and those with a number that is not finite.
  __attribute__((noinline)) void add_singly(const Numbers& x, int length, int code) {
    for (int i = 0; i < length; ++i) {
      const Value value = x[i];
      count_ += 1;
      if (!std::isfinite(value)) {
        (std::isnan(value) ? nan_ : inf_) += 1;
        continue;
      }
      const double wide = static_cast<double>(value);
      sum_ += wide;
      zero_ += value == 0;
      high_ = std::max<Value>(high_, value);
      low_ = std::max<Value>(low_, -value);
      const bool by_lane = code >= layout::by_lane;
      const int lane = by_lane ? code - layout::by_lane + i : i;
      squares_[by_lane ? layout::by_lane : code][lane / half][lane % half] += wide * wide;
    }
  }

  Wide squares_[layout::by_lane + 1][2] = {};  // the last line has a group in each lane
  double sum_ = 0;
  Value high_ = none, low_ = none;
  int64_t count_ = 0, nan_ = 0, inf_ = 0, zero_ = 0;
};

}  // namespace
