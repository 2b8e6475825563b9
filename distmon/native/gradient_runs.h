// Gradient columns over the runs of gradients that are sampled; see csrc_triton/gradient_runs.py.
#pragma once

#include <cstdint>

// The runs of one gradient, as in GradientRuns.
struct GradientRow {
  int64_t address = 0, code = 0;    // of the gradient; address 0: there is none
  const int32_t* narrow = nullptr;  // offset of each run
  const int64_t* wide = nullptr;    // nullptr, or instead of `narrow`
  const uint8_t* codes = nullptr;
  int64_t count = 0;  // 0: the gradient is not sampled by runs
};

// Replaces the gradient columns of the rows that have runs and a gradient.
void fill_gradient_runs(
    const GradientRow* rows, int64_t count, int threads, const double* applied, double* sums,
    float* maxima);
