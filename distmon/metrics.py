"""Every public metric, declared once: name, unit, reduction, help.

Records are built from these tables, sinks log them, rules refer to them, and `docs/metrics.md` is
what `distmon metrics` prints. What ranks exchange besides is in
`distmon.reduce.rank_slots`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PHASES: Final = ("data", "forward", "backward", "communication", "optimizer", "other")
"""Phases of a step, in order. `other` is what no hook attributes, evaluation included."""
OWN_PHASES: Final = ("data", "forward", "backward", "optimizer")
"""Phases in which a rank itself may be slow; in the others it may be waiting."""
PENDING_EVALUATIONS: Final = 2
"""Evaluations sent with one observation; of more, the newest."""
GRAD_PERCENTILES: Final[tuple[int, ...]] = (25, 50, 75, 95, 99)

REDUCTIONS: Final = {
    "ranks": ("max", "mean", "sum"),
    "parameters": ("count", "max", "median", "min", "norm", "p95"),
    "elements": ("count", "max", "mean", "min", "norm", "percentile", "std"),
    "blocks": ("mean",),
    "modules": ("max", "min"),
}
"""How many values become one, by what they are values of. `elements` of a parameter: all of them,
on all ranks."""


@dataclass(frozen=True)
class Metric:
    """One named number."""

    name: str
    unit: str
    """Empty for a pure ratio or count."""
    reduction: str
    """Such as `max over ranks`; empty when there is nothing to reduce."""
    help: str
    rank_metric: str = ""
    """The rank metric that is reduced; without one, the record builder derives the value."""

    @property
    def description(self) -> str:
        """Help and reduction in one line."""
        return f"{self.help}, {self.reduction}" if self.reduction else self.help


def metric_table(text: str) -> tuple[Metric, ...]:
    """Read one metric per line: `name | unit | reduction | help`.

    A reduction is one of REDUCTIONS, such as `max over ranks`, or `max over ranks of <rank metric>`
    where a rank metric is reduced. ValueError for an unknown one, and for a name declared twice.
    """
    metrics: dict[str, Metric] = {}
    for line in text.strip().splitlines():
        name, unit, reduced, words = (cell.strip() for cell in line.split("|"))
        reduction, _, rank_metric = reduced.partition(" of ")
        how, _, over = reduction.partition(" over ")
        if reduction and how not in REDUCTIONS.get(over, ()):
            raise ValueError(f'the metric "{name}" has the unknown reduction "{reduction}"')
        if name in metrics:
            raise ValueError(f'the metric "{name}" is declared twice')
        metrics[name] = Metric(name, unit, reduction, words, rank_metric)
    return tuple(metrics.values())


RUN_METRICS: Final = metric_table("""
monitor/update_ratio_median | | median over parameters | update_norm / weight_norm
monitor/update_ratio_p95 | | p95 over parameters | update_norm / weight_norm
monitor/update_ratio_min | | min over parameters | update_norm / weight_norm
monitor/update_ratio_max | | max over parameters | update_norm / weight_norm
monitor/frozen_count | parameters | count over parameters | trainable, with an update of zero
monitor/grad_norm | | norm over parameters | before clipping where reported, else as applied
monitor/grad_norm_stderr | | | standard error of grad_norm from sampling, 0 where reported
monitor/applied_grad_norm | | norm over parameters | gradients that the optimizer applied
monitor/applied_grad_norm_stderr | | | standard error of applied_grad_norm from sampling
monitor/param_norm | | norm over parameters | norm of all weights
monitor/param_norm_stderr | | | standard error of param_norm from sampling
monitor/update_lost_fraction | | mean over elements | share of non-zero gradients lost to rounding
debug/nan_param_count | parameters | count over parameters | with a NaN in weight or gradient
debug/inf_param_count | parameters | count over parameters | with an Inf in weight or gradient
debug/stepped_elsewhere | | | 1 when weights changed but no attached optimizer stepped
train/step_loss | | mean over ranks | loss of this step
train/step_loss_ema | | mean over ranks | moving average of the loss, decay 0.99 by default
train/loss_expected_to_fall | | | 0 or 1 as `loss.expected_to_fall` says; absent without it
train/lr | | | learning rate of the first param group, or given to step()
train/unclipped_grad_norm | | max over ranks | total gradient norm given to check() or step()
train/skipped_steps | steps | max over ranks of skipped_steps | optimizer steps not applied
gradient_monitor/mean_gain | | mean over blocks | gain of the blocks that follow another one
gradient_monitor/mean_gain_ma | | | mean gain averaged over the last observations
gradient_monitor/mean_gain_drift | | | relative change of mean gain over its window
gradient_monitor/amplification | | | mean_gain ** blocks: first gradient over last
inside/activation_rms_max | | max over modules | rms of an activation
inside/dead_fraction_max | | max over modules | share of dead units
inside/saturated_fraction_max | | max over modules | share of a bounded activation at its bounds
inside/effective_rank_min | | min over modules | effective rank of an activation
inside/attention_logit_max | | max over modules | largest attention logit in the sample
inside/attention_entropy_min | | min over modules | entropy of attention over its largest value
inside/expert_load_max | | max over modules | largest load of an expert over its fair share
inside/expert_diversity_min | | min over modules | exp(entropy of the load) / experts
inside/dead_expert_fraction_max | | max over modules | share of experts without a token
inside/dropped_token_fraction_max | | max over modules | share of routed tokens that were dropped
inside/spectral_norm_max | | max over parameters | largest estimated spectral norm
evaluation/train_loss | | mean over ranks | training loss given with the newest evaluation
evaluation/val_loss | | mean over ranks | validation loss of the newest evaluation
evaluation/improvement_rate | | | (previous - now) / previous validation loss
evaluation/train_val_gap | | | (validation - training) / training loss
evaluation/plateau_detected | | | 1 when 3 evaluations each changed less than 1%
performance/step_seconds | s | max over ranks | mean step time since the last record
performance/tokens_per_second | tokens/s | sum over ranks | tokens over training time
performance/samples_per_second | samples/s | sum over ranks | samples over training time
performance/data_fraction | | mean over ranks | share of a step waiting for data
performance/forward_fraction | | mean over ranks | share of a step in forward
performance/backward_fraction | | mean over ranks | in backward, overlapped communication included
performance/communication_fraction | | mean over ranks | share of a step waiting for other ranks
performance/optimizer_fraction | | mean over ranks | share of a step in the optimizer
performance/other_fraction | | mean over ranks | share of a step in no other phase
performance/mfu | | mean over ranks | model FLOPs over the device's peak
performance/mfu_over_limit | | mean over ranks | an MFU above 1, which is impossible
performance/interval | steps | | steps between observations
memory/allocated_bytes | B | max over ranks of allocated_bytes | in tensors on the device
memory/reserved_bytes | B | max over ranks of reserved_bytes | held by torch's allocator
memory/peak_bytes | B | max over ranks of peak_bytes | most ever in tensors
memory/rss_bytes | B | max over ranks of rss_bytes | memory of the process on the host
memory/retries | | sum over ranks of retries | times that the allocator emptied its cache
memory/fragmentation | | max over ranks of fragmentation | share of reserved memory split off
hardware/utilization | | mean over ranks of gpu_utilization | share of time with a kernel running
hardware/power | W | sum over ranks of power_watts | power drawn by the device
hardware/temperature | C | max over ranks of temperature_c | temperature of the chip
hardware/memory_fraction | | max over ranks | share of device memory in use by any process
performance/monitor_seconds | s | max over ranks of monitor_seconds | what training lost, estimated
performance/monitor_fraction | | max over ranks | its time in thread and kernels over training time
performance/monitor_bytes | B | | bytes that one rank sends in one observation
performance/monitor_collectives | | | collectives entered by one observation
""")
"""Of the whole run, in every record; times and counts are those since the last record."""

PARAM_METRICS: Final = metric_table("""
weight_norm | | norm over elements | norm of the whole parameter, estimated from its sample
weight_norm_stderr | | | standard error of weight_norm
weight_mean | | mean over elements | mean of the weight
weight_std | | std over elements | standard deviation of the weight
weight_absmax | | max over elements | largest magnitude in the sample
weight_nan | elements | count over elements | NaN in the sample
weight_inf | elements | count over elements | Inf in the sample
grad_norm | | norm over elements | norm of the gradient that the optimizer applied
grad_norm_stderr | | | standard error of grad_norm
grad_mean | | mean over elements | mean of the gradient
grad_std | | std over elements | standard deviation of the gradient
grad_min | | min over elements | smallest value in the sample
grad_max | | max over elements | largest value in the sample
grad_zero_fraction | | mean over elements | share of exact zeros
grad_nan | elements | count over elements | NaN in the sample
grad_inf | elements | count over elements | Inf in the sample
update_norm | | norm over elements | norm of the change made by this one optimizer step
update_norm_stderr | | | standard error of update_norm
update_absmax | | max over elements | largest change of a sampled element
update_ratio | | | update_norm / (weight_norm + eps)
update_lost_fraction | | mean over elements | share of elements with a gradient that did not move
update_lost_bound | | norm over elements | most that rounding can have taken from update_norm
lr | | | learning rate of the parameter's group
ndim | | | dimensions of the parameter
requires_grad | | mean over ranks | 1 when it asks for a gradient
in_optimizer | | mean over ranks | 1 when an optimizer owns it
has_grad | | max over ranks | 1 when it had a gradient at this step
update_expected | | | 1 when an update of zero in the sample proves it frozen
""")
"""Of each parameter, in every record."""

PERCENTILE_METRICS: Final = metric_table("""
grad_p25 | | percentile over elements | 25th percentile of the gradient, from a histogram
grad_p50 | | percentile over elements | 50th percentile of the gradient, from a histogram
grad_p75 | | percentile over elements | 75th percentile of the gradient, from a histogram
grad_p95 | | percentile over elements | 95th percentile of the gradient, from a histogram
grad_p99 | | percentile over elements | 99th percentile of the gradient, from a histogram
""")
"""Of each parameter, with `percentiles` on; one for each of GRAD_PERCENTILES."""

RANK_METRICS: Final = metric_table("""
time | s | | Unix time of the rank when it observed
step | | | step number of the rank
failed | | | 1 when the rank failed to observe this step
skipped_steps | steps | | optimizer steps not applied
skips_expected | | | 1 where a loss scaler may skip steps, 0 where only a NaN makes one
step_seconds | s | | mean step time since the last record
elapsed_seconds | s | | time since the last record
tokens | tokens | | tokens since the last record
samples | samples | | samples since the last record
monitor_seconds | s | | what training lost, estimated
monitor_step_seconds | s | | its part in steps that were not observed
monitor_device_seconds | s | | time of its kernels on the device, of observations that have run
monitor_wait_seconds | s | | time that it waited for other ranks, in neither of the two
data_seconds | s | | median time of a step in phase data
forward_seconds | s | | median time of a step in phase forward
backward_seconds | s | | median time of a step in phase backward
communication_seconds | s | | median time of a step in phase communication
optimizer_seconds | s | | median time of a step in phase optimizer
other_seconds | s | | median time of a step in phase other
data_floor_seconds | s | | what nearly every step takes in phase data
forward_floor_seconds | s | | what nearly every step takes in phase forward
backward_floor_seconds | s | | what nearly every step takes in phase backward
optimizer_floor_seconds | s | | what nearly every step takes in phase optimizer
allocated_bytes | B | | in tensors on the device; NaN without an accelerator
reserved_bytes | B | | held by torch's allocator
peak_bytes | B | | most ever in tensors
fragmentation | | | share of reserved memory that is free but split off
retries | | | times that the allocator emptied its cache
ooms | | | times that it found no room
rss_bytes | B | | memory of the process on the host
memory_used_bytes | B | | device memory in use by any process; NaN without a driver
memory_total_bytes | B | | device memory
gpu_utilization | | | share of time with a kernel running
power_watts | W | | power drawn by the board
power_limit_watts | W | | power limit in force
temperature_c | C | | temperature of the chip
sm_clock_mhz | MHz | | clock of the compute units
ecc_uncorrected | | | uncorrected memory errors since the driver started
pcie_replay | | | PCIe packets sent again since the driver started
nvlink_errors | | | NVLink errors since the driver started
throttle_reasons | | | bits that say why clocks are held down
loss | | | mean loss of this rank since the last record
reported_grad_norm | | | total gradient norm that this rank reported; NaN without one
norm_reports | | | gradient norms that this rank reported in the observed step
forward_passes | | | training forwards of the whole model in the observed step
backward_passes | | | backward passes of the observed step
repeated_backward | | | 1 when two of them gave equal gradients
stale_grad_norm | | | norm of a few gradients before the first backward pass
local_grad_norm | | | norm of these gradients on this rank, before it is reduced over ranks
batch_hash | | | hash of the inputs of the first forward
mode_layers | layers | | BatchNorm and Dropout layers
eval_layers | layers | | of these, in eval mode during the training forward
eval_layer_row | | | parameter of the first of these, its place in the table; -1 without one
batchnorm_layers | layers | | BatchNorm layers
alternating | | | 1 when optimizers step in turns, with forwards between
adaptive | | | 1 when the size of an update does not depend on that of the gradient, as in Adam
decay_per_step | | | largest share of a weight that decay takes in one step: lr x weight decay
holds_all | | | 1 when the rank holds all elements of all parameters
weight_jump | | | relative change of a matrix since the last record, farthest beyond its updates
weight_jump_expected | | | relative change that its updates explain
weight_jump_row | | | its place in the parameter table
""")
"""Telemetry of each rank, in every record."""

INSIDE_METRICS: Final = {
    "activations": metric_table("""
mean | | mean over elements | mean of the output of the module
std | | std over elements | standard deviation
absmax | | max over elements | largest magnitude; Inf when there is a NaN
rms | | norm over elements | root of the mean square
norm | | | rms * sqrt(units): the norm of the output at a typical position
zero_fraction | | mean over elements | share of exact zeros
dead_fraction | | | share of units that were zero at every position of the last `inside.window`
saturated_fraction | | mean over elements | share at the bounds of a bounded function; else NaN
effective_rank | | | tr(C)^2 / tr(C^2) of the covariance over positions, from a sample
spread | | | tr(C) / mean squared norm: 0 when all positions have the same output
units | units | | size of the dimension of the units, on all ranks
positions | | | positions of the last `inside.window` on all ranks
"""),
    "attention": metric_table("""
logit_max | | max over elements | largest logit in the sample of queries and heads
entropy | | mean over elements | entropy of the attention of a query, in nats
relative_entropy | | mean over elements | entropy over the logarithm of the keys that it sees
"""),
    "experts": metric_table("""
load_max | | | largest share of an expert over the fair share 1 / experts
diversity | | | exp(entropy of the shares) / experts: 1 when all experts have the same load
dead_fraction | | | share of experts without a token in the last `inside.window` measurements
dropped_fraction | | | share of assignments that exceeded the capacity
experts | experts | | experts of the router
experts_per_token | experts | | experts that a token is sent to
fair_tokens | tokens | | assignments per expert in the last `inside.window` measurements
"""),
    "spectra": metric_table("""
spectral_norm | | | largest singular value, by power iteration that continues from the last one
spectral_norm_error | | | estimate of its error, from the residual of the singular vectors
stable_rank | | | squared Frobenius norm over squared spectral norm
"""),
}
"""By kind, in `inside` of a record; only what `inside` in the settings asks for."""

TOPK_FROZEN_PREFIX: Final = "monitor/topk_frozen/"
TASK_PREFIX: Final = "tasks/"
NAMED_METRICS: Final = metric_table("""
monitor/topk_frozen/{name} | | | update_ratio of the `topk` worst frozen parameters
tasks/{name}/grad_norm | | norm over parameters | norm of the gradient of the task's loss
tasks/{name}/ratio | | | grad_norm over the mean of the other tasks'
""")
"""One for each frozen parameter, or for each task given to `task_losses`."""

RENAMED: Final = {
    "hardware/utilisation": "hardware/utilization",
    "gpu_utilisation": "gpu_utilization",
}
"""Names of version 0.1 and what they are now. Old run folders and users' rules still have them."""


def current_name(name: str) -> str:
    """Return today's name of a metric, given with or without its group."""
    for old, new in RENAMED.items():
        if name in (old, old.rpartition("/")[2]):
            return new if "/" in name else new.rpartition("/")[2]
    return name
