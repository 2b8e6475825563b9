// Sums, extremes and counts of a stream of numbers, as the columns of a row define them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "element_values.h"
#include "row_layout.h"

// Numbers are taken in by so many at once, each lane with sums of its own: left to itself the
// compiler makes no vectors and needs five times as long. More lanes than the processor has at once
// cost as much.
#if defined(__AVX512F__)
constexpr int lanes = 16;
#elif defined(__AVX2__)
constexpr int lanes = 8;
#else
constexpr int lanes = 4;
#endif

// `aligned(...)`: one may lie anywhere in an array. `may_alias`: the array is of its items.
template <typename Item, int items>
struct VectorOf {
  typedef Item type
      __attribute__((vector_size(items * sizeof(Item)), aligned(sizeof(Item)), may_alias));
};
template <typename Item>
using Vector = typename VectorOf<Item, lanes>::type;

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

template <typename Item>
int64_t sum_of_lanes(const Vector<Item>& vector) {
  int64_t total = 0;
  for (int i = 0; i < lanes; ++i) {
    total += vector[i];
  }
  return total;
}

// A sum in fp64 for each lane. In two halves: no common processor widens eight floats at once, and
// compilers then do it one by one.
class LaneSums {
 public:
  template <typename Value>
  void add(const Value* x) {
    low_ += widen(x);
    high_ += widen(x + half);
  }

  template <typename Value>
  void add_squares(const Value* x) {
    const Half low = widen(x), high = widen(x + half);
    low_ += low * low;
    high_ += high * high;
  }

  void add(const LaneSums& other) {
    low_ += other.low_;
    high_ += other.high_;
  }

  // In a fixed order, so that the same input gives the same bits.
  double total() const {
    double sum = 0;
    for (int i = 0; i < half; ++i) {
      sum += low_[i];
    }
    for (int i = 0; i < half; ++i) {
      sum += high_[i];
    }
    return sum;
  }

 private:
  static constexpr int half = lanes / 2;
  using Half = VectorOf<double, half>::type;

  template <typename Value>
  static Half widen(const Value* x) {
    using Narrow = typename VectorOf<Value, half>::type;
    return __builtin_convertvector(*reinterpret_cast<const Narrow*>(x), Half);
  }

  Half low_ = {}, high_ = {};
};

template <typename Value>
struct Totals {
  using Int = IntOf<Value>;
  static constexpr Value lowest = -std::numeric_limits<Value>::infinity();

  LaneSums sum;
  LaneSums squares;
  Vector<Int> nans = {};
  Vector<Int> infs = {};
  Vector<Int> zeros = {};
  Vector<Value> high = lowest - Vector<Value>{};  // largest finite number, and largest negated
  Vector<Value> low = lowest - Vector<Value>{};

  // Takes in `count` numbers, a multiple of lanes, and puts 0 in the place of what is not finite.
  void add(Value* x, int count) {
    Totals now = *this;  // in registers
    if (all_finite(x, count)) {
      for (int i = 0; i < count; i += lanes) {
        now.add_finite(x + i);
      }
    } else {
      for (int i = 0; i < count; i += lanes) {
        now.add_any(x + i);
      }
    }
    *this = now;
  }

  // Takes in what another has taken in after this one.
  void add(const Totals& other) {
    sum.add(other.sum);
    squares.add(other.squares);
    nans += other.nans;
    infs += other.infs;
    zeros += other.zeros;
    keep_higher(high, other.high);
    keep_higher(low, other.low);
  }

  // The sum of squares since the last call.
  double take_squares() {
    const double taken = squares.total();
    squares = LaneSums{};
    return taken;
  }

  double total() const {
    return sum.total();
  }

  int64_t nan() const {
    return sum_of_lanes<Int>(nans);
  }

  int64_t inf() const {
    return sum_of_lanes<Int>(infs);
  }

  int64_t zero() const {
    return sum_of_lanes<Int>(zeros);
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
  static bool all_finite(const Value* x, int count) {
    Vector<Int> top = {};
    for (int i = 0; i < count; i += lanes) {
      const Vector<Int> magnitude = (Vector<Int>)block_at(x + i) & ~Bits<Value>::sign;
      top = magnitude > top ? magnitude : top;
    }
    Int highest = 0;
    for (int i = 0; i < lanes; ++i) {
      highest = std::max<Int>(highest, top[i]);
    }
    return highest < Bits<Value>::exponent;
  }

  void add_finite(const Value* numbers) {
    const Vector<Value> x = block_at(numbers);
    zeros -= x == 0;  // a comparison gives -1 where it holds
    keep_higher(high, x);
    keep_higher(low, -x);
    sum.add(numbers);
    squares.add_squares(numbers);
  }

  void add_any(Value* numbers) {
    const Vector<Int> bits = (Vector<Int>)block_at(numbers);
    const Vector<Int> magnitude = bits & ~Bits<Value>::sign;
    const Vector<Int> finite = magnitude < Bits<Value>::exponent;
    nans -= magnitude > Bits<Value>::exponent;
    infs -= magnitude == Bits<Value>::exponent;
    zeros -= magnitude == 0;
    const Vector<Int> otherwise = bit_cast<Int>(lowest) & ~finite;
    keep_higher(high, (Vector<Value>)((bits & finite) | otherwise));
    keep_higher(low, (Vector<Value>)(((bits ^ Bits<Value>::sign) & finite) | otherwise));
    block_at(numbers) = (Vector<Value>)(bits & finite);
    sum.add(numbers);
    squares.add_squares(numbers);
  }

  static void keep_higher(Vector<Value>& kept, const Vector<Value>& x) {
    kept = x > kept ? x : kept;
  }

  static float highest_lane(const Vector<Value>& vector) {
    Value highest = vector[0];
    for (int i = 1; i < lanes; ++i) {
      highest = std::max<Value>(highest, vector[i]);
    }
    return static_cast<float>(highest);
  }
};

// The words of one row that hold its counts; see row_layout.py.
struct Bins {
  double* words;  // nullptr: no histogram
  int count;
  double next_place;  // what a count in the second place of a word is multiplied by

  Bins of_row(int64_t row) const {
    return {words == nullptr ? nullptr : words + row * count, count, next_place};
  }
};

// Counts by signed log-spaced bin of numbers that are all finite. `Count` holds how many there are.
template <typename Value, typename Count>
class Histogram {
 public:
  // `count` is a multiple of lanes.
  void add(const Value* x, int count) {
    // All bins of a piece first: to take a vector apart costs more than to read it from memory.
    int32_t bins[piece];
    for (int first = 0; first < count; first += piece) {
      const int here = std::min(piece, count - first);
      for (int i = 0; i < here; i += lanes) {
        block_at(bins + i) = bins_of(x + first + i);
      }
      for (int i = 0; i < here; i += tables) {
        for (int table = 0; table < tables; ++table) {
          counts_[table][bins[i + table]] += 1;
        }
      }
    }
  }

  // Takes in what another has taken in.
  void add(const Histogram& other) {
    for (int table = 0; table < tables; ++table) {
      for (int bin = 0; bin < layout::bins; ++bin) {
        counts_[table][bin] += other.counts_[table][bin];
      }
    }
  }

  // Packs the counts into words; `replaced` of the zeros only stand for what was not finite.
  void write(double factor, int64_t replaced, const Bins& out) {
    counts_[0][layout::half_bins] -= static_cast<Count>(replaced);
    std::fill_n(out.words, out.count, 0.0);
    double size = factor;
    for (int first = 0; first < layout::bins; first += out.count) {
      for (int word = 0; word < out.count; ++word) {
        const int bin = first + word;
        out.words[word] += static_cast<double>(counts_[0][bin] + counts_[1][bin]) * size;
      }
      size *= out.next_place;
    }
  }

 private:
  static constexpr int piece = 128;

  static Vector<int32_t> bins_of(const Value* x) {
    const auto narrow = __builtin_convertvector(block_at(x), Vector<float>);
    const Vector<int32_t> bits = (Vector<int32_t>)narrow;
    Vector<int32_t> bin = ((bits & INT32_MAX) >> layout::key_shift) - layout::key_base;
    bin = bin > 0 ? bin : Vector<int32_t>{};
    bin = bin < layout::half_bins - 1 ? bin : Vector<int32_t>{} + (layout::half_bins - 1);
    // With the sign spread over the word, xor turns m into -1 - m for negative numbers.
    return layout::half_bins + (bin ^ (bits >> 31));
  }

  // Neighbours are often in one bin, and counting it twice in a row waits for the first time.
  static constexpr int tables = 2;
  Count counts_[tables][layout::bins] = {};
};

// `value` counted `factor` times; 0 where nothing was measured, even if `value` overflowed.
inline double times(double factor, double value) {
  return factor > 0 ? value * factor : 0.0;
}
