// Sums, extremes and counts of a stream of numbers, as the columns of a row define them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "element_values.h"
#include "row_layout.h"

// Numbers are taken in by so many at once, each lane with sums of its own, in vectors of a size that
// every processor has: left to itself the compiler makes none and needs five times as long.
constexpr int lanes = 4;

// `aligned(...)`: one may lie anywhere in an array. `may_alias`: the array is of its items.
template <typename Item>
struct VectorOf {
  typedef Item type
      __attribute__((vector_size(lanes * sizeof(Item)), aligned(sizeof(Item)), may_alias));
};
template <typename Item>
using Vector = typename VectorOf<Item>::type;
using Doubles = Vector<double>;

template <typename Value>
struct Bits;
template <>
struct Bits<float> {
  using Int = int32_t;
  static constexpr Int sign = INT32_MIN, exponent = 0x7F800000;
};
template <>
struct Bits<double> {
  using Int = int64_t;
  static constexpr Int sign = INT64_MIN, exponent = 0x7FF0000000000000;
};
template <typename Value>
using IntOf = typename Bits<Value>::Int;

template <typename Value>
const Vector<Value>& block_at(const Value* x) {
  return *reinterpret_cast<const Vector<Value>*>(x);
}

template <typename Value>
Vector<Value>& block_at(Value* x) {
  return *reinterpret_cast<Vector<Value>*>(x);
}

// In a fixed order, so that the same input gives the same bits.
template <typename Total, typename Item>
Total sum_of_lanes(const Vector<Item>& vector) {
  Total total = 0;
  for (int i = 0; i < lanes; ++i) {
    total += vector[i];
  }
  return total;
}

template <typename Value>
struct Totals {
  using Int = IntOf<Value>;
  static constexpr Value lowest = -std::numeric_limits<Value>::infinity();

  Doubles sum = {};
  Doubles squares = {};
  Vector<Int> nans = {};
  Vector<Int> infs = {};
  Vector<Int> zeros = {};
  Vector<Value> high = lowest - Vector<Value>{};  // largest finite number, and largest negated
  Vector<Value> low = lowest - Vector<Value>{};

  // Takes in `count` numbers, a multiple of lanes, and puts 0 in the place of what is not finite.
  void add(Value* x, int count) {
    Totals now = *this;  // in registers
    for (int i = 0; i < count; i += lanes) {
      now.add(block_at(x + i));
    }
    *this = now;
  }

  // The sum of squares since the last call.
  double take_squares() {
    const double taken = sum_of_lanes<double, double>(squares);
    squares = Doubles{};
    return taken;
  }

  double total() const {
    return sum_of_lanes<double, double>(sum);
  }

  int64_t nan() const {
    return sum_of_lanes<int64_t, Int>(nans);
  }

  int64_t inf() const {
    return sum_of_lanes<int64_t, Int>(infs);
  }

  int64_t zero() const {
    return sum_of_lanes<int64_t, Int>(zeros);
  }

  // -inf when nothing was finite.
  float highest() const {
    return highest_lane(high);
  }

  float lowest_negated() const {
    return highest_lane(low);
  }

  float largest() const {
    return std::max(highest(), lowest_negated());
  }

 private:
  void add(Vector<Value>& x) {
    const Vector<Int> bits = (Vector<Int>)x;
    const Vector<Int> magnitude = bits & ~Bits<Value>::sign;
    const Vector<Int> finite = magnitude < Bits<Value>::exponent;
    // A comparison gives -1 where it holds.
    nans -= magnitude > Bits<Value>::exponent;
    infs -= magnitude == Bits<Value>::exponent;
    zeros -= magnitude == 0;
    const Vector<Int> otherwise = bit_cast<Int>(lowest) & ~finite;
    keep_higher(high, (bits & finite) | otherwise);
    keep_higher(low, ((bits ^ Bits<Value>::sign) & finite) | otherwise);
    x = (Vector<Value>)(bits & finite);
    const Doubles wide = __builtin_convertvector(x, Doubles);
    sum += wide;
    squares += wide * wide;
  }

  static void keep_higher(Vector<Value>& kept, const Vector<Int>& bits) {
    const Vector<Int> better = (Vector<Value>)bits > kept;
    kept = (Vector<Value>)((bits & better) | ((Vector<Int>)kept & ~better));
  }

  static float highest_lane(const Vector<Value>& vector) {
    Value highest = vector[0];
    for (int i = 1; i < lanes; ++i) {
      highest = std::max<Value>(highest, vector[i]);
    }
    return static_cast<float>(highest);
  }
};

// Counts by signed log-spaced bin of numbers that are all finite.
template <typename Value>
class Histogram {
 public:
  void add(const Value* x, int count) {
    for (int i = 0; i < count; ++i) {
      const auto bits = bit_cast<int32_t>(static_cast<float>(x[i]));
      const int32_t key = ((bits & INT32_MAX) >> layout::key_shift) - layout::key_base;
      const int32_t magnitude = std::min(std::max(key, 0), layout::half_bins - 1);
      // With the sign spread over the word, xor turns m into -1 - m for negative numbers.
      counts_[layout::half_bins + (magnitude ^ (bits >> 31))] += 1;
    }
  }

  // `replaced` of the zeros only stand for what was not finite.
  void write(double factor, int64_t replaced, double* out) {
    counts_[layout::half_bins] -= replaced;
    for (int i = 0; i < layout::bins; ++i) {
      out[i] = static_cast<double>(counts_[i]) * factor;
    }
  }

 private:
  int64_t counts_[layout::bins] = {};
};

// `value` counted `factor` times; 0 where nothing was measured, even if `value` overflowed.
inline double times(double factor, double value) {
  return factor > 0 ? value * factor : 0.0;
}
