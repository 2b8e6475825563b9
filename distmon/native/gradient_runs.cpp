// Gradient columns over the runs of gradients that are sampled.

#include "gradient_runs.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <variant>
#include <vector>

#include "element_values.h"
#include "row_layout.h"
#include "run_totals.h"
#include "running_totals.h"
#include "threads.h"

namespace {

constexpr int64_t ahead = 32;  // runs that are asked for early: each is in another part of memory

// Runs that a thread takes at a time: about so many of whole rows, or so many of one long row.
constexpr int64_t runs_of_share = 2048;

struct Share {
  int64_t first_row, end_row;
  int64_t part = -1;  // of the part of one row: its number among all parts, and which runs it has
  int64_t first_run = 0, end_run = 0;
};

bool is_read(const GradientRow& row, double applied) {
  return row.count > 0 && row.address != 0 && applied > 0;
}

// Asks for the first runs of a row; the row itself asks for the others.
void ask_for_first(const GradientRow& row) {
  const auto* const memory = reinterpret_cast<const char*>(row.address);
  for (int64_t i = 0; i < std::min(ahead, row.count); ++i) {
    const int64_t offset = row.wide != nullptr ? row.wide[i] : row.narrow[i];
    __builtin_prefetch(memory + offset * bytes_of(row.code));
  }
}

template <typename Value, typename Offset>
RunTotals<Value> totals_of(const GradientRow& row, const Offset* offsets, int64_t count) {
  using Numbers = typename RunTotals<Value>::Numbers;
  const int64_t size = bytes_of(row.code);
  const auto* const memory = reinterpret_cast<const char*>(row.address);
  const bool as_it_is = row.code == (std::is_same_v<Value, double> ? fp64 : fp32);
  RunTotals<Value> totals;
  with_reader(row.address, row.code, [&](auto element) {
    totals.add(count, row.codes, [&](int64_t i, int length, Numbers& x) {
      if (i + ahead < count) {
        __builtin_prefetch(memory + offsets[i + ahead] * size);
      }
      const int64_t first = offsets[i];
      if (length == run && as_it_is) {
        std::memcpy(&x, memory + first * size, sizeof(x));
        return;
      }
      Value numbers[run] = {};
      for (int k = 0; k < length; ++k) {
        numbers[k] = static_cast<Value>(element(first + k));
      }
      std::memcpy(&x, numbers, sizeof(x));
    });
  });
  return totals;
}

template <typename Value>
RunTotals<Value> totals_of(const GradientRow& row) {
  return row.wide != nullptr ? totals_of<Value>(row, row.wide, row.count)
                             : totals_of<Value>(row, row.narrow, row.count);
}

using AnyTotals = std::variant<RunTotals<float>, RunTotals<double>>;

AnyTotals any_totals_of(const GradientRow& row) {
  if (row.code == fp64) {
    return totals_of<double>(row);
  }
  return totals_of<float>(row);
}

class Gradients {
 public:
  Gradients(const GradientRow* rows, const double* applied, double* sums, float* maxima)
      : rows_(rows), applied_(applied), sums_(sums), maxima_(maxima) {}

  void fill(int64_t count, int threads) {
    share_rows(count);
    share_out_short(static_cast<int64_t>(shares_.size()), threads, [&](int64_t i) {
      const Share& share = shares_[i];
      if (share.part >= 0) {
        parts_[share.part] = any_totals_of(runs_of(share));
      } else {
        fill_rows(share);
      }
    });
    for (const Share& share : shares_) {
      if (share.part >= 0 && share.first_run == 0) {
        join_parts(share);
      }
    }
  }

 private:
  void share_rows(int64_t count) {
    int64_t parts = 0;
    Share open = {0, 0};
    int64_t taken = 0;
    const auto begin_at = [&](int64_t row) {
      if (open.first_row < open.end_row) {
        shares_.push_back(open);
      }
      open = {row, row};
      taken = 0;
    };
    for (int64_t row = 0; row < count; ++row) {
      const int64_t runs = is_read(rows_[row], applied_[row]) ? rows_[row].count : 0;
      if (runs > runs_of_share) {
        begin_at(row + 1);
        for (int64_t run = 0; run < runs; run += runs_of_share) {
          shares_.push_back({row, row + 1, parts++, run, std::min(run + runs_of_share, runs)});
        }
        continue;
      }
      open.end_row = row + 1;
      if ((taken += runs) >= runs_of_share) {
        begin_at(row + 1);
      }
    }
    begin_at(count);
    parts_.resize(parts);
  }

  // The runs of a part of a row as a row of their own.
  GradientRow runs_of(const Share& share) const {
    GradientRow row = rows_[share.first_row];
    (row.wide != nullptr ? void(row.wide += share.first_run) : void(row.narrow += share.first_run));
    row.codes += share.first_run;
    row.count = share.end_run - share.first_run;
    return row;
  }

  void fill_rows(const Share& share) const {
    for (int64_t i = share.first_row; i < share.end_row; ++i) {
      if (i + 1 < share.end_row && is_read(rows_[i + 1], applied_[i + 1])) {
        ask_for_first(rows_[i + 1]);
      }
      GradientRow row = rows_[i];
      if (row.count == 0 || row.address == 0) {
        continue;
      }
      row.count = is_read(row, applied_[i]) ? row.count : 0;
      write(any_totals_of(row), i);
    }
  }

  // In the order of the parts, whichever thread has read them.
  void join_parts(const Share& first) const {
    const int64_t runs = rows_[first.first_row].count;
    AnyTotals all = parts_[first.part];
    for (int64_t part = first.part + 1; runs > (part - first.part) * runs_of_share; ++part) {
      std::visit(
          [&](auto& totals) { totals.add(std::get<std::decay_t<decltype(totals)>>(parts_[part])); },
          all);
    }
    write(all, first.first_row);
  }

  void write(const AnyTotals& totals, int64_t row) const {
    std::visit(
        [&](const auto& each) {
          each.write(
              applied_[row], sums_ + row * layout::sum_columns, maxima_ + row * layout::max_columns);
        },
        totals);
  }

  const GradientRow* rows_;
  const double* applied_;
  double* sums_;
  float* maxima_;
  std::vector<Share> shares_;
  std::vector<AnyTotals> parts_;
};

}  // namespace

void fill_gradient_runs(
    const GradientRow* rows, int64_t count, int threads, const double* applied, double* sums,
    float* maxima) {
  Gradients(rows, applied, sums, maxima).fill(count, threads);
}
