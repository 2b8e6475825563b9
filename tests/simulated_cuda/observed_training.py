"""A small model trained with a monitor on any device, for the checks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from small_runs import TIMING_OFF, batch
from torch import nn

import distmon
from distmon import Monitor

MEASURED_TIME = ("performance/", "memory/")
"""Metrics that differ between two runs of the same training."""


class Block(nn.Module):
    """A residual block, so that there is a gradient gain."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.inner(self.norm(x)))


def made_model(where: torch.device | str, blocks: int = 2, dtype: Any = torch.float32) -> nn.Module:
    """Return the same model on any device."""
    torch.manual_seed(0)
    stack = nn.ModuleList([Block(32) for _ in range(blocks)])
    return nn.Sequential(*stack, nn.Linear(32, 8)).to(device=where, dtype=dtype)


def settings(**overrides: Any) -> dict[str, Any]:
    """Return the settings of a monitor that writes files only."""
    folder = Path(tempfile.mkdtemp()) / "run"
    rules = {**TIMING_OFF, **overrides.pop("rules", {})}
    defaults = {"interval": 3, "budget": None, "sinks": ["jsonl"], "backend": "torch"}
    return {"run_dir": folder, "rules": rules, **defaults, **overrides}


Spoil = Callable[[int, nn.Module], None]


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    monitor: Monitor,
    steps: range,
    spoil: Spoil = lambda *_: None,
    report: Callable[[torch.Tensor], dict[str, Any]] = lambda loss: {"loss": loss, "tokens": 16},
    after: Callable[[], None] = lambda: None,
) -> None:
    """Train; `spoil` changes things after backward, `after` runs at the end of each step."""
    where = next(model.parameters()).device
    for step in steps:
        loss = model(batch(step).to(where)).square().mean()
        loss.backward()
        spoil(step, model)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        monitor.step(**report(loss.detach()))
        after()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, **options)


def observe(
    where: torch.device | str, steps: int = 9, spoil: Spoil = lambda *_: None, **overrides: Any
) -> Any:
    """Train with a monitor; return the run that was written."""
    model = made_model(where)
    optimizer, options = adamw(model), settings(**overrides)
    with distmon.attach(model, optimizer, **options) as monitor:
        train(model, [optimizer], monitor, range(1, steps + 1), spoil)
    return distmon.read_run(options["run_dir"])


def comparable(run: Any) -> list[Any]:
    """Return what two runs of the same training must have in common, record by record."""
    return [
        (
            record["step"],
            {k: v for k, v in record["metrics"].items() if not k.startswith(MEASURED_TIME)},
            record.get("nonfinite"),
            record.get("desync"),
        )
        for record in run.records
    ]


def equal(found: Any, expected: Any) -> None:
    """Assert that both are printed alike: NaN equals itself as text."""
    assert str(found) == str(expected), f"\n{found}\n{expected}"
