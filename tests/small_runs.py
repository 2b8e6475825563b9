"""A small model trained for real, and a monitor on it that writes to a temporary folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import distmon
from distmon import Monitor, Record


def small_model(seed: int = 0, width: int = 96) -> nn.Module:
    """Three layers, among them parameters larger and smaller than a sample."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, width), nn.GELU(), nn.Linear(width, 64), nn.Linear(64, 8))


def batch(step: int, size: int = 16) -> torch.Tensor:
    """Return the same data for the same step."""
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(1000 + step))


TIMING_OFF = {
    name: {"enabled": False}
    for name in ("throughput_drop", "step_time_jitter", "dataloader_bound", "straggler")
}
"""How long a step takes that takes a millisecond says more about the machine than about the run."""


def about_training(alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The alerts that do not come from a slow or busy machine."""
    return [alert for alert in alerts if alert["rule"] not in TIMING_OFF]


def quiet(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """Monitor settings that write files only, and leave the rules about time out."""
    rules = {**TIMING_OFF, **overrides.pop("rules", {})}
    settings = {"run_dir": tmp_path / "run", "sinks": ["jsonl", "arrow"], "interval": 1}
    settings["budget"] = None  # a busy machine must not stretch the interval
    settings["first_observation"] = 10**6  # only multiples of the interval
    return {**settings, "rules": rules, **overrides}


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    monitor: Monitor,
    steps: range,
    before_optimizer: Callable[[int], None] = lambda _: None,
    check: bool = True,
) -> list[Record]:
    """Train and collect every record; `before_optimizer` may spoil things after backward."""
    records: list[Record] = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        before_optimizer(step)
        if check:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            monitor.check(grad_norm=norm)
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        optimizer.step()
        monitor.step(loss=loss, tokens=16)
        last = monitor.last_record
        if last is not None and (not records or records[-1] is not last):
            records.append(last)
    return records


def observe(
    tmp_path: Path,
    steps: int = 6,
    model: nn.Module | None = None,
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.AdamW(p, lr=1e-3),
    before_optimizer: Callable[[int], None] = lambda _: None,
    **overrides: Any,
) -> list[Record]:
    """Train a small model with a monitor; the records."""
    model = model or small_model()
    optimizer = make(model.parameters())
    with distmon.attach(model, optimizer, **quiet(tmp_path, **overrides)) as monitor:
        return train(model, optimizer, monitor, range(1, steps + 1), before_optimizer)


def alerts_in(folder: Path) -> list[tuple[str, int]]:
    """Rule and step of every alert of the run that `quiet(folder)` made."""
    return [(a["rule"], a["step"]) for a in distmon.read_run(folder / "run").alerts]
