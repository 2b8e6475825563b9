// Columns over every element of chosen tensors; see csrc_triton/exact_stats.py.
#pragma once

#include <cstdint>
#include <vector>

#include "running_totals.h"

constexpr uint8_t whole_weight = 1, whole_grad = 2;

// One parameter of which the weight, the gradient or both are read in full.
struct WholeRow {
  int64_t row;
  int64_t numel;
  uint8_t wanted;                    // bits: whole_weight, whole_grad
  int64_t weight, weight_code;       // memory in which all elements lie side by side
  int64_t grad, grad_code;           // 0: there is no gradient
};

struct ExactOutputs {
  const double* applied;
  double* sums;
  float* maxima;
  Bins bins;
};

// Replaces sampled columns. Needs no interpreter lock; throws when memory or a thread fails.
void fill_exact_columns(const std::vector<WholeRow>& rows, int threads, const ExactOutputs& out);
