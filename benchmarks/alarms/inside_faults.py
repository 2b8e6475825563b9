"""Plant a fault inside a model, and see which rule names it, where, and how long before the loss.

    python -m benchmarks.alarms.inside_faults [NAME ...]

The loss shows a fault at the first of three steps in a row whose loss is more than 3 standard
deviations above the mean of a twin without the fault, over the 11 steps around.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import distmon
from benchmarks.alarms.inside_models import Run, byol, language, mlp
from benchmarks.alarms.inside_runs import INSIDE_RULES
from distmon.rules.alert import Alert

STEPS, INTERVAL = 90, 5
Change = Callable[[Any, int], None]
"""Changes a model after a step."""


@dataclass(frozen=True)
class Fault:
    """One planted fault, and what must be said about it."""

    rule: str
    layer: str
    """The layer that the first alert names."""
    planted: int
    """The step after which the model is changed for the first time; 0: wrong from the start."""
    run: Callable[[], Run]
    change: Change | None
    healthy: Callable[[], Run] | None = None
    """The twin, where it is not the same run without the change."""


def alerts_and_losses(
    run: Run, folder: Path, change: Change | None = None, steps: int = STEPS
) -> tuple[list[Alert], list[float]]:
    """Train with everything inside watched; return the alerts about it, and the loss by step."""
    model, optimizer, loss_of = run
    alerts: list[Alert] = []
    losses = []
    settings: dict[str, Any] = {"run_dir": folder, "sinks": [], "interval": INTERVAL}
    with distmon.attach(
        model, optimizer, inside="all", budget=None, on_alert=alerts.append, **settings
    ) as monitor:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            losses.append(float(loss.detach()))
            if change is not None:
                with torch.no_grad():
                    change(model, step)
        record = monitor.last_record
        if record is None or record.faults:
            raise RuntimeError(f"the monitor failed: {record and record.faults}")
    return [alert for alert in alerts if alert.rule in INSIDE_RULES], losses


def loss_shows(losses: Sequence[float], healthy: Sequence[float]) -> int | None:
    """Return the step at which the loss shows the fault."""
    above = []
    for i, loss in enumerate(losses):
        around = healthy[max(0, i - 5) : i + 6]
        above.append(not loss <= statistics.mean(around) + 3 * statistics.stdev(around))
    found = (i + 1 for i in range(len(above) - 2) if all(above[i : i + 3]))
    return next(found, None)


def _kill(model: Any, step: int) -> None:
    if step == 20:
        model[3].bias[:58] = -50.0


def _saturate(model: Any, step: int) -> None:
    if step == 20:
        model[3].weight *= 200


def _sharpen(model: Any, step: int) -> None:
    if step > 15:
        model.blocks[1].attention.qkv.weight[:64] *= 1.15


def _route_to_one(model: Any, step: int) -> None:
    if step > 15:
        bias = model.blocks[1].mlp.gate.bias
        bias[:2] = bias[:2].clamp(min=0) + 5


def _explode(model: Any, step: int) -> None:
    if step > 30:
        model.blocks[1].mlp.down.weight *= 1.3


def _grow(model: Any, step: int) -> None:
    if step > 20:
        weight = model.blocks[2].mlp.down.weight
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        weight += 0.15 * s[0] * torch.outer(u[:, 0], v[0])


def _experts() -> Run:
    return language(moe=True)


FAULTS: Final = {
    "90% dead ReLUs": Fault("dead_units", "4", 20, lambda: mlp(nn.ReLU), _kill),
    "saturated sigmoids": Fault("saturated", "4", 20, lambda: mlp(nn.Sigmoid), _saturate),
    "growing attention logits": Fault(
        "attention_blowup", "blocks.1.attention", 16, language, _sharpen
    ),
    "collapsed router": Fault("router_collapse", "blocks.1.mlp.gate", 16, _experts, _route_to_one),
    "dead experts": Fault("dead_expert", "blocks.1.mlp.gate", 16, _experts, _route_to_one),
    "collapsed representation": Fault(
        "representation_collapse",
        "encoder",
        0,
        lambda: byol(stopped=False),
        None,
        lambda: byol(stopped=True),
    ),
    "growing spectral norm": Fault("spectral_growth", "blocks.2", 21, language, _grow),
    "growing activations": Fault("activation_explosion", "blocks.1", 31, language, _explode),
}


def _train(run: Callable[[], Run], change: Change | None) -> tuple[list[Alert], list[float]]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        return alerts_and_losses(run(), Path(folder) / "run", change)


def main(arguments: Sequence[str]) -> int:
    """Train every fault and its twin, and print a table; exit code 1 when one is not named."""
    print(f"{'fault':26} {'rule':24} {'first layer':24} planted  alert  loss")
    missed = 0
    for name in arguments or FAULTS:
        fault = FAULTS[name]
        alerts, losses = _train(fault.run, fault.change)
        _, healthy = _train(fault.healthy or fault.run, None)
        named = [a for a in alerts if a.rule == fault.rule and a.severity != "info"]
        missed += not named
        layer, at = (named[0].layers[0], str(named[0].step)) if named else ("-", "-")
        shown = loss_shows(losses, healthy) or "never"
        print(f"{name:26} {fault.rule:24} {layer:24} {fault.planted:7} {at:>6} {shown:>5}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
