"""Faults without a signal: what would show them is not measured."""

from __future__ import annotations

from benchmarks.alarms.faulty.fault_case import fault_case
from benchmarks.alarms.kinds import faults as f
from benchmarks.alarms.kinds.language import language
from benchmarks.alarms.kinds.reinforcement import policy_gradient
from benchmarks.alarms.kinds.representation import byol
from benchmarks.alarms.kinds.setup import Fault

UNMEASURED = (
    fault_case(
        "byol-collapse",
        "byol",
        byol,
        Fault(),
        ("loss_plateau",),
        has_signal=False,
        momentum=0.0,
        lr=0.05,
    ),
    fault_case(
        "policy-no-exploration",
        "policy-gradient",
        policy_gradient,
        Fault(),
        ("loss_plateau",),
        has_signal=False,
        lr=0.1,
        entropy=0.0,
    ),
    fault_case(
        "moe-one-expert",
        "moe",
        language,
        f.Multiply("*.router.weight", 60.0),
        ("frozen",),
        has_signal=False,
        model="moe",
    ),
)
