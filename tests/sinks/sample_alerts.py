"""Alerts of a made-up run."""

from __future__ import annotations

from distmon.rules.alert import Alert

NAN = Alert(
    rule="nonfinite",
    severity="critical",
    step=120,
    message="NaN in the gradient.",
    params=tuple(f"blocks.{i}.mlp.weight" for i in range(7)),
    layers=("blocks.0",),
    ranks=(0, 3),
    advice=("Lower the learning rate.", "Look at the data."),
)
FROZEN = Alert("frozen", "warning", 60, "It does not move.")
