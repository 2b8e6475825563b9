// The sampled columns of rows; see csrc_triton/sampled_stats.py, which defines them.
#pragma once

#include <cstdint>

#include "running_totals.h"
#include "sample_table.h"

// What is read of one parameter.
struct SampledRow {
  int64_t weight = 0, weight_code = 0;
  int64_t grad = 0, grad_code = 0;  // 0: there is no gradient
  SampleTable weight_at, grad_at;
  int64_t start = 0;                // first slot in the snapshot
  int64_t width = 0;                // slots of each group there
  const int32_t* counts = nullptr;  // used slots of each group
};

struct RowOutputs {
  double* sums;
  float* maxima;
  Bins bins;
  int64_t* checksums;
};

// `Value` is float or double.
template <typename Value>
void take_snapshot(const SampledRow* rows, int64_t count, int threads, Value* snapshot);

// `applied` is 1 or 0 where the step of a row was applied or not.
template <typename Value>
void fill_sampled_rows(
    const SampledRow* rows, int64_t count, int threads, const Value* snapshot,
    const double* half_ulp, const double* applied, const RowOutputs& out);
