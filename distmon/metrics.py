"""Every number that leaves the program, declared once: name, unit, meaning.

Records are built from these tables, sinks log them, docs list them, rules refer to them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Metric:
    """One named number. `unit` is empty for a pure ratio or count."""

    name: str
    unit: str
    help: str


RUN_METRICS: Final[tuple[Metric, ...]] = (
    Metric("monitor/update_ratio_median", "", "median over parameters of |dw| / |w|"),
    Metric("monitor/update_ratio_p95", "", "95th percentile over parameters of |dw| / |w|"),
    Metric("monitor/update_ratio_min", "", "smallest |dw| / |w| of any parameter"),
    Metric("monitor/update_ratio_max", "", "largest |dw| / |w| of any parameter"),
    Metric("monitor/frozen_count", "parameters", "trainable parameters whose update was nothing"),
    Metric("monitor/grad_norm", "", "norm of all gradients that the optimizer applied"),
    Metric("monitor/grad_norm_stderr", "", "standard error of monitor/grad_norm from sampling"),
    Metric("monitor/param_norm", "", "norm of all weights"),
    Metric("monitor/param_norm_stderr", "", "standard error of monitor/param_norm from sampling"),
    Metric("monitor/update_lost_fraction", "", "share of non-zero gradients lost to rounding"),
    Metric("debug/nan_param_count", "parameters", "parameters with a NaN in weight or gradient"),
    Metric("debug/inf_param_count", "parameters", "parameters with an Inf in weight or gradient"),
    Metric("train/step_loss", "", "loss of this step, mean over ranks"),
    Metric("train/step_loss_ema", "", "moving average of the loss, decay 0.99 by default"),
    Metric("train/lr", "", "learning rate of the first param group, or the one given to step()"),
    Metric(
        "train/unclipped_grad_norm",
        "",
        "total gradient norm given to check() or step()",
    ),
    Metric("train/skipped_steps", "steps", "optimizer steps not applied since the last record"),
    Metric("gradient_monitor/mean_gain", "", "mean gain of the blocks that follow another one"),
    Metric("gradient_monitor/mean_gain_ma", "", "mean gain averaged over the last observations"),
    Metric("gradient_monitor/mean_gain_drift", "", "relative change of mean gain over its window"),
    Metric("gradient_monitor/amplification", "", "mean_gain ** blocks: first gradient over last"),
    Metric("evaluation/train_loss", "", "training loss given with the newest evaluation"),
    Metric("evaluation/val_loss", "", "validation loss of the newest evaluation"),
    Metric("evaluation/improvement_rate", "", "(previous - now) / previous validation loss"),
    Metric("evaluation/train_val_gap", "", "(validation - training) / training loss"),
    Metric("evaluation/plateau_detected", "", "1 when 3 evaluations each changed less than 1%"),
    Metric("performance/step_seconds", "s", "mean step time since the last record, slowest rank"),
    Metric("performance/tokens_per_second", "tokens/s", "all ranks together"),
    Metric("performance/samples_per_second", "samples/s", "all ranks together"),
    *(
        Metric(f"performance/{phase}_fraction", "", f"share of a step in {what}, mean over ranks")
        for phase, what in (
            ("data", "waiting for data"),
            ("forward", "forward"),
            ("backward", "backward, with communication where it cannot be told apart"),
            ("communication", "waiting for the gradients of other ranks"),
            ("optimizer", "the optimizer"),
            ("other", "none of the other phases"),
        )
    ),
    Metric("performance/mfu", "", "share of the devices' peak that goes into the model's FLOPs"),
    Metric("performance/mfu_over_limit", "", "an MFU above 1, which is impossible"),
    Metric("performance/interval", "steps", "steps between observations"),
    Metric("memory/allocated_bytes", "B", "in tensors on the device, fullest rank"),
    Metric("memory/reserved_bytes", "B", "held by torch's allocator, fullest rank"),
    Metric("memory/peak_bytes", "B", "most ever in tensors, fullest rank"),
    Metric("memory/rss_bytes", "B", "memory of the process on the host, largest rank"),
    Metric("memory/retries", "", "times that allocators emptied their cache, all ranks"),
    Metric("memory/fragmentation", "", "share of reserved memory that is split off, worst rank"),
    Metric("hardware/utilisation", "", "share of time with a kernel running, mean over ranks"),
    Metric("hardware/power", "W", "power of all ranks' devices"),
    Metric("hardware/temperature", "C", "hottest device"),
    Metric("hardware/memory_fraction", "", "device memory in use by anyone, fullest device"),
    Metric("performance/monitor_seconds", "s", "the monitor's own time since the last record"),
    Metric("performance/monitor_fraction", "", "monitor_seconds over training time"),
    Metric("performance/monitor_bytes", "B", "bytes sent into collectives by one observation"),
    Metric("performance/monitor_collectives", "", "collectives entered by one observation"),
)
TOPK_FROZEN_PREFIX: Final = "monitor/topk_frozen/"
"""`monitor/topk_frozen/{name}`: update ratio of the worst frozen parameters, at most top-k tags."""

TASK_PREFIX: Final = "tasks/"
"""`tasks/{name}/grad_norm` and `tasks/{name}/ratio`, for the tasks given to `task_losses`."""

PARAM_METRICS: Final[tuple[Metric, ...]] = (
    Metric("weight_norm", "", "norm of the whole parameter, estimated from its sample"),
    Metric("weight_norm_stderr", "", "standard error of weight_norm"),
    Metric("weight_mean", "", "mean"),
    Metric("weight_std", "", "standard deviation"),
    Metric("weight_absmax", "", "largest magnitude in the sample"),
    Metric("weight_nan", "elements", "NaN in the sample"),
    Metric("weight_inf", "elements", "Inf in the sample"),
    Metric("grad_norm", "", "norm of the gradient that the optimizer applied"),
    Metric("grad_norm_stderr", "", "standard error of grad_norm"),
    Metric("grad_mean", "", "mean"),
    Metric("grad_std", "", "standard deviation"),
    Metric("grad_min", "", "smallest value in the sample"),
    Metric("grad_max", "", "largest value in the sample"),
    Metric("grad_zero_fraction", "", "share of exact zeros"),
    Metric("grad_nan", "elements", "NaN in the sample"),
    Metric("grad_inf", "elements", "Inf in the sample"),
    Metric("update_norm", "", "norm of the change made by this one optimizer step"),
    Metric("update_norm_stderr", "", "standard error of update_norm"),
    Metric("update_absmax", "", "largest change of a sampled element"),
    Metric("update_ratio", "", "update_norm / (weight_norm + eps)"),
    Metric("update_lost_fraction", "", "share of elements with a gradient that did not move"),
    Metric("update_lost_bound", "", "what rounding can have taken from update_norm, at most"),
    Metric("lr", "", "learning rate of the parameter's group"),
    Metric("ndim", "", "dimensions of the parameter"),
    Metric("requires_grad", "", "1 when it asks for a gradient"),
    Metric("in_optimizer", "", "1 when an optimizer owns it"),
    Metric("has_grad", "", "1 when it had a gradient at this step"),
    Metric("frozen", "", "1 when the update was nothing although the parameter should learn"),
)
GRAD_PERCENTILES: Final[tuple[int, ...]] = (25, 50, 75, 95, 99)
PERCENTILE_METRICS: Final[tuple[Metric, ...]] = tuple(
    Metric(f"grad_p{q}", "", f"{q}th percentile of the gradient, within 12.5% of its value")
    for q in GRAD_PERCENTILES
)

REPLICA_CLASSES: Final = 4
"""Ways in which the parameters of one model may be spread over ranks and still be compared."""

PENDING_EVALUATIONS: Final = 2
"""Evaluations that may wait for one observation; of more, the newest count."""

RANK_METRICS: Final[tuple[Metric, ...]] = (
    Metric("time", "s", "Unix time of the rank when it observed"),
    Metric("step", "", "step number the rank believes in"),
    Metric("plan_hash", "", "what the rank samples, as a 48-bit hash"),
    *(
        Metric(f"region_key{i}", "", f"which pieces of replica class {i} it holds, 48-bit hash")
        for i in range(REPLICA_CLASSES)
    ),
    *(
        Metric(f"checksum{i}", "", f"48-bit checksum of its sampled weight bits of class {i}")
        for i in range(REPLICA_CLASSES)
    ),
    Metric("failed", "", "1 when the rank could not observe this step"),
    Metric("signal_step", "step", "first step whose loss or gradient norm was not finite, else 0"),
    Metric("signal_kind", "", "1 loss, 2 gradient norm"),
    Metric("knows_bad", "", "1 when an earlier record has already located the NaN that is there"),
    Metric("shown_norm", "", "newest total gradient norm shown to the monitor, -1 without one"),
    *(
        Metric(
            f"eval{i}_{what}", "", f"{what} of evaluation {i} since the last record; step 0: none"
        )
        for i in range(PENDING_EVALUATIONS)
        for what in ("step", "epoch", "train_loss", "val_loss")
    ),
    Metric(
        "task_key", "", "which tasks it measured since the last record, 48-bit hash, 0 for none"
    ),
    Metric("skipped_steps", "steps", "optimizer steps not applied since the last record"),
    Metric("step_seconds", "s", "mean step time since the last record"),
    Metric("elapsed_seconds", "s", "time since the last record"),
    Metric("tokens", "tokens", "tokens since the last record"),
    Metric("samples", "samples", "samples since the last record"),
    Metric("monitor_seconds", "s", "the monitor's own time since the last record"),
    Metric("monitor_step_seconds", "s", "its part in steps that were not observed"),
    Metric(
        "monitor_wait_seconds", "s", "time that it waited for other ranks, in neither of the two"
    ),
    *(
        Metric(f"{phase}_seconds", "s", f"median time of a step in phase {phase}")
        for phase in ("data", "forward", "backward", "communication", "optimizer", "other")
    ),
    *(
        Metric(f"{phase}_floor_seconds", "s", f"what nearly every step takes in phase {phase}")
        for phase in ("data", "forward", "backward", "optimizer")
    ),
    Metric("allocated_bytes", "B", "in tensors on the device; NaN without an accelerator"),
    Metric("reserved_bytes", "B", "held by torch's allocator"),
    Metric("peak_bytes", "B", "most ever in tensors"),
    Metric("fragmentation", "", "share of reserved memory that is free but split off"),
    Metric("retries", "", "times that the allocator emptied its cache"),
    Metric("ooms", "", "times that it found no room"),
    Metric("rss_bytes", "B", "memory of the process on the host"),
    Metric("memory_used_bytes", "B", "device memory in use by anyone; NaN without a driver"),
    Metric("memory_total_bytes", "B", "device memory"),
    Metric("gpu_utilisation", "", "share of time with a kernel running"),
    Metric("power_watts", "W", "power drawn by the board"),
    Metric("power_limit_watts", "W", "power limit in force"),
    Metric("temperature_c", "C", "temperature of the chip"),
    Metric("sm_clock_mhz", "MHz", "clock of the compute units"),
    Metric("ecc_uncorrected", "", "uncorrected memory errors since the driver started"),
    Metric("pcie_replay", "", "PCIe packets sent again since the driver started"),
    Metric("nvlink_errors", "", "NVLink errors since the driver started"),
    Metric("throttle_reasons", "", "bits that say why clocks are held down"),
)
