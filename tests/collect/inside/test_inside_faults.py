"""Planted faults are named by the right rule at the right layer, and healthy runs by none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from inside_models import HEALTHY, Run, byol, language, mlp
from torch import nn

import distmon
from distmon.rules import activations, attention, experts, spectra
from distmon.rules.alert import Alert

OWN_RULES = {r.name for module in (activations, attention, experts, spectra) for r in module.RULES}
STEPS, INTERVAL = 60, 5


def alerts_of(
    run: Run,
    folder: Path,
    change: Callable[[nn.Module, int], None] | None = None,
    steps: int = STEPS,
) -> list[Alert]:
    """Train with everything inside watched; `change` plants the fault after each step."""
    model, optimizer, loss_of = run
    alerts: list[Alert] = []
    with distmon.attach(
        model,
        optimizer,
        run_dir=folder,
        sinks=[],
        interval=INTERVAL,
        inside="all",
        budget=None,
        on_alert=alerts.append,
    ) as monitor:
        for step in range(1, steps + 1):
            optimizer.zero_grad()
            loss = loss_of(step)
            loss.backward()
            optimizer.step()
            monitor.step(loss=loss)
            if change is not None:
                with torch.no_grad():
                    change(model, step)
        assert monitor.last_record is not None
        assert monitor.last_record.faults == ()
    return [alert for alert in alerts if alert.rule in OWN_RULES]


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_run_has_no_warning(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    alerts = alerts_of(HEALTHY[kind](), tmp_path)
    assert [(a.rule, a.message) for a in alerts if a.severity != "info"] == []


def _kill(model: nn.Module, step: int) -> None:
    if step == 20:
        model[3].bias[:58] = -50.0


def _saturate(model: nn.Module, step: int) -> None:
    if step == 20:
        model[3].weight *= 200


def _sharpen(model: nn.Module, step: int) -> None:
    if step > 15:
        model.blocks[1].attention.qkv.weight[:64] *= 1.15


def _route_to_one(model: nn.Module, step: int) -> None:
    if step > 15:
        bias = model.blocks[1].mlp.gate.bias
        bias[:2] = bias[:2].clamp(min=0) + 5


def _explode(model: nn.Module, step: int) -> None:
    if step > 30:
        model.blocks[1].mlp.down.weight *= 1.3


def _grow(model: nn.Module, step: int) -> None:
    if step > 20:
        weight = model.blocks[2].mlp.down.weight
        u, s, v = torch.linalg.svd(weight, full_matrices=False)
        weight += 0.15 * s[0] * torch.outer(u[:, 0], v[0])


@pytest.mark.parametrize(
    ("rule", "layer", "run", "change"),
    [
        ("dead_units", "4", lambda: mlp(nn.ReLU), _kill),
        ("saturated", "4", lambda: mlp(nn.Sigmoid), _saturate),
        ("attention_blowup", "blocks.1.attention", language, _sharpen),
        ("router_collapse", "blocks.1.mlp.gate", lambda: language(moe=True), _route_to_one),
        ("dead_expert", "blocks.1.mlp.gate", lambda: language(moe=True), _route_to_one),
        ("representation_collapse", "encoder", lambda: byol(stopped=False), None),
        ("spectral_growth", "blocks.2", language, _grow),
        ("activation_explosion", "blocks.1", language, _explode),
    ],
)
def test_a_fault_is_named(
    rule: str,
    layer: str,
    run: Callable[[], Run],
    change: Callable[[nn.Module, int], None] | None,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    alerts = alerts_of(run(), tmp_path, change, steps=90)
    named = [alert for alert in alerts if alert.rule == rule and alert.severity == "warning"]
    assert named, [(a.rule, a.layers, a.message) for a in alerts]
    if rule == "representation_collapse":  # what follows a collapsed layer has collapsed too
        assert {name.partition(".")[0] for a in named for name in a.layers} & {layer, "predictor"}
    else:
        assert named[0].layers[0] == layer
