"""Run folders of any size, written through the real sinks from made-up records."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from csrc_triton.row_layout import BINS, HALF_BINS
from distmon.metrics import PARAM_METRICS
from distmon.record.record import GainTable, ParamTable, Record
from distmon.rules.alert import Alert
from distmon.runs.run_folder import RunFolder
from distmon.sinks.arrow import ArrowSink
from distmon.sinks.jsonl import JsonlSink


def layer_names(count: int) -> tuple[str, ...]:
    kinds = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "norm.bias")
    return tuple(f"blocks.{i // len(kinds)}.{kinds[i % len(kinds)]}" for i in range(count))


def made_up_record(
    step: int, names: tuple[str, ...], interval: int, ranks: int, seed: int, tokens: float = 100
) -> Record:
    count = len(names)
    noise = np.random.default_rng((seed, step))
    columns = {metric.name: np.zeros(count) for metric in PARAM_METRICS}
    decay = math.exp(-step / (200 * interval))
    depth = np.linspace(1.0, 3.0, count)
    columns["update_ratio"] = 1e-3 * depth * decay * np.exp(0.3 * noise.normal(size=count))
    columns["grad_norm"] = 0.1 * decay * np.exp(0.3 * noise.normal(size=count))
    columns["weight_norm"] = 10 * depth
    columns["grad_min"], columns["grad_max"] = np.full(count, -0.1), np.full(count, 0.1)
    for name in ("requires_grad", "in_optimizer", "has_grad", "update_expected"):
        columns[name] += 1
    bins = np.zeros((count, BINS), np.float32)
    bins[:, HALF_BINS - 40] = bins[:, HALF_BINS + 40] = 10
    loss = 2 + 3 * decay
    losses = {s: loss + 0.05 * float(noise.normal()) for s in range(step - interval + 1, step + 1)}
    blocks = tuple(f"blocks.{i}" for i in range(min(48, 1 + count // 5)))
    return Record(
        step=step,
        time=1.7e9 + step,
        world_size=ranks,
        metrics={
            "train/step_loss": losses[step],
            "train/step_loss_ema": loss,
            "train/lr": 1e-3 * decay,
            "monitor/grad_norm": 1.5 * decay,
            "monitor/grad_norm_stderr": 0.05 * decay,
            "monitor/applied_grad_norm": min(1.0, 1.5 * decay),
            "monitor/update_ratio_median": 2e-3 * decay,
            "monitor/update_ratio_max": 8e-3 * decay,
            "monitor/param_norm": 100.0,
            "performance/step_seconds": 0.25,
            "performance/tokens_per_second": 1e5,
            "performance/mfu": 0.41,
            "performance/forward_fraction": 0.3,
            "performance/backward_fraction": 0.6,
            "performance/monitor_fraction": 4e-4,
        },
        params=ParamTable(names, columns, bins),
        ranks={
            "step_seconds": 0.25 + 0.01 * noise.random(ranks),
            "temperature_c": np.full(ranks, 60.0),
            "tokens": np.full(ranks, tokens * interval / ranks),
        },
        mfu_source="6N FLOPs per token over 312 TFLOP/s",
        losses=losses,
        loss_ema=dict.fromkeys(losses, loss),
        gradient_gain=GainTable(blocks, np.full(len(blocks), 1.1), np.ones(len(blocks))),
    )


def write_run(
    path: Path,
    params: int = 20,
    observations: int = 30,
    *,
    names: tuple[str, ...] | None = None,
    interval: int = 10,
    ranks: int = 2,
    alerts: tuple[Alert, ...] = (),
    seed: int = 0,
    tokens: float = 100,
    **config: Any,
) -> Path:
    """Write the folder of a run and return it."""
    names = names or layer_names(params)
    fields = {"shape": [64, 64], "dtype": "float32", "requires_grad": True}
    table = [{"name": name, **fields} for name in names]
    total = observations * interval
    settings = {"interval": interval, "total_steps": total, **config}
    folder = RunFolder.open(path, config=settings, parameters=table)
    folder.begin_attempt(resumed_from=0, world_size=ranks)
    sinks = JsonlSink(folder, clock=lambda: 1.7e9), ArrowSink(folder)
    for step in range(interval, total + 1, interval):
        record = made_up_record(step, names, interval, ranks, seed, tokens)
        for sink in sinks:
            sink.record(record)
    for alert in alerts:
        sinks[0].alert(alert)
    for sink in sinks:
        sink.close()
    return path
