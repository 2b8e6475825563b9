// Weight and gradient columns over every element of chosen tensors, read from one end of memory to
// the other.

#include "exact_rows.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <variant>
#include <vector>

#include "element_values.h"
#include "row_layout.h"
#include "running_totals.h"
#include "threads.h"

namespace {

// Sums are folded after every piece, every block and every part, so that no chain of additions is
// long: 10**9 elements lose fewer than 14 bits of fp64 at worst. Parts are also what threads share.
constexpr int piece = 256;
constexpr int64_t block = 1 << 14;
constexpr int64_t part_size = 1 << 20;

// Where the columns of a weight or a gradient are.
struct Columns {
  int count, sum, nan, inf, squares;
};
constexpr Columns weight_columns = {
    layout::w_count, layout::w_sum, layout::w_nan, layout::w_inf, layout::w_sq};
constexpr Columns grad_columns = {
    layout::g_count, layout::g_sum, layout::g_nan, layout::g_inf, layout::g_sq};

// Takes in the elements from `begin` to `end`; the histogram may be absent.
template <typename Value>
void add_part(
    int64_t address, int64_t code, int64_t begin, int64_t end, Totals<Value>& totals,
    Histogram<Value, int64_t>* histogram) {
  LaneSums sum, squares;
  with_reader(address, code, [&](auto element) {
    for (int64_t from = begin; from < end; from += block) {
      const int64_t to = std::min(from + block, end);
      LaneSums block_sum, block_squares;
      for (int64_t first = from; first < to; first += piece) {
        const int count = static_cast<int>(std::min<int64_t>(piece, to - first));
        const int full = (count + lanes - 1) / lanes * lanes;
        Value x[piece];
        for (int i = 0; i < count; ++i) {
          x[i] = static_cast<Value>(element(first + i));
        }
        std::fill(x + count, x + full, std::numeric_limits<Value>::quiet_NaN());
        totals.add(x, full);
        if (histogram != nullptr) {
          histogram->add(x, full);
        }
        block_sum.add(totals.sum);
        block_squares.add(totals.squares);
        totals.sum = totals.squares = LaneSums{};
      }
      sum.add(block_sum);
      squares.add(block_squares);
    }
  });
  totals.sum = sum;
  totals.squares = squares;
}

// One tensor, cut into parts.
template <typename Value>
class Whole {
 public:
  Whole(int64_t address, int64_t code, int64_t numel, bool counts_bins)
      : address_(address), code_(code), numel_(numel) {
    const int64_t parts = (numel + part_size - 1) / part_size;
    totals_.resize(parts);
    histograms_.resize(counts_bins ? parts : 0);
  }

  int64_t parts() const {
    return static_cast<int64_t>(totals_.size());
  }

  void read(int64_t part) {
    const int64_t begin = part * part_size;
    add_part(
        address_, code_, begin, std::min(begin + part_size, numel_), totals_[part],
        histograms_.empty() ? nullptr : &histograms_[part]);
  }

  // In the order of the parts, whichever thread has read them.
  Totals<Value> totals() const {
    Totals<Value> all;
    for (const auto& one : totals_) {
      all.add(one);
    }
    return all;
  }

  Histogram<Value, int64_t> histogram() const {
    Histogram<Value, int64_t> all;
    for (const auto& one : histograms_) {
      all.add(one);
    }
    return all;
  }

  int64_t numel() const {
    return numel_;
  }

 private:
  int64_t address_, code_, numel_;
  std::vector<Totals<Value>> totals_;
  std::vector<Histogram<Value, int64_t>> histograms_;
};

template <typename Value>
void write_sums(
    Totals<Value>& totals, const Columns& columns, int64_t numel, double factor, double* sums) {
  const int64_t padded = -numel & (lanes - 1);
  sums[columns.count] = static_cast<double>(numel) * factor;
  sums[columns.sum] = times(factor, totals.total());
  sums[columns.nan] = static_cast<double>(totals.nan() - padded) * factor;
  sums[columns.inf] = static_cast<double>(totals.inf()) * factor;
  std::fill_n(sums + columns.squares, layout::groups, 0.0);
  sums[columns.squares] = times(factor, totals.take_squares());
}

// Where the columns of one parameter go.
struct Row {
  double* sums;
  float* maxima;
  Bins bins;
  double applied;
};

template <typename Value>
void write_weight(const Whole<Value>& weight, const Row& row) {
  Totals<Value> totals = weight.totals();
  write_sums(totals, weight_columns, weight.numel(), 1.0, row.sums);
  row.maxima[layout::w_absmax] = totals.largest();
}

template <typename Value>
void write_grad(const Whole<Value>& grad, const Row& row) {
  Totals<Value> totals = grad.totals();
  write_sums(totals, grad_columns, grad.numel(), row.applied, row.sums);
  row.sums[layout::g_zero] = static_cast<double>(totals.zero()) * row.applied;
  if (row.applied > 0) {
    row.maxima[layout::g_max] = totals.highest();
    row.maxima[layout::g_negmin] = totals.lowest_negated();
  }
  if (row.bins.words != nullptr) {
    Histogram<Value, int64_t> histogram = grad.histogram();
    histogram.write(row.applied, totals.nan() + totals.inf(), row.bins);
  }
}

using AnyWhole = std::variant<Whole<float>, Whole<double>>;

AnyWhole whole(int64_t address, int64_t code, int64_t numel, bool counts_bins) {
  if (code == fp64) {
    return Whole<double>(address, code, numel, counts_bins);
  }
  return Whole<float>(address, code, numel, counts_bins);
}

// Reads all parts of all tensors, whichever thread comes first.
void read_all(std::vector<AnyWhole>& tensors, int threads) {
  std::vector<std::pair<AnyWhole*, int64_t>> parts;
  for (auto& tensor : tensors) {
    const int64_t count = std::visit([](auto& one) { return one.parts(); }, tensor);
    for (int64_t part = 0; part < count; ++part) {
      parts.emplace_back(&tensor, part);
    }
  }
  share_out(static_cast<int64_t>(parts.size()), threads, [&](int64_t i) {
    std::visit([&](auto& one) { one.read(parts[i].second); }, *parts[i].first);
  });
}

}  // namespace

void fill_exact_columns(const std::vector<WholeRow>& rows, int threads, const ExactOutputs& out) {
  const auto reads_grad = [](const WholeRow& row) {
    return (row.wanted & whole_grad) && row.grad != 0;
  };
  std::vector<AnyWhole> tensors;
  for (const WholeRow& row : rows) {
    if (row.wanted & whole_weight) {
      tensors.push_back(whole(row.weight, row.weight_code, row.numel, false));
    }
    if (reads_grad(row)) {
      tensors.push_back(whole(row.grad, row.grad_code, row.numel, out.bins.words != nullptr));
    }
  }
  read_all(tensors, threads);
  auto next = tensors.begin();
  for (const WholeRow& row : rows) {
    const int64_t i = row.row;
    const Row here = {
        out.sums + i * layout::sum_columns, out.maxima + i * layout::max_columns,
        out.bins.of_row(i), out.applied[i]};
    if (row.wanted & whole_weight) {
      std::visit([&](auto& one) { write_weight(one, here); }, *next++);
    }
    if (reads_grad(row)) {
      std::visit([&](auto& one) { write_grad(one, here); }, *next++);
    }
  }
}
