"""One faulty run, and the alert that it has to have."""

from __future__ import annotations

from benchmarks.alarms.cases import Case
from benchmarks.alarms.kinds.setup import Fault, Setup
from benchmarks.alarms.scenarios import Expectation

DIVERGES = (
    *("gain_absolute", "gain_drift", "grad_norm_high", "grad_imbalance", "update_ratio_high"),
    *("loss_spike", "loss_divergence", "weight_norm_spike", "nonfinite", "lr_check"),
)
"""Rules that see training get out of hand."""
STARVED = ("not_learning", "update_ratio_low", "update_lost", "lr_zero")
"""Rules that see that nothing is learned."""
LR = ("learning rate",)
"""What the advice of such an alert has to name as the cause."""


def fault_case(
    name: str,
    kind: str,
    make: object,
    fault: Fault,
    rules: tuple[str, ...] | str,
    place: str = "",
    causes: tuple[str, ...] = (),
    steps: int = 300,
    from_step: int = 1,
    within: int = 10**9,
    has_signal: bool = True,
    **options: object,
) -> Case:
    """Return a run with a planted fault, and the alert that has to name it."""

    def build(seed: int) -> Setup:
        setup: Setup = make(seed=seed, **options)  # type: ignore[operator]
        return setup

    wanted = (rules,) if isinstance(rules, str) else rules
    begin = max(from_step, getattr(fault, "at", 0))
    expected = Expectation(wanted, place, (begin, begin + within))
    ranks = 2 if kind.startswith("ddp") else 1
    return Case(name, kind, build, steps, 10, lambda: fault, expected, has_signal, causes, ranks)


def in_bf16(setup: Setup) -> Setup:
    """Return the same with bf16 weights, without float32 copies."""
    import torch

    net, loss = setup.models[0].to(torch.bfloat16), setup.loss
    setup.loss = lambda given: loss(tuple(part.to(torch.bfloat16) for part in given)).float()
    setup.models = [net]
    return setup
