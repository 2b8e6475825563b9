"""Real load on the machine, planted on purpose: a slow rank, slow data, memory that leaks."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from bad_input import BadInput

if TYPE_CHECKING:
    from arrangement import Arrangement
    from faults import FaultRequest

BURDENS = ("straggler", "slow_data", "memory_leak")
LEAK_BYTES = 8 << 20  # in every step


@dataclass
class Burden:
    """One burden in one run, from a step on.

    `straggler`: the forward pass takes longer on one rank, as on a throttled device.
    `slow_data`: the batch comes late, as from a slow file system.
    `memory_leak`: every step keeps 8 MB that nobody gives back, on one rank.
    """

    kind: str
    at: int
    target: int | None
    """The rank it happens on; None is all of them."""
    here: bool
    seconds: float
    """How much longer it takes."""
    step: int = 0
    kept: list[torch.Tensor] = field(default_factory=list)

    def describe(self) -> str:
        """One line about what is about to happen."""
        where = "all ranks" if self.target is None else f"rank {self.target}"
        return f"injecting {self.kind} on {where} from step {self.at}"

    def before_data(self, step: int) -> None:
        """Called when a step begins, before its batch is there."""
        self.step = step
        if not self._weighs():
            return
        if self.kind == "slow_data":
            time.sleep(self.seconds)
        elif self.kind == "memory_leak":
            self.kept.append(torch.ones(LEAK_BYTES, dtype=torch.uint8))

    def in_forward(self, *_: object) -> None:
        """Called when the model is."""
        if self.kind == "straggler" and self._weighs() and torch.is_grad_enabled():
            time.sleep(self.seconds)

    def _weighs(self) -> bool:
        return self.here and self.step >= self.at


def plan_burden(request: FaultRequest, seconds: float, arrangement: Arrangement) -> Burden:
    """Check a request and put it in place. All ranks come to the same conclusion."""
    world, target = arrangement.ranks.world, request.target
    if request.name is not None:
        raise BadInput(f"--inject {request.kind} is in no parameter; leave --inject-param out")
    if target is not None and target >= world:
        raise BadInput(f"--inject-rank {target} is out of range; ranks are 0 to {world - 1}")
    if target is None and request.kind != "slow_data":
        target = world - 1
    here = target in (None, arrangement.ranks.rank)
    burden = Burden(request.kind, request.at, target, here, seconds)
    arrangement.module.register_forward_pre_hook(burden.in_forward)
    return burden
